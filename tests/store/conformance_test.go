package store_test

import (
	"database/sql"
	"testing"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/storetest"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

var _ deduplicator.Store = (*deduplicator.SQLStore)(nil)

// claimTimeout is the least that MySQL and MariaDB have.
const claimTimeout = time.Second

func migrate(t *testing.T, db *sql.DB, d testdb.Driver, opts ...deduplicator.Option) {
	t.Helper()
	if err := deduplicator.Migrate(t.Context(), db, d.Dialect, opts...); err != nil {
		t.Fatal(err)
	}
}

func newStore(t *testing.T, db *sql.DB, d testdb.Driver, opts ...deduplicator.Option) *deduplicator.SQLStore {
	t.Helper()
	store, err := deduplicator.NewSQLStore(t.Context(), db, d.Dialect, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func TestConformance(t *testing.T) {
	t.Parallel()
	for _, d := range testdb.All {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			conforms(t, d)
		})
	}
	for _, d := range []testdb.Driver{testdb.PGX, testdb.MySQL} { // All has run read committed
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
			t.Run(d.Name+" "+level.String(), func(t *testing.T) {
				t.Parallel()
				conforms(t, d, deduplicator.WithIsolation(level))
			})
		}
	}
}

func conforms(t *testing.T, d testdb.Driver, opts ...deduplicator.Option) {
	t.Helper()
	opts = append(opts, deduplicator.WithClaimTimeout(claimTimeout))
	shared := testdb.Create(t, d)
	storetest.Test(t, func(t *testing.T) storetest.Subject {
		t.Helper()
		database := shared
		if d.Dialect == deduplicator.SQLite {
			database = testdb.Create(t, d) // it has one writer at a time, so tests would wait for each other
		}
		db := database.Open(t)
		migrate(t, db, d, opts...)
		return storetest.SQL(t, db, d.Dialect, newStore(t, db, d, opts...), claimTimeout)
	})
}
