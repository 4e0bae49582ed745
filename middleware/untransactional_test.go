package middleware_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// bestEffort is a store without transactions.
type bestEffort struct{ *memoryStore }

func (bestEffort) Untransactional() {}

func TestChainRefusesLinksThatNeedATransaction(t *testing.T) {
	t.Parallel()
	deduplicate := middleware.Deduplicate(bestEffort{newMemoryStore()}, byEventID())
	version := ordering.VersionFromMetadata("version")
	for name, link := range map[string]middleware.Link{
		"RejectReplayed": middleware.RejectReplayed(&ordering.Windows{}),
		"RejectStale":    middleware.RejectStale(&ordering.Versions{}, middleware.WithVersion(version)),
		"Sequence":       middleware.Sequence(&ordering.Sequence{}, middleware.WithSequence(version)),
		"Stamp":          middleware.Stamp(&ordering.Producer{}),
		"Partition":      middleware.Partition(ordering.KeyFromMetadata("id")),
	} {
		_, err := middleware.Chain(deduplicate, link)
		if !errors.Is(err, middleware.ErrInvalidOption) || !errors.Is(err, deduplicator.ErrNoTransaction) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got %v", name, err)
		}
		if _, err := middleware.Chain(link, deduplicate); !errors.Is(err, middleware.ErrInvalidOption) {
			t.Errorf("%s outside: got %v", name, err)
		}
	}
	_, err := middleware.Chain(middleware.WithObserver((&events{}).observe), middleware.WithPoisonQueue(&publisher{}, "poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 1}), deduplicate)
	if err != nil {
		t.Errorf("the outer links: %v", err)
	}
}

// A handler that asks for the transaction is told, and its message, which is not to
// blame, is not parked.
func TestTxWithoutATransaction(t *testing.T) {
	t.Parallel()
	poison := &publisher{}
	chain, err := middleware.Chain(middleware.WithPoisonQueue(poison, "poison"),
		middleware.Deduplicate(bestEffort{newMemoryStore()}, byEventID(), middleware.WithConsumer("stock")))
	if err != nil {
		t.Fatal(err)
	}
	h := message.HandlerFunc(func(msg *message.Message) ([]*message.Message, error) {
		tx, _ := middleware.Tx(msg.Context())
		_, err := tx.ExecContext(msg.Context(), "UPDATE stock SET qty = qty - 1")
		return nil, err
	})
	for _, mw := range slices.Backward(chain) {
		h = mw(h)
	}
	_, err = h(newMessage("a", "1"))
	if !errors.Is(err, deduplicator.ErrNoTransaction) || !strings.Contains(err.Error(), "middleware: Tx: ") || len(poison.sent("poison")) != 0 {
		t.Errorf("error %v, parked %d", err, len(poison.sent("poison")))
	}
}

// Nothing would keep what a handler returns, so one that may return something is
// refused before it does anything.
func TestPublisherWithoutATransaction(t *testing.T) {
	t.Parallel()
	links := func(b *bench) []middleware.Link {
		return []middleware.Link{
			middleware.WithPoisonQueue(b.poison, "poison"),
			middleware.Deduplicate(bestEffort{b.store}, byEventID()),
		}
	}
	handler := func(*message.Message) ([]*message.Message, error) {
		t.Error("the handler was called")
		return nil, nil
	}
	run(t, links, handler, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		seen := b.events.seen()
		if len(seen) == 0 || seen[0].Outcome != middleware.Failed || !errors.Is(seen[0].Err, deduplicator.ErrNoTransaction) ||
			!strings.Contains(seen[0].Err.Error(), `"stock"`) || !strings.Contains(seen[0].Err.Error(), `"reserved"`) {
			t.Errorf("events %+v", seen)
		}
		if len(b.store.saw()) != 0 || len(b.poison.sent("poison")) != 0 {
			t.Errorf("claims %v, parked %d", b.store.saw(), len(b.poison.sent("poison")))
		}
	})
}
