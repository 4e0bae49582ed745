package main

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// fault is a kind of trouble.
type fault string

const (
	// The producer.
	producerResend fault = "producer sends again after a lost confirmation"
	duplicateLater fault = "message delivered again later"
	outOfOrder     fault = "event published after a newer one"

	// Between the broker and the handler.
	duplicateAtOnce fault = "message delivered twice at the same time"
	ackLost         fault = "acknowledgement to the broker lost"

	// The handler.
	handlerError fault = "handler fails after its writes"
	handlerPanic fault = "handler panics after its writes"
	workerDeath  fault = "worker dies in mid-transaction"

	// The commit, and what comes after it.
	commitAnswerLost fault = "commit done, its answer lost"
	outputRefused    fault = "publishing the output fails after the commit"
	outputUnsure     fault = "output published, its confirmation lost"
)

// allFaults is the order of the report.
var allFaults = []fault{
	producerResend, duplicateLater, outOfOrder, duplicateAtOnce, ackLost,
	handlerError, handlerPanic, workerDeath, commitAnswerLost, outputRefused, outputUnsure,
}

var (
	errInjected   = errors.New("injected fault")
	errWorkerDied = errors.New("injected fault: the worker is dead")
)

// point is where a fault strikes: the first time that the handler deals with
// the event (the order, for reservations).
type point struct {
	handler string
	key     string
}

type plannedFault struct {
	fault
	point
}

// planFaults says which faults strike where. It depends on its arguments alone.
func planFaults(rng *rand.Rand, t *traffic, duplicates int) []plannedFault {
	var plan []plannedFault
	add := func(f fault, handler, key string) { plan = append(plan, plannedFault{f, point{handler, key}}) }

	// Late events are left out for the handler that refuses them, and events
	// without an effect for the one that ignores them: a fault must strike with
	// and without protection.
	targets := map[string][]string{}
	for _, e := range t.events {
		if !e.late {
			targets[ordersHandler] = append(targets[ordersHandler], e.id)
		}
		if e.Status == statusPlaced {
			targets[stockHandler] = append(targets[stockHandler], e.id)
			targets[shippingHandler] = append(targets[shippingHandler], e.Order)
		}
	}
	for _, e := range t.events {
		if rng.IntN(300) >= duplicates {
			continue
		}
		handler := ordersHandler
		if e.Status == statusPlaced {
			handler = stockHandler
		}
		add(duplicateAtOnce, handler, e.id)
	}
	for _, handler := range []string{ordersHandler, stockHandler, shippingHandler} {
		keys := targets[handler]
		rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		total := len(keys)
		take := func(f fault, n int) {
			n = min(n, len(keys))
			for _, key := range keys[:n] {
				add(f, handler, key)
			}
			keys = keys[n:]
		}
		share := func(percent int) int { return max(1, total*percent/100) }
		take(commitAnswerLost, share(4))
		take(ackLost, share(4))
		take(workerDeath, 1)
		take(handlerError, share(3))
		take(handlerPanic, share(2))
	}
	placed := slices.Clone(targets[shippingHandler])
	rng.Shuffle(len(placed), func(i, j int) { placed[i], placed[j] = placed[j], placed[i] })
	for i, order := range placed[:(len(placed)+7)/8] {
		if i%2 == 0 {
			add(outputRefused, stockHandler, order)
		} else {
			add(outputUnsure, stockHandler, order)
		}
	}
	return plan
}

// injector lets the planned faults strike, each of them once, and counts all.
type injector struct {
	mu     sync.Mutex // guards what follows
	armed  map[plannedFault]bool
	struck map[fault]int
}

func newInjector(plan []plannedFault) *injector {
	i := &injector{armed: map[plannedFault]bool{}, struck: map[fault]int{}}
	for _, p := range plan {
		i.armed[p] = true
	}
	return i
}

// strike reports whether f is due at p.
func (i *injector) strike(f fault, p point) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.armed[plannedFault{f, p}] {
		return false
	}
	delete(i.armed, plannedFault{f, p})
	i.struck[f]++
	return true
}

// count counts a fault that the producer made.
func (i *injector) count(f fault) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.struck[f]++
}

func (i *injector) counts(f fault) int {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.struck[f]
}

// pointFrom returns what is being handled under ctx. It gets to the database
// driver that way too.
func pointFrom(ctx context.Context) (point, bool) {
	p, ok := ctx.Value(pointKey{}).(point)
	return p, ok
}

