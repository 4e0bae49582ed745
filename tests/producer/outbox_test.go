package producer_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/outbox"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// K5: numbers are stored with the rows of an outbox, so that whatever a forwarder
// sends again has the number that it had.
func TestOutboxRowsHaveNumbers(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.MySQL}, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		box, err := outbox.New(d.Dialect, outbox.WithPollInterval(10*time.Millisecond))
		require.NoError(t, err)
		require.NoError(t, box.Migrate(t.Context(), db))
		producer := newProducer(t, db, d, "shop")
		messages := []*message.Message{newMessage("a", "1"), newMessage("b", "2"), newMessage("a", "3")}
		require.NoError(t, inTx(t.Context(), db, nil, func(tx *sql.Tx) error {
			for _, msg := range messages {
				msg.SetContext(deduplicator.ContextWithTx(t.Context(), tx))
			}
			return producer.Publisher(box, nil).Publish("orders", messages...)
		}))

		r := &recorder{}
		forwarder, err := box.Forwarder(db, r, watermill.NopLogger{})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- forwarder.Run(ctx) }()
		for deadline := time.Now().Add(patience); r.count() < len(messages) && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		}
		cancel()
		require.NoError(t, <-done)
		require.Len(t, r.sent, len(messages))
		for i, msg := range r.sent {
			require.Equal(t, stampOf(t, messages[i]), stampOf(t, msg))
		}
		require.EqualValues(t, 2, stampOf(t, r.sent[2]).Sequence)
	})
}

// A process whose producer was replaced gives messages back for its successor,
// instead of parking what is not to blame.
func TestReplacedProcessGivesMessagesBack(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	producer := newProducer(t, db, testdb.SQLite, "stock")
	newProducer(t, db, testdb.SQLite, "stock")
	require.ErrorIs(t, producer.Check(t.Context()), ordering.ErrReplaced)

	require.NoError(t, deduplicator.Migrate(t.Context(), db, deduplicator.SQLite))
	store, err := deduplicator.NewSQLStore(t.Context(), db, deduplicator.SQLite)
	require.NoError(t, err)
	poison, outcomes := &recorder{}, make(chan middleware.Outcome, 10)
	chain, err := middleware.Chain(
		middleware.WithObserver(func(_ context.Context, e middleware.Event) { outcomes <- e.Outcome }),
		middleware.WithPoisonQueue(poison, "poison"),
		middleware.Deduplicate(store, middleware.WithKey(byEventID()), middleware.WithConsumer("stock")),
		middleware.Stamp(producer),
	)
	require.NoError(t, err)
	handler := func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{newMessage("s", "reserved")}, nil
	}
	msg := event("a", "1")
	msg.SetContext(t.Context())
	h := message.HandlerFunc(handler)
	for i := len(chain) - 1; i >= 0; i-- {
		h = chain[i](h)
	}
	_, err = h(msg)
	require.ErrorIs(t, err, ordering.ErrReplaced)
	require.Equal(t, middleware.Failed, <-outcomes)
	require.Empty(t, poison.sent)
}
