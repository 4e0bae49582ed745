// Package sqldb is what the SQL parts of this module share: dialects, table
// names, keys as they are stored, error classes and the transaction in the
// context. It knows no driver.
package sqldb

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"
)

// Dialect names a family of SQL databases.
type Dialect string

// The dialects. MySQL is also MariaDB.
const (
	PostgreSQL Dialect = "postgresql"
	MySQL      Dialect = "mysql"
	SQLite     Dialect = "sqlite"
)

// Validate returns an error for anything but the three dialects.
func (d Dialect) Validate() error {
	switch d {
	case PostgreSQL, MySQL, SQLite:
		return nil
	}
	return fmt.Errorf("dialect %q is unknown, must be %q, %q or %q", string(d), PostgreSQL, MySQL, SQLite)
}

// Rebind turns the ? of a query into $1, $2, … where the dialect wants that.
// The query must not contain a ? that is not a placeholder.
func (d Dialect) Rebind(query string) string {
	if d != PostgreSQL {
		return query
	}
	var b strings.Builder
	n := 0
	for _, r := range query {
		if r == '?' {
			n++
			fmt.Fprintf(&b, "$%d", n)
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
}

var tableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?$`)

// CheckTable returns an error if name is not a plain table name, optionally
// with a schema before it, of letters, digits and underscores.
func CheckTable(option, name string) error {
	if !tableName.MatchString(name) {
		return fmt.Errorf("%s: table name %q must be letters, digits and underscores, 1 to 63 of them, optionally after a schema and a dot", option, name)
	}
	return nil
}

var columnName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)

// CheckColumn returns an error if name is not a plain column name of letters,
// digits and underscores.
func CheckColumn(name string) error {
	if !columnName.MatchString(name) {
		return fmt.Errorf("column name %q must be letters, digits and underscores, 1 to 63 of them", name)
	}
	return nil
}

// Quote quotes a name that CheckTable or CheckColumn accepts.
func (d Dialect) Quote(name string) string {
	q := `"`
	if d == MySQL {
		q = "`"
	}
	return q + strings.ReplaceAll(name, ".", q+"."+q) + q
}

// Base returns the last part of a table name.
func Base(name string) string {
	return name[strings.LastIndexByte(name, '.')+1:]
}

// MaxKeyBytes is the width of the key columns.
const MaxKeyBytes = 255

const hashMark = "sha256:"

// EncodeKey returns key as it is stored in a text or binary column of
// MaxKeyBytes: unchanged, or as a marked SHA-256 when it is too long, holds a
// NUL or is not UTF-8. A key that begins with the mark is hashed too, so that no
// key can be taken for the hash of another one.
func EncodeKey(key string) string {
	if len(key) <= MaxKeyBytes && utf8.ValidString(key) &&
		strings.IndexByte(key, 0) < 0 && !strings.HasPrefix(key, hashMark) {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return hashMark + hex.EncodeToString(sum[:])
}

// TxKey is the key of the transaction in a context.
type TxKey struct{}

// ContextWithTx returns ctx with the transaction in it.
func ContextWithTx(ctx context.Context, tx *sql.Tx) context.Context {
	return context.WithValue(ctx, TxKey{}, tx)
}

// TxFromContext returns the transaction of ctx, if there is one.
func TxFromContext(ctx context.Context) (*sql.Tx, bool) {
	tx, ok := ctx.Value(TxKey{}).(*sql.Tx)
	return tx, ok
}

type noTxKey struct{}

// ContextWithoutTx returns ctx with the mark of a handler that will never have a
// transaction.
func ContextWithoutTx(ctx context.Context) context.Context {
	return context.WithValue(ctx, noTxKey{}, true)
}

// WithoutTx reports whether ctx has the mark of [ContextWithoutTx].
func WithoutTx(ctx context.Context) bool { return ctx.Value(noTxKey{}) != nil }

type uncountedKey struct{}

// ContextUncounted returns ctx for a claim with a key that is never claimed again, of
// which a count of attempts would be left behind.
func ContextUncounted(ctx context.Context) context.Context {
	return context.WithValue(ctx, uncountedKey{}, true)
}

// Uncounted reports whether ctx is one of [ContextUncounted].
func Uncounted(ctx context.Context) bool { return ctx.Value(uncountedKey{}) != nil }

// CheckColumns returns an error that names each of table's columns that can't
// be read. hint says how to create what is missing.
func CheckColumns(ctx context.Context, db *sql.DB, d Dialect, table, hint string, columns ...string) error {
	probe := func(column string) error {
		rows, err := db.QueryContext(ctx, "SELECT "+column+" FROM "+d.Quote(table)+" WHERE 1 = 0")
		if err != nil {
			return err
		}
		return errors.Join(rows.Err(), rows.Close())
	}
	if err := probe("1"); err != nil {
		return fmt.Errorf("table %s: %w", table, d.Explain(err, hint))
	}
	var errs []error
	for _, column := range columns {
		if err := probe(column); err != nil {
			errs = append(errs, fmt.Errorf("table %s, column %s: %w", table, column, d.Explain(err, hint)))
		}
	}
	return errors.Join(errs...)
}

// Ping waits for db to answer, so that an unreachable server is told from a
// missing table. ctx bounds the wait even for a driver that does not look at it
// while it connects, as lib/pq opened by its name.
func Ping(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(ctx, pingLimit)
	defer cancel()
	answer := make(chan error, 1)
	go func() {
		// SQLite may refuse to open a connection while others open theirs.
		answer <- Retry(ctx, pingLimit, func() error { return db.PingContext(ctx) })
	}()
	var err error
	select {
	case err = <-answer:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("database does not answer: %w", err)
	}
	return nil
}

// Apply runs the statements of script, which are separated by semicolons, so
// that several instances can do it at once. They must be of the form "create if
// it does not exist".
func Apply(ctx context.Context, db *sql.DB, d Dialect, script string) error {
	if err := Ping(ctx, db); err != nil {
		return err
	}
	return d.Explain(Retry(ctx, applyLimit, func() error { return apply(ctx, db, d, script) }), "")
}

// pingLimit is how long a server may take for its first answer, whatever the
// context allows.
const pingLimit = 30 * time.Second

// applyLimit is how long Apply gives way to other transactions, which SQLite
// refuses to wait for when its busy timeout is short.
const applyLimit = 30 * time.Second

func apply(ctx context.Context, db *sql.DB, d Dialect, script string) error {
	if d != PostgreSQL {
		// MySQL commits each statement anyway; on SQLite a transaction may take
		// the write lock, and wait for a handler, though nothing is to be done.
		return each(script, func(stmt string) error {
			_, err := db.ExecContext(ctx, stmt)
			return err
		})
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	// CREATE IF NOT EXISTS fails when two sessions run it at the same time.
	if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(7482510394471)"); err != nil {
		return err
	}
	err = each(script, func(stmt string) error {
		exists, err := indexExists(ctx, tx, stmt)
		if err != nil || exists {
			return err
		}
		_, err = tx.ExecContext(ctx, stmt)
		return err
	})
	if err != nil {
		return err
	}
	return tx.Commit()
}

// each calls do for each statement of script.
func each(script string, do func(stmt string) error) error {
	for stmt := range strings.SplitSeq(script, ";") {
		if strings.TrimSpace(stmt) == "" {
			continue
		}
		if err := do(stmt); err != nil {
			return err
		}
	}
	return nil
}

var createIndex = regexp.MustCompile(`^\s*CREATE INDEX IF NOT EXISTS "([^"]+)" ON (\S+)`)

// indexExists reports whether stmt would create an index that PostgreSQL has.
// CREATE INDEX IF NOT EXISTS locks the table before it looks: it would wait for
// every handler that is running, and all new ones would wait for it.
func indexExists(ctx context.Context, tx *sql.Tx, stmt string) (exists bool, err error) {
	names := createIndex.FindStringSubmatch(stmt)
	if names == nil {
		return false, nil
	}
	err = tx.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"+
		" WHERE c.relname = $1 AND i.indrelid = to_regclass($2))", names[1], names[2]).Scan(&exists)
	return exists, err
}
