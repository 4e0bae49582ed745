package property_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// FuzzKeys: on every database, two keys are one claim if and only if their bytes
// are equal, and so are two consumers.
func FuzzKeys(f *testing.F) {
	long := strings.Repeat("k", 255)
	for _, pair := range [][2]string{
		{"a", "a"}, {"order-a", "Order-A"}, {"cafe", "café"}, {"café", "cafe\u0301"}, {"a", "a "}, {"a", " a"},
		{"a", "a\x00"}, {"\x00", "\x00\x00"}, {"\xff", "\xfe"}, {"\xff", "\ufffd"}, {"ß", "ss"}, {"İ", "i"},
		{long, long + "k"}, {long + "1", long + "2"}, {"1", "01"}, {"'", `"`}, {"😀", "😁"}, {"", "a"},
		{"sha256:", "sha256"}, {"null", "NULL"}, {"a\n", "a"}, {"a\u200b", "a"}, {"%", "_"}, {"\\", "\\\\"},
	} {
		f.Add(pair[0], pair[1])
	}
	stores := map[string]deduplicator.Store{}
	for _, d := range testdb.Servers {
		db := testdb.Open(f, d)
		if err := deduplicator.Migrate(f.Context(), db, d.Dialect); err != nil {
			f.Fatal(err)
		}
		store, err := deduplicator.NewSQLStore(f.Context(), db, d.Dialect, deduplicator.WithKnownKeys(0))
		if err != nil {
			f.Fatal(err)
		}
		stores[d.Name] = store
	}
	var runs atomic.Int64
	f.Fuzz(func(t *testing.T, a, b string) {
		scope := fmt.Sprintf("fuzz-%d-", runs.Add(1)) // keeps runs apart
		for name, store := range stores {
			claims := func(what string, first, second deduplicator.Claim) {
				for i, claim := range []deduplicator.Claim{first, second} {
					result, err := store.Process(t.Context(), claim, func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
					if claim.Key == "" {
						if !errors.Is(err, deduplicator.ErrInvalidClaim) {
							t.Errorf("%s: empty %s: error %v", name, what, err)
						}
						continue
					}
					want := deduplicator.Processed
					if i == 1 && a == b {
						want = deduplicator.Duplicate
					}
					if err != nil || result.Outcome != want {
						t.Errorf("%s: %s %q after %q: outcome %d, error %v; want %d", name, what, b, a, result.Outcome, err, want)
					}
				}
			}
			claims("key", deduplicator.Claim{Consumer: scope, Key: a}, deduplicator.Claim{Consumer: scope, Key: b})
			claims("consumer", deduplicator.Claim{Consumer: a + scope, Key: scope}, deduplicator.Claim{Consumer: b + scope, Key: scope})
		}
	})
}
