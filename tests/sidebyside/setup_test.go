// Package sidebyside_test runs what stock Watermill (v1.5.1), watermill-sql
// (v3.1.0) and watermill-amqp (v2.1.3) do, and what this module does, in the same
// scenario. A test of stock behaviour that fails after an upgrade is news: the
// migration guides in docs/ name these tests.
package sidebyside_test

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/routers"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// Every stock Deduplicator with the default repository starts a cleaner that never ends.
		goleak.IgnoreTopFunction("github.com/ThreeDotsLabs/watermill/message/router/middleware.(*mapExpiringKeyRepository).cleanOutLoop"))
}

// patience is for what must happen.
const patience = 30 * time.Second

const topic = "orders"

var errTransient = errors.New("transient")

// fixture is one empty database. Each side of a comparison gets its own.
type fixture struct {
	*testing.T
	db     *sql.DB
	driver testdb.Driver
}

func setup(t *testing.T, driver testdb.Driver) *fixture {
	t.Helper()
	f := &fixture{T: t, db: testdb.Open(t, driver), driver: driver}
	require.NoError(t, deduplicator.Migrate(t.Context(), f.db, driver.Dialect))
	f.exec("CREATE TABLE effects (event varchar(64) NOT NULL)")
	return f
}

func (f *fixture) exec(query string) {
	f.Helper()
	_, err := f.db.ExecContext(f.Context(), query)
	require.NoError(f, err)
}

func (f *fixture) count(query string, args ...any) int {
	f.Helper()
	var n int
	require.NoError(f, f.db.QueryRowContext(f.Context(), query, args...).Scan(&n))
	return n
}

// effects counts what handlers wrote and somebody committed.
func (f *fixture) effects() int {
	f.Helper()
	return f.count("SELECT COUNT(*) FROM effects")
}

// eventually waits for what is only visible in the database.
func (f *fixture) eventually(what string, condition func() bool) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), patience)
	defer cancel()
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for !condition() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			require.FailNow(f, "timeout: "+what)
		}
	}
}

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// insert is the effect of a handler.
func (f *fixture) insert(ctx context.Context, on execer, event string) error {
	query := "INSERT INTO effects (event) VALUES (?)"
	if f.driver.Dialect == deduplicator.PostgreSQL {
		query = "INSERT INTO effects (event) VALUES ($1)"
	}
	_, err := on.ExecContext(ctx, query, event)
	return err
}

// side is one of the two ways to run a scenario.
type side struct {
	*fixture
	middlewares []message.HandlerMiddleware
	write       func(msg *message.Message) error // the effect of the handler
	tx          func(ctx context.Context) (*sql.Tx, bool)
}

// stock is Watermill's Deduplicator and a handler that writes to the database as
// it likes. The defaults are spelled out, because two handlers that apply them
// are a data race.
func stock(f *fixture) side {
	f.Helper()
	repository, err := watermillmw.NewMapExpiringKeyRepository(time.Minute)
	require.NoError(f, err)
	deduplicate := &watermillmw.Deduplicator{
		KeyFactory: watermillmw.NewMessageHasherAdler32(math.MaxInt64), Repository: repository, Timeout: time.Minute,
	}
	return side{f, []message.HandlerMiddleware{deduplicate.Middleware}, func(msg *message.Message) error {
		return f.insert(msg.Context(), f.db, msg.Metadata.Get("event_id"))
	}, nil}
}

// ours is Deduplicate, by event_id, behind outer links.
func ours(f *fixture, outer ...middleware.Link) side {
	return inTx(f, f.chain(append(outer, f.deduplicate())...), middleware.Tx)
}

// inTx is a side whose handler writes through a transaction from its context.
func inTx(f *fixture, middlewares []message.HandlerMiddleware, tx func(ctx context.Context) (*sql.Tx, bool)) side {
	return side{f, middlewares, func(msg *message.Message) error {
		tx, ok := tx(msg.Context())
		if !ok {
			return errors.New("no transaction")
		}
		return f.insert(msg.Context(), tx, msg.Metadata.Get("event_id"))
	}, tx}
}

func (f *fixture) deduplicate(opts ...deduplicator.Option) middleware.Link {
	f.Helper()
	store, err := deduplicator.NewSQLStore(f.Context(), f.db, f.driver.Dialect, opts...)
	require.NoError(f, err)
	return middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromMetadata("event_id")))
}

func (f *fixture) chain(links ...middleware.Link) []message.HandlerMiddleware {
	f.Helper()
	chain, err := middleware.Chain(links...)
	require.NoError(f, err)
	return chain
}

// retry is WithRetry with pauses that suit a test.
func retry() middleware.Link {
	return middleware.WithRetry(middleware.Retry{MaxRetries: 3, InitialInterval: 5 * time.Millisecond})
}

// serve runs handler in a Router of its own, on an in-process broker that delivers
// one message at a time and a nacked one again. The channel that the result
// returns is closed when the message is acknowledged.
func (s side) serve(handler message.NoPublishHandlerFunc) (send func(*message.Message) <-chan struct{}) {
	return s.serveWith(func(router *message.Router, broker message.Subscriber) {
		router.AddConsumerHandler("stock", topic, broker, handler)
	})
}

func (s side) serveWith(add func(*message.Router, message.Subscriber)) (send func(*message.Message) <-chan struct{}) {
	s.Helper()
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	s.run(func(router *message.Router) { add(router, broker) })
	return func(msg *message.Message) <-chan struct{} {
		acked := make(chan struct{})
		go func() {
			if err := broker.Publish(topic, msg); err == nil {
				close(acked)
			}
		}()
		return acked
	}
}

// run runs a Router with the side's middlewares until the end of the test.
func (s side) run(add func(*message.Router)) {
	s.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	require.NoError(s, err)
	router.AddMiddleware(s.middlewares...)
	add(router)
	routers.Run(s, router)
}

// await fails the test unless done is closed or sent to in time.
func await[T any](t *testing.T, done <-chan T, what string) T {
	t.Helper()
	var value T
	select {
	case value = <-done:
	case <-time.After(patience):
		require.FailNow(t, "timeout: "+what)
	}
	return value
}

func event(id, payload string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	msg.Metadata.Set("event_id", id)
	return msg
}

// publisher records what it is given; it refuses the first calls.
type publisher struct {
	mu       sync.Mutex
	refuse   int
	messages []*message.Message
}

func (p *publisher) Publish(_ string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refuse > 0 {
		p.refuse--
		return errTransient
	}
	p.messages = append(p.messages, messages...)
	return nil
}

func (p *publisher) Close() error { return nil }

// sent are the UUIDs of the messages.
func (p *publisher) sent() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var uuids []string
	for _, msg := range p.messages {
		uuids = append(uuids, msg.UUID)
	}
	return strings.Join(uuids, " ")
}

// events is an Observer that remembers the outcomes.
type events struct {
	mu       sync.Mutex
	outcomes []middleware.Outcome
}

func (e *events) observe(_ context.Context, event middleware.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.outcomes = append(e.outcomes, event.Outcome)
}

func (e *events) seen() []middleware.Outcome {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.outcomes)
}
