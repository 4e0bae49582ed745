package amqp_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/routers"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// B60: without a queue the broker returns the message and then confirms it.
func TestUnroutable(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		t.Run("no group", func(t *testing.T) {
			f := setup(t, on)
			broker := f.open("group")
			first, second := newMessage("a", ""), newMessage("b", "")
			err := broker.Publisher().Publish(f.topic, first, second)
			require.ErrorIs(t, err, amqpshard.ErrUnroutable)
			require.ErrorContains(t, err, f.topic)
			var failed *amqpshard.PublishError
			require.ErrorAs(t, err, &failed)
			require.Equal(t, []string{first.UUID, second.UUID}, failed.Unroutable)
			require.Empty(t, failed.Unconfirmed)
			require.Empty(t, failed.Unsent)

			require.NoError(t, broker.Declare(t.Context(), f.topic))
			require.NoError(t, broker.Publisher().Publish(f.topic, first, second))
			require.Equal(t, 2, f.depth(f.queues("group", 2)...))
		})
		t.Run("group without queues", func(t *testing.T) {
			f := setup(t, on)
			broker := f.open("group")
			require.NoError(t, broker.Declare(t.Context(), f.topic))
			f.with(func(ch *amqp.Channel) {
				for _, queue := range f.queues("group", 2) {
					_, err := ch.QueueDelete(queue, false, false, false)
					require.NoError(t, err)
				}
			})
			err := broker.Publisher().Publish(f.topic, newMessage("a", ""))
			var failed *amqpshard.PublishError
			require.ErrorAs(t, err, &failed)
			require.Len(t, failed.Unconfirmed, 1)
			require.ErrorContains(t, err, "<topic>.<group>.unrouted")
		})
		t.Run("among others", func(t *testing.T) {
			// Publishers of two topics share the channel: each gets its own returns.
			f := setup(t, on)
			broker := f.open("group")
			require.NoError(t, broker.Declare(t.Context(), f.topic))
			nowhere := f.topic + ".nowhere"
			f.Cleanup(func() { f.with(func(ch *amqp.Channel) { _ = ch.ExchangeDelete(nowhere, false, false) }) })
			var wg sync.WaitGroup
			good, bad := make([]error, 50), make([]error, 50)
			for i := range good {
				wg.Go(func() { good[i] = broker.Publisher().Publish(f.topic, newMessage("a", "")) })
				wg.Go(func() { bad[i] = broker.Publisher().Publish(nowhere, newMessage("a", ""), newMessage("a", "")) })
			}
			wg.Wait()
			for i := range good {
				require.NoError(t, good[i])
				var failed *amqpshard.PublishError
				require.ErrorAs(t, bad[i], &failed)
				require.Len(t, failed.Unroutable, 2)
			}
			require.Equal(t, len(good), f.depth(f.queues("group", 2)...))
		})
	})
}

// B60: the broker refuses the messages of a shard without a queue before it has
// stored the others, whose acknowledgement then includes the refused ones' numbers.
// Publish names exactly those.
func TestRefusedAmongOthersB60(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		f.with(func(ch *amqp.Channel) {
			_, err := ch.QueueDelete(f.queues("group", 2)[1], false, false, false)
			require.NoError(t, err)
		})
		const keys = 40
		without := map[string]bool{} // keys of the shard without a queue
		for i := range keys {
			key := strconv.Itoa(i)
			without[key] = broker.Publisher().Publish(f.topic, newMessage(key, "")) != nil
		}
		for range 20 {
			var refused []string
			messages := make([]*message.Message, keys)
			for i := range messages {
				key := strconv.Itoa(i)
				messages[i] = newMessage(key, "")
				if without[key] {
					refused = append(refused, messages[i].UUID)
				}
			}
			var failed *amqpshard.PublishError
			require.ErrorAs(t, broker.Publisher().Publish(f.topic, messages...), &failed)
			require.Equal(t, refused, failed.Unconfirmed)
			require.Less(t, len(refused), keys)
		}
	})
}

