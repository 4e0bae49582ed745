// Package sqlshard runs Watermill on a SQL database so that all messages of one
// entity go through one shard, in order: an [ordering.Broker] on watermill-sql, for
// PostgreSQL, MySQL and MariaDB.
//
// A topic has a fixed number of shards, and a shard is a log: Publish gives its
// messages the next offsets, under a lock of the shard that lasts until its commit,
// so that they become visible in the order of their offsets and no reader can skip
// one that is committed late. Each consumer group keeps one acknowledged offset per
// shard, and locks it for as long as a message is being handled: one consumer per
// shard at a time, in any number of processes, without leases or clocks.
//
// The lock is held by watermill-sql's subscriber, in a transaction that does
// nothing else until the offset is written after the ack. The handler's transaction
// is another one, so what watermill-sql does on a nack (it delivers again within
// its transaction) and at the deadline (it commits what is there) can't touch the
// handler's work.
//
// What it can't do: a message needs at least two commits, one of the handler and
// one of the offset, and polling adds up to Config.PollInterval to an idle shard's
// first message. When the subscriber's connection is lost, its handler does not
// notice before its ack: another process may get the message meanwhile, waits at its
// key, and finds it processed.
package sqlshard

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/drain"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Broker is an [ordering.Broker] on a SQL database. It is safe for concurrent use.
type Broker struct {
	cfg        Config
	logger     watermill.LoggerAdapter
	subscriber *drain.Subscriber
	closeOnce  func() error

	mu     sync.Mutex // guards the rest
	closed bool
	shards map[string]int // by topic, of those that are known to exist
}

