package sidebyside_test

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// transport is watermill-sql in the fixture's database. What is published waits
// for a subscriber.
type transport struct {
	pub *wsql.Publisher
	sub *wsql.Subscriber
}

func (f *fixture) transport(ackDeadline time.Duration) transport {
	f.Helper()
	schema, offsets := wsql.SchemaAdapter(wsql.DefaultPostgreSQLSchema{}), wsql.OffsetsAdapter(wsql.DefaultPostgreSQLOffsetsAdapter{})
	if f.driver.Dialect == deduplicator.MySQL {
		schema, offsets = wsql.DefaultMySQLSchema{}, wsql.DefaultMySQLOffsetsAdapter{}
	}
	pub, err := wsql.NewPublisher(f.db, wsql.PublisherConfig{SchemaAdapter: schema, AutoInitializeSchema: true}, watermill.NopLogger{})
	require.NoError(f, err)
	sub, err := wsql.NewSubscriber(f.db, wsql.SubscriberConfig{
		AckDeadline:      &ackDeadline,
		PollInterval:     10 * time.Millisecond,
		ResendInterval:   10 * time.Millisecond,
		RetryInterval:    10 * time.Millisecond,
		SchemaAdapter:    schema,
		OffsetsAdapter:   offsets,
		InitializeSchema: true,
	}, watermill.NopLogger{})
	require.NoError(f, err)
	return transport{pub, sub}
}

// sharing is the side that joins the subscriber's transaction, as watermill-sql's
// documentation shows it.
func sharing(f *fixture) side { return inTx(f, nil, wsql.TxFromContext) }

// attempts is what a handler saw.
type attempts struct {
	mu    sync.Mutex
	errs  []error
	times []time.Time
}

// add notes the start of an attempt and returns its number, from 1.
func (a *attempts) add() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.times = append(a.times, time.Now())
	a.errs = append(a.errs, nil)
	return len(a.times)
}

func (a *attempts) end(n int, err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.errs[n-1] = err
	return err
}

// deliver publishes one message and waits until the subscriber has committed its
// offset.
func (s side) deliver(tr transport, handler func(n int, msg *message.Message) error) *attempts {
	s.Helper()
	seen := &attempts{}
	require.NoError(s, tr.pub.Publish(topic, event("1", "{}")))
	s.run(func(router *message.Router) {
		router.AddConsumerHandler("stock", topic, tr.sub, func(msg *message.Message) error {
			n := seen.add()
			return seen.end(n, handler(n, msg))
		})
	})
	s.eventually("the message is acknowledged", s.acknowledged)
	seen.mu.Lock()
	defer seen.mu.Unlock()
	return &attempts{errs: seen.errs, times: seen.times}
}

// acknowledged reports whether the subscriber has committed an offset.
func (f *fixture) acknowledged() bool {
	return f.count("SELECT COALESCE(MAX(offset_acked), 0) FROM watermill_offsets_"+topic) > 0
}

// noDeadline is longer than any of these tests.
const noDeadline = time.Minute

// M5: the handler writes and fails, twice.
func TestM5NackKeepsTheTransaction(t *testing.T) {
	t.Parallel()
	scenario := func(s side) (calls, effects int) {
		seen := s.deliver(s.transport(noDeadline), func(n int, msg *message.Message) error {
			if err := s.write(msg); err != nil || n > 2 {
				return err
			}
			return errTransient
		})
		return len(seen.errs), s.effects()
	}
	for _, driver := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			calls, effects := scenario(sharing(setup(t, driver)))
			require.Equal(t, 3, calls, "stock")
			require.Equal(t, 3, effects, "stock: what the failed attempts wrote is committed with the rest")

			for name, outer := range map[string][]middleware.Link{"nacks": nil, "WithRetry": {retry()}} {
				calls, effects = scenario(ours(setup(t, driver), outer...))
				require.Equal(t, 3, calls, name)
				require.Equal(t, 1, effects, name)
			}
		})
	}
}

// M6: one statement of the first attempt fails. MariaDB does not end a
// transaction for that, so there it is M5.
func TestM6SQLErrorBlocksUntilTheAckDeadline(t *testing.T) {
	t.Parallel()
	const deadline = time.Second
	scenario := func(s side) (*attempts, int) {
		seen := s.deliver(s.transport(deadline), func(n int, msg *message.Message) error {
			if n > 1 {
				return s.write(msg)
			}
			tx, _ := s.tx(msg.Context())
			_, err := tx.ExecContext(msg.Context(), "INSERT INTO no_such_table VALUES (1)")
			return err
		})
		return seen, s.effects()
	}

	seen, effects := scenario(sharing(setup(t, testdb.PGX)))
	aborted := 0
	for _, err := range seen.errs[1:] {
		var refused *pgconn.PgError
		if errors.As(err, &refused) {
			require.Equal(t, "25P02", refused.Code, "stock: %v", err)
			aborted++
		}
	}
	last := len(seen.errs) - 1
	took := seen.times[last].Sub(seen.times[0])
	t.Logf("stock: %d attempts in the aborted transaction; recovered after %v", aborted, took)
	require.Greater(t, aborted, 3, "stock: every attempt until the deadline fails")
	require.NoError(t, seen.errs[last])
	require.Greater(t, took, deadline*9/10, "stock: only the ack deadline ends the transaction")
	require.Equal(t, 1, effects)

	seen, effects = scenario(ours(setup(t, testdb.PGX)))
	require.Len(t, seen.errs, 2, "the next attempt has a transaction of its own")
	require.NoError(t, seen.errs[1])
	require.Equal(t, 1, effects)
}

