package middleware_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// memoryStore is a Store without a database: the real ones are under tests/.
type memoryStore struct {
	owners sync.Map // of consumer names

	mu      sync.Mutex
	claims  map[string]*record
	forgot  []deduplicator.Claim
	seen    []deduplicator.Claim // by Process
	failing error                // returned instead of processing
}

type record struct {
	fingerprint []byte
	outputs     []deduplicator.Output
}

func newMemoryStore() *memoryStore { return &memoryStore{claims: map[string]*record{}} }

func (s *memoryStore) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = append(s.seen, claim)
	if s.failing != nil {
		return deduplicator.Result{}, s.failing
	}
	if known, ok := s.claims[claim.Consumer+"/"+claim.Key]; ok {
		if len(claim.Fingerprint) > 0 && !bytes.Equal(claim.Fingerprint, known.fingerprint) {
			return deduplicator.Result{}, &deduplicator.ConflictError{Consumer: claim.Consumer, Key: claim.Key, Stored: known.fingerprint, Got: claim.Fingerprint}
		}
		return deduplicator.Result{Outcome: deduplicator.Duplicate, Outputs: known.outputs}, nil
	}
	outputs, err := work(ctx)
	if err != nil {
		return deduplicator.Result{}, err
	}
	s.claims[claim.Consumer+"/"+claim.Key] = &record{claim.Fingerprint, outputs}
	return deduplicator.Result{Outcome: deduplicator.Processed}, nil
}

func (s *memoryStore) Forget(_ context.Context, claims ...deduplicator.Claim) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgot = append(s.forgot, claims...)
	for _, claim := range claims {
		s.claims[claim.Consumer+"/"+claim.Key].outputs = nil
	}
	return nil
}

// saw returns the claims that Process got.
func (s *memoryStore) saw() []deduplicator.Claim {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

func (s *memoryStore) Reserve(consumer, owner string) error {
	if first, taken := s.owners.LoadOrStore(consumer, owner); taken && first != owner {
		return deduplicator.ErrConsumerTaken
	}
	return nil
}

func (s *memoryStore) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failing = err
}

// publisher records what it is given and fails as long as fail says so.
type publisher struct {
	mu       sync.Mutex
	fail     func(topic string, n int) error // n counts the calls from 1
	calls    int
	messages map[string][]*message.Message
}

func (p *publisher) Publish(topic string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	if p.fail != nil {
		if err := p.fail(topic, p.calls); err != nil {
			return err
		}
	}
	if p.messages == nil {
		p.messages = map[string][]*message.Message{}
	}
	for _, msg := range messages {
		p.messages[topic] = append(p.messages[topic], msg.Copy())
	}
	return nil
}

func (p *publisher) Close() error { return nil }

func (p *publisher) sent(topic string) []*message.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.messages[topic])
}

// events is an Observer that remembers.
type events struct {
	mu  sync.Mutex
	all []middleware.Event
}

func (e *events) observe(_ context.Context, event middleware.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, event)
}

func (e *events) seen() []middleware.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.all)
}

func (e *events) outcomes() []middleware.Outcome {
	var outcomes []middleware.Outcome
	for _, event := range e.seen() {
		outcomes = append(outcomes, event.Outcome)
	}
	return outcomes
}

// bench is a Router with one handler on an in-process broker, in a synctest
// bubble, so that pauses take no time.
type bench struct {
	store   *memoryStore
	events  *events
	poison  *publisher
	outputs *publisher
	broker  *gochannel.GoChannel
	router  *message.Router
	ctx     context.Context // of the bubble
}

const topic = "orders"

// run starts a Router with the chain of links (after the observer) and handler
// and calls test in the bubble.
func run(t *testing.T, links func(b *bench) []middleware.Link, handler message.HandlerFunc, test func(b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{ctx: t.Context(), store: newMemoryStore(), events: &events{}, poison: &publisher{}, outputs: &publisher{}}
		b.broker = gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
		chain, err := middleware.Chain(append([]middleware.Link{middleware.WithObserver(b.events.observe)}, links(b)...)...)
		if err != nil {
			t.Fatal(err)
		}
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		b.router = router
		router.AddMiddleware(chain...)
		router.AddHandler("stock", topic, b.broker, "reserved", b.outputs, handler)
		done := make(chan error, 1)
		go func() { done <- router.Run(t.Context()) }()
		<-router.Running()
		test(b)
		if err := errors.Join(router.Close(), <-done); err != nil {
			t.Error(err)
		}
	})
}

// deliver publishes one message and waits until it was acknowledged or nothing
// happens any more.
func (b *bench) deliver(t *testing.T, msg *message.Message) {
	t.Helper()
	if err := b.broker.Publish(topic, msg); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

// until lets the bubble's clock run until the condition holds.
func (b *bench) until(condition func() bool) {
	for synctest.Wait(); !condition(); synctest.Wait() {
		time.Sleep(time.Second)
	}
}

func newMessage(key, payload string) *message.Message {
	msg := message.NewMessage("uuid-"+key, []byte(payload))
	if key != "" {
		msg.Metadata.Set("event_id", key)
	}
	return msg
}

func byEventID() middleware.DeduplicateOption {
	return middleware.WithKey(deduplicator.FromMetadata("event_id"))
}
