package amqpshard

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// maxNameLength is the limit of exchange and queue names in bytes (AMQP 0-9-1,
// short string).
const maxNameLength = 255

// lockPause is between attempts to get the lock, and to reach a leader.
const lockPause = 50 * time.Millisecond

// Names. They are the same for both kinds of routing.
func groupExchange(cfg Config, topic string) string { return topic + "." + cfg.Group }
func deadQueue(cfg Config, topic string) string     { return groupExchange(cfg, topic) + ".dead" }
func unrouted(cfg Config, topic string) string      { return groupExchange(cfg, topic) + ".unrouted" }
func refusingQueue(cfg Config, topic string) string { return groupExchange(cfg, topic) + ".refused" }

// shardName is the name of a shard's queue and of the exchange through which the
// group's exchange reaches it. The number is padded, because a broker that
// restarts builds the ring from the sorted names, more or less: in parallel.
func shardName(cfg Config, topic string, shard int) string {
	return fmt.Sprintf("%s.%03d", groupExchange(cfg, topic), shard)
}

// queueExchange is the exchange to which the shard's queue is bound.
func queueExchange(cfg Config, topic string, shard int) string {
	return shardName(cfg, topic, shard) + ".queue"
}

func checkTopic(cfg Config, topic string) error {
	switch n := len(queueExchange(cfg, topic, 0)); {
	case topic == "":
		return fmt.Errorf("%w: it is empty", ErrInvalidTopic)
	case !utf8.ValidString(topic):
		return fmt.Errorf("%w %q: it is not UTF-8", ErrInvalidTopic, topic)
	case strings.HasPrefix(topic, "amq."):
		return fmt.Errorf(`%w %q: RabbitMQ reserves names that start with "amq."`, ErrInvalidTopic, topic)
	case n > maxNameLength:
		return fmt.Errorf("%w %q: names of its queues and exchanges have %d bytes, the limit is %d", ErrInvalidTopic, topic, n, maxNameLength)
	}
	return nil
}

// checkAndDeclare declares a topic for a group, the entrance last: no message
// finds shards that are not complete, or that the probe refuses. It aborts conn
// when ctx ends.
func checkAndDeclare(ctx context.Context, conn *connection, cfg Config, topic string, logger watermill.LoggerAdapter) error {
	unwatch := conn.abortOn(ctx)
	unlock, err := lock(ctx, conn, cfg, topic)
	if err == nil {
		defer unlock()
		err = checkShards(conn, cfg, topic)
	}
	if err == nil {
		err = declareGroup(conn, cfg, topic, allQueues)
	}
	if err == nil {
		err = probe(ctx, cfg, topic)
		if errors.Is(err, errBlocked) { // consumers must be able to start, they end the alarm
			logger.Error("Shards were not probed", err, watermill.LogFields{"topic": topic, "group": cfg.Group})
			err = nil
		}
	}
	if err == nil {
		err = declareEntrance(conn, cfg, topic)
	}
	if !unwatch() {
		return fmt.Errorf("amqpshard: declare topic %q: %w", topic, ctx.Err())
	}
	return err
}

// redeclare declares what may have been deleted, but of the shards' queues only
// that of shard, whose consumer has waited for redeclarePause.
func redeclare(ctx context.Context, conn *connection, cfg Config, topic string, shard int) error {
	unlock, err := lock(ctx, conn, cfg, topic)
	if err != nil {
		return err
	}
	defer unlock()
	if err := declareGroup(conn, cfg, topic, shard); err != nil {
		return err
	}
	return declareEntrance(conn, cfg, topic)
}