// Open checks cfg and the tables. A nil logger logs nothing. ctx bounds Open only.
//
// All problems of cfg are joined into one error that wraps [ErrInvalidConfig].
// Missing tables are [ErrSchema], which names them.
func Open(ctx context.Context, cfg Config, logger watermill.LoggerAdapter) (*Broker, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if err := checkSchema(ctx, cfg.DB, cfg.Dialect); err != nil {
		return nil, err
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	b := &Broker{cfg: cfg, logger: logger, shards: map[string]int{}}
	b.subscriber = drain.New(&subscriber{broker: b, topics: map[string]int{}}, cfg.DrainTimeout, ErrClosed)
	b.closeOnce = sync.OnceValue(b.shutdown)
	return b, nil
}

// Declare creates those of the topics that don't exist, with Config.Shards shards,
// and records Config.Group for all of them, so that [Broker.DeleteAcknowledged]
// keeps their messages for it. It returns a [ShardCountError] for a topic that
// exists with another count, and [ErrInvalidTopic]. It is safe to repeat and to run
// in several processes at a time.
func (b *Broker) Declare(ctx context.Context, topics ...string) error {
	for _, topic := range topics {
		if err := b.declare(ctx, topic); err != nil {
			return fmt.Errorf("sqlshard: declare topic %q: %w", topic, err)
		}
	}
	return nil
}

// Publisher returns the publisher of this Broker. Publish creates the topic, stamps
// the partition keys, and stores all messages in one transaction: on an error none
// is stored, but for [ErrOutcomeUnknown]. Its other errors are an
// [ordering.KeyError], [ErrInvalidTopic], [ErrInvalidMessage], [ErrClosed] and
// those of the database. Publishes to one shard wait for each other.
//
// It writes through a connection of Config.DB, so not in the transaction of a
// handler; for that there is deduplicator/outbox. Closing the publisher does
// nothing.
func (b *Broker) Publisher() message.Publisher { return publisher{b} }

// Subscriber returns the subscriber of this Broker in Config.Group; all calls return
// the same. A group's first subscription starts at the oldest message that is still
// there. A second Subscribe of an active topic returns [ErrSubscribed], a pool that
// is too small [ErrConnections].
//
// A message's offset is written right after its ack. A nacked message is delivered
// again after 100 ms, and its shard waits for it. When the subscription's context
// ends or the subscriber is closed, messages that are being handled keep a living
// context for up to Config.DrainTimeout.
func (b *Broker) Subscriber() message.Subscriber { return b.subscriber }

// Close drains and closes the subscriber. It returns an error if messages were still
// being handled after Config.DrainTimeout: they are delivered again. It takes up to
// 5 s longer when the database does not answer. Further calls return the same.
// Config.DB stays open.
func (b *Broker) Close() error { return b.closeOnce() }

func (b *Broker) shutdown() error {
	err := b.subscriber.Close() // handlers that finish meanwhile publish their outputs
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if err != nil {
		return fmt.Errorf("sqlshard: close: %w", err)
	}
	return nil
}

var topicName = regexp.MustCompile(`^[A-Za-z0-9\-$:._]{1,255}$`)

// known returns the number of shards of a topic that this Broker has seen, or 0.
func (b *Broker) known(topic string) (int, error) {
	if !topicName.MatchString(topic) {
		return 0, ErrInvalidTopic
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return 0, ErrClosed
	}
	return b.shards[topic], nil
}

// createTries bounds what create does when it finds nothing and can't insert.
const createTries = 10

// create makes topic exist and returns its number of shards.
func (b *Broker) create(ctx context.Context, topic string) (int, error) {
	for tries := 1; ; tries++ {
		count, err := b.count(ctx, topic)
		if err != nil || count > 0 {
			return count, err
		}
		// All rows in one statement, which fails as a whole when another process was
		// faster, whatever its number of shards, and on MySQL also as a deadlock of
		// those that waited for one that gave up: so look again.
		if err := b.insertShards(ctx, topic); err != nil && tries == createTries {
			return 0, err
		}
	}
}

// count returns the number of shards of topic, 0 if it does not exist.
func (b *Broker) count(ctx context.Context, topic string) (count int, err error) {
	if count, err = b.known(topic); err != nil || count > 0 {
		return count, err
	}
	query := b.cfg.Dialect.Rebind("SELECT COUNT(*) FROM sqlshard_shards WHERE topic = ?")
	if err := b.cfg.DB.QueryRowContext(ctx, query, topic).Scan(&count); err != nil || count == 0 {
		return 0, err
	}
	if b.cfg.Shards != 0 && count != b.cfg.Shards {
		return 0, &ShardCountError{Topic: topic, Have: count, Want: b.cfg.Shards}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shards[topic] = count
	return count, nil
}

func (b *Broker) insertShards(ctx context.Context, topic string) error {
	shards := b.cfg.Shards
	if shards == 0 {
		shards = DefaultShards
	}
	args := make([]any, 0, 2*shards)
	for shard := range shards {
		args = append(args, topic, shard)
	}
	query := "INSERT INTO sqlshard_shards (topic, shard, last_offset) VALUES " + strings.Repeat("(?, ?, 0), ", shards-1) + "(?, ?, 0)"
	_, err := b.cfg.DB.ExecContext(ctx, b.cfg.Dialect.Rebind(query), args...)
	return err
}

func (b *Broker) declare(ctx context.Context, topic string) error {
	shards, err := b.create(ctx, topic)
	if err != nil {
		return err
	}
	// An insert would wait for rows that are there and locked by running handlers.
	var recorded int
	query := b.cfg.Dialect.Rebind("SELECT COUNT(*) FROM sqlshard_groups WHERE consumer_group = ? AND topic = ?")
	if err := b.cfg.DB.QueryRowContext(ctx, query, b.cfg.Group, topic).Scan(&recorded); err != nil || recorded == shards {
		return err
	}
	args := make([]any, 0, 3*shards)
	for shard := range shards {
		args = append(args, b.cfg.Group, topic, shard)
	}
	query = "INSERT INTO sqlshard_groups (consumer_group, topic, shard, acked_offset) VALUES " +
		strings.Repeat("(?, ?, ?, 0), ", shards-1) + "(?, ?, ?, 0)"
	if b.cfg.Dialect == ordering.PostgreSQL {
		query += " ON CONFLICT DO NOTHING"
	} else {
		query += " ON DUPLICATE KEY UPDATE topic = VALUES(topic)"
	}
	return sqldb.Retry(ctx, b.cfg.PublishTimeout, func() error {
		_, err := b.cfg.DB.ExecContext(ctx, b.cfg.Dialect.Rebind(query), args...)
		return err
	})
}

// deleteBatch is how many messages one statement deletes.
const deleteBatch = 1000

// DeleteAcknowledged deletes those messages of the topics that every group has
// acknowledged that has declared or subscribed to them, and returns how many.
// Messages of a topic that no group has declared are kept. Without it the table only
// grows: run it from time to time, in any process. What was deleted before an error
// stays deleted.
func (b *Broker) DeleteAcknowledged(ctx context.Context, topics ...string) (int64, error) {
	var deleted int64
	for _, topic := range topics {
		shards, err := b.count(ctx, topic)
		for shard := 0; err == nil && shard < shards; shard++ {
			var n int64
			n, err = b.deleteShard(ctx, topic, shard)
			deleted += n
		}
		if err != nil {
			return deleted, fmt.Errorf("sqlshard: delete from topic %q: %w", topic, err)
		}
	}
	return deleted, nil
}

func (b *Broker) deleteShard(ctx context.Context, topic string, shard int) (deleted int64, err error) {
	bounds := b.cfg.Dialect.Rebind(`SELECT COALESCE((SELECT MIN(message_offset) FROM sqlshard_messages WHERE topic = ? AND shard = ?), 0),
		COALESCE((SELECT MIN(acked_offset) FROM sqlshard_groups WHERE topic = ? AND shard = ?), 0)`)
	var first, acked int64
	if err := b.cfg.DB.QueryRowContext(ctx, bounds, topic, shard, topic, shard).Scan(&first, &acked); err != nil || first == 0 {
		return 0, err
	}
	remove := b.cfg.Dialect.Rebind("DELETE FROM sqlshard_messages WHERE topic = ? AND shard = ? AND message_offset BETWEEN ? AND ?")
	for ; first <= acked; first += deleteBatch {
		err := sqldb.Retry(ctx, b.cfg.PublishTimeout, func() error {
			result, err := b.cfg.DB.ExecContext(ctx, remove, topic, shard, first, min(acked, first+deleteBatch-1))
			if err != nil {
				return err
			}
			n, err := result.RowsAffected()
			deleted += n
			return err
		})
		if err != nil {
			return deleted, err
		}
	}
	return deleted, nil
}
