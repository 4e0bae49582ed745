// Orders shows a shop whose messages come twice, late and out of order, whose
// handlers fail and whose workers die: once with the middlewares of this module
// and once without them.
//
//	go run ./examples/orders
//
// See README.md.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	mathrand "math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

// Exit codes.
const (
	exitOK          = 0   // protected without a fault, unprotected with some
	exitFailed      = 1   // not so, or the run did not come to its end
	exitUsage       = 2   // a flag is wrong or a server is missing
	exitInterrupted = 130 // SIGINT
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second SIGINT ends the program at once
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

type options struct {
	backend, database            string
	kafka, amqp, postgres, mysql string
	seed                         uint64
	messages, entities           int
	duplicates, workers          int
	timeout                      time.Duration
	keep, verbose                bool
}

const (
	maxMessages = 1_000_000
	maxWorkers  = 32
)

func parse(args []string, getenv func(string) string, usage io.Writer) (options, error) {
	env := func(fallback string, names ...string) string {
		for _, name := range names {
			if value := getenv(name); value != "" {
				return value
			}
		}
		return fallback
	}
	var o options
	f := flag.NewFlagSet("orders", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.backend, "backend", "embedded", "broker: embedded (Kafka in this process), kafka or amqp")
	f.StringVar(&o.database, "db", "sqlite", "database: sqlite, postgres or mysql (MariaDB too)")
	f.StringVar(&o.kafka, "kafka", "", "Kafka `brokers`, host:port with commas (or KAFKA_BROKERS)")
	f.StringVar(&o.amqp, "amqp", "", "RabbitMQ `URL` (or AMQP_URL)")
	f.StringVar(&o.postgres, "postgres", "", "PostgreSQL `DSN` (or POSTGRES_DSN)")
	f.StringVar(&o.mysql, "mysql", "", "MySQL or MariaDB `DSN` (or MYSQL_DSN)")
	f.Uint64Var(&o.seed, "seed", 1, "the same seed makes the same traffic and faults")
	f.IntVar(&o.messages, "messages", 1000, "events of the shop")
	f.IntVar(&o.entities, "entities", 250, "orders, at most one per event")
	f.IntVar(&o.duplicates, "duplicates", 30, "percentage of events that come twice")
	f.IntVar(&o.workers, "workers", 2, "routers that share the work")
	f.DurationVar(&o.timeout, "timeout", 2*time.Minute, "the longest that each half may take")
	f.BoolVar(&o.keep, "keep", false, "keep tables and topics")
	f.BoolVar(&o.verbose, "verbose", false, "log what the router and the clients do")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			say(usage, "usage: orders [flags]")
			f.SetOutput(usage)
			f.PrintDefaults()
		}
		return o, err
	}
	given := false
	f.Visit(func(flag *flag.Flag) { given = given || flag.Name == "entities" })
	if !given { // few -messages alone are fine
		o.entities = min(o.entities, o.messages)
	}
	o.kafka = first(o.kafka, env("127.0.0.1:9092", "KAFKA_BROKERS", "TEST_KAFKA_BROKERS"))
	o.amqp = first(o.amqp, env("amqp://guest:guest@127.0.0.1:5672/", "AMQP_URL", "TEST_AMQP_URL"))
	o.postgres = first(o.postgres, env("postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable", "POSTGRES_DSN", "TEST_POSTGRES_DSN"))
	o.mysql = first(o.mysql, env("root@tcp(127.0.0.1:3306)/", "MYSQL_DSN", "TEST_MARIADB_DSN"))
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return o, o.validate()
}

