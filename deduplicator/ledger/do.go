package ledger

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/internal/text"
)

// Do runs an effect of the message that ctx belongs to, unless it took place
// already: then it returns the result of that time. Call it in a handler inside
// Deduplicate, with the context of the message.
//
// Before call is called, that it is started is durable, and after it, how it ended;
// neither depends on the handler's transaction. So when that rolls back, or the
// process dies, the next delivery finds out what it has to do:
//
//   - call returned nil: its result is returned again, call is not called.
//   - call returned an error marked by middleware.Permanent: [ErrFailed] is returned
//     again. What the handler must look into, such as the reason why a card was
//     declined, is better a result.
//   - call returned an error marked by [NotDone]: it is called.
//   - call returned another error, panicked, or nobody knows: the [Rule] of the
//     effect decides.
//
// When call is called for an effect that was unknown, its error says nothing about the
// call before: whatever it is marked with, the effect stays unknown.
//
// Args is what the effect is about, such as amount and currency. What encoding/json
// makes of it is compared at every delivery, by a hash, so that the same effect is not
// run with other arguments: see [ErrArguments]. So give it only what comes from the
// message and never changes. Nil is compared as well.
//
// Call gets the idempotency key of [KeyFor], which its context carries too, see
// [KeyFromContext]. That context ends with ctx, and when another process has taken
// the effect over. Call should pass it on, and should not use the handler's
// transaction, which may be rolled back. It is called at most once for each Do.
//
// The result is encoded and decoded, now as at each later delivery, so that the
// handler always sees the same.
//
// Do returns an error of this package, most of them an [EffectError]; call's own
// error if it is marked by NotDone and the effect was not unknown; or one that wraps
// both [ErrUnknown] and call's error. [deduplicator.ErrUnavailable] says that the
// ledger failed before the call. Return them from the handler: they tell package
// middleware whether to try again, to return the message to the broker, or to park it.
func Do[T any](ctx context.Context, l *Ledger, effect Effect, args any, call func(ctx context.Context, key string) (T, error)) (T, error) {
	var result T
	e, err := l.execution(ctx, effect, args)
	if err != nil {
		return result, err
	}
	if call == nil {
		return result, fmt.Errorf("%w: %q: the function is nil", ErrInvalidEffect, effect.name)
	}
	encoded, err := e.run(ctx, func(ctx context.Context) (any, error) { return call(ctx, e.key) })
	if err != nil {
		return result, err
	}
	if err := l.config.codec.Decode(encoded, &result); err != nil {
		return result, e.error(ErrResult, fmt.Errorf("decode: %w", err), true)
	}
	return result, nil
}

// execution is one Do.
type execution struct {
	*Ledger
	effect    Effect
	id        identity
	key       string
	token     string // of this execution alone
	arguments []byte // their hash
	without   string // the state without this execution's call: planned, or unknown for a retry
}

func (l *Ledger) execution(ctx context.Context, effect Effect, args any) (*execution, error) {
	if err := effect.validate(); err != nil {
		return nil, err
	}
	if rule := effect.rule; rule.kind == ruleRetryWithKey && rule.window <= l.config.lease {
		return nil, fmt.Errorf("%w: %q: RetryWithKey: window %v is not longer than the lease, %v", ErrInvalidEffect, effect.name, rule.window, l.config.lease)
	}
	id, err := identify(ctx, effect.name, effect.epoch)
	if err != nil {
		return nil, err
	}
	if outer, ok := ctx.Value(callKey{}).(call); ok && outer.effect != "" {
		return nil, fmt.Errorf("%w: %q inside %q", ErrNested, effect.name, outer.effect)
	}
	encoded, err := json.Marshal(args)
	if err != nil {
		return nil, fmt.Errorf("%w: %q: arguments: %w", ErrInvalidEffect, effect.name, err)
	}
	arguments := sha256.Sum256(encoded)
	return &execution{l, effect, id, id.key(), rand.Text(), arguments[:], statePlanned}, nil
}

func (e *execution) error(kind, cause error, permanent bool) error {
	return &EffectError{
		Kind: kind, Consumer: e.id.consumer, MessageKey: e.id.message, Effect: e.id.name, Key: e.key,
		Err: cause, permanent: permanent,
	}
}

// maxTurns bounds how often an execution looks again because others were faster.
const maxTurns = 10

