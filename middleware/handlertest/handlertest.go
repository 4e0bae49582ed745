// Package handlertest tests, without a broker, that what a handler does happens
// exactly once, whatever fails meanwhile:
//
//	func TestReserve(t *testing.T) {
//		handlertest.Test(t, handlertest.Case{
//			DB:      db,
//			Dialect: deduplicator.PostgreSQL,
//			Handler: stock.Reserve,
//			Message: func() *message.Message { return newOrder("sku-1", 2) },
//			Effects: func(ctx context.Context) (n int, err error) {
//				return n, db.QueryRowContext(ctx, "SELECT COUNT(*) FROM reservations").Scan(&n)
//			},
//		})
//	}
//
// It delivers messages through a Router with Deduplicate on DB: one message
// twice, two copies at once, one with an error, a panic, or the end of its context
// after the handler's writes, with each of the handler's statements failing, with
// the connection lost after each of them, before the commit, and between the
// commit and its answer, with publishing that fails, and with a crash after
// publishing. Then the message is delivered again, as a broker does.
//
// So it finds handlers that write outside of their transaction, ignore the error
// of a statement, end the transaction or publish themselves.
package handlertest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// Case is a handler and what it works on. All fields without another word are
// required.
type Case struct {
	// DB has the tables that the handler writes. Test adds those of the
	// deduplicator where they are missing, and leaves its rows behind. A pool of
	// one connection is enough, if the handler needs no second one.
	DB      *sql.DB
	Dialect deduplicator.Dialect

	// Handler is the handler, with everything that it uses. One that returns no
	// messages is a ConsumerHandler instead.
	Handler         message.HandlerFunc
	ConsumerHandler message.NoPublishHandlerFunc

	// Message returns another event on each call, which the handler accepts and
	// which changes Effects by the same number each time.
	Message func() *message.Message

	// Effects measures what has taken effect: counts rows, or sums a balance. It
	// sees what is committed.
	Effects func(ctx context.Context) (int, error)

	// Publisher is what a handler that holds a publisher was given instead.
	// Optional. Every message that it gets is a fault: the handler is to return
	// them.
	Publisher *Publisher

	// Chain builds your own middlewares on the store that it is given. Optional:
	// Deduplicate alone, with a key that Test makes up.
	Chain func(store deduplicator.Store) ([]message.HandlerMiddleware, error)

	// Options are those of the store. Optional.
	Options []deduplicator.Option
}

func (c Case) validate() error {
	var errs []error
	for _, field := range []struct {
		name string
		set  bool
	}{
		{"DB", c.DB != nil},
		{"Dialect", c.Dialect != ""},
		{"Handler or ConsumerHandler", c.Handler != nil || c.ConsumerHandler != nil},
		{"Message", c.Message != nil},
		{"Effects", c.Effects != nil},
	} {
		if !field.set {
			errs = append(errs, fmt.Errorf("handlertest: Case.%s is not set", field.name))
		}
	}
	if c.Handler != nil && c.ConsumerHandler != nil {
		errs = append(errs, errors.New("handlertest: Case.Handler and Case.ConsumerHandler are both set"))
	}
	return errors.Join(errs...)
}

// Test fails t for everything that does not happen exactly once. Each fault is a
// subtest. It takes some seconds, most of them pauses before a message comes back.
func Test(t *testing.T, c Case) {
	t.Helper()
	r, err := newRig(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	for trial, ok := r.first(), true; ok; trial, ok = r.next() {
		t.Run(trial.name, func(t *testing.T) {
			if err := trial.run(t.Context()); err != nil {
				t.Error(err)
			}
		})
		if r.stop {
			return
		}
	}
}

// Check is [Test] for other test frameworks: it returns what Test would report,
// joined, and ends with ctx.
func Check(ctx context.Context, c Case) error {
	r, err := newRig(ctx, c)
	if err != nil {
		return err
	}
	defer r.close()
	var errs []error
	for trial, ok := r.first(), true; ok; trial, ok = r.next() {
		if err := trial.run(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", trial.name, err))
		}
		if r.stop {
			break
		}
	}
	return errors.Join(errs...)
}

// Publisher is a message.Publisher that only counts: see [Case]. The zero value
// is ready for use. It is safe for concurrent use.
type Publisher struct {
	mu    sync.Mutex
	count int
}

// Publish implements message.Publisher.
func (p *Publisher) Publish(_ string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count += len(messages)
	return nil
}

// Close implements message.Publisher. It does nothing.
func (*Publisher) Close() error { return nil }

func (p *Publisher) published() int {
	if p == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.count
}
