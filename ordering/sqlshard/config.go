package sqlshard

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Defaults of the [Config] fields of the same name.
const (
	DefaultShards         = 8
	DefaultPollInterval   = 500 * time.Millisecond
	DefaultAckDeadline    = 30 * time.Minute
	DefaultDrainTimeout   = 30 * time.Second
	DefaultPublishTimeout = 30 * time.Second
)

// MinPollInterval is the shortest poll interval.
const MinPollInterval = 10 * time.Millisecond

// MaxShards is the largest number of shards.
const MaxShards = 1000

// Config says how [Open] connects. DB, Dialect and Group are required, the zero
// value of every other field is its default.
type Config struct {
	// DB has the tables of this package: see [Migrate]. It may be the database of
	// the handlers, but should be a pool of its own: each shard that is being
	// handled keeps one of its connections, in a transaction of its own, while the
	// handler works with another. Subscribe refuses a pool that is limited to less
	// than one connection per subscribed shard and two more. It is not closed.
	DB *sql.DB

	// Dialect is that of DB: [ordering.PostgreSQL] or [ordering.MySQL] (also
	// MariaDB). SQLite has one writer, and watermill-sql does not support it.
	Dialect ordering.Dialect

	// Group is the consumer group of all subscriptions, 1 to 255 bytes. Each group
	// gets every message once; the processes of one group share the shards.
	Group string

	// Shards is the number of shards of a topic, 1 to [MaxShards]. A topic that does
	// not exist is created with it, 0 creates [DefaultShards]. A topic that exists
	// must have exactly that many, 0 accepts any: another count would move keys to
	// other shards.
	Shards int

	// Key returns the partition key of messages that don't carry one yet. With nil,
	// messages without [ordering.PartitionKeyMetadata] are refused.
	Key ordering.KeyFunc

	// PollInterval is how long a shard waits when it has nothing to deliver, and
	// after an error of the database; [MinPollInterval] or more, 0 is
	// [DefaultPollInterval]. Each shard of each subscription asks once per interval.
	PollInterval time.Duration

	// AckDeadline is how long a handler may have a message. When it passes, the
	// message's context ends, so that its transaction is rolled back, and the message
	// is delivered again, here or in another process. 0 is [DefaultAckDeadline].
	AckDeadline time.Duration

	// PublishTimeout bounds one Publish call; 0 is [DefaultPublishTimeout].
	PublishTimeout time.Duration

	// DrainTimeout is how long closing waits for running handlers; 0 is
	// [DefaultDrainTimeout].
	DrainTimeout time.Duration
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field    *time.Duration
		fallback time.Duration
	}{
		{&c.PollInterval, DefaultPollInterval},
		{&c.AckDeadline, DefaultAckDeadline},
		{&c.PublishTimeout, DefaultPublishTimeout},
		{&c.DrainTimeout, DefaultDrainTimeout},
	} {
		if *d.field == 0 {
			*d.field = d.fallback
		}
	}
	return c
}

func (c Config) validate() error {
	var problems []error
	require := func(ok bool, field string, value any, bound string) {
		if !ok {
			problems = append(problems, fmt.Errorf("%w: %s is %v, must be %s", ErrInvalidConfig, field, value, bound))
		}
	}
	require(c.DB != nil, "DB", "nil", "a database")
	if err := checkDialect(c.Dialect); err != nil {
		problems = append(problems, err)
	}
	require(c.Group != "" && len(c.Group) <= sqldb.MaxKeyBytes && storable(c.Group), "Group", fmt.Sprintf("%q", c.Group),
		"a consumer group of 1 to 255 bytes, UTF-8 without NUL")
	require(c.Shards >= 0 && c.Shards <= MaxShards, "Shards", c.Shards, fmt.Sprintf("1 to %d, or 0 for the default", MaxShards))
	require(c.PollInterval == 0 || c.PollInterval >= MinPollInterval, "PollInterval", c.PollInterval,
		fmt.Sprintf("%s or more, or 0 for the default", MinPollInterval))
	for _, d := range []struct {
		field string
		value time.Duration
	}{{"AckDeadline", c.AckDeadline}, {"PublishTimeout", c.PublishTimeout}, {"DrainTimeout", c.DrainTimeout}} {
		require(d.value >= 0, d.field, d.value, "positive, or 0 for the default")
	}
	return errors.Join(problems...)
}

// publisherName is how the Router knows the publisher of this group's Brokers.
func (c Config) publisherName() string { return "sqlshard.publisher(" + c.Group + ")" }

// subscriberName is how the Router knows the subscriber of this group's Brokers.
func (c Config) subscriberName() string { return "sqlshard.subscriber(" + c.Group + ")" }

func checkDialect(d ordering.Dialect) error {
	switch err := d.Validate(); {
	case err != nil:
		return fmt.Errorf("%w: Dialect: %w", ErrInvalidConfig, err)
	case d == ordering.SQLite:
		return fmt.Errorf("%w: Dialect is %s, must be %s or %s: watermill-sql does not support SQLite, where the lock of one shard would stop every handler",
			ErrInvalidConfig, d, ordering.PostgreSQL, ordering.MySQL)
	}
	return nil
}

// storable reports whether text columns of both databases keep s as it is.
func storable(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

//go:embed schema/*.sql
var schemas embed.FS

const schemaHint = "create it with sqlshard.Migrate, or run the statements that sqlshard.Schema returns"

// Schema returns the SQL statements that create the tables of this package, for a
// migration tool of your own: sqlshard_shards, sqlshard_messages and
// sqlshard_groups. They change nothing that exists. It returns [ErrInvalidConfig].
func Schema(dialect ordering.Dialect) (string, error) {
	if err := checkDialect(dialect); err != nil {
		return "", err
	}
	text, err := schemas.ReadFile("schema/" + string(dialect) + ".sql")
	if err != nil {
		panic(err) // each dialect that is valid here has its file
	}
	return string(text), nil
}

// Migrate creates the tables of this package where they are missing. It can be run
// by many instances at once and at every start. It returns [ErrInvalidConfig] or
// the database's error.
func Migrate(ctx context.Context, db *sql.DB, dialect ordering.Dialect) error {
	script, err := Schema(dialect)
	if db == nil {
		err = errors.Join(fmt.Errorf("%w: db is nil", ErrInvalidConfig), err)
	}
	if err != nil {
		return err
	}
	if err := sqldb.Apply(ctx, db, dialect, script); err != nil {
		return fmt.Errorf("sqlshard: migrate: %w", err)
	}
	return nil
}

// checkSchema returns an error that names what is missing.
func checkSchema(ctx context.Context, db *sql.DB, dialect ordering.Dialect) error {
	if err := sqldb.Ping(ctx, db); err != nil {
		return fmt.Errorf("sqlshard: %w", err)
	}
	err := errors.Join(
		sqldb.CheckColumns(ctx, db, dialect, "sqlshard_shards", schemaHint, "topic", "shard", "last_offset"),
		sqldb.CheckColumns(ctx, db, dialect, "sqlshard_messages", schemaHint, "topic", "shard", "message_offset", "uuid", "metadata", "payload"),
		sqldb.CheckColumns(ctx, db, dialect, "sqlshard_groups", schemaHint, "consumer_group", "topic", "shard", "acked_offset"))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrSchema, err)
	}
	return nil
}
