package storetest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func testRedelivered(k *kit) {
	hint := func(key string) deduplicator.Claim {
		claim := k.claim(key)
		claim.Redelivered = true
		claim.Fingerprint = []byte("one")
		return claim
	}
	k.processed(hint("new"), k.write("new"))
	k.count("new", 1)
	k.duplicate(hint("new"))

	outputs := []deduplicator.Output{{Topic: "t", UUID: "1"}, {Topic: "t", UUID: "2"}}
	k.processed(hint("outputs"), k.write("outputs", outputs...))
	k.sameOutputs(k.duplicate(hint("outputs")), outputs)
	other := hint("outputs")
	other.Fingerprint = []byte("two")
	if result, err := k.process(other, k.write("conflict")); !errors.Is(err, deduplicator.ErrConflict) || len(result.Outputs) != 0 {
		k.Errorf("outcome %d with %d outputs, error %v, want %v and none", result.Outcome, len(result.Outputs), err, deduplicator.ErrConflict)
	}
	if err := k.Store.Forget(k.ctx, hint("outputs")); err != nil {
		k.Fatalf("forget: %v", err)
	}
	k.sameOutputs(k.duplicate(hint("outputs")), nil)

	for _, key := range []string{"new", "outputs"} {
		other := hint(key)
		other.Fingerprint = []byte("two")
		if result, err := k.process(other, k.write("conflict")); !errors.Is(err, deduplicator.ErrConflict) {
			k.Errorf("outcome %d, error %v, want %v", result.Outcome, err, deduplicator.ErrConflict)
		}
	}
	k.count("conflict", 0)

	cause := errors.New("planned")
	if _, err := k.process(hint("fails"), func(context.Context) ([]deduplicator.Output, error) { return outputs, cause }); !errors.Is(err, cause) {
		k.Errorf("error %v, want the work's own", err)
	}
	k.nothingDurable(hint("fails"), "fails")

	// A twin that has not committed is waited for as ever.
	release, first := k.hold(k.claim("held"), "held")
	second := k.start(hint("held"), k.write("held"))
	k.waits(second)
	release(nil)
	if a := k.await(first); a.err != nil || a.result.Outcome != deduplicator.Processed {
		k.Fatalf("first: outcome %d, error %v", a.result.Outcome, a.err)
	}
	if a := k.await(second); a.err != nil || a.result.Outcome != deduplicator.Duplicate {
		k.Fatalf("second: outcome %d, error %v; want a duplicate", a.result.Outcome, a.err)
	}
	k.count("held", 1)
}

func testRetention(k *kit) {
	at := func(key string, t time.Time) deduplicator.Claim {
		claim := k.claim(key)
		claim.Time = t
		return claim
	}
	old := time.Now().Add(-k.Retention - time.Minute)
	k.processed(k.claim("known"), k.write("known"))
	for _, redelivered := range []bool{false, true} {
		for name, tt := range map[string]struct {
			time time.Time
			want error
		}{
			"no time": {time.Time{}, deduplicator.ErrNoTime},
			"too old": {old, deduplicator.ErrTooOld},
			// With it an old claim would look young for ever.
			"far in the future": {time.Now().Add(time.Hour), deduplicator.ErrNoTime},
		} {
			for _, key := range []string{name, "known"} {
				claim := at(key, tt.time)
				claim.Redelivered = redelivered
				result, err := k.process(claim, k.write("refused"))
				if !errors.Is(err, tt.want) || result.Outcome != 0 {
					k.Errorf("%s: outcome %d, error %v, want %v", name, result.Outcome, err, tt.want)
				}
			}
		}
	}
	k.count("refused", 0)
	for i, t := range []time.Time{
		time.Now().Add(-k.Retention + time.Minute), time.Now(), time.Now().Add(time.Minute),
		time.Now().In(time.FixedZone("", 14*3600)), time.Now().In(time.FixedZone("", -12*3600)),
	} {
		claim := at(fmt.Sprint("accepted ", i), t)
		k.processed(claim, k.write(claim.Key))
		k.duplicate(claim)
	}
}

func testAttempts(k *kit) {
	cause := errors.New("planned")
	runs := 0
	fails := func(context.Context) ([]deduplicator.Output, error) {
		runs++
		return nil, cause
	}
	for i := range k.MaxAttempts {
		if _, err := k.process(k.claim("a"), fails); err != cause { //nolint:errorlint // it must be the same value
			k.Fatalf("attempt %d of %d: error %v, want the work's own", i+1, k.MaxAttempts, err)
		}
	}
	if _, err := k.process(k.claim("a"), fails); !errors.Is(err, deduplicator.ErrTooManyAttempts) || runs != k.MaxAttempts {
		k.Fatalf("error %v after %d runs, want %v after %d", err, runs, deduplicator.ErrTooManyAttempts, k.MaxAttempts)
	}
	k.processed(k.claim("other"), k.write("other"))

	// It is parked now. Published again, it has all its attempts.
	for range k.MaxAttempts - 1 {
		if _, err := k.process(k.claim("a"), fails); err != cause { //nolint:errorlint // it must be the same value
			k.Fatalf("after it was refused: error %v, want the work's own", err)
		}
	}
	k.processed(k.claim("a"), k.write("a"))
	k.count("a", 1)
	for range k.MaxAttempts + 1 {
		k.duplicate(k.claim("a"))
	}

	// Copies beyond the limit of one that is at it, and succeeds.
	release, first := k.hold(k.claim("held"), "held")
	copies := make([]<-chan answer, 3)
	for i := range copies {
		copies[i] = k.start(k.claim("held"), k.write("held"))
	}
	release(nil)
	if a := k.await(first); a.err != nil {
		k.Fatal(a.err)
	}
	for _, c := range copies {
		if a := k.await(c); a.err != nil || a.result.Outcome != deduplicator.Duplicate {
			k.Errorf("a copy: outcome %d, error %v; want a duplicate", a.result.Outcome, a.err)
		}
	}
}