type pointKey struct{}

// breakWork is around the shop's code, inside the transaction.
func (w *worker) breakWork(next work) work {
	return func(tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
		produced, err := next(tx, msg)
		if err != nil {
			return nil, err
		}
		p, _ := pointFrom(msg.Context())
		switch {
		case w.faults.strike(handlerError, p):
			return nil, errInjected
		case w.faults.strike(handlerPanic, p):
			panic(errInjected)
		case w.faults.strike(workerDeath, p):
			w.die()
			return nil, errWorkerDied
		}
		return produced, nil
	}
}

// breakSubscriber stands between a broker and the Router.
func (w *worker) breakSubscriber(sub message.Subscriber) (message.Subscriber, error) {
	return brokenSubscriber{sub, w}, nil
}

type brokenSubscriber struct {
	message.Subscriber
	worker *worker
}

func (s brokenSubscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	in, err := s.Subscriber.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	out := make(chan *message.Message) // the Router reads it until it is closed
	go func() {
		defer close(out)
		var twins sync.WaitGroup
		defer twins.Wait()
		for msg := range in {
			if s.worker.isDead() {
				msg.Nack()
				continue
			}
			p := pointOf(msg)
			ctx, cancel := s.worker.deliveryContext(msg.Context(), p)
			delivered := msg.Copy()
			delivered.SetContext(ctx)
			twice := s.worker.faults.strike(duplicateAtOnce, p)
			if twice {
				s.worker.deliveries.expect(p.handler, twinOf(msg))
			}
			go func() {
				defer cancel()
				s.answer(p, msg, delivered)
			}()
			out <- delivered
			if twice {
				twins.Go(func() { s.deliverTwin(p, msg, out) })
			}
		}
	}()
	return out, nil
}

// deliveryContext is for one delivery: it ends with the worker.
func (w *worker) deliveryContext(ctx context.Context, p point) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithValue(ctx, pointKey{}, p))
	unlink := context.AfterFunc(w.life, cancel)
	return ctx, func() { unlink(); cancel() }
}

func pointOf(msg *message.Message) point {
	handler := message.HandlerNameFromCtx(msg.Context())
	if handler == shippingHandler {
		return point{handler, msg.Metadata.Get(metaOrderID)}
	}
	return point{handler, msg.Metadata.Get(metaEventID)}
}

// answer passes the Router's answer on to the broker, unless it gets lost.
func (s brokenSubscriber) answer(p point, msg, delivered *message.Message) {
	select {
	case <-delivered.Nacked():
		msg.Nack()
	case <-delivered.Acked():
		// A dead process tells the broker nothing: it delivers again.
		if s.worker.isDead() || s.worker.faults.strike(ackLost, p) {
			msg.Nack()
			return
		}
		msg.Ack()
		s.worker.deliveries.done(p.handler, msg.Metadata.Get(metaSending))
	}
}

// deliverTwin delivers a copy of msg beside it, as a broker does that takes a
// slow consumer for a dead one.
func (s brokenSubscriber) deliverTwin(p point, msg *message.Message, out chan<- *message.Message) {
	defer s.worker.deliveries.done(p.handler, twinOf(msg))
	for !s.worker.isDead() {
		ctx, cancel := s.worker.deliveryContext(context.WithoutCancel(msg.Context()), p)
		twin := msg.Copy()
		twin.SetContext(ctx)
		out <- twin
		select {
		case <-twin.Acked():
			cancel()
			return
		case <-twin.Nacked():
			cancel()
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-s.worker.life.Done():
			return
		}
	}
}

func twinOf(msg *message.Message) string { return msg.Metadata.Get(metaSending) + " twin" }

// breakPublisher stands between the Router and a broker: what goes through it
// are outputs of transactions that are committed.
func (w *worker) breakPublisher(pub message.Publisher) (message.Publisher, error) {
	return brokenPublisher{pub, w}, nil
}

type brokenPublisher struct {
	message.Publisher
	worker *worker
}

func (p brokenPublisher) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		at := point{stockHandler, msg.Metadata.Get(metaOrderID)}
		if p.worker.isDead() {
			return errWorkerDied
		}
		if p.worker.faults.strike(outputRefused, at) {
			return errInjected
		}
		if err := p.worker.deliveries.publish(p.Publisher, topic, shippingHandler)(msg); err != nil {
			return err
		}
		if p.worker.faults.strike(outputUnsure, at) {
			return errInjected
		}
	}
	return nil
}
