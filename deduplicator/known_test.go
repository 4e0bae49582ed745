package deduplicator_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func knownClaim(key, fingerprint string) deduplicator.Claim {
	return deduplicator.Claim{Consumer: "c", Key: key, Fingerprint: []byte(fingerprint)}
}

func TestKnownKeys(t *testing.T) {
	t.Parallel()
	known := deduplicator.NewKnownKeys(100)
	is := func(claim deduplicator.Claim, want bool) {
		t.Helper()
		if got := known.Duplicate(claim); got != want {
			t.Errorf("%.40q is known: %v, want %v", claim.Key, got, want)
		}
	}
	long := strings.Repeat("k", 5000)
	for _, key := range []string{"a", "bin\x00\xff", long} {
		is(knownClaim(key, "f"), false)
		known.Committed(knownClaim(key, "f"), []byte("f"), false)
		is(knownClaim(key, "f"), true)
		is(knownClaim(key, ""), true) // not compared
	}
	for _, other := range []deduplicator.Claim{
		knownClaim("A", "f"), knownClaim("a ", "f"), knownClaim(long+"k", "f"), {Consumer: "C", Key: "a"}, {Consumer: "ca"}, {Key: "ca"},
	} {
		is(other, false)
	}

	is(knownClaim("a", "other"), false) // the database has its fingerprint, for the conflict
	known.Committed(knownClaim("no fingerprint", "f"), nil, false)
	is(knownClaim("no fingerprint", "other"), true)

	// With outputs the database must be asked, until they are forgotten.
	known.Committed(knownClaim("outputs", "f"), []byte("f"), true)
	is(knownClaim("outputs", "f"), false)
	known.Forgotten([]deduplicator.Claim{knownClaim("outputs", ""), knownClaim("never seen", "")})
	is(knownClaim("outputs", "f"), true)
	is(knownClaim("never seen", ""), false) // forgotten, but not known to be committed
}

func TestKnownKeysAreBounded(t *testing.T) {
	t.Parallel()
	known := deduplicator.NewKnownKeys(100)
	known.Committed(knownClaim("asked for", ""), nil, false)
	for i := range 1000 {
		known.Committed(knownClaim(fmt.Sprint(i), ""), nil, false)
		if !known.Duplicate(knownClaim("asked for", "")) {
			t.Fatalf("what is asked for was dropped after %d others", i)
		}
		if n := known.Len(); n > 100 {
			t.Fatalf("%d claims are remembered", n)
		}
	}
	if !known.Duplicate(knownClaim("990", "")) {
		t.Error("a new claim was dropped")
	}
	if known.Duplicate(knownClaim("1", "")) {
		t.Error("an old claim is still there")
	}
	off := deduplicator.NewKnownKeys(0)
	off.Committed(knownClaim("a", ""), nil, false)
	off.Forgotten([]deduplicator.Claim{knownClaim("a", "")})
	if off.Duplicate(knownClaim("a", "")) {
		t.Error("known, although switched off")
	}
}

func TestKnownKeysAtOnce(t *testing.T) {
	t.Parallel()
	known := deduplicator.NewKnownKeys(10)
	var workers sync.WaitGroup
	for w := range 8 {
		workers.Go(func() {
			for i := range 1000 {
				claim := knownClaim(fmt.Sprint((i+w)%25), "f")
				known.Committed(claim, []byte("f"), i%2 == 0)
				known.Forgotten([]deduplicator.Claim{claim})
				known.Duplicate(claim)
			}
		})
	}
	workers.Wait()
}

func BenchmarkKnownKeys(b *testing.B) {
	known := deduplicator.NewKnownKeys(deduplicator.DefaultKnownKeys)
	claims := make([]deduplicator.Claim, 8000)
	for i := range claims {
		claims[i] = knownClaim(fmt.Sprintf("0190a6c4-0000-7000-8000-%012d", i), strings.Repeat("f", 32))
		known.Committed(claims[i], claims[i].Fingerprint, false)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if !known.Duplicate(claims[i%len(claims)]) {
			b.Fatal("not known")
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}
