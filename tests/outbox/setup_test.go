// Package outbox_test tests the outbox on the real databases, with Watermill's
// forwarder and a broker in the test process.
package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/outbox"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	flag.Parse()
	parallel := flag.Lookup("test.parallel")
	if parallel.Value.String() == parallel.DefValue {
		_ = parallel.Value.Set("8") // the tests wait for databases, not for the CPU
	}
	goleak.VerifyTestMain(m)
}

// patience is for what must happen.
const patience = time.Minute

var drivers = []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL}

// each runs test on every database.
func each(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	for _, driver := range drivers {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			test(t, setup(t, driver))
		})
	}
}

// fixture is a database with an outbox and a table for effects.
type fixture struct {
	database *testdb.Database
	db       *sql.DB
	box      *outbox.Outbox
}

func setup(t *testing.T, driver testdb.Driver) *fixture {
	t.Helper()
	f := &fixture{database: testdb.Create(t, driver)}
	f.db = f.database.Open(t)
	var err error
	f.box, err = outbox.New(driver.Dialect, outbox.WithPollInterval(20*time.Millisecond))
	require.NoError(t, err)
	require.NoError(t, f.box.Migrate(t.Context(), f.db))
	require.NoError(t, f.box.Migrate(t.Context(), f.db), "at every start")
	require.NoError(t, deduplicator.Migrate(t.Context(), f.db, driver.Dialect))
	_, err = f.db.ExecContext(t.Context(), "CREATE TABLE effects (name varchar(64) NOT NULL)")
	require.NoError(t, err)
	return f
}

// router runs handlers with the chain on an in-process broker until the test
// ends. Keys are UUIDs.
func (f *fixture) router(t *testing.T, observe middleware.Observer, add func(router *message.Router, broker *gochannel.GoChannel)) *gochannel.GoChannel {
	t.Helper()
	store, err := deduplicator.NewSQLStore(t.Context(), f.db, f.database.Driver.Dialect)
	require.NoError(t, err)
	chain, err := middleware.Chain(
		middleware.WithObserver(observe),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())),
	)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(chain...)
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	add(router, broker)
	run(t, router)
	return broker
}

// runner is a Router or a Forwarder.
type runner interface {
	Run(ctx context.Context) error
	Running() chan struct{}
	Close() error
}

func run(t *testing.T, r interface {
	Run(ctx context.Context) error
	Close() error
},
) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	switch r := r.(type) {
	case *message.Router:
		<-r.Running()
	case runner:
		<-r.Running()
	}
	t.Cleanup(func() { require.NoError(t, errors.Join(r.Close(), <-done)) })
}

// forward runs a forwarder with a pool of its own until the test ends.
func (f *fixture) forward(t *testing.T, pub message.Publisher) {
	t.Helper()
	forwarder, err := f.box.Forwarder(f.database.Open(t), pub, nil)
	require.NoError(t, err)
	run(t, forwarder)
}

// inTx runs work in a transaction and commits it.
func (f *fixture) inTx(t *testing.T, work func(ctx context.Context)) {
	t.Helper()
	tx, ctx := f.begin(t)
	work(ctx)
	require.NoError(t, tx.Commit())
}

func (f *fixture) begin(t *testing.T) (*sql.Tx, context.Context) {
	t.Helper()
	tx, err := f.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx, deduplicator.ContextWithTx(t.Context(), tx)
}

func (f *fixture) count(t *testing.T, table string) int {
	t.Helper()
	var n int
	require.NoError(t, f.db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM "+table).Scan(&n))
	return n
}

// stored is how many messages wait in the outbox.
func (f *fixture) stored(t *testing.T) int { return f.count(t, outbox.DefaultTable) }

// newMessage is a message in the transaction of ctx.
func newMessage(ctx context.Context, uuid string) *message.Message {
	return message.NewMessageWithContext(ctx, uuid, []byte("payload of "+uuid))
}

// effect writes one row in the transaction of ctx.
func effect(ctx context.Context, name string) error {
	tx, ok := middleware.Tx(ctx)
	if !ok {
		return errors.New("no transaction")
	}
	_, err := tx.ExecContext(ctx, "INSERT INTO effects (name) VALUES ('"+name+"')")
	return err
}

type sent struct {
	topic string
	msg   *message.Message
}

// recorder is a broker's publisher that remembers what it accepted.
type recorder struct {
	mu       sync.Mutex
	sent     []sent
	attempts int

	before, after func(attempt int) error // nil, or what Publish returns
}

func (r *recorder) Publish(topic string, messages ...*message.Message) error {
	r.mu.Lock()
	r.attempts++
	attempt := r.attempts
	r.mu.Unlock()
	if r.before != nil {
		if err := r.before(attempt); err != nil {
			return err
		}
	}
	r.mu.Lock()
	for _, msg := range messages {
		r.sent = append(r.sent, sent{topic, msg.Copy()})
	}
	r.mu.Unlock()
	if r.after != nil {
		return r.after(attempt)
	}
	return nil
}

func (r *recorder) Close() error { return nil }

func (r *recorder) all() []sent {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.sent)
}

func (r *recorder) uuids() []string {
	var uuids []string
	for _, s := range r.all() {
		uuids = append(uuids, s.msg.UUID)
	}
	return uuids
}

// outcomes counts what became of deliveries.
type outcomes struct {
	mu  sync.Mutex
	all []middleware.Outcome
}

func (o *outcomes) observe(_ context.Context, event middleware.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all = append(o.all, event.Outcome)
}

func (o *outcomes) seen() []middleware.Outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.all)
}

// eventually waits for what a condition, which must become true, is about.
func eventually(t *testing.T, condition func() bool, missing string) {
	t.Helper()
	require.Eventually(t, condition, patience, 5*time.Millisecond, missing)
}