// M7: the handler is slower than the ack deadline, twice.
func TestM7HandlerSlowerThanTheAckDeadline(t *testing.T) {
	t.Parallel()
	const deadline = 500 * time.Millisecond
	scenario := func(s side) (calls, effects int) {
		seen := s.deliver(s.transport(deadline), func(n int, msg *message.Message) error {
			err := s.write(msg)
			if n <= 2 {
				<-msg.Context().Done() // the deadline
			}
			return err
		})
		return len(seen.errs), s.effects()
	}
	for _, driver := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			calls, effects := scenario(sharing(setup(t, driver)))
			require.Equal(t, 3, calls, "stock")
			require.Equal(t, 3, effects, "stock: at the deadline the open transaction is committed, without the offset")

			calls, effects = scenario(ours(setup(t, driver), retry()))
			require.Equal(t, 3, calls)
			require.Equal(t, 1, effects, "at the deadline the transaction is rolled back")
		})
	}
}

// With a poison queue, a delivery that runs out of the ack deadline can be parked
// although watermill-sql delivers the message again: the deadline must be longer
// than all attempts together. Whether it is parked is a race in watermill-sql: the
// deadline and the subscriber's own cancel both end the message's context, and
// only the first one's error is seen.
func TestPoisonQueueAtTheAckDeadline(t *testing.T) {
	t.Parallel()
	poison := &publisher{}
	s := ours(setup(t, testdb.PGX), middleware.WithPoisonQueue(poison, "poison"), retry())
	s.deliver(s.transport(200*time.Millisecond), func(_ int, msg *message.Message) error {
		err := s.write(msg)
		if poison.sent() == "" {
			<-msg.Context().Done() // the deadline
		}
		return err
	})
	require.NotEmpty(t, poison.sent(), "parked")
	require.Equal(t, 1, s.effects(), "and handled")
}

// The deadline can't be switched off, other than its documentation says.
func TestWatermillSQLRefusesNoAckDeadline(t *testing.T) {
	t.Parallel()
	never := time.Duration(0)
	_, err := wsql.NewSubscriber(setup(t, testdb.PGX).db, wsql.SubscriberConfig{
		AckDeadline: &never, SchemaAdapter: wsql.DefaultPostgreSQLSchema{}, OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
	}, watermill.NopLogger{})
	require.ErrorContains(t, err, "ack deadline must be a positive duration")
}

// Messages that a handler makes: stock publishes them in the shared transaction,
// ours returns them.
func TestWatermillSQLMessagesOfFailedAttempts(t *testing.T) {
	t.Parallel()
	made := func(s side) int { return s.count("SELECT COUNT(*) FROM watermill_reserved") }

	s := sharing(setup(t, testdb.PGX))
	tr := s.transport(noDeadline)
	require.NoError(t, tr.sub.SubscribeInitialize("reserved"))
	s.deliver(tr, func(n int, msg *message.Message) error {
		tx, _ := wsql.TxFromContext(msg.Context())
		pub, err := wsql.NewPublisher(tx, wsql.PublisherConfig{SchemaAdapter: wsql.DefaultPostgreSQLSchema{}}, watermill.NopLogger{})
		if err != nil {
			return err
		}
		if err := pub.Publish("reserved", event("reserved", "{}")); err != nil || n > 2 {
			return err
		}
		return errTransient
	})
	require.Equal(t, 3, made(s), "stock: one of each attempt")

	s = ours(setup(t, testdb.PGX), retry())
	tr = s.transport(noDeadline)
	require.NoError(t, tr.pub.Publish(topic, event("1", "{}")))
	require.NoError(t, tr.sub.SubscribeInitialize("reserved"))
	var n atomic.Int32
	s.run(func(router *message.Router) {
		router.AddHandler("stock", topic, tr.sub, "reserved", tr.pub, func(*message.Message) ([]*message.Message, error) {
			reserved := event("reserved", "{}")
			if n.Add(1) <= 2 {
				return []*message.Message{reserved}, errTransient
			}
			return []*message.Message{reserved}, nil
		})
	})
	s.eventually("the message is acknowledged", s.acknowledged)
	require.Equal(t, 1, made(s))
	s.eventually("outputs are forgotten", func() bool { return s.count("SELECT COUNT(*) FROM produced_messages") == 0 })
}

