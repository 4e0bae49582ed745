// Package bench_test measures what the middlewares cost, as ratios against the
// same work done by hand in the same run.
//
// The environment sets how:
//
//	BENCH_LATENCY  milliseconds that each round trip to a server takes in addition
//	BENCH_ROWS     rows of BenchmarkTableSize's large table, 100,000 if unset
package bench_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/env"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) { os.Exit(m.Run()) }

// block is how many messages one variant handles before the next one has its
// turn: the variants alternate, so that what disturbs the machine disturbs all.
const block = 50

const entities = 100

// variant is one way to handle a message.
type variant struct {
	name    string
	prepare func(msg *message.Message) error // before the clock runs; may be nil
	handle  func(msg *message.Message) error
	finish  func() error // after a block, while the clock runs; may be nil

	over string // the variant that it is compared with besides the base
	size int    // messages of a block; 0 is block

	times  []time.Duration // of each block
	allocs uint64
	count  int // messages made
}

// BenchmarkSingle handles one message at a time: one transaction each, with the
// same business statement.
//
//	floor        begin, handler, commit
//	by-hand      begin, insert on conflict do nothing, handler, commit
//	deduplicate  the Deduplicate middleware around the handler
//	server-wait  the same on connections with a lock timeout of the server's (PostgreSQL)
//	stale        Deduplicate and RejectStale
//	sequence     Deduplicate and Sequence, all events in order
//	replayed     Deduplicate and RejectReplayed, all numbers in order
//
// x-NAME is by-hand's time divided by NAME's, the median over the blocks, so
// higher is faster; adds%-NAME is what NAME's time adds to that of deduplicate, in
// percent; allocs-NAME is allocations per message.
func BenchmarkSingle(b *testing.B) { compare(b, "by-hand", variants) }

// compare runs the variants in turn, on one driver for each kind of database, and
// relates them to the one named base.
func compare(b *testing.B, base string, variants func(b *testing.B, driver testdb.Driver) []variant) {
	b.Helper()
	for _, driver := range testdb.Servers {
		b.Run(driver.Name, func(b *testing.B) {
			variants := variants(b, driver)
			alternate(b, base, variants)
		})
	}
}

// alternate lets each of the variants handle a block in turn, and reports their
// times against those of the one that is named base.
func alternate(b *testing.B, base string, variants []variant) {
	b.Helper()
	for i := range variants {
		if variants[i].size == 0 {
			variants[i].size = block
		}
	}
	for b.Loop() {
		for i := range variants {
			variants[i].run(b)
		}
	}
	report(b, base, variants)
}

// newMessage returns the n-th message, from 0: the entities have 1, 2, 3, … in turn.
func newMessage(n int) *message.Message {
	id := watermill.NewUUID()
	msg := message.NewMessage(id, []byte(`{"order":"P-1","sku":"A","qty":1}`))
	msg.Metadata.Set("event_id", id)
	msg.Metadata.Set("version", strconv.Itoa(n/entities+1))
	msg.Metadata.Set(ordering.PartitionKeyMetadata, fmt.Sprint("P-", n%entities))
	return msg
}

