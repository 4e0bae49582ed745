// Outbox shows handlers that publish themselves, in their transaction. A shop
// reserves stock for orders, which come twice each, and publishes an event for
// each reservation. Some attempts fail after they have published. The broker
// refuses messages at first and then takes one whose confirmation is lost. In the
// end each order is booked once.
//
//	go run ./examples/outbox -db postgres -dsn 'postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable'
//	go run ./examples/outbox -db mysql -dsn 'root@tcp(127.0.0.1:3306)/test'
//
// The broker is in the process. The tables, whose names begin with outbox_example,
// are dropped before and after. Exit code: 0 if all is as it should be, 1 if not,
// 2 if a flag is wrong or the database does not answer.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/outbox"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

const (
	orders  = 20
	timeout = time.Minute
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	context.AfterFunc(ctx, stop) // a second interrupt ends the program at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

var databases = map[string]struct {
	driver  string
	dialect deduplicator.Dialect
}{
	"postgres": {"pgx", deduplicator.PostgreSQL},
	"mysql":    {"mysql", deduplicator.MySQL},
}

func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	flags := flag.NewFlagSet("outbox", flag.ContinueOnError)
	flags.SetOutput(errOut)
	name := flags.String("db", "postgres", "database: postgres or mysql (MariaDB too)")
	dsn := flags.String("dsn", "", "`DSN` of the database, as its Go driver wants it")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	database, ok := databases[*name]
	if !ok || *dsn == "" || flags.NArg() > 0 {
		fmt.Fprintln(errOut, "outbox: -db must be postgres or mysql, and -dsn is needed")
		return 2
	}
	db, err := sql.Open(database.driver, *dsn)
	if err == nil {
		defer db.Close() //nolint:errcheck // the end of the program
		err = db.PingContext(ctx)
	}
	if err != nil {
		fmt.Fprintln(errOut, "outbox:", err)
		return 2
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	s := &shop{db: db, dialect: database.dialect, broker: gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})}
	if err := s.trade(ctx, out); err != nil {
		fmt.Fprintln(errOut, "outbox:", err)
		return 1
	}
	return 0
}

type shop struct {
	db      *sql.DB
	dialect deduplicator.Dialect
	broker  *gochannel.GoChannel
	box     *outbox.Outbox

	attempts, failed, refused, sent atomic.Int32
}

