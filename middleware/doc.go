// Package middleware makes the effects of Watermill handlers happen once and in
// order per entity.
//
// [Chain] builds the middlewares of a router from links, outermost first:
//
//	WithObserver     what became of each delivery
//	WithPoisonQueue  parks messages that can't be processed
//	WithRetry        runs the rest again, with backoff, after an error
//	Deduplicate      one SQL transaction with the claim of the message's key
//	RejectReplayed   refuses copies and replaced producers by the producers' numbers
//	RejectStale      ignores events older than what their entity has seen
//	Sequence         or: processes an entity's events one by one, without a gap
//	Stamp            gives produced messages their numbers
//	Partition        gives produced messages their partition key
//
// Every link may be left out; the order is checked, since another one loses or
// repeats work. The handler reads its transaction with [Tx].
//
// Watermill's own package has the same name: import this one as "idempotent"
// where both are used. Do not add Watermill's Retry after this chain: it would try
// again inside the transaction of the attempt that failed, and commit what both
// attempts wrote.
package middleware
