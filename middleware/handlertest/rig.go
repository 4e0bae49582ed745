package handlertest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// patience bounds the delivery of a message.
const patience = 30 * time.Second

// errPlanned is what a fault does where the choice is free.
var errPlanned = errors.New("handlertest: planned fault")

// fault is what goes wrong once. The zero fault is none.
type fault struct {
	statement int   // of the handler, counted from 1, that
	fails     bool  // fails, without being sent
	cut       bool  // is the last one on its connection
	commit    bool  // the connection is lost before the commit
	answer    bool  // or between the commit and its answer
	after     error // what the handler returns after its writes
	panics    bool  // or does
	ends      bool  // or the context ends there
	publish   bool  // publishing fails
	ack       bool  // the worker dies between publishing and the ack
}

// afterCommit reports whether the effect is durable when the fault strikes.
func (f fault) afterCommit() bool { return f.answer || f.publish || f.ack }

// rig is a Router with the handler, and the faults.
type rig struct {
	Case
	db       *sql.DB // that of the case, with faults in it
	router   *message.Router
	incoming chan *message.Message
	done     chan error

	// What the first message shows.
	effects    int // of one message
	outputs    int
	statements []string // of the handler, in its transaction
	trials     []trial
	stop       bool // nothing else can be tested

	mu       sync.Mutex // guards what follows
	fault    fault
	struck   bool           // the fault has come about
	hit      bool           // in a statement of this run of the handler
	ignored  bool           // which returned nil nevertheless
	inside   bool           // the handler is running
	ran      []string       // statements of the current run of the handler
	runs     int            // of the handler
	returned []string       // UUIDs of the last run
	err      error          // of the last delivery
	emitted  map[string]int // how often, by UUID
	cancel   func()         // ends the context of the last delivery
}

type keyKey struct{}

const topic = "handlertest"

func newRig(ctx context.Context, c Case) (*rig, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	r := &rig{Case: c, incoming: make(chan *message.Message), done: make(chan error, 1)}
	if err := deduplicator.Migrate(ctx, c.DB, c.Dialect, c.Options...); err != nil {
		return nil, err
	}
	r.db = sql.OpenDB(sqlhook.Wrap(sqlhook.Borrow(c.DB), r.hook))
	r.db.SetMaxIdleConns(-1) // the connections belong to DB's pool
	store, err := deduplicator.NewSQLStore(ctx, r.db, c.Dialect, c.Options...)
	if err != nil {
		return nil, errors.Join(err, r.db.Close())
	}
	build := c.Chain
	if build == nil {
		build = func(store deduplicator.Store) ([]message.HandlerMiddleware, error) {
			return middleware.Chain(middleware.Deduplicate(store, middleware.WithKey(func(msg *message.Message) (string, error) {
				key, _ := msg.Context().Value(keyKey{}).(string)
				return key, nil
			})))
		}
	}
	chain, err := build(store)
	if err != nil {
		return nil, errors.Join(err, r.db.Close())
	}
	if r.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: time.Second}, watermill.NopLogger{}); err != nil {
		return nil, errors.Join(err, r.db.Close())
	}
	name := "handlertest-" + rand.Text() // so that the keys of each run are its own
	var handler *message.Handler
	if c.Handler != nil {
		handler = r.router.AddHandler(name, topic, subscriber{r}, topic+"-outputs", publisher{r}, r.handle(c.Handler))
	} else {
		handler = r.router.AddConsumerHandler(name, topic, subscriber{r}, func(msg *message.Message) error {
			_, err := r.handle(func(msg *message.Message) ([]*message.Message, error) { return nil, c.ConsumerHandler(msg) })(msg)
			return err
		})
	}
	handler.AddMiddleware(append([]message.HandlerMiddleware{r.observe}, chain...)...)
	go func() { r.done <- r.router.Run(context.WithoutCancel(ctx)) }()
	<-r.router.Running()
	return r, nil
}

func (r *rig) close() {
	_ = r.router.Close()
	<-r.done
	_ = r.db.Close()
}

// observe is the outermost middleware.
func (r *rig) observe(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := h(msg)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.err = err
		return produced, err
	}
}