// lock lets one connection at a time declare a group on a topic, of all processes.
// It waits until ctx ends.
//
// Two declarations of one quorum queue at the same time can fail on RabbitMQ 4.0,
// and leave a dead letter worker behind that takes down the supervisor of all
// others: from then on no such queue can be declared on that node.
func lock(ctx context.Context, conn *connection, cfg Config, topic string) (unlock func(), err error) {
	name := groupExchange(cfg, topic) + ".lock"
	for {
		ch, err := conn.Channel()
		if err != nil {
			return nil, &TopologyError{"queue", name, err}
		}
		_, err = ch.QueueDeclare(name, false, false, true, false, amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeClassic})
		if err == nil {
			return func() {
				_, _ = ch.QueueDelete(name, false, false, false) // else it ends with the connection
				_ = ch.Close()
			}, nil
		}
		var refused *amqp.Error
		if !errors.As(err, &refused) || refused.Code != amqp.ResourceLocked {
			return nil, topologyError("queue", name, err)
		}
		if wait(ctx, lockPause); ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// checkShards refuses a group that has another number of shards. What counts are
// the shards' exchanges, because the ring consists of them.
//
// declareGroup makes the one with the highest number first and number 0 last. So
// one that did not come to its end is not taken for another number, nor is one
// that runs at the same time.
func checkShards(conn *connection, cfg Config, topic string) error {
	count := func(from int) (int, error) {
		for shard := from; ; shard++ {
			if ok, err := exchangeExists(conn, shardName(cfg, topic, shard)); err != nil || !ok {
				return shard, err
			}
		}
	}
	existing, err := count(cfg.Shards - 1)
	if err == nil && existing == cfg.Shards-1 {
		existing, err = count(0)
	}
	if err != nil || existing == 0 || existing == cfg.Shards {
		return err
	}
	return &TopologyError{"exchange", shardName(cfg, topic, min(existing, cfg.Shards)), fmt.Errorf(
		"group %q has %d shards on topic %q, but Shards is %d; another number moves keys to other shards",
		cfg.Group, existing, topic, cfg.Shards)}
}

func exchangeExists(conn *connection, name string) (bool, error) {
	ch, err := conn.Channel() // the answer "no" closes it
	if err != nil {
		return false, &TopologyError{"exchange", name, err}
	}
	defer ch.Close()
	err = ch.ExchangeDeclarePassive(name, amqp.ExchangeHeaders, true, false, false, false, nil)
	if isNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, &TopologyError{"exchange", name, err}
	}
	return true, nil
}

func isNotFound(err error) bool {
	var refused *amqp.Error
	return errors.As(err, &refused) && refused.Code == amqp.NotFound
}

// allQueues stands for the queues of all shards.
const allQueues = -1

// declareGroup declares all that a group has on a topic but its binding to the
// topic, and but the queues of other shards than the one given.
//
// The group's exchange does not lead to the shards' queues but to an exchange
// for each. So a queue that is deleted moves no key, and the probe can see what
// reaches a shard without putting anything into its queue: what matches no
// binding of a shard's exchange, which is all but canaries, takes the alternate
// exchange to the queue.
func declareGroup(conn *connection, cfg Config, topic string, only int) error {
	ch, err := conn.Channel()
	if err != nil {
		return &TopologyError{"exchange", topic, err}
	}
	defer ch.Close()

	if err := declareUnrouted(ch, cfg, topic); err != nil {
		return err
	}
	dead, group, nowhere := deadQueue(cfg, topic), groupExchange(cfg, topic), alternate(unrouted(cfg, topic))
	for shard := cfg.Shards - 1; shard >= 0; shard-- {
		name, queue := shardName(cfg, topic, shard), queueExchange(cfg, topic, shard)
		if err := declareExchange(ch, queue, amqp.ExchangeFanout, nowhere); err != nil {
			return err
		}
		if only == allQueues || only == shard {
			if err := declareShardQueue(ch, cfg, name, dead, queue); err != nil {
				return err
			}
		}
		if err := declareExchange(ch, name, amqp.ExchangeHeaders, alternate(queue)); err != nil {
			return err
		}
	}
	// The dead letter queue has a limit that is never reached, because RabbitMQ 4
	// has a default limit of 20, and then drops. It comes after the shards, because
	// RabbitMQ 3.10.8 can forget the quorum queue that was declared last when it is
	// killed under load: it is there again, empty, and never gets a leader.
	if err := declareQueue(ch, dead, amqp.QueueTypeQuorum, amqp.Table{"x-delivery-limit": int32(math.MaxInt32)}); err != nil {
		return err
	}
	if cfg.Routing == Slots {
		return declareSlots(ch, cfg, topic, nowhere)
	}
	args := alternate(unrouted(cfg, topic))
	args["hash-header"] = ordering.PartitionKeyMetadata
	if err := declareExchange(ch, group, "x-consistent-hash", args); err != nil {
		return err
	}
	// Each binding is there before the next is made, so that declarers that run
	// at the same time still build the ring in this order.
	for shard := range cfg.Shards {
		name := shardName(cfg, topic, shard)
		if err := ch.ExchangeBind(name, "1", group, false, nil); err != nil { // the key is the weight
			return topologyError("binding", name, err)
		}
	}
	return nil
}

