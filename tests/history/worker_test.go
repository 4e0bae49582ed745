package history_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/child"
)

const (
	handlerName = "effects"
	group       = "group"

	// Of messages, beside the partition key, which is the entity.
	eventID  = "event_id"
	sequence = "sequence"
)

// guard is what stands before the handler.
type guard string

const (
	nothing         guard = "nothing"
	deduplicateOnly guard = "Deduplicate"
	rejectStale     guard = "Deduplicate, RejectStale"
	strictSequence  guard = "Deduplicate, Sequence"
)

// step is a moment in the life of a message at which its worker can be stopped.
type step string

const (
	received  step = "received"  // nothing is done yet
	written   step = "written"   // by the handler, the transaction is open
	committed step = "committed" // the message is not acknowledged
)

// settings are what a worker needs to know.
type settings struct {
	Dialect deduplicator.Dialect
	DSN     string
	Kafka   string // address of the broker, or
	AMQP    string // its URL
	Proxy   string // where to find the broker instead of there
	Routing amqpshard.Routing
	Shards  int
	Session time.Duration // after which Kafka gives up on a consumer of which it hears nothing
	Topic   string
	Guard   guard
	Worker  string // its name

	// ErrorsIn makes the handler fail once with every nth event, before or after it
	// writes; 0: never.
	ErrorsIn uint32

	// Stop is the step at which the worker stops itself by SIGSTOP, when it comes to
	// event StopIn. Empty: it does not.
	Stop   step
	StopIn string
}

func (s settings) poison() string { return s.Topic + "-poison" }

// open returns the broker, with timeouts that notice stopped processes soon.
func (s settings) open(ctx context.Context) (ordering.Broker, error) {
	if s.AMQP != "" {
		u, err := url.Parse(s.AMQP)
		if err != nil {
			return nil, err
		}
		u.RawQuery = "heartbeat=1"
		if s.Proxy != "" {
			u.Host = s.Proxy
		}
		return amqpshard.Open(ctx, amqpshard.Config{URL: u.String(), Group: group, Shards: s.Shards, Routing: s.Routing,
			PublishTimeout: 5 * time.Second, DrainTimeout: 5 * time.Second}, nil)
	}
	return kafkashard.Open(ctx, kafkashard.Config{Brokers: []string{s.Kafka}, Group: group + "-" + s.Topic, Shards: s.Shards,
		PublishTimeout: 5 * time.Second, DrainTimeout: 5 * time.Second, Sarama: func(c *sarama.Config) {
			c.Consumer.Group.Session.Timeout = s.Session
			c.Consumer.Group.Heartbeat.Interval = 200 * time.Millisecond
			if s.Proxy != "" {
				c.Net.Proxy.Enable, c.Net.Proxy.Dialer = true, s
			}
		}}, nil)
}

// Dial connects to the proxy, whatever address Kafka has said it is at.
func (s settings) Dial(network, _ string) (net.Conn, error) {
	return net.DialTimeout(network, s.Proxy, 5*time.Second)
}

// What a worker reports, one line each:
//
//	got RUN ENTITY SEQ TIME      a message has come, or is released
//	end RUN TIME                 it is done, after the commit
//	outcome OUTCOME              what the observer was told
//	stopping
const (
	got      = "got"
	end      = "end"
	outcome  = "outcome"
	stopping = "stopping"
)

// worker is a router whose handler writes the history.
type worker struct {
	settings
	db     *sql.DB
	report func(string)
	count  atomic.Int64
	failed sync.Map // events with which the handler has failed
}

// runWorker is the process. As a supervisor would, it starts again what could not
// start because the broker was away.
func runWorker(encoded []byte, report func(string)) error {
	var s settings
	if err := json.Unmarshal(encoded, &s); err != nil {
		return err
	}
	driver := map[deduplicator.Dialect]string{deduplicator.PostgreSQL: "pgx", deduplicator.MySQL: "mysql"}[s.Dialect]
	db, err := sql.Open(driver, s.DSN)
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(s.Shards + 1)
	db.SetMaxIdleConns(s.Shards + 1)
	w := &worker{settings: s, db: db, report: report}
	for ctx := context.Background(); ; {
		fmt.Fprintln(os.Stderr, s.Worker, w.run(ctx))
		time.Sleep(100 * time.Millisecond)
	}
}

// run returns when it could not start or the router has ended.
func (w *worker) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	broker, err := w.open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = broker.Close() }()
	if err := broker.Declare(ctx, w.poison()); err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	router.AddMiddleware(w.delivered)
	if w.Guard != nothing {
		chain, err := w.chain(ctx, broker)
		if err != nil {
			return err
		}
		router.AddMiddleware(chain...)
	}
	router.AddConsumerHandler(handlerName, w.Topic, broker.Subscriber(), w.handle)
	return router.Run(ctx)
}

