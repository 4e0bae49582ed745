package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/go-sql-driver/mysql" // driver "mysql"
	_ "github.com/jackc/pgx/v5/stdlib" // driver "pgx"
	_ "modernc.org/sqlite"             // driver "sqlite"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// lease is short, so that the demonstration does not wait long for killed workers.
const lease = time.Second

// databaseSettings say where the shop's tables are.
type databaseSettings struct {
	Dialect deduplicator.Dialect
	DSN     [2]string // of the shop and of the ledger
	Prefix  string    // of the tables' names
}

// shop is what a worker and an operator open.
type shop struct {
	settings     databaseSettings
	db, ledgerDB *sql.DB
	store        *deduplicator.SQLStore
	ledger       *ledger.Ledger
}

// openShop opens two pools, because a handler holds a connection of the first one while
// the ledger needs another. On SQLite a handler's transaction even locks the file, so
// there the ledger has a file of its own.
func openShop(ctx context.Context, settings databaseSettings) (*shop, error) {
	s := &shop{settings: settings}
	dialect, prefix := settings.Dialect, settings.Prefix
	driver := map[deduplicator.Dialect]string{deduplicator.SQLite: "sqlite", deduplicator.PostgreSQL: "pgx", deduplicator.MySQL: "mysql"}[dialect]
	var err error
	if s.db, err = sql.Open(driver, settings.DSN[0]); err != nil {
		return nil, err
	}
	if s.ledgerDB, err = sql.Open(driver, settings.DSN[1]); err != nil {
		return nil, err
	}
	tables := []deduplicator.Option{
		deduplicator.WithTables(prefix+"processed", prefix+"produced"),
		deduplicator.WithLeasesTable(prefix + "leases"), deduplicator.WithAttemptsTable(prefix + "attempts"),
	}
	effects := []ledger.Option{ledger.WithTable(prefix + "effects"), ledger.WithLease(lease)}
	if err := deduplicator.Migrate(ctx, s.db, dialect, tables...); err != nil {
		return nil, err
	}
	if err := ledger.Migrate(ctx, s.ledgerDB, dialect, effects...); err != nil {
		return nil, err
	}
	if s.store, err = deduplicator.NewSQLStore(ctx, s.db, dialect, tables...); err != nil {
		return nil, err
	}
	s.ledger, err = ledger.New(ctx, s.store, s.ledgerDB, dialect, effects...)
	return s, err
}

// createShipments creates the shop's own table; the parent does it, once.
func (s *shop) createShipments(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, "CREATE TABLE "+s.settings.Prefix+"shipments (order_id varchar(20) NOT NULL, charge varchar(100) NOT NULL, label varchar(100) NOT NULL)")
	return err
}

// query writes placeholders and the name of the shop's table as the database wants them.
func (s *shop) query(text string) string {
	text = strings.ReplaceAll(text, "shipments", s.settings.Prefix+"shipments")
	for n := 1; s.settings.Dialect == deduplicator.PostgreSQL && strings.Contains(text, "?"); n++ {
		text = strings.Replace(text, "?", fmt.Sprint("$", n), 1)
	}
	return text
}

func (s *shop) close() { _ = errors.Join(s.db.Close(), s.ledgerDB.Close()) }

// drop deletes the tables.
func (s *shop) drop(ctx context.Context) (err error) {
	for _, name := range []string{"processed", "produced", "leases", "attempts", "shipments"} {
		_, dropErr := s.db.ExecContext(ctx, "DROP TABLE "+s.settings.Prefix+name)
		err = errors.Join(err, dropErr)
	}
	_, dropErr := s.ledgerDB.ExecContext(ctx, "DROP TABLE "+s.settings.Prefix+"effects")
	return errors.Join(err, dropErr)
}

func sqliteDSN(dir, file string) string {
	return "file:" + filepath.Join(dir, file) + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_txlock=immediate"
}

// worker handles orders in a process of its own, which is killed now and then.
type worker struct {
	*shop
	provider  client
	protected bool

	charge, label ledger.Effect

	tried *message.Message // the last one; this worker handles one at a time
}

// What goes wrong with a delivery stands beside the order.
const (
	faultMetadata = "fault"
	atMetadata    = "fault_at"
)

// handle is the handler of an order.
func (w *worker) handle(msg *message.Message) error {
	var o order
	if err := json.Unmarshal(msg.Payload, &o); err != nil {
		return idempotent.Permanent(err)
	}
	struck, at := fault(msg.Metadata.Get(faultMetadata)), msg.Metadata.Get(atMetadata)
	if w.tried == msg { // it strikes once, not at each attempt
		struck = none
	}
	w.tried = msg
	ctx := msg.Context()
	charge, err := w.effect(ctx, w.charge, charges, o, faultAt(struck, at, charges))
	if err != nil {
		return err
	}
	label, err := w.effect(ctx, w.label, labels, o, faultAt(struck, at, labels))
	if err != nil {
		return err
	}
	tx, _ := idempotent.Tx(ctx)
	if _, err := tx.ExecContext(ctx, w.query("INSERT INTO shipments (order_id, charge, label) VALUES (?, ?, ?)"), o.ID, charge, label); err != nil {
		return err
	}
	switch struck {
	case rollsBack:
		return errors.New("the handler fails after its effects")
	case diesUncommited:
		die()
	}
	return nil
}

