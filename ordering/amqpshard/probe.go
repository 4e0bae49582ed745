package amqpshard

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// canaryHeader marks the messages of a probe. Its prefix keeps it out of what
// users send.
const canaryHeader = reservedPrefix + "canary"

// probeTimeout bounds the whole probe.
const probeTimeout = 30 * time.Second

// errBlocked is returned by a probe that could not publish.
var errBlocked = errors.New("amqpshard: the broker blocks publishers")

// probe checks that every shard of a group gets messages, and that no message
// goes elsewhere. The broker can't be asked for that: it has lost buckets of a
// ring whose bindings it still listed (rabbitmq-server issue 3386).
//
// It sends canaries to the group's exchange, so no other group sees them, and
// catches them before they come to a shard's queue. Should it die in between,
// the shard's consumer drops what comes through.
//
// It has a connection of its own, because the broker does not read from one that
// publishes while there is an alarm.
func probe(ctx context.Context, cfg Config, topic string) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	conn, err := dial(ctx, cfg, "probe")
	if err != nil {
		return err
	}
	defer conn.close()
	defer conn.abortOn(ctx)()
	var blocked atomic.Bool
	states := conn.NotifyBlocked(make(chan amqp.Blocking))
	go func() { // ends with the connection
		for range states {
			blocked.Store(true)
			conn.abort()
		}
	}()
	err = probeOn(conn, cfg, topic)
	switch {
	case err == nil:
		return nil
	case blocked.Load():
		return errBlocked
	case ctx.Err() != nil:
		return fmt.Errorf("amqpshard: probe topic %q: %w", topic, ctx.Err())
	}
	return err
}

func probeOn(conn *connection, cfg Config, topic string) error {
	group := groupExchange(cfg, topic)
	fail := func(err error) error {
		return &TopologyError{"exchange", group, fmt.Errorf("probe: %w", err)}
	}
	ch, err := conn.Channel()
	if err != nil {
		return fail(err)
	}
	if err := ch.Confirm(false); err != nil {
		return fail(err)
	}
	nonce := rand.Text()
	traps := make([]string, cfg.Shards)
	for shard := range traps {
		queue, err := ch.QueueDeclare("", false, false, true, false, amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeClassic})
		if err != nil {
			return fail(err)
		}
		traps[shard] = queue.Name
		args := amqp.Table{"x-match": "all", canaryHeader: nonce}
		if err := ch.QueueBind(queue.Name, "", shardName(cfg, topic, shard), false, args); err != nil {
			return fail(err)
		}
	}

	keys := canaryKeys(cfg)
	confirms := make([]*amqp.DeferredConfirmation, 0, len(keys))
	for _, key := range keys {
		confirm, err := ch.PublishWithDeferredConfirm(group, key, true, false, amqp.Publishing{
			Headers: amqp.Table{canaryHeader: nonce, ordering.PartitionKeyMetadata: key},
		})
		if err != nil {
			return fail(err)
		}
		confirms = append(confirms, confirm)
	}
	stored := 0
	for _, confirm := range confirms {
		if confirm.Wait() {
			stored++
		}
	}
	caught := 0
	counts := make([]int, cfg.Shards)
	for shard, trap := range traps {
		if counts[shard], err = ch.QueueDelete(trap, false, false, false); err != nil {
			return fail(err)
		}
		caught += counts[shard]
	}
	return judge(cfg, topic, counts, len(keys), stored, caught)
}

// canaryKeys returns a key for each slot, or as many as make it certain that
// each shard of a ring gets one: with n(ln n + 20) an error has a chance of e^-20.
// The key of a slot is its routing key.
func canaryKeys(cfg Config) []string {
	n := float64(cfg.Shards)
	count := int(math.Ceil(n * (math.Log(n) + 20)))
	if cfg.Routing == Slots {
		count = SlotCount
	}
	keys := make([]string, count)
	for i := range keys {
		keys[i] = strconv.Itoa(i)
		if cfg.Routing != Slots {
			keys[i] = rand.Text()
		}
	}
	return keys
}

// judge decides on where the canaries came out. It names the silent shard.
func judge(cfg Config, topic string, counts []int, sent, stored, caught int) error {
	const advice = "docs/rabbitmq.md says how to rebuild it"
	group := groupExchange(cfg, topic)
	for shard, n := range counts {
		if want := (SlotCount - shard + cfg.Shards - 1) / cfg.Shards; n == 0 || cfg.Routing == Slots && n != want {
			return &TopologyError{"queue", shardName(cfg, topic, shard), fmt.Errorf(
				"%d of %d canaries reached it: exchange %q does not route as it was declared; "+advice, n, sent, group)}
		}
	}
	if stored != sent || caught != sent {
		return &TopologyError{"exchange", group, fmt.Errorf(
			"%d of %d canaries reached a shard, %d were refused: it does not route as it was declared; "+advice,
			caught, sent, sent-stored)}
	}
	return nil
}
