// Package deduplicator remembers which messages a consumer has processed, in
// the same SQL transaction as the consumer's own writes.
//
// A [Store] runs a message's work at most once per consumer and key: it opens a
// transaction, claims the key with its first statement, calls the work with the
// transaction in the context, stores what the work wants to publish, and
// commits. Whatever goes wrong before the commit undoes all of it. [SQLStore] is
// the Store on database/sql for PostgreSQL, MySQL, MariaDB and SQLite.
//
// [WithRetention] bounds how long claims are kept: a [Cleaner] deletes older ones,
// and messages that are older are refused. A [Relay] publishes stored outputs that
// nobody else publishes.
//
// Most programs use it through the Deduplicate middleware of package middleware.
package deduplicator
