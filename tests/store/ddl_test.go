package store_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// DDL commits on MySQL, the claim with it. A handler that fails afterwards must not
// be answered as a duplicate the next time without anybody knowing.
func TestDDLInTheHandlerB08(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.MySQL, testdb.MySQLFoundRows}, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		exec(t, db, "CREATE TABLE effects (name varchar(32))")
		store := newStore(t, db, d)
		planned := errors.New("planned")
		handler := func(ddl string, result error) deduplicator.Work {
			return func(ctx context.Context) ([]deduplicator.Output, error) {
				tx, _ := middleware.Tx(ctx)
				for _, query := range []string{"INSERT INTO effects VALUES ('before')", ddl} {
					if _, err := tx.ExecContext(ctx, query); err != nil {
						return nil, err
					}
				}
				return nil, result
			}
		}
		_, err := store.Process(t.Context(), claimOf("fails"), handler("CREATE TABLE other (id int)", planned))
		require.ErrorIs(t, err, deduplicator.ErrClaimKept)
		require.ErrorIs(t, err, planned)
		require.True(t, middleware.IsPermanent(err), "it is parked")

		// Running it again would make it a duplicate.
		_, err = store.Process(t.Context(), claimOf("lock timeout"), handler("CREATE TABLE third (id int)", &mysql.MySQLError{Number: 1205}))
		require.ErrorIs(t, err, deduplicator.ErrClaimKept)

		// A statement that does not commit changes nothing about a failure.
		_, err = store.Process(t.Context(), claimOf("plain"), handler("DELETE FROM effects", planned))
		require.Equal(t, planned, err)
		result, err := store.Process(t.Context(), claimOf("plain"), handler("DELETE FROM effects", nil))
		require.NoError(t, err)
		require.Equal(t, deduplicator.Processed, result.Outcome)

		// Here all is durable, although not as one.
		result, err = store.Process(t.Context(), claimOf("succeeds"), handler("CREATE TABLE another (id int)", nil))
		require.NoError(t, err)
		require.Equal(t, deduplicator.Processed, result.Outcome)
	})
}

// The same with a handler that has committed by itself: what another transaction did
// to it afterwards is no reason to run it again.
func TestConflictAfterTheHandlersCommit(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		_, err := newStore(t, db, d).Process(t.Context(), claimOf("k"), func(ctx context.Context) ([]deduplicator.Output, error) {
			tx, _ := middleware.Tx(ctx)
			return nil, errors.Join(tx.Commit(), &pgconn.PgError{Code: "40001"})
		})
		require.ErrorIs(t, err, deduplicator.ErrClaimKept)
	})
}

// And with one that panics.
func TestPanicAfterTheHandlersCommit(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		store := newStore(t, db, d)
		recovered := func(key string, commit bool) (value any) {
			defer func() { value = recover() }()
			_, _ = store.Process(t.Context(), claimOf(key), func(ctx context.Context) ([]deduplicator.Output, error) {
				if tx, _ := middleware.Tx(ctx); commit {
					require.NoError(t, tx.Commit())
				}
				panic("planned")
			})
			return nil
		}
		require.Equal(t, "planned", recovered("rolled back", false))
		err, _ := recovered("committed", true).(error)
		require.ErrorIs(t, err, deduplicator.ErrClaimKept)
		require.ErrorContains(t, err, "planned")
		require.Zero(t, db.Stats().InUse)
	})
}

// A deadlock undoes the transaction on the server, and the driver does not know. A
// handler that goes on, fails and hides the error is told so.
func TestIgnoredDeadlock(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.MySQL}, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		exec(t, db, "CREATE TABLE stock (sku int PRIMARY KEY, qty int)")
		exec(t, db, "INSERT INTO stock VALUES (1, 0), (2, 0)")
		store := newStore(t, db, d, deduplicator.WithTxRetries(0))

		// Each has locked its row before it asks for the other's.
		locked := make(chan struct{}, 2)
		both := make(chan struct{})
		ended := make(chan error, 2)
		hidden := errors.New("hides what the database said")
		for mine, theirs := range map[int]int{1: 2, 2: 1} {
			go func() {
				_, err := store.Process(t.Context(), claimOf(fmt.Sprint(mine)), func(ctx context.Context) ([]deduplicator.Output, error) {
					tx, _ := middleware.Tx(ctx)
					if _, err := tx.ExecContext(ctx, "UPDATE stock SET qty = 1 WHERE sku = ?", mine); err != nil {
						return nil, err
					}
					locked <- struct{}{}
					<-both
					if _, err := tx.ExecContext(ctx, "UPDATE stock SET qty = 1 WHERE sku = ?", theirs); err != nil {
						return nil, hidden
					}
					return nil, nil
				})
				ended <- err
			}()
		}
		<-locked
		<-locked
		close(both)
		results := []error{<-ended, <-ended}
		if results[0] == nil {
			results[0], results[1] = results[1], results[0]
		}
		require.ErrorIs(t, results[0], hidden)
		require.ErrorIs(t, results[0], deduplicator.ErrTxEnded)
		require.NoError(t, results[1])
	})
}
