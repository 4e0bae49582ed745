package amqp_test

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

func errorIs[T error](err error) bool {
	var target T
	return errors.As(err, &target)
}

func TestRoundTrip(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		messages := f.subscribe(broker)
		sent := newMessage("ключ", "payload \x00\xff")
		for field, value := range map[string]string{"empty": "", "unicode": "✓ é", "binary": "\xff\x00", "x-own": "1", "": "no name"} {
			sent.Metadata.Set(field, value)
		}
		require.NoError(t, broker.Publisher().Publish(f.topic, sent))
		got := f.receive(messages)
		require.Equal(t, sent.UUID, got.UUID)
		require.Equal(t, sent.Payload, got.Payload)
		require.Equal(t, "ключ", got.Metadata.Get(ordering.PartitionKeyMetadata))
		require.Equal(t, sent.UUID, got.Metadata.Get(amqpshard.MessageIDMetadata))
		published, err := time.Parse(time.RFC3339, got.Metadata.Get(ordering.PublishedAtMetadata))
		require.NoError(t, err)
		require.WithinDuration(t, time.Now(), published, time.Minute)
		delete(got.Metadata, amqpshard.MessageIDMetadata)
		delete(got.Metadata, ordering.PublishedAtMetadata)
		require.Equal(t, sent.Metadata, got.Metadata)
		require.True(t, got.Ack())
		await(t, got.Context().Done(), "the context ends after the ack")
		require.NoError(t, broker.Close())
		require.Zero(t, f.depth(f.queues("group", 2)...))
	})
}

// B46: a quorum queue adds an integer header to a message that was nacked. It
// comes back before the later messages of its shard.
func TestNack(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		messages := f.subscribe(broker)
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "1"), newMessage("a", "2")))
		for count, want := range []string{"", "1", "2"} {
			msg := f.receive(messages)
			require.Equal(t, "1", string(msg.Payload))
			require.Equal(t, want, msg.Metadata.Get(amqpshard.DeliveryCountMetadata))
			require.Equal(t, count > 0, msg.Metadata.Get(amqpshard.RedeliveredMetadata) == "true")
			if count < 2 {
				msg.Nack()
			} else {
				msg.Ack()
			}
		}
		msg := f.receive(messages)
		require.Equal(t, "2", string(msg.Payload))
		msg.Ack()
	})
}

// B48: at the delivery limit the message is kept, in the dead letter queue.
func TestDeliveryLimit(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group", func(c *amqpshard.Config) { c.DeliveryLimit = 2 })
		messages := f.subscribe(broker)
		bad := newMessage("a", "bad")
		require.NoError(t, broker.Publisher().Publish(f.topic, bad, newMessage("a", "good")))
		for range 3 {
			msg := f.receive(messages)
			require.Equal(t, "bad", string(msg.Payload))
			msg.Nack()
		}
		msg := f.receive(messages)
		require.Equal(t, "good", string(msg.Payload))
		msg.Ack()
		dead := f.consumeRaw(f.topic+".group.dead", 1)[0]
		require.Equal(t, bad.UUID, dead.MessageId)
		require.NotEmpty(t, dead.Headers["x-death"])
	})
}

// B48: RabbitMQ 4 drops a message that was returned 20 times, where nothing else
// is said. Here it is kept, first in its shard, and it is kept among the dead.
func TestReturnedMoreThanTwentyTimes(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group", func(c *amqpshard.Config) { c.Shards, c.DeliveryLimit = 1, 30 })
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "bad"), newMessage("a", "good")))
		nack := func(queue string, times int) {
			f.with(func(ch *amqp.Channel) { // raw, because the subscriber pauses before each return
				require.NoError(t, ch.Qos(1, 0, false))
				deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
				require.NoError(t, err)
				for range times {
					select {
					case delivery := <-deliveries:
						require.Equal(t, "bad", string(delivery.Body))
						require.NoError(t, delivery.Nack(false, true))
					case <-time.After(timeout):
						require.Fail(t, "dropped")
					}
				}
			})
		}
		nack(f.queues("group", 1)[0], 31)
		f.eventuallyDepth(1, f.topic+".group.dead")
		nack(f.topic+".group.dead", 25)
		require.Equal(t, "bad", string(f.consumeRaw(f.topic+".group.dead", 1)[0].Body))
		require.Equal(t, "good", string(f.consumeRaw(f.queues("group", 1)[0], 1)[0].Body))
	})
}

