package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// worker is one process of the shop as far as anybody outside can tell: a Router
// with connections of its own to the broker and the database.
type worker struct {
	faults     *injector
	deliveries *deliveries
	dead       atomic.Bool
	onDeath    func(*worker)

	connector *faultyConnector
	db        *sql.DB
	brokers   []ordering.Broker
	router    *message.Router
	running   chan error      // what the Router's Run returned
	life      context.Context //nolint:containedctx // the worker's own: all that it does ends with it
	end       context.CancelFunc
	closeOnce func() error
}

// startWorker returns a worker that handles messages.
func (h *half) startWorker(ctx context.Context) (_ *worker, err error) {
	raw, err := h.database.connector(h.schema)
	if err != nil {
		return nil, err
	}
	w := &worker{
		faults:     h.faults,
		deliveries: h.deliveries,
		onDeath:    func(w *worker) { h.deaths <- w },
		connector:  &faultyConnector{Connector: raw, faults: h.faults},
		running:    make(chan error, 1),
	}
	w.closeOnce = sync.OnceValue(w.shutdown)
	w.life, w.end = context.WithCancel(context.WithoutCancel(ctx))
	w.db = sql.OpenDB(w.connector)
	w.db.SetMaxOpenConns(h.database.connections)
	w.db.SetMaxIdleConns(h.database.connections)
	defer func() {
		if err != nil {
			_ = w.close()
		}
	}()

	open := func(group string, topics ...string) ordering.Broker {
		if err != nil {
			return nil
		}
		var b ordering.Broker
		if b, err = h.broker.open(ctx, h.group(group)); err == nil {
			w.brokers = append(w.brokers, b)
			err = b.Declare(ctx, topics...)
		}
		return b
	}
	b := brokers{
		orders:   open(ordersHandler, h.topics.orders),
		stock:    open(stockHandler, h.topics.orders),
		shipping: open(shippingHandler, h.topics.reservations),
	}
	if err != nil {
		return nil, err
	}

	if w.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: closeTimeout}, h.logger); err != nil {
		return nil, err
	}
	w.router.AddSubscriberDecorators(w.breakSubscriber)
	w.router.AddPublisherDecorators(w.breakPublisher)
	s := shop{h.database.dialect}
	if h.protected {
		err = addProtected(ctx, w.router, w.db, s, b, h.topics, h.outcomes.observe, w.breakWork)
	} else {
		addUnprotected(w.router, w.db, s, b, h.topics, w.breakWork)
	}
	if err != nil {
		return nil, err
	}
	go func() { w.running <- w.router.Run(context.WithoutCancel(ctx)) }()
	select {
	case <-w.router.Running():
		return w, nil
	case err := <-w.running:
		w.running <- err // for close
		return nil, fmt.Errorf("router: %w", err)
	}
}

const (
	drainTimeout = 5 * time.Second
	closeTimeout = 2 * drainTimeout
)

func (w *worker) isDead() bool { return w.dead.Load() }

// die cuts the worker off from the database, in the middle of what it is doing,
// and makes its other connections end.
func (w *worker) die() {
	if w.dead.CompareAndSwap(false, true) {
		w.connector.dead.Store(true)
		w.end()
		w.onDeath(w)
	}
}

// close ends the worker. What it has not acknowledged goes to another one.
func (w *worker) close() error { return w.closeOnce() }

func (w *worker) shutdown() error {
	var errs []error
	if w.router != nil {
		errs = append(errs, w.router.Close())
	}
	w.end()
	for _, b := range w.brokers {
		errs = append(errs, b.Close())
	}
	if w.router != nil && w.router.IsRunning() {
		errs = append(errs, <-w.running)
	}
	return errors.Join(append(errs, w.db.Close())...)
}
