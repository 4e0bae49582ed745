package store_test

import (
	"context"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// What ordering keeps may be opened on another pool of the same database than the
// store: statements that are prepared there are of no use in the store's
// transactions.
func TestTwoPoolsOfOneDatabase(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		database := testdb.Create(t, d)
		db, other := database.Open(t), database.Open(t)
		migrate(t, db, d)
		require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect))
		versions, err := ordering.NewVersions(t.Context(), other, d.Dialect)
		require.NoError(t, err)
		windows, err := ordering.NewWindows(t.Context(), other, d.Dialect)
		require.NoError(t, err)
		sequence, err := ordering.NewSequence(t.Context(), other, d.Dialect)
		require.NoError(t, err)

		store := newStore(t, db, d)
		for n, key := range []string{"a", "b"} {
			seq := int64(n + 1)
			_, err = store.Process(t.Context(), claimOf(key), func(ctx context.Context) ([]deduplicator.Output, error) {
				tx, _ := middleware.Tx(ctx)
				applied, err := versions.ApplyTx(ctx, tx, ordering.Event{Consumer: "c", Entity: "e", Version: seq})
				require.NoError(t, err)
				require.Equal(t, ordering.Applied, applied)
				accepted, err := windows.ApplyTx(ctx, tx, "c", ordering.Stamp{Producer: "p", Epoch: 1, Stream: "s", Sequence: uint64(seq)})
				require.NoError(t, err)
				require.Equal(t, ordering.Accepted, accepted)
				result, err := sequence.ProcessTx(ctx, tx, ordering.SequencedDelivery{
					Event:   ordering.SequencedEvent{Consumer: "c", Entity: "e", Position: ordering.Position{Seq: seq}},
					Message: message.NewMessage(key, nil),
					Handle:  func(*message.Message) error { return nil },
				})
				require.NoError(t, err)
				require.Equal(t, ordering.InOrder, result.Outcome)
				return nil, nil
			})
			require.NoError(t, err)
		}
	})
}
