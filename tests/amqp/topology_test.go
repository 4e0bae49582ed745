package amqp_test

import (
	"context"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

// Kafka's semantics on RabbitMQ: every group gets every message, and in a group
// all messages of a key are in one queue, in order.
func TestEachGroupGetsEachMessageInItsShard(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		shards := func(c *amqpshard.Config) { c.Shards = 4 }
		a, b := f.open("a", shards), f.open("b", shards)
		require.NoError(t, a.Declare(t.Context(), f.topic))
		require.NoError(t, b.Declare(t.Context(), f.topic))
		require.NoError(t, b.Declare(t.Context(), f.topic), "declaring again changes nothing")

		const keys, each = 40, 5
		for n := range each {
			for key := range keys {
				require.NoError(t, a.Publisher().Publish(f.topic, newMessage(string(rune('A'+key)), string(rune('0'+n)))))
			}
		}
		var places [2]map[string]string
		for i, group := range []string{"a", "b"} {
			places[i] = map[string]string{}
			payloads := map[string]string{}
			for _, queue := range f.queues(group, 4) {
				n := f.depth(queue)
				require.Positive(t, n, "each shard has some of %d keys", keys)
				for _, delivery := range f.consumeRaw(queue, n) {
					key := delivery.Headers[ordering.PartitionKeyMetadata].(string)
					if place, ok := places[i][key]; ok {
						require.Equal(t, place, queue, "key %s", key)
					}
					places[i][key] = queue
					payloads[key] += string(delivery.Body)
				}
			}
			require.Len(t, payloads, keys)
			for key, got := range payloads {
				require.Equal(t, "01234", got, "key %s of group %s", key, group)
			}
		}
		for key, queue := range places[0] {
			require.Equal(t, strings.Replace(queue, ".a.", ".b.", 1), places[1][key], "the same shard in both groups")
		}
	})
}

func TestDeclareAtTheSameTime(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		var wg sync.WaitGroup
		errs := make([]error, 4)
		for i := range errs {
			broker := f.open("group")
			wg.Go(func() { errs[i] = broker.Declare(t.Context(), f.topic) })
		}
		wg.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
	})
}

// RabbitMQ 4.0 does not stand two declarations of one quorum queue at once, so a
// group is declared by one process after the other.
func TestOneDeclaresAtATime(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		declared := make(chan error, 1)
		f.with(func(ch *amqp.Channel) {
			lock := f.topic + ".group.lock"
			_, err := ch.QueueDeclare(lock, false, false, true, false, nil)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			require.ErrorIs(t, broker.Declare(ctx, f.topic), context.DeadlineExceeded)
			go func() { declared <- broker.Declare(t.Context(), f.topic) }()
			select {
			case err := <-declared:
				require.Fail(t, "declared while another one did", "%v", err)
			case <-time.After(300 * time.Millisecond):
			}
			_, err = ch.QueueDelete(lock, false, false, false)
			require.NoError(t, err)
		})
		select {
		case err := <-declared:
			require.NoError(t, err)
		case <-time.After(timeout):
			require.Fail(t, "the lock was not taken")
		}
		require.NoError(t, broker.Declare(t.Context(), f.topic), "and is free again")
	})
}

