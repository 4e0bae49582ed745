package property_test

import (
	"context"
	"database/sql"
	"errors"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"pgregory.net/rapid"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
)

var errPlanned = errors.New("planned fault")

// rig is a worker on a broker that does what the test says.
type rig struct {
	t       rapid.TB
	name    string // of the handler, so of the consumer
	plain   *sql.DB
	dialect deduplicator.Dialect
	mutant  fault

	db       *sql.DB
	router   *message.Router
	incoming chan *message.Message
	done     chan error
	forgot   chan struct{} // has an element for each message that was forgotten, or not

	mu      sync.Mutex // guards what follows
	fault   fault
	strikes bool // the fault has come about
	inside  bool // the handler is running
	emitted map[string][]string
}

func newRig(t rapid.TB, plain *sql.DB, dialect deduplicator.Dialect, name string, mutant fault) *rig {
	r := &rig{t: t, name: name, plain: plain, dialect: dialect, mutant: mutant, emitted: map[string][]string{}}
	r.start()
	return r
}

func (r *rig) start() {
	r.incoming, r.done, r.forgot = make(chan *message.Message), make(chan error, 1), make(chan struct{}, 10)
	r.db = sql.OpenDB(sqlhook.Wrap(sqlhook.Borrow(r.plain), r.hook))
	r.db.SetMaxIdleConns(-1)
	// Without known keys, so that every copy meets the database and its faults.
	store, err := deduplicator.NewSQLStore(context.Background(), r.db, r.dialect, deduplicator.WithKnownKeys(0))
	r.must(err)
	var used deduplicator.Store = forgetful{store, r}
	if r.mutant != none {
		used = claimAlone{used}
	}
	chain, err := middleware.Chain(
		middleware.WithObserver(r.observe),
		middleware.Deduplicate(used, middleware.WithKey(deduplicator.FromUUID())))
	r.must(err)
	r.router, err = message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	r.must(err)
	r.router.AddHandler(r.name, "in", subscriber{r}, "out", publisher{r}, r.handle).AddMiddleware(chain...)
	go func() { r.done <- r.router.Run(context.Background()) }()
	<-r.router.Running()
}

func (r *rig) close() { r.must(errors.Join(r.router.Close(), <-r.done, r.db.Close())) }

func (r *rig) restart() {
	r.close()
	r.start()
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatalf("%v", err)
	}
}

type cancelKey struct{}

// observe spares the test the pause before a message goes back.
func (r *rig) observe(ctx context.Context, e middleware.Event) {
	if e.Outcome == middleware.Failed || e.Outcome == middleware.InFlight {
		if cancel, ok := ctx.Value(cancelKey{}).(context.CancelFunc); ok {
			cancel()
		}
	}
}

// strike reports whether f is the fault of this delivery, once.
func (r *rig) strike(f fault) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fault != f {
		return false
	}
	r.fault, r.strikes = none, true
	return true
}

func (r *rig) struck() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.strikes
}

func (r *rig) hook(_ context.Context, e sqlhook.Event) error {
	r.mu.Lock()
	inside := r.inside
	r.mu.Unlock()
	cut := func(f fault) error {
		if r.strike(f) {
			return sqlhook.ErrCut
		}
		return nil
	}
	switch {
	case e.Step == sqlhook.Commit:
		return cut(cutCommit)
	case e.Step == sqlhook.CommitDone && e.Err == nil:
		return cut(answerLost)
	case e.Step == sqlhook.Statement && inside:
		return cut(cutHandler)
	case e.Step == sqlhook.Statement && strings.Contains(e.Query, "INSERT") && strings.Contains(e.Query, "produced_messages"):
		return cut(cutOutputs)
	case e.Step == sqlhook.StatementDone && strings.Contains(e.Query, "INSERT") && strings.Contains(e.Query, "processed_messages"):
		return cut(cutClaim)
	case e.Step == sqlhook.Statement && strings.HasPrefix(e.Query, "DELETE"):
		return cut(forgetFails)
	}
	return nil
}

