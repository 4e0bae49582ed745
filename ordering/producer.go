package ordering

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cespare/xxhash/v2"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [WithProducerTables].
const (
	DefaultProducersTable       = "producers"
	DefaultProducerStreamsTable = "producer_streams"
	DefaultPartitioningTable    = "topic_partitioning"
)

const maxEpoch = math.MaxUint32

// conflictLimit is how long a short transaction gives way to others.
const conflictLimit = 5 * time.Second

type producerTables struct{ producers, streams, partitioning string }

var defaultProducerTables = producerTables{DefaultProducersTable, DefaultProducerStreamsTable, DefaultPartitioningTable}

func (t producerTables) validate() error {
	return errors.Join(
		sqldb.CheckTable("WithProducerTables: producers", t.producers),
		sqldb.CheckTable("WithProducerTables: streams", t.streams),
		sqldb.CheckTable("WithProducerTables: partitioning", t.partitioning),
	)
}

// ProducerTablesOption is what [WithProducerTables] returns: an option of
// [NewProducer], [NewWindows], [RecordPartitioning], [Schema] and [Migrate].
type ProducerTablesOption struct{ tables producerTables }

func (o ProducerTablesOption) apply(c *versionsConfig)         { c.producerTables = o.tables }
func (o ProducerTablesOption) applyProducer(c *producerConfig) { c.tables = o.tables }
func (o ProducerTablesOption) applyWindows(c *windowsConfig)   { c.tables = o.tables }

// WithProducerTables sets the names of the tables of [Producer], [Windows] and
// [RecordPartitioning], instead of [DefaultProducersTable],
// [DefaultProducerStreamsTable] and [DefaultPartitioningTable]: letters, digits
// and underscores, optionally after a schema and a dot.
func WithProducerTables(producers, streams, partitioning string) ProducerTablesOption {
	return ProducerTablesOption{producerTables{producers, streams, partitioning}}
}

// ProducerOption configures [NewProducer].
type ProducerOption interface{ applyProducer(*producerConfig) }

type producerOptionFunc func(*producerConfig)

func (f producerOptionFunc) applyProducer(c *producerConfig) { f(c) }

type producerConfig struct {
	tables      producerTables
	streams     int // of a topic; 0 is one for each key
	partitioner Partitioner
	errs        []error
}

// WithStreams numbers the messages of a topic in n streams, chosen by partitioner
// from the partition key, instead of in one stream for each key.
//
// The messages of a stream must travel through one shard, in order: otherwise a
// message of an earlier epoch that is still on its way in another shard is
// fenced, and [RefuseGaps] sees gaps where there are none. So n and partitioner
// must be those of a Kafka topic's partitions. On RabbitMQ, where the broker's
// ring decides, leave it out.
func WithStreams(n int, partitioner Partitioner) ProducerOption {
	return producerOptionFunc(func(c *producerConfig) {
		c.streams, c.partitioner = n, partitioner
		if n < 1 {
			c.errs = append(c.errs, fmt.Errorf("WithStreams: %d is under the least, 1", n))
		}
		if err := partitioner.Validate(); err != nil {
			c.errs = append(c.errs, fmt.Errorf("WithStreams: %w", err))
		}
	})
}

// Producer is a publisher's identity: a name that outlives restarts, and an epoch
// that each start raises. It numbers messages per stream, so that [Windows] can
// tell a message that was sent twice and one that comes from a process that has
// been replaced. That is what Kafka does with its idempotent producer, for
// brokers that have none, and beyond one producer session.
//
// A Producer is safe for concurrent use. It keeps a counter of about 100 bytes for
// each stream that it has used.
type Producer struct {
	config producerConfig
	db     *sql.DB
	query  string // the name's present epoch
	name   string
	epoch  uint32
	gone   atomic.Bool // replaced

	mu      sync.Mutex // guards streams
	streams map[string]*stream
}

// stream is a sequence of numbers.
type stream struct {
	name string

	// turn is held from the assignment of a number until the publish with it has
	// ended, so that messages are sent in the order of their numbers.
	turn sync.Mutex
	last uint64 // guarded by turn
}

