// Package storetest has the tests that every implementation of
// deduplicator.Store must pass:
//
//	func TestStore(t *testing.T) {
//		storetest.Test(t, func(t *testing.T) storetest.Subject {
//			db := openDatabase(t)
//			store, err := deduplicator.NewSQLStore(t.Context(), db, deduplicator.PostgreSQL,
//				deduplicator.WithClaimTimeout(time.Second))
//			if err != nil {
//				t.Fatal(err)
//			}
//			return storetest.SQL(t, db, deduplicator.PostgreSQL, store, time.Second)
//		})
//	}
package storetest

import (
	"context"
	"crypto/rand"
	"errors"
	"testing"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// Subject is a store under test and the database that it works on. Several
// subjects may share one database: every test uses names of its own.
type Subject struct {
	Store deduplicator.Store

	// ClaimTimeout is how long Process may wait for a twin. About a second is
	// enough for every test and keeps them short.
	ClaimTimeout time.Duration

	// Retention is how old a claim may be that the store accepts. 0 leaves out the
	// tests about it: the store keeps claims for ever.
	Retention time.Duration

	// MaxAttempts is after how many attempts the store refuses a claim, 100 or more
	// since many copies at once are attempts too. 0 leaves out the tests about it.
	MaxAttempts int

	// Write records an effect in the transaction that ctx carries.
	Write func(ctx context.Context, effect string) error

	// Count returns how often an effect of that name is committed.
	Count func(ctx context.Context, effect string) (int, error)

	// Transient are errors that the database's driver returns for a conflict
	// with other transactions. Nil leaves out the tests about them.
	Transient []error

	// Break makes a statement fail in ctx's transaction so that the database
	// will only roll it back. Nil where a failed statement has no such effect.
	Break func(ctx context.Context) error

	// EndTx ends ctx's transaction from inside the work. Nil where work can't.
	EndTx func(ctx context.Context, commit bool) error

	// InUse returns how many connections are in use by this subject; it is
	// checked to be 0 after each test. Nil leaves that out.
	InUse func() int
}

// Test runs the suite. It calls open once for each of its tests, which run in
// parallel, and open's t is the one of that test.
func Test(t *testing.T, open func(t *testing.T) Subject) {
	t.Helper()
	for _, test := range suite {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := open(t)
			if test.needs != nil && !test.needs(s) {
				return // the database has no such state, so there is nothing that could go wrong
			}
			// The end of t.Context would roll back what the store forgot about before
			// the connections are looked at.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
			t.Cleanup(cancel)
			k := &kit{T: t, Subject: s, ctx: ctx, consumer: "storetest-" + rand.Text()}
			t.Cleanup(k.connectionsAreFree)
			test.run(k)
		})
	}
}

type testCase struct {
	name  string
	run   func(*kit)
	needs func(Subject) bool
}

var suite = []testCase{
	{name: "effect and claim commit together, a copy is a duplicate", run: testProcess},
	{name: "B01 an error undoes everything and comes back as it was", run: testError},
	{name: "B87 a panic undoes everything and goes on", run: testPanic},
	{name: "Goexit undoes everything", run: testGoexit},
	{name: "B86 a context that ends inside the work undoes everything", run: testContextInWork},
	{name: "a context that ends while a twin is waited for ends the wait", run: testContextInClaim},
	{name: "B24 work that ignored a broken transaction is not committed", run: testBroken, needs: func(s Subject) bool { return s.Break != nil }},
	{name: "work that ends the transaction is found out", run: testEndTx, needs: func(s Subject) bool { return s.EndTx != nil }},
	{name: "work that ends the transaction and fails is found out", run: testEndTxAndFail, needs: func(s Subject) bool { return s.EndTx != nil }},

	{name: "B18 B26 a twin waits and is a duplicate when the first commits", run: testTwinDuplicate},
	{name: "B18 a twin waits and runs when the first fails", run: testTwinRuns},
	{name: "B19 a twin that never ends is in flight", run: testTwinInFlight},
	{name: "B23 fifty copies at once have one effect", run: testCopies},
	{name: "B31 copies of a first run that fails have one effect", run: testCopiesFirstFails},
	{name: "B28 a conflict with other transactions runs the work again", run: testTransient, needs: func(s Subject) bool { return s.Transient != nil }},
	{name: "B29 a conflict that stays comes back after bounded attempts", run: testTransientForEver, needs: func(s Subject) bool { return s.Transient != nil }},

	{name: "B43 consumers have claims of their own", run: testScopes},
	{name: "B36 an empty key or consumer is refused", run: testEmpty},
	{name: "B37 B40 B41 B42 keys are exact", run: testKeys},
	{name: "B37 B40 B41 B42 consumers are exact", run: testConsumers},
	{name: "B44 the same key with other content is a conflict", run: testFingerprint},

	{name: "a claim that may be redelivered has the same outcomes", run: testRedelivered},
	{name: "B101 a claim that is too old or of unknown age is refused", run: testRetention, needs: func(s Subject) bool { return s.Retention > 0 }},
	{name: "a claim that always fails is refused in the end", run: testAttempts, needs: func(s Subject) bool { return s.MaxAttempts > 0 }},

	{name: "B09 outputs come back with a duplicate as they were", run: testOutputs},
	{name: "B10 a thousand outputs keep their order", run: testManyOutputs},
	{name: "fifty copies at once get the outputs of the first", run: testCopiesOutputs},
	{name: "outputs of an attempt that failed are not stored", run: testFailedOutputs},
	{name: "forgotten outputs do not come back, others do", run: testForget},
}