// B47: messages of other programs, with headers of all types, without UUID, and
// with the array that dead-lettering adds.
func TestForeignMessages(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		messages := f.subscribe(broker)
		slot := strconv.Itoa(ordering.Shard("a", amqpshard.SlotCount)) // matters to Slots alone
		f.with(func(ch *amqp.Channel) {
			require.NoError(t, ch.Publish(f.topic, slot, true, false, amqp.Publishing{
				Headers: amqp.Table{
					ordering.PartitionKeyMetadata: "a", "n": int32(1), "null": nil, "yes": true, "float": 1.5,
					"decimal": amqp.Decimal{Scale: 1, Value: 15}, "at": time.Unix(0, 0), "table": amqp.Table{"list": []any{int64(1), "x"}},
				},
				Timestamp: time.Unix(60, 0), Body: []byte("foreign"),
			}))
		})
		msg := f.receive(messages)
		require.Empty(t, msg.UUID)
		require.Equal(t, message.Metadata{
			ordering.PartitionKeyMetadata: "a", "n": "1", "null": "", "yes": "true", "float": "1.5", "decimal": "1.5",
			"at": "1970-01-01T00:00:00Z", "table": `{"list":[1,"x"]}`, ordering.PublishedAtMetadata: "1970-01-01T00:01:00Z",
		}, msg.Metadata)
		msg.Ack()

		f.with(func(ch *amqp.Channel) {
			expiring, err := ch.QueueDeclare("", false, true, true, false, amqp.Table{
				"x-message-ttl": int32(1), "x-dead-letter-exchange": f.topic, "x-dead-letter-routing-key": slot,
			})
			require.NoError(t, err)
			require.NoError(t, ch.Publish("", expiring.Name, true, false, amqp.Publishing{
				Headers: amqp.Table{ordering.PartitionKeyMetadata: "a"}, MessageId: "id", Body: []byte("dead"),
			}))
			msg = f.receive(messages)
		})
		require.Equal(t, "id", msg.UUID)
		require.Contains(t, msg.Metadata.Get("x-death"), `"reason":"expired"`)
		require.NoError(t, broker.Publisher().Publish(f.topic, msg), "forwarding it works")
		msg.Ack()
		msg = f.receive(messages)
		require.Equal(t, "id", msg.UUID)
		require.Empty(t, msg.Metadata.Get("x-death"))
		msg.Ack()
	})
}

// B58: queues are deleted and connections cut. The handler sees what was
// published, nothing else, and the consumer comes back.
func TestNoPhantoms(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through)
		messages := f.subscribe(broker)
		sent := map[string]bool{}
		for n := range 10 {
			want := newMessage("a", strconv.Itoa(n))
			f.publish(broker, want)
			sent[want.UUID] = true
			for {
				msg := f.receive(messages)
				require.True(t, sent[msg.UUID], "a message that was not sent: %q %q", msg.UUID, msg.Payload)
				require.True(t, msg.Ack())
				if msg.UUID == want.UUID {
					break
				}
				require.Equal(t, "true", msg.Metadata.Get(amqpshard.RedeliveredMetadata), "its ack was lost with the connection")
			}
			if n%2 == 0 {
				p.cut()
				continue
			}
			f.eventuallyConsumed(f.queues("group", 2)...)
			f.with(func(ch *amqp.Channel) {
				for _, queue := range f.queues("group", 2) {
					_, err := ch.QueueDelete(queue, false, false, false)
					require.NoError(t, err)
				}
			})
		}
		require.NoError(t, broker.Close())
		f.ends(messages)
	})
}

// B58: all queues of a group are deleted, one after the other, while two instances
// consume. RabbitMQ 3 tells a consumer about it 10 to 30 ms later, and if the queue
// is there again by then it does not: it would deliver to nobody.
func TestDeletedQueuesAreConsumedAgain(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		const shards, total = 6, 60
		brokers := []*amqpshard.Broker{f.open("group", withShards(shards)), f.open("group", withShards(shards))}
		received := make(chan string)
		for _, broker := range brokers {
			messages := f.subscribe(broker)
			go func() {
				for msg := range messages {
					msg.Ack()
					select {
					case received <- msg.UUID:
					case <-t.Context().Done():
					}
				}
			}()
		}
		// Once: a second time, the instance that still repairs the first one would declare
		// a queue again at the moment of its deletion.
		f.eventuallyConsumed(f.queues("group", shards)...)
		f.with(func(ch *amqp.Channel) {
			for _, queue := range f.queues("group", shards) {
				_, err := ch.QueueDelete(queue, false, false, false)
				require.NoError(t, err)
			}
		})
		missing := map[string]bool{}
		for n := range total {
			msg := newMessage(strconv.Itoa(n), "")
			f.publish(brokers[0], msg)
			missing[msg.UUID] = true
		}
		for len(missing) > 0 {
			select {
			case uuid := <-received: // or that of a publish that had no answer
				delete(missing, uuid)
			case <-time.After(timeout):
				require.Failf(t, "not delivered", "%d of %d messages", len(missing), total)
			}
		}
	})
}

