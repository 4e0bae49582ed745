package amqpshard

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// maxNameLength is the limit of exchange and queue names in bytes (AMQP 0-9-1,
// short string).
const maxNameLength = 255

func groupExchange(cfg Config, topic string) string { return topic + "." + cfg.Group }

func deadQueue(cfg Config, topic string) string { return groupExchange(cfg, topic) + ".dead" }

// shardQueue pads the number, because a broker that restarts builds the ring
// from the sorted names.
func shardQueue(cfg Config, topic string, shard int) string {
	return fmt.Sprintf("%s.%03d", groupExchange(cfg, topic), shard)
}

func checkTopic(cfg Config, topic string) error {
	switch n := len(deadQueue(cfg, topic)); {
	case topic == "":
		return fmt.Errorf("%w: it is empty", ErrInvalidTopic)
	case !utf8.ValidString(topic):
		return fmt.Errorf("%w %q: it is not UTF-8", ErrInvalidTopic, topic)
	case strings.HasPrefix(topic, "amq."):
		return fmt.Errorf(`%w %q: RabbitMQ reserves names that start with "amq."`, ErrInvalidTopic, topic)
	case n > maxNameLength:
		return fmt.Errorf("%w %q: queue names have %d bytes, the limit is %d", ErrInvalidTopic, topic, n, maxNameLength)
	}
	return nil
}

// checkAndDeclare is checkShards and declare. It aborts conn when ctx ends.
func checkAndDeclare(ctx context.Context, conn *connection, cfg Config, topic string) error {
	unwatch := conn.abortOn(ctx)
	err := checkShards(conn, cfg, topic)
	if err == nil {
		err = declare(conn, cfg, topic)
	}
	if !unwatch() {
		return fmt.Errorf("amqpshard: declare topic %q: %w", topic, ctx.Err())
	}
	return err
}

// checkShards refuses a group that has queues for another number of shards.
//
// declare makes the queue with the highest number first and number 0 last. So
// one that did not come to its end is not taken for another number, nor is one
// that runs at the same time.
func checkShards(conn *connection, cfg Config, topic string) error {
	count := func(from int) (int, error) {
		for shard := from; ; shard++ {
			if ok, err := queueExists(conn, shardQueue(cfg, topic, shard)); err != nil || !ok {
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
	return &TopologyError{"queue", shardQueue(cfg, topic, min(existing, cfg.Shards)), fmt.Errorf(
		"group %q has %d shard queues on topic %q, but Shards is %d; another number moves keys to other shards",
		cfg.Group, existing, topic, cfg.Shards)}
}

func queueExists(conn *connection, name string) (bool, error) {
	ch, err := conn.Channel() // the answer "no" closes it
	if err != nil {
		return false, &TopologyError{"queue", name, err}
	}
	defer ch.Close()
	_, err = ch.QueueDeclarePassive(name, true, false, false, false, nil)
	if isNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, &TopologyError{"queue", name, err}
	}
	return true, nil
}

func isNotFound(err error) bool {
	var refused *amqp.Error
	return errors.As(err, &refused) && refused.Code == amqp.NotFound
}

// declare declares a topic for a group, the entrance last: no message finds a
// ring that is not complete.
func declare(conn *connection, cfg Config, topic string) error {
	ch, err := conn.Channel()
	if err != nil {
		return &TopologyError{"exchange", topic, err}
	}
	defer ch.Close()

	// The dead letter queue has a limit that is never reached, because RabbitMQ 4
	// has a default limit of 20, and then drops.
	dead, group := deadQueue(cfg, topic), groupExchange(cfg, topic)
	if err := declareQueue(ch, dead, amqp.Table{"x-delivery-limit": int32(math.MaxInt32)}); err != nil {
		return err
	}
	for shard := cfg.Shards - 1; shard >= 0; shard-- {
		if err := declareQueue(ch, shardQueue(cfg, topic, shard), amqp.Table{
			amqp.SingleActiveConsumerArg: true,
			"x-delivery-limit":           int32(cfg.DeliveryLimit),
			"x-dead-letter-exchange":     "",
			"x-dead-letter-routing-key":  dead,
			"x-dead-letter-strategy":     "at-least-once",
			amqp.QueueOverflowArg:        amqp.QueueOverflowRejectPublish, // at-least-once demands it
		}); err != nil {
			return err
		}
	}
	if err := declareExchange(ch, group, "x-consistent-hash", amqp.Table{"hash-header": ordering.PartitionKeyMetadata}); err != nil {
		return err
	}
	// Each binding is there before the next is made, so that declarers that run
	// at the same time still build the ring in this order.
	for shard := range cfg.Shards {
		queue := shardQueue(cfg, topic, shard)
		if err := ch.QueueBind(queue, "1", group, false, nil); err != nil { // the key is the weight
			return topologyError("binding", queue, err)
		}
	}
	if err := declareTopic(ch, topic); err != nil {
		return err
	}
	if err := ch.ExchangeBind(group, "", topic, false, nil); err != nil {
		return topologyError("binding", group, err)
	}
	return nil
}

func declareTopic(ch *amqp.Channel, topic string) error {
	return declareExchange(ch, topic, amqp.ExchangeFanout, nil)
}

func declareExchange(ch *amqp.Channel, name, kind string, args amqp.Table) error {
	if err := ch.ExchangeDeclare(name, kind, true, false, false, false, args); err != nil {
		return topologyError("exchange", name, err)
	}
	return nil
}

func declareQueue(ch *amqp.Channel, name string, args amqp.Table) error {
	args[amqp.QueueTypeArg] = amqp.QueueTypeQuorum
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
		case refused.Code == amqp.PreconditionFailed:
			err = fmt.Errorf("it exists with other settings and was left as it is: %w", err)
		}
	}
	return &TopologyError{kind, name, err}
}
