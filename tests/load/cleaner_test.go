// Package load_test shows what live traffic notices of the cleaners.
//
//	go test -run '^$' -bench Cleaners ./tests/load -expired 5000000 -timeout 2h
package load_test

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

var (
	expired = flag.Int("expired", 200_000, "expired rows that the cleaners delete")
	rate    = flag.Int("rate", 200, "live messages per second")
	batch   = flag.Int("batch", deduplicator.DefaultCleanBatch, "rows per statement of a cleaner")
	pause   = flag.Duration("pause", deduplicator.DefaultCleanPause, "its pause between statements")
	pairs   = flag.Int("pairs", 0, "pairs of blocks after which the rest is deleted without traffic; 0: all under traffic")
	block   = flag.Duration("block", 5*time.Second, "time without cleaners, and then with them, in turn")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	cleaners  = 4
	workers   = 4
	retention = time.Hour
)

// BenchmarkCleaners measures how long live messages take, from the moment at which
// each is due, so that waiting for a worker counts: in one block of time without
// cleaners, in the next with four, in turn until all expired rows are deleted, or for
// so many pairs.
//
//	p50-idle, p99-idle    milliseconds per message without cleaners
//	p50-clean, p99-clean  with them
//	x-p50, x-p99          the ratio of both: the median over the pairs of blocks
//	deleted/s             rows, while the cleaners run
func BenchmarkCleaners(b *testing.B) {
	for _, driver := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		b.Run(driver.Name, func(b *testing.B) {
			for b.Loop() {
				result := clean(b, driver, *expired, *block)
				result.report(b)
			}
		})
	}
}

// The same, short: nothing fails, no expired row stays, no live one goes.
func TestCleaners(t *testing.T) {
	t.Parallel()
	for _, driver := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			clean(t, driver, 3_000, 100*time.Millisecond)
		})
	}
}

// result has one element per pair of blocks.
type result struct {
	idle, cleaning [][]time.Duration
	deleted        int64
	cleaningTime   time.Duration
}

func (r *result) report(b *testing.B) {
	idle, cleaning := slices.Concat(r.idle...), slices.Concat(r.cleaning...)
	b.ReportMetric(0, "ns/op") // says nothing
	for _, p := range []int{50, 99} {
		ratios := make([]float64, len(r.idle))
		for i := range ratios {
			ratios[i] = float64(percentile(r.cleaning[i], p)) / float64(percentile(r.idle[i], p))
		}
		slices.Sort(ratios)
		b.ReportMetric(float64(percentile(idle, p).Microseconds())/1000, fmt.Sprintf("p%d-idle", p))
		b.ReportMetric(float64(percentile(cleaning, p).Microseconds())/1000, fmt.Sprintf("p%d-clean", p))
		b.ReportMetric(ratios[len(ratios)/2], fmt.Sprintf("x-p%d", p))
	}
	b.ReportMetric(float64(r.deleted)/r.cleaningTime.Seconds(), "deleted/s")
	b.Logf("%d pairs of blocks, %d and %d messages", len(r.idle), len(idle), len(cleaning))
}

func percentile(times []time.Duration, p int) time.Duration {
	if len(times) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(times))
	return sorted[(len(sorted)-1)*p/100]
}

