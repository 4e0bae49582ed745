// Package ledger is for the effects of a handler that its transaction can't undo: a
// payment, a shipping label, a mail.
//
// [Do] runs an [Effect] of a message, at most once or at least once as its [Rule]
// says, and returns its result again when the message is delivered again. What it
// knows is durable before and after the call, on a connection that is not the one of
// the handler's transaction:
//
//	planned    it certainly did not take place; also what has no row yet
//	started    its call may be under way
//	succeeded  it took place: the result is stored
//	failed     it did not and never will
//	unknown    nobody knows: the call's error did not say, or its process died
//
// An effect that is started belongs to the process that started it for the time of a
// lease, see [WithLease]. When the lease is over it is unknown. Each state is written
// only by whoever holds the effect's token, so a process that was paused meanwhile
// changes nothing.
//
// The rule of an effect says what to do while it is unknown: [RetryWithKey] for
// providers that recognise an idempotency key, [AskProvider] for those that can be
// asked, [AskOperator] for the others, [CallAgain] where a repetition does no harm.
// [Ledger.Unknown] and [Ledger.Resolve] are for the operator.
//
// [KeyFor] returns the idempotency key of an effect without a ledger.
//
// See docs/effects.md in the repository for how to choose, and for what happens when
// a process dies at each point.
package ledger
