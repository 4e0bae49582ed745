// Payment shows a shop that charges a card and buys a shipping label for each
// order, at providers in another process, while responses are lost, calls are slow,
// handlers fail and workers are killed: once with package ledger and once without.
//
//	go run ./examples/payment
//
// See README.md.
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// Exit codes.
const (
	exitOK          = 0   // protected without a fault, unprotected with some
	exitFailed      = 1   // not so, or the run did not come to its end
	exitUsage       = 2   // a flag is wrong
	exitInterrupted = 130 // SIGINT
)

func main() {
	if settings := os.Getenv(roleVariable); settings != "" {
		playRole(settings) // does not return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second SIGINT ends the program at once
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

type options struct {
	db, dsn string
	orders  int
	seed    uint64
	timeout time.Duration
	verbose bool
}

const maxOrders = 100_000

func parse(args []string, usage io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("payment", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.db, "db", "sqlite", "database: sqlite, postgres or mysql (MariaDB too)")
	f.StringVar(&o.dsn, "dsn", "", "data source name of pgx or go-sql-driver/mysql (or POSTGRES_DSN, MYSQL_DSN)")
	f.IntVar(&o.orders, "orders", 60, "orders of the shop")
	f.Uint64Var(&o.seed, "seed", 1, "the same seed makes the same faults")
	f.DurationVar(&o.timeout, "timeout", 2*time.Minute, "the longest that each half may take")
	f.BoolVar(&o.verbose, "verbose", false, "print each order and what the workers log")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			say(usage, "usage: payment [flags]")
			f.SetOutput(usage)
			f.PrintDefaults()
		}
		return o, err
	}
	o.dsn = cmp.Or(o.dsn, map[string]string{
		"postgres": cmp.Or(os.Getenv("POSTGRES_DSN"), os.Getenv("TEST_POSTGRES_DSN")),
		"mysql":    cmp.Or(os.Getenv("MYSQL_DSN"), os.Getenv("TEST_MARIADB_DSN")),
	}[o.db])
	switch {
	case o.db != "sqlite" && o.db != "postgres" && o.db != "mysql":
		return o, fmt.Errorf("-db is %q, must be one of sqlite, postgres, mysql", o.db)
	case o.db == "sqlite" && o.dsn != "":
		return o, errors.New("-dsn is for -db postgres and mysql; SQLite's files are temporary")
	case o.db != "sqlite" && o.dsn == "":
		return o, fmt.Errorf("-db %s needs -dsn", o.db)
	case f.NArg() > 0:
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.orders < 1 || o.orders > maxOrders:
		return o, fmt.Errorf("-orders is %d, must be 1 to %d", o.orders, maxOrders)
	case o.timeout <= 0:
		return o, fmt.Errorf("-timeout is %v, must be over 0", o.timeout)
	}
	return o, nil
}

// settings returns where a half has its tables, and what deletes SQLite's files.
func (o options) settings() (settings databaseSettings, cleanUp func(), err error) {
	settings.Prefix = "payment_" + strings.ToLower(rand.Text()[:8]) + "_"
	switch o.db {
	case "postgres":
		settings.Dialect, settings.DSN = deduplicator.PostgreSQL, [2]string{o.dsn, o.dsn}
	case "mysql":
		settings.Dialect, settings.DSN = deduplicator.MySQL, [2]string{o.dsn, o.dsn}
	default:
		dir, err := os.MkdirTemp("", "payment-")
		settings.Dialect, settings.DSN = deduplicator.SQLite, [2]string{sqliteDSN(dir, "shop.db"), sqliteDSN(dir, "ledger.db")}
		return settings, func() { _ = os.RemoveAll(dir) }, err
	}
	return settings, func() {}, nil
}

// run is the program: it returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		say(stderr, "payment: %v", err)
		return exitUsage
	}
	stderr = &shared{out: stderr}
	plan := newPlan(o.seed, o.orders)
	var results [2]result
	for i, protected := range []bool{true, false} {
		results[i], err = runHalf(ctx, o, plan, protected, stderr)
		switch {
		case ctx.Err() != nil:
			say(stderr, "payment: interrupted")
			return exitInterrupted
		case err != nil:
			say(stderr, "payment: %s half: %v", results[i].name, err)
			return exitFailed
		}
	}
	report(stdout, o, plan, results[0], results[1])
	if !results[0].right(plan) || results[1].right(plan) {
		return exitFailed
	}
	return exitOK
}

func say(out io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(out, format+"\n", args...) }

// shared is a writer for several processes.
type shared struct {
	mu  sync.Mutex // guards out
	out io.Writer
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out.Write(p)
}