// clean has four cleaners delete expired rows under live traffic, and checks what
// is left.
func clean(t testing.TB, d testdb.Driver, expired int, block time.Duration) *result {
	t.Helper()
	db := testdb.Open(t, d)
	db.SetMaxOpenConns(cleaners + workers)
	db.SetMaxIdleConns(cleaners + workers)
	require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect))
	exec(t, db, "CREATE TABLE effects (message varchar(36) NOT NULL)")
	fill(t, db, d, expired)
	store, err := deduplicator.NewSQLStore(t.Context(), db, d.Dialect, deduplicator.WithRetention(retention))
	require.NoError(t, err)
	cleaner, err := deduplicator.NewCleaner(store, deduplicator.WithCleanBatch(*batch, *pause))
	require.NoError(t, err)

	r := &result{}
	live := 0
	for done := false; !done && (*pairs == 0 || len(r.idle) < *pairs); {
		r.idle = append(r.idle, traffic(t, store, d, block))
		ctx, stop := context.WithCancel(t.Context())
		started := time.Now()
		var running sync.WaitGroup
		var mu sync.Mutex // guards what is known about the cleaners
		var took time.Duration
		finished := 0
		for range cleaners {
			running.Go(func() {
				result, err := cleaner.Clean(ctx)
				mu.Lock()
				defer mu.Unlock()
				r.deleted += result.Rows
				took = max(took, time.Since(started))
				if err == nil {
					finished++
				} else if ctx.Err() == nil {
					t.Error(err)
				}
			})
		}
		r.cleaning = append(r.cleaning, traffic(t, store, d, block))
		stop()
		running.Wait()
		r.cleaningTime += took
		done = finished > 0 // the others wait for their turn
		live += len(r.idle[len(r.idle)-1]) + len(r.cleaning[len(r.cleaning)-1])
		if t.Failed() {
			t.FailNow()
		}
	}
	rest, err := deduplicator.NewCleaner(store, deduplicator.WithCleanBatch(10_000, 0))
	require.NoError(t, err)
	_, err = rest.Clean(t.Context())
	require.NoError(t, err)
	require.Zero(t, count(t, db, "SELECT COUNT(*) FROM processed_messages WHERE message_key LIKE 'expired%'"))
	require.Equal(t, live, count(t, db, "SELECT COUNT(*) FROM processed_messages"))
	require.Equal(t, live, count(t, db, "SELECT COUNT(*) FROM effects"))
	return r
}

// traffic processes new messages at the rate for a time, and returns how long each
// took from the moment at which it was due.
func traffic(t testing.TB, store deduplicator.Store, d testdb.Driver, block time.Duration) (took []time.Duration) {
	insert := d.Dialect.Rebind("INSERT INTO effects (message) VALUES (?)")
	start := time.Now()
	period := time.Second / time.Duration(*rate)
	var next atomic.Int64
	var mu sync.Mutex // guards took
	var running sync.WaitGroup
	for range workers {
		running.Go(func() {
			for {
				due := time.Duration(next.Add(1)) * period
				if due > block {
					return
				}
				time.Sleep(time.Until(start.Add(due)))
				claim := deduplicator.Claim{Consumer: "c", Key: watermill.NewUUID(), Time: time.Now()}
				result, err := store.Process(t.Context(), claim, func(ctx context.Context) ([]deduplicator.Output, error) {
					tx, _ := middleware.Tx(ctx)
					_, err := tx.ExecContext(ctx, insert, claim.Key)
					return nil, err
				})
				if err != nil || result.Outcome != deduplicator.Processed {
					t.Errorf("outcome %d, error %v", result.Outcome, err)
					return
				}
				mu.Lock()
				took = append(took, time.Since(start)-due)
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return took
}

// fill inserts rows that are expired, with keys in another order than their times.
func fill(t testing.TB, db *sql.DB, d testdb.Driver, rows int) {
	t.Helper()
	key, at, analyze := "'expired ' || md5(i::text)", "now() - interval '1 day' + i * interval '1 millisecond'", "ANALYZE processed_messages"
	if d.Dialect == deduplicator.MySQL {
		key, at, analyze = "CONCAT('expired ', MD5(i))", "UTC_TIMESTAMP(6) - INTERVAL 1 DAY + INTERVAL i * 1000 MICROSECOND", "ANALYZE TABLE processed_messages"
	}
	const batch = 500_000 // a transaction of this size fits into every server's logs
	for from := 0; from < rows; from += batch {
		exec(t, db, fmt.Sprintf("INSERT INTO processed_messages (consumer_name, message_key, processed_at) SELECT 'c', %s, %s FROM (SELECT %d + i AS i FROM %s) s",
			key, at, from, testdb.Numbers(min(batch, rows-from))))
	}
	exec(t, db, analyze)
}

func exec(t testing.TB, db *sql.DB, query string) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), query)
	require.NoError(t, err)
}

func count(t testing.TB, db *sql.DB, query string) (n int) {
	t.Helper()
	require.NoError(t, db.QueryRowContext(t.Context(), query).Scan(&n))
	return n
}
