package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func openVersions(t *testing.T, d testdb.Driver) (*sql.DB, *ordering.Versions) {
	t.Helper()
	db := testdb.Open(t, d)
	require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect))
	versions, err := ordering.NewVersions(t.Context(), db, d.Dialect)
	require.NoError(t, err)
	return db, versions
}

// inTx commits when work returns nil.
func inTx(t *testing.T, db *sql.DB, opts *sql.TxOptions, work func(*sql.Tx) error) error {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), opts)
	require.NoError(t, err)
	defer tx.Rollback()
	if err := work(tx); err != nil {
		return err
	}
	return tx.Commit()
}

func apply(t *testing.T, db *sql.DB, versions *ordering.Versions, event ordering.Event) (result ordering.VersionResult) {
	t.Helper()
	require.NoError(t, inTx(t, db, nil, func(tx *sql.Tx) (err error) {
		result, err = versions.ApplyTx(t.Context(), tx, event)
		return err
	}))
	return result
}

// B82: newest wins; what was seen and what is older is stale, and gaps are fine.
func TestVersionsB82(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, versions := openVersions(t, d)
		db.SetMaxOpenConns(1) // the mark of a stale version must not outlive its statement
		for i, tt := range []struct {
			version int64
			want    ordering.VersionResult
		}{
			{0, ordering.Applied}, // 0 as the first
			{0, ordering.Stale},
			{3, ordering.Applied},
			{3, ordering.Stale},
			{5, ordering.Applied}, // 5 before 4
			{4, ordering.Stale},
			{4, ordering.Stale},
			{9, ordering.Applied},
			{10, ordering.Applied}, // as numbers
			{999, ordering.Applied},
			{1000, ordering.Applied},
			{1 << 32, ordering.Applied},
			{math.MaxInt64 - 1, ordering.Applied},
			{math.MaxInt64, ordering.Applied},
			{math.MaxInt64, ordering.Stale},
			{1, ordering.Stale},
		} {
			got := apply(t, db, versions, ordering.Event{Consumer: "c", Entity: "e", Version: tt.version})
			require.Equal(t, tt.want, got, "step %d, version %d", i, tt.version)
			// An insert on the connection that has just seen a stale version.
			fresh := ordering.Event{Consumer: "c", Entity: fmt.Sprint("fresh ", i), Version: 1}
			require.Equal(t, ordering.Applied, apply(t, db, versions, fresh))
		}
		for _, version := range []int64{-1, math.MinInt64} {
			err := inTx(t, db, nil, func(tx *sql.Tx) error {
				_, err := versions.ApplyTx(t.Context(), tx, ordering.Event{Consumer: "c", Entity: "e", Version: version})
				return err
			})
			require.ErrorIs(t, err, ordering.ErrInvalidVersion)
		}
		require.Equal(t, ordering.Applied, apply(t, db, versions, ordering.Event{Consumer: "c2", Entity: "e", Version: 1}), "another consumer")
	})
}

func TestVersionsAreUndoneByRollback(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, versions := openVersions(t, d)
		planned := errors.New("planned")
		for _, version := range []int64{2, 7} { // an insert, an update
			event := ordering.Event{Consumer: "c", Entity: "e", Version: version}
			err := inTx(t, db, nil, func(tx *sql.Tx) error {
				result, err := versions.ApplyTx(t.Context(), tx, event)
				require.NoError(t, err)
				require.Equal(t, ordering.Applied, result)
				return planned
			})
			require.Equal(t, planned, err)
			event.Version-- // would be stale if the rollback had left the version
			require.Equal(t, ordering.Applied, apply(t, db, versions, event))
			event.Version++
			require.Equal(t, ordering.Applied, apply(t, db, versions, event))
			require.Equal(t, ordering.Stale, apply(t, db, versions, event))
		}
	})
}