// B75, and messages that would close the connection: nothing of the batch is sent.
func TestPublishChecksAllBeforeSending(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		for name, test := range map[string]struct {
			spoil func(*message.Message)
			want  error
		}{
			"no key":         {func(m *message.Message) { m.Metadata.Set("entity", "") }, ordering.ErrInvalidKey},
			"no metadata":    {func(m *message.Message) { m.Metadata = nil }, ordering.ErrInvalidKey},
			"long key":       {func(m *message.Message) { m.Metadata.Set("entity", strings.Repeat("k", 256)) }, ordering.ErrInvalidKey},
			"long name":      {func(m *message.Message) { m.Metadata.Set(strings.Repeat("n", 256), "") }, amqpshard.ErrInvalidMessage},
			"large metadata": {func(m *message.Message) { m.Metadata.Set("reason", strings.Repeat("x", 200_000)) }, amqpshard.ErrInvalidMessage},
			"routing":        {func(m *message.Message) { m.Metadata.Set("BCC", "key") }, amqpshard.ErrInvalidMessage},
		} {
			bad := newMessage("a", "")
			test.spoil(bad)
			err := broker.Publisher().Publish(f.topic, newMessage("a", ""), bad)
			require.ErrorIs(t, err, test.want, name)
			require.ErrorContains(t, err, bad.UUID, name)
			require.ErrorContains(t, err, f.topic, name)
			require.Zero(t, f.depth(f.queues("group", 2)...), name)
		}
	})
}

// The largest metadata that passes the check is taken by the broker, and leaves
// room for what the broker adds when it is nacked and then dead-lettered: without
// that, a delivery exceeds frame_max and ends the connection, again and again.
func TestLargestMetadata(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group", func(c *amqpshard.Config) { c.DeliveryLimit = 1 })
		messages := f.subscribe(broker)
		size := 131072
		for ; ; size-- {
			msg := newMessage("a", "")
			msg.Metadata.Set("big", strings.Repeat("x", size))
			err := broker.Publisher().Publish(f.topic, msg)
			if err == nil {
				break
			}
			require.ErrorIs(t, err, amqpshard.ErrInvalidMessage)
			require.Greater(t, size, 128_000)
		}
		for range 2 {
			msg := f.receive(messages)
			require.Len(t, msg.Metadata.Get("big"), size)
			msg.Nack()
		}
		require.Len(t, f.consumeRaw(f.topic+".group.dead", 1)[0].Headers["big"], size)
	})
}

func TestOrderOfPublishes(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		const publishers, batches, size = 3, 30, 100 // 3,000 messages of each key
		var wg sync.WaitGroup
		errs := make(chan error, publishers)
		for p := range publishers {
			wg.Go(func() {
				for b := range batches {
					var batch []*message.Message
					for i := range size {
						batch = append(batch, newMessage(fmt.Sprint("key ", p), strconv.Itoa(b*size+i)))
					}
					if err := broker.Publisher().Publish(f.topic, batch...); err != nil {
						errs <- err
						return
					}
				}
			})
		}
		wg.Wait()
		close(errs)
		for err := range errs {
			require.NoError(t, err)
		}
		next := map[any]int{}
		for _, queue := range f.queues("group", 2) {
			for _, delivery := range f.consumeRaw(queue, f.depth(queue)) {
				key := delivery.Headers[ordering.PartitionKeyMetadata]
				require.Equal(t, strconv.Itoa(next[key]), string(delivery.Body))
				next[key]++
			}
		}
		require.Len(t, next, publishers)
		for key, n := range next {
			require.Equal(t, batches*size, n, key)
		}
	})
}

// B63: a broker with an alarm does not read. The messages are larger than what
// the sockets buffer, so the write blocks too.
func TestPublishTimeout(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through, func(c *amqpshard.Config) { c.PublishTimeout = time.Second })
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		f.publish(broker, newMessage("a", "before"))

		p.stall()
		var wg sync.WaitGroup
		for name, payload := range map[string]string{"confirm": "small", "write": strings.Repeat("x", 32<<20), "turn": "small"} {
			wg.Go(func() {
				msg := newMessage("a", payload)
				began := time.Now()
				err := broker.Publisher().Publish(f.topic, msg, newMessage("a", ""))
				if !errorIs[*amqpshard.PublishError](err) || time.Since(began) > 10*time.Second {
					t.Errorf("%s: Publish returned %v after %s", name, err, time.Since(began))
				}
			})
		}
		wg.Wait()
		p.release()
		f.publish(broker, newMessage("a", "after"))
	})
}

func TestPublishSaysWhatIsUnconfirmed(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through, func(c *amqpshard.Config) { c.PublishTimeout = time.Second })
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		f.publish(broker, newMessage("a", "before"))
		p.stall()
		msg := newMessage("a", "")
		err := broker.Publisher().Publish(f.topic, msg)
		var failed *amqpshard.PublishError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, []string{msg.UUID}, failed.Unconfirmed)
		require.ErrorContains(t, err, "may or may not be stored")
		require.ErrorContains(t, err, "not confirmed within 1s")

		// The next one can't even connect.
		err = broker.Publisher().Publish(f.topic, msg)
		require.ErrorAs(t, err, &failed)
		require.Equal(t, []string{msg.UUID}, failed.Unsent)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// A full queue makes the broker refuse a message that others may have stored.
