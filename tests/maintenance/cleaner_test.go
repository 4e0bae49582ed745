package maintenance_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

const (
	retention = time.Hour
	kept      = 2 * time.Hour // with the margin
)

func newCleaner(t *testing.T, store *deduplicator.SQLStore, opts ...deduplicator.CleanerOption) *deduplicator.Cleaner {
	t.Helper()
	cleaner, err := deduplicator.NewCleaner(store, opts...)
	require.NoError(t, err)
	return cleaner
}

func TestCleanerOptions(t *testing.T) {
	t.Parallel()
	db, keeps := open(t, testdb.SQLite)
	store := newStore(t, db, testdb.SQLite, deduplicator.WithRetention(retention))
	for _, tt := range []struct {
		name  string
		store *deduplicator.SQLStore
		opts  []deduplicator.CleanerOption
		want  []string // none: accepted
	}{
		{name: "none", store: store},
		{name: "bounds", store: store, opts: []deduplicator.CleanerOption{
			deduplicator.WithCleanBatch(1, 0), deduplicator.WithInterval(10 * time.Millisecond),
		}},
		{name: "no retention", store: keeps, want: []string{"WithRetention"}},
		{name: "all wrong", want: []string{"store is nil", "WithCleanBatch: 0 rows", "-1ns", "WithInterval: 9ms", "10ms", "WithCleanObserver"}, opts: []deduplicator.CleanerOption{
			deduplicator.WithCleanBatch(0, -1), deduplicator.WithInterval(9 * time.Millisecond), deduplicator.WithCleanObserver(nil),
		}},
		{name: "pause", store: store, opts: []deduplicator.CleanerOption{deduplicator.WithCleanBatch(1, math.MaxInt64)}, want: []string{"pause: 2562047h47m16.854775807s is over the most"}},
		{name: "batch", store: store, opts: []deduplicator.CleanerOption{deduplicator.WithCleanBatch(100_001, 0)}, want: []string{"100001", "100000"}},
	} {
		_, err := deduplicator.NewCleaner(tt.store, tt.opts...)
		if len(tt.want) == 0 {
			require.NoError(t, err, tt.name)
			continue
		}
		require.ErrorIs(t, err, deduplicator.ErrInvalidOption, tt.name)
		for _, part := range tt.want {
			require.ErrorContains(t, err, part, tt.name)
		}
	}
}

// B99: ages are by the database's clock, whatever the session's time zone and
// however the driver shows times. One connection must be enough.
func TestCleanerGoesByTheDatabasesClockB98B99(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		for _, zone := range []int{0, 8, -5} {
			db, store := open(t, d, deduplicator.WithRetention(retention), deduplicator.WithMaxAttempts(3))
			db.SetMaxOpenConns(1)
			switch d.Dialect {
			case deduplicator.PostgreSQL:
				exec(t, db, fmt.Sprintf("SET TIME ZONE INTERVAL '%+03d:00' HOUR TO MINUTE", zone))
			case deduplicator.MySQL:
				exec(t, db, fmt.Sprintf("SET time_zone = '%+03d:00'", zone))
			}
			process(t, store, claimOf("now")) // as the store writes it
			ages := map[string]time.Duration{
				"young": 55 * time.Minute, "old, in the margin": kept - 20*time.Second, "due": kept + time.Second, "long due": 14 * time.Hour,
			}
			for name, age := range ages {
				process(t, store, claimOf(name))
				exec(t, db, "UPDATE processed_messages SET processed_at = "+ago(d, age)+" WHERE message_key = '"+name+"'")
				exec(t, db, "INSERT INTO message_attempts (consumer_name, message_key, attempts, updated_at) VALUES ('c', '"+name+"', 1, "+ago(d, age)+")")
			}
			result, err := newCleaner(t, store).Clean(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 2, result.Rows, "zone %d", zone)
			require.EqualValues(t, 2, result.Attempts, "zone %d", zone)
			require.InDelta(t, kept.Seconds()-20, result.Oldest.Seconds(), 60)
			require.Positive(t, result.Duration)
			for _, name := range []string{"now", "young", "old, in the margin"} {
				require.Equal(t, 1, count(t, db, "SELECT COUNT(*) FROM processed_messages WHERE message_key = '"+name+"'"), "%s, zone %d", name, zone)
			}
			require.Equal(t, 2, count(t, db, "SELECT COUNT(*) FROM message_attempts"))
			exec(t, db, "DELETE FROM processed_messages")
			result, err = newCleaner(t, store).Clean(t.Context())
			require.NoError(t, err)
			require.Zero(t, result.Oldest)
		}
	})
}