// The broker is away for a while, as in a restart. Publish reports it, and both
// sides come back.
func TestBrokerAway(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through, func(c *amqpshard.Config) { c.PublishTimeout = time.Second })
		messages := f.subscribe(broker)
		f.publish(broker, newMessage("a", "before"))
		f.receive(messages).Ack()
		p.setDown(true)
		require.Eventually(t, func() bool {
			err := broker.Publisher().Publish(f.topic, newMessage("a", "lost"))
			var failed *amqpshard.PublishError
			require.ErrorAs(t, err, &failed)
			return len(failed.Unsent) == 1
		}, timeout, time.Millisecond)
		p.setDown(false)
		f.publish(broker, newMessage("a", "after"))
		for {
			msg := f.receive(messages)
			msg.Ack()
			if string(msg.Payload) == "after" {
				break
			}
		}
		p.setDown(true)
		require.NoError(t, broker.Close())
		f.ends(messages)
	})
}

// A broker that is away is one error in the log, not one for each shard and attempt.
func TestLostConnectionIsLoggedOnce(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		const shards = 8
		logger := newLog()
		f.open("group", withShards(shards)) // deletes the topology
		broker, err := amqpshard.Open(t.Context(), amqpshard.Config{URL: p.url, Group: "group", Shards: shards, Routing: f.routing, Key: ordering.KeyFromMetadata("entity")}, logger)
		require.NoError(t, err)
		defer broker.Close()
		f.subscribe(broker)
		f.eventuallyConsumed(f.queues("group", shards)...)
		p.setDown(true)
		require.Eventually(t, func() bool {
			_, repeats := logger.count("interrupted")
			return repeats >= 3*shards
		}, timeout, minPoll)
		lines, _ := logger.count("interrupted")
		require.Contains(t, []int{1, 2, 3, 4}, lines, "%v", logger.all())
		p.setDown(false)
		f.eventuallyConsumed(f.queues("group", shards)...)
	})
}

// The broker cuts the connection while a handler runs: its context ends at once,
// and the message does not come again before it has returned.
func TestConnectionLossDuringHandler(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through)
		messages := f.subscribe(broker)
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "1")))
		first := f.receive(messages)
		require.NoError(t, first.Context().Err())
		p.cut()
		await(t, first.Context().Done(), "the context ends with the connection")
		require.ErrorIs(t, context.Cause(first.Context()), amqpshard.ErrDeliveryLost)
		select {
		case <-messages:
			require.Fail(t, "the message came again while its handler ran")
		case <-time.After(500 * time.Millisecond):
		}
		first.Ack()
		again := f.receive(messages)
		require.Equal(t, first.UUID, again.UUID)
		require.Equal(t, "true", again.Metadata.Get(amqpshard.RedeliveredMetadata))
		again.Ack()
	})
}

// B86 and the hand-over of a single active consumer: when a subscription ends,
// its running handler goes on, its ack counts, and only then another instance
// gets the shard's next message.
func TestDrain(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		for name, end := range map[string]func(*amqpshard.Broker, context.CancelFunc){
			"Broker.Close":     func(b *amqpshard.Broker, _ context.CancelFunc) { _ = b.Close() },
			"Subscriber.Close": func(b *amqpshard.Broker, _ context.CancelFunc) { _ = b.Subscriber().Close() },
			"context":          func(_ *amqpshard.Broker, cancel context.CancelFunc) { cancel() },
		} {
			t.Run(name, func(t *testing.T) {
				f := setup(t, on)
				leaving, staying := f.open("group"), f.open("group")
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				messages, err := leaving.Subscriber().Subscribe(ctx, f.topic)
				require.NoError(t, err)
				require.NoError(t, staying.Publisher().Publish(f.topic, newMessage("a", "1"), newMessage("a", "2")))
				first := f.receive(messages)
				require.Equal(t, "1", string(first.Payload))
				others := f.subscribe(staying)

				ended := make(chan struct{})
				go func() {
					defer close(ended)
					end(leaving, cancel)
				}()
				select {
				case <-messages:
					require.Fail(t, "a message or the end before the handler was done")
				case <-others:
					require.Fail(t, "the other instance got a message of a shard whose handler still runs")
				case <-first.Context().Done():
					require.Fail(t, "the context of a running handler ended")
				case <-time.After(500 * time.Millisecond):
				}
				require.True(t, first.Ack())
				f.ends(messages)
				await(t, ended, "Close returns")
				second := f.receive(others)
				require.Equal(t, "2", string(second.Payload))
				second.Ack()
				require.NoError(t, staying.Close())
				require.Zero(t, f.depth(f.queues("group", 2)...))
			})
		}
	})
}