func TestPublishRefused(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		ch, err := f.raw.Channel()
		require.NoError(t, err)
		defer ch.Close()
		full, err := ch.QueueDeclare("", false, true, true, false, amqp.Table{
			amqp.QueueMaxLenArg: int32(1), amqp.QueueOverflowArg: amqp.QueueOverflowRejectPublish,
		})
		require.NoError(t, err)
		require.NoError(t, ch.QueueBind(full.Name, "", f.topic, false, nil))
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "")))
		refused := newMessage("a", "")
		err = broker.Publisher().Publish(f.topic, refused)
		var failed *amqpshard.PublishError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, []string{refused.UUID}, failed.Unconfirmed)
		require.ErrorContains(t, err, "basic.nack")
		f.eventuallyDepth(2, f.queues("group", 2)...) // this group has it; RabbitMQ 4 does not wait for that
	})
}

func TestPublishAfterConnectionLoss(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through)
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		for n := range 5 {
			f.publish(broker, newMessage("a", strconv.Itoa(n)))
			p.cut()
		}
		f.publish(broker, newMessage("a", "5"))
	})
}

// The broker closes the channel when the exchange is gone. The next Publish
// declares it again, and finds no group.
func TestPublishAfterExchangeDeleted(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "")))
		f.with(func(ch *amqp.Channel) { require.NoError(t, ch.ExchangeDelete(f.topic, false, false)) })
		err := broker.Publisher().Publish(f.topic, newMessage("a", ""))
		var failed *amqpshard.PublishError
		require.ErrorAs(t, err, &failed)
		require.Len(t, failed.Unconfirmed, 1)
		require.ErrorContains(t, err, "NOT_FOUND")
		require.ErrorIs(t, broker.Publisher().Publish(f.topic, newMessage("a", "")), amqpshard.ErrUnroutable)
	})
}

func TestClosed(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		require.NoError(t, broker.Publisher().Close())
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "")), "Close of the publisher does nothing")
		require.NoError(t, broker.Publisher().Publish(f.topic))
		require.NoError(t, broker.Close())
		require.NoError(t, broker.Close())
		require.ErrorIs(t, broker.Publisher().Publish(f.topic, newMessage("a", "")), amqpshard.ErrClosed)
		require.ErrorIs(t, broker.Declare(t.Context(), f.topic), amqpshard.ErrClosed)
		_, err := broker.Subscriber().Subscribe(t.Context(), f.topic)
		require.ErrorIs(t, err, amqpshard.ErrClosed)
	})
}

// A returned message that AMQP can't carry would come back with its cause for ever, and
// hold up the shard: it is refused before the commit, and the cause is parked.
func TestReturnedMessageIsInvalid(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		db := testdb.Open(t, testdb.SQLite)
		require.NoError(t, deduplicator.Migrate(t.Context(), db, testdb.SQLite.Dialect))
		store, err := deduplicator.NewSQLStore(t.Context(), db, testdb.SQLite.Dialect)
		require.NoError(t, err)
		poison := make(parked, 10)
		chain, err := middleware.Chain(
			middleware.WithPoisonQueue(poison, "poison"),
			middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())),
		)
		require.NoError(t, err)
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		require.NoError(t, err)
		router.AddMiddleware(chain...)
		next := make(chan struct{}, 1)
		router.AddHandler("stock", f.topic, broker.Subscriber(), f.topic, broker.Publisher(), func(msg *message.Message) ([]*message.Message, error) {
			returned := newMessage("a", "returned")
			switch string(msg.Payload) {
			case "frame":
				returned.Metadata.Set("big", strings.Repeat("x", 200_000))
			case "name":
				returned.Metadata.Set(strings.Repeat("x", 300), "")
			default:
				next <- struct{}{}
				return nil, nil
			}
			return []*message.Message{returned}, nil
		})
		routers.Run(t, router)
		f.publish(broker, newMessage("a", "frame"), newMessage("a", "name"), newMessage("a", "next"))
		for _, want := range []string{"frame_max", "255"} {
			select {
			case msg := <-poison:
				require.Contains(t, msg.Metadata.Get(watermillmw.ReasonForPoisonedKey), want)
			case <-time.After(timeout):
				require.Fail(t, "nothing is parked")
			}
		}
		await(t, next, "next message")
	})
}

// parked is a poison queue.
type parked chan *message.Message

func (p parked) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		p <- msg
	}
	return nil
}

func (parked) Close() error { return nil }