// B101: what has been deleted is refused rather than processed again.
func TestDeletedClaimsAreRefusedB101(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d, deduplicator.WithRetention(retention))
		process(t, store, claimOf("a"))
		exec(t, db, "UPDATE processed_messages SET processed_at = "+ago(d, kept+time.Second))
		result, err := newCleaner(t, store).Clean(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, result.Rows)
		store = newStore(t, db, d, deduplicator.WithRetention(retention)) // another process
		for at, want := range map[time.Time]error{time.Now().Add(-kept): deduplicator.ErrTooOld, {}: deduplicator.ErrNoTime} {
			claim := claimOf("a")
			claim.Time = at
			_, err := store.Process(t.Context(), claim, func(context.Context) ([]deduplicator.Output, error) {
				t.Error("processed twice")
				return nil, nil
			})
			require.ErrorIs(t, err, want)
		}
	})
}

// A claim whose outputs were never published stays, so that its key can't be
// claimed again beside them.
func TestCleanerKeepsClaimsWithOutputs(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d, deduplicator.WithRetention(retention))
		for i := range 10 {
			process(t, store, claimOf(fmt.Sprint(i)), deduplicator.Output{Topic: "t", UUID: "u"})
		}
		require.NoError(t, store.Forget(t.Context(), claimOf("3"), claimOf("7")))
		exec(t, db, "UPDATE processed_messages SET processed_at = "+ago(d, 24*time.Hour))
		cleaner := newCleaner(t, store, deduplicator.WithCleanBatch(1, 0))
		result, err := cleaner.Clean(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 2, result.Rows)
		require.InDelta(t, 24, result.Oldest.Hours(), 1)
		require.NoError(t, store.Forget(t.Context(), claimOf("1")))
		result, err = cleaner.Clean(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, result.Rows)
	})
}

// fill inserts rows that are expired, the oldest first.
func fill(t *testing.T, db *sql.DB, d testdb.Driver, rows int) {
	t.Helper()
	if rows == 0 {
		return
	}
	columns := "INSERT INTO processed_messages (consumer_name, message_key, processed_at) "
	switch d.Dialect {
	case deduplicator.PostgreSQL:
		exec(t, db, columns+fmt.Sprintf("SELECT 'c', 'expired ' || i, now() - interval '1 day' + i * interval '1 millisecond' FROM %s", testdb.Numbers(rows)))
		exec(t, db, "ANALYZE processed_messages")
	case deduplicator.MySQL:
		exec(t, db, columns+fmt.Sprintf("SELECT 'c', CONCAT('expired ', i), UTC_TIMESTAMP(6) - INTERVAL 1 DAY + INTERVAL i * 1000 MICROSECOND FROM %s", testdb.Numbers(rows)))
		exec(t, db, "ANALYZE TABLE processed_messages")
	case deduplicator.SQLite:
		exec(t, db, columns+"SELECT 'c', 'expired ' || i, strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 day', '+' || (i / 1000.0) || ' seconds') FROM "+
			testdb.Numbers(rows))
	}
}