// effect is the difference between the two halves.
func (w *worker) effect(ctx context.Context, effect ledger.Effect, service string, o order, f fault) (string, error) {
	if w.protected {
		return ledger.Do(ctx, w.ledger, effect, o.Amount, func(ctx context.Context, key string) (string, error) {
			return w.call(ctx, service, key, o, f)
		})
	}
	return w.call(ctx, service, watermill.NewUUID(), o, f) // a new key with each call: a common mistake
}

func faultAt(f fault, at, service string) fault {
	if at != service {
		return none
	}
	return f
}

func (w *worker) call(ctx context.Context, service, key string, o order, f fault) (string, error) {
	switch f {
	case diesBefore:
		die()
	case diesInCall:
		go func() { _, _ = w.provider.post(ctx, service, o.ID, key, tooSlow) }()
		for { // until the request has arrived
			if done, err := w.provider.lookUp(ctx, service, key); err == nil && done != "" {
				die()
			}
		}
	}
	result, err := w.provider.post(ctx, service, o.ID, key, f)
	if f == diesAfter {
		die()
	}
	return result, err
}

// die is SIGKILL: nothing of this process runs any more.
func die() {
	if self, err := os.FindProcess(os.Getpid()); err == nil {
		_ = self.Kill()
	}
	select {}
}

// work is the worker process: a Watermill router whose broker is the parent.
func work(ctx context.Context, s roleSettings) error {
	shop, err := openShop(ctx, s.Database)
	if err != nil {
		return err
	}
	defer shop.close()
	w := &worker{shop: shop, provider: client{s.Provider}, protected: s.Protected}
	// The payment provider remembers keys for a day; the carrier knows none.
	if w.charge, err = ledger.NewEffect("charge", ledger.RetryWithKey(24*time.Hour)); err != nil {
		return err
	}
	if w.label, err = ledger.NewEffect("label", ledger.AskOperator()); err != nil {
		return err
	}
	broker := pipe{}
	chain, err := idempotent.Chain(
		idempotent.WithPoisonQueue(broker, "orders.poison"),
		idempotent.WithRetry(idempotent.Retry{MaxRetries: 2, InitialInterval: 10 * time.Millisecond}),
		idempotent.Deduplicate(shop.store, idempotent.WithKey(deduplicator.FromUUID())),
	)
	if err != nil {
		return err
	}
	logger := watermill.LoggerAdapter(watermill.NopLogger{})
	if s.Verbose {
		logger = watermill.NewStdLoggerWithOut(os.Stderr, false, false)
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("shipping", "orders", broker, w.handle)
	return router.Run(ctx)
}

// What a worker tells its parent, one line each.
const (
	saysAck    = "ack"
	saysNack   = "nack"
	saysParked = "parked"
)

// pipe is a subscriber of the orders that come on standard input, one JSON line each,
// and a publisher that tells the parent of parked ones.
type pipe struct{}

func (pipe) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	messages := make(chan *message.Message)
	go func() {
		defer close(messages)
		for scanner := bufio.NewScanner(os.Stdin); scanner.Scan(); {
			var d delivery
			if err := json.Unmarshal(scanner.Bytes(), &d); err != nil {
				return
			}
			payload, err := json.Marshal(d.Order)
			if err != nil {
				return
			}
			msg := message.NewMessage("order-"+d.Order.ID, payload)
			msg.Metadata = message.Metadata{faultMetadata: string(d.Fault), atMetadata: d.At}
			msgCtx, cancel := context.WithCancel(ctx)
			msg.SetContext(msgCtx)
			select {
			case messages <- msg:
			case <-ctx.Done():
			}
			select {
			case <-msg.Acked():
				_, _ = fmt.Println(saysAck)
			case <-msg.Nacked():
				_, _ = fmt.Println(saysNack)
			case <-ctx.Done():
			}
			cancel()
		}
	}()
	return messages, nil
}

func (pipe) Publish(string, ...*message.Message) error {
	_, err := fmt.Println(saysParked)
	return err
}

func (pipe) Close() error { return nil }

// roleVariable makes this program the provider or a worker.
const roleVariable = "PAYMENT_ROLE"

type roleSettings struct {
	Worker    bool // otherwise the provider
	Database  databaseSettings
	Provider  string
	Protected bool
	Verbose   bool
}

func playRole(encoded string) {
	var s roleSettings
	err := json.Unmarshal([]byte(encoded), &s)
	switch {
	case err != nil:
	case s.Worker:
		err = work(context.Background(), s)
	default:
		err = serveProvider()
	}
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		say(os.Stderr, "payment: %v", err)
		os.Exit(1)
	}
	os.Exit(0)
}
