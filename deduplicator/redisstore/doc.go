// Package redisstore uses Redis, which is fast and forgets, in the two ways in which
// that does no harm.
//
// [Filter] stands before a store on a database and answers copies that Redis knows,
// so that they cost no transaction. It says "known duplicate" or nothing, so a Redis
// that is down, slow or empty costs speed and nothing else.
//
// [BestEffort] is a [deduplicator.Store] without a database, for work that may be done
// twice now and then: a cache to warm, a notification, a search index. Never use it
// for money or stock.
//
// # What BestEffort does not promise
//
// The conformance suite of package storetest states what a store promises. BestEffort
// passes it except for the following tests, by their names there. There is no
// transaction, so what the work has done stays when it fails, and is done again when
// the message comes again:
//
//   - B01 an error undoes everything and comes back as it was
//   - B87 a panic undoes everything and goes on
//   - Goexit undoes everything
//   - B86 a context that ends inside the work undoes everything
//   - B24 work that ignored a broken transaction is not committed
//   - work that ends the transaction is found out
//   - work that ends the transaction and fails is found out
//   - B18 a twin waits and runs when the first fails
//   - B31 copies of a first run that fails have one effect
//   - B28 a conflict with other transactions runs the work again
//   - B29 a conflict that stays comes back after bounded attempts
//
// It deletes what it knows after a time ([WithTTL]) and then takes a copy for new, and
// it counts no attempts:
//
//   - B101 a claim that is too old or of unknown age is refused
//   - a claim that always fails is refused in the end
//
// It refuses messages that the work returns, since nothing would keep them until they
// are published:
//
//   - B09 outputs come back with a duplicate as they were
//   - B10 a thousand outputs keep their order
//   - fifty copies at once get the outputs of the first
//   - outputs of an attempt that failed are not stored
//   - forgotten outputs do not come back, others do
//   - a claim that may be redelivered has the same outcomes
//
// Further, the work is done again when the process dies, or Redis fails, between the
// work and the note that it is done; when Redis loses its data: it evicts keys, fails
// over to a replica that lags, or restarts without its log (appendonly); and, at the
// same time as the first run, when that takes longer than its lease ([WithLease]).
//
// # The client
//
// Both take a client of github.com/redis/go-redis/v9 with
// redis.Options.ContextTimeoutEnabled: without it, go-redis goes on waiting for an
// answer when the context has ended. Closing the client is up to you. Keys in Redis
// are the namespace and, after a NUL each, the consumer and the message's key, these two
// as they are or, where they are long or not text, as a marked SHA-256.
package redisstore