// NewProducer takes the next epoch of name in db. From now on consumers refuse
// what an earlier Producer of that name publishes, see [FencedError]: a process
// that was restarted, or that runs twice by mistake, has one successor. Processes
// that are meant to publish side by side need different names.
//
// name is 1 to [MaxKeyLength] bytes of UTF-8. The tables must be there: see
// [Migrate] and [Schema]. ctx bounds the call. It returns [ErrInvalidOption],
// [ErrSchema], or the database's error.
func NewProducer(ctx context.Context, db *sql.DB, dialect Dialect, name string, opts ...ProducerOption) (*Producer, error) {
	cfg := producerConfig{tables: defaultProducerTables}
	for _, opt := range opts {
		opt.applyProducer(&cfg)
	}
	errs := append(cfg.errs, dialect.Validate(), cfg.tables.validate())
	if err := checkName(name); err != nil {
		errs = append(errs, fmt.Errorf("producer name %w", err))
	}
	if db == nil {
		errs = append(errs, errors.New("db is nil"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if err := checkTable(ctx, db, dialect, cfg.tables.producers, "name", "epoch", "updated_at"); err != nil {
		return nil, err
	}
	table := dialect.Quote(cfg.tables.producers)
	p := &Producer{
		config: cfg, db: db, name: name, streams: map[string]*stream{},
		query: dialect.Rebind("SELECT epoch FROM " + table + " WHERE name = ?"),
	}
	raise := "INSERT INTO " + table + " (name, epoch, updated_at) VALUES (?, 1, " + dialect.Now() + ") "
	if dialect == MySQL {
		raise += "ON DUPLICATE KEY UPDATE epoch = epoch + 1, updated_at = VALUES(updated_at)"
	} else {
		raise += "ON CONFLICT (name) DO UPDATE SET epoch = " + dialect.Quote(sqldb.Base(cfg.tables.producers)) +
			".epoch + 1, updated_at = excluded.updated_at"
	}
	err := sqldb.Retry(ctx, conflictLimit, func() error { return p.takeEpoch(ctx, dialect.Rebind(raise)) })
	if err != nil {
		return nil, fmt.Errorf("ordering: next epoch of producer %q: %w", name, err)
	}
	return p, nil
}

// takeEpoch raises the epoch and reads it in the same transaction, which has the
// row locked.
func (p *Producer) takeEpoch(ctx context.Context, raise string) error {
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	if _, err := tx.ExecContext(ctx, raise, sqldb.EncodeKey(p.name)); err != nil {
		return err
	}
	var epoch int64
	if err := tx.QueryRowContext(ctx, p.query, sqldb.EncodeKey(p.name)).Scan(&epoch); err != nil {
		return err
	}
	if epoch < 1 || epoch > maxEpoch {
		return fmt.Errorf("epoch %d is not from 1 to %d", epoch, uint32(maxEpoch))
	}
	p.epoch = uint32(epoch)
	return tx.Commit()
}

// Name returns the producer's name.
func (p *Producer) Name() string { return p.name }

// Epoch returns the producer's epoch, 1 or more.
func (p *Producer) Epoch() uint32 { return p.epoch }

// Check asks the database whether another Producer has taken a later epoch of
// this name. It returns [ErrReplaced] then, and from that moment Publish and
// Stamp do so too; or the database's error, which changes nothing.
//
// Publish does not ask by itself, because it may run inside a handler's
// transaction, which must not wait for a second connection: call Check once in a
// while to stop a replaced process early. Without it consumers refuse its
// messages.
func (p *Producer) Check(ctx context.Context) error {
	var epoch int64
	err := p.db.QueryRowContext(ctx, p.query, sqldb.EncodeKey(p.name)).Scan(&epoch)
	if err != nil {
		return fmt.Errorf("ordering: epoch of producer %q: %w", p.name, err)
	}
	if epoch > int64(p.epoch) {
		p.gone.Store(true)
	}
	return p.replaced()
}

func (p *Producer) replaced() error {
	if p.gone.Load() {
		return fmt.Errorf("%w: name %q, epoch %d", ErrReplaced, p.name, p.epoch)
	}
	return nil
}

// Publisher returns pub with the partition key (see [StampKey]) and a number
// stamped on every message. Use it around the publisher of a broker or an outbox.
//
// A message that this Producer's name has numbered before keeps its number: so
// publish the same message again when Publish has failed, which consumers accept
// once. If it is not published again, its number stays missing: a gap. Messages
// with the number of another producer, or with metadata copied from another
// message, get a new one.
//
// The publishes of a stream wait for each other, so that its numbers are sent in
// their order; those of different streams do not. Publish returns a [KeyError] or
// [ErrReplaced], then nothing was sent, or pub's error.
func (p *Producer) Publisher(pub message.Publisher, key KeyFunc) message.Publisher {
	return numberingPublisher{pub, p, key}
}

type numberingPublisher struct {
	message.Publisher
	producer *Producer
	key      KeyFunc
}

func (n numberingPublisher) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if err := StampKey(topic, msg, n.key); err != nil {
			return err
		}
	}
	return n.producer.number(topic, messages, func() error { return n.Publisher.Publish(topic, messages...) })
}

// Stamp numbers messages for topic without publishing them, for messages that are
// stored first. They must carry their partition key. It returns a [KeyError] or
// [ErrReplaced], and has changed nothing then.
func (p *Producer) Stamp(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if reason := CheckKey(msg.Metadata.Get(PartitionKeyMetadata)); reason != "" {
			return &KeyError{Topic: topic, UUID: msg.UUID, Reason: reason}
		}
	}
	return p.number(topic, messages, func() error { return nil })
}

