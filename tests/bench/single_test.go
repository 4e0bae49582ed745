// Package bench_test measures what the middlewares cost, as ratios against the
// same work done by hand in the same run.
package bench_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) { os.Exit(m.Run()) }

// block is how many messages one variant handles before the next one has its
// turn: the variants alternate, so that what disturbs the machine disturbs all.
const block = 50

const entities = 100

// variant is one way to handle a message.
type variant struct {
	name   string
	handle func(msg *message.Message) error

	times  []time.Duration // of each block
	allocs uint64
}

// BenchmarkSingle handles one message at a time: one transaction each, with the
// same business statement.
//
//	floor        begin, handler, commit
//	by-hand      begin, insert on conflict do nothing, handler, commit
//	deduplicate  the Deduplicate middleware around the handler
//	stale        Deduplicate and RejectStale
//
// x-NAME is by-hand's time divided by NAME's, the median over the blocks, so
// higher is faster; allocs-NAME is allocations per message.
func BenchmarkSingle(b *testing.B) {
	for _, driver := range testdb.Servers {
		b.Run(driver.Name, func(b *testing.B) {
			variants := variants(b, driver)
			sequence := 0
			for b.Loop() {
				for i := range variants {
					variants[i].run(b, &sequence)
				}
			}
			report(b, variants)
		})
	}
}

func (v *variant) run(b *testing.B, sequence *int) {
	messages := make([]*message.Message, block)
	for i := range messages {
		*sequence++
		id := watermill.NewUUID()
		msg := message.NewMessage(id, []byte(`{"order":"P-1","sku":"A","qty":1}`))
		msg.Metadata.Set("event_id", id)
		msg.Metadata.Set("version", strconv.Itoa(*sequence))
		msg.Metadata.Set(ordering.PartitionKeyMetadata, fmt.Sprint("P-", *sequence%entities))
		msg.SetContext(b.Context())
		messages[i] = msg
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	started := time.Now()
	for _, msg := range messages {
		if err := v.handle(msg); err != nil {
			b.Fatalf("%s: %v", v.name, err)
		}
	}
	v.times = append(v.times, time.Since(started))
	runtime.ReadMemStats(&after)
	v.allocs += after.Mallocs - before.Mallocs
}

func report(b *testing.B, variants []variant) {
	base := variants[slices.IndexFunc(variants, func(v variant) bool { return v.name == "by-hand" })]
	b.ReportMetric(0, "ns/op") // a mixture of the variants: says nothing
	for _, v := range variants {
		ratios := make([]float64, len(v.times))
		for i := range ratios {
			ratios[i] = float64(base.times[i]) / float64(v.times[i])
		}
		slices.Sort(ratios)
		times := slices.Sorted(slices.Values(v.times))
		b.ReportMetric(float64(times[len(times)/2].Microseconds())/block, "us-"+v.name)
		b.ReportMetric(ratios[len(ratios)/2], "x-"+v.name)
		b.ReportMetric(float64(v.allocs)/float64(len(v.times)*block), "allocs-"+v.name)
	}
}

func variants(b *testing.B, driver testdb.Driver) []variant {
	ctx := b.Context()
	db := testdb.Open(b, driver)
	require.NoError(b, deduplicator.Migrate(ctx, db, driver.Dialect))
	require.NoError(b, ordering.Migrate(ctx, db, driver.Dialect))
	store, err := deduplicator.NewSQLStore(ctx, db, driver.Dialect)
	require.NoError(b, err)
	versions, err := ordering.NewVersions(ctx, db, driver.Dialect)
	require.NoError(b, err)

	exec := func(query string) {
		_, err := db.ExecContext(ctx, query)
		require.NoError(b, err)
	}
	exec(`CREATE TABLE stock (sku varchar(32) PRIMARY KEY, qty int NOT NULL)`)
	exec(`INSERT INTO stock (sku, qty) VALUES ('A', 1000000000)`)
	exec(`CREATE TABLE by_hand (consumer_name varchar(100) NOT NULL, message_key varchar(200) NOT NULL,` +
		` processed_at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (consumer_name, message_key))`)
	exec(`CREATE INDEX by_hand_processed_at ON by_hand (processed_at)`)

	const takeQuery = `UPDATE stock SET qty = qty - 1 WHERE sku = 'A'`
	take := func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, takeQuery)
		return err
	}
	inTx := func(msg *message.Message, before func(ctx context.Context, tx *sql.Tx) (bool, error)) error {
		ctx := msg.Context()
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
		if isNew, err := before(ctx, tx); err != nil || !isNew {
			return err
		}
		if err := take(ctx, tx); err != nil {
			return err
		}
		return tx.Commit()
	}
	insert := map[deduplicator.Dialect]string{
		deduplicator.PostgreSQL: `INSERT INTO by_hand (consumer_name, message_key) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		deduplicator.MySQL:      `INSERT IGNORE INTO by_hand (consumer_name, message_key) VALUES (?, ?)`,
		deduplicator.SQLite:     `INSERT INTO by_hand (consumer_name, message_key) VALUES (?, ?) ON CONFLICT DO NOTHING`,
	}[driver.Dialect]

	handler := func(msg *message.Message) ([]*message.Message, error) {
		tx, _ := middleware.Tx(msg.Context())
		return nil, take(msg.Context(), tx)
	}
	chained := func(consumer string, links ...middleware.Link) func(msg *message.Message) error {
		links = append([]middleware.Link{middleware.Deduplicate(store,
			middleware.WithKey(deduplicator.FromMetadata("event_id")), middleware.WithConsumer(consumer))}, links...)
		chain, err := middleware.Chain(links...)
		require.NoError(b, err)
		h := handler
		for _, mw := range slices.Backward(chain) {
			h = mw(h)
		}
		return func(msg *message.Message) error {
			_, err := h(msg)
			return err
		}
	}
	return []variant{
		{name: "floor", handle: func(msg *message.Message) error {
			return inTx(msg, func(context.Context, *sql.Tx) (bool, error) { return true, nil })
		}},
		{name: "by-hand", handle: func(msg *message.Message) error {
			return inTx(msg, func(ctx context.Context, tx *sql.Tx) (bool, error) {
				result, err := tx.ExecContext(ctx, insert, "by-hand", msg.Metadata.Get("event_id"))
				if err != nil {
					return false, err
				}
				rows, err := result.RowsAffected()
				return rows == 1, err
			})
		}},
		{name: "deduplicate", handle: chained("deduplicate")},
		{name: "stale", handle: chained("stale", middleware.RejectStale(versions,
			middleware.WithVersion(ordering.VersionFromMetadata("version"))))},
	}
}