func (w *worker) chain(ctx context.Context, broker ordering.Broker) ([]message.HandlerMiddleware, error) {
	store, err := deduplicator.NewSQLStore(ctx, w.db, w.Dialect, deduplicator.WithClaimTimeout(time.Second))
	if err != nil {
		return nil, err
	}
	observe := func(_ context.Context, e middleware.Event) {
		w.report(outcome + " " + string(e.Outcome))
		if e.Err != nil {
			fmt.Fprintln(os.Stderr, w.Worker, e.Outcome, e.Err)
		}
	}
	links := []middleware.Link{
		middleware.WithObserver(observe),
		middleware.WithPoisonQueue(broker.Publisher(), w.poison()),
		middleware.WithRetry(middleware.Retry{MaxRetries: 5, InitialInterval: 10 * time.Millisecond, MaxInterval: 200 * time.Millisecond}),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromMetadata(eventID))),
	}
	number := ordering.VersionFromMetadata(sequence)
	switch w.Guard {
	case rejectStale:
		versions, err := ordering.NewVersions(ctx, w.db, w.Dialect)
		if err != nil {
			return nil, err
		}
		links = append(links, middleware.RejectStale(versions, middleware.WithVersion(number)))
	case strictSequence:
		seq, err := ordering.NewSequence(ctx, w.db, w.Dialect)
		if err != nil {
			return nil, err
		}
		links = append(links, middleware.Sequence(seq, middleware.WithSequence(number)))
		releaser, err := middleware.NewReleaser(reportingStore{store, w}, seq, middleware.ReleaserConfig{
			Consumer: handlerName, Handler: func(msg *message.Message) ([]*message.Message, error) { return nil, w.handle(msg) },
			Interval: time.Second, Observers: []middleware.Observer{observe},
		})
		if err != nil {
			return nil, err
		}
		go func() { _ = releaser.Run(ctx) }()
	}
	return middleware.Chain(links...)
}

// runs are the runs of one transaction: of the message, and of the parked ones
// that it releases.
type runs struct {
	w       *worker
	id      string
	message string   // UUID
	ids     []string // of those that have begun
}

type runsKey struct{}

func (w *worker) newRuns() *runs {
	return &runs{w: w, id: fmt.Sprint(w.Worker, "/", w.count.Add(1))}
}

// begin returns the run of msg.
func (r *runs) begin(msg *message.Message) string {
	if msg.UUID == r.message {
		return r.id
	}
	id := fmt.Sprint(r.id, ".", len(r.ids))
	r.ids = append(r.ids, id)
	r.w.report(fmt.Sprint(got, " ", id, " ", msg.Metadata.Get(ordering.PartitionKeyMetadata), " ",
		msg.Metadata.Get(sequence), " ", time.Now().UnixNano()))
	return id
}

func (r *runs) end() {
	now := time.Now().UnixNano()
	for _, id := range r.ids {
		r.w.report(fmt.Sprint(end, " ", id, " ", now))
	}
}

// reportingStore tells of what a Releaser does.
type reportingStore struct {
	deduplicator.Store
	w *worker
}

func (s reportingStore) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	r := s.w.newRuns()
	defer r.end()
	return s.Store.Process(context.WithValue(ctx, runsKey{}, r), claim, work)
}

// delivered is outside of everything else.
func (w *worker) delivered(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		r := w.newRuns()
		r.begin(msg)
		r.id, r.message = r.ids[0], msg.UUID
		defer r.end()
		msg.SetContext(context.WithValue(msg.Context(), runsKey{}, r))
		w.reached(received, msg)
		produced, err := h(msg)
		if err == nil {
			w.reached(committed, msg)
		}
		return produced, err
	}
}

func (w *worker) reached(at step, msg *message.Message) {
	if at == w.Stop && msg.Metadata.Get(eventID) == w.StopIn {
		w.report(stopping)
		child.StopSelf()
	}
}

var errPlanned = errors.New("planned error")

func (w *worker) handle(msg *message.Message) error {
	r, ok := msg.Context().Value(runsKey{}).(*runs)
	if !ok {
		return errors.New("no run in the context")
	}
	run := r.begin(msg)
	before, after := w.failures(msg.Metadata.Get(eventID))
	if before {
		return errPlanned
	}
	if w.Guard == nothing {
		// As a handler that does not look at the context of its message.
		ctx := context.WithoutCancel(msg.Context())
		tx, err := w.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err := w.write(ctx, tx, msg, run); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		if after {
			return errors.Join(errPlanned, tx.Rollback())
		}
		return tx.Commit()
	}
	tx, ok := middleware.Tx(msg.Context())
	if !ok {
		return errors.New("no transaction")
	}
	if err := w.write(msg.Context(), tx, msg, run); err != nil {
		return err
	}
	if after {
		return errPlanned
	}
	return nil
}

// failures says when to fail with an event, once in this process.
func (w *worker) failures(event string) (before, after bool) {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(event))
	n := hash.Sum32()
	if w.ErrorsIn == 0 || n%w.ErrorsIn != 0 {
		return false, false
	}
	if _, again := w.failed.LoadOrStore(event, nil); again {
		return false, false
	}
	return n/w.ErrorsIn%2 == 0, n/w.ErrorsIn%2 == 1
}

// write is the effect. The entity's row is locked until the commit, so places are
// in the order of commits.
func (w *worker) write(ctx context.Context, tx *sql.Tx, msg *message.Message, run string) error {
	entity, seq := msg.Metadata.Get(ordering.PartitionKeyMetadata), msg.Metadata.Get(sequence)
	result, err := tx.ExecContext(ctx, w.Dialect.Rebind("UPDATE entities SET place = place + 1, seq = ? WHERE entity = ?"), seq, entity)
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n != 1 {
		return fmt.Errorf("%d rows of entity %q: %w", n, entity, err)
	}
	if _, err = tx.ExecContext(ctx, w.Dialect.Rebind("INSERT INTO history (entity, place, seq, run) SELECT entity, place, seq, ? FROM entities WHERE entity = ?"),
		run, entity); err != nil {
		return err
	}
	w.reached(written, msg)
	return nil
}

var historyTables = []string{
	"CREATE TABLE entities (entity varchar(64) PRIMARY KEY, place bigint NOT NULL, seq bigint NOT NULL)",
	"CREATE TABLE history (entity varchar(64) NOT NULL, place bigint NOT NULL, seq bigint NOT NULL, run varchar(64) NOT NULL, PRIMARY KEY (entity, place))",
}