// number gives messages their numbers and calls send, in the turn of their
// streams.
func (p *Producer) number(topic string, messages []*message.Message, send func() error) error {
	if err := p.replaced(); err != nil {
		return err
	}
	streams := make([]*stream, len(messages)) // nil for a message that keeps its number
	for i, msg := range messages {
		stamp, own := p.own(msg)
		switch {
		case !own:
			streams[i] = p.stream(topic, msg.Metadata.Get(PartitionKeyMetadata))
		case max(stamp.Epoch, stamp.Sender) > p.epoch:
			return fmt.Errorf("%w: name %q, epoch %d", ErrReplaced, p.name, p.epoch)
		}
	}
	turns := slices.DeleteFunc(slices.Clone(streams), func(s *stream) bool { return s == nil })
	slices.SortFunc(turns, func(a, b *stream) int { return strings.Compare(a.name, b.name) }) // or two calls could wait for each other
	for _, s := range slices.Compact(turns) {
		s.turn.Lock()
		defer s.turn.Unlock()
	}
	for i, msg := range messages {
		stamp, own := p.own(msg) // again: a message may be twice in one call
		switch {
		case !own:
			streams[i].last++
			Stamp{Producer: p.name, Epoch: p.epoch, Stream: streams[i].name, Sequence: streams[i].last}.set(msg)
		case stamp.Epoch < p.epoch:
			stamp.Sender = p.epoch
			stamp.set(msg)
		}
	}
	return send()
}

// own returns the number that this or an earlier Producer of the name gave msg.
func (p *Producer) own(msg *message.Message) (Stamp, bool) {
	stamp, numbered, err := ParseStamp(msg)
	return stamp, err == nil && numbered && stamp.Producer == p.name
}

func (p *Producer) stream(topic, key string) *stream {
	name := p.config.stream(topic, key)
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.streams[name]
	if !ok {
		s = &stream{name: name}
		p.streams[name] = s
	}
	return s
}

// stream is the name of a message's stream: topic and shard, or a hash of topic
// and key, which is short for any of them.
func (c producerConfig) stream(topic, key string) string {
	if c.streams > 0 {
		return sqldb.EncodeKey(topic + "/" + strconv.Itoa(c.partitioner.Shard(key, c.streams)))
	}
	return strconv.FormatUint(xxhash.Sum64String(EntityParts(topic, key)), 16)
}

// checkTable tells an unreachable server from a missing table.
func checkTable(ctx context.Context, db *sql.DB, dialect Dialect, table string, columns ...string) error {
	if err := sqldb.Ping(ctx, db); err != nil {
		return fmt.Errorf("ordering: %w", err)
	}
	if err := sqldb.CheckColumns(ctx, db, dialect, table, schemaHint, columns...); err != nil {
		return fmt.Errorf("%w: %w", ErrSchema, err)
	}
	return nil
}
