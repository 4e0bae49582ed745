package kafka_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
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
	done := make(chan error, 1)
	go func() { done <- router.Run(t.Context()) }()
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-done)
	})
	require.NoError(t, from.Publisher().Publish(topic, newMessage("C-1", "order")))
	got := take(t, subscribe(t, to, reserved), 1)[0]
	require.Equal(t, "O-1", got.Metadata.Get(ordering.PartitionKeyMetadata))
}
