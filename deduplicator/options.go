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
	DefaultLeasesTable    = "message_leases"
	DefaultAttemptsTable  = "message_attempts"
	DefaultClaimTimeout   = 5 * time.Second
	DefaultTxRetries      = 10
	DefaultKnownKeys      = 16_384
)

// MinClaimTimeout is the shortest claim timeout.
const MinClaimTimeout = 10 * time.Millisecond

const (
	// MinRetention is the shortest retention.
	MinRetention = time.Hour

	// DefaultRetention is the value for [WithRetention] when you have no better
	// one. It is not set by default: claims are kept for ever.
	DefaultRetention = 30 * 24 * time.Hour
)

// Option configures a [SQLStore].
type Option interface{ apply(*config) }

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

type config struct {
	dialect      Dialect
	processed    string
	produced     string
	leases       string
	attempts     string
	claimTimeout time.Duration
	isolation    sql.IsolationLevel
	txRetries    int
	knownKeys    int
	retention    *time.Duration // nil: claims are kept for ever
	maxAttempts  *int           // nil: attempts are not counted
}

func newConfig(dialect Dialect, opts []Option) (*config, error) {
	cfg := &config{
		dialect:      dialect,
		processed:    DefaultProcessedTable,
		produced:     DefaultProducedTable,
		leases:       DefaultLeasesTable,
		attempts:     DefaultAttemptsTable,
		claimTimeout: DefaultClaimTimeout,
		isolation:    sql.LevelReadCommitted,
		txRetries:    DefaultTxRetries,
		knownKeys:    DefaultKnownKeys,
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
		sqldb.CheckTable("WithLeasesTable", c.leases),
		sqldb.CheckTable("WithAttemptsTable", c.attempts),
		sqldb.CheckDuration("WithClaimTimeout", c.claimTimeout, MinClaimTimeout),
	}
	if c.processed == c.produced {
		errs = append(errs, fmt.Errorf("WithTables: both tables are %q", c.processed))
	}
	if c.leases == c.processed || c.leases == c.produced {
		errs = append(errs, fmt.Errorf("WithLeasesTable: %q is the name of another table", c.leases))
	}
	if c.attempts == c.processed || c.attempts == c.produced || c.attempts == c.leases {
		errs = append(errs, fmt.Errorf("WithAttemptsTable: %q is the name of another table", c.attempts))
	}
	if c.txRetries < 0 {
		errs = append(errs, fmt.Errorf("WithTxRetries: %d is negative", c.txRetries))
	}
	if c.knownKeys < 0 {
		errs = append(errs, fmt.Errorf("WithKnownKeys: %d is negative", c.knownKeys))
	}
	if c.retention != nil {
		errs = append(errs, sqldb.CheckDuration("WithRetention", *c.retention, MinRetention))
	}
	if c.maxAttempts != nil && *c.maxAttempts < 1 {
		errs = append(errs, fmt.Errorf("WithMaxAttempts: %d is under the least, 1; leave it out for no limit", *c.maxAttempts))
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

// WithLeasesTable sets the name of the table in which a [Relay] and a [Cleaner] say what
// they are at, instead of [DefaultLeasesTable]. The form is that of [WithTables].
func WithLeasesTable(name string) Option {
	return optionFunc(func(c *config) { c.leases = name })
}

// WithAttemptsTable sets the name of the table for [WithMaxAttempts], instead of
// [DefaultAttemptsTable]. The form is that of [WithTables].
func WithAttemptsTable(name string) Option {
	return optionFunc(func(c *config) { c.attempts = name })
}

// WithRetention sets how long claims are kept, so that a [Cleaner] may delete
// older ones. By default they are kept for ever. [DefaultRetention] is a good
// value; one under [MinRetention] or over 50 years is refused.
//
// What has been deleted can't tell a copy from a new message. So a message that
// was first published longer ago than d is refused with [ErrTooOld], processed
// before or not, and one whose [Claim] has no Time with [ErrNoTime]: package
// middleware parks them. Choose d longer than the longest time after which a
// message may still come, from a dead letter queue for example.
//
// All processes that use the tables must have a retention, none longer than that
// of the cleaners. So when you raise it, give the cleaners' store the new value
// first, and the others once the difference has passed: until then the claims of
// messages that they would accept are gone.
func WithRetention(d time.Duration) Option {
	return optionFunc(func(c *config) { c.retention = &d })
}

// WithKnownKeys sets how many claims the store remembers in memory that it saw
// committed and that have no outputs left, instead of [DefaultKnownKeys]. A copy
// of such a message is a duplicate without asking the database.
// Those asked for least recently are dropped. 0 switches it off.
//
// While a claim is remembered, deleting its row by hand does not make the store
// process the message again; nor does a database that lost commits, as one that
// was restored from a backup. Start the process again, or set 0.
func WithKnownKeys(n int) Option {
	return optionFunc(func(c *config) { c.knownKeys = n })
}

// WithMaxAttempts refuses a claim with [ErrTooManyAttempts] after n attempts that
// did not process it, so that package middleware parks its message. It is for
// brokers that don't count deliveries, as Kafka: there a message that kills the
// process comes back for ever. By default attempts are not counted. n is 1 or
// more, and must be above the number of attempts that one delivery makes: Chain of
// package middleware refuses the store otherwise.
//
// Each call of Process is an attempt, except those that end because the database
// is unavailable, because the key is in flight, or because ctx was cancelled, as
// subscribers do when they close or lose the message. The count is committed before
// the transaction, which costs a statement each time, and is forgotten when the
// message is processed, parked or refused: one that is published again from the
// poison queue has n new attempts. Copies that come at the same moment count too.
func WithMaxAttempts(n int) Option {
	return optionFunc(func(c *config) { c.maxAttempts = &n })
}

// WithClaimTimeout sets how long a message waits while another transaction holds
// its key, instead of [DefaultClaimTimeout]. When it passes, Process returns
// [ErrInFlight] and the connection is free: back in the pool, or on PostgreSQL and
// MySQL closed, since there the driver gives up the statement. MySQL's server notices
// that only when its own innodb_lock_wait_timeout (50 s) has passed or the key is
// free. Connections whose own lock_timeout (PostgreSQL) or innodb_lock_wait_timeout
// (MySQL) is set in their DSN to no more than d leave the waiting to the server, which
// is cheaper, and come back to the pool. MariaDB rounds the timeout up to whole seconds;
// on SQLite, where every writer waits for every other, the driver's busy timeout comes
// on top. Values under [MinClaimTimeout] are refused.
func WithClaimTimeout(d time.Duration) Option {
	return optionFunc(func(c *config) { c.claimTimeout = d })
}

// WithIsolation sets the isolation level of the transactions: read committed
// (the default), repeatable read or serializable. Above read committed the
// database refuses more work because of other transactions; it is run again, see
// [WithTxRetries]. SQLite knows only serializable. The store reads outside of
// transactions as well, so [NewSQLStore] refuses connections that are at read
// uncommitted by themselves. On MySQL, connections that are at the level by
// themselves (transaction_isolation in their DSN) save a round trip per message.
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