func TestDrainTimeout(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group", func(c *amqpshard.Config) { c.DrainTimeout = 200 * time.Millisecond })
		messages := f.subscribe(broker)
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "1")))
		stuck := f.receive(messages)
		require.NoError(t, broker.Close())
		await(t, stuck.Context().Done(), "the context ends at the drain deadline")
		require.ErrorIs(t, context.Cause(stuck.Context()), amqpshard.ErrDrainTimeout)
		f.ends(messages)

		again := f.receive(f.subscribe(f.open("group")))
		require.Equal(t, stuck.UUID, again.UUID)
		again.Ack()
	})
}

// A broker that stops answering does not hold up Close.
func TestCloseWithoutAnswer(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		p := f.newProxy()
		broker := f.open("group", p.through, func(c *amqpshard.Config) { c.DrainTimeout = 100 * time.Millisecond })
		messages := f.subscribe(broker)
		f.publish(broker, newMessage("a", "1"))
		f.receive(messages).Ack()
		p.stall()
		began := time.Now()
		require.NoError(t, broker.Close())
		require.Less(t, time.Since(began), 13*time.Second) // twice 5s
		f.ends(messages)
		p.release()
	})
}

func TestSubscribeTwice(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		messages, err := broker.Subscriber().Subscribe(ctx, f.topic)
		require.NoError(t, err)
		_, err = broker.Subscriber().Subscribe(ctx, f.topic)
		require.ErrorIs(t, err, amqpshard.ErrAlreadySubscribed)
		require.ErrorContains(t, err, "two groups")
		cancel()
		f.ends(messages)
		require.Eventually(t, func() bool {
			_, err = broker.Subscriber().Subscribe(t.Context(), f.topic)
			return err == nil
		}, timeout, time.Millisecond)
	})
}

func TestSubscribeFails(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := broker.Subscriber().Subscribe(ctx, f.topic)
		require.ErrorIs(t, err, context.Canceled)
		f.subscribe(broker) // the failed one is forgotten
	})
}

// A Router with a handler that publishes: everything that goes in comes out, and
// closing the Router leaves nothing unacknowledged.
func TestRouter(t *testing.T) {
	onEach(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		out := f.topic + ".out"
		f.Cleanup(func() {
			f.with(func(ch *amqp.Channel) { _ = ch.ExchangeDelete(out, false, false) })
			f.drop(out, "group", 2)
		})
		require.NoError(t, broker.Declare(t.Context(), f.topic, out))
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		require.NoError(t, err)
		var handled atomic.Int32
		done := make(chan struct{})
		const total = 50
		router.AddHandler("copy", f.topic, broker.Subscriber(), out, broker.Publisher(), func(msg *message.Message) ([]*message.Message, error) {
			if handled.Add(1) == total+1 {
				close(done)
			}
			if string(msg.Payload) == "7" && msg.Metadata.Get(amqpshard.DeliveryCountMetadata) == "" {
				return nil, errors.New("once")
			}
			return message.Messages{msg.Copy()}, nil
		})
		running := make(chan error, 1)
		go func() { running <- router.Run(t.Context()) }()
		await(t, router.Running(), "the router runs")
		var batch []*message.Message
		for n := range total {
			batch = append(batch, newMessage(strconv.Itoa(n%5), strconv.Itoa(n)))
		}
		require.NoError(t, broker.Publisher().Publish(f.topic, batch...))
		await(t, done, "all are handled")
		require.NoError(t, router.Close())
		require.NoError(t, <-running)
		require.NoError(t, broker.Close())
		require.Zero(t, f.depth(f.queues("group", 2)...))
		require.Equal(t, total, f.depth(out+".group.000", out+".group.001"))
	})
}
