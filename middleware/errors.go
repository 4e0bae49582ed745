package middleware

import (
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/text"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Permanent marks err as one that trying again can't mend: the message goes to
// the poison queue at once. The handler's transaction is rolled back as for every
// error. Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// Permanent lets packages that don't import this one see the mark, as package
// ledger does, and set it on errors of their own.
func (e *permanentError) Permanent() bool { return true }

// IsPermanent reports whether err goes to the poison queue without a retry: it
// was marked with [Permanent] or has a method Permanent() bool that returns true, or
// it is about a message that has no key, no version, no partition key, a part of a
// producer's number, or the key or version of another one, that is too old or of
// unknown age for a store with a retention, that was tried too often, that comes from
// a producer that was replaced, or whose handler committed the transaction itself
// before it failed.
func IsPermanent(err error) bool {
	var marked interface{ Permanent() bool }
	if errors.As(err, &marked) && marked.Permanent() {
		return true
	}
	for _, target := range []error{
		deduplicator.ErrNoKey, deduplicator.ErrInvalidClaim, deduplicator.ErrConflict,
		deduplicator.ErrNoTime, deduplicator.ErrTooOld, deduplicator.ErrTooManyAttempts, deduplicator.ErrClaimKept,
		ordering.ErrInvalidVersion, ordering.ErrVersionConflict, ordering.ErrInvalidKey,
		ordering.ErrFenced, ordering.ErrInvalidStamp,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// blameless reports whether err says nothing about the message: parking it would
// empty the broker into the poison queue while the database is down, or while a
// process that was replaced goes on.
func blameless(err error) bool {
	for _, target := range []error{
		deduplicator.ErrInFlight, deduplicator.ErrUnavailable, deduplicator.ErrOutcomeUnknown,
		deduplicator.ErrNoTransaction, deduplicator.ErrConsumerTaken, ErrNoConsumer, ordering.ErrReplaced,
	} {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// PanicError is a panic of a handler, or of what else runs in a chain, as an error.
type PanicError struct {
	Value any
	Stack []byte // as runtime/debug.Stack returns it
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap returns the panic's value if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// recoverer turns panics into errors, so that the links outside can retry and
// park. It stands outside the transaction, which has rolled back by then.
func recoverer(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		defer func() {
			if value := recover(); value != nil {
				produced, err = nil, &PanicError{Value: value, Stack: debug.Stack()}
			}
		}()
		return h(msg)
	}
}

// reason is the text of err, cut.
func reason(err error) string { return text.Cut(err.Error()) }
