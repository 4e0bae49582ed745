package sidebyside_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	stockamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/rabbitmq"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

// rabbit is a topic of one test, with a connection behind the libraries' back.
type rabbit struct {
	*testing.T
	url   string
	topic string
	raw   *amqp.Connection
}

func setupRabbit(t *testing.T) *rabbit {
	t.Helper()
	r := &rabbit{T: t, url: services.Value(t, services.AMQP), topic: "sidebyside-" + watermill.NewShortUUID()}
	var err error
	r.raw, err = amqp.Dial(r.url)
	require.NoError(t, err)
	t.Cleanup(func() {
		r.with(func(ch *amqp.Channel) {
			_, err := ch.QueueDelete(r.topic, false, false, false) // of watermill-amqp
			require.NoError(t, err)
		})
		rabbitmq.Drop(t, r.url, r.topic, 1, "ours")
		require.NoError(t, r.raw.Close())
	})
	return r
}

func (r *rabbit) with(do func(ch *amqp.Channel)) {
	r.Helper()
	ch, err := r.raw.Channel()
	require.NoError(r, err)
	defer ch.Close() //nolint:errcheck // the connection is closed as well
	do(ch)
}

// quorum is watermill-amqp's configuration for a durable queue, as a quorum queue.
func (r *rabbit) quorum() stockamqp.Config {
	config := stockamqp.NewDurableQueueConfig(r.url)
	config.Queue.Arguments = amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum}
	return config
}

func (r *rabbit) stockSubscribe(config stockamqp.Config, logger watermill.LoggerAdapter) <-chan *message.Message {
	r.Helper()
	sub, err := stockamqp.NewSubscriber(config, logger)
	require.NoError(r, err)
	messages, err := sub.Subscribe(r.Context(), r.topic)
	require.NoError(r, err)
	r.Cleanup(func() { require.NoError(r, sub.Close()) })
	return messages
}

func (r *rabbit) stockPublish(config stockamqp.Config, msg *message.Message) {
	r.Helper()
	config.Publish.ConfirmDelivery = true
	pub, err := stockamqp.NewPublisher(config, watermill.NopLogger{})
	require.NoError(r, err)
	require.NoError(r, pub.Publish(r.topic, msg))
	require.NoError(r, pub.Close())
}

func (r *rabbit) ours() *amqpshard.Broker {
	r.Helper()
	broker, err := amqpshard.Open(r.Context(), amqpshard.Config{URL: r.url, Group: "ours", Shards: 1, Key: ordering.KeyFromMetadata("event_id")}, nil)
	require.NoError(r, err)
	r.Cleanup(func() { require.NoError(r, broker.Close()) })
	return broker
}

func (r *rabbit) oursSubscribe(broker *amqpshard.Broker) <-chan *message.Message {
	r.Helper()
	messages, err := broker.Subscriber().Subscribe(r.Context(), r.topic)
	require.NoError(r, err)
	return messages
}

// failures counts the deliveries that the stock subscriber could not read.
type failures struct {
	watermill.NopLogger
	n       *atomic.Int32
	reached chan struct{} // closed at enough
}

const enough = 15 // under the default delivery limit of RabbitMQ 4, which then drops the message

func (l failures) Error(msg string, _ error, _ watermill.LogFields) {
	if msg == "Processing message failed, sending nack" && l.n.Add(1) == enough {
		close(l.reached)
	}
}

func (l failures) With(watermill.LogFields) watermill.LoggerAdapter { return l }

