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
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "modernc.org/sqlite" // driver "sqlite"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// lease is short, so that the demonstration does not wait long for killed workers.
const lease = time.Second

// shop is what a worker and an operator open.
type shop struct {
	db, ledgerDB *sql.DB
	store        *deduplicator.SQLStore
	ledger       *ledger.Ledger
}

// openShop opens two files: a handler's transaction locks the first one, so the ledger
// needs another. On PostgreSQL and MySQL a second pool is enough.
func openShop(ctx context.Context, dir string) (*shop, error) {
	s := &shop{}
	var err error
	if s.db, err = sql.Open("sqlite", dsn(dir, "shop.db")); err != nil {
		return nil, err
	}
	if s.ledgerDB, err = sql.Open("sqlite", dsn(dir, "ledger.db")); err != nil {
		return nil, err
	}
	if err := deduplicator.Migrate(ctx, s.db, deduplicator.SQLite); err != nil {
		return nil, err
	}
	if err := ledger.Migrate(ctx, s.ledgerDB, deduplicator.SQLite); err != nil {
		return nil, err
	}
	if _, err := s.db.ExecContext(ctx, "CREATE TABLE IF NOT EXISTS shipments (order_id TEXT NOT NULL, charge TEXT NOT NULL, label TEXT NOT NULL)"); err != nil {
		return nil, err
	}
	if s.store, err = deduplicator.NewSQLStore(ctx, s.db, deduplicator.SQLite); err != nil {
		return nil, err
	}
	s.ledger, err = ledger.New(ctx, s.store, s.ledgerDB, deduplicator.SQLite, ledger.WithLease(lease))
	return s, err
}

func (s *shop) close() { _ = errors.Join(s.db.Close(), s.ledgerDB.Close()) }

func dsn(dir, file string) string {
	return "file:" + dir + "/" + file + "?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)&_txlock=immediate"
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
	if _, err := tx.ExecContext(ctx, "INSERT INTO shipments (order_id, charge, label) VALUES (?, ?, ?)", o.ID, charge, label); err != nil {
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
	shop, err := openShop(ctx, s.Dir)
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
	Dir       string
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
