package deduplicator

import (
	"errors"
	"fmt"
)

var (
	// ErrInvalidOption is wrapped by every error about an argument or option of
	// a constructor.
	ErrInvalidOption = errors.New("deduplicator: invalid option")

	// ErrSchema says that a table or column is missing or can't be read.
	ErrSchema = errors.New("deduplicator: schema is not ready")

	// ErrNoKey is wrapped by what a KeyFunc returns for a message without a key.
	ErrNoKey = errors.New("deduplicator: message has no key")

	// ErrInvalidClaim says that a claim has no consumer or no key. Nothing is
	// durable; trying again can't help.
	ErrInvalidClaim = errors.New("deduplicator: invalid claim")

	// ErrNoTime says that a store with [WithRetention] can't tell the age of a
	// claim: it has no time, a malformed one, or one that lies more than 30 minutes
	// in the future. Nothing is durable; trying again can't help.
	ErrNoTime = errors.New("deduplicator: time of the message is not known")

	// ErrTooOld says that a message was published before the store's retention
	// began, so that it can't be proven new. Nothing is durable; trying again
	// can't help.
	ErrTooOld = errors.New("deduplicator: message is too old to prove that it is new")

	// ErrTooManyAttempts says that a claim was tried as often as [WithMaxAttempts]
	// allows and is neither processed nor in work. Nothing is durable; trying again
	// can't help.
	ErrTooManyAttempts = errors.New("deduplicator: too many attempts")

	// ErrPublishTimeout says that the publisher of a [Relay] did not return in
	// time. The messages stay stored.
	ErrPublishTimeout = errors.New("deduplicator: publisher does not return")

	// ErrConflict is matched by every [ConflictError].
	ErrConflict = errors.New("deduplicator: same key, other content")

	// ErrInFlight says that another transaction holds the key and did not end
	// within the claim timeout. Nothing is durable, the connection is free, and
	// the message may be delivered again.
	ErrInFlight = errors.New("deduplicator: key is being processed elsewhere")

	// ErrUnavailable says that the database failed before the work was called.
	// Nothing is durable; the message is not to blame.
	ErrUnavailable = errors.New("deduplicator: store is unavailable")

	// ErrNotCommitted says that the database refused the commit. Nothing is
	// durable. A typical cause is work that ignored the error of a statement.
	ErrNotCommitted = errors.New("deduplicator: transaction was not committed")

	// ErrOutcomeUnknown says that the answer to the commit was lost and the store
	// could not find out whether it took place. All or nothing is durable;
	// processing the claim again tells which.
	ErrOutcomeUnknown = errors.New("deduplicator: outcome of the commit is unknown")

	// ErrNoTransaction says that something needs the transaction of a store that has
	// none: see [Untransactional].
	ErrNoTransaction = errors.New("deduplicator: the store has no transaction")

	// ErrTxEnded says that the work committed or rolled back the transaction, which
	// is not its to end, or that it went on after a deadlock had undone it on MySQL.
	// What it committed, the claim included, is durable; its outputs are not stored.
	// An error of the work is wrapped too.
	ErrTxEnded = errors.New("deduplicator: the handler ended the transaction itself")

	// ErrClaimKept says that the work failed after it had committed the transaction
	// itself, on MySQL also by DDL, so that its claim is recorded: a copy would be a
	// duplicate. What it wrote until then is durable, its outputs are not stored.
	// Trying again can't help; the work's error is wrapped too.
	ErrClaimKept = errors.New("deduplicator: the handler failed after it had committed its transaction itself")
)

// ConflictError reports a message with the key of another message that was
// processed before and had different content. Nothing is durable when it is
// returned.
type ConflictError struct {
	Consumer string
	Key      string
	Stored   []byte // fingerprint of the message that was processed
	Got      []byte // fingerprint of this one
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("deduplicator: consumer %q has processed key %q with other content: fingerprint %x, now %x",
		e.Consumer, e.Key, e.Stored, e.Got)
}

// Is reports whether target is ErrConflict.
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }
