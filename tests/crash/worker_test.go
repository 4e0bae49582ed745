package crash_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

const shards = 4

// The handlers. Stock returns messages for each one that it gets, which the
// ledger books. The ledger's key is the UUID: an output that came again under
// another one would be booked twice.
const (
	stock  = "stock"
	ledger = "ledger"
)

// step is a moment in the life of a message at which its worker can die.
type step string

const (
	claiming      step = "claiming"       // the claim is not sent yet
	claimed       step = "claimed"        // the claim is answered
	written       step = "written"        // the handler has written
	committing    step = "committing"     // COMMIT is not sent yet
	commitSent    step = "commit sent"    // its answer is not read
	commitFailed  step = "commit failed"  // it is answered by an error, or cut
	committed     step = "committed"      // the answer has arrived at the driver
	publishing    step = "publishing"     // no output is published
	publishedHalf step = "published half" // one of two is
	refused       step = "refused"        // the broker takes no more of them
	published     step = "published"      // all are, the message is not acknowledged
	forgetting    step = "forgetting"     // it is, its outputs are still stored
)

// settings are what a worker needs to know; a child gets them as JSON.
type settings struct {
	Dialect deduplicator.Dialect
	DSN     string
	Kafka   []string // or
	AMQP    string
	Run     string // keeps runs apart on a broker
	Proxy   string // where to find the database instead of where DSN says

	Relay       bool // runs beside the handlers
	RefuseAfter int  // outputs of one message; 0: the broker takes all

	// Stop is the step at which a child halts and waits to be killed, and StopIn
	// where. Empty: it does not.
	Stop   step
	StopIn delivery

	// Mutant breaks the worker: see mutants.
	Mutant string
}

func (s settings) orders() string   { return "orders-" + s.Run }
func (s settings) reserved() string { return "reserved-" + s.Run }
func (s settings) poison() string   { return "poison-" + s.Run }

// open returns a broker for one consumer group.
func (s settings) open(ctx context.Context, group string) (ordering.Broker, error) {
	group += "-" + s.Run
	if s.AMQP != "" {
		// With Slots the shard of a key is known: see sentinels.
		return amqpshard.Open(ctx, amqpshard.Config{URL: s.AMQP, Group: group, Shards: shards, Routing: amqpshard.Slots, DrainTimeout: 5 * time.Second}, nil)
	}
	return kafkashard.Open(ctx, kafkashard.Config{Brokers: s.Kafka, Group: group, Shards: shards, DrainTimeout: 5 * time.Second,
		Sarama: func(c *sarama.Config) {
			// The successor of a worker that was killed takes its place at once.
			c.Consumer.Group.InstanceId = "worker"
			c.Consumer.Offsets.AutoCommit.Interval = 100 * time.Millisecond
		}}, nil)
}

// delivery is a message in a handler.
type delivery struct{ Handler, Event string }

// hook is called at each step of a delivery.
type hook func(d delivery, at step) error

type deliveryKey struct{}

// withDelivery makes the hooks in the driver know whose transaction it is.
func withDelivery(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		d := delivery{message.HandlerNameFromCtx(ctx), msg.Metadata.Get("event_id")}
		msg.SetContext(context.WithValue(ctx, deliveryKey{}, d))
		return h(msg)
	}
}

// worker is a router with both handlers.
type worker struct {
	db      *sql.DB
	router  *message.Router
	brokers []ordering.Broker
	done    chan error
}