func (v *variant) run(b *testing.B) {
	messages := make([]*message.Message, v.size)
	for i := range messages {
		messages[i] = newMessage(v.count)
		messages[i].SetContext(b.Context())
		v.count++
	}
	for _, msg := range messages {
		if v.prepare == nil {
			break
		}
		if err := v.prepare(msg); err != nil {
			b.Fatalf("%s: prepare: %v", v.name, err)
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	started := time.Now()
	for _, msg := range messages {
		if err := v.handle(msg); err != nil {
			b.Fatalf("%s: %v", v.name, err)
		}
	}
	if v.finish != nil {
		if err := v.finish(); err != nil {
			b.Fatalf("%s: finish: %v", v.name, err)
		}
	}
	v.times = append(v.times, time.Since(started))
	runtime.ReadMemStats(&after)
	v.allocs += after.Mallocs - before.Mallocs
}

func report(b *testing.B, base string, variants []variant) {
	named := func(name string) variant {
		return variants[slices.IndexFunc(variants, func(v variant) bool { return v.name == name })]
	}
	b.ReportMetric(0, "ns/op") // a mixture of the variants: says nothing
	for _, v := range variants {
		b.ReportMetric(median(v.times, nil)/1e3/float64(v.size), "us-"+v.name)
		b.ReportMetric(median(named(base).times, v.times), "x-"+v.name)
		if v.over != "" {
			b.ReportMetric(100*(median(v.times, named(v.over).times)-1), "adds%-"+v.name)
		}
		b.ReportMetric(float64(v.allocs)/float64(len(v.times)*v.size), "allocs-"+v.name)
	}
}

// median returns that of times in nanoseconds, or of times divided by those of the
// same blocks in by.
func median(times, by []time.Duration) float64 {
	values := make([]float64, len(times))
	for i := range values {
		values[i] = float64(times[i])
		if by != nil {
			values[i] /= float64(by[i])
		}
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// delayed returns the address of a proxy before upstream, whose answers take
// longer by so many milliseconds.
func delayed(b *testing.B, upstream string, ms int) string {
	b.Helper()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	proxy := toxiproxy.NewProxy(server, "database", "127.0.0.1:0", upstream)
	require.NoError(b, proxy.Start())
	b.Cleanup(proxy.Stop)
	_, err := proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{"type": "latency", "stream": "downstream", "attributes": {"latency": %d}}`, ms)))
	require.NoError(b, err)
	return proxy.Listen
}

// hand is a database with the tables of this module and of those who do without.
type hand struct {
	db      *sql.DB
	dialect deduplicator.Dialect
	insert  string // the claim

	bounded *sql.DB // the same with a lock_timeout; nil where that changes nothing
}

func newHand(b *testing.B, driver testdb.Driver) *hand {
	b.Helper()
	ctx := b.Context()
	database := testdb.Create(b, driver)
	if ms := int(env.Number(b, "BENCH_LATENCY", 0)); ms > 0 {
		database = database.Through(b, func(upstream string) string { return delayed(b, upstream, ms) })
	}
	h := &hand{db: database.Open(b), dialect: driver.Dialect}
	if driver.Dialect == deduplicator.PostgreSQL {
		h.bounded = database.With(b, "lock_timeout", "5s").Open(b)
	}
	require.NoError(b, deduplicator.Migrate(ctx, h.db, driver.Dialect))
	require.NoError(b, ordering.Migrate(ctx, h.db, driver.Dialect))
	for _, query := range []string{
		`CREATE TABLE stock (sku varchar(32) PRIMARY KEY, qty int NOT NULL)`,
		`INSERT INTO stock (sku, qty) VALUES ('A', 1000000000)`,
		`CREATE TABLE by_hand (consumer_name varchar(100) NOT NULL, message_key varchar(200) NOT NULL,` +
			` processed_at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (consumer_name, message_key))`,
		`CREATE INDEX by_hand_processed_at ON by_hand (processed_at)`,
		`CREATE TABLE outbox (id varchar(100) PRIMARY KEY, topic varchar(100) NOT NULL, payload varchar(1000) NOT NULL,` +
			` created_at timestamp NOT NULL DEFAULT CURRENT_TIMESTAMP)`,
	} {
		_, err := h.db.ExecContext(ctx, query)
		require.NoError(b, err)
	}
	h.insert = map[deduplicator.Dialect]string{
		deduplicator.PostgreSQL: `INSERT INTO by_hand (consumer_name, message_key) VALUES ($1, $2) ON CONFLICT DO NOTHING`,
		deduplicator.MySQL:      `INSERT IGNORE INTO by_hand (consumer_name, message_key) VALUES (?, ?)`,
		deduplicator.SQLite:     `INSERT INTO by_hand (consumer_name, message_key) VALUES (?, ?) ON CONFLICT DO NOTHING`,
	}[driver.Dialect]
	return h
}

func (h *hand) newStore(b *testing.B, opts ...deduplicator.Option) *deduplicator.SQLStore {
	b.Helper()
	store, err := deduplicator.NewSQLStore(b.Context(), h.db, h.dialect, opts...)
	require.NoError(b, err)
	return store
}

// take is what the handlers do.
func take(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, `UPDATE stock SET qty = qty - 1 WHERE sku = 'A'`)
	return err
}

// inTx commits what before, if it says so, take and after have done.
func (h *hand) inTx(msg *message.Message, before func(context.Context, *sql.Tx, *message.Message) (bool, error),
	after func(context.Context, *sql.Tx) error,
) error {
	ctx := msg.Context()
	tx, err := h.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
	if isNew, err := before(ctx, tx, msg); err != nil || !isNew {
		return err
	}
	if err := take(ctx, tx); err != nil {
		return err
	}
	if after != nil {
		if err := after(ctx, tx); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func (h *hand) claim(ctx context.Context, tx *sql.Tx, msg *message.Message) (bool, error) {
	result, err := tx.ExecContext(ctx, h.insert, "by-hand", msg.Metadata.Get("event_id"))
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	return rows == 1, err
}

func (h *hand) byHand(msg *message.Message) error { return h.inTx(msg, h.claim, nil) }

// chained is a handler in a chain of Deduplicate and links.
func chained(b *testing.B, store deduplicator.Store, consumer string, links ...middleware.Link) func(msg *message.Message) error {
	b.Helper()
	links = append([]middleware.Link{middleware.Deduplicate(store,
		middleware.WithKey(deduplicator.FromMetadata("event_id")), middleware.WithConsumer(consumer))}, links...)
	chain, err := middleware.Chain(links...)
	require.NoError(b, err)
	h := message.HandlerFunc(func(msg *message.Message) ([]*message.Message, error) {
		tx, _ := middleware.Tx(msg.Context())
		return nil, take(msg.Context(), tx)
	})
	for _, mw := range slices.Backward(chain) {
		h = mw(h)
	}
	return func(msg *message.Message) error {
		_, err := h(msg)
		return err
	}
}

func variants(b *testing.B, driver testdb.Driver) []variant {
	h := newHand(b, driver)
	store := h.newStore(b)
	versions, err := ordering.NewVersions(b.Context(), h.db, driver.Dialect)
	require.NoError(b, err)
	sequence, err := ordering.NewSequence(b.Context(), h.db, driver.Dialect)
	require.NoError(b, err)
	windows, err := ordering.NewWindows(b.Context(), h.db, driver.Dialect)
	require.NoError(b, err)
	producer, err := ordering.NewProducer(b.Context(), h.db, driver.Dialect, "shop")
	require.NoError(b, err)
	variants := []variant{
		{name: "floor", handle: func(msg *message.Message) error {
			return h.inTx(msg, func(context.Context, *sql.Tx, *message.Message) (bool, error) { return true, nil }, nil)
		}},
		{name: "by-hand", handle: h.byHand},
		{name: "deduplicate", handle: chained(b, store, "deduplicate")},
		{name: "stale", over: "deduplicate", handle: chained(b, store, "stale", middleware.RejectStale(versions,
			middleware.WithVersion(ordering.VersionFromMetadata("version"))))},
		{name: "sequence", over: "deduplicate", handle: chained(b, store, "sequence", middleware.Sequence(sequence,
			middleware.WithSequence(ordering.VersionFromMetadata("version"))))},
		{name: "replayed", over: "deduplicate", handle: chained(b, store, "replayed", middleware.RejectReplayed(windows)),
			prepare: func(msg *message.Message) error { return producer.Stamp("orders", msg) }},
	}
	if h.bounded != nil {
		bounded, err := deduplicator.NewSQLStore(b.Context(), h.bounded, h.dialect)
		require.NoError(b, err)
		variants = append(variants, variant{name: "server-wait", handle: chained(b, bounded, "server-wait")})
	}
	return variants
}