// patience bounds a test.
const patience = time.Minute

// kit is what one test works with.
type kit struct {
	*testing.T
	Subject
	ctx      context.Context
	consumer string // unique
}

func (k *kit) claim(key string) deduplicator.Claim {
	return deduplicator.Claim{Consumer: k.consumer, Key: key, Time: time.Now()}
}

// effect is a name of this test's own.
func (k *kit) effect(name string) string { return k.consumer + " " + name }

// write is work that has one effect.
func (k *kit) write(effect string, outputs ...deduplicator.Output) deduplicator.Work {
	return func(ctx context.Context) ([]deduplicator.Output, error) {
		return outputs, k.Write(ctx, k.effect(effect))
	}
}

func (k *kit) process(claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	return k.Store.Process(k.ctx, claim, work)
}

// processed runs a claim that must be new.
func (k *kit) processed(claim deduplicator.Claim, work deduplicator.Work) {
	k.Helper()
	result, err := k.process(claim, work)
	if err != nil || result.Outcome != deduplicator.Processed {
		k.Fatalf("claim %.80q: outcome %d, error %v; want it processed", claim.Key, result.Outcome, err)
	}
}

// duplicate runs a claim that must be known, and returns its outputs.
func (k *kit) duplicate(claim deduplicator.Claim) []deduplicator.Output {
	k.Helper()
	result, err := k.process(claim, func(context.Context) ([]deduplicator.Output, error) {
		k.Errorf("claim %.80q: the work of a duplicate was called", claim.Key)
		return nil, errors.New("called")
	})
	if err != nil || result.Outcome != deduplicator.Duplicate {
		k.Fatalf("claim %.80q: outcome %d, error %v; want a duplicate", claim.Key, result.Outcome, err)
	}
	return result.Outputs
}

func (k *kit) count(effect string, want int) {
	k.Helper()
	got, err := k.Count(k.ctx, k.effect(effect))
	if err != nil {
		k.Fatalf("count effect %q: %v", effect, err)
	}
	if got != want {
		k.Fatalf("effect %q is committed %d times, want %d", effect, got, want)
	}
}

// nothingDurable checks that claim and effect left no trace, by running them.
func (k *kit) nothingDurable(claim deduplicator.Claim, effect string) {
	k.Helper()
	k.count(effect, 0)
	k.processed(claim, k.write(effect))
	k.count(effect, 1)
	if outputs := k.duplicate(claim); len(outputs) != 0 {
		k.Fatalf("%d outputs of the undone attempt came back", len(outputs))
	}
}

func (k *kit) connectionsAreFree() {
	if k.InUse == nil {
		return
	}
	// database/sql rolls back in its own goroutine when a context has ended.
	deadline := time.Now().Add(5 * time.Second)
	for k.InUse() != 0 {
		if time.Now().After(deadline) {
			k.Errorf("%d connections are still in use", k.InUse())
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// answer is what Process returned.
type answer struct {
	result deduplicator.Result
	err    error
}

func (k *kit) start(claim deduplicator.Claim, work deduplicator.Work) <-chan answer {
	done := make(chan answer, 1)
	go func() {
		result, err := k.process(claim, work)
		done <- answer{result, err}
	}()
	return done
}

// hold starts a run of claim that stays in its work until release is called with
// what the work is to return.
func (k *kit) hold(claim deduplicator.Claim, effect string) (release func(error), done <-chan answer) {
	k.Helper()
	entered, verdict := make(chan struct{}, 1), make(chan error, 1)
	done = k.start(claim, func(ctx context.Context) ([]deduplicator.Output, error) {
		if err := k.Write(ctx, k.effect(effect)); err != nil {
			return nil, err
		}
		entered <- struct{}{}
		return nil, <-verdict
	})
	select {
	case <-entered:
	case a := <-done:
		k.Fatalf("outcome %d, error %v; want the work to be called", a.result.Outcome, a.err)
	case <-time.After(patience):
		k.Fatal("the work was not called")
	}
	return func(err error) { verdict <- err }, done
}

// await returns what a run that start began has returned.
func (k *kit) await(done <-chan answer) answer {
	k.Helper()
	select {
	case a := <-done:
		return a
	case <-time.After(2 * patience):
		k.Fatal("Process does not return")
		return answer{}
	}
}

// waits checks that a run has no answer yet. That it really waits at the
// database can't be seen from here, so it gets a moment to be wrong.
func (k *kit) waits(done <-chan answer) {
	k.Helper()
	select {
	case a := <-done:
		k.Fatalf("outcome %d, error %v while the twin was running; want it to wait", a.result.Outcome, a.err)
	case <-time.After(min(k.ClaimTimeout/4, 150*time.Millisecond)):
	}
}
