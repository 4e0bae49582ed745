// Package write_test runs the writes of deduplicator/write on each database and
// driver.
package write_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/write"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// fixture is a database with one table, whose key has two columns and beside which
// there is another unique index.
type fixture struct {
	*testing.T
	ctx    context.Context
	driver testdb.Driver
	db     *sql.DB
	orders *write.Table
}

func forEachDriver(t *testing.T, test func(f fixture)) {
	t.Parallel()
	for _, driver := range testdb.All {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			text, order := "text", `"order"`
			if driver.Dialect == deduplicator.MySQL {
				text, order = "varchar(100) COLLATE utf8mb4_bin", "`order`"
			}
			f := fixture{T: t, ctx: t.Context(), driver: driver, db: testdb.Open(t, driver)}
			// Names that need their quotes.
			_, err := f.db.ExecContext(f.ctx, `CREATE TABLE `+order+` (shop int NOT NULL, id `+text+` NOT NULL, status `+text+`,`+
				` note `+text+`, version bigint, code int UNIQUE, PRIMARY KEY (shop, id))`)
			require.NoError(t, err)
			f.orders, err = write.NewTable(driver.Dialect, "order", "shop", "id")
			require.NoError(t, err)
			test(f)
		})
	}
}

// tx commits what do has done, again when the database undoes it because of others.
func (f fixture) tx(do func(tx *sql.Tx) error) error {
	return sqldb.Retry(f.ctx, 30*time.Second, func() error {
		tx, err := f.db.BeginTx(f.ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
		if err := do(tx); err != nil {
			return err
		}
		return tx.Commit()
	})
}

func (f fixture) insert(row write.Row) (isNew bool) {
	f.Helper()
	require.NoError(f, f.tx(func(tx *sql.Tx) (err error) {
		isNew, err = f.orders.Insert(f.ctx, tx, row)
		return err
	}))
	return isNew
}

func (f fixture) upsert(row write.Row) {
	f.Helper()
	require.NoError(f, f.tx(func(tx *sql.Tx) error { return f.orders.Upsert(f.ctx, tx, row) }))
}

func (f fixture) upsertNewer(row write.Row) error {
	return f.tx(func(tx *sql.Tx) error {
		return ordering.RequireApplied(f.orders.UpsertNewer(f.ctx, tx, row, "version"))
	})
}

func (f fixture) transition(id, from, to string) (result write.TransitionResult) {
	f.Helper()
	require.NoError(f, f.tx(func(tx *sql.Tx) (err error) {
		result, err = f.orders.Transition(f.ctx, tx, write.Row{"id": id, "shop": 1}, "status", from, to)
		return err
	}))
	return result
}

// stored is what the table holds, in the order of the key.
func (f fixture) stored() (rows []string) {
	f.Helper()
	quoted := f.driver.Dialect.Quote("order")
	found, err := f.db.QueryContext(f.ctx, `SELECT shop, id, status, note, version FROM `+quoted+` ORDER BY shop, id`)
	require.NoError(f, err)
	defer found.Close() //nolint:errcheck // Err tells
	for found.Next() {
		var shop, version sql.NullInt64
		var id, status, note sql.NullString
		require.NoError(f, found.Scan(&shop, &id, &status, &note, &version))
		rows = append(rows, fmt.Sprintf("%d %s %s %s %d", shop.Int64, id.String, status.String, note.String, version.Int64))
	}
	require.NoError(f, found.Err())
	return rows
}

func TestInsert(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		row := write.Row{"shop": 1, "id": "7", "status": "placed", "note": "first"}
		require.True(f, f.insert(row))
		for range 3 {
			require.False(f, f.insert(row), "a copy")
		}
		require.False(f, f.insert(write.Row{"shop": 1, "id": "7", "status": "paid", "note": "second"}), "same key, other values")
		require.True(f, f.insert(write.Row{"shop": 2, "id": "7"}), "a part of the key is not the key")
		require.Equal(f, []string{"1 7 placed first 0", "2 7   0"}, f.stored())
	})
}

func TestUpsert(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		for range 3 {
			f.upsert(write.Row{"shop": 1, "id": "7", "status": "placed", "note": "gift"})
			require.Equal(f, []string{"1 7 placed gift 0"}, f.stored())
		}
		for range 3 {
			f.upsert(write.Row{"shop": 1, "id": "7", "status": "paid"})
			require.Equal(f, []string{"1 7 paid gift 0"}, f.stored(), "a column that is not named keeps its value")
		}
		f.upsert(write.Row{"shop": 1, "id": "7", "note": nil})
		f.upsert(write.Row{"shop": 1, "id": "8"})
		f.upsert(write.Row{"shop": 1, "id": "8"})
		require.Equal(f, []string{"1 7 paid  0", "1 8   0"}, f.stored())
	})
}

