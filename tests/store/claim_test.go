package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

var levels = []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}

// eachLevel runs test on PostgreSQL and MariaDB at each isolation level.
func eachLevel(t *testing.T, test func(t *testing.T, d testdb.Driver, level sql.IsolationLevel)) {
	t.Helper()
	for _, d := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		for _, level := range levels {
			t.Run(d.Name+" "+level.String(), func(t *testing.T) {
				t.Parallel()
				test(t, d, level)
			})
		}
	}
}

func claimOf(key string) deduplicator.Claim { return deduplicator.Claim{Consumer: "c", Key: key} }

// noWork is the work of a claim that must not be new.
func noWork(t *testing.T) deduplicator.Work {
	return func(context.Context) ([]deduplicator.Output, error) {
		t.Error("the work was called")
		return nil, nil
	}
}

// What bounds the wait for a twin, on MySQL a setting of the session, must not bound
// the handler's own waits.
func TestClaimTimeoutIsNotTheHandlers(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL, testdb.MySQLFoundRows}, func(t *testing.T, d testdb.Driver) {
		set, show := "SET lock_timeout = '%ds'", "SELECT current_setting('lock_timeout')"
		value := func(seconds int) string { return fmt.Sprintf("%ds", seconds) }
		if d.Dialect == deduplicator.MySQL {
			set, show = "SET innodb_lock_wait_timeout = %d", "SELECT @@innodb_lock_wait_timeout"
			value = func(seconds int) string { return fmt.Sprint(seconds) }
		}
		database := testdb.Create(t, d)
		db, other := database.Open(t), database.Open(t)
		db.SetMaxOpenConns(1) // so that every transaction is in the session that is looked at
		migrate(t, db, d)
		opts := []deduplicator.Option{deduplicator.WithClaimTimeout(2 * time.Second), deduplicator.WithKnownKeys(0)}
		store, twin := newStore(t, db, d, opts...), newStore(t, other, d, opts...)

		for _, seconds := range []int{7, 3601} {
			exec(t, db, fmt.Sprintf(set, seconds))
			is := func(q interface {
				QueryRowContext(context.Context, string, ...any) *sql.Row
			}, where string,
			) {
				var got string
				require.NoError(t, q.QueryRowContext(t.Context(), show).Scan(&got))
				require.Equal(t, value(seconds), got, where)
			}
			claim := claimOf(fmt.Sprint(seconds))
			for _, fail := range []error{errors.New("planned"), nil} {
				_, err := store.Process(t.Context(), claim, func(ctx context.Context) ([]deduplicator.Output, error) {
					tx, _ := middleware.Tx(ctx)
					is(tx, "in the handler")
					return nil, fail
				})
				require.Equal(t, fail, err)
				is(db, "after a new key")
			}
			result, err := store.Process(t.Context(), claim, noWork(t))
			require.NoError(t, err)
			require.Equal(t, deduplicator.Duplicate, result.Outcome)
			is(db, "after a duplicate")
		}
		_, err := twin.Process(t.Context(), claimOf("held"), func(context.Context) ([]deduplicator.Output, error) {
			_, err := store.Process(t.Context(), claimOf("held"), noWork(t))
			require.ErrorIs(t, err, deduplicator.ErrInFlight)
			return nil, nil
		})
		require.NoError(t, err)
		if testdb.IsMariaDB(t, d) { // elsewhere the session has ended with the wait
			var got string
			require.NoError(t, db.QueryRowContext(t.Context(), show).Scan(&got))
			require.Equal(t, value(3601), got, "after a timeout")
		}
		result, err := store.Process(t.Context(), claimOf("next"), func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
		require.NoError(t, err, "the pool's only connection is free, or replaced")
		require.Equal(t, deduplicator.Processed, result.Outcome)
	})
}

// Where the connections come with a limit of the server's own, that one ends the wait
// for a twin, and the connection stays.
func TestServerEndsTheWait(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL}, func(t *testing.T, d testdb.Driver) {
		setting, value := "lock_timeout", "1000"
		if d.Dialect == deduplicator.MySQL {
			setting, value = "innodb_lock_wait_timeout", "1"
		}
		db := testdb.Create(t, d).With(t, setting, value).Open(t)
		migrate(t, db, d)
		store := newStore(t, db, d, deduplicator.WithClaimTimeout(time.Second))
		_, err := store.Process(t.Context(), claimOf("held"), func(context.Context) ([]deduplicator.Output, error) {
			open := db.Stats().OpenConnections
			_, err := store.Process(t.Context(), claimOf("held"), noWork(t))
			require.ErrorIs(t, err, deduplicator.ErrInFlight)
			require.Equal(t, max(open, 2), db.Stats().OpenConnections)
			return nil, nil
		})
		require.NoError(t, err)
	})
}

