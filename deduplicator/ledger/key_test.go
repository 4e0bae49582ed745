package ledger_test

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
)

func claimed(ctx context.Context, consumer, key string) context.Context {
	return deduplicator.ContextWithClaim(ctx, deduplicator.Claim{Consumer: consumer, Key: key})
}

// The exact value is part of the contract: another one after an update of this
// module would charge everybody again whose message is redelivered then.
func TestKeyForIsStable(t *testing.T) {
	t.Parallel()
	ctx := claimed(t.Context(), "billing", "order-1")
	got, err := ledger.KeyFor(ctx, "charge")
	if err != nil {
		t.Fatal(err)
	}
	if want := "f9d66ba3-af6f-8a63-af72-cfc4d3cd0cbd"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	got, err = ledger.KeyFor(ctx, "charge", ledger.WithEpoch(7))
	if err != nil {
		t.Fatal(err)
	}
	if want := "0698a015-c5c4-8df1-9680-124fb9ec0118"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// B103: the key depends on whose effect it is and on nothing else: not on time, not
// on chance, not on what else the message says, and parts don't run into each other.
func TestKeyForB103(t *testing.T) {
	t.Parallel()
	form := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	seen := make(map[string]string)
	long := strings.Repeat("k", 5000)
	for _, consumer := range []string{"a", "ab", "a\x00", "A"} {
		for _, key := range []string{"b", "bc", "bc\x00d", "\xff", long} {
			for _, name := range []string{"c", "cd", "ü"} {
				for _, epoch := range []int{0, 1} {
					id := strings.Join([]string{consumer, key, name, string(rune('0' + epoch))}, "|")
					ctx := claimed(t.Context(), consumer, key)
					got, err := ledger.KeyFor(ctx, name, ledger.WithEpoch(epoch))
					if err != nil {
						t.Fatal(err)
					}
					again, err := ledger.KeyFor(claimed(t.Context(), consumer, key), name, ledger.WithEpoch(epoch))
					if err != nil || again != got {
						t.Errorf("%s: %q, then %q, %v", id, got, again, err)
					}
					if !form.MatchString(got) {
						t.Errorf("%s: %q is not a UUID of version 8", id, got)
					}
					if other, ok := seen[got]; ok {
						t.Errorf("%s and %s share the key %s", id, other, got)
					}
					seen[got] = id
				}
			}
		}
	}
}

// B41: a name of 1 kB is refused at once, and for good.
func TestKeyForRefusesB41(t *testing.T) {
	t.Parallel()
	for name, refused := range map[string]string{
		"":                        "empty",
		strings.Repeat("n", 1024): "1024 bytes, the limit is 255",
		"a\x00b":                  "printable",
		"\xff":                    "printable",
	} {
		key, err := ledger.KeyFor(claimed(t.Context(), "c", "k"), name)
		if key != "" || !errors.Is(err, ledger.ErrInvalidEffect) || !strings.Contains(err.Error(), refused) {
			t.Errorf("%.20q: %q, %v", name, key, err)
		}
		if !middleware.IsPermanent(err) {
			t.Errorf("%.20q: the message would be tried again", name)
		}
	}
	for _, epoch := range []int{-1, 1 << 31} {
		if _, err := ledger.KeyFor(claimed(t.Context(), "c", "k"), "n", ledger.WithEpoch(epoch)); !errors.Is(err, ledger.ErrInvalidEffect) {
			t.Errorf("epoch %d: %v", epoch, err)
		}
	}
	for _, ctx := range []context.Context{t.Context(), claimed(t.Context(), "", "k"), claimed(t.Context(), "c", "")} {
		if _, err := ledger.KeyFor(ctx, "n"); !errors.Is(err, ledger.ErrNoClaim) {
			t.Errorf("got %v", err)
		}
	}
}

func TestKeyFromContext(t *testing.T) {
	t.Parallel()
	if key, ok := ledger.KeyFromContext(t.Context()); ok {
		t.Errorf("got %q", key)
	}
	if key, ok := ledger.KeyFromContext(ledger.ContextWithKey(t.Context(), "k")); !ok || key != "k" {
		t.Errorf("got %q, %v", key, ok)
	}
}

func BenchmarkKeyFor(b *testing.B) {
	ctx := claimed(b.Context(), "billing", "0197c1f4-2f56-7a98-8b1c-5d1e6f7a8b9c")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ledger.KeyFor(ctx, "charge"); err != nil {
			b.Fatal(err)
		}
	}
}
