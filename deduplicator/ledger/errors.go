package ledger

import (
	"errors"
	"fmt"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// permanentError is a sentinel of an error that another attempt can't mend:
// package middleware parks the message at once.
type permanentError struct{ text string }

func (e *permanentError) Error() string   { return e.text }
func (e *permanentError) Permanent() bool { return true }

// errChanged is the cause of every ErrArguments.
var errChanged = errors.New("pass only what comes from the message and never changes; give what is another effect another name, see Effect.Part")

// errPermanent is in the chain of an [EffectError] that is permanent.
var errPermanent = &permanentError{"trying again can't help"}

var (
	// ErrInvalidOption is wrapped by every error about an argument or option of a
	// constructor.
	ErrInvalidOption = errors.New("ledger: invalid option")

	// ErrSchema says that the table or a column is missing or can't be read.
	ErrSchema = errors.New("ledger: schema is not ready")

	// ErrNoClaim says that the context is not the one of a message inside
	// Deduplicate, so that nothing says whose effect it is. Nothing is durable.
	ErrNoClaim = errors.New("ledger: used outside of Deduplicate")

	// ErrInvalidEffect says that the name, the epoch, the rule or the arguments of
	// an effect can't be used. Nothing is durable, and trying again can't help.
	ErrInvalidEffect error = &permanentError{"ledger: invalid effect"}

	// ErrNested says that [Do] was called with the context of another effect's
	// call. Of the inner effect nothing is durable; the outer one is as what its
	// function returns says. Trying again can't help.
	ErrNested error = &permanentError{"ledger: an effect inside an effect"}

	// ErrArguments says that the same effect of the same message was run before
	// with other arguments, in this run of the handler or in an earlier one. What
	// is durable is the effect with those; trying again can't help. Pass [Do] only what
	// comes from the message and never changes, and give what is another effect
	// another name, see [Effect.Part].
	ErrArguments error = &permanentError{"ledger: same effect, other arguments"}

	// ErrFailed says that the provider has refused the effect for good, now or at
	// an earlier delivery: its error was marked by middleware.Permanent, and no call
	// before it can have worked, or an [Answer] said so. That is durable, and trying
	// again can't help.
	ErrFailed = errors.New("ledger: effect has failed for good")

	// ErrUnknown says that nobody knows whether the effect took place. That is
	// durable. Under [CallAgain], [RetryWithKey] and [AskProvider] another delivery
	// may find out; under [AskOperator] trying again can't help: see
	// [Ledger.Unknown].
	ErrUnknown = errors.New("ledger: outcome of the effect is unknown")

	// ErrKeyExpired is ErrUnknown for an effect with [RetryWithKey] whose key the
	// provider may have forgotten, so that a call could repeat the effect. Trying
	// again can't help.
	ErrKeyExpired = errors.New("ledger: the provider may have forgotten the key")

	// ErrInProgress says that somebody else runs the effect: its lease is not over.
	// It is a deduplicator.ErrInFlight: the message is returned to the broker.
	ErrInProgress = errors.New("ledger: effect is in progress elsewhere")

	// ErrFenced says that this process was away for longer than its lease and that
	// somebody else has taken the effect over. What is durable is what they record:
	// roll the transaction back. It is a deduplicator.ErrInFlight.
	ErrFenced = errors.New("ledger: another has taken the effect over")

	// ErrResult says that the effect has taken place, which is durable, but that
	// its result is lost: it was larger than [WithMaxResult] allows, or the codec
	// can't encode or decode it. The call is not repeated; trying again can't help.
	ErrResult = errors.New("ledger: result of the effect can't be kept")

	// ErrNotUnknown says that [Ledger.Resolve] came too late: the effect is not, or
	// not any more, in the state in which it was listed. Nothing has changed.
	ErrNotUnknown = errors.New("ledger: effect is not unknown any more")

	// ErrNoRetention says that nothing may be deleted: the store accepts messages of
	// any age, so each of them may still ask what became of its effects.
	ErrNoRetention = errors.New("ledger: store has no retention")
)

// EffectError says what is wrong with an effect. It matches, with errors.Is, its
// Kind and what it wraps.
type EffectError struct {
	Kind error // one of this package, or deduplicator.ErrUnavailable

	Consumer   string
	MessageKey string
	Effect     string
	Key        string // the idempotency key

	Err error // the cause, if there is one

	permanent bool
}

func (e *EffectError) Error() string {
	text := fmt.Sprintf("%v: consumer %q, message %q, effect %q, key %s", e.Kind, e.Consumer, e.MessageKey, e.Effect, e.Key)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns Kind, what Kind stands for, and Err.
func (e *EffectError) Unwrap() []error {
	errs := []error{e.Kind}
	if e.permanent {
		errs = append(errs, errPermanent)
	}
	switch e.Kind { //nolint:errorlint // Kind is never wrapped
	case ErrInProgress, ErrFenced:
		errs = append(errs, deduplicator.ErrInFlight)
	case ErrKeyExpired:
		errs = append(errs, ErrUnknown)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

// NotDone marks an error of a call that certainly had no effect: the connection was
// refused, the request was never sent, the provider said "not now". The effect is
// then planned again, and the next attempt calls under every rule; but an effect that
// was unknown before this call stays unknown. NotDone(nil) is nil.
//
// An error that is not marked leaves the effect unknown.
func NotDone(err error) error {
	if err == nil {
		return nil
	}
	return &notDone{err}
}

type notDone struct{ err error }

func (e *notDone) Error() string { return e.err.Error() }
func (e *notDone) Unwrap() error { return e.err }

// IsNotDone reports whether err was marked with [NotDone].
func IsNotDone(err error) bool {
	var marked *notDone
	return errors.As(err, &marked)
}
