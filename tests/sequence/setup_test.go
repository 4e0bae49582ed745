// Package sequence_test runs strict sequences on the real databases.
package sequence_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	flag.Parse()
	parallel := flag.Lookup("test.parallel")
	if parallel.Value.String() == parallel.DefValue {
		_ = parallel.Value.Set("6") // the tests wait for databases, not for the CPU
	}
	if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
		_ = checks.Value.Set("15") // each is a hundred transactions
	}
	_ = flag.Set("rapid.nofailfile", "true") // what it prints is enough
	goleak.VerifyTestMain(m)
}

const consumer = "stock"

// drivers are one for each kind of database, and both ways in which MySQL counts.
var drivers = []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL, testdb.MySQLFoundRows, testdb.SQLite, testdb.SQLite3}

func each(t *testing.T, drivers []testdb.Driver, test func(t *testing.T, d testdb.Driver)) {
	t.Helper()
	for _, d := range drivers {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			test(t, d)
		})
	}
}

// kit is a consumer whose handler appends the event to a table of effects.
type kit struct {
	testing.TB
	d        testdb.Driver
	db       *sql.DB
	store    *deduplicator.SQLStore
	sequence *ordering.Sequence
	operator *ordering.Operator
	handler  message.HandlerFunc // the chain around handle

	mu     sync.Mutex
	fail   func(msg *message.Message) error // of the handler, after its write
	events []middleware.Event
	ids    int
}

func migrate(t testing.TB, d testdb.Driver) *testdb.Database {
	t.Helper()
	database := testdb.Create(t, d)
	db := database.Open(t)
	require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect))
	require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect))
	_, err := db.ExecContext(t.Context(), "CREATE TABLE applied (entity varchar(64) NOT NULL, n integer NOT NULL, at varchar(64) NOT NULL, PRIMARY KEY (entity, n))")
	require.NoError(t, err)
	return database
}

func newKit(t testing.TB, d testdb.Driver, opts ...ordering.SequenceOption) *kit {
	t.Helper()
	return instance(t, migrate(t, d), opts...)
}

// instance is one process that works on database.
func instance(t testing.TB, database *testdb.Database, opts ...ordering.SequenceOption) *kit {
	t.Helper()
	k := &kit{TB: t, d: database.Driver, db: database.Open(t)}
	var err error
	k.store, err = deduplicator.NewSQLStore(t.Context(), k.db, k.d.Dialect, deduplicator.WithClaimTimeout(10*time.Second))
	require.NoError(t, err)
	k.sequence, err = ordering.NewSequence(t.Context(), k.db, k.d.Dialect, opts...)
	require.NoError(t, err)
	k.operator, err = ordering.NewOperator(t.Context(), k.db, k.d.Dialect)
	require.NoError(t, err)
	chain, err := middleware.Chain(
		middleware.WithObserver(k.observe),
		middleware.WithRetry(middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond, MaxInterval: time.Millisecond}),
		middleware.Deduplicate(k.store, middleware.WithKey(deduplicator.FromMetadata("id")), middleware.WithConsumer(consumer)),
		middleware.Sequence(k.sequence,
			middleware.WithEntity(ordering.KeyFromMetadata("entity")),
			middleware.WithSequence(ordering.VersionFromMetadata("seq")),
			middleware.WithEpoch(ordering.VersionFromMetadata("epoch"))),
	)
	require.NoError(t, err)
	k.handler = k.handle
	for i := len(chain) - 1; i >= 0; i-- {
		k.handler = chain[i](k.handler)
	}
	return k
}

func (k *kit) handle(msg *message.Message) ([]*message.Message, error) {
	tx, ok := middleware.Tx(msg.Context())
	if !ok {
		return nil, errors.New("no transaction")
	}
	entity := msg.Metadata.Get("entity")
	at := msg.Metadata.Get("epoch") + "/" + msg.Metadata.Get("seq")
	query := k.d.Dialect.Rebind("INSERT INTO applied (entity, n, at) SELECT ?, COALESCE(MAX(n), 0) + 1, ? FROM applied WHERE entity = ?")
	if _, err := tx.ExecContext(msg.Context(), query, entity, at, entity); err != nil {
		return nil, err
	}
	k.mu.Lock()
	fail := k.fail
	k.mu.Unlock()
	if fail != nil {
		return nil, fail(msg)
	}
	return nil, nil
}

func (k *kit) failWith(fail func(*message.Message) error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.fail = fail
}

// failAt makes the handler fail with one event.
func (k *kit) failAt(seq int64, err error) {
	k.failWith(func(msg *message.Message) error {
		if msg.Metadata.Get("seq") == strconv.FormatInt(seq, 10) {
			return err
		}
		return nil
	})
}

