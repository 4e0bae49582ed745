package middleware_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

func TestChainWithSequence(t *testing.T) {
	t.Parallel()
	number := ordering.VersionFromMetadata("seq")
	var (
		poison      = middleware.WithPoisonQueue(&publisher{}, "poison")
		retry       = middleware.WithRetry(middleware.Retry{MaxRetries: 1})
		deduplicate = middleware.Deduplicate(newMemoryStore(), byEventID())
		stale       = middleware.RejectStale(&ordering.Versions{}, middleware.WithVersion(number))
		entity      = middleware.WithEntity(ordering.KeyFromMetadata("order_id"))
		sequence    = middleware.Sequence(&ordering.Sequence{}, entity, middleware.WithSequence(number), middleware.WithEpoch(number))
		partition   = middleware.Partition(ordering.KeyFromMetadata("id"))
	)
	for name, tt := range map[string]struct {
		links []middleware.Link
		want  []string // parts of the error; none means accepted
	}{
		"all in order":      {links: []middleware.Link{poison, retry, deduplicate, sequence, partition}},
		"some":              {links: []middleware.Link{deduplicate, sequence}},
		"with stale":        {links: []middleware.Link{deduplicate, stale, sequence}, want: []string{"RejectStale and Sequence exclude each other"}},
		"before stale":      {links: []middleware.Link{deduplicate, sequence, stale}, want: []string{"Sequence and RejectStale exclude each other"}},
		"twice":             {links: []middleware.Link{deduplicate, sequence, sequence}, want: []string{"Sequence is there twice"}},
		"outside":           {links: []middleware.Link{sequence, deduplicate}, want: []string{"Deduplicate must come before Sequence"}},
		"alone":             {links: []middleware.Link{sequence}, want: []string{"Sequence without Deduplicate"}},
		"nothing":           {links: []middleware.Link{deduplicate, middleware.Sequence(nil)}, want: []string{"sequence is nil", "WithSequence"}},
		"no entity":         {links: []middleware.Link{deduplicate, middleware.Sequence(nil, middleware.WithEntity(nil))}, want: []string{"WithEntity"}},
		"inside partition":  {links: []middleware.Link{deduplicate, partition, sequence}, want: []string{"Sequence must come before Partition"}},
		"retry in sequence": {links: []middleware.Link{deduplicate, sequence, retry}, want: []string{"WithRetry must come before"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := middleware.Chain(tt.links...)
			if len(tt.want) == 0 {
				if err != nil {
					t.Fatal(err)
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