// Claims of other keys, new and known, go on while one is held; a gap lock would
// stop its neighbours.
func TestClaimsDoNotWaitForTheirNeighbours(t *testing.T) {
	t.Parallel()
	eachLevel(t, func(t *testing.T, d testdb.Driver, level sql.IsolationLevel) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		store := newStore(t, db, d, deduplicator.WithIsolation(level), deduplicator.WithClaimTimeout(time.Second),
			deduplicator.WithTxRetries(0), deduplicator.WithKnownKeys(0))
		nothing := func(context.Context) ([]deduplicator.Output, error) { return nil, nil }
		_, err := store.Process(t.Context(), claimOf("b"), nothing)
		require.NoError(t, err)
		_, err = store.Process(t.Context(), claimOf("m"), func(context.Context) ([]deduplicator.Output, error) {
			for _, key := range []string{"l", "n", "a", "z", "m0"} {
				for _, want := range []deduplicator.Outcome{deduplicator.Processed, deduplicator.Duplicate} {
					result, err := store.Process(t.Context(), claimOf(key), nothing)
					require.NoError(t, err, key)
					require.Equal(t, want, result.Outcome, key)
				}
			}
			result, err := store.Process(t.Context(), claimOf("b"), nothing)
			require.NoError(t, err)
			require.Equal(t, deduplicator.Duplicate, result.Outcome)
			return nil, nil
		})
		require.NoError(t, err)
	})
}

// B91: nothing asks for a second connection inside a transaction, and copies that
// wait do not lock each other out.
func TestTwoHundredCopiesOnFiveConnections(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL, testdb.MySQLFoundRows, testdb.SQLite, testdb.SQLite3}, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		exec(t, db, "CREATE TABLE effects (n integer NOT NULL)")
		store := newStore(t, db, d)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		const copies = 200
		outcomes := make(chan deduplicator.Outcome, copies)
		for range copies {
			go func() {
				for {
					result, err := store.Process(ctx, claimOf("k"), func(ctx context.Context) ([]deduplicator.Output, error) {
						tx, _ := middleware.Tx(ctx)
						_, err := tx.ExecContext(ctx, "INSERT INTO effects (n) VALUES (1)")
						time.Sleep(50 * time.Millisecond) // the handler's work
						return nil, err
					})
					if errors.Is(err, deduplicator.ErrInFlight) {
						continue // the broker delivers it again
					}
					if err != nil {
						t.Error(err)
					}
					outcomes <- result.Outcome
					return
				}
			}()
		}
		count := make(map[deduplicator.Outcome]int)
		for range copies {
			count[<-outcomes]++
		}
		require.Equal(t, map[deduplicator.Outcome]int{deduplicator.Processed: 1, deduplicator.Duplicate: copies - 1}, count)
		var effects int
		require.NoError(t, db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM effects").Scan(&effects))
		require.Equal(t, 1, effects)
		require.Zero(t, db.Stats().InUse)
	})
}

// More outputs than one statement can have parameters (65,535; SQLite 32,766).
func TestOutputsOfManyStatements(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL, testdb.SQLite, testdb.SQLite3}, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		store := newStore(t, db, d)
		outputs := make([]deduplicator.Output, 10_000)
		if d.Dialect == deduplicator.SQLite {
			outputs = outputs[:5_000]
		}
		for i := range outputs {
			outputs[i] = deduplicator.Output{Topic: "t", UUID: fmt.Sprint(i)}
		}
		result, err := store.Process(t.Context(), claimOf("k"), func(context.Context) ([]deduplicator.Output, error) { return outputs, nil })
		require.NoError(t, err)
		require.Equal(t, deduplicator.Processed, result.Outcome)
		result, err = store.Process(t.Context(), claimOf("k"), nil)
		require.NoError(t, err)
		require.Equal(t, deduplicator.Duplicate, result.Outcome)
		require.Len(t, result.Outputs, len(outputs))
		for i, output := range result.Outputs {
			require.Equal(t, fmt.Sprint(i), output.UUID)
		}
	})
}

// MySQL refuses a packet that is too long, and go-sql-driver sends parameters as part
// of the statement if its DSN says so.
func TestOutputsWithLongMetadata(t *testing.T) {
	t.Parallel()
	database := testdb.Create(t, testdb.MySQL)
	database.DSN += "?interpolateParams=true"
	db := database.Open(t)
	migrate(t, db, testdb.MySQL)
	outputs := make([]deduplicator.Output, 100) // 20 MB
	for i := range outputs {
		outputs[i] = deduplicator.Output{Topic: "t", UUID: fmt.Sprint(i), Metadata: map[string]string{"long": strings.Repeat("x", 200_000)}}
	}
	_, err := newStore(t, db, testdb.MySQL).Process(t.Context(), claimOf("k"), func(context.Context) ([]deduplicator.Output, error) {
		return outputs, nil
	})
	require.NoError(t, err)
}