func startWorker(ctx context.Context, s settings, hook hook, observe middleware.Observer) (w *worker, err error) {
	w = &worker{done: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.db, err = openDB(s, hook); err != nil {
		return w, err
	}
	store, err := deduplicator.NewSQLStore(ctx, w.db, s.Dialect)
	if err != nil {
		return w, err
	}
	versions, err := ordering.NewVersions(ctx, w.db, s.Dialect)
	if err != nil {
		return w, err
	}
	var used deduplicator.Store = store
	mutant := mutants[s.Mutant]
	if mutant.store != nil {
		used = mutant.store(store)
	}
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	if err != nil {
		return w, err
	}
	router.AddMiddleware(withDelivery)
	if mutant.outside != nil {
		router.AddMiddleware(mutant.outside)
	}
	h := handlers{settings: s, db: w.db, hook: hook, outside: mutant.effectOutside}
	for _, name := range []string{stock, ledger} {
		broker, err := s.open(ctx, name)
		if err != nil {
			return w, err
		}
		w.brokers = append(w.brokers, broker)
		if err := broker.Declare(ctx, s.poison()); err != nil {
			return w, err
		}
		key := deduplicator.FromMetadata("event_id")
		if name == ledger {
			key = deduplicator.FromUUID()
		}
		links := []middleware.Link{
			middleware.WithObserver(observe),
			middleware.WithPoisonQueue(broker.Publisher(), s.poison()),
			middleware.WithRetry(middleware.Retry{MaxRetries: 5, InitialInterval: 10 * time.Millisecond, MaxInterval: 200 * time.Millisecond}),
			middleware.Deduplicate(used, middleware.WithKey(key)),
		}
		if name == stock {
			links = append(links, middleware.RejectStale(versions, middleware.WithVersion(ordering.VersionFromMetadata("version"))))
		}
		chain, err := middleware.Chain(links...)
		if err != nil {
			return w, err
		}
		if name == stock {
			pub := hookedPublisher{broker.Publisher(), s.RefuseAfter, hook}
			router.AddHandler(name, s.orders(), broker.Subscriber(), s.reserved(), pub, h.reserve).AddMiddleware(chain...)
		} else {
			router.AddConsumerHandler(name, s.reserved(), broker.Subscriber(), h.book).AddMiddleware(chain...)
		}
	}
	if s.Relay {
		relay, err := deduplicator.NewRelay(store, w.brokers[0].Publisher(), deduplicator.WithMinAge(time.Second), deduplicator.WithInterval(200*time.Millisecond))
		if err != nil {
			return w, err
		}
		router.AddPlugin(relay.Plugin)
	}
	w.router = router
	go func() { w.done <- router.Run(ctx) }()
	select {
	case <-router.Running():
		return w, nil
	case err := <-w.done:
		w.done <- nil
		return w, err
	}
}

func (w *worker) close() error {
	var errs []error
	if w.router != nil {
		errs = append(errs, w.router.Close(), <-w.done)
	}
	for _, broker := range w.brokers {
		errs = append(errs, broker.Close())
	}
	if w.db != nil {
		errs = append(errs, w.db.Close())
	}
	return errors.Join(errs...)
}

// openDB returns a pool with the hook in its connections.
func openDB(s settings, h hook) (*sql.DB, error) {
	var connector driver.Connector
	switch s.Dialect {
	case deduplicator.PostgreSQL:
		config, err := pgx.ParseConfig(s.DSN)
		if err != nil {
			return nil, err
		}
		config.DialFunc = s.dial
		connector = stdlib.GetConnector(*config)
	case deduplicator.MySQL:
		config, err := mysql.ParseDSN(s.DSN)
		if err != nil {
			return nil, err
		}
		config.DialFunc = s.dial
		config.Logger = &mysql.NopLogger{}
		if connector, err = mysql.NewConnector(config); err != nil {
			return nil, err
		}
	case deduplicator.SQLite:
		plain, err := sql.Open("sqlite", s.DSN)
		if err != nil {
			return nil, err
		}
		defer plain.Close() //nolint:errcheck // it has no connections
		connector = dsnConnector{plain.Driver(), s.DSN}
	}
	sockets := &wiretap{Connector: connector}
	db := sql.OpenDB(sqlhook.Wrap(sockets, func(ctx context.Context, e sqlhook.Event) error {
		d, ok := ctx.Value(deliveryKey{}).(delivery)
		isClaim := strings.Contains(e.Query, "INSERT") && strings.Contains(e.Query, deduplicator.DefaultProcessedTable)
		switch {
		case e.Step == sqlhook.Statement && strings.HasPrefix(e.Query, "DELETE") && strings.Contains(e.Query, deduplicator.DefaultProducedTable):
			return h(delivery{}, forgetting)
		case !ok:
			return nil
		case e.Step == sqlhook.Statement && isClaim:
			return h(d, claiming)
		case e.Step == sqlhook.StatementDone && isClaim:
			return h(d, claimed)
		case e.Step == sqlhook.Commit:
			if err := h(d, committing); err != nil {
				return err
			}
			sockets.afterWrite(e.Conn, func() { _ = h(d, commitSent) })
			return nil
		case e.Step == sqlhook.CommitDone && e.Err != nil:
			return h(d, commitFailed)
		case e.Step == sqlhook.CommitDone:
			return h(d, committed)
		}
		return nil
	}))
	db.SetMaxOpenConns(2 * shards)
	db.SetMaxIdleConns(2 * shards)
	return db, nil
}

type dsnConnector struct {
	driver driver.Driver
	dsn    string
}

func (c dsnConnector) Driver() driver.Driver                        { return c.driver }
func (c dsnConnector) Connect(context.Context) (driver.Conn, error) { return c.driver.Open(c.dsn) }

// wiretap knows the socket of each connection, to tell when COMMIT has left.
type wiretap struct {
	driver.Connector
	sockets sync.Map // of driver.Conn to *socket
}

type socketKey struct{}

func (w *wiretap) Connect(ctx context.Context) (driver.Conn, error) {
	s := &socket{}
	conn, err := w.Connector.Connect(context.WithValue(ctx, socketKey{}, s))
	if err == nil {
		w.sockets.Store(conn, s)
	}
	return conn, err
}

func (w *wiretap) afterWrite(conn driver.Conn, call func()) {
	if s, ok := w.sockets.Load(conn); ok {
		s.(*socket).afterWrite = call
	}
}

func (s settings) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if s.Proxy != "" {
		network, address = "tcp", s.Proxy
	}
	inner, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if tapped, ok := ctx.Value(socketKey{}).(*socket); ok {
		tapped.Conn = inner
		return tapped, nil
	}
	return inner, nil
}