func (s *shop) trade(ctx context.Context, out io.Writer) (err error) {
	router, fwd, err := s.wire(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.drop(context.WithoutCancel(ctx))) }()
	done := make(chan error, 2)
	go func() { done <- router.Run(ctx) }()
	<-router.Running()
	go func() { done <- fwd.Run(ctx) }()
	defer func() { err = errors.Join(err, fwd.Close(), router.Close(), <-done, <-done) }()

	for range 2 {
		for i := range orders {
			if err := s.broker.Publish("orders", message.NewMessage(fmt.Sprint("order-", i), nil)); err != nil {
				return err
			}
		}
	}
	for s.count(ctx, "outbox_example_ledger") < orders || s.count(ctx, "outbox_example_messages") > 0 {
		select {
		case <-ctx.Done():
			return fmt.Errorf("not all orders are booked: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	fmt.Fprintf(out, "%d orders came twice each\n", orders)
	fmt.Fprintf(out, "%d attempts of the handler published, %d of them then failed\n", s.attempts.Load(), s.failed.Load())
	fmt.Fprintf(out, "the broker refused %d messages, and took %d\n", s.refused.Load(), s.sent.Load())
	reserved, booked, different := s.count(ctx, "outbox_example_stock"), s.count(ctx, "outbox_example_ledger"), s.count(ctx, "(SELECT DISTINCT id FROM outbox_example_ledger) AS ids")
	fmt.Fprintf(out, "%d pieces reserved, %d orders booked, %d of them different\n", reserved, booked, different)
	if reserved != orders || booked != orders || different != orders {
		return errors.New("something was lost or doubled")
	}
	fmt.Fprintln(out, "nothing was lost or doubled")
	return nil
}

// wire creates the tables, the router with the two handlers, and the forwarder.
func (s *shop) wire(ctx context.Context) (*message.Router, *forwarder.Forwarder, error) {
	tables := deduplicator.WithTables("outbox_example_processed", "outbox_example_produced")
	var err error
	if s.box, err = outbox.New(s.dialect, outbox.WithTable("outbox_example_messages"), outbox.WithPollInterval(20*time.Millisecond)); err != nil {
		return nil, nil, err
	}
	if err := errors.Join(s.drop(ctx), s.box.Migrate(ctx, s.db), deduplicator.Migrate(ctx, s.db, s.dialect, tables),
		s.exec(ctx, "CREATE TABLE outbox_example_stock (id varchar(64) NOT NULL)"),
		s.exec(ctx, "CREATE TABLE outbox_example_ledger (id varchar(64) NOT NULL)")); err != nil {
		return nil, nil, err
	}
	store, err := deduplicator.NewSQLStore(ctx, s.db, s.dialect, tables)
	if err != nil {
		return nil, nil, err
	}
	chain, err := idempotent.Chain(idempotent.Deduplicate(store, idempotent.WithKey(deduplicator.FromUUID())))
	if err != nil {
		return nil, nil, err
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return nil, nil, err
	}
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("stock", "orders", s.broker, s.reserve)
	router.AddConsumerHandler("ledger", "reserved", s.broker, s.book)
	fwd, err := s.box.Forwarder(s.db, unreliable{s}, nil)
	return router, fwd, err
}

// reserve takes a piece from stock and publishes that, in the same transaction.
func (s *shop) reserve(msg *message.Message) error {
	ctx := msg.Context()
	tx, _ := idempotent.Tx(ctx)
	if _, err := tx.ExecContext(ctx, "INSERT INTO outbox_example_stock (id) VALUES ('"+msg.UUID+"')"); err != nil {
		return err
	}
	if err := s.box.Publish("reserved", message.NewMessageWithContext(ctx, watermill.NewUUID(), []byte(msg.UUID))); err != nil {
		return err
	}
	if s.attempts.Add(1)%4 == 1 {
		s.failed.Add(1)
		return errors.New("fails after it has published")
	}
	return nil
}

// book is downstream. What the forwarder sends twice has the same UUID.
func (s *shop) book(msg *message.Message) error {
	tx, _ := idempotent.Tx(msg.Context())
	_, err := tx.ExecContext(msg.Context(), "INSERT INTO outbox_example_ledger (id) VALUES ('"+string(msg.Payload)+"')")
	return err
}

// unreliable is a broker that is down at first, and that once takes a message
// without saying so.
type unreliable struct{ *shop }

func (u unreliable) Publish(topic string, messages ...*message.Message) error {
	if u.sent.Load() == 0 && u.refused.Load() < 3 {
		u.refused.Add(1)
		return errors.New("broker is down")
	}
	if err := u.broker.Publish(topic, messages...); err != nil {
		return err
	}
	if u.sent.Add(1) == 5 {
		return errors.New("confirmation is lost")
	}
	return nil
}

func (unreliable) Close() error { return nil }

func (s *shop) exec(ctx context.Context, query string) error {
	_, err := s.db.ExecContext(ctx, query)
	return err
}

func (s *shop) drop(ctx context.Context) error {
	var errs []error
	for _, table := range []string{"processed", "produced", "messages", "messages_lock", "stock", "ledger"} {
		errs = append(errs, s.exec(ctx, "DROP TABLE IF EXISTS outbox_example_"+table))
	}
	return errors.Join(errs...)
}

// count returns -1 for an error, which is not what is hoped for.
func (s *shop) count(ctx context.Context, table string) int {
	n := -1
	_ = s.db.QueryRowContext(ctx, "SELECT COUNT(*) FROM "+table).Scan(&n)
	return n
}
