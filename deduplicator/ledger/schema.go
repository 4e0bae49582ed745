package ledger

import (
	"context"
	"database/sql"
	"embed"
	"fmt"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

//go:embed schema/*.sql
var schemas embed.FS

// Schema returns the SQL statements that create the ledger's table and index, for a
// migration tool of your own. They change nothing that exists. Of the options only
// [WithTable] matters. It returns [ErrInvalidOption].
func Schema(dialect deduplicator.Dialect, opts ...Option) (string, error) {
	cfg, err := newConfig(dialect, opts)
	if err != nil {
		return "", err
	}
	return cfg.schema(), nil
}

func (c *config) schema() string {
	return sqldb.Script(schemas, c.dialect, map[string]string{"effects": c.table}, map[string]string{"effects": "_first_tried_at"})
}

// Migrate creates the ledger's table where it is missing. It can be run by many
// instances at once and at every start. It returns [ErrInvalidOption] or the
// database's error.
func Migrate(ctx context.Context, db *sql.DB, dialect deduplicator.Dialect, opts ...Option) error {
	cfg, err := newConfig(dialect, opts)
	if err != nil {
		return err
	}
	if db == nil {
		return fmt.Errorf("%w: db is nil", ErrInvalidOption)
	}
	if err := sqldb.Apply(ctx, db, dialect, cfg.schema()); err != nil {
		return fmt.Errorf("ledger: migrate: %w", err)
	}
	return nil
}

func (c *config) check(ctx context.Context, db *sql.DB) error {
	if err := sqldb.CheckColumns(ctx, db, c.dialect, c.table, "create it with ledger.Migrate, or run the statements that ledger.Schema returns",
		"consumer_name", "message_key", "effect", "epoch", "idempotency_key", "state", "token", "lease_until", "attempts",
		"arguments", "result", "error", "first_tried_at"); err != nil {
		return fmt.Errorf("%w: %w", ErrSchema, err)
	}
	return nil
}
