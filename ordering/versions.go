package ordering

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Dialect names a SQL database.
type Dialect = sqldb.Dialect

// The dialects. MySQL is also MariaDB.
const (
	PostgreSQL = sqldb.PostgreSQL
	MySQL      = sqldb.MySQL
	SQLite     = sqldb.SQLite
)

// DefaultVersionsTable is the table of [Versions].
const DefaultVersionsTable = "entity_versions"

// VersionResult says what became of an event's version.
type VersionResult uint8

const (
	// Applied: the entity had no version or a lower one, and has this one now.
	Applied VersionResult = iota + 1
	// Stale: the entity has this version or a higher one already.
	Stale
)

// Event is one change of an entity as a consumer sees it.
type Event struct {
	Consumer string
	Entity   string
	Version  int64

	// Fingerprint identifies the event's content, so that the same version with
	// other content is noticed. Nil switches the check off.
	Fingerprint []byte
}

// Versions remembers the highest version that each consumer has applied of each
// entity. It is safe for concurrent use.
type Versions struct {
	dialect Dialect
	advance sqldb.Statement
	current string
}

// VersionsOption configures [Versions].
type VersionsOption interface{ apply(*versionsConfig) }

type versionsConfig struct {
	dialect Dialect
	table   string
	sequenceTables
	producerTables
}

type versionsOptionFunc func(*versionsConfig)

func (f versionsOptionFunc) apply(c *versionsConfig) { f(c) }

// WithVersionsTable sets the table's name, instead of [DefaultVersionsTable]:
// letters, digits and underscores, optionally after a schema and a dot.
func WithVersionsTable(name string) VersionsOption {
	return versionsOptionFunc(func(c *versionsConfig) { c.table = name })
}