// socket calls afterWrite once, when the next bytes have left.
type socket struct {
	net.Conn
	afterWrite func()
}

func (s *socket) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	if call := s.afterWrite; call != nil {
		s.afterWrite = nil
		call()
	}
	return n, err
}

type handlers struct {
	settings
	db      *sql.DB
	hook    hook
	outside bool
}

// reserve is the handler of orders.
func (h handlers) reserve(msg *message.Message) ([]*message.Message, error) {
	event := msg.Metadata.Get("event_id")
	n, err := strconv.Atoi(msg.Metadata.Get("outputs"))
	if err != nil {
		return nil, err
	}
	outputs, uuids := make([]*message.Message, n), make([]string, n)
	for i := range outputs {
		outputs[i] = message.NewMessage(watermill.NewUUID(), msg.Payload) // a new one on each attempt
		outputs[i].Metadata.Set("event_id", event)
		entity := msg.Metadata.Get(ordering.PartitionKeyMetadata)
		if n > shards { // for all of them
			entity = fmt.Sprint(entity, i)
		}
		outputs[i].Metadata.Set(ordering.PartitionKeyMetadata, entity)
		uuids[i] = outputs[i].UUID
	}
	if err := h.write(msg, stock, event, strings.Join(uuids, " ")); err != nil {
		return nil, err
	}
	return outputs, nil
}

// book is the handler of the outputs.
func (h handlers) book(msg *message.Message) error {
	return h.write(msg, ledger, msg.UUID, msg.Metadata.Get("event_id"))
}

func (h handlers) write(msg *message.Message, handler, event, detail string) error {
	ctx := msg.Context()
	tx, ok := middleware.Tx(ctx)
	if !ok {
		return errors.New("no transaction")
	}
	var to interface {
		ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	} = tx
	if h.outside {
		to = h.db
	}
	if _, err := to.ExecContext(ctx, insertEffect(h.Dialect), handler, event, detail); err != nil {
		return err
	}
	return h.hook(delivery{handler, msg.Metadata.Get("event_id")}, written)
}

func insertEffect(d deduplicator.Dialect) string {
	values := "(?, ?, ?)"
	if d == deduplicator.PostgreSQL {
		values = "($1, $2, $3)"
	}
	return "INSERT INTO effects (handler, event, detail) VALUES " + values
}

type hookedPublisher struct {
	message.Publisher
	refuseAfter int
	hook        hook
}

func (p hookedPublisher) Publish(topic string, messages ...*message.Message) error {
	var d delivery
	at := publishing
	for i, msg := range messages {
		d = delivery{stock, msg.Metadata.Get("event_id")}
		if p.refuseAfter > 0 && i >= p.refuseAfter {
			return errors.Join(errors.New("refused"), p.hook(d, refused))
		}
		if err := p.hook(d, at); err != nil {
			return err
		}
		if err := p.Publisher.Publish(topic, msg); err != nil {
			return fmt.Errorf("output %d: %w", i, err)
		}
		at = publishedHalf
	}
	return p.hook(d, published)
}
