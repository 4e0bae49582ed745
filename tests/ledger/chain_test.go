package ledger_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// poison is a publisher that keeps what is parked.
type poison struct {
	mu     sync.Mutex // guards what follows
	down   bool
	parked []*message.Message
}

func (p *poison) Publish(_ string, messages ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.down {
		return errors.New("down")
	}
	p.parked = append(p.parked, messages...)
	return nil
}

func (p *poison) Close() error { return nil }

// chained returns a handler behind a chain with retries and a poison queue. Links come
// after Deduplicate.
func (k *kit) chained(queue *poison, handler message.HandlerFunc, links ...middleware.Link) message.HandlerFunc {
	k.t.Helper()
	chain, err := middleware.Chain(append([]middleware.Link{
		middleware.WithPoisonQueue(queue, "poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, MaxInterval: time.Millisecond}),
		middleware.Deduplicate(k.store, middleware.WithKey(deduplicator.FromUUID()), middleware.WithConsumer(consumer)),
	}, links...)...)
	require.NoError(k.t, err)
	for i := len(chain) - 1; i >= 0; i-- {
		handler = chain[i](handler)
	}
	return handler
}

// deliverTo hands a message to a handler as a subscriber does; a copy, since it may
// come again.
func (k *kit) deliverTo(handler message.HandlerFunc, msg *message.Message) error {
	delivered := msg.Copy()
	delivered.SetContext(k.t.Context())
	_, err := handler(delivered)
	return err
}

// Trap 9: a message whose effect is unknown is parked at once, without another call;
// when the poison queue is down too, it stays with the broker. An operator who has
// looked the effect up publishes it twice: it is processed once.
func TestUnknownEffectIsParkedAndReplayed(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		queue := &poison{down: true}
		effect := newEffect(t, "charge", ledger.AskOperator())
		runs := 0
		handler := k.chained(queue, func(msg *message.Message) ([]*message.Message, error) {
			runs++
			_, err := ledger.Do(msg.Context(), k.ledger, effect, 100, k.provider.charge)
			return nil, err
		})
		msg := message.NewMessage("order", nil)
		k.provider.set(func() { k.provider.lose = true })
		require.ErrorIs(t, k.deliverTo(handler, msg), ledger.ErrUnknown)
		require.Equal(t, 1, runs, "no retry could help")
		queue.down = false
		require.NoError(t, k.deliverTo(handler, msg))
		require.Len(t, queue.parked, 1)
		require.Contains(t, queue.parked[0].Metadata["reason_poisoned"], "outcome of the effect is unknown")

		k.operator()
		for range 2 {
			require.NoError(t, k.deliverTo(handler, queue.parked[0]))
		}
		require.Len(t, queue.parked, 1)
		require.Equal(t, 3, runs, "the second copy is a duplicate")
		calls, _, total := k.provider.count()
		require.Equal(t, []int{1, 1}, []int{calls, total})
	})
}

// What may be called again is called again by the retries; what somebody else is at
// goes back to the broker and is not parked.
func TestErrorsInAChain(t *testing.T) {
	t.Parallel()
	k := newKit(t, testdb.SQLite)
	k.provider.keys = true
	queue := &poison{}
	effect := newEffect(t, "charge", ledger.RetryWithKey(24*time.Hour))
	runs := 0
	handler := k.chained(queue, func(msg *message.Message) ([]*message.Message, error) {
		runs++
		k.provider.set(func() { k.provider.lose = runs == 1 })
		_, err := ledger.Do(msg.Context(), k.ledger, effect, 100, k.provider.charge)
		return nil, err
	})
	require.NoError(t, k.deliverTo(handler, message.NewMessage("lost", nil)))
	calls, _, total := k.provider.count()
	require.Equal(t, []int{2, 2, 1}, []int{runs, calls, total})

	other := newEffect(t, "other", ledger.AskOperator())
	busy := k.chained(queue, func(msg *message.Message) ([]*message.Message, error) {
		_, err := ledger.Do(msg.Context(), k.ledger, other, nil, k.provider.charge)
		return nil, err
	})
	_, err := ledger.Do(k.of("busy"), k.ledger, other, nil, func(ctx context.Context, key string) (string, error) {
		require.ErrorIs(t, k.deliverTo(busy, message.NewMessage("busy", nil)), ledger.ErrInProgress)
		return "receipt", nil
	})
	require.NoError(t, err)
	require.Empty(t, queue.parked)
}

// The effects of a parked message that Sequence releases have the keys of that
// message, whichever message releases it, and when its entity's Releaser does.
func TestReleasedMessagesHaveTheirOwnKeys(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		require.NoError(t, ordering.Migrate(t.Context(), k.storeDB, d.Dialect))
		sequence, err := ordering.NewSequence(t.Context(), k.storeDB, d.Dialect)
		require.NoError(t, err)
		effect := newEffect(t, "charge", ledger.AskOperator())
		runs := map[string]int{}
		handle := func(msg *message.Message) ([]*message.Message, error) {
			runs[msg.UUID]++
			_, err := ledger.Do(msg.Context(), k.ledger, effect, msg.UUID, func(ctx context.Context, key string) (string, error) {
				want, err := ledger.KeyFor(k.of(msg.UUID), "charge")
				require.NoError(t, err)
				require.Equal(t, want, key)
				return k.provider.charge(ctx, key)
			})
			if err == nil && runs[msg.UUID] < 3 && msg.UUID != "first" {
				err = errors.New("after its effect")
			}
			return nil, err
		}
		handler := k.chained(&poison{}, handle, middleware.Sequence(sequence, middleware.WithSequence(ordering.VersionFromMetadata("seq"))))
		event := func(id, seq string) *message.Message {
			msg := message.NewMessage(id, nil)
			msg.Metadata = message.Metadata{ordering.PartitionKeyMetadata: "entity", "seq": seq}
			return msg
		}
		require.NoError(t, k.deliverTo(handler, event("second", "2")))
		require.Empty(t, runs)
		require.NoError(t, k.deliverTo(handler, event("first", "1"))) // it fails with the second, which stays parked
		require.Equal(t, map[string]int{"first": 1, "second": 1}, runs)
		releaser, err := middleware.NewReleaser(k.store, sequence, middleware.ReleaserConfig{
			Consumer: consumer, Handler: handle, Key: deduplicator.FromUUID(),
		})
		require.NoError(t, err)
		for runs["second"] < 3 {
			require.NoError(t, releaser.Release(t.Context()))
		}
		calls, most, total := k.provider.count()
		require.Equal(t, []int{2, 1, 2}, []int{calls, most, total}, "a payment each")
	})
}
