// Package write has the writes that are idempotent by nature: run again with the
// same arguments, each changes nothing.
//
//   - [Table.Insert]: an element of a set, inserted if it is absent
//   - [Table.Upsert]: a row with a state
//   - [Table.UpsertNewer]: an absolute value with a version, of which the newest wins
//   - [Table.Transition]: from one state to the next, once
//
// What they have in common is that they say what is to be, not what is to change:
// "the balance is 90, as of version 7" instead of "subtract 10". Where a handler can
// say it that way, its effect is right even for copies that nothing else recognises,
// such as one that is published under another key or after its key was deleted.
// A relative change needs the Deduplicate middleware of package middleware.
//
// Each is one statement on the handler's transaction, for PostgreSQL, MySQL, MariaDB
// and SQLite. Transition needs a second one, a SELECT, only to say why it changed
// nothing: no single statement can on all of them.
//
// The tables are yours. The key columns must be those of the primary key or of a
// unique index: that is what finds a row, so its column types and collations say which
// keys are equal. On MySQL and MariaDB the usual collations take "a", "A" and "a "
// for one key; give keys a binary collation or VARBINARY there, so that they are
// compared byte for byte. The same goes for states.
package write
