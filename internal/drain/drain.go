// Package drain lets running handlers finish before a subscriber is closed.
//
// A Router that is closed cancels the context that it subscribed with, and
// brokers' subscribers derive the contexts of their messages from it. So a
// graceful close would cut the transaction of every running handler, and some
// brokers would hand the message to a successor at once. [Subscriber] stands
// between the two.
package drain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Subscriber is a message.Subscriber that stops in order. When the context of
// a subscription ends or Close is called, it
//
//  1. hands out no more messages,
//  2. waits until every message that it handed out is acked or nacked, for
//     the timeout at most,
//  3. ends the context of the inner subscription (and with it those of
//     messages that still run), nacks what the inner one still emits, and
//  4. closes the output channel when the inner one has closed its own.
//
// It hands out the inner subscriber's messages themselves, not copies. The
// inner subscriber must close its channel when its context ends, and must end
// the context of a message once it has taken the message's ack, as Watermill's
// subscribers do: an ack that is still on its way to the broker would be lost
// in step 3.
//
// A Subscriber is safe for concurrent use.
type Subscriber struct {
	inner     message.Subscriber
	timeout   time.Duration
	errClosed error

	mu      sync.Mutex // guards closed, and subscriptions.Add against its Wait
	closed  bool
	closing chan struct{}

	subscriptions sync.WaitGroup
	cut           atomic.Int64 // messages that were still running at the deadline
	closeOnce     func() error
}

// New returns inner with an orderly stop that takes up to timeout. A timeout of
// zero waits for no handler. Subscribe returns errClosed after Close.
func New(inner message.Subscriber, timeout time.Duration, errClosed error) *Subscriber {
	s := &Subscriber{inner: inner, timeout: timeout, errClosed: errClosed, closing: make(chan struct{})}
	s.closeOnce = sync.OnceValue(s.close)
	return s
}

// String is the inner subscriber's String or type: the name that a Router takes for
// its context, logs and metrics, and so for a poison queue.
func (s *Subscriber) String() string {
	if named, ok := s.inner.(fmt.Stringer); ok {
		return named.String()
	}
	return strings.TrimLeft(fmt.Sprintf("%T", s.inner), "*")
}

// Subscribe subscribes to topic with a context that outlives ctx until running
// handlers are done, and that keeps ctx's values.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, s.errClosed
	}
	s.subscriptions.Add(1)
	s.mu.Unlock()

	innerCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	in, err := s.inner.Subscribe(innerCtx, topic)
	if err != nil {
		cancel()
		s.subscriptions.Done()
		return nil, err
	}
	out := make(chan *message.Message)
	go func() {
		defer s.subscriptions.Done()
		defer close(out)
		running, waiting := s.handOut(ctx, in, out)
		s.cut.Add(int64(await(running, s.timeout)))
		cancel()
		if waiting != nil {
			waiting.Nack()
		}
		for msg := range in {
			msg.Nack()
		}
	}()
	return out, nil
}

// Close stops all subscriptions as described at [Subscriber], all at the same
// time, and then closes the inner subscriber. It returns an error if messages
// were still running at the deadline. Further calls wait for the first one and
// return the same.
func (s *Subscriber) Close() error { return s.closeOnce() }

func (s *Subscriber) close() error {
	s.mu.Lock()
	s.closed = true
	close(s.closing)
	s.mu.Unlock()

	s.subscriptions.Wait()
	var late error
	if n := s.cut.Load(); n > 0 {
		late = fmt.Errorf("drain: %d messages were still running after %s", n, s.timeout)
	}
	return errors.Join(late, s.inner.Close())
}

// handOut passes messages on until the subscription is to stop. It returns the
// ones that still run, and the one that it had taken but not handed out.
func (s *Subscriber) handOut(ctx context.Context, in <-chan *message.Message, out chan<- *message.Message) (running []handed, waiting *message.Message) {
	for {
		// Checked alone first: select picks at random, and must not prefer
		// a message.
		if ctx.Err() != nil || isClosed(s.closing) {
			return running, nil
		}
		var msg *message.Message
		var open bool
		select {
		case <-ctx.Done():
			return running, nil
		case <-s.closing:
			return running, nil
		case msg, open = <-in:
			if !open {
				return running, nil
			}
		}
		// The handler may replace the message's context, so take the channel now.
		h := handed{msg, msg.Context().Done()}
		select {
		case <-ctx.Done():
			return running, msg
		case <-s.closing:
			return running, msg
		case <-h.taken:
			msg.Nack() // the inner subscriber withdrew it
		case out <- msg:
			running = append(slices.DeleteFunc(running, handed.settled), h)
		}
	}
}

// handed is a message that a handler has.
type handed struct {
	msg   *message.Message
	taken <-chan struct{} // ends when the inner subscriber has taken the ack
}

func (h handed) settled() bool {
	select {
	case <-h.msg.Nacked():
		return true
	case <-h.msg.Acked():
		return h.taken == nil || isClosed(h.taken)
	default:
		return false
	}
}

// await waits until all messages are settled and returns how many were not
// when the timeout passed.
func await(running []handed, timeout time.Duration) (late int) {
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	for i, h := range running {
		select {
		case <-h.msg.Nacked():
			continue
		case <-h.msg.Acked():
		case <-deadline.C:
			return unsettled(running[i:])
		}
		if h.taken == nil {
			continue
		}
		select {
		case <-h.taken:
		case <-deadline.C:
			return unsettled(running[i:])
		}
	}
	return 0
}

func unsettled(running []handed) int {
	return len(slices.DeleteFunc(running, handed.settled))
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
