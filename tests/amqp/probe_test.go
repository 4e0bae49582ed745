package amqp_test

import (
	"strconv"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

// bindings returns the keys with which a shard is bound to its group's exchange.
func (on server) bindings(shard, shards int) []string {
	if on.routing == amqpshard.ConsistentHash {
		return []string{"1"}
	}
	var keys []string
	for slot := shard; slot < amqpshard.SlotCount; slot += shards {
		keys = append(keys, strconv.Itoa(slot))
	}
	return keys
}

// A shard that was unbound by hand is refused to publishers, and bound again by
// the next start.
func TestUnboundShardIsRepaired(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group", withShards(3))
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		f.with(func(ch *amqp.Channel) {
			for _, key := range on.bindings(2, 3) {
				require.NoError(t, ch.ExchangeUnbind(f.queues("group", 3)[2], key, f.topic+".group", false, nil))
			}
		})
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		f.place(broker, "group", 3, 100)
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		require.Zero(t, f.depth(f.queues("group", 3)...), "canaries don't come to the queues")
		require.Zero(t, f.depth(f.topic+".group.unrouted"))
	})
}

// An exchange that was made by hand and does not spread messages: the start is
// refused with the name of a shard that gets nothing, and nobody sees a canary.
func TestSilentShardRefusesTheStart(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		other := f.open("other")
		require.NoError(t, other.Declare(t.Context(), f.topic))
		broker := f.open("group")
		group := f.topic + ".group"
		nowhere := amqp.Table{"alternate-exchange": group + ".unrouted"}
		f.with(func(ch *amqp.Channel) {
			if on.routing == amqpshard.ConsistentHash {
				nowhere["hash-header"] = "another"
				require.NoError(t, ch.ExchangeDeclare(group, "x-consistent-hash", true, false, false, false, nowhere))
				return
			}
			// A slot that leads to two shards: its messages would come twice.
			require.NoError(t, broker.Declare(t.Context(), f.topic))
			require.NoError(t, ch.ExchangeBind(f.queues("group", 2)[1], "0", group, false, nil))
		})
		err := broker.Declare(t.Context(), f.topic)
		var refused *amqpshard.TopologyError
		require.ErrorAs(t, err, &refused)
		require.Contains(t, f.queues("group", 2), refused.Name)
		require.ErrorContains(t, err, "does not route as it was declared")
		_, err = broker.Subscriber().Subscribe(t.Context(), f.topic)
		require.ErrorAs(t, err, &refused)
		require.Zero(t, f.depth(append(f.queues("group", 2), f.queues("other", 2)...)...))
		require.Zero(t, f.depth(group+".dead", group+".unrouted", f.topic+".other.unrouted"))

		if on.routing == amqpshard.ConsistentHash { // else it was bound before
			require.NoError(t, other.Publisher().Publish(f.topic, newMessage("a", "")))
			require.Zero(t, f.depth(f.queues("group", 2)...), "the group is not bound to the topic")
		}

		// docs/rabbitmq.md: rebuild the group's exchange.
		f.with(func(ch *amqp.Channel) { require.NoError(t, ch.ExchangeDelete(group, false, false)) })
		require.NoError(t, broker.Declare(t.Context(), f.topic))
	})
}

// Shards of a ring that are not the group's take messages away.
func TestStrangerInTheRing(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		if on.routing == amqpshard.Slots {
			return // a direct exchange copies, see TestSilentShardRefusesTheStart
		}
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		f.with(func(ch *amqp.Channel) {
			stranger, err := ch.QueueDeclare("", false, true, true, false, nil)
			require.NoError(t, err)
			require.NoError(t, ch.QueueBind(stranger.Name, "1", f.topic+".group", false, nil))
			err = broker.Declare(t.Context(), f.topic)
			require.ErrorIs(t, err, amqpshard.ErrTopology)
			require.ErrorContains(t, err, f.topic+".group")
			require.ErrorContains(t, err, "canaries reached a shard")
		})
	})
}

// The canary of a probe that died is dropped below the Router.
func TestLeftCanary(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		slot := strconv.Itoa(ordering.Shard("a", amqpshard.SlotCount))
		f.with(func(ch *amqp.Channel) {
			require.NoError(t, ch.Publish(f.topic+".group", slot, true, false, amqp.Publishing{
				Headers: amqp.Table{ordering.PartitionKeyMetadata: "a", "amqpshard_canary": "x"},
			}))
		})
		f.eventuallyDepth(1, f.queues("group", 2)...)
		require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", "real")))
		msg := f.receive(f.subscribe(broker))
		require.Equal(t, "real", string(msg.Payload))
		msg.Ack()
		require.NoError(t, broker.Close())
		require.Zero(t, f.depth(f.queues("group", 2)...))
	})
}
