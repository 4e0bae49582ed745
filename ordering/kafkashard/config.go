package kafkashard

import (
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"time"

	"github.com/IBM/sarama"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Defaults of the [Config] fields of the same name.
const (
	DefaultShards         = 8
	DefaultDialTimeout    = 10 * time.Second
	DefaultDrainTimeout   = 30 * time.Second
	DefaultPublishTimeout = 30 * time.Second
)

// Config says how [Open] connects. Brokers and Group are required, the zero
// value of every other field is its default.
type Config struct {
	// Brokers are the addresses to start from, each host:port.
	Brokers []string

	// Group is the consumer group of all subscriptions. Each group gets every
	// message once; the processes of one group share the partitions.
	Group string

	// Shards is the number of partitions of a topic, 1 or more. A topic that
	// does not exist is created with it, 0 creates [DefaultShards]. A topic
	// that exists must have exactly that many, 0 accepts any: another count
	// would move keys to other partitions. Publish refuses with a ShardCountError
	// when partitions are added later.
	Shards int

	// Partitioner places keys on partitions; the zero value is
	// [ordering.Murmur2Partitioner], as in the Java client. The others are for
	// topics that clients with another default write to. All producers of a topic
	// must have the same: see [ordering.RecordPartitioning].
	Partitioner ordering.Partitioner

	// TransactionalID, if not empty, makes each Publish one Kafka transaction: all
	// of its messages become visible, or none. Kafka keeps the id over restarts: a
	// Broker that opens with it ends what another one left unfinished, and fences
	// that one, whose publishes fail from then on with [ErrFenced]. So each process
	// needs an id of its own.
	//
	// It does not cover what is read, nor the database: a Publish whose outcome is
	// unknown may be stored twice when it is repeated. Publishes wait for each
	// other and take three requests more. A process that dies in a Publish delays
	// what others have written to the same partitions by up to
	// Producer.Transaction.Timeout, one minute or a little more than
	// PublishTimeout, or until its successor opens. After an error that the client
	// calls fatal every further Publish returns it: open a new Broker.
	TransactionalID string

	// ReplicationFactor is used for topics that are created; 0 and -1 take the
	// brokers' default.replication.factor (KIP-464).
	ReplicationFactor int

	// Key returns the partition key of messages that don't carry one yet. With
	// nil, messages without [ordering.PartitionKeyMetadata] are refused.
	Key ordering.KeyFunc

	// DialTimeout bounds Open, and each topic of Declare; 0 is
	// [DefaultDialTimeout].
	DialTimeout time.Duration

	// PublishTimeout bounds one Publish call; 0 is [DefaultPublishTimeout].
	PublishTimeout time.Duration

	// DrainTimeout is how long closing waits for running handlers; 0 is
	// [DefaultDrainTimeout].
	DrainTimeout time.Duration

	// Sarama, if not nil, adjusts the client's configuration: TLS, SASL, client
	// id, session timeouts, static membership (the group instance id is extended
	// by the topic, because each topic has a member). Open fails if it leaves a
	// value that contradicts the ordering or delivery guarantees.
	//
	// Set Producer.MaxMessageBytes (1 MiB by default) above what other producers of
	// the consumed topics may send, and no topic's max.message.bytes below it: a
	// message that Kafka never takes can't be put into a poison queue, or comes back
	// with the message whose handler returned it, and its partition waits for ever.
	// A handler that returns one above Producer.MaxMessageBytes is refused before its
	// commit, with ErrTooLarge.
	Sarama func(*sarama.Config)
}

func (c Config) publisherName() string { return "kafkashard.publisher(" + c.Group + ")" }

// subscriberName is how the Router knows the subscriber of this group's Brokers.
func (c Config) subscriberName() string { return "kafkashard.subscriber(" + c.Group + ")" }

func (c Config) withDefaults() Config {
	if c.ReplicationFactor == 0 {
		c.ReplicationFactor = -1
	}
	if c.DialTimeout == 0 {
		c.DialTimeout = DefaultDialTimeout
	}
	if c.PublishTimeout == 0 {
		c.PublishTimeout = DefaultPublishTimeout
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = DefaultDrainTimeout
	}
	return c
}

// maxTimeout keeps the sum of two timeouts from overflowing, which would end Close at once.
const maxTimeout = 365 * 24 * time.Hour

func (c Config) validate() error {
	var problems []error
	require := func(ok bool, field string, value any, bound string) {
		if !ok {
			problems = append(problems, fmt.Errorf("%w: %s is %v, must be %s", ErrInvalidConfig, field, value, bound))
		}
	}
	require(len(c.Brokers) > 0, "Brokers", "empty", "one address or more")
	for i, address := range c.Brokers {
		host, port, err := net.SplitHostPort(address)
		n, portErr := strconv.ParseUint(port, 10, 16)
		require(err == nil && host != "" && portErr == nil && n > 0, fmt.Sprintf("Brokers[%d]", i), strconv.Quote(address), "host:port")
	}
	require(c.Group != "", "Group", "empty", "a consumer group")
	require(c.Shards >= 0 && c.Shards <= math.MaxInt32, "Shards", c.Shards, "1 or more, or 0 for the default")
	require(c.Partitioner.Validate() == nil, "Partitioner", strconv.Quote(string(c.Partitioner)), fmt.Sprintf("%s, %s, %s or %s",
		ordering.Murmur2Partitioner, ordering.CRC32Partitioner, ordering.FNV1aPartitioner, ordering.FNV1aReferencePartitioner))
	require(c.ReplicationFactor >= -1 && c.ReplicationFactor <= math.MaxInt16, "ReplicationFactor", c.ReplicationFactor,
		fmt.Sprintf("1 to %d, or -1 or 0 for the brokers' default", math.MaxInt16))
	for _, d := range []struct {
		field string
		value time.Duration
	}{{"DialTimeout", c.DialTimeout}, {"PublishTimeout", c.PublishTimeout}, {"DrainTimeout", c.DrainTimeout}} {
		require(d.value >= 0 && d.value <= maxTimeout, d.field, d.value, fmt.Sprintf("positive and at most %v, or 0 for the default", maxTimeout))
	}
	return errors.Join(problems...)
}

// saramaConfig returns the one configuration of all clients of a Broker.
func (c Config) saramaConfig() (*sarama.Config, error) {
	config := sarama.NewConfig()
	config.ClientID = "watermill"
	// The oldest release that is supported. Sarama sends requests as they were
	// then, or as the brokers' limits demand; with watermill-kafka's default, 1.0,
	// the first consume from Kafka 4.1 took 3 s instead of 0.1 s.
	config.Version = sarama.V2_8_0_0
	config.Net.DialTimeout = c.DialTimeout
	// Otherwise a metadata request would create a topic with the brokers' count.
	config.Metadata.AllowAutoTopicCreation = false

	config.Producer.Idempotent = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Net.MaxOpenRequests = 1 // sarama's condition for idempotence; Java allows 5
	config.Producer.Retry.Max = 10
	config.Producer.Retry.BackoffFunc = sarama.NewExponentialBackoff(100*time.Millisecond, time.Second)
	config.Producer.Return.Successes = true
	config.Producer.Return.Errors = true
	config.Producer.Partitioner = saramaPartitioner(c.Partitioner)

	config.Producer.Transaction.ID = c.TransactionalID
	config.Producer.Transaction.Timeout = max(time.Minute, c.PublishTimeout+c.DialTimeout)

	config.Consumer.Return.Errors = true // watermill-kafka logs them
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	// An aborted Kafka transaction of another producer must have no effect.
	config.Consumer.IsolationLevel = sarama.ReadCommitted

	if c.Sarama != nil {
		c.Sarama(config)
	}
	if c.Partitioner.Validate() != nil {
		return config, nil // validate has said so
	}
	err := checkSarama(config, c)
	config.Producer.Partitioner = countedPartitioner(config.Producer.Partitioner, c.Shards)
	return config, err
}

// countedPartitioner refuses messages for a topic that has come to another number
// of partitions than want, unless that is 0: their keys would move.
func countedPartitioner(constructor sarama.PartitionerConstructor, want int) sarama.PartitionerConstructor {
	if want == 0 {
		return constructor
	}
	return func(topic string) sarama.Partitioner { return counted{constructor(topic), topic, want} }
}

type counted struct {
	sarama.Partitioner
	topic string
	want  int
}

func (c counted) Partition(msg *sarama.ProducerMessage, count int32) (int32, error) {
	if int(count) != c.want {
		return 0, &ShardCountError{Topic: c.topic, Have: int(count), Want: c.want}
	}
	return c.Partitioner.Partition(msg, count)
}

// saramaPartitioner is nil for a partitioner that is not valid.
func saramaPartitioner(p ordering.Partitioner) sarama.PartitionerConstructor {
	switch p {
	case "", ordering.Murmur2Partitioner:
		return sarama.NewMurmur2Partitioner
	case ordering.CRC32Partitioner:
		return sarama.NewConsistentCRCHashPartitioner
	case ordering.FNV1aPartitioner:
		return sarama.NewHashPartitioner
	case ordering.FNV1aReferencePartitioner:
		return sarama.NewReferenceHashPartitioner
	}
	return nil
}

// checkSarama refuses what an override must not change.
func checkSarama(c *sarama.Config, cfg Config) error {
	var problems []error
	for _, rule := range []struct {
		ok       bool
		field    string
		value    any
		required string
	}{
		{c.Version.IsAtLeast(sarama.V2_8_0_0), "Version", c.Version, "2.8.0 or later"},
		{!c.Metadata.AllowAutoTopicCreation, "Metadata.AllowAutoTopicCreation", c.Metadata.AllowAutoTopicCreation, "false"},
		{c.Producer.Idempotent, "Producer.Idempotent", c.Producer.Idempotent, "true"},
		{c.Producer.RequiredAcks == sarama.WaitForAll, "Producer.RequiredAcks", c.Producer.RequiredAcks, "-1 (WaitForAll)"},
		{c.Net.MaxOpenRequests == 1, "Net.MaxOpenRequests", c.Net.MaxOpenRequests, "1"},
		{c.Producer.Retry.Max >= 1, "Producer.Retry.Max", c.Producer.Retry.Max, "1 or more"},
		{c.Producer.Return.Successes, "Producer.Return.Successes", c.Producer.Return.Successes, "true"},
		{c.Producer.Return.Errors, "Producer.Return.Errors", c.Producer.Return.Errors, "true"},
		{c.Producer.Transaction.ID == cfg.TransactionalID, "Producer.Transaction.ID", strconv.Quote(c.Producer.Transaction.ID), "what Config.TransactionalID says"},
		{c.Producer.Transaction.Timeout > cfg.PublishTimeout, "Producer.Transaction.Timeout", c.Producer.Transaction.Timeout, "longer than Config.PublishTimeout"},
		{placesLike(cfg.Partitioner, c.Producer.Partitioner), "Producer.Partitioner", "another hash", "what Config.Partitioner says (by default murmur2)"},
		{c.Consumer.Offsets.Initial == sarama.OffsetOldest, "Consumer.Offsets.Initial", c.Consumer.Offsets.Initial, "-2 (OffsetOldest)"},
		// It revokes partitions without ending the session, and so without
		// ending the contexts of running handlers.
		{!cooperative(c), "Consumer.Group.Rebalance.GroupStrategies", "cooperative", "eager"},
	} {
		if !rule.ok {
			problems = append(problems, fmt.Errorf("%w: Sarama sets %s to %v, must be %s", ErrInvalidConfig, rule.field, rule.value, rule.required))
		}
	}
	if len(problems) == 0 {
		if err := c.Validate(); err != nil {
			problems = append(problems, fmt.Errorf("%w: Sarama: %w", ErrInvalidConfig, err))
		}
	}
	return errors.Join(problems...)
}

// placesLike asks the partitioner itself, because functions can't be
// compared, and a wrapped one may be right.
func placesLike(p ordering.Partitioner, constructor sarama.PartitionerConstructor) bool {
	if constructor == nil {
		return false
	}
	partitioner := constructor("topic")
	const partitions = 4099
	for i := range 32 {
		key := strconv.Itoa(i)
		got, err := partitioner.Partition(&sarama.ProducerMessage{Key: sarama.StringEncoder(key)}, partitions)
		if err != nil || int(got) != p.Shard(key, partitions) {
			return false
		}
	}
	return partitioner.RequiresConsistency()
}

func cooperative(c *sarama.Config) bool {
	strategies := c.Consumer.Group.Rebalance.GroupStrategies
	if s := c.Consumer.Group.Rebalance.Strategy; s != nil { // deprecated, and it still wins
		strategies = []sarama.BalanceStrategy{s}
	}
	for _, s := range strategies {
		if s != nil && s.Name() == sarama.CooperativeStickyBalanceStrategyName {
			return true
		}
	}
	return false
}
