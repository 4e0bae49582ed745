package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// half is one of the two runs: the same traffic and faults, with or without
// protection, on topics and tables of its own.
type half struct {
	name      string
	protected bool
	run       string // makes names unique on servers that others use too
	workers   int

	broker   brokerServer
	database *database
	schema   string
	topics   topics
	logger   watermill.LoggerAdapter

	traffic    *traffic
	faults     *injector
	deliveries *deliveries
	outcomes   *outcomes
	deaths     chan *worker

	took time.Duration
}

func newHalf(o options, s *servers, t *traffic, plan []plannedFault, protected bool) *half {
	h := &half{
		name: "unprotected", protected: protected, run: s.run, workers: o.workers,
		broker: s.broker, database: s.database, logger: s.logger,
		traffic: t, faults: newInjector(plan), deliveries: newDeliveries(), outcomes: &outcomes{},
		deaths: make(chan *worker, len(plan)),
	}
	if protected {
		h.name = "protected"
	}
	h.schema = "orders_" + h.run + "_" + h.name
	h.topics = topics{
		orders:       h.unique("orders"),
		reservations: h.unique("reservations"),
		poison:       h.unique("poison"),
	}
	return h
}

func (h *half) unique(name string) string { return name + "-" + h.run + "-" + h.name }

func (h *half) group(name string) string { return h.unique(name) }

// execute runs the half and returns what the database says afterwards.
func (h *half) execute(ctx context.Context) (findings, error) {
	started := time.Now()
	if err := h.createTables(ctx); err != nil {
		return findings{}, fmt.Errorf("create tables: %w", err)
	}
	if err := h.process(ctx); err != nil {
		return findings{}, err
	}
	h.took = time.Since(started)

	db, err := h.database.db(h.schema)
	if err != nil {
		return findings{}, err
	}
	defer func() { _ = db.Close() }()
	return compare(ctx, db, h.traffic)
}

func (h *half) createTables(ctx context.Context) error {
	if err := h.database.create(ctx, h.schema); err != nil {
		return err
	}
	db, err := h.database.db(h.schema)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if err := (shop{h.database.dialect}).createTables(ctx, db, h.traffic.stock); err != nil {
		return err
	}
	if !h.protected {
		return nil
	}
	return migrate(ctx, db, h.database.dialect)
}

func migrate(ctx context.Context, db *sql.DB, dialect deduplicator.Dialect) error {
	return errors.Join(deduplicator.Migrate(ctx, db, dialect), ordering.Migrate(ctx, db, dialect))
}

// process sends the traffic through the workers until each message has been
// dealt with by all its handlers.
func (h *half) process(ctx context.Context) error {
	producer, err := h.broker.open(ctx, h.group("producer"))
	if err != nil {
		return err
	}
	defer func() { _ = producer.Close() }()
	if err := producer.Declare(ctx, h.topics.poison); err != nil {
		return err
	}

	workers := &fleet{}
	defer workers.close()
	for range h.workers {
		w, err := h.startWorker(ctx)
		if err != nil {
			return fmt.Errorf("start worker: %w", err)
		}
		workers.add(w)
	}

	ctx, cancel := context.WithCancelCause(ctx)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel(nil)
	tasks.Go(func() { h.replaceDead(ctx, cancel, workers) })
	tasks.Go(func() {
		if err := h.produce(ctx, producer.Publisher()); err != nil {
			cancel(fmt.Errorf("producer: %w", err))
		}
	})
	select {
	case <-h.deliveries.finished:
		return nil
	case <-ctx.Done():
		if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			return fmt.Errorf("not finished in time: %s", h.deliveries.missing())
		}
		return context.Cause(ctx)
	}
}

// replaceDead starts a new worker for each one that died.
func (h *half) replaceDead(ctx context.Context, fail context.CancelCauseFunc, workers *fleet) {
	for {
		select {
		case <-ctx.Done():
			return
		case dead := <-h.deaths:
			_ = dead.close() // the dead complain
			w, err := h.startWorker(ctx)
			if err != nil {
				fail(fmt.Errorf("replace a worker: %w", err))
				return
			}
			workers.add(w)
		}
	}
}

// fleet holds the workers to close at the end.
type fleet struct {
	mu      sync.Mutex // guards workers
	workers []*worker
}

func (f *fleet) add(w *worker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.workers = append(f.workers, w)
}

func (f *fleet) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	var closing sync.WaitGroup
	for _, w := range f.workers {
		closing.Go(func() { _ = w.close() }) // what it did not finish is delivered again, to nobody
	}
	closing.Wait()
}

const (
	publishBatch    = 20
	publishAttempts = 5
)

// produce publishes the traffic, in its order.
func (h *half) produce(ctx context.Context, pub message.Publisher) error {
	publish := h.deliveries.publish(pub, h.topics.orders, ordersHandler, stockHandler)
	ids := messageIDs{}
	for sendings := h.traffic.sendings; len(sendings) > 0; {
		batch := sendings[:min(publishBatch, len(sendings))]
		sendings = sendings[len(batch):]
		messages := make([]*message.Message, len(batch))
		for i, s := range batch {
			messages[i] = s.message(ids.of(s))
		}
		for attempt := 1; ; attempt++ {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			err := publish(messages...)
			if err == nil {
				break
			}
			if attempt == publishAttempts { // some may be stored twice by now, which is no harm either
				return err
			}
		}
		for _, s := range batch {
			switch {
			case s.fault != "":
				h.faults.count(s.fault)
			case s.event.late:
				h.faults.count(outOfOrder)
			}
		}
	}
	h.deliveries.allSent()
	return nil
}

// remove removes what the half has left on the servers.
func (h *half) remove(ctx context.Context) error {
	var groups []string
	for _, name := range []string{ordersHandler, stockHandler, shippingHandler, "producer"} {
		groups = append(groups, h.group(name))
	}
	t := h.topics
	return errors.Join(
		h.broker.remove(ctx, []string{t.orders, t.reservations, t.poison}, groups),
		h.database.drop(ctx, h.schema))
}

// outcomes counts what the module reports of deliveries.
type outcomes struct {
	mu     sync.Mutex // guards counts
	counts map[idempotent.Outcome]int
}

func (o *outcomes) observe(_ context.Context, event idempotent.Event) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.counts == nil {
		o.counts = map[idempotent.Outcome]int{}
	}
	o.counts[event.Outcome]++
}

func (o *outcomes) count(outcome idempotent.Outcome) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.counts[outcome]
}
