package deduplicator

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Claim says which message is to be processed for whom.
type Claim struct {
	// Consumer is the scope of the key: consumers that both must see a message
	// have different names. It must not be empty.
	Consumer string

	// Key identifies the message within the scope. Keys are compared byte for
	// byte; any length and any bytes are fine, but not the empty key.
	Key string

	// Fingerprint identifies the content of the message, so that the same key
	// with other content is noticed. Nil switches the check off.
	Fingerprint []byte

	// Time is when the message was first published, by any clock that is right to
	// about half an hour. The zero time means that it is not known. Only a store
	// that deletes claims looks at it: see [WithRetention].
	Time time.Time

	// Redelivered says that the message may have been processed before. It is a
	// hint: the store may then look for the claim before it opens a transaction.
	Redelivered bool
}

// Validate returns [ErrInvalidClaim] for a claim without consumer or key, and for one
// with a fingerprint of more than 255 bytes.
func (c Claim) Validate() error {
	switch {
	case c.Consumer == "":
		return fmt.Errorf("%w: no consumer", ErrInvalidClaim)
	case c.Key == "":
		return fmt.Errorf("%w: no key", ErrInvalidClaim)
	case len(c.Fingerprint) > sqldb.MaxKeyBytes:
		return fmt.Errorf("%w: fingerprint has %d bytes, the limit is %d", ErrInvalidClaim, len(c.Fingerprint), sqldb.MaxKeyBytes)
	}
	return nil
}

// conflicts reports whether a claim is stored with other content.
func (c Claim) conflicts(stored []byte) bool {
	return len(c.Fingerprint) > 0 && len(stored) > 0 && !bytes.Equal(c.Fingerprint, stored)
}

// Output is a message that the work wants to be published once its transaction
// is committed.
type Output struct {
	Topic    string
	UUID     string
	Metadata map[string]string
	Payload  []byte
}

// Outcome says what Process found.
type Outcome uint8

const (
	// Processed: the work ran and its transaction is committed.
	Processed Outcome = iota + 1
	// Duplicate: the key was claimed by a transaction that is committed already.
	// The work has no effect.
	Duplicate
)

// Result is what Process returns without an error.
type Result struct {
	Outcome Outcome

	// Outputs are, for a duplicate, those outputs of the first run that were not
	// forgotten yet, in their order and with their UUIDs: it is not known whether
	// they were published, so the caller publishes them again.
	Outputs []Output
}

// Work is the business side of a claim. The context that it gets carries the
// transaction; it returns what to publish after the commit. It may be called
// again, in a new transaction, when the database undid the attempt because of
// another transaction, so it must not keep state from one call to the next. It
// is never called twice at the same time for one Process.
type Work func(ctx context.Context) ([]Output, error)

// Store runs work once per claim. Implementations are safe for concurrent use;
// package storetest has the tests that they must pass.
type Store interface {
	// Process runs work in a transaction that also records the claim and work's
	// outputs, unless the claim is recorded already.
	//
	// When it returns an error nothing is durable, except for [ErrOutcomeUnknown],
	// [ErrTxEnded] and [ErrClaimKept]. An error of work comes back as it was. Others are:
	// [ErrInvalidClaim]; [ErrNoTime] and [ErrTooOld], of a store that deletes
	// claims, before a transaction is opened; [ErrTooManyAttempts], of a store that
	// counts them; [ErrConflict], the key is recorded with another
	// fingerprint; [ErrInFlight], another transaction held the key for longer
	// than the store waits; [ErrUnavailable], the database failed before work was
	// called; [ErrNotCommitted], the commit was refused; [ErrTxEnded] and
	// [ErrClaimKept], work ended the transaction itself.
	//
	// A panic or Goexit of work rolls back and goes on; a panic after work has
	// committed the transaction itself goes on with an [ErrClaimKept]. The context governs the
	// whole transaction: when it ends before the commit, everything rolls back.
	Process(ctx context.Context, claim Claim, work Work) (Result, error)

	// Forget deletes the stored outputs of claims whose messages have been
	// acknowledged, so published. Claims without stored outputs are skipped.
	Forget(ctx context.Context, claims ...Claim) error
}

// Untransactional is a Store whose work runs in no transaction: what work has done
// stays when it fails, the claim and the work can come apart, and nothing keeps
// outputs. Package middleware refuses it together with whatever needs more.
type Untransactional interface {
	Store
	Untransactional()
}

// ContextWithTx returns a context that carries tx, as the context of [Work] does.
// It is for implementations of Store; handlers read the transaction with the Tx
// function of package middleware.
func ContextWithTx(ctx context.Context, tx *sql.Tx) context.Context {
	return sqldb.ContextWithTx(ctx, tx)
}

type claimKey struct{}

// ContextWithClaim returns a context that says which claim is worked on, for package
// ledger. The context that a [SQLStore] gives to [Work] says it already, and so does
// that of a handler in package middleware, whatever its store.
func ContextWithClaim(ctx context.Context, claim Claim) context.Context {
	return context.WithValue(ctx, claimKey{}, &claim)
}

// ClaimFromContext returns the claim that is worked on, if there is one.
func ClaimFromContext(ctx context.Context) (Claim, bool) {
	claim, ok := ctx.Value(claimKey{}).(*Claim)
	if !ok {
		return Claim{}, false
	}
	return *claim, true
}

// workContext is a context with a transaction and its claim, in one allocation.
type workContext struct {
	context.Context
	tx    *sql.Tx
	claim Claim
}

func (c *workContext) Value(key any) any {
	switch key.(type) {
	case sqldb.TxKey:
		return c.tx
	case claimKey:
		return &c.claim
	}
	return c.Context.Value(key)
}