// B29: above read committed the database refuses work on a hot row; all of it is
// done in the end, once each, and few conflicts are seen outside.
func TestHotEntityB29(t *testing.T) {
	t.Parallel()
	eachLevel(t, func(t *testing.T, d testdb.Driver, level sql.IsolationLevel) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		exec(t, db, "CREATE TABLE stock (sku integer PRIMARY KEY, qty integer NOT NULL)")
		exec(t, db, "INSERT INTO stock VALUES (1, 0)")
		store := newStore(t, db, d, deduplicator.WithIsolation(level))
		const workers, messages = 8, 15
		var failures atomic.Int32
		done := make(chan error, workers)
		for w := range workers {
			go func() {
				for m := range messages {
					for {
						_, err := store.Process(t.Context(), claimOf(fmt.Sprint(w, m)), func(ctx context.Context) ([]deduplicator.Output, error) {
							tx, _ := middleware.Tx(ctx)
							_, err := tx.ExecContext(ctx, "UPDATE stock SET qty = qty + 1 WHERE sku = 1")
							return nil, err
						})
						if err == nil {
							break
						}
						if failures.Add(1) > messages {
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
		var qty int
		require.NoError(t, db.QueryRowContext(t.Context(), "SELECT qty FROM stock").Scan(&qty))
		require.Equal(t, workers*messages, qty)
		require.Less(t, int(failures.Load()), workers*messages/20, "conflicts that came out of Process")
	})
}

// SQLite has one writer, and its own wait for it is the user's setting: with and
// without it, in both journal modes, a twin waits and is bounded.
func TestSQLiteTwins(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.SQLite, testdb.SQLite3}, sqliteTwins)
}

func sqliteTwins(t *testing.T, d testdb.Driver) {
	for _, mode := range []string{"WAL", "DELETE"} {
		for _, busy := range []time.Duration{0, 50 * time.Millisecond, 5 * time.Second} {
			t.Run(fmt.Sprintf("%s, busy timeout %v", mode, busy), func(t *testing.T) {
				t.Parallel()
				database := &testdb.Database{Driver: d, DSN: fmt.Sprintf("file:%s?_pragma=busy_timeout(%d)&_pragma=journal_mode(%s)",
					filepath.Join(t.TempDir(), "test.db"), busy.Milliseconds(), mode)}
				db := database.Open(t)
				migrate(t, db, d)
				const timeout = time.Second
				store := newStore(t, db, d, deduplicator.WithClaimTimeout(timeout))

				second := make(chan deduplicator.Result, 1)
				var start sync.Once // the work runs again if its commit is refused
				first, err := store.Process(t.Context(), claimOf("a"), func(context.Context) ([]deduplicator.Output, error) {
					start.Do(func() {
						go func() {
							result, err := store.Process(t.Context(), claimOf("a"), func(context.Context) ([]deduplicator.Output, error) {
								return nil, nil
							})
							if err != nil {
								t.Error(err)
							}
							second <- result
						}()
					})
					select {
					case result := <-second:
						t.Errorf("outcome %d while the twin was running", result.Outcome)
					case <-time.After(timeout / 10): // it can't be seen waiting
					}
					return nil, nil
				})
				require.NoError(t, err)
				// With a rollback journal the twin's attempt can make the first one's
				// commit fail, and then be the one that is processed.
				require.ElementsMatch(t, []deduplicator.Outcome{deduplicator.Processed, deduplicator.Duplicate},
					[]deduplicator.Outcome{first.Outcome, (<-second).Outcome})

				// Any other key waits as well; the wait ends after both timeouts.
				_, err = store.Process(t.Context(), claimOf("b"), func(context.Context) ([]deduplicator.Output, error) {
					started := time.Now()
					_, err := store.Process(t.Context(), claimOf("c"), noWork(t))
					require.ErrorIs(t, err, deduplicator.ErrInFlight)
					require.Less(t, time.Since(started), busy+timeout+20*time.Second)
					require.GreaterOrEqual(t, time.Since(started), timeout)
					return nil, nil
				})
				require.NoError(t, err)
				require.Zero(t, db.Stats().InUse)
			})
		}
	}
}

// B35: a handler that reads before it writes would fail at once as locked, were
// the claim not the first statement and a write.
func TestSQLiteReadThenWriteB35(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.SQLite, testdb.SQLite3}, readThenWrite)
}

func readThenWrite(t *testing.T, d testdb.Driver) {
	db := testdb.Open(t, d)
	migrate(t, db, d)
	exec(t, db, "CREATE TABLE stock (qty integer NOT NULL)")
	exec(t, db, "INSERT INTO stock VALUES (0)")
	store := newStore(t, db, d)
	const workers = 20
	errs := make(chan error, workers)
	for i := range workers {
		go func() {
			_, err := store.Process(t.Context(), claimOf(fmt.Sprint(i)), func(ctx context.Context) ([]deduplicator.Output, error) {
				tx, _ := middleware.Tx(ctx)
				var qty int
				if err := tx.QueryRowContext(ctx, "SELECT qty FROM stock").Scan(&qty); err != nil {
					return nil, err
				}
				_, err := tx.ExecContext(ctx, "UPDATE stock SET qty = ?", qty+1)
				return nil, err
			})
			errs <- err
		}()
	}
	for range workers {
		require.NoError(t, <-errs)
	}
	var qty int
	require.NoError(t, db.QueryRowContext(t.Context(), "SELECT qty FROM stock").Scan(&qty))
	require.Equal(t, workers, qty)
}