func (o options) validate() error {
	oneOf := func(name, value string, allowed ...string) error {
		for _, a := range allowed {
			if value == a {
				return nil
			}
		}
		return fmt.Errorf("-%s is %q, must be one of %s", name, value, strings.Join(allowed, ", "))
	}
	between := func(name string, value, low, high int) error {
		if value < low || value > high {
			return fmt.Errorf("-%s is %d, must be %d to %d", name, value, low, high)
		}
		return nil
	}
	for _, err := range []error{
		oneOf("backend", o.backend, "embedded", "kafka", "amqp"),
		oneOf("db", o.database, "sqlite", "postgres", "mysql"),
		between("messages", o.messages, 1, maxMessages),
		between("entities", o.entities, 1, o.messages),
		between("duplicates", o.duplicates, 0, 100),
		between("workers", o.workers, 1, maxWorkers),
	} {
		if err != nil {
			return err
		}
	}
	if o.timeout <= 0 {
		return fmt.Errorf("-timeout is %v, must be over 0", o.timeout)
	}
	return nil
}

// run is the program: it returns the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	o, err := parse(args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		say(stderr, "orders: %v", err)
		return exitUsage
	}
	dir, err := os.MkdirTemp("", "orders-")
	if err != nil {
		say(stderr, "orders: %v", err)
		return exitFailed
	}
	if o.keep && o.database == "sqlite" {
		say(stderr, "the databases are kept in %s", dir)
	} else {
		defer func() { _ = os.RemoveAll(dir) }()
	}
	var logger watermill.LoggerAdapter = watermill.NopLogger{}
	if o.verbose {
		logger = watermill.NewSlogLogger(slog.New(slog.NewTextHandler(stderr, nil)))
	}
	s, err := openServers(ctx, o, logger, runID(), dir)
	if err != nil {
		say(stderr, "orders: %v", err)
		return exitUsage
	}
	defer s.broker.close()

	say(stderr, "broker %s, database %s, seed %d", o.backend, o.database, o.seed)
	rng := mathrand.New(mathrand.NewPCG(o.seed, 0))
	t := newTraffic(rng, o.messages, o.entities, o.duplicates)
	plan := planFaults(rng, t, o.duplicates)
	var results []result
	for _, protected := range []bool{true, false} {
		h := newHalf(o, s, t, plan, protected)
		findings, err := executeAndRemove(ctx, o, h, stderr)
		if ctx.Err() != nil {
			say(stderr, "orders: interrupted")
			return exitInterrupted
		}
		if err != nil {
			say(stderr, "orders: %s: %v", h.name, err)
			return exitFailed
		}
		results = append(results, result{h, findings})
	}
	return conclude(stdout, stderr, results[0], results[1])
}

func executeAndRemove(ctx context.Context, o options, h *half, stderr io.Writer) (findings, error) {
	limited, cancel := context.WithTimeout(ctx, o.timeout)
	shown := make(chan struct{})
	go func() {
		defer close(shown)
		showProgress(limited, stderr, h)
	}()
	found, err := h.execute(limited)
	cancel()
	<-shown
	if o.keep {
		say(stderr, "kept: tables in %s, topics %s, %s, %s", h.schema, h.topics.orders, h.topics.reservations, h.topics.poison)
		return found, err
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	if err := h.remove(clean); err != nil {
		say(stderr, "orders: %s: clean up: %v", h.name, err)
	}
	return found, err
}

// conclude reports and says whether the demonstration shows what it should.
func conclude(stdout, stderr io.Writer, protected, unprotected result) int {
	report(stdout, protected, unprotected)
	say(stdout, "%s", protected.line())
	say(stdout, "%s", unprotected.line())
	switch {
	case !protected.findings.clean():
		say(stderr, "orders: the demonstration is broken: the protected half has faults")
		return exitFailed
	case unprotected.findings.clean():
		say(stderr, "orders: the demonstration is broken: the unprotected half has no faults")
		return exitFailed
	}
	return exitOK
}

// say writes a line. Where nobody reads it there is nobody to tell.
func say(out io.Writer, format string, args ...any) { _, _ = fmt.Fprintf(out, format+"\n", args...) }

func first(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}

func runID() string {
	var id [4]byte
	_, _ = rand.Read(id[:]) // it never fails
	return hex.EncodeToString(id[:])
}
