package handlertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// mostStatements bounds how many of a handler's statements have faults.
const mostStatements = 20

// redeliveries bounds how often a message is delivered until it is acknowledged.
const redeliveries = 5

// locked bounds how long the store may keep Effects from reading a SQLite file without
// a busy timeout: it forgets the outputs of the message before.
const locked = 5 * time.Second

// trial is one thing that goes wrong.
type trial struct {
	name string
	run  func(ctx context.Context) error
}

// first is the trial that shows what there is to be tested.
func (r *rig) first() trial { return trial{"a message", r.learn} }

func (r *rig) next() (trial, bool) {
	if len(r.trials) == 0 {
		return trial{}, false
	}
	t := r.trials[0]
	r.trials = r.trials[1:]
	return t, true
}

// learn delivers the first message, without faults.
func (r *rig) learn(ctx context.Context) error {
	r.stop = true // unless all is well
	before, err := r.measure(ctx)
	if err != nil {
		return err
	}
	a, after, err := r.deliverAndMeasure(ctx, rand.Text(), r.newMessage())
	if err != nil {
		return err
	}
	r.mu.Lock()
	ran := slices.Clone(r.ran)
	r.outputs = len(r.returned)
	r.mu.Unlock()
	r.effects = after.effects - before.effects
	switch {
	case errors.Is(a.err, deduplicator.ErrTxEnded):
		return errors.New("the handler commits or rolls back its transaction itself. Leave that to the middleware: it commits after the handler has returned nil")
	case errors.Is(a.err, deduplicator.ErrNotCommitted):
		return fmt.Errorf("nothing fails, but the database refuses the commit: does the handler ignore the error of a statement? %w", a.err)
	case !a.acked:
		return fmt.Errorf("nothing fails, but the message is not acknowledged: %w%s", a.err, r.unusedTx(ran))
	case r.effects == 0:
		return errors.New("the message is acknowledged, but Effects returns the same as before. Does it measure what the handler writes, and is Message a new event each time?")
	case after.published > before.published:
		return fmt.Errorf("the handler publishes %d messages itself: they are out even when its transaction is rolled back. Return them instead", after.published-before.published)
	case len(ran) == 0:
		return errors.New("the message has an effect, but the handler has run no statement in its transaction" + r.unusedTx(ran))
	}
	r.stop = false
	r.statements = ran
	r.plan()
	return nil
}

func (r *rig) unusedTx(ran []string) string {
	if len(ran) > 0 {
		return ""
	}
	return ". It writes outside of its transaction: use middleware.Tx(msg.Context()) for all that it does"
}

// plan lists the other trials.
func (r *rig) plan() {
	with := func(name string, f fault) {
		r.trials = append(r.trials, trial{name, func(ctx context.Context) error { return r.exactlyOnce(ctx, f) }})
	}
	with("a message twice", fault{})
	r.trials = append(r.trials, trial{"two copies at once", r.copies})
	with("an error after the writes", fault{after: errPlanned})
	with("a panic after the writes", fault{panics: true})
	with("the context ends after the writes", fault{ends: true})
	for i, query := range r.statements[:min(len(r.statements), mostStatements)] {
		with(fmt.Sprintf("statement %d fails, %s", i+1, short(query)), fault{statement: i + 1, fails: true})
		with(fmt.Sprintf("connection lost after statement %d, %s", i+1, short(query)), fault{statement: i + 1, cut: true})
	}
	with("connection lost before the commit", fault{commit: true})
	with("answer to the commit lost", fault{answer: true})
	if r.outputs > 0 {
		with("publishing fails after the commit", fault{publish: true})
		with("crash between publishing and ack", fault{ack: true})
	}
}

func (r *rig) newMessage() *message.Message {
	msg := r.Message()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.emitted, r.returned = map[string]int{}, nil
	return msg
}

// measurement is what the world sees.
type measurement struct{ effects, published int }

func (r *rig) measure(ctx context.Context) (measurement, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var effects int
	err := sqldb.Retry(ctx, locked, func() (err error) {
		effects, err = r.Effects(ctx)
		return err
	})
	if err != nil {
		return measurement{}, fmt.Errorf("measure Effects: %w", err)
	}
	return measurement{effects, r.Publisher.published()}, nil
}

