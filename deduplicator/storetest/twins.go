package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func testTwinDuplicate(k *kit) {
	release, first := k.hold(k.claim("a"), "effect")
	second := k.start(k.claim("a"), k.write("effect"))
	k.waits(second)
	release(nil)
	if a := k.await(first); a.err != nil || a.result.Outcome != deduplicator.Processed {
		k.Fatalf("first: outcome %d, error %v", a.result.Outcome, a.err)
	}
	if a := k.await(second); a.err != nil || a.result.Outcome != deduplicator.Duplicate {
		k.Fatalf("second: outcome %d, error %v; want a duplicate", a.result.Outcome, a.err)
	}
	k.count("effect", 1)
}

func testTwinRuns(k *kit) {
	release, first := k.hold(k.claim("a"), "first")
	second := k.start(k.claim("a"), k.write("second"))
	k.waits(second)
	cause := errors.New("first fails")
	release(cause)
	if a := k.await(first); a.err != cause { //nolint:errorlint // it must be the same value
		k.Fatalf("first: error %v, want %v", a.err, cause)
	}
	if a := k.await(second); a.err != nil || a.result.Outcome != deduplicator.Processed {
		k.Fatalf("second: outcome %d, error %v; want it processed", a.result.Outcome, a.err)
	}
	k.count("first", 0)
	k.count("second", 1)
}

func testTwinInFlight(k *kit) {
	release, first := k.hold(k.claim("a"), "first")
	started := time.Now()
	_, err := k.process(k.claim("a"), k.write("second"))
	took := time.Since(started)
	if !errors.Is(err, deduplicator.ErrInFlight) {
		k.Errorf("error %v, want %v", err, deduplicator.ErrInFlight)
	}
	// Half of it, since a database may count it in its own ticks; and twice, with
	// time for a busy machine.
	if took < k.ClaimTimeout/2 || took > 2*k.ClaimTimeout+5*time.Second {
		k.Errorf("waited for %v, the claim timeout is %v", took, k.ClaimTimeout)
	}
	if k.InUse != nil && k.InUse() != 1 {
		k.Errorf("%d connections are in use, want only that of the first run", k.InUse())
	}
	release(nil)
	if a := k.await(first); a.err != nil || a.result.Outcome != deduplicator.Processed {
		k.Fatalf("first: outcome %d, error %v", a.result.Outcome, a.err)
	}
	k.duplicate(k.claim("a"))
	k.count("first", 1)
	k.count("second", 0)
}

func testCopies(k *kit)           { k.copies(50, 0) }
func testCopiesFirstFails(k *kit) { k.copies(3, 1); k.copies(50, 3) }
func testCopiesOutputs(k *kit) {
	k.copies(50, 3, deduplicator.Output{Topic: "t", UUID: "u"})
}

// copies runs n copies of one message at once and delivers those again that
// fail, as a broker does. The first failures runs of the work fail, the others
// return outputs.
func (k *kit) copies(n, failures int, outputs ...deduplicator.Output) {
	k.Helper()
	name := fmt.Sprintf("%d copies", n)
	cause := errors.New("planned")
	var runs, deliveries atomic.Int32
	deliver := func() (deduplicator.Result, error) {
		for {
			deliveries.Add(1)
			result, err := k.process(k.claim(name), func(ctx context.Context) ([]deduplicator.Output, error) {
				fails := int(runs.Add(1)) <= failures
				if err := k.Write(ctx, k.effect(name)); err != nil {
					return nil, err
				}
				if fails {
					// Long enough for the other copies to queue up behind the claim.
					time.Sleep(min(k.ClaimTimeout/10, 50*time.Millisecond))
					return nil, cause
				}
				return outputs, nil
			})
			if errors.Is(err, cause) || errors.Is(err, deduplicator.ErrInFlight) {
				continue
			}
			return result, err
		}
	}
	answers := make(chan answer, n)
	for range n {
		go func() {
			result, err := deliver()
			answers <- answer{result, err}
		}()
	}
	outcomes := make(map[deduplicator.Outcome]int)
	for range n {
		a := k.await(answers)
		if a.err != nil {
			k.Errorf("a copy failed: %v", a.err)
		}
		if a.result.Outcome == deduplicator.Duplicate {
			k.sameOutputs(a.result.Outputs, outputs)
		}
		outcomes[a.result.Outcome]++
	}
	if outcomes[deduplicator.Processed] != 1 || outcomes[deduplicator.Duplicate] != n-1 {
		k.Errorf("outcomes %v of %d deliveries, want one of them processed and the rest duplicates", outcomes, deliveries.Load())
	}
	k.count(name, 1)
}

func testTransient(k *kit) {
	for i, transient := range k.Transient {
		name := fmt.Sprintf("transient %d", i)
		runs := 0
		k.processed(k.claim(name), func(ctx context.Context) ([]deduplicator.Output, error) {
			runs++
			if err := k.Write(ctx, k.effect(name)); err != nil {
				return nil, err
			}
			outputs := []deduplicator.Output{{Topic: "t", UUID: fmt.Sprint(runs)}}
			if runs < 3 {
				return outputs, fmt.Errorf("update stock: %w", transient)
			}
			return outputs, nil
		})
		if runs != 3 {
			k.Errorf("%v: the work ran %d times, want 3", transient, runs)
		}
		k.count(name, 1)
		if outputs := k.duplicate(k.claim(name)); len(outputs) != 1 || outputs[0].UUID != "3" {
			k.Errorf("%v: outputs %+v, want those of the last run", transient, outputs)
		}
	}

	runs := 0
	_, err := k.process(k.claim("other"), func(context.Context) ([]deduplicator.Output, error) {
		runs++
		return nil, errors.New("deadlock detected (SQLSTATE 40001), Error 1213, database is locked")
	})
	if err == nil || runs != 1 {
		k.Errorf("another error: the work ran %d times, error %v; want one run and the error", runs, err)
	}
}

func testTransientForEver(k *kit) {
	cause := fmt.Errorf("update stock: %w", k.Transient[0]) // one is enough: each takes all its pauses
	runs := 0
	_, err := k.process(k.claim("a"), func(ctx context.Context) ([]deduplicator.Output, error) {
		runs++
		if err := k.Write(ctx, k.effect("effect")); err != nil {
			return nil, err
		}
		return nil, cause
	})
	if err != cause { //nolint:errorlint // it must be the same value
		k.Errorf("error %v, want the work's own", err)
	}
	if runs < 2 || runs > 1000 {
		k.Errorf("the work ran %d times", runs)
	}
	k.nothingDurable(k.claim("a"), "effect")
}