// declareShardQueue declares the queue of a shard and binds it to its exchange.
func declareShardQueue(ch *amqp.Channel, cfg Config, name, dead, exchange string) error {
	if err := declareQueue(ch, name, amqp.QueueTypeQuorum, amqp.Table{
		amqp.SingleActiveConsumerArg: true,
		"x-delivery-limit":           int32(cfg.DeliveryLimit),
		"x-dead-letter-exchange":     "",
		"x-dead-letter-routing-key":  dead,
		"x-dead-letter-strategy":     "at-least-once",
		amqp.QueueOverflowArg:        amqp.QueueOverflowRejectPublish, // at-least-once demands it
	}); err != nil {
		return err
	}
	if err := ch.QueueBind(name, "", exchange, false, nil); err != nil {
		return topologyError("binding", name, err)
	}
	return nil
}

func declareSlots(ch *amqp.Channel, cfg Config, topic string, nowhere amqp.Table) error {
	group := groupExchange(cfg, topic)
	if err := declareExchange(ch, group, amqp.ExchangeDirect, nowhere); err != nil {
		return err
	}
	for slot := range SlotCount {
		name := shardName(cfg, topic, slot%cfg.Shards)
		// The answer to the last stands for all: an error closes the channel.
		if err := ch.ExchangeBind(name, strconv.Itoa(slot), group, slot < SlotCount-1, nil); err != nil {
			return topologyError("binding", name, err)
		}
	}
	return nil
}

// declareUnrouted makes the way of a message for which the group has no queue: a
// copy is kept for people to see, and a queue that takes nothing makes the broker
// refuse the publish. Without it the publish would count as stored if another
// group has a queue.
func declareUnrouted(ch *amqp.Channel, cfg Config, topic string) error {
	name, refusing := unrouted(cfg, topic), refusingQueue(cfg, topic)
	if err := declareExchange(ch, name, amqp.ExchangeFanout, nil); err != nil {
		return err
	}
	if err := declareQueue(ch, name, amqp.QueueTypeClassic, amqp.Table{amqp.QueueMaxLenArg: int32(MaxUnrouted)}); err != nil {
		return err
	}
	if err := declareQueue(ch, refusing, amqp.QueueTypeClassic, amqp.Table{
		amqp.QueueMaxLenArg: int32(0), amqp.QueueOverflowArg: amqp.QueueOverflowRejectPublish,
	}); err != nil {
		return err
	}
	for _, queue := range []string{name, refusing} {
		if err := ch.QueueBind(queue, "", name, false, nil); err != nil {
			return topologyError("binding", queue, err)
		}
	}
	return nil
}

// declareEntrance binds the group to the topic.
func declareEntrance(conn *connection, cfg Config, topic string) error {
	ch, err := conn.Channel()
	if err != nil {
		return &TopologyError{"exchange", topic, err}
	}
	defer ch.Close()
	if err := declareTopic(ch, topic); err != nil {
		return err
	}
	if err := ch.ExchangeBind(groupExchange(cfg, topic), "", topic, false, nil); err != nil {
		return topologyError("binding", groupExchange(cfg, topic), err)
	}
	return nil
}

func declareTopic(ch *amqp.Channel, topic string) error {
	return declareExchange(ch, topic, amqp.ExchangeFanout, nil)
}

// alternate returns the arguments of an exchange that passes on to another one
// what it can't route.
func alternate(exchange string) amqp.Table { return amqp.Table{"alternate-exchange": exchange} }

func declareExchange(ch *amqp.Channel, name, kind string, args amqp.Table) error {
	if err := ch.ExchangeDeclare(name, kind, true, false, false, false, args); err != nil {
		return topologyError("exchange", name, err)
	}
	return nil
}

func declareQueue(ch *amqp.Channel, name, kind string, args amqp.Table) error {
	args[amqp.QueueTypeArg] = kind
	if _, err := ch.QueueDeclare(name, true, false, false, false, args); err != nil {
		return topologyError("queue", name, err)
	}
	return nil
}

func topologyError(kind, name string, err error) error {
	var refused *amqp.Error
	if errors.As(err, &refused) {
		switch {
		case strings.Contains(refused.Reason, "unknown exchange type"):
			err = fmt.Errorf("%w: %w", ErrPluginMissing, err)
		case refused.Code == amqp.PreconditionFailed && strings.Contains(refused.Reason, "inequivalent arg 'type'"):
			err = fmt.Errorf("it exists with another type, maybe declared with another Routing, and was left as it is: %w", err)
		case refused.Code == amqp.PreconditionFailed:
			err = fmt.Errorf("it exists with other settings and was left as it is: %w", err)
		}
	}
	return &TopologyError{kind, name, explain(err)}
}
