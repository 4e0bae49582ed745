package deduplicator

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// MinInterval is the shortest interval of a [Cleaner] and a [Relay].
const MinInterval = 10 * time.Millisecond

// maxBackoff bounds the pause after passes that failed, where the interval is not
// longer.
const maxBackoff = 5 * time.Minute

// LoopOption is an option of both [NewCleaner] and [NewRelay].
type LoopOption interface {
	CleanerOption
	RelayOption
}

type intervalOption time.Duration

func (d intervalOption) applyCleaner(c *Cleaner) { c.interval = time.Duration(d) }
func (d intervalOption) applyRelay(r *Relay)     { r.interval = time.Duration(d) }

// WithInterval sets the time from the end of one pass to the next one, instead of
// [DefaultCleanInterval] or [DefaultRelayInterval]. Each varies by half, up or
// down, so that instances don't act in step. Values under [MinInterval] are
// refused.
func WithInterval(d time.Duration) LoopOption { return intervalOption(d) }

func checkInterval(d time.Duration) error { return sqldb.CheckDuration("WithInterval", d, MinInterval) }

// loop calls pass until ctx ends; the first time after a part of the interval. A
// pass that got nowhere doubles the pause.
func loop(ctx context.Context, interval time.Duration, pass func(ctx context.Context) (ok bool)) {
	wait := rand.N(interval)                                                     //nolint:gosec // jitter is no secret
	for next := interval; sqldb.Pause(ctx, wait); wait = next/2 + rand.N(next) { //nolint:gosec // as above
		if pass(ctx) {
			next = interval
		} else {
			next = max(interval, min(2*next, maxBackoff))
		}
	}
}

// plugin makes run a part of router: it starts with the handlers, and Router.Close
// waits for it. It is a handler that gets no messages, since handlers are all that
// a Router waits for. A Router that has other handlers stops when they have
// stopped; so that this one does not keep it alive, it ends after the last of them.
func plugin(router *message.Router, name string, run func(ctx context.Context)) error {
	others := &otherHandlers{stopped: make(chan struct{}, 1)}
	router.AddPublisherDecorators(others.decorate)
	registered := router.Handlers()
	unique := name
	for i := 2; ; i++ {
		if _, taken := registered[unique]; !taken {
			break
		}
		unique = fmt.Sprintf("%s %d", name, i)
	}
	sub := loopSubscriber{run: func(ctx context.Context) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			others.wait(ctx, router.Running())
			cancel()
		}()
		run(ctx)
		cancel()
		<-done
	}}
	router.AddHandler(unique, name, sub, "", loopPublisher{}, message.PassthroughHandler)
	return nil
}

// loopSubscriber is a subscriber without messages whose subscription is run.
type loopSubscriber struct {
	run func(ctx context.Context)
}

func (s loopSubscriber) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	messages := make(chan *message.Message)
	go func() {
		defer close(messages)
		s.run(ctx)
	}()
	return messages, nil
}

// Close does nothing: the Router ends the context of the subscription and waits
// for its channel to be closed.
func (loopSubscriber) Close() error { return nil }

// loopPublisher marks the handlers of plugins.
type loopPublisher struct{}

func (loopPublisher) Publish(string, ...*message.Message) error {
	return message.ErrOutputInNoPublisherHandler
}

func (loopPublisher) Close() error { return nil }

// otherHandlers counts the handlers that are not of a plugin. A Router closes the
// publisher of each handler when its subscription has ended, and waits for that.
type otherHandlers struct {
	running atomic.Int64
	stopped chan struct{}
}

func (o *otherHandlers) decorate(pub message.Publisher) (message.Publisher, error) {
	if _, ok := pub.(loopPublisher); ok {
		return pub, nil
	}
	o.running.Add(1)
	return countedPublisher{pub, o}, nil
}

// wait waits until all handlers have stopped or ctx ends. running is closed when
// those that were there from the beginning have been started.
func (o *otherHandlers) wait(ctx context.Context, running <-chan struct{}) {
	for {
		select {
		case <-o.stopped:
		case <-ctx.Done():
			return
		}
		select {
		case <-running:
		case <-ctx.Done():
			return
		}
		if o.running.Load() == 0 {
			return
		}
	}
}

type countedPublisher struct {
	message.Publisher // nil for a handler that must not return messages
	others            *otherHandlers
}

func (p countedPublisher) Publish(topic string, messages ...*message.Message) error {
	if p.Publisher == nil {
		return message.ErrOutputInNoPublisherHandler
	}
	return p.Publisher.Publish(topic, messages...)
}

func (p countedPublisher) Close() error {
	if p.others.running.Add(-1) == 0 {
		select {
		case p.others.stopped <- struct{}{}:
		default: // it is said already
		}
	}
	if p.Publisher == nil {
		return nil
	}
	return p.Publisher.Close()
}
