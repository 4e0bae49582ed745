package kafka_test

import (
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/routers"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// A handler that consumes from one Broker and publishes with another gives what it
// returns the partition key of the one that publishes it.
func TestReturnedMessageHasTheKeyOfItsPublisher(t *testing.T) {
	t.Parallel()
	brokers := fake(t).ListenAddrs()
	in, out := config(brokers), config(brokers)
	in.Key, out.Key = ordering.KeyFromMetadata("customer"), ordering.KeyFromMetadata("order")
	from, to, topic, reserved := open(t, in), open(t, out), unique("topic"), unique("reserved")
	require.NoError(t, to.Declare(t.Context(), reserved))

	db := testdb.Open(t, testdb.SQLite)
	require.NoError(t, deduplicator.Migrate(t.Context(), db, testdb.SQLite.Dialect))
	store, err := deduplicator.NewSQLStore(t.Context(), db, testdb.SQLite.Dialect)
	require.NoError(t, err)
	chain, err := middleware.Chain(middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())))
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(chain...)
	router.AddHandler("stock", topic, from.Subscriber(), reserved, to.Publisher(), func(*message.Message) ([]*message.Message, error) {
		returned := message.NewMessage(watermill.NewUUID(), nil)
		returned.Metadata = message.Metadata{"customer": "C-1", "order": "O-1"}
		return []*message.Message{returned}, nil
	})
	routers.Run(t, router)
	require.NoError(t, from.Publisher().Publish(topic, newMessage("C-1", "order")))
	got := take(t, subscribe(t, to, reserved), 1)[0]
	require.Equal(t, "O-1", got.Metadata.Get(ordering.PartitionKeyMetadata))
}

// A returned message that Kafka never takes would come back with its cause for ever,
// and hold up the shard: it is refused before the commit, and the cause is parked.
func TestReturnedMessageIsTooLarge(t *testing.T) {
	t.Parallel()
	broker := open(t, config(fake(t).ListenAddrs()))
	topic, reserved, poison := unique("topic"), unique("reserved"), unique("poison")
	require.NoError(t, broker.Declare(t.Context(), topic, reserved, poison))

	db := testdb.Open(t, testdb.SQLite)
	require.NoError(t, deduplicator.Migrate(t.Context(), db, testdb.SQLite.Dialect))
	store, err := deduplicator.NewSQLStore(t.Context(), db, testdb.SQLite.Dialect)
	require.NoError(t, err)
	chain, err := middleware.Chain(
		middleware.WithPoisonQueue(broker.Publisher(), poison),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())),
	)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(chain...)
	router.AddHandler("stock", topic, broker.Subscriber(), reserved, broker.Publisher(), func(msg *message.Message) ([]*message.Message, error) {
		size := 10
		if string(msg.Payload) == "large" {
			size = 1 << 20
		}
		returned := newMessage("key", strings.Repeat("x", size))
		return []*message.Message{newMessage("key", "small"), returned}, nil
	})
	routers.Run(t, router)
	require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "large"), newMessage("key", "next")))
	parked := take(t, subscribe(t, broker, poison), 1)[0]
	require.Equal(t, "large", string(parked.Payload))
	require.Regexp(t, `too large: .* has \d+ bytes, Producer.MaxMessageBytes is 1048576`, parked.Metadata.Get(watermillmw.ReasonForPoisonedKey))
	require.Equal(t, []string{"small", "xxxxxxxxxx"}, payloads(take(t, subscribe(t, broker, reserved), 2)))
}