// run returns the encoded result.
func (e *execution) run(ctx context.Context, call func(context.Context) (any, error)) ([]byte, error) {
	since := time.Now()
	isNew, err := e.insert(ctx)
	if err != nil {
		return nil, e.notStarted(ctx, err)
	}
	for range maxTurns {
		if isNew {
			return e.call(ctx, since, call)
		}
		r, err := e.read(ctx)
		if err != nil {
			return nil, e.error(deduplicator.ErrUnavailable, err, false)
		}
		if string(r.arguments) != string(e.arguments) {
			return nil, e.error(ErrArguments, errChanged, true)
		}
		switch {
		case r.state == stateSucceeded && r.reason.Valid:
			return nil, e.error(ErrResult, errors.New(r.reason.String), true)
		case r.state == stateSucceeded:
			return r.result, nil
		case r.state == stateFailed:
			return nil, e.error(ErrFailed, errors.New(r.reason.String), true)
		case r.leased:
			return nil, e.error(ErrInProgress, nil, false)
		case r.state != statePlanned:
			again, err := e.decide(ctx, r)
			if err != nil {
				return nil, err
			}
			if !again {
				continue
			}
		}
		e.without = statePlanned
		if r.state != statePlanned {
			e.without = stateUnknown // an earlier call may have had an effect, whatever becomes of this one
		}
		since = time.Now()
		if isNew, err = e.take(ctx, r, stateStarted); err != nil {
			return nil, e.notStarted(ctx, err)
		}
	}
	return nil, e.error(ErrInProgress, nil, false)
}

// decide does what the rule says about an effect that is unknown. It reports whether
// to call again; if not, something has changed.
func (e *execution) decide(ctx context.Context, r row) (again bool, err error) {
	var cause error
	if r.reason.String != "" {
		cause = errors.New(r.reason.String)
	}
	rule := e.effect.rule
	switch rule.kind {
	case ruleCallAgain:
		return true, nil
	case ruleRetryWithKey:
		if r.age+e.config.lease <= rule.window {
			return true, nil
		}
		return false, e.error(ErrKeyExpired, fmt.Errorf("first tried %v ago, the key is good for %v", r.age.Round(time.Second), rule.window), true)
	case ruleAskProvider:
		return false, e.ask(ctx, r, cause)
	default:
		return false, e.error(ErrUnknown, cause, true)
	}
}

// ask takes the effect, so that others wait, and records what the provider says.
func (e *execution) ask(ctx context.Context, r row, cause error) error {
	taken, err := e.take(ctx, r, stateUnknown)
	if err != nil {
		return e.error(deduplicator.ErrUnavailable, err, false)
	}
	if !taken {
		return nil
	}
	var answer Answer
	var asked error
	e.hold(ctx, func(ctx context.Context) {
		answer, asked = e.effect.rule.ask(ctx, UnknownEffect{
			Consumer: e.id.consumer, MessageKey: e.id.message, Effect: e.id.name, Epoch: e.id.epoch, Key: e.key,
			Attempts: r.attempts, Age: r.age, Reason: r.reason.String, token: e.token,
		})
	})
	if asked != nil {
		answer = AnswerUnknown()
	}
	state, result, reason, _ := e.outcome(answer)
	if state == stateUnknown {
		reason = r.reason.String // why it is unknown, not why it still is
	}
	if err := e.finish(ctx, state, result, reason); err != nil {
		return err
	}
	if state == stateUnknown {
		return e.error(ErrUnknown, errors.Join(cause, asked), false)
	}
	return nil
}

// notStarted says that the ledger failed before the call. What it may have written
// all the same is taken back, if it can be; otherwise the lease ends it.
func (e *execution) notStarted(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_, err := e.changed(e.finishOnce(ctx, e.without, nil, ""))
	return e.error(deduplicator.ErrUnavailable, errors.Join(cause, err), false)
}

// call calls and records how it ended.
func (e *execution) call(ctx context.Context, since time.Time, do func(context.Context) (any, error)) ([]byte, error) {
	var never error // why it is not called after all
	switch away := time.Since(since); {
	case away >= e.config.lease: // the process was paused
		never = e.error(ErrInProgress, fmt.Errorf("the lease ended before the call, after %v", away.Round(time.Millisecond)), false)
	case ctx.Err() != nil:
		never = ctx.Err()
	}
	if never != nil {
		if err := e.finish(ctx, e.without, nil, ""); err != nil {
			return nil, err
		}
		return nil, never
	}
	var value any
	var failure error
	e.hold(ctx, func(ctx context.Context) { value, failure = do(ctx) })
	state, result, reason, lost := e.outcome(Answer{state: stateSucceeded, result: value})
	if failure != nil {
		state, result, reason = e.classify(failure), nil, failure.Error()
	}
	if err := e.finish(ctx, state, result, reason); err != nil {
		var effectErr *EffectError
		if errors.As(err, &effectErr) && failure != nil { // its text only: what it is marked with does not count here
			effectErr.Err = errors.Join(errors.New(failure.Error()), effectErr.Err)
		}
		return nil, err
	}
	switch state {
	case stateSucceeded:
		if lost != nil {
			return nil, e.error(ErrResult, lost, true)
		}
		return result, nil
	case statePlanned:
		return nil, failure
	case stateFailed:
		// The same as at the next delivery, when only the text is left.
		return nil, e.error(ErrFailed, errors.New(text.Cut(reason)), true)
	default:
		return nil, e.error(ErrUnknown, failure, e.effect.rule.kind == ruleAskOperator)
	}
}

