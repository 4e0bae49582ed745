// Package kafkashard runs Watermill on Kafka so that all messages of one entity
// go through one partition, in order: an [ordering.Broker] on watermill-kafka.
//
// The partition of a key is the one that the Java client chooses (murmur2), or
// another client (Config.Partitioner), so that producers in other languages can
// share a topic; the producer is
// idempotent and waits for all in-sync replicas; a record that no message can
// be made of is delivered as it is, instead of stopping the group.
//
// A member that joins or leaves ends the session of all members, and with it the
// contexts of running handlers: their messages come again. Config.Sarama can set
// static membership, with which a restart within the session timeout need not do that.
//
// What it can't do: sarama allows one request in flight per broker with
// idempotence, where Java allows five, so publish many messages in one call. A
// message that was published twice by the caller, or whose publish failed after
// Kafka had stored it, is stored twice: deduplicate where it is handled.
package kafkashard

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/drain"
)

const leaderPoll = 50 * time.Millisecond

// Broker is an [ordering.Broker] on Kafka. It is safe for concurrent use.
type Broker struct {
	cfg        Config
	config     *sarama.Config
	logger     watermill.LoggerAdapter
	conn       *connection
	subscriber *drain.Subscriber

	mu       sync.Mutex // guards declared
	declared map[string]struct{}

	transaction chan struct{} // holds a token while a transaction runs; guards fatal
	fatal       error         // after which sarama's producer does nothing any more

	sending   sync.RWMutex  // held by senders, and by who closes the producer
	closed    chan struct{} // closed when nothing may be sent any more
	closeOnce func() error
}

// Open checks cfg and connects. A nil logger logs nothing. ctx bounds Open only.
//
// All problems of cfg are joined into one error that wraps [ErrInvalidConfig].
// Brokers that don't answer within Config.DialTimeout are an error that names
// their addresses.
func Open(ctx context.Context, cfg Config, logger watermill.LoggerAdapter) (*Broker, error) {
	cfgErr := cfg.validate()
	cfg = cfg.withDefaults()
	config, err := cfg.saramaConfig()
	if err := errors.Join(cfgErr, err); err != nil {
		return nil, err
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.DialTimeout)
	defer cancel()
	conn, err := connect(ctx, cfg.Brokers, config)
	if err != nil {
		return nil, fmt.Errorf("kafkashard: connect to %s: %w", strings.Join(cfg.Brokers, ", "), err)
	}
	b := &Broker{
		cfg:      cfg,
		config:   config,
		logger:   logger,
		conn:     conn,
		declared: map[string]struct{}{},

		transaction: make(chan struct{}, 1),
		closed:      make(chan struct{}),
	}
	b.subscriber = drain.New(&subscriber{broker: b, topics: map[string]struct{}{}}, cfg.DrainTimeout, ErrClosed)
	b.closeOnce = sync.OnceValue(b.shutdown)
	return b, nil
}

// Declare creates those of the topics that don't exist, with Config.Shards
// partitions, and waits until their partitions have leaders. It returns a
// [ShardCountError] for a topic that exists with another count. A topic that
// this Broker has declared before costs no request.
func (b *Broker) Declare(ctx context.Context, topics ...string) error {
	for _, topic := range topics {
		if err := b.declare(ctx, topic); err != nil {
			return fmt.Errorf("kafkashard: declare topic %q: %w", topic, err)
		}
	}
	return nil
}

// Publisher returns the publisher of this Broker. Publish declares the topic,
// stamps the partition keys, and returns nil when all in-sync replicas have all
// messages. Its errors are an [ordering.KeyError] (nothing was sent) and a
// [PublishError], which says what is stored. After a failed message no later one
// of the call is sent.
//
// A call ends within Config.PublishTimeout. What it had sent by then may still
// be stored, before anything that is published later. Closing the publisher
// does nothing.
func (b *Broker) Publisher() message.Publisher { return publisher{b} }

// Subscriber returns the subscriber of this Broker in Config.Group; all calls
// return the same. A group's first subscription starts at the oldest message.
// A second Subscribe of an active topic returns [ErrSubscribed].
//
// A message's offset is committed after its ack, once a second and on close. A
// nacked message is delivered again after 100 ms, and its partition waits for
// it. When the subscription's context ends or the subscriber is closed, messages
// that are being handled keep a living context for up to Config.DrainTimeout.
//
// When a rebalance begins, the contexts of messages that are being handled end,
// and these messages are delivered again to whom the partition then belongs.
func (b *Broker) Subscriber() message.Subscriber { return b.subscriber }

// Close drains and closes the subscriber, then closes the connections. It
// returns an error if messages were still being handled after
// Config.DrainTimeout: they are delivered again. It takes up to two times
// Config.DialTimeout longer than the drain when the brokers don't answer, and
// then leaves the rest to the client's own timeouts. Further calls return the
// same.
func (b *Broker) Close() error { return b.closeOnce() }