func TestVersionWithOtherContentIsAConflict(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, versions := openVersions(t, d)
		event := func(version int64, fingerprint string) ordering.Event {
			e := ordering.Event{Consumer: "c", Entity: "e", Version: version}
			if fingerprint != "" {
				e.Fingerprint = []byte(fingerprint)
			}
			return e
		}
		conflicts := func(e ordering.Event) {
			t.Helper()
			err := inTx(t, db, nil, func(tx *sql.Tx) error {
				_, err := versions.ApplyTx(t.Context(), tx, e)
				return err
			})
			var conflict *ordering.VersionConflictError
			require.ErrorAs(t, err, &conflict)
			require.ErrorIs(t, err, ordering.ErrVersionConflict)
			require.Equal(t, ordering.VersionConflictError{Consumer: "c", Entity: "e", Version: e.Version}, *conflict)
		}
		require.Equal(t, ordering.Applied, apply(t, db, versions, event(1, "one\x00\xff")))
		require.Equal(t, ordering.Stale, apply(t, db, versions, event(1, "one\x00\xff")))
		require.Equal(t, ordering.Stale, apply(t, db, versions, event(1, "")))
		conflicts(event(1, "two"))
		require.Equal(t, ordering.Applied, apply(t, db, versions, event(2, "two")))
		require.Equal(t, ordering.Stale, apply(t, db, versions, event(1, "other")), "an older version is not compared")
		conflicts(event(2, "one\x00\xff"))
		require.Equal(t, ordering.Stale, apply(t, db, versions, event(2, "two")), "the conflict changed nothing")
		require.Equal(t, ordering.Applied, apply(t, db, versions, event(3, "")))
		require.Equal(t, ordering.Stale, apply(t, db, versions, event(3, "two")), "nothing to compare with")
	})
}

func TestVersionsOfEntitiesAreExact(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, versions := openVersions(t, d)
		long := strings.Repeat("e", 4999)
		entities := []string{
			"a", "A", "á", "a\u0301", "a ", " a", "a\t", "a\x00", "a\x00b", "\xff", "\xfe", "\ufffd",
			"1", "01", long[:255], long[:256], long + "1", long + "2", sqldb.EncodeKey(long + "1"),
		}
		for pass, want := range []ordering.VersionResult{ordering.Applied, ordering.Stale} {
			for _, entity := range entities {
				require.Equal(t, want, apply(t, db, versions, ordering.Event{Consumer: "c", Entity: entity, Version: 1}), "pass %d, %.40q", pass, entity)
				require.Equal(t, want, apply(t, db, versions, ordering.Event{Consumer: entity, Entity: "e", Version: 1}), "pass %d, consumer %.40q", pass, entity)
			}
		}
	})
}

// Events of one entity come to many workers in any order: what is applied only
// rises, and the highest version is the last.
func TestVersionsAtOnceOnlyRise(t *testing.T) {
	t.Parallel()
	rise := func(t *testing.T, d testdb.Driver, opts ...deduplicator.Option) {
		t.Helper()
		db, versions := openVersions(t, d)
		migrate(t, db, d)
		exec(t, db, "CREATE TABLE applied (n integer PRIMARY KEY, version bigint NOT NULL)")
		store := newStore(t, db, d, opts...)
		record := d.Dialect.Rebind("INSERT INTO applied SELECT COALESCE(MAX(n), 0) + 1, ? FROM applied")
		const workers, messages = 6, 20
		done := make(chan error, workers)
		for w := range workers {
			go func() {
				for m := range messages {
					version := 1 + rand.Int64N(workers*messages)
					if m == messages/2 && w == 0 {
						version = workers*messages + 1
					}
					for attempt := 1; ; attempt++ {
						_, err := store.Process(t.Context(), claimOf(fmt.Sprint(w, m)), func(ctx context.Context) ([]deduplicator.Output, error) {
							tx, _ := middleware.Tx(ctx)
							result, err := versions.ApplyTx(ctx, tx, ordering.Event{Consumer: "c", Entity: "e", Version: version})
							if err != nil || result == ordering.Stale {
								return nil, err
							}
							_, err = tx.ExecContext(ctx, record, version)
							return nil, err
						})
						if err == nil {
							break
						}
						if attempt == 5 {
							done <- err
							return
						}
					}
				}
				done <- nil
			}()
		}
		for range workers {
			require.NoError(t, <-done)
		}
		rows, err := db.QueryContext(t.Context(), "SELECT version FROM applied ORDER BY n")
		require.NoError(t, err)
		defer rows.Close()
		last := int64(-1)
		for rows.Next() {
			var version int64
			require.NoError(t, rows.Scan(&version))
			require.Greater(t, version, last)
			last = version
		}
		require.NoError(t, rows.Err())
		require.EqualValues(t, workers*messages+1, last)
	}
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) { rise(t, d) })
	eachLevel(t, func(t *testing.T, d testdb.Driver, level sql.IsolationLevel) {
		if level != sql.LevelReadCommitted { // each driver has run it
			rise(t, d, deduplicator.WithIsolation(level))
		}
	})
}

