package drain_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/seed-2f56a981/watermill-idempotent/internal/drain"
)

const timeout = 30 * time.Second

var errClosed = errors.New("closed")

// broker is an inner subscriber that behaves like watermill-kafka's: it derives
// message contexts from the subscription's, needs time between the ack and the
// moment that it is safe, resends after a nack, and gives up when its context
// ends.
type broker struct {
	messages []*message.Message
	safe     atomic.Int64 // acks that were taken
	nacks    atomic.Int64
	closed   atomic.Bool
	err      error
}

func newBroker(n int) *broker {
	b := &broker{}
	for i := range n {
		b.messages = append(b.messages, message.NewMessage(strconv.Itoa(i), nil))
	}
	return b
}

func (b *broker) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	if b.err != nil {
		return nil, b.err
	}
	out := make(chan *message.Message)
	var partitions sync.WaitGroup
	for _, msg := range b.messages {
		partitions.Go(func() { b.deliver(ctx, msg, out) })
	}
	go func() {
		<-ctx.Done()
		partitions.Wait()
		close(out)
	}()
	return out, nil
}

func (b *broker) deliver(ctx context.Context, msg *message.Message, out chan<- *message.Message) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		msg.SetContext(ctx)
		select {
		case out <- msg:
		case <-ctx.Done():
			return
		}
		select {
		case <-msg.Acked():
			select {
			case <-time.After(10 * time.Millisecond):
				b.safe.Add(1)
			case <-ctx.Done(): // the ack is lost
			}
			return
		case <-msg.Nacked():
			b.nacks.Add(1)
			msg = msg.Copy()
		case <-ctx.Done():
			return
		}
	}
}

func (b *broker) Close() error {
	b.closed.Store(true)
	return nil
}

// stops are the two ways in which a Router ends a subscription.
var stops = map[string]func(*drain.Subscriber, context.CancelFunc){
	"context": func(_ *drain.Subscriber, cancel context.CancelFunc) { cancel() },
	"close":   func(s *drain.Subscriber, _ context.CancelFunc) { go func() { _ = s.Close() }() },
}

// A handler that runs when the stop begins keeps its context until its ack is
// safe with the broker; nothing else is handed out.
func TestStopWaitsForRunningHandlers(t *testing.T) {
	t.Parallel()
	for name, stop := range stops {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				inner := newBroker(3)
				sub := drain.New(inner, timeout, errClosed)
				out := subscribe(ctx, t, sub)
				first, second := <-out, <-out // the third waits inside
				synctest.Wait()

				stop(sub, cancel)
				time.Sleep(timeout - time.Second)
				if err := first.Context().Err(); err != nil {
					t.Fatalf("context of a running handler: %v", err)
				}
				first.Ack()
				second.Ack()
				if msg, open := <-out; open {
					t.Fatalf("message %s was handed out during the drain", msg.UUID)
				}
				if got := inner.safe.Load(); got != 2 {
					t.Errorf("%d acks reached the broker, want 2", got)
				}
				if err := sub.Close(); err != nil || !inner.closed.Load() {
					t.Errorf("Close = %v, inner closed: %t", err, inner.closed.Load())
				}
			})
		})
	}
}

func TestDeadlineEndsContexts(t *testing.T) {
	t.Parallel()
	for name, stop := range stops {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				sub := drain.New(newBroker(2), timeout, errClosed)
				out := subscribe(ctx, t, sub)
				stuck, done := <-out, <-out
				done.Ack()
				begin := time.Now()
				stop(sub, cancel)
				<-stuck.Context().Done()
				if took := time.Since(begin); took != timeout {
					t.Errorf("context ended after %s, want %s", took, timeout)
				}
				if _, open := <-out; open {
					t.Error("message handed out after the deadline")
				}
				if err := sub.Close(); err == nil || !strings.Contains(err.Error(), "1 messages") {
					t.Errorf("Close = %v, want an error that counts 1 message", err)
				}
			})
		})
	}
}

func TestStopWithNothingRunning(t *testing.T) {
	t.Parallel()
	for name, stop := range stops {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				sub := drain.New(newBroker(2), timeout, errClosed)
				out := subscribe(ctx, t, sub)
				synctest.Wait() // one message is taken, nobody reads it
				begin := time.Now()
				stop(sub, cancel)
				synctest.Wait()
				if _, open := <-out; open {
					t.Error("message handed out after the stop")
				}
				if err := sub.Close(); err != nil || time.Since(begin) != 0 {
					t.Errorf("Close = %v after %s", err, time.Since(begin))
				}
			})
		})
	}
}

