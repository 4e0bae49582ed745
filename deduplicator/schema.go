package deduplicator

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Dialect names the SQL database of a store.
type Dialect = sqldb.Dialect

// The dialects. MySQL is also MariaDB.
const (
	PostgreSQL = sqldb.PostgreSQL
	MySQL      = sqldb.MySQL
	SQLite     = sqldb.SQLite
)

//go:embed schema/*.sql
var schemas embed.FS

// Schema returns the SQL statements that create the store's tables and indexes,
// for a migration tool of your own. They change nothing that exists. Of the
// options only those that name tables matter. It returns [ErrInvalidOption].
func Schema(dialect Dialect, opts ...Option) (string, error) {
	cfg, err := newConfig(dialect, opts)
	if err != nil {
		return "", err
	}
	return cfg.schema(), nil
}

func (c *config) schema() string {
	text, err := schemas.ReadFile("schema/" + string(c.dialect) + ".sql")
	if err != nil {
		panic(err) // each dialect that validate accepts has its file
	}
	return strings.NewReplacer(
		"{processed}", c.dialect.Quote(c.processed),
		"{processed_base}", c.dialect.Quote(sqldb.Base(c.processed)),
		"{processed_index}", c.index(c.processed, "_processed_at"),
		"{produced}", c.dialect.Quote(c.produced),
		"{produced_base}", c.dialect.Quote(sqldb.Base(c.produced)),
		"{produced_index}", c.index(c.produced, "_created_at"),
		"{leases}", c.dialect.Quote(c.leases),
		"{attempts}", c.dialect.Quote(c.attempts),
		"{attempts_base}", c.dialect.Quote(sqldb.Base(c.attempts)),
		"{attempts_index}", c.index(c.attempts, "_updated_at"),
	).Replace(string(text))
}

// index returns the quoted name of a table's index. SQLite wants the schema
// there, the others with the table.
func (c *config) index(table, suffix string) string {
	base := sqldb.Base(table)
	schema := strings.TrimSuffix(table, base)
	if c.dialect != SQLite {
		schema = ""
	}
	return c.dialect.Quote(schema + indexName(base, suffix))
}

// indexName keeps within the 63 bytes that PostgreSQL has for a name. Two tables
// must not get one name: the second index would be taken for the first.
func indexName(base, suffix string) string {
	if len(base)+len(suffix) > 63 {
		sum := sha256.Sum256([]byte(base))
		suffix = "_" + hex.EncodeToString(sum[:4]) + suffix
		base = base[:63-len(suffix)]
	}
	return base + suffix
}

// Migrate creates the store's tables where they are missing. It can be run by
// many instances at once and at every start. It returns [ErrInvalidOption] or
// the database's error.
func Migrate(ctx context.Context, db *sql.DB, dialect Dialect, opts ...Option) error {
	cfg, err := newConfig(dialect, opts)
	if err != nil {
		return err
	}
	if db == nil {
		return fmt.Errorf("%w: db is nil", ErrInvalidOption)
	}
	if err := sqldb.Apply(ctx, db, dialect, cfg.schema()); err != nil {
		return fmt.Errorf("deduplicator: migrate: %w", err)
	}
	return nil
}

func (c *config) check(ctx context.Context, db *sql.DB) error {
	const hint = "create it with deduplicator.Migrate, or run the statements that deduplicator.Schema returns"
	if err := errors.Join(
		sqldb.CheckColumns(ctx, db, c.dialect, c.processed, hint,
			"consumer_name", "message_key", "processed_at", "fingerprint"),
		sqldb.CheckColumns(ctx, db, c.dialect, c.produced, hint,
			"consumer_name", "message_key", "ordinal", "topic", "uuid", "metadata", "payload", "created_at"),
		sqldb.CheckColumns(ctx, db, c.dialect, c.leases, hint, "consumer_name", "token", "expires_at"),
		sqldb.CheckColumns(ctx, db, c.dialect, c.attempts, hint, "consumer_name", "message_key", "attempts", "updated_at"),
	); err != nil {
		return fmt.Errorf("%w: %w", ErrSchema, err)
	}
	return nil
}