func TestUpsertNewer(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		// The columns sort on both sides of the version.
		row := func(version int64) write.Row {
			return write.Row{"shop": 1, "id": "7", "note": fmt.Sprint("n", version), "status": fmt.Sprint("s", version), "version": version}
		}
		require.NoError(f, f.upsertNewer(row(9)), "no row yet")
		for _, version := range []int64{9, 9, 8, 0, -1} {
			require.ErrorIs(f, f.upsertNewer(row(version)), ordering.ErrStale, version)
			require.Equal(f, []string{"1 7 s9 n9 9"}, f.stored())
		}
		require.NoError(f, f.upsertNewer(row(10)), "compared as numbers")
		require.NoError(f, f.upsertNewer(row(1<<63-1)))
		require.ErrorIs(f, f.upsertNewer(row(10)), ordering.ErrStale)
		require.Equal(f, []string{"1 7 s9223372036854775807 n9223372036854775807 9223372036854775807"}, f.stored())

		require.True(f, f.insert(write.Row{"shop": 1, "id": "8", "status": "unversioned"}))
		require.ErrorIs(f, f.upsertNewer(write.Row{"shop": 1, "id": "8", "version": 1}), ordering.ErrStale, "a version that is NULL")
	})
}

func TestTransition(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		require.Equal(f, write.OtherState, f.transition("7", "placed", "paid"), "no row")
		f.upsert(write.Row{"shop": 1, "id": "7", "status": "placed"})
		f.upsert(write.Row{"shop": 2, "id": "7", "status": "placed"})
		require.Equal(f, write.Applied, f.transition("7", "placed", "paid"))
		for range 3 {
			require.Equal(f, write.AlreadyThere, f.transition("7", "placed", "paid"), "a copy")
		}
		require.Equal(f, write.Applied, f.transition("7", "paid", "sent"))
		require.Equal(f, write.OtherState, f.transition("7", "placed", "paid"), "a late copy")
		require.Equal(f, write.AlreadyThere, f.transition("7", "sent", "sent"), "from is to")
		require.Equal(f, write.OtherState, f.transition("7", "Sent", "returned"), "states are exact")
		require.Equal(f, []string{"1 7 sent  0", "2 7 placed  0"}, f.stored())
		f.upsert(write.Row{"shop": 1, "id": "7", "status": nil})
		require.Equal(f, write.OtherState, f.transition("7", "placed", "paid"), "a state that is NULL")
	})
}

// States that a column takes for one are one, whatever the driver counts.
func TestTransitionBetweenEqualStates(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		if f.driver.Dialect != deduplicator.MySQL {
			require.Equal(f, write.OtherState, f.transition("7", "a", "A"))
			return
		}
		_, err := f.db.ExecContext(f.ctx, "ALTER TABLE `order` MODIFY status varchar(100) COLLATE utf8mb4_general_ci")
		require.NoError(f, err)
		f.upsert(write.Row{"shop": 1, "id": "7", "status": "PAID"})
		require.Equal(f, write.AlreadyThere, f.transition("7", "paid", "PAID"))
		require.Equal(f, []string{"1 7 PAID  0"}, f.stored())
	})
}

// Data that does not fit is an error, and never adjusted or taken for a copy (B40).
func TestInsertNeverAdjustsB40(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		if f.driver.Dialect != deduplicator.MySQL {
			return // the type text has no width
		}
		long := fmt.Sprintf("%0200d", 1)
		for _, id := range []string{long + "a", long + "b"} {
			require.Error(f, f.tx(func(tx *sql.Tx) error {
				_, err := f.orders.Insert(f.ctx, tx, write.Row{"shop": 1, "id": id})
				return err
			}))
		}
		require.Empty(f, f.stored())
	})
}

// A row that is met by another unique index is not the row: MySQL would take it for
// the one, and report it as there or overwrite it.
func TestOtherUniqueIndex(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		require.True(f, f.insert(write.Row{"shop": 1, "id": "7", "status": "placed", "version": 1, "code": 5}))
		row := write.Row{"shop": 1, "id": "8", "status": "paid", "version": 2, "code": 5}
		for name, do := range map[string]func(tx *sql.Tx) error{
			"Insert": func(tx *sql.Tx) error {
				_, err := f.orders.Insert(f.ctx, tx, row)
				return err
			},
			"Upsert": func(tx *sql.Tx) error { return f.orders.Upsert(f.ctx, tx, row) },
			"UpsertNewer": func(tx *sql.Tx) error {
				_, err := f.orders.UpsertNewer(f.ctx, tx, row, "version")
				return err
			},
		} {
			err := f.tx(do)
			require.Error(f, err, name)
			require.Equal(f, f.driver.Dialect == deduplicator.MySQL, errors.Is(err, write.ErrOtherRow), "%s: %v", name, err)
			require.Equal(f, []string{"1 7 placed  1"}, f.stored(), name)
		}
	})
}

