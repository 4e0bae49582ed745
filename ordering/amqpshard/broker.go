// Package amqpshard runs an [ordering.Broker] on RabbitMQ 3.10 or later: every
// consumer group gets all messages of a topic, and within a group all messages
// of one partition key go through one queue with one active consumer.
//
// For topic "orders" and group "stock" there are
//
//   - the fanout exchange orders, which publishers use;
//   - the exchange orders.stock, bound to it, which chooses the shard: of type
//     x-consistent-hash over the header [ordering.PartitionKeyMetadata], or direct
//     over the routing key, see [Routing];
//   - the exchanges orders.stock.000, orders.stock.000.queue and the quorum queue
//     orders.stock.000, one behind the other, and so on for each shard. The queue
//     has a single active consumer and a delivery limit;
//   - the quorum queue orders.stock.dead, to which messages go that came to the
//     limit. Nothing consumes it;
//   - the exchange and queue orders.stock.unrouted, which keeps the last messages
//     that found no queue, and the queue orders.stock.refused behind the same
//     exchange, which takes nothing, so that their publishers get an error;
//   - for as long as somebody declares all that, the exclusive queue
//     orders.stock.lock.
//
// docs/rabbitmq.md has a picture, and tells how to change and repair it.
//
// # Instances
//
// Several processes may subscribe in one group. Each consumes all shards, and
// the broker makes one of them the active consumer of a shard: mostly the first
// that came. The others stand by, the broker does not balance.
//
// # What moves a key
//
// With Slots, another number of shards and nothing else. With ConsistentHash the
// broker keeps its ring in the order of the bindings: keys move when a shard's
// exchange is unbound or deleted, when it is bound again, and possibly when the
// broker restarts, because it then builds the ring in an order of its own (of
// 1,000 keys on 12 shards, 0 to 914 moved). Messages of an entity that wait in
// its old shard can then be overtaken by new ones. Deleting a queue moves none.
package amqpshard

import (
	"context"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Broker is an [ordering.Broker] on RabbitMQ. Open makes one. It is safe for
// concurrent use.
//
// It has one connection for publishing and one per subscription, so that a
// broker that holds back publishers (memory or disk alarm) still takes acks.
type Broker struct {
	cfg        Config
	publisher  *publisher
	subscriber *subscriber
	closeOnce  sync.Once
}

// Open checks cfg and connects for publishing. All problems of cfg are reported
// at once, each matches ErrInvalidConfig. When the broker can't be reached Open
// returns an error within cfg.DialTimeout, or when ctx ends. A nil logger logs
// nothing.
func Open(ctx context.Context, cfg Config, logger watermill.LoggerAdapter) (*Broker, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	publisher := newPublisher(cfg)
	b := &Broker{cfg: cfg, publisher: publisher, subscriber: newSubscriber(cfg, publisher.check, logger)}
	if _, err := b.publisher.connect(ctx); err != nil {
		return nil, err
	}
	return b, nil
}

// Declare declares the exchanges and queues of the topics for this group, see
// [ordering.Broker]. It deletes and changes nothing: what exists with other
// settings, or with another number of shards, is a [TopologyError]. What was
// declared before an error stays. It is safe to repeat and to run in several
// processes at a time: they wait for each other.
//
// It then sends canaries to the group's exchange, which no other group and no
// handler sees and which don't come to the queues: a shard that none reaches is a
// TopologyError that names it, and the group is not bound to the topic if it was
// not before. That is left out, and logged, while an alarm of the broker blocks
// publishers. The user needs the right to declare exclusive queues with names
// that the broker makes (amq.gen-…).
func (b *Broker) Declare(ctx context.Context, topics ...string) error {
	if b.subscriber.isClosed() {
		return ErrClosed
	}
	for _, topic := range topics {
		if err := checkTopic(b.cfg, topic); err != nil {
			return err
		}
	}
	conn, err := dial(ctx, b.cfg, "declare")
	if err != nil {
		return err
	}
	defer conn.close()
	for _, topic := range topics {
		if err := checkAndDeclare(ctx, conn, b.cfg, topic, b.subscriber.logger); err != nil {
			return err
		}
	}
	return nil
}

// Publisher returns the broker's publisher.
//
// Publish sends all messages and then waits for the broker to confirm them. It
// returns nil when every message is stored in the queues of all groups that are
// declared on the topic, and there is at least one. It
// returns an [ordering.KeyError] or a [MessageError] and sends nothing if one of
// the messages can't be sent. All other errors are a [PublishError], which says
// for each message whether it is stored; a Publish that was not confirmed within
// cfg.PublishTimeout is one of them.
//
// Messages are sent in the order of the calls and confirmed in parallel. After
// an error the next Publish opens a new connection.
func (b *Broker) Publisher() message.Publisher { return b.publisher }

// Subscriber returns the subscriber of the broker's group.
//
// Subscribe declares the topic, as Declare does, and consumes from the queues of all
// shards: one that the broker refuses to serve is a [TopologyError]. It returns
// ErrAlreadySubscribed while the topic is subscribed on this Broker. A shard delivers its next
// message when the last one was acked or nacked.
//
// The context of a message ends when the message was acked or nacked, when its
// channel or connection is lost (cause ErrDeliveryLost) and when the drain
// timeout is over (cause ErrDrainTimeout). It does not end with the context of
// Subscribe: when that ends, or Close is called, no further message is taken,
// running handlers are waited for up to cfg.DrainTimeout, and then the
// subscription's channel is closed. Close waits for all that, on all
// subscriptions.
//
// A lost connection and a deleted queue are repaired (the queue is declared
// again) for as long as it takes, with growing pauses of up to 8s. Of attempts that
// fail for the same reason the first is logged as an error, and then one after 5s,
// 10s, … 5m; the others are for level debug. What was in a deleted queue is lost. Messages in <topic>.<group>.dead and
// <topic>.<group>.unrouted are logged when they are found and become more; the
// subscription looks once a minute.
func (b *Broker) Subscriber() message.Subscriber { return b.subscriber }

// Close closes the subscriber, waits for running Publish calls, and closes the
// connections. It returns nil. It is safe to repeat.
func (b *Broker) Close() error {
	b.closeOnce.Do(func() {
		_ = b.subscriber.Close() // it returns nil
		b.publisher.close()
	})
	return nil
}