func (r *rig) deliverAndMeasure(ctx context.Context, key string, msg *message.Message) (answer, measurement, error) {
	a, err := r.deliver(ctx, key, msg)
	if err != nil {
		return a, measurement{}, err
	}
	m, err := r.measure(ctx)
	return a, m, err
}

// exactlyOnce delivers a message until it is acknowledged, with a fault in the
// first delivery, and once more.
func (r *rig) exactlyOnce(ctx context.Context, f fault) error {
	before, err := r.measure(ctx)
	if err != nil {
		return err
	}
	msg, key := r.newMessage(), rand.Text()
	r.mu.Lock()
	r.fault, r.struck, r.ignored = f, false, false
	r.mu.Unlock()
	for n := 1; ; n++ {
		a, now, err := r.deliverAndMeasure(ctx, key, msg)
		if err != nil {
			return err
		}
		r.mu.Lock()
		struck, ignored, ran := r.struck, r.ignored, r.ran
		r.fault = fault{} // it had its chance
		r.mu.Unlock()
		if n == 1 && f != (fault{}) && !struck {
			return fmt.Errorf("the fault did not come about: the handler ran %d statements this time, and %d for the first message", len(ran), len(r.statements))
		}
		if ignored {
			return errors.New("the handler ignores the error of this statement and returns nil. It must return it: on PostgreSQL the whole transaction is lost by then, elsewhere the rest would be committed")
		}
		if errors.Is(a.err, deduplicator.ErrTxEnded) {
			return errors.New("the handler commits or rolls back its transaction itself")
		}
		if !a.acked && !f.afterCommit() {
			if remains := now.effects - before.effects; remains != 0 {
				return fmt.Errorf("the transaction was rolled back, but Effects has changed by %d: the handler writes outside of its transaction, or before it is committed. Use middleware.Tx(msg.Context()) for all that it does", remains)
			}
		}
		if now.published > before.published {
			return errors.New("the handler publishes itself, so messages are out although its transaction may be rolled back. Return them instead")
		}
		if a.acked {
			break
		}
		if n == redeliveries {
			return fmt.Errorf("the message still fails when delivered for the %dth time, without a fault: %w", n, a.err)
		}
	}
	return r.completed(ctx, key, msg, before)
}

// completed checks a message that is acknowledged, and delivers it once more.
func (r *rig) completed(ctx context.Context, key string, msg *message.Message, before measurement) error {
	r.mu.Lock()
	runs, returned := r.runs, slices.Clone(r.returned)
	r.mu.Unlock()
	a, after, err := r.deliverAndMeasure(ctx, key, msg)
	if err != nil {
		return err
	}
	if !a.acked {
		return fmt.Errorf("a copy of a message that was acknowledged is refused: %w", a.err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.runs != runs {
		return errors.New("the handler was called for a copy of a message that was acknowledged; is Deduplicate in the chain?")
	}
	if got := after.effects - before.effects; got != r.effects {
		return fmt.Errorf("the message has changed Effects by %d, the first one by %d", got, r.effects)
	}
	for _, uuid := range returned {
		if r.emitted[uuid] == 0 {
			return fmt.Errorf("output %q was not published", uuid)
		}
	}
	for uuid := range r.emitted {
		if !slices.Contains(returned, uuid) {
			return fmt.Errorf("a message %q was published, which the handler did not return in the attempt that took effect; a consumer would take it for another event", uuid)
		}
	}
	return nil
}

// copies delivers two copies of a message at once.
func (r *rig) copies(ctx context.Context) error {
	before, err := r.measure(ctx)
	if err != nil {
		return err
	}
	msg, key := r.newMessage(), rand.Text()
	done := make(chan error, 2)
	for range 2 {
		go func() {
			for n := 1; ; n++ {
				a, err := r.deliver(ctx, key, msg)
				if err == nil && !a.acked && n == redeliveries {
					err = fmt.Errorf("a copy still fails when delivered for the %dth time: %w", n, a.err)
				}
				if err != nil || a.acked {
					done <- err
					return
				}
			}
		}()
	}
	if err := errors.Join(<-done, <-done); err != nil {
		return err
	}
	return r.completed(ctx, key, msg, before)
}

// rolledBack reports whether a handler has gone back to a savepoint.
func rolledBack(ran []string) bool {
	return slices.ContainsFunc(ran, func(query string) bool {
		return strings.HasPrefix(strings.ToUpper(strings.TrimSpace(query)), "ROLLBACK TO")
	})
}