func TestDeclareRefusesOtherSettings(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		t.Run("queue", func(t *testing.T) {
			f := setup(t, on)
			require.NoError(t, f.open("group", func(c *amqpshard.Config) { c.DeliveryLimit = 7 }).Declare(t.Context(), f.topic))
			err := f.open("group").Declare(t.Context(), f.topic)
			var refused *amqpshard.TopologyError
			require.ErrorAs(t, err, &refused)
			require.ErrorIs(t, err, amqpshard.ErrTopology)
			require.Equal(t, f.topic+".group.001", refused.Name)
			require.ErrorContains(t, err, "x-delivery-limit")
			require.ErrorContains(t, err, "'7'")
			require.ErrorContains(t, err, "'50'")
		})
		t.Run("exchange", func(t *testing.T) {
			f := setup(t, on)
			f.with(func(ch *amqp.Channel) {
				require.NoError(t, ch.ExchangeDeclare(f.topic, "direct", true, false, false, false, nil))
			})
			broker := f.open("group")
			for _, err := range []error{
				broker.Declare(t.Context(), f.topic),
				broker.Publisher().Publish(f.topic, newMessage("entity", "")),
			} {
				require.ErrorIs(t, err, amqpshard.ErrTopology)
				require.ErrorContains(t, err, f.topic)
				require.ErrorContains(t, err, "direct")
			}
		})
		t.Run("more shards", func(t *testing.T) {
			f := setup(t, on)
			require.NoError(t, f.open("group").Declare(t.Context(), f.topic))
			broker := f.open("group", func(c *amqpshard.Config) { c.Shards = 5 })
			err := broker.Declare(t.Context(), f.topic)
			require.ErrorIs(t, err, amqpshard.ErrTopology)
			require.ErrorContains(t, err, "has 2 shards")
			require.ErrorContains(t, err, "Shards is 5")
			_, err = broker.Subscriber().Subscribe(t.Context(), f.topic)
			require.ErrorIs(t, err, amqpshard.ErrTopology)
		})
		t.Run("fewer shards", func(t *testing.T) {
			f := setup(t, on)
			require.NoError(t, f.open("group", func(c *amqpshard.Config) { c.Shards = 5 }).Declare(t.Context(), f.topic))
			err := f.open("group").Declare(t.Context(), f.topic)
			require.ErrorIs(t, err, amqpshard.ErrTopology)
			require.ErrorContains(t, err, "has 5 shards")
			require.ErrorContains(t, err, "Shards is 2")
		})
	})
}

// A Declare that stopped halfway is not taken for one of another number of
// shards: the next one completes it.
func TestDeclareCompletesWhatAnotherBegan(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group", func(c *amqpshard.Config) { c.Shards = 3 })
		foreign := f.queues("group", 3)[1]
		f.with(func(ch *amqp.Channel) {
			_, err := ch.QueueDeclare(foreign, true, false, false, false, nil)
			require.NoError(t, err)
		})
		require.ErrorContains(t, broker.Declare(t.Context(), f.topic), foreign)
		f.with(func(ch *amqp.Channel) {
			_, err := ch.QueueDelete(foreign, false, false, false)
			require.NoError(t, err)
		})
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		require.Zero(t, f.depth(f.queues("group", 3)...))
	})
}

func TestInvalidTopic(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		for _, topic := range []string{"", "\xff", "amq.fanout", strings.Repeat("t", 245)} {
			require.ErrorIs(t, broker.Declare(t.Context(), topic), amqpshard.ErrInvalidTopic)
			require.ErrorIs(t, broker.Publisher().Publish(topic, newMessage("entity", "")), amqpshard.ErrInvalidTopic)
			_, err := broker.Subscriber().Subscribe(t.Context(), topic)
			require.ErrorIs(t, err, amqpshard.ErrInvalidTopic)
		}
	})
}

// The error for a missing plugin is recognised by this text.
func TestUnknownExchangeType(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		conn, err := amqp.Dial(f.url)
		require.NoError(t, err)
		defer conn.Close()
		ch, err := conn.Channel()
		require.NoError(t, err)
		err = ch.ExchangeDeclare(f.topic, "x-no-such-type", true, false, false, false, nil)
		require.ErrorContains(t, err, "unknown exchange type")
	})
}

func TestWrongPassword(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		t.Parallel()
		address, err := url.Parse(on.url(t))
		require.NoError(t, err)
		address.User = url.UserPassword("nobody", "swordfish")
		_, err = amqpshard.Open(t.Context(), amqpshard.Config{URL: address.String(), Group: "group"}, nil)
		require.ErrorContains(t, err, address.Host)
		require.NotContains(t, err.Error(), "swordfish")
	})
}

// A broker that stops answering: Declare and Subscribe end with their context.
func TestDeclareEndsWithItsContext(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through)
		for _, call := range []func(context.Context) error{
			func(ctx context.Context) error { return broker.Declare(ctx, f.topic) },
			func(ctx context.Context) error {
				_, err := broker.Subscriber().Subscribe(ctx, f.topic)
				return err
			},
		} {
			p.stall()
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			require.ErrorIs(t, call(ctx), context.DeadlineExceeded)
			cancel()
			p.release()
		}
	})
}