func TestNackedIsSettled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		inner := newBroker(1)
		sub := drain.New(inner, timeout, errClosed)
		out := subscribe(t.Context(), t, sub)
		msg := <-out
		msg.Nack()
		again := <-out
		begin := time.Now()
		again.Nack()
		if err := sub.Close(); err != nil || time.Since(begin) != 0 {
			t.Errorf("Close = %v after %s", err, time.Since(begin))
		}
		if inner.safe.Load() != 0 {
			t.Error("a nacked message was acked")
		}
	})
}

// The inner subscriber may withdraw a message that nobody took yet, such as
// when a partition is revoked.
func TestWithdrawnMessageIsNotHandedOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		in := make(chan *message.Message)
		sub := drain.New(channel(in), timeout, errClosed)
		out := subscribe(t.Context(), t, sub)
		ctx, withdraw := context.WithCancel(t.Context())
		msg := message.NewMessageWithContext(ctx, "withdrawn", nil)
		in <- msg
		withdraw()
		<-msg.Nacked()
		next := message.NewMessage("next", nil)
		in <- next
		if got := <-out; got != next {
			t.Errorf("got message %q", got.UUID)
		}
		next.Ack()
		close(in)
		if _, open := <-out; open {
			t.Error("output open after the inner subscriber ended")
		}
	})
}

// What the inner subscriber emits after the stop goes back to it, or it could
// never end.
func TestLateMessagesAreNacked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		in := make(chan *message.Message)
		sub := drain.New(channel(in), timeout, errClosed)
		ctx, cancel := context.WithCancel(t.Context())
		out := subscribe(ctx, t, sub)
		taken, late := message.NewMessage("taken", nil), message.NewMessage("late", nil)
		in <- taken
		cancel()
		<-taken.Nacked()
		in <- late
		<-late.Nacked()
		close(in)
		if _, open := <-out; open {
			t.Error("message handed out after the stop")
		}
	})
}

func TestSubscribeErrors(t *testing.T) {
	t.Parallel()
	inner := newBroker(0)
	inner.err = errors.New("no such topic")
	sub := drain.New(inner, timeout, errClosed)
	if _, err := sub.Subscribe(t.Context(), "topic"); !errors.Is(err, inner.err) {
		t.Errorf("Subscribe = %v, want the inner error", err)
	}
	if err := sub.Close(); err != nil {
		t.Errorf("Close = %v", err)
	}
	if _, err := sub.Subscribe(t.Context(), "topic"); !errors.Is(err, errClosed) {
		t.Errorf("Subscribe after Close = %v, want errClosed", err)
	}
}

// A Router on a real Pub/Sub: what a handler began before the close, it ends.
func TestRouterClose(t *testing.T) {
	t.Parallel()
	logger := watermill.NopLogger{}
	pubSub := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100}, logger)
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		t.Fatal(err)
	}
	var cut, handled atomic.Int64
	started := make(chan struct{}, 100)
	release := make(chan struct{})
	router.AddConsumerHandler("handler", "topic", drain.New(pubSub, timeout, errClosed), func(msg *message.Message) error {
		started <- struct{}{}
		select {
		case <-release:
			handled.Add(1)
			return nil
		case <-msg.Context().Done():
			cut.Add(1)
			return msg.Context().Err()
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	<-router.Running()
	for i := range 10 {
		if err := pubSub.Publish("topic", message.NewMessage(strconv.Itoa(i), nil)); err != nil {
			t.Fatal(err)
		}
		<-started
	}
	cancel()
	close(release)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if cut.Load() != 0 || handled.Load() != 10 {
		t.Errorf("%d handlers finished and %d were cut, want 10 and 0", handled.Load(), cut.Load())
	}
}

func subscribe(ctx context.Context, t *testing.T, sub *drain.Subscriber) <-chan *message.Message {
	t.Helper()
	out, err := sub.Subscribe(ctx, "topic")
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// channel is an inner subscriber that emits what the test sends and ignores
// its context.
type channel chan *message.Message

func (c channel) Subscribe(context.Context, string) (<-chan *message.Message, error) { return c, nil }

func (c channel) Close() error { return nil }