// handle is the handler with faults.
func (r *rig) handle(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		r.mu.Lock()
		r.inside, r.ran, r.runs = true, nil, r.runs+1
		r.mu.Unlock()
		defer func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.inside = false
			if r.hit {
				r.hit, r.ignored = false, err == nil && !rolledBack(r.ran)
			}
		}()
		produced, err = h(msg)
		if err != nil {
			return produced, err
		}
		var uuids []string
		for _, output := range produced {
			uuids = append(uuids, output.UUID)
		}
		r.mu.Lock()
		r.returned = uuids
		f, end := r.fault, r.cancel
		strikes := f.after != nil || f.panics || f.ends
		if strikes {
			r.fault, r.struck = fault{}, true
		}
		r.mu.Unlock()
		switch {
		case f.after != nil:
			return nil, f.after
		case f.panics:
			panic(errPlanned)
		case f.ends:
			end()
		}
		return produced, nil
	}
}

// hook is called by the store's connections. Those that forget outputs, while the
// next message is handled already, have no transaction.
func (r *rig) hook(_ context.Context, e sqlhook.Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	strike := func(when bool, err error) error {
		if !when {
			return nil
		}
		r.fault, r.struck = fault{}, true
		return err
	}
	switch {
	case e.Step == sqlhook.Statement && r.inside && e.InTx:
		r.ran = append(r.ran, e.Query)
		now := r.fault.fails && r.fault.statement == len(r.ran)
		r.hit = r.hit || now
		return strike(now, errPlanned)
	case e.Step == sqlhook.StatementDone && r.inside && e.InTx:
		return strike(r.fault.cut && r.fault.statement == len(r.ran), sqlhook.ErrCut)
	case e.Step == sqlhook.Commit:
		return strike(r.fault.commit, sqlhook.ErrCut)
	case e.Step == sqlhook.CommitDone && e.Err == nil:
		return strike(r.fault.answer, sqlhook.ErrCut)
	}
	return nil
}

type subscriber struct{ rig *rig }

func (s subscriber) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	go func() { // ends when the Router is closed
		defer close(out)
		for {
			select {
			case msg := <-s.rig.incoming:
				out <- msg
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (subscriber) Close() error { return nil }

// publisher takes what the Router publishes.
type publisher struct{ rig *rig }

func (p publisher) Publish(_ string, messages ...*message.Message) error {
	r := p.rig
	r.mu.Lock()
	defer r.mu.Unlock()
	f := r.fault
	if f.publish || f.ack {
		r.fault, r.struck = fault{}, true
	}
	if f.publish {
		return errPlanned
	}
	for _, msg := range messages {
		r.emitted[msg.UUID]++
	}
	if f.ack {
		return errPlanned // as the Router sees it; the message stays unacknowledged either way
	}
	return nil
}

func (publisher) Close() error { return nil }

// answer is what became of a delivery.
type answer struct {
	acked bool
	err   error // of the middlewares
}

// deliver sends a copy of msg through the Router, in the name of key.
func (r *rig) deliver(ctx context.Context, key string, msg *message.Message) (answer, error) {
	ctx, cancel := context.WithCancel(context.WithValue(ctx, keyKey{}, key))
	defer cancel()
	r.mu.Lock()
	r.cancel = cancel
	r.err = nil
	r.mu.Unlock()
	delivered := msg.Copy()
	delivered.SetContext(ctx)
	timeout := time.NewTimer(patience)
	defer timeout.Stop()
	stuck := func() (answer, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.stop = true
		return answer{}, fmt.Errorf("the message is not done after %v; %s", patience, stuckHint)
	}
	select {
	case r.incoming <- delivered:
	case <-timeout.C:
		return stuck()
	}
	var acked bool
	select {
	case <-delivered.Acked():
		acked = true
	case <-delivered.Nacked():
	case <-timeout.C:
		return stuck()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return answer{acked, r.err}, nil
}

// stuckHint is what most often is the cause when a handler can't go on.
const stuckHint = "a handler that waits for a second connection, or for a row that its own transaction has locked, can't go on: use middleware.Tx(msg.Context()) for all that it does"

// short is a statement for a message.
func short(query string) string {
	query = strings.Join(strings.Fields(query), " ")
	if len(query) > 80 {
		query = strings.ToValidUTF8(query[:80], "") + "…"
	}
	return query
}
