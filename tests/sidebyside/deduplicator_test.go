package sidebyside_test

import (
	"context"
	"fmt"
	"hash/adler32"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// M1: the handler fails once, the broker delivers again.
func TestM1TransientErrorLosesTheMessageB03(t *testing.T) {
	t.Parallel()
	scenario := func(s side) (calls, effects int) {
		var n atomic.Int32
		send := s.serve(func(msg *message.Message) error {
			if n.Add(1) == 1 {
				return errTransient
			}
			return s.write(msg)
		})
		await(s.T, send(event("1", "{}")), "acked")
		return int(n.Load()), s.effects()
	}

	calls, effects := scenario(stock(setup(t, testdb.PGX)))
	require.Equal(t, 1, calls, "stock: the redelivery was dropped as a duplicate of the attempt that failed")
	require.Zero(t, effects, "stock")

	calls, effects = scenario(ours(setup(t, testdb.PGX)))
	require.Equal(t, 2, calls)
	require.Equal(t, 1, effects)
}

// M2: a copy arrives at another worker while the first is being handled, which
// then fails.
func TestM2CopyDuringAnAttemptThatFails(t *testing.T) {
	t.Parallel()
	type result struct{ calls, effects int }
	scenario := func(s side, whileRunning func(pid int, copyAcked <-chan struct{})) result {
		var n atomic.Int32
		running, fail := make(chan int), make(chan struct{})
		handler := func(msg *message.Message) error {
			if n.Add(1) > 1 {
				return s.write(msg)
			}
			running <- backend(msg.Context())
			<-fail
			return errTransient
		}
		first := s.serve(handler)(event("1", "{}"))
		pid := await(s.T, running, "the first copy is being handled")
		second := s.serve(handler)(event("1", "{}"))
		whileRunning(pid, second)
		close(fail)
		await(s.T, first, "first copy acked")
		await(s.T, second, "second copy acked")
		return result{int(n.Load()), s.effects()}
	}

	got := scenario(stock(setup(t, testdb.PGX)), func(_ int, copyAcked <-chan struct{}) {
		await(t, copyAcked, "stock: the copy is acked before the outcome of the first is known")
	})
	require.Equal(t, result{calls: 1, effects: 0}, got, "stock: both copies are acked, nothing was done")

	f := setup(t, testdb.PGX)
	got = scenario(ours(f), func(pid int, copyAcked <-chan struct{}) {
		f.eventually("the copy waits for the first one's transaction", func() bool { return f.blockedBy(pid) })
		select {
		case <-copyAcked:
			require.Fail(t, "acked before the outcome of the first is known")
		default:
		}
	})
	require.Equal(t, result{calls: 2, effects: 1}, got)
}

// backend is the server process of the transaction in ctx, 0 without one.
func backend(ctx context.Context) int {
	tx, ok := middleware.Tx(ctx)
	if !ok {
		return 0
	}
	var pid int
	if err := tx.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		return -1
	}
	return pid
}

func (f *fixture) blockedBy(pid int) bool {
	return f.count("SELECT COUNT(*) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", pid) > 0
}

// M3: two events that happen to have equal payloads.
func TestM3EqualPayloadsAreTwoEvents(t *testing.T) {
	t.Parallel()
	scenario := func(s side) int {
		send := s.serve(s.write)
		for _, id := range []string{"1", "2"} {
			await(s.T, send(event(id, `{"sku":"A","qty":1}`)), "acked")
		}
		return s.effects()
	}
	require.Equal(t, 1, scenario(stock(setup(t, testdb.PGX))), "stock: the key is a checksum of the payload")
	require.Equal(t, 2, scenario(ours(setup(t, testdb.PGX))))
}

// M4: two events with other content and the same Adler-32.
func TestM4ChecksumCollisionB03(t *testing.T) {
	t.Parallel()
	first, second, tried := collision()
	t.Logf("collision after %d payloads: %s and %s", tried, first, second)
	require.NotEqual(t, first, second)
	require.Equal(t, adler32.Checksum([]byte(first)), adler32.Checksum([]byte(second)))
	require.Less(t, tried, 10_000)

	scenario := func(s side) int {
		send := s.serve(s.write)
		await(s.T, send(event("1", first)), "acked")
		await(s.T, send(event("2", second)), "acked")
		return s.effects()
	}
	require.Equal(t, 1, scenario(stock(setup(t, testdb.PGX))), "stock: the second event is lost")
	require.Equal(t, 2, scenario(ours(setup(t, testdb.PGX))))
}