// The subscriber's connection is lost after the handler's work. Sharing one
// transaction is right here; two transactions need the key to be.
func TestWatermillSQLSubscriberLosesItsConnection(t *testing.T) {
	t.Parallel()
	scenario := func(s side) (calls, effects int) {
		seen := s.deliver(s.transport(noDeadline), func(n int, msg *message.Message) error {
			if err := s.write(msg); err != nil || n > 1 {
				return err
			}
			tx, _ := wsql.TxFromContext(msg.Context())
			_, err := s.db.ExecContext(msg.Context(), "SELECT pg_terminate_backend($1)", s.backendOf(tx))
			return err
		})
		return len(seen.errs), s.effects()
	}
	calls, effects := scenario(sharing(setup(t, testdb.PGX)))
	require.Equal(t, 2, calls, "stock")
	require.Equal(t, 1, effects, "stock")

	var outcomes events
	calls, effects = scenario(ours(setup(t, testdb.PGX), middleware.WithObserver(outcomes.observe)))
	require.Equal(t, 1, calls, "the redelivery is a duplicate")
	require.Equal(t, 1, effects)
	require.Equal(t, []middleware.Outcome{middleware.Processed, middleware.Duplicate}, outcomes.seen())
}

func (f *fixture) backendOf(tx *sql.Tx) (pid int) {
	f.Helper()
	require.NoError(f, tx.QueryRowContext(f.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	return pid
}

// The subscriber keeps one connection of its pool for the message: ours needs
// another one.
func TestWatermillSQLPoolOfOne(t *testing.T) {
	t.Parallel()
	f := setup(t, testdb.PGX)
	reported := make(chan middleware.Event, 100)
	s := ours(f, middleware.WithObserver(func(_ context.Context, e middleware.Event) { reported <- e }),
		middleware.WithPoisonQueue(&publisher{}, "poison"))
	tr := s.transport(500 * time.Millisecond)
	require.NoError(t, tr.pub.Publish(topic, event("1", "{}")))
	f.db.SetMaxOpenConns(1)
	s.run(func(router *message.Router) { router.AddConsumerHandler("stock", topic, tr.sub, s.write) })
	first := await(t, reported, "the first delivery ends")
	require.Equal(t, middleware.Failed, first.Outcome, "not parked: the message is not to blame")
	require.ErrorIs(t, first.Err, deduplicator.ErrUnavailable)
	require.Greater(t, first.Duration, 400*time.Millisecond, "it waited for the deadline")
	f.db.SetMaxOpenConns(2)
	for await(t, reported, "a delivery ends").Outcome != middleware.Processed {
	}
	require.Equal(t, 1, s.effects())
}

// Stock's subscriber keeps its transaction open while the handler runs, whoever
// writes what in which transaction.
func TestWatermillSQLSlowHandlerHoldsBackOthers(t *testing.T) {
	t.Parallel()
	start := func(f *fixture) (tr transport, proceed func()) {
		tr = f.transport(noDeadline)
		ended := make(chan struct{})
		proceed = sync.OnceFunc(func() { close(ended) })
		running := make(chan struct{}, 10)
		require.NoError(f, tr.pub.Publish(topic, event("1", "{}")))
		side{fixture: f}.run(func(router *message.Router) {
			router.AddConsumerHandler("stock", topic, tr.sub, func(*message.Message) error {
				running <- struct{}{}
				<-ended
				return nil
			})
		})
		f.Cleanup(proceed)
		await(f.T, running, "the handler runs")
		return tr, proceed
	}

	t.Run("PostgreSQL: no later message of any topic is delivered", func(t *testing.T) {
		t.Parallel()
		f := setup(t, testdb.PGX)
		tr, proceed := start(f)
		require.NoError(t, tr.pub.Publish("other", event("2", "{}")))
		deliverable := func() bool {
			return f.count("SELECT COUNT(*) FROM watermill_other WHERE transaction_id < pg_snapshot_xmin(pg_current_snapshot())") > 0
		}
		require.False(t, deliverable())
		proceed()
		f.eventually("deliverable after the handler", deliverable)
	})
	t.Run("MariaDB: publishing to the topic waits", func(t *testing.T) {
		t.Parallel()
		f := setup(t, testdb.MySQL)
		tr, proceed := start(f)
		tx, err := f.db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer tx.Rollback() //nolint:errcheck // nothing was written
		_, err = tx.ExecContext(t.Context(), "SET SESSION innodb_lock_wait_timeout = 1")
		require.NoError(t, err)
		pub, err := wsql.NewPublisher(tx, wsql.PublisherConfig{SchemaAdapter: wsql.DefaultMySQLSchema{}}, watermill.NopLogger{})
		require.NoError(t, err)
		var refused *mysql.MySQLError
		require.ErrorAs(t, pub.Publish(topic, event("2", "{}")), &refused)
		require.EqualValues(t, 1205, refused.Number, "lock wait timeout")
		proceed()
		f.eventually("published after the handler", func() bool { return tr.pub.Publish(topic, event("3", "{}")) == nil })
	})
}