func newVersionsConfig(dialect Dialect, opts []VersionsOption) (*versionsConfig, error) {
	cfg := &versionsConfig{dialect: dialect, table: DefaultVersionsTable, sequenceTables: defaultSequenceTables, producerTables: defaultProducerTables}
	for _, opt := range opts {
		opt.apply(cfg)
	}
	if err := errors.Join(dialect.Validate(), sqldb.CheckTable("WithVersionsTable", cfg.table),
		cfg.sequenceTables.validate(), cfg.producerTables.validate()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	return cfg, nil
}

const schemaHint = "create it with ordering.Migrate, or run the statements that ordering.Schema returns"

//go:embed schema/*.sql
var schemas embed.FS

// Schema returns the SQL statements that create the tables of this package, for
// a migration tool of your own. They change nothing that exists. It returns
// [ErrInvalidOption].
func Schema(dialect Dialect, opts ...VersionsOption) (string, error) {
	cfg, err := newVersionsConfig(dialect, opts)
	if err != nil {
		return "", err
	}
	return cfg.schema(), nil
}

func (c *versionsConfig) schema() string {
	return sqldb.Script(schemas, c.dialect, map[string]string{
		"versions": c.table, "sequences": c.sequences, "parked": c.parked,
		"producers": c.producers, "streams": c.streams, "partitioning": c.partitioning,
	}, nil)
}

// Migrate creates the tables of this package where they are missing. It can be
// run by many instances at once and at every start. It returns
// [ErrInvalidOption] or the database's error.
func Migrate(ctx context.Context, db *sql.DB, dialect Dialect, opts ...VersionsOption) error {
	cfg, err := newVersionsConfig(dialect, opts)
	if err != nil {
		return err
	}
	if db == nil {
		return fmt.Errorf("%w: db is nil", ErrInvalidOption)
	}
	if err := sqldb.Apply(ctx, db, dialect, cfg.schema()); err != nil {
		return fmt.Errorf("ordering: migrate: %w", err)
	}
	return nil
}

// NewVersions returns the versions that are kept in db, the database of the
// handlers' transactions. It checks that the table is there: see [Migrate] and
// [Schema]. ctx bounds that.
//
// It returns [ErrInvalidOption], [ErrSchema], which names what is missing and
// how to create it, or the error of a database that does not answer.
func NewVersions(ctx context.Context, db *sql.DB, dialect Dialect, opts ...VersionsOption) (*Versions, error) {
	cfg, err := newVersionsConfig(dialect, opts)
	if db == nil {
		err = errors.Join(fmt.Errorf("%w: db is nil", ErrInvalidOption), err)
	}
	if err != nil {
		return nil, err
	}
	if err := checkTable(ctx, db, dialect, cfg.table, "consumer_name", "entity", "version", "fingerprint", "updated_at"); err != nil {
		return nil, err
	}
	v := &Versions{dialect: dialect}
	v.advance.Text, v.current = cfg.queries()
	if err := sqldb.Prepare(ctx, db, dialect, &v.advance); err != nil {
		return nil, fmt.Errorf("ordering: %w", err)
	}
	return v, nil
}

// staleMark is what the MySQL statement reports as insert id for a stale version.
const staleMark = 1

func (c *versionsConfig) queries() (advance, current string) {
	table := c.dialect.Quote(c.table)
	insert := "INSERT INTO " + table + " (consumer_name, entity, version, fingerprint, updated_at) VALUES (?, ?, ?, ?, " + c.dialect.Now() + ")"
	onConflict := " ON CONFLICT (consumer_name, entity) DO UPDATE SET version = excluded.version," +
		" fingerprint = excluded.fingerprint, updated_at = excluded.updated_at WHERE " + c.dialect.Quote(sqldb.Base(c.table)) + ".version < excluded.version"
	switch c.dialect {
	case PostgreSQL, SQLite:
		advance = insert + onConflict
	case MySQL:
		// The count is 1 for an insert and 2 for an update, but for a row that
		// stays as it is 0 or, with clientFoundRows, 1. LAST_INSERT_ID(expr) tells
		// that case (MySQL manual, "Information Functions"). The assignments run
		// from left to right, so version comes last.
		advance = insert + " ON DUPLICATE KEY UPDATE" +
			" fingerprint = IF(version < VALUES(version), VALUES(fingerprint), fingerprint)," +
			" updated_at = IF(version < VALUES(version), VALUES(updated_at), updated_at)," +
			" version = IF(version < VALUES(version), VALUES(version), version + 0 * LAST_INSERT_ID(1))"
	}
	current = "SELECT version, fingerprint FROM " + table + " WHERE consumer_name = ? AND entity = ?"
	if c.dialect == MySQL {
		// The snapshot of a transaction at repeatable read may be older than the row
		// that the insert met and locked.
		current += " FOR UPDATE"
	}
	return c.dialect.Rebind(advance), c.dialect.Rebind(current)
}

// ApplyTx makes event's version the entity's version in tx if it is higher than
// the one that the entity has, with one conditional write. Until tx ends no other
// transaction can apply an event of this entity. It neither commits nor rolls
// back.
//
// It returns [Applied] or [Stale]; a [VersionConflictError] for the same version
// with another fingerprint; or the database's error.
func (v *Versions) ApplyTx(ctx context.Context, tx *sql.Tx, event Event) (VersionResult, error) {
	if event.Version < 0 {
		return 0, fmt.Errorf("%w: %d is negative", ErrInvalidVersion, event.Version)
	}
	consumer, entity := sqldb.EncodeKey(event.Consumer), sqldb.EncodeKey(event.Entity)
	result, err := v.advance.ExecTx(ctx, tx, consumer, entity, event.Version, event.Fingerprint)
	if err != nil {
		return 0, fmt.Errorf("ordering: apply version: %w", err)
	}
	applied, err := v.applied(result)
	if err != nil {
		return 0, fmt.Errorf("ordering: apply version: %w", err)
	}
	if applied {
		return Applied, nil
	}

	var version int64
	var fingerprint []byte
	if err := tx.QueryRowContext(ctx, v.current, consumer, entity).Scan(&version, &fingerprint); err != nil {
		return 0, fmt.Errorf("ordering: read version: %w", err)
	}
	if version == event.Version && len(fingerprint) > 0 && len(event.Fingerprint) > 0 && string(fingerprint) != string(event.Fingerprint) {
		return 0, &VersionConflictError{Consumer: event.Consumer, Entity: event.Entity, Version: version}
	}
	return Stale, nil
}

func (v *Versions) applied(result sql.Result) (bool, error) {
	rows, err := result.RowsAffected()
	if err != nil || v.dialect != MySQL {
		return rows == 1, err
	}
	if rows == 2 {
		return true, nil
	}
	mark, err := result.LastInsertId()
	return rows == 1 && mark != staleMark, err
}