// collision returns two orders with one checksum and how many were tried.
func collision() (first, second string, tried int) {
	seen := map[uint32]string{}
	for order := 1; ; order++ {
		payload := fmt.Sprintf(`{"order_id":%d,"amount":%d}`, order, order*37%1000)
		sum := adler32.Checksum([]byte(payload))
		if other, ok := seen[sum]; ok {
			return other, payload, order
		}
		seen[sum] = payload
	}
}

// The message was handled, the publish of what the handler returned failed.
func TestFailedPublishOfReturnedMessages(t *testing.T) {
	t.Parallel()
	scenario := func(s side) (string, int) {
		pub := &publisher{refuse: 1}
		var made atomic.Int32
		send := s.serveWith(func(router *message.Router, broker message.Subscriber) {
			router.AddHandler("stock", topic, broker, "reserved", pub, func(msg *message.Message) ([]*message.Message, error) {
				if err := s.write(msg); err != nil {
					return nil, err
				}
				return []*message.Message{message.NewMessage(fmt.Sprint("reserved-", made.Add(1)), nil)}, nil
			})
		})
		await(s.T, send(event("1", "{}")), "acked")
		return pub.sent(), s.effects()
	}

	sent, effects := scenario(stock(setup(t, testdb.PGX)))
	require.Equal(t, 1, effects, "stock")
	require.Empty(t, sent, "stock: the effect is there, its message is lost")

	f := setup(t, testdb.PGX)
	sent, effects = scenario(ours(f))
	require.Equal(t, 1, effects)
	require.Equal(t, "reserved-1", sent, "the message of the run that was committed")
	f.eventually("outputs are forgotten", func() bool { return f.count("SELECT COUNT(*) FROM produced_messages") == 0 })
}

// Stock also deduplicates in a publisher, before it publishes.
func TestPublisherDecoratorLosesTheMessage(t *testing.T) {
	t.Parallel()
	under := &publisher{refuse: 1}
	decorated, err := (&watermillmw.Deduplicator{Timeout: time.Second}).PublisherDecorator()(under)
	require.NoError(t, err)
	msg := event("1", "{}")
	require.ErrorIs(t, decorated.Publish(topic, msg), errTransient)
	require.NoError(t, decorated.Publish(topic, msg), "stock: the second try reports success")
	require.Empty(t, under.sent(), "stock: nothing was published")

	// Ours has no such decorator: publish again, the consumer tells the copies.
	f := setup(t, testdb.PGX)
	s := ours(f)
	send := s.serve(s.write)
	for range 2 {
		await(t, send(event("1", "{}")), "acked")
	}
	require.Equal(t, 1, f.effects())
}

// Two handlers that both need every message of a topic.
func TestTwoHandlersOfOneTopic(t *testing.T) {
	t.Parallel()
	scenario := func(s side) int {
		send := s.serveWith(func(router *message.Router, broker message.Subscriber) {
			router.AddConsumerHandler("stock", topic, broker, s.write)
			router.AddConsumerHandler("invoice", topic, broker, s.write)
		})
		await(s.T, send(event("1", "{}")), "acked by both")
		return s.effects()
	}
	require.Equal(t, 1, scenario(stock(setup(t, testdb.PGX))), "stock: the handlers share their keys, so one of them never sees the message")
	require.Equal(t, 2, scenario(ours(setup(t, testdb.PGX))))
}

// Messages without an id, such as foreign ones.
func TestMessagesWithoutAKey(t *testing.T) {
	t.Parallel()
	scenario := func(s side) int {
		send := s.serve(s.write)
		for _, payload := range []string{"a", "b"} {
			await(s.T, send(event("", payload)), "acked")
		}
		return s.effects()
	}
	theirs := stock(setup(t, testdb.PGX))
	theirs.middlewares = []message.HandlerMiddleware{(&watermillmw.Deduplicator{
		KeyFactory: watermillmw.NewMessageHasherFromMetadataField("event_id"), Timeout: time.Second,
	}).Middleware}
	require.Equal(t, 1, scenario(theirs), `stock: "" is a key like any other, so the second message is lost`)

	poison := &publisher{}
	require.Zero(t, scenario(ours(setup(t, testdb.PGX), middleware.WithPoisonQueue(poison, "poison"))))
	require.Len(t, poison.messages, 2, "both are parked")
}