func (r *rig) handle(msg *message.Message) ([]*message.Message, error) {
	r.setInside(true)
	defer r.setInside(false)
	ctx := msg.Context()
	tx, ok := middleware.Tx(ctx)
	if !ok {
		return nil, errors.New("no transaction")
	}
	outputs := []*message.Message{
		message.NewMessage(watermill.NewUUID(), []byte(msg.UUID)),
		message.NewMessage(watermill.NewUUID(), []byte(msg.UUID)),
	}
	values := "(?, ?)"
	if r.dialect == deduplicator.PostgreSQL {
		values = "($1, $2)"
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO effects (event, outputs) VALUES "+values,
		msg.UUID, outputs[0].UUID+" "+outputs[1].UUID); err != nil {
		return nil, err
	}
	switch {
	case r.strike(handlerFails):
		return nil, errPlanned
	case r.strike(panics):
		panic(errPlanned)
	case r.strike(goexit):
		runtime.Goexit()
	case r.strike(contextEnds):
		if cancel, ok := ctx.Value(cancelKey{}).(context.CancelFunc); ok {
			cancel()
		}
	}
	return outputs, nil
}

func (r *rig) setInside(inside bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inside = inside
}

// deliver sends the message of key and reports whether it is acknowledged. What
// follows on the ack is over when it returns.
func (r *rig) deliver(key string, f fault) (acked bool) {
	r.mu.Lock()
	r.fault, r.strikes = f, false
	before := len(r.emitted[key])
	r.mu.Unlock()
	acked = r.send(key)
	r.mu.Lock()
	published := len(r.emitted[key]) > before
	r.mu.Unlock()
	if acked && published {
		r.awaitForget()
	}
	r.mu.Lock()
	r.fault = none
	r.mu.Unlock()
	return acked
}

func (r *rig) awaitForget() {
	select {
	case <-r.forgot:
	case <-time.After(patience):
		r.t.Fatalf("outputs are not forgotten")
	}
}

func (r *rig) send(key string) (acked bool) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	msg := message.NewMessage(key, []byte("payload of "+key))
	msg.SetContext(context.WithValue(ctx, cancelKey{}, cancel))
	r.incoming <- msg
	select {
	case <-msg.Acked():
		return true
	case <-msg.Nacked():
		return false
	case <-time.After(patience):
		r.t.Fatalf("no answer to %s", key)
		return false
	}
}

// copies delivers two copies at once, until both are acknowledged.
func (r *rig) copies(key string) {
	r.mu.Lock()
	before := len(r.emitted[key])
	r.mu.Unlock()
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			for !r.send(key) { //nolint:revive // a copy in flight comes back
			}
		})
	}
	both.Wait()
	r.mu.Lock()
	published := (len(r.emitted[key]) - before) / 2
	r.mu.Unlock()
	for range published {
		r.awaitForget()
	}
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

type publisher struct{ rig *rig }

func (p publisher) Publish(_ string, messages ...*message.Message) error {
	r := p.rig
	if r.strike(publishFails) {
		return errPlanned
	}
	var err error
	switch {
	case r.strike(publishHalf):
		messages, err = messages[:1], errPlanned
	case r.strike(crashNoAck):
		err = errPlanned // the message stays unacknowledged either way
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, msg := range messages {
		key := string(msg.Payload)
		r.emitted[key] = append(r.emitted[key], msg.UUID)
	}
	return err
}

func (publisher) Close() error { return nil }

// forgetful tells when outputs were forgotten.
type forgetful struct {
	deduplicator.Store
	rig *rig
}

func (s forgetful) Forget(ctx context.Context, claims ...deduplicator.Claim) error {
	err := s.Store.Forget(ctx, claims...)
	for range claims {
		s.rig.forgot <- struct{}{}
	}
	return err
}

// claimAlone is broken: what fails after the claim is lost.
type claimAlone struct{ deduplicator.Store }

func (s claimAlone) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	result, err := s.Store.Process(ctx, claim, func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
	if err != nil || result.Outcome == deduplicator.Duplicate {
		return result, err
	}
	return s.Store.Process(ctx, deduplicator.Claim{Consumer: "work", Key: claim.Key}, work)
}

func sorted(entries map[string]*entry) []string { return slices.Sorted(maps.Keys(entries)) }
