// Parked shows an operator what ordering.Sequence keeps in the database, and lets
// it go on or go away.
//
//	go run ./examples/parked -db postgres -dsn "$DSN" list
//	go run ./examples/parked -db postgres -dsn "$DSN" list -consumer stock -entity order-7 -reason failed -limit 20
//	go run ./examples/parked -db postgres -dsn "$DSN" retry -consumer stock -entity order-7
//	go run ./examples/parked -db postgres -dsn "$DSN" skip -consumer stock -entity order-7
//	go run ./examples/parked -db postgres -dsn "$DSN" drop -consumer stock -entity order-7 -seq 12
//
// # Commands
//
// list prints one line per parked message: consumer, entity, epoch/seq, reason
// (gap, blocked or failed), since when, attempts, what the entity has processed,
// UUID, size of the payload, and the error. -payload prints payloads, too.
//
// retry unblocks an entity whose message failed, once its cause is mended.
//
// skip goes on after what holds an entity up: a message that failed is deleted, a
// gap is given up.
//
// drop deletes one parked message. If the entity is blocked for it, it then waits
// for a repaired message with that number.
//
// What retry and skip let through is processed by the consumers' releaser or with
// the next message of the entity. Messages that skip or drop deletes are printed
// as JSON: nothing else keeps them.
//
// # Flags
//
// -db is postgres, mysql (MariaDB too) or sqlite; -dsn is the data source name of
// pgx, go-sql-driver/mysql or modernc.org/sqlite, by default the variable
// PARKED_DSN, which does not show in a list of processes. -sequences and -parked
// name the two tables. Flags of the command follow it.
//
// It exits with 0, with 1 and one line of error if nothing was changed, and with 2
// for a wrong command line.
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"text/tabwriter"
	"time"

	_ "github.com/go-sql-driver/mysql" // driver "mysql"
	_ "github.com/jackc/pgx/v5/stdlib" // driver "pgx"
	_ "modernc.org/sqlite"             // driver "sqlite"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}

// errUsage marks errors of the command line.
var errUsage = errors.New("see go doc ./examples/parked")

func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	err := execute(ctx, args, getenv, stdout)
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintln(stderr, "parked:", oneLine(err))
		return 2
	}
	fmt.Fprintln(stderr, "parked:", oneLine(err))
	return 1
}

func oneLine(err error) string {
	return strings.Join(strings.Fields(err.Error()), " ")
}

// drivers are the names of -db.
var drivers = map[string]struct {
	driver  string
	dialect ordering.Dialect
}{
	"postgres": {"pgx", ordering.PostgreSQL},
	"mysql":    {"mysql", ordering.MySQL},
	"sqlite":   {"sqlite", ordering.SQLite},
}

type options struct {
	db, dsn, sequences, parked string

	consumer, entity, reason string
	limit                    int
	epoch, seq               int64
	payload                  bool
}

const commands = `commands, after these flags, with -h for their own:
  list    print parked messages
  retry   let an entity go on whose message failed
  skip    give up the message or the gap that holds an entity up
  drop    delete one parked message
example:
  parked -db postgres -dsn DSN retry -consumer stock -entity order-7
`

// connectTimeout bounds the start, in which drivers try for minutes.
const connectTimeout = 10 * time.Second

func execute(ctx context.Context, args []string, getenv func(string) string, stdout io.Writer) error {
	var o options
	global := newFlags("parked")
	global.StringVar(&o.db, "db", "", "postgres, mysql or sqlite")
	global.StringVar(&o.dsn, "dsn", "", "data source name, instead of PARKED_DSN")
	global.StringVar(&o.sequences, "sequences", ordering.DefaultSequencesTable, "`table` of entities")
	global.StringVar(&o.parked, "parked", ordering.DefaultParkedTable, "`table` of parked messages")
	if err := parse(global, args, stdout); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprint(stdout, commands)
		}
		return err
	}
	if o.dsn == "" {
		o.dsn = getenv("PARKED_DSN")
	}
	command, rest := global.Arg(0), global.Args()
	if command == "" {
		return fmt.Errorf("no command: list, retry, skip or drop; %w", errUsage)
	}
	f := newFlags(command)
	f.StringVar(&o.consumer, "consumer", "", "handler's name")
	f.StringVar(&o.entity, "entity", "", "entity's id, as list prints it")
	switch command {
	case "list":
		f.StringVar(&o.reason, "reason", "", "gap, blocked or failed")
		f.IntVar(&o.limit, "limit", 100, "1 to 10000 messages")
		f.BoolVar(&o.payload, "payload", false, "print payloads")
	case "drop":
		f.Int64Var(&o.epoch, "epoch", 0, "epoch of the message")
		f.Int64Var(&o.seq, "seq", 0, "sequence number of the message")
	case "retry", "skip":
	default:
		return fmt.Errorf("unknown command %q: list, retry, skip or drop; %w", command, errUsage)
	}
	if err := parse(f, rest[1:], stdout); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q; %w", f.Arg(0), errUsage)
	}
	if command != "list" && (o.consumer == "" || o.entity == "") {
		return fmt.Errorf("%s needs -consumer and -entity; %w", command, errUsage)
	}
	if command == "drop" && o.seq < 1 {
		return fmt.Errorf("drop needs -seq, 1 or more; %w", errUsage)
	}
	return o.act(ctx, command, stdout)
}

