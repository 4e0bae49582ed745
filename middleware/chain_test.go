package middleware_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// counting is a store with WithMaxAttempts.
type counting struct {
	*memoryStore
	maximum int
}

func (c counting) MaxAttempts() (int, bool) { return c.maximum, true }

func TestChainRefuses(t *testing.T) {
	t.Parallel()
	store, pub := newMemoryStore(), &publisher{}
	version := middleware.WithVersion(ordering.VersionFromMetadata("version"))
	var (
		observer    = middleware.WithObserver((&events{}).observe)
		poison      = middleware.WithPoisonQueue(pub, "poison")
		retry       = middleware.WithRetry(middleware.Retry{MaxRetries: 1})
		deduplicate = middleware.Deduplicate(store, byEventID())
		stale       = middleware.RejectStale(&ordering.Versions{}, version)
		partition   = middleware.Partition(ordering.KeyFromMetadata("id"))
		replayed    = middleware.RejectReplayed(&ordering.Windows{})
		stamp       = middleware.Stamp(&ordering.Producer{})
	)
	counted := func(maximum int, links ...middleware.Link) []middleware.Link {
		at := len(links)
		if at > 0 {
			at = 1 // after the retry
		}
		return slices.Insert(links, at, middleware.Deduplicate(counting{store, maximum}, byEventID()))
	}
	fiveRetries := middleware.WithRetry(middleware.Retry{MaxRetries: 5})
	sequence := middleware.Sequence(&ordering.Sequence{}, middleware.WithSequence(ordering.VersionFromMetadata("seq")))
	for name, tt := range map[string]struct {
		links []middleware.Link
		want  []string // parts of the error; none means accepted
	}{
		"all in order":        {links: []middleware.Link{observer, poison, retry, deduplicate, replayed, stale, stamp, partition}},
		"some":                {links: []middleware.Link{retry, deduplicate}},
		"partition alone":     {links: []middleware.Link{partition}},
		"nothing":             {want: []string{"no links"}},
		"zero link":           {links: []middleware.Link{{}}, want: []string{"link 0"}},
		"B56 poison in retry": {links: []middleware.Link{retry, poison}, want: []string{"WithPoisonQueue must come before WithRetry", "nothing to retry"}},
		"B06 B92 retry in tx": {links: []middleware.Link{deduplicate, retry}, want: []string{"WithRetry must come before Deduplicate", "commit a failed attempt"}},
		"B06 poison in tx":    {links: []middleware.Link{deduplicate, poison}, want: []string{"WithPoisonQueue must come before Deduplicate"}},
		"stale outside":       {links: []middleware.Link{stale, deduplicate}, want: []string{"Deduplicate must come before RejectStale"}},
		"stale alone":         {links: []middleware.Link{stale}, want: []string{"RejectStale without Deduplicate"}},
		"replayed alone":      {links: []middleware.Link{replayed}, want: []string{"RejectReplayed without Deduplicate", "in the transaction"}},
		"replayed inside":     {links: []middleware.Link{deduplicate, stale, replayed}, want: []string{"RejectReplayed must come before RejectStale"}},
		"stamp inside":        {links: []middleware.Link{deduplicate, partition, stamp}, want: []string{"Stamp must come before Partition", "partition key"}},
		"no windows":          {links: []middleware.Link{deduplicate, middleware.RejectReplayed(nil), middleware.Stamp(nil)}, want: []string{"windows is nil", "producer is nil"}},
		"twice":               {links: []middleware.Link{retry, retry}, want: []string{"WithRetry is there twice"}},
		"no store, no key":    {links: []middleware.Link{middleware.Deduplicate(nil)}, want: []string{"store is nil", "WithKey"}},
		"nil pointers":        {links: []middleware.Link{middleware.WithPoisonQueue((*publisher)(nil), "poison"), middleware.Deduplicate((*deduplicator.SQLStore)(nil), byEventID())}, want: []string{"publisher is nil", "store is nil"}},
		"empty consumer":      {links: []middleware.Link{middleware.Deduplicate(store, byEventID(), middleware.WithConsumer(""))}, want: []string{"WithConsumer"}},
		"no topic":            {links: []middleware.Link{middleware.WithPoisonQueue(nil, "")}, want: []string{"publisher is nil", "topic is empty"}},
		"no retries":          {links: []middleware.Link{middleware.WithRetry(middleware.Retry{})}, want: []string{"MaxRetries: 0", "1"}},
		"negative retries":    {links: []middleware.Link{middleware.WithRetry(middleware.Retry{MaxRetries: -1, InitialInterval: -1})}, want: []string{"MaxRetries: -1", "InitialInterval: -1ns"}},
		"intervals":           {links: []middleware.Link{middleware.WithRetry(middleware.Retry{MaxRetries: 1, InitialInterval: 2, MaxInterval: 1})}, want: []string{"MaxInterval: 1ns"}},
		"no versions":         {links: []middleware.Link{deduplicate, middleware.RejectStale(nil)}, want: []string{"versions is nil", "WithVersion"}},
		"no entity":           {links: []middleware.Link{deduplicate, middleware.RejectStale(&ordering.Versions{}, version, middleware.WithEntity(nil))}, want: []string{"WithEntity"}},
		"no key function":     {links: []middleware.Link{middleware.Partition(nil)}, want: []string{"Partition", "nil"}},
		"no observer":         {links: []middleware.Link{middleware.WithObserver()}, want: []string{"WithObserver"}},
		"attempts":            {links: counted(6, fiveRetries), want: []string{"WithMaxAttempts, 6,", "delivery, 6 ", "set 7 or more"}},
		"enough attempts":     {links: counted(7, fiveRetries)},
		"attempts, sequence":  {links: counted(7, fiveRetries, sequence), want: []string{"WithMaxAttempts, 7,", "delivery, 7 ", "set 8 or more"}},
		"enough, sequence":    {links: counted(8, fiveRetries, sequence)},
		"one attempt":         {links: counted(1)},
		"nil observer":        {links: []middleware.Link{middleware.WithObserver(nil)}, want: []string{"observer is nil"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chain, err := middleware.Chain(tt.links...)
			if len(tt.want) == 0 {
				if err != nil || len(chain) < len(tt.links) {
					t.Fatalf("got %d middlewares, %v", len(chain), err)
				}
				return
			}
			if !errors.Is(err, middleware.ErrInvalidOption) {
				t.Fatalf("got %v", err)
			}
			for _, part := range tt.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q is not in %q", part, err)
				}
			}
		})
	}
}
