package deduplicator

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"

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
	return sqldb.Script(schemas, c.dialect,
		map[string]string{"processed": c.processed, "produced": c.produced, "leases": c.leases, "attempts": c.attempts},
		map[string]string{"processed": "_processed_at", "produced": "_created_at", "attempts": "_updated_at"})
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