// Twins in transactions of their own at once: one is the first.
func TestTwinsAtOnce(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		const twins = 20
		// all runs do in twins, twice in each as a copy would, and returns what each
		// first call returned.
		all := func(do func(tx *sql.Tx, i int) (any, error)) map[any]int {
			var mu sync.Mutex
			results := make(map[any]int)
			var wg sync.WaitGroup
			for i := range twins {
				wg.Go(func() {
					var first any
					err := f.tx(func(tx *sql.Tx) (err error) {
						if first, err = do(tx, i); err != nil {
							return err
						}
						again, err := do(tx, i)
						if err == nil && (again == true || again == write.Applied || again == "applied") {
							err = fmt.Errorf("a copy was applied after %v", first)
						}
						return err
					})
					if err != nil {
						f.Errorf("twin %d: %v", i, err)
					}
					mu.Lock()
					defer mu.Unlock()
					results[first]++
				})
			}
			wg.Wait()
			return results
		}
		require.Equal(f, map[any]int{true: 1, false: twins - 1}, all(func(tx *sql.Tx, i int) (any, error) {
			return f.orders.Insert(f.ctx, tx, write.Row{"shop": 1, "id": "7", "status": "placed", "version": i})
		}))
		require.Equal(f, map[any]int{write.Applied: 1, write.AlreadyThere: twins - 1}, all(func(tx *sql.Tx, _ int) (any, error) {
			return f.orders.Transition(f.ctx, tx, write.Row{"shop": 1, "id": "7"}, "status", "placed", "paid")
		}))
		all(func(tx *sql.Tx, i int) (any, error) {
			return nil, f.orders.Upsert(f.ctx, tx, write.Row{"shop": 1, "id": "8", "status": "same", "version": -1})
		})
		versions := rand.Perm(twins) //nolint:gosec // any order will do
		results := all(func(tx *sql.Tx, i int) (any, error) {
			err := ordering.RequireApplied(f.orders.UpsertNewer(f.ctx, tx, write.Row{"shop": 1, "id": "8", "note": fmt.Sprint("v", versions[i]), "version": versions[i]}, "version"))
			if errors.Is(err, ordering.ErrStale) {
				return "stale", nil
			}
			return "applied", err
		})
		require.GreaterOrEqual(f, results["applied"], 1, "order %v", versions)
		require.Equal(f, fmt.Sprintf("1 8 same v%d %d", twins-1, twins-1), f.stored()[1], "order %v", versions)
	})
}

// A transaction that has read before others wrote still says what is.
func TestTransitionBehindASnapshot(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		if f.driver == testdb.SQLite3 {
			return // it begins with the write lock, so nobody writes behind its back
		}
		f.upsert(write.Row{"shop": 1, "id": "7", "status": "placed"})
		tx, err := f.db.BeginTx(f.ctx, nil) // on MySQL, repeatable read
		require.NoError(f, err)
		defer tx.Rollback() //nolint:errcheck // it only reads
		var n int
		require.NoError(f, tx.QueryRowContext(f.ctx, "SELECT COUNT(*) FROM "+f.driver.Dialect.Quote("order")).Scan(&n))
		require.Equal(f, write.Applied, f.transition("7", "placed", "paid"))
		result, err := f.orders.Transition(f.ctx, tx, write.Row{"shop": 1, "id": "7"}, "status", "placed", "paid")
		if f.driver.Dialect == deduplicator.SQLite {
			require.True(f, sqldb.Transient(err), "SQLite refuses to write behind a snapshot: %v", err)
			return
		}
		require.NoError(f, err)
		require.Equal(f, write.AlreadyThere, result)
	})
}

// A write that was undone left nothing, so that it applies again.
func TestUndone(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		f.upsert(write.Row{"shop": 1, "id": "7", "status": "placed"})
		planned := errors.New("planned")
		require.ErrorIs(f, f.tx(func(tx *sql.Tx) error {
			result, err := f.orders.Transition(f.ctx, tx, write.Row{"shop": 1, "id": "7"}, "status", "placed", "paid")
			require.NoError(f, err)
			require.Equal(f, write.Applied, result)
			isNew, err := f.orders.Insert(f.ctx, tx, write.Row{"shop": 1, "id": "8"})
			require.NoError(f, err)
			require.True(f, isNew)
			return planned
		}), planned)
		require.Equal(f, []string{"1 7 placed  0"}, f.stored())
		require.Equal(f, write.Applied, f.transition("7", "placed", "paid"))
		require.True(f, f.insert(write.Row{"shop": 1, "id": "8"}))
	})
}

// Values are never part of the statement, and names only if they are plain.
func TestInjection(t *testing.T) {
	forEachDriver(t, func(f fixture) {
		const evil = "x'); DROP TABLE \"order\"; -- ` ? $1 \\"
		require.True(f, f.insert(write.Row{"shop": 1, "id": evil, "status": evil}))
		require.False(f, f.insert(write.Row{"shop": 1, "id": evil}))
		require.Equal(f, write.Applied, f.transition(evil, evil, "paid"))
		require.Equal(f, []string{"1 " + evil + " paid  0"}, f.stored())
	})
}