func (b *Broker) shutdown() error {
	// Handlers that finish during the drain publish their outputs.
	drained := within(b.cfg.DrainTimeout+b.cfg.DialTimeout, b.subscriber.Close)
	close(b.closed)
	return errors.Join(drained, within(b.cfg.DialTimeout, func() error {
		b.sending.Lock()
		defer b.sending.Unlock()
		return b.conn.close()
	}))
}

// within bounds a step of Close: with brokers that don't answer, sarama's own
// timeouts and retries were seen to add up to more than six minutes.
func within(d time.Duration, step func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), d) //nolint:forbidigo // Close has no context
	defer cancel()
	if err := bounded(ctx, step); err != nil {
		return fmt.Errorf("kafkashard: close: %w", err)
	}
	return nil
}

func (b *Broker) isClosed() bool {
	select {
	case <-b.closed:
		return true
	default:
		return false
	}
}

func (b *Broker) declare(ctx context.Context, topic string) error {
	if b.isClosed() {
		return ErrClosed
	}
	b.mu.Lock()
	_, done := b.declared[topic]
	b.mu.Unlock()
	if done {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.DialTimeout)
	defer cancel()
	if err := bounded(ctx, func() error { return b.ensure(ctx, topic) }); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.declared[topic] = struct{}{}
	return nil
}

// ensure makes topic exist with leaders and checks its partition count. It asks
// before it creates, because that needs fewer permissions.
func (b *Broker) ensure(ctx context.Context, topic string) error {
	for created := false; ; {
		count, err := b.partitions(topic)
		switch {
		case err == nil && b.cfg.Shards != 0 && count != b.cfg.Shards:
			return &ShardCountError{Topic: topic, Have: count, Want: b.cfg.Shards}
		case err == nil:
			return nil
		case errors.Is(err, sarama.ErrUnknownTopicOrPartition) && !created:
			if err := b.create(topic); err != nil {
				return err
			}
			created = true
			continue
		case !errors.Is(err, sarama.ErrUnknownTopicOrPartition) && !errors.Is(err, sarama.ErrLeaderNotAvailable):
			return err
		}
		select {
		case <-time.After(leaderPoll):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

// partitions returns how many partitions topic has, if all have a leader.
func (b *Broker) partitions(topic string) (int, error) {
	topics, err := b.conn.admin.DescribeTopics([]string{topic})
	if err != nil {
		return 0, err
	}
	if len(topics) != 1 {
		return 0, sarama.ErrIncompleteResponse
	}
	if topics[0].Err != sarama.ErrNoError {
		return 0, topics[0].Err
	}
	for _, p := range topics[0].Partitions {
		if p.Leader < 0 {
			return 0, sarama.ErrLeaderNotAvailable
		}
	}
	return len(topics[0].Partitions), nil
}

func (b *Broker) create(topic string) error {
	shards := b.cfg.Shards
	if shards == 0 {
		shards = DefaultShards
	}
	err := b.conn.admin.CreateTopic(topic, &sarama.TopicDetail{
		NumPartitions:     int32(shards),
		ReplicationFactor: int16(b.cfg.ReplicationFactor), //nolint:gosec // checked by validate
	}, false)
	if errors.Is(err, sarama.ErrTopicAlreadyExists) {
		return nil
	}
	return err
}

// connection is what a Broker shares among its topics. watermill-kafka opens
// one of its own per subscription.
type connection struct {
	client   sarama.Client
	admin    sarama.ClusterAdmin
	producer sarama.SyncProducer
}

// connect opens a connection, or returns when ctx ends: sarama takes no context,
// and its own timeouts add up over addresses and retries.
func connect(ctx context.Context, brokers []string, config *sarama.Config) (*connection, error) {
	var conn *connection
	opened := make(chan error)
	go func() {
		var err error
		conn, err = open(brokers, config)
		select {
		case opened <- err:
		case <-ctx.Done():
			if err == nil {
				_ = conn.close() // nobody waits for it any more
			}
		}
	}()
	select {
	case err := <-opened:
		return conn, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func open(brokers []string, config *sarama.Config) (*connection, error) {
	client, err := sarama.NewClient(brokers, config)
	if err != nil {
		return nil, err
	}
	conn := &connection{client: client}
	if conn.admin, err = sarama.NewClusterAdminFromClient(client); err == nil {
		conn.producer, err = sarama.NewSyncProducerFromClient(client)
	}
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return conn, nil
}

func (c *connection) close() error {
	return errors.Join(c.producer.Close(), c.client.Close())
}

// bounded returns f's error, or ctx's when that ends first; f then goes on by
// itself, for sarama takes no context.
func bounded(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
