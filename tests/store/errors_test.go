package store_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// B28: each driver's own error for a row that is locked is known by its code, and
// that for a broken constraint is not taken for one.
func TestErrorClassesB28(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		wait := map[deduplicator.Dialect]string{
			deduplicator.PostgreSQL: "SET LOCAL lock_timeout = '100ms'",
			deduplicator.MySQL:      "SET innodb_lock_wait_timeout = 1",
			deduplicator.SQLite:     "SELECT 1", // its busy timeout is in the DSN
		}[d.Dialect]
		db := testdb.Open(t, d)
		exec(t, db, "CREATE TABLE stock (sku integer PRIMARY KEY, qty integer NOT NULL)")
		exec(t, db, "INSERT INTO stock VALUES (1, 0)")
		update := func(ctx context.Context, before string) (tx *sql.Tx, err error) {
			if tx, err = db.BeginTx(ctx, nil); err != nil { // here if the driver begins immediate
				return nil, err
			}
			if _, err = tx.ExecContext(ctx, before); err == nil {
				_, err = tx.ExecContext(ctx, "UPDATE stock SET qty = qty + 1 WHERE sku = 1")
			}
			return tx, err
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		first, err := update(ctx, "SELECT 1")
		require.NoError(t, err)
		second, err := update(ctx, wait)
		require.Error(t, err)
		if second != nil {
			defer second.Rollback() //nolint:errcheck // nothing to lose
		}
		for _, err := range []error{err, fmt.Errorf("update: %w", err)} {
			require.True(t, sqldb.Transient(err), "%T %v", err, err)
			require.True(t, sqldb.LockTimeout(err), "%T %v", err, err)
		}
		require.NoError(t, first.Commit())
		if second != nil {
			require.NoError(t, second.Rollback())
		}
		_, err = db.ExecContext(ctx, "INSERT INTO stock VALUES (1, 0)")
		require.Error(t, err)
		require.False(t, sqldb.Transient(err), "%T %v", err, err)
		require.False(t, sqldb.LockTimeout(err))
	})
}
