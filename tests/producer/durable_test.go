package producer_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// K4: after the database was killed and started again, it is known what was seen,
// which epoch is the last, and nothing of what was not committed.
func TestStateSurvivesAKilledDatabase(t *testing.T) {
	t.Parallel()
	for name, d := range map[services.Name]testdb.Driver{services.Postgres: testdb.PGX, testdb.MySQLServer(t): testdb.MySQL} {
		t.Run(string(name), func(t *testing.T) {
			t.Parallel()
			server := services.NewInstance(t, name)
			driver := "pgx"
			if d == testdb.MySQL {
				driver = "mysql"
			}
			db, err := sql.Open(driver, server.Value())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, db.Close()) })
			require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect))
			producer, windows := newProducer(t, db, d, "shop"), newWindows(t, db, d)
			accept := func(stamp ordering.Stamp, want ordering.WindowResult) {
				t.Helper()
				result, err := apply(t.Context(), db, windows, stamp)
				require.NoError(t, err)
				require.Equal(t, want, result, "%+v", stamp)
			}
			accept(number(1, 1), ordering.Accepted)
			accept(number(1, 2), ordering.Accepted)
			accept(number(1, 5), ordering.AcceptedAhead)
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			_, err = windows.ApplyTx(t.Context(), tx, "c", number(1, 3))
			require.NoError(t, err)
			require.NoError(t, server.Kill())
			require.Error(t, tx.Commit())

			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			require.NoError(t, server.Start(ctx))
			for range testdb.PoolSize { // connections that the pool does not know to be dead
				if db.PingContext(ctx) == nil {
					break
				}
			}
			accept(number(1, 2), ordering.Replayed) // this process goes on,
			windows = newWindows(t, db, d)          // and so does another one
			accept(number(1, 5), ordering.Replayed)
			accept(number(1, 3), ordering.Accepted)
			accept(number(1, 4), ordering.Accepted)
			accept(number(1, 6), ordering.Accepted)
			require.NoError(t, producer.Check(ctx))
			require.EqualValues(t, 2, newProducer(t, db, d, "shop").Epoch())
			require.ErrorIs(t, producer.Check(ctx), ordering.ErrReplaced)
		})
	}
}