func (k *kit) observe(_ context.Context, event middleware.Event) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.events = append(k.events, event)
}

// outcomes returns what was observed since the last call.
func (k *kit) outcomes() []middleware.Outcome {
	k.mu.Lock()
	defer k.mu.Unlock()
	outcomes := []middleware.Outcome{}
	for _, event := range k.events {
		outcomes = append(outcomes, event.Outcome)
	}
	k.events = nil
	return outcomes
}

// event makes a message; each call is another one to the deduplicator.
func (k *kit) event(entity string, epoch, seq int64) *message.Message {
	k.mu.Lock()
	k.ids++
	id := fmt.Sprintf("%p-%d", k, k.ids)
	k.mu.Unlock()
	msg := message.NewMessage("uuid-"+id, []byte(fmt.Sprintf("%s %d/%d", entity, epoch, seq)))
	msg.Metadata = message.Metadata{
		"id": id, "entity": entity, "epoch": strconv.FormatInt(epoch, 10), "seq": strconv.FormatInt(seq, 10), "\xff": "\x00é",
	}
	return msg
}

// process delivers msg as the Router does.
func (k *kit) process(msg *message.Message) error {
	ctx, cancel := context.WithCancel(k.Context())
	defer cancel()
	msg.SetContext(ctx)
	_, err := k.handler(msg)
	return err
}

// send delivers an event of entity "e", epoch 0, and checks the outcomes.
func (k *kit) send(seq int64, want ...middleware.Outcome) {
	k.Helper()
	k.sendAs("e", 0, seq, want...)
}

func (k *kit) sendAs(entity string, epoch, seq int64, want ...middleware.Outcome) {
	k.Helper()
	require.NoError(k, k.process(k.event(entity, epoch, seq)))
	require.Equal(k, want, k.outcomes(), "event %d/%d", epoch, seq)
}

// refused delivers an event that comes back with an error.
func (k *kit) refused(seq int64, kind error) error {
	k.Helper()
	err := k.process(k.event("e", 0, seq))
	require.ErrorIs(k, err, kind)
	k.outcomes()
	return err
}

// applied checks the effects of an entity, in their order.
func (k *kit) applied(entity string, want ...string) {
	k.Helper()
	require.Equal(k, append([]string{}, want...), k.effects(entity))
}

func (k *kit) effects(entity string) []string {
	k.Helper()
	rows, err := k.db.QueryContext(k.Context(), k.d.Dialect.Rebind("SELECT at FROM applied WHERE entity = ? ORDER BY n"), entity)
	require.NoError(k, err)
	defer rows.Close()
	effects := []string{}
	for rows.Next() {
		var at string
		require.NoError(k, rows.Scan(&at))
		effects = append(effects, at)
	}
	require.NoError(k, rows.Err())
	return effects
}

// parked checks which messages are parked, as "epoch/seq reason".
func (k *kit) parked(entity string, want ...string) {
	k.Helper()
	listed, err := k.operator.List(k.Context(), ordering.ParkedFilter{Consumer: consumer, Entity: entity})
	require.NoError(k, err)
	got := []string{}
	for _, m := range listed {
		got = append(got, m.Position.String()+" "+m.Reason)
	}
	require.Equal(k, append([]string{}, want...), got)
	var count int
	err = k.db.QueryRowContext(k.Context(), k.d.Dialect.Rebind("SELECT parked FROM entity_sequences WHERE consumer_name = ? AND entity = ?"), consumer, entity).Scan(&count)
	if len(want) > 0 || !errors.Is(err, sql.ErrNoRows) {
		require.NoError(k, err)
	}
	require.Equal(k, len(want), count, "the entity's count of parked messages")
}

func (k *kit) releaser() *middleware.Releaser {
	k.Helper()
	r, err := middleware.NewReleaser(k.store, k.sequence, middleware.ReleaserConfig{
		Consumer: consumer, Handler: k.handle, Interval: 10 * time.Millisecond, Observers: []middleware.Observer{k.observe},
	})
	require.NoError(k, err)
	return r
}

// release makes one pass and checks what it told.
func (k *kit) release(want ...middleware.Outcome) {
	k.Helper()
	require.NoError(k, k.releaser().Release(k.Context()))
	require.Equal(k, append([]middleware.Outcome{}, want...), k.outcomes())
}

func series(from, to int64) []string {
	s := []string{}
	for seq := from; seq <= to; seq++ {
		s = append(s, fmt.Sprint("0/", seq))
	}
	return s
}
