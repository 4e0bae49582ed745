package ledger

import (
	"context"
	"fmt"
	"time"
)

// Effect is what a handler does outside of its database: its name, and what to do
// when nobody knows whether it took place. Make it once, with [NewEffect].
type Effect struct {
	name  string
	epoch int
	rule  Rule
}

// NewEffect returns an effect. The name is part of the idempotency key, see
// [KeyFor]: renaming an effect makes it another one. It returns [ErrInvalidEffect]
// for a name or epoch out of range and for a missing or impossible rule.
func NewEffect(name string, rule Rule, opts ...EffectOption) (Effect, error) {
	var cfg effectConfig
	for _, opt := range opts {
		opt.apply(&cfg)
	}
	effect := Effect{name, cfg.epoch, rule}
	return effect, effect.validate()
}

func (e Effect) validate() error {
	if err := checkEffect(e.name, e.epoch); err != nil {
		return err
	}
	switch {
	case e.rule.kind == 0:
		return fmt.Errorf("%w: %q has no rule for an unknown outcome: use CallAgain, RetryWithKey, AskProvider or AskOperator", ErrInvalidEffect, e.name)
	case e.rule.kind == ruleRetryWithKey && e.rule.window <= 0:
		return fmt.Errorf("%w: %q: RetryWithKey: window %v is not positive", ErrInvalidEffect, e.name, e.rule.window)
	case e.rule.kind == ruleAskProvider && e.rule.ask == nil:
		return fmt.Errorf("%w: %q: AskProvider: function is nil; use AskOperator", ErrInvalidEffect, e.name)
	}
	return nil
}

// Part returns the effect for one of several things that a handler does alike, such
// as the label of one of an order's parcels: its name is that of e, a slash and id.
// The id must come from the message: a counter of the handler's own would give
// another parcel's label after a redelivery.
func (e Effect) Part(id string) Effect {
	e.name += "/" + id
	return e
}

// Name returns the effect's name.
func (e Effect) Name() string { return e.name }

type ruleKind uint8

const (
	ruleCallAgain ruleKind = iota + 1
	ruleRetryWithKey
	ruleAskProvider
	ruleAskOperator
)

// Rule says what a delivery does about an effect whose outcome is unknown because
// the process died, the answer was lost, or the call returned an error that says
// neither that it was done nor that it was not.
type Rule struct {
	kind   ruleKind
	window time.Duration
	ask    func(context.Context, UnknownEffect) (Answer, error)
}

// callsOnce reports whether a request of the effect must not be sent a second time.
func (r Rule) callsOnce() bool { return r.kind != ruleCallAgain && r.kind != ruleRetryWithKey }

// CallAgain calls again: the effect takes place at least once. For what may happen
// twice, a notification for example.
func CallAgain() Rule { return Rule{kind: ruleCallAgain} }

// RetryWithKey calls again with the same idempotency key, for providers that
// recognise it and then return the first result.
//
// Window is how long the provider remembers a key (24 hours at Stripe). A retry that
// could reach it later, counted from the first attempt and with a lease's time to
// spare, is refused with [ErrKeyExpired]. Window must be longer than the lease.
func RetryWithKey(window time.Duration) Rule { return Rule{kind: ruleRetryWithKey, window: window} }

// AskProvider calls ask, which finds out what became of the effect, usually by the
// reference that the call left with the provider. The call is repeated only after
// [AnswerNotDone]; an error is like [AnswerUnknown].
//
// Nothing stops a request that is still on its way, or a process that was paused in
// the moment before it sends one. So answer NotDone only where it can't arrive any
// more, for example because ask has cancelled the reference at the provider.
func AskProvider(ask func(ctx context.Context, unknown UnknownEffect) (Answer, error)) Rule {
	return Rule{kind: ruleAskProvider, ask: ask}
}

// AskOperator never calls again by itself: the effect takes place at most once. The
// message is parked, and the effect is listed by [Ledger.Unknown] until somebody
// calls [Ledger.Resolve]. The client of the call must not repeat a request by itself
// either, which a [Transport] sees to.
func AskOperator() Rule { return Rule{kind: ruleAskOperator} }

// Answer says what became of an effect. The zero value is [AnswerUnknown].
type Answer struct {
	state  string
	result any
	reason string
}

// AnswerDone says that the effect took place. Result is what [Do] returns from then
// on: a value that the codec turns into the type that Do expects.
func AnswerDone(result any) Answer { return Answer{state: stateSucceeded, result: result} }

// AnswerFailed says that the effect did not take place and never will: [Do] returns
// [ErrFailed] from then on, with reason in its text.
func AnswerFailed(reason string) Answer { return Answer{state: stateFailed, reason: reason} }

// AnswerNotDone says that the effect did not take place: the next delivery calls.
func AnswerNotDone() Answer { return Answer{state: statePlanned} }

// AnswerUnknown says that it is still not known.
func AnswerUnknown() Answer { return Answer{state: stateUnknown} }