// B95: four cleaners at once delete 200,000 rows while claims come in: no
// deadlock comes out, the claims go on, and no live row is lost. They work at once
// because their leases are taken away all the time.
func TestFourCleanersUnderLoadB95(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		rows := 200_000
		if d.Dialect == deduplicator.SQLite {
			rows = 10_000 // its cleaners and claims all take turns
		}
		db, store := open(t, d, deduplicator.WithRetention(retention), deduplicator.WithKnownKeys(0))
		db.SetMaxOpenConns(8)
		fill(t, db, d, rows)

		ctx, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		var cleaners, workers sync.WaitGroup
		deleted := make(chan int64, 4)
		for range 4 {
			cleaners.Go(func() {
				cleaner := newCleaner(t, newStore(t, db, d, deduplicator.WithRetention(retention)), deduplicator.WithCleanBatch(1000, time.Millisecond))
				result, err := cleaner.Clean(ctx)
				rows := result.Rows
				for sqldb.LockTimeout(err) && d.Dialect == deduplicator.SQLite { // the next pass goes on
					result, err = cleaner.Clean(ctx)
					rows += result.Rows
				}
				if err != nil {
					t.Error(err)
				}
				deleted <- rows
			})
		}
		cleaned := make(chan struct{})
		var thief sync.WaitGroup
		thief.Go(func() {
			for {
				_, _ = db.ExecContext(ctx, "DELETE FROM message_leases") // the next time will do where it is refused
				select {
				case <-cleaned:
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
		})
		live := make(chan int, 4)
		var slowest sync.Map
		for w := range 4 {
			workers.Go(func() {
				n, most := 0, time.Duration(0)
				for ; ; n++ {
					select {
					case <-cleaned:
						live <- n
						slowest.Store(w, most)
						return
					default:
					}
					for _, want := range []deduplicator.Outcome{deduplicator.Processed, deduplicator.Duplicate} {
						started := time.Now()
						result, err := store.Process(ctx, claimOf(fmt.Sprint("live ", w, "/", n)), func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
						for errors.Is(err, deduplicator.ErrInFlight) { // SQLite: the broker delivers it again
							result, err = store.Process(ctx, claimOf(fmt.Sprint("live ", w, "/", n)), func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
						}
						if err != nil || result.Outcome != want {
							t.Errorf("outcome %d, error %v", result.Outcome, err)
						}
						most = max(most, time.Since(started))
					}
				}
			})
		}
		cleaners.Wait()
		close(cleaned)
		workers.Wait()
		thief.Wait()
		var sum int64
		working := 0
		for range 4 {
			rows := <-deleted
			sum += rows
			working += min(int(rows), 1)
		}
		if d.Dialect != deduplicator.SQLite {
			require.Greater(t, working, 1)
		}
		claims := 0
		for range 4 {
			claims += <-live
		}
		require.EqualValues(t, rows, sum)
		require.Zero(t, count(t, db, "SELECT COUNT(*) FROM processed_messages WHERE message_key LIKE 'expired%'"))
		require.Positive(t, claims)
		require.Equal(t, claims, count(t, db, "SELECT COUNT(*) FROM processed_messages"))
		require.Zero(t, db.Stats().InUse)
		slowest.Range(func(w, most any) bool {
			t.Logf("worker %v: slowest claim %v", w, most)
			return true
		})
		t.Logf("%d live claims", claims)
	})
}

// B97: the statement searches the index on the time. The plans are those of
// tables with statistics; expired rows are few among many, and all.
func TestCleanerUsesItsIndexB97(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		for _, live := range []int{0, 20_000} {
			database := testdb.Create(t, d)
			db, spy := spied(t, database)
			require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect))
			store := newStore(t, db, d, deduplicator.WithRetention(retention))
			fill(t, db, d, live)
			exec(t, db, "UPDATE processed_messages SET message_key = "+d.Dialect.Rebind("REPLACE(message_key, 'expired', 'live')")+", processed_at = "+ago(d, 0))
			fill(t, db, d, 5_000)
			if d.Dialect == deduplicator.SQLite {
				exec(t, db, "ANALYZE")
			}
			var statements []string
			spy.onExec(func(query string) error {
				statements = append(statements, query)
				return nil
			})
			_, err := newCleaner(t, store, deduplicator.WithCleanBatch(1000, 0)).Clean(t.Context())
			require.NoError(t, err)
			spy.onExec(nil)
			fill(t, db, d, 5_000)
			for table, column := range map[string]string{"processed_messages": "processed_at", "message_attempts": "updated_at"} {
				i := 0
				for !strings.Contains(statements[i], "FROM "+d.Dialect.Quote(table)) {
					i++
				}
				plan := explain(t, db, d, statements[i])
				index := table + "_" + column
				switch d.Dialect {
				case deduplicator.PostgreSQL:
					if table == "message_attempts" {
						continue // PostgreSQL reads an empty table as a whole
					}
					require.Contains(t, plan, "Index Scan using "+index+" on "+table+" p")
					require.Contains(t, plan, "Index Cond: (processed_at < ")
					require.NotContains(t, plan, "Seq Scan on "+table)
				case deduplicator.MySQL:
					// MySQL has one more column, which is empty, and reads all of an empty index.
					require.Regexp(t, `\|p\|+(range|index)\|[^|]*\|`+index+`\|`, plan)
					require.True(t, table == "message_attempts" || strings.Contains(plan, "range"), plan)
					require.Regexp(t, `\|d\|+eq_ref\|[^|]*\|PRIMARY\|`, plan)
					require.NotContains(t, plan, "filesort")
					if !testdb.IsMariaDB(t, d) {
						require.NotContains(t, plan, "MATERIALIZED") // of all outputs, each of which it would lock
					}
				case deduplicator.SQLite:
					require.Regexp(t, `SEARCH p USING (COVERING )?INDEX `+index+` \(`+column+`<\?\)`, plan)
					require.NotContains(t, plan, "SCAN "+table)
				}
			}
		}
	})
}

