package storetest

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func testProcess(k *kit) {
	k.processed(k.claim("a"), k.write("effect"))
	k.count("effect", 1)
	for range 3 {
		k.duplicate(k.claim("a"))
	}
	k.count("effect", 1)
}

func testError(k *kit) {
	cause := fmt.Errorf("charge card: %w", errors.New("declined"))
	result, err := k.process(k.claim("a"), func(ctx context.Context) ([]deduplicator.Output, error) {
		if err := k.Write(ctx, k.effect("effect")); err != nil {
			return nil, err
		}
		return []deduplicator.Output{{Topic: "t", UUID: "u"}}, cause
	})
	if err != cause { //nolint:errorlint // it must be the same value
		k.Fatalf("error %v, want the work's own", err)
	}
	if result.Outcome != 0 || result.Outputs != nil {
		k.Errorf("result %+v beside an error", result)
	}
	k.nothingDurable(k.claim("a"), "effect")
}

func testPanic(k *kit) {
	cause := errors.New("nil map")
	func() {
		defer func() {
			if value := recover(); value != cause {
				k.Errorf("recovered %v, want the work's own panic", value)
			}
		}()
		_, err := k.process(k.claim("a"), func(ctx context.Context) ([]deduplicator.Output, error) {
			if err := k.Write(ctx, k.effect("effect")); err != nil {
				k.Error(err)
			}
			panic(cause)
		})
		k.Errorf("Process returned %v after a panic", err)
	}()
	k.connectionsAreFree()
	k.nothingDurable(k.claim("a"), "effect")
}

func testGoexit(k *kit) {
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, err := k.process(k.claim("a"), func(ctx context.Context) ([]deduplicator.Output, error) {
			if err := k.Write(ctx, k.effect("effect")); err != nil {
				k.Error(err)
			}
			runtime.Goexit()
			return nil, nil
		})
		k.Errorf("Process returned %v after Goexit", err)
	}()
	<-gone
	k.connectionsAreFree()
	k.nothingDurable(k.claim("a"), "effect")
}

func testContextInWork(k *kit) {
	for name, end := range map[string]func(ctx context.Context) error{
		"work that returns nil":               func(context.Context) error { return nil },
		"work that returns the context's err": context.Context.Err,
	} {
		ctx, cancel := context.WithCancel(k.ctx)
		_, err := k.Store.Process(ctx, k.claim(name), func(ctx context.Context) ([]deduplicator.Output, error) {
			if err := k.Write(ctx, k.effect(name)); err != nil {
				return nil, err
			}
			cancel()
			return []deduplicator.Output{{Topic: "t", UUID: "u"}}, end(ctx)
		})
		cancel()
		if !errors.Is(err, context.Canceled) {
			k.Fatalf("%s: error %v, want %v", name, err, context.Canceled)
		}
		k.connectionsAreFree()
		k.nothingDurable(k.claim(name), name)
	}
}

func testContextInClaim(k *kit) {
	release, first := k.hold(k.claim("a"), "first")
	ctx, cancel := context.WithTimeout(k.ctx, min(k.ClaimTimeout/10, 100*time.Millisecond))
	defer cancel()
	_, err := k.Store.Process(ctx, k.claim("a"), k.write("second"))
	if !errors.Is(err, context.DeadlineExceeded) {
		k.Errorf("error %v, want %v", err, context.DeadlineExceeded)
	}
	release(nil)
	if a := k.await(first); a.err != nil || a.result.Outcome != deduplicator.Processed {
		k.Fatalf("first: outcome %d, error %v", a.result.Outcome, a.err)
	}
	k.duplicate(k.claim("a"))
	k.count("second", 0)
}

func testBroken(k *kit) {
	for _, outputs := range [][]deduplicator.Output{nil, {{Topic: "t", UUID: "u"}}} {
		claim := k.claim(fmt.Sprintf("%d outputs", len(outputs)))
		_, err := k.process(claim, func(ctx context.Context) ([]deduplicator.Output, error) {
			if err := k.Write(ctx, k.effect(claim.Key)); err != nil {
				return nil, err
			}
			return outputs, k.Break(ctx)
		})
		if err == nil {
			k.Fatal("a transaction that can't be committed was reported as processed")
		}
		// With outputs the database refuses to store them, before the commit.
		if outputs == nil && !errors.Is(err, deduplicator.ErrNotCommitted) {
			k.Errorf("error %v, want %v", err, deduplicator.ErrNotCommitted)
		}
		k.nothingDurable(claim, claim.Key)
	}
}

func testEndTx(k *kit) {
	for _, outputs := range [][]deduplicator.Output{nil, {{Topic: "t", UUID: "u"}}} {
		for _, commit := range []bool{true, false} {
			claim := k.claim(fmt.Sprintf("commit %v, %d outputs", commit, len(outputs)))
			_, err := k.process(claim, func(ctx context.Context) ([]deduplicator.Output, error) {
				if err := k.Write(ctx, k.effect(claim.Key)); err != nil {
					return nil, err
				}
				return outputs, k.EndTx(ctx, commit)
			})
			if !errors.Is(err, deduplicator.ErrTxEnded) {
				k.Fatalf("%s: error %v, want %v", claim.Key, err, deduplicator.ErrTxEnded)
			}
			if !commit {
				k.nothingDurable(claim, claim.Key)
				continue
			}
			k.count(claim.Key, 1)
			if outputs := k.duplicate(claim); len(outputs) != 0 {
				k.Errorf("%s: %d outputs are stored", claim.Key, len(outputs))
			}
		}
	}
}

func testEndTxAndFail(k *kit) {
	cause := errors.New("planned")
	for _, commit := range []bool{true, false} {
		claim := k.claim(fmt.Sprintf("commit %v", commit))
		_, err := k.process(claim, func(ctx context.Context) ([]deduplicator.Output, error) {
			return nil, errors.Join(k.Write(ctx, k.effect(claim.Key)), k.EndTx(ctx, commit), cause)
		})
		want := deduplicator.ErrTxEnded
		if commit {
			want = deduplicator.ErrClaimKept
		}
		if !errors.Is(err, cause) || !errors.Is(err, want) {
			k.Errorf("%s: error %v, want the work's and %v", claim.Key, err, want)
		}
		if !commit {
			k.nothingDurable(claim, claim.Key)
		}
	}
}