// One nack on a quorum queue.
func TestNackOnAQuorumQueue(t *testing.T) {
	t.Parallel()
	t.Run("stock", func(t *testing.T) {
		t.Parallel()
		r := setupRabbit(t)
		logger := failures{n: new(atomic.Int32), reached: make(chan struct{})}
		messages := r.stockSubscribe(r.quorum(), logger)
		r.stockPublish(r.quorum(), event("1", "{}"))
		await(t, messages, "first delivery").Nack()
		await(t, logger.reached, "the message loops below the Router")
		select {
		case <-messages:
			require.Fail(t, "stock: delivered again")
		default:
		}
	})
	t.Run("stock with our marshaler", func(t *testing.T) {
		t.Parallel()
		r := setupRabbit(t)
		config := r.quorum()
		config.Marshaler = amqpshard.Marshaler{}
		messages := r.stockSubscribe(config, watermill.NopLogger{})
		r.stockPublish(config, event("1", "{}"))
		redelivered(t, messages)
	})
	t.Run("ours", func(t *testing.T) {
		t.Parallel()
		r := setupRabbit(t)
		broker := r.ours()
		messages := r.oursSubscribe(broker)
		require.NoError(t, broker.Publisher().Publish(r.topic, event("1", "{}")))
		redelivered(t, messages)
	})
}

func redelivered(t *testing.T, messages <-chan *message.Message) {
	t.Helper()
	first := await(t, messages, "first delivery")
	first.Nack()
	second := await(t, messages, "second delivery")
	require.Equal(t, first.UUID, second.UUID)
	require.Equal(t, "1", second.Metadata.Get(amqpshard.DeliveryCountMetadata))
	second.Ack()
}

// The queue is deleted under a consumer.
func TestQueueDeletedUnderTheConsumer(t *testing.T) {
	t.Parallel()
	t.Run("stock", func(t *testing.T) {
		t.Parallel()
		r := setupRabbit(t)
		messages := r.stockSubscribe(r.quorum(), watermill.NopLogger{})
		r.consumed(r.topic)
		r.deleteQueue(r.topic)
		phantom := await(t, messages, "stock: a message that nobody sent")
		require.Empty(t, phantom.UUID)
		require.Empty(t, phantom.Payload)
		phantom.Ack()
	})
	t.Run("ours", func(t *testing.T) {
		t.Parallel()
		r := setupRabbit(t)
		broker := r.ours()
		messages := r.oursSubscribe(broker)
		r.consumed(r.topic + ".ours.000")
		r.deleteQueue(r.topic + ".ours.000")
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		sent := event("1", "{}")
		for broker.Publisher().Publish(r.topic, sent) != nil { // until the queue is there again
			require.NoError(t, ctx.Err())
		}
		got := await(t, messages, "the queue is back")
		require.Equal(t, sent.UUID, got.UUID, "nothing came before it")
		got.Ack()
	})
}

func (r *rabbit) deleteQueue(queue string) {
	r.Helper()
	r.with(func(ch *amqp.Channel) {
		_, err := ch.QueueDelete(queue, false, false, false)
		require.NoError(r, err)
	})
}

// consumed waits until the queue has a consumer.
func (r *rabbit) consumed(queue string) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	r.with(func(ch *amqp.Channel) {
		for {
			state, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
			require.NoError(r, err)
			if state.Consumers > 0 {
				return
			}
			select {
			case <-ticker.C:
			case <-ctx.Done():
				require.FailNow(r, "no consumer on "+queue)
			}
		}
	})
}

// A message is published where no queue is.
func TestPublishIntoNothing(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{amqp.ExchangeFanout, "x-consistent-hash"} {
		t.Run("stock "+kind, func(t *testing.T) {
			t.Parallel()
			r := setupRabbit(t)
			config := stockamqp.NewDurablePubSubConfig(r.url, nil)
			config.Exchange.Type = kind
			config.Publish.Mandatory = true
			r.stockPublish(config, event("1", "{}")) // returns nil: the message is gone
		})
	}
	t.Run("ours", func(t *testing.T) {
		t.Parallel()
		r := setupRabbit(t)
		err := r.ours().Publisher().Publish(r.topic, event("1", "{}"))
		var refused *amqpshard.PublishError
		require.ErrorAs(t, err, &refused)
		t.Log(err)
	})
}
