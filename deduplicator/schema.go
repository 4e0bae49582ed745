package deduplicator

import (
	"context"
	"database/sql"
	"embed"
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
// options only [WithTables] matters. It returns [ErrInvalidOption].
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
	quote := c.dialect.Quote
	return strings.NewReplacer(
		"{processed}", quote(c.processed),
		"{processed_index}", quote(indexName(c.processed, "_processed_at")),
		"{produced}", quote(c.produced),
		"{produced_index}", quote(indexName(c.produced, "_created_at")),
	).Replace(string(text))
}

// indexName keeps within the 63 bytes that PostgreSQL has for a name.
func indexName(table, suffix string) string {
	base := sqldb.Base(table)
	return base[:min(len(base), 63-len(suffix))] + suffix
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
	if err := sqldb.CheckColumns(ctx, db, c.dialect, c.processed, hint,
		"consumer_name", "message_key", "processed_at", "fingerprint"); err != nil {
		return fmt.Errorf("%w: %w", ErrSchema, err)
	}
	if err := sqldb.CheckColumns(ctx, db, c.dialect, c.produced, hint,
		"consumer_name", "message_key", "ordinal", "topic", "uuid", "metadata", "payload", "created_at"); err != nil {
		return fmt.Errorf("%w: %w", ErrSchema, err)
	}
	return nil
}
