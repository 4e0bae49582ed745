package ordering

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Broker is a message broker on which all messages of one entity travel through
// one shard. amqpshard.Open, kafkashard.Open and sqlshard.Open return one each, so
// that the code below that line is the same on RabbitMQ, Kafka and SQL databases.
//
// A Broker is safe for concurrent use.
type Broker interface {
	// Declare creates what the topics need on the broker (RabbitMQ: exchanges
	// and this group's shard queues, Kafka: the topic with its partitions, SQL: the
	// rows of its shards) and
	// checks what exists already. From then on a message that is published is
	// kept for this group, even before its first Subscribe: declare the poison
	// queue, which usually has no consumer. Subscribe declares its own topic.
	Declare(ctx context.Context, topics ...string) error

	// Publisher returns the broker's publisher. It stamps the partition key
	// (see [PartitionKeyMetadata]) and returns nil only when the broker has
	// confirmed all messages. Closing it does nothing, because the Router closes
	// a handler's publisher while other handlers may still use it: Close the
	// Broker instead.
	Publisher() message.Publisher

	// Subscriber returns the broker's subscriber in the configured consumer
	// group. Messages of one shard are delivered one at a time, the next one
	// after the ack. A topic can be subscribed once per Broker: two handlers
	// that both need all messages of a topic are two groups, so two Brokers.
	// Closing it, which a Router does when it is closed, ends all subscriptions of
	// the Broker for good: two Routers are two Brokers.
	Subscriber() message.Subscriber

	// Close stops taking messages, waits for running handlers up to the
	// configured drain timeout, and then closes the connections. Messages that
	// were not acknowledged by then are delivered again.
	Close() error
}