func newFlags(name string) *flag.FlagSet {
	f := flag.NewFlagSet(name, flag.ContinueOnError)
	f.SetOutput(io.Discard)
	return f
}

func parse(f *flag.FlagSet, args []string, stdout io.Writer) error {
	err := f.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(stdout, "usage of %s:\n", f.Name())
		f.SetOutput(stdout)
		f.PrintDefaults()
		return err
	}
	if err != nil {
		return fmt.Errorf("%w; %w", err, errUsage)
	}
	return nil
}

func (o options) act(ctx context.Context, command string, stdout io.Writer) error {
	driver, ok := drivers[o.db]
	if !ok {
		return fmt.Errorf("-db is %q, must be postgres, mysql or sqlite; %w", o.db, errUsage)
	}
	if o.dsn == "" {
		return fmt.Errorf("no -dsn and no PARKED_DSN; %w", errUsage)
	}
	db, err := sql.Open(driver.driver, o.dsn)
	if err != nil {
		return fmt.Errorf("-dsn is not a data source name of %s", o.db) // err may hold it
	}
	defer func() { _ = db.Close() }()
	connecting, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	operator, err := ordering.NewOperator(connecting, db, driver.dialect, ordering.WithSequenceTables(o.sequences, o.parked))
	if err != nil {
		return err
	}
	if command == "list" {
		return o.list(ctx, operator, stdout)
	}
	var action ordering.OperatorAction
	switch command {
	case "retry":
		action, err = operator.Retry(ctx, o.consumer, o.entity)
	case "skip":
		action, err = operator.Skip(ctx, o.consumer, o.entity)
	case "drop":
		action, err = operator.Drop(ctx, o.consumer, o.entity, ordering.Position{Epoch: o.epoch, Seq: o.seq})
	}
	if err != nil {
		return err
	}
	return report(stdout, command, action)
}

func report(stdout io.Writer, command string, action ordering.OperatorAction) error {
	fmt.Fprintf(stdout, "%s: consumer %q, entity %q: last event %v, was %v\n", command, action.Consumer, action.Entity, action.After, action.Before)
	if action.Unblocked != "" {
		fmt.Fprintf(stdout, "unblocked: it was blocked because of %q\n", action.Unblocked)
	}
	encoder := json.NewEncoder(stdout)
	for _, m := range action.Deleted {
		fmt.Fprintf(stdout, "deleted: ")
		if err := encoder.Encode(m); err != nil {
			return err
		}
	}
	return nil
}

func (o options) list(ctx context.Context, operator *ordering.Operator, stdout io.Writer) error {
	listed, err := operator.List(ctx, ordering.ParkedFilter{Consumer: o.consumer, Entity: o.entity, Reason: o.reason, Limit: o.limit})
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CONSUMER\tENTITY\tAT\tREASON\tPARKED\tATTEMPTS\tENTITY LAST\tENTITY STATE\tUUID\tBYTES\tERROR")
	for _, m := range listed {
		state := "open"
		if m.EntityBlocked != "" {
			state = "blocked"
		}
		fmt.Fprintf(w, "%s\t%s\t%v\t%s\t%s\t%d\t%v\t%s\t%s\t%d\t%s\n", printable(m.Consumer), printable(m.Entity), m.Position, m.Reason,
			m.ParkedAt.Format(time.RFC3339), m.Attempts, m.EntityLast, state, printable(m.UUID), len(m.Payload), printable(m.Error))
		if o.payload {
			fmt.Fprintf(w, "\t%q\n", m.Payload)
		}
	}
	return w.Flush()
}

// printable quotes what would break a line or a terminal.
func printable(text string) string {
	if quoted := fmt.Sprintf("%q", text); quoted != `"`+text+`"` {
		return quoted
	}
	return text
}