// explain returns the plan, a line for each row and | between the columns.
func explain(t *testing.T, db *sql.DB, d testdb.Driver, statement string) string {
	t.Helper()
	prefix := map[deduplicator.Dialect]string{
		deduplicator.PostgreSQL: "EXPLAIN ", deduplicator.MySQL: "EXPLAIN FORMAT=TRADITIONAL ", deduplicator.SQLite: "EXPLAIN QUERY PLAN ",
	}[d.Dialect]
	rows, err := db.QueryContext(t.Context(), prefix+statement)
	require.NoError(t, err)
	defer rows.Close()
	columns, err := rows.Columns()
	require.NoError(t, err)
	var plan strings.Builder
	for rows.Next() {
		values := make([]sql.NullString, len(columns))
		into := make([]any, len(columns))
		for i := range values {
			into[i] = &values[i]
		}
		require.NoError(t, rows.Scan(into...))
		for _, value := range values {
			plan.WriteString("|" + value.String)
		}
		plan.WriteString("|\n")
	}
	require.NoError(t, rows.Err())
	t.Log(plan.String())
	return plan.String()
}

// The cleaner stops between batches, and what it has done by then is done.
func TestCleanerStops(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d, deduplicator.WithRetention(retention))
		fill(t, db, d, 1000)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		started := time.Now()
		result, err := newCleaner(t, store, deduplicator.WithCleanBatch(100, time.Hour)).Clean(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, result.Err, context.DeadlineExceeded)
		require.EqualValues(t, 100, result.Rows)
		require.Equal(t, 900, count(t, db, "SELECT COUNT(*) FROM processed_messages"))
		require.Less(t, time.Since(started), 30*time.Second)
		require.Zero(t, db.Stats().InUse)
	})
}

// Cleaners take turns: how many there are does not add to the load. One that dies is
// replaced, on its pool being closed, once its lease has ended.
func TestCleanersTakeTurns(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		database := testdb.Create(t, d)
		db, dying := database.Open(t), database.Open(t)
		require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect))
		fill(t, db, d, 1000)
		batch := deduplicator.WithCleanBatch(100, time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()

		first := newCleaner(t, newStore(t, dying, d, deduplicator.WithRetention(retention)), batch)
		ended := make(chan deduplicator.CleanResult)
		go func() {
			result, _ := first.Clean(ctx)
			ended <- result
		}()
		require.Eventually(t, func() bool { return count(t, db, "SELECT COUNT(*) FROM processed_messages") < 1000 }, patience, 10*time.Millisecond)

		second := newCleaner(t, newStore(t, db, d, deduplicator.WithRetention(retention)), batch)
		short, stop := context.WithTimeout(t.Context(), 3*time.Second)
		defer stop()
		result, err := second.Clean(short)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Zero(t, result.Rows, "while the first is at work")

		require.NoError(t, dying.Close())
		dead := <-ended
		require.Error(t, dead.Err)
		require.Less(t, dead.Rows, int64(1000))
		result, err = newCleaner(t, newStore(t, db, d, deduplicator.WithRetention(retention)), deduplicator.WithCleanBatch(100, 0)).Clean(ctx)
		require.NoError(t, err)
		require.EqualValues(t, 1000, dead.Rows+result.Rows)
		require.Zero(t, count(t, db, "SELECT COUNT(*) FROM message_leases"), "the turn is given back")
	})
}

// Run goes on after an error, tells the observer about each pass, and ends with
// its context.
func TestCleanerRuns(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d, deduplicator.WithRetention(retention))
		fill(t, db, d, 10)
		exec(t, db, "ALTER TABLE processed_messages RENAME TO elsewhere")
		results := make(chan deduplicator.CleanResult)
		ctx, cancel := context.WithCancel(t.Context())
		cleaner := newCleaner(t, store, deduplicator.WithInterval(10*time.Millisecond),
			deduplicator.WithCleanObserver(func(ctx context.Context, result deduplicator.CleanResult) {
				select {
				case results <- result:
				case <-ctx.Done():
				}
			}))
		done := make(chan struct{})
		go func() {
			defer close(done)
			cleaner.Run(ctx)
		}()
		require.Error(t, (<-results).Err)
		exec(t, db, "ALTER TABLE elsewhere RENAME TO processed_messages")
		rows := int64(0)
		for deadline := time.Now().Add(patience); rows < 10 && time.Now().Before(deadline); {
			rows += (<-results).Rows
		}
		require.EqualValues(t, 10, rows)
		cancel()
		<-done
	})
}