// B34: a transaction at repeatable read whose snapshot is older than the
// entity's row. The write meets the row, a plain read would not see it.
func TestVersionsBehindTheSnapshotB34(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.MySQL, testdb.MySQLFoundRows}, func(t *testing.T, d testdb.Driver) {
		db, versions := openVersions(t, d)
		event := ordering.Event{Consumer: "c", Entity: "e", Version: 5, Fingerprint: []byte("one")}
		err := inTx(t, db, &sql.TxOptions{Isolation: sql.LevelRepeatableRead}, func(tx *sql.Tx) error {
			var n int
			require.NoError(t, tx.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM entity_versions").Scan(&n))
			require.Equal(t, ordering.Applied, apply(t, db, versions, event))
			result, err := versions.ApplyTx(t.Context(), tx, event)
			if sqldb.Transient(err) {
				return nil // innodb_snapshot_isolation refuses it: fine as well
			}
			require.NoError(t, err)
			require.Equal(t, ordering.Stale, result)
			other := event
			other.Fingerprint = []byte("two")
			_, err = versions.ApplyTx(t.Context(), tx, other)
			require.ErrorIs(t, err, ordering.ErrVersionConflict)
			return nil
		})
		require.NoError(t, err)
	})
}

// R8: the handler's own table keeps the version.
func TestRequireApplied(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		exec(t, db, "CREATE TABLE orders (id integer PRIMARY KEY, status varchar(20) NOT NULL, versi bigint NOT NULL)")
		exec(t, db, "INSERT INTO orders VALUES (1, 'new', -1)")
		update := func(id int, status string, version int64) error {
			return inTx(t, db, nil, func(tx *sql.Tx) error {
				if d.Dialect == deduplicator.PostgreSQL {
					return ordering.RequireApplied(tx.ExecContext(t.Context(),
						`UPDATE orders SET status = $2, versi = $3 WHERE id = $1 AND versi < $3`, id, status, version))
				}
				return ordering.RequireApplied(tx.ExecContext(t.Context(),
					`UPDATE orders SET status = ?, versi = ? WHERE id = ? AND versi < ?`, status, version, id, version))
			})
		}
		require.NoError(t, update(1, "paid", 0))
		require.NoError(t, update(1, "paid", 2)) // the same status is an update too
		require.ErrorIs(t, update(1, "late", 1), ordering.ErrStale)
		require.ErrorIs(t, update(1, "paid", 2), ordering.ErrStale)
		require.NoError(t, update(1, "sent", math.MaxInt64))
		require.ErrorIs(t, update(1, "late", math.MaxInt64), ordering.ErrStale)
		require.ErrorIs(t, update(2, "nobody", 1), ordering.ErrStale)
		var status string
		require.NoError(t, db.QueryRowContext(t.Context(), "SELECT status FROM orders WHERE id = 1").Scan(&status))
		require.Equal(t, "sent", status)

		cause := errors.New("statement failed")
		require.Equal(t, cause, ordering.RequireApplied(nil, cause))
	})
}
