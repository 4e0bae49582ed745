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

// claimTimeout is whole seconds for MySQL and MariaDB, and leaves a loaded machine
// time to commit while a twin waits.
const claimTimeout = 3 * time.Second

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
	// Without the set of known keys, so that every duplicate is the database's.
	for _, d := range testdb.All {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			conforms(t, d, false, deduplicator.WithKnownKeys(0))
		})
	}
	for _, d := range testdb.Servers {
		t.Run(d.Name+" with all options", func(t *testing.T) {
			t.Parallel()
			conforms(t, d, true, deduplicator.WithRetention(retention), deduplicator.WithMaxAttempts(maxAttempts))
		})
	}
	for _, d := range []testdb.Driver{testdb.PGX, testdb.MySQL} { // All has run read committed
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
			t.Run(d.Name+" "+level.String(), func(t *testing.T) {
				t.Parallel()
				conforms(t, d, false, deduplicator.WithKnownKeys(0), deduplicator.WithIsolation(level))
			})
		}
	}
}

// What the store of "with all options" has. The conformance suite needs them to
// leave it room.
const (
	retention   = 2 * time.Hour
	maxAttempts = 150
)

func conforms(t *testing.T, d testdb.Driver, all bool, opts ...deduplicator.Option) {
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
		subject := storetest.SQL(t, db, d.Dialect, newStore(t, db, d, opts...), claimTimeout)
		if all {
			subject.Retention, subject.MaxAttempts = retention, maxAttempts
		}
		return subject
	})
}
