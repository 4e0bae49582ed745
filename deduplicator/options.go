package deduplicator

import (
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [NewSQLStore].
const (
	DefaultProcessedTable = "processed_messages"
	DefaultProducedTable  = "produced_messages"
	DefaultClaimTimeout   = 5 * time.Second
	DefaultTxRetries      = 10
)

// MinClaimTimeout is the shortest claim timeout.
const MinClaimTimeout = 10 * time.Millisecond

// Option configures a [SQLStore].
type Option interface{ apply(*config) }

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

type config struct {
	dialect      Dialect
	processed    string
	produced     string
	claimTimeout time.Duration
	isolation    sql.IsolationLevel
	txRetries    int
}

func newConfig(dialect Dialect, opts []Option) (*config, error) {
	cfg := &config{
		dialect:      dialect,
		processed:    DefaultProcessedTable,
		produced:     DefaultProducedTable,
		claimTimeout: DefaultClaimTimeout,
		isolation:    sql.LevelReadCommitted,
		txRetries:    DefaultTxRetries,
	}
	if dialect == SQLite {
		cfg.isolation = sql.LevelSerializable
	}
	for _, opt := range opts {
		opt.apply(cfg)
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	return cfg, nil
}

func (c *config) validate() error {
	errs := []error{
		c.dialect.Validate(),
		sqldb.CheckTable("WithTables", c.processed),
		sqldb.CheckTable("WithTables", c.produced),
	}
	if c.processed == c.produced {
		errs = append(errs, fmt.Errorf("WithTables: both tables are %q", c.processed))
	}
	if c.claimTimeout < MinClaimTimeout {
		errs = append(errs, fmt.Errorf("WithClaimTimeout: %v is under the least, %v", c.claimTimeout, MinClaimTimeout))
	}
	if c.txRetries < 0 {
		errs = append(errs, fmt.Errorf("WithTxRetries: %d is negative", c.txRetries))
	}
	switch c.isolation {
	case sql.LevelReadCommitted, sql.LevelRepeatableRead:
		if c.dialect == SQLite {
			errs = append(errs, fmt.Errorf("WithIsolation: SQLite has only %v, not %v", sql.LevelSerializable, c.isolation))
		}
	case sql.LevelSerializable:
	default:
		errs = append(errs, fmt.Errorf("WithIsolation: %v is not one of %v, %v, %v", c.isolation,
			sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable))
	}
	return errors.Join(errs...)
}

// WithTables sets the names of the two tables, instead of
// [DefaultProcessedTable] and [DefaultProducedTable]. A name is letters, digits
// and underscores, optionally after a schema and a dot.
func WithTables(processed, produced string) Option {
	return optionFunc(func(c *config) { c.processed, c.produced = processed, produced })
}

// WithClaimTimeout sets how long a message waits while another transaction holds
// its key, instead of [DefaultClaimTimeout]. When it passes, Process returns
// [ErrInFlight] and the connection is free. MySQL and MariaDB round it up to
// whole seconds; on SQLite, where every writer waits for every other, the
// driver's busy timeout comes on top. Values under [MinClaimTimeout] are refused.
func WithClaimTimeout(d time.Duration) Option {
	return optionFunc(func(c *config) { c.claimTimeout = d })
}

// WithIsolation sets the isolation level of the transactions: read committed
// (the default), repeatable read or serializable. Above read committed the
// database refuses more work because of other transactions; it is run again, see
// [WithTxRetries]. SQLite knows only serializable.
func WithIsolation(level sql.IsolationLevel) Option {
	return optionFunc(func(c *config) { c.isolation = level })
}

// WithTxRetries sets how many times a transaction that the database undid because
// of another one (deadlock, serialization failure, lock timeout) is run again
// from its begin, after a pause of 5 ms that doubles up to 500 ms, with jitter.
// The default is [DefaultTxRetries]; 0 means never.
func WithTxRetries(n int) Option {
	return optionFunc(func(c *config) { c.txRetries = n })
}