// classify returns the state after a call that returned err.
func (e *execution) classify(err error) string {
	var own *permanentError
	var marked interface{ Permanent() bool }
	switch {
	case IsNotDone(err):
		return e.without
	case errors.As(err, &own): // misuse of this package inside the call: it says nothing about the provider
		return stateUnknown
	case errors.As(err, &marked) && marked.Permanent() && e.without == statePlanned:
		return stateFailed
	default:
		return stateUnknown
	}
}

// outcome returns what to store for an answer. lost says why a result can't be kept.
func (l *Ledger) outcome(answer Answer) (state string, result []byte, reason string, lost error) {
	switch answer.state {
	case stateSucceeded:
		encoded, err := l.config.codec.Encode(answer.result)
		switch {
		case err != nil:
			lost = fmt.Errorf("encode: %w", err)
		case len(encoded) > l.config.maxResult:
			lost = fmt.Errorf("it has %d bytes, the limit is %d", len(encoded), l.config.maxResult)
		}
		if lost != nil {
			return stateSucceeded, nil, lost.Error(), lost
		}
		return stateSucceeded, encoded, "", nil
	case statePlanned, stateFailed:
		return answer.state, nil, answer.reason, nil
	default:
		return stateUnknown, nil, answer.reason, nil
	}
}

// hold calls do with a context for calls, and renews the lease until do returns. When
// do panics or leaves by Goexit, the effect is unknown.
func (e *execution) hold(ctx context.Context, do func(context.Context)) {
	of := call{key: e.key, effect: e.id.name, once: e.effect.rule.callsOnce()}
	callCtx, cancel := context.WithCancelCause(context.WithValue(ctx, callKey{}, of))
	stop := e.keepLease(ctx, cancel)
	returned := false
	defer func() {
		stop()
		cancel(nil)
		if !returned {
			_ = e.finish(ctx, stateUnknown, nil, "the call panicked") // otherwise the lease ends it
		}
	}()
	do(callCtx)
	returned = true
}

// keepLease renews the lease every third of it, and cancels the call when the lease
// is lost. stop waits until it is at rest.
func (e *execution) keepLease(ctx context.Context, cancel context.CancelCauseFunc) (stop func()) {
	ctx, end := context.WithCancel(context.WithoutCancel(ctx)) // a call may go on after ctx ends
	var mu sync.Mutex                                          // held while it renews
	var timer *time.Timer
	stopped := false
	every := e.config.lease / 3
	beat := func() {
		mu.Lock()
		defer mu.Unlock()
		if stopped {
			return
		}
		renewed, err := e.renew(ctx)
		if err == nil && !renewed {
			cancel(e.error(ErrFenced, nil, false))
			return
		}
		timer.Reset(every) // after an error too: the database may be back in time
	}
	mu.Lock()
	timer = time.AfterFunc(every, beat)
	mu.Unlock()
	return func() {
		end()
		mu.Lock()
		defer mu.Unlock()
		stopped = true
		timer.Stop()
	}
}

// finish records how the effect ended, and tries for a while: what is lost here has
// to be found out later. It returns nothing or an EffectError.
func (e *execution) finish(ctx context.Context, state string, result []byte, reason string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statementLimit)
	defer cancel()
	for pauses := sqldb.Pauses(); ; {
		finished, err := e.changed(e.finishOnce(ctx, state, result, reason))
		if finished {
			return nil
		}
		if err == nil { // an attempt before this one has done it and the answer was lost, or it is another's
			r, readErr := e.read(ctx)
			switch {
			case readErr == nil && r.token == e.token && r.state == state:
				return nil
			case readErr == nil, errors.Is(readErr, sql.ErrNoRows):
				return e.error(ErrFenced, nil, false)
			}
			err = readErr
		}
		if !sqldb.Pause(ctx, pauses.NextBackOff()) {
			return e.error(ErrUnknown, fmt.Errorf("ledger: record that it is %s: %w", state, err), false)
		}
	}
}

func (e *execution) finishOnce(ctx context.Context, state string, result []byte, reason string) (sql.Result, error) {
	return e.exec(ctx, &e.queries.finish,
		state, result, sql.NullString{String: text.Cut(reason), Valid: reason != ""}, e.key, e.token)
}
