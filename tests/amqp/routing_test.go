package amqp_test

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

// place publishes a message of each key and returns the queue that it came to.
func (f *fixture) place(broker *amqpshard.Broker, group string, shards, keys int) map[string]string {
	f.Helper()
	batch := make([]*message.Message, keys)
	for i := range batch {
		batch[i] = newMessage(fmt.Sprint("key ", i), "")
	}
	f.publish(broker, batch...)
	places := map[string]string{}
	for _, queue := range f.queues(group, shards) {
		for _, delivery := range f.consumeRaw(queue, f.depth(queue)) {
			places[delivery.Headers[ordering.PartitionKeyMetadata].(string)] = queue
		}
	}
	require.Len(f, places, keys)
	return places
}

func withShards(n int) func(*amqpshard.Config) { return func(c *amqpshard.Config) { c.Shards = n } }

// The busiest shard has at most 15 % more than the mean of 2,000 keys.
func TestLoadOfShards(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		const shards, keys = 4, 2000
		broker := f.open("group", withShards(shards))
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		load := map[string]int{}
		for key, queue := range f.place(broker, "group", shards, keys) {
			load[queue]++
			if on.routing == amqpshard.Slots { // as on Kafka
				require.Equal(t, f.queues("group", shards)[ordering.Shard(key, shards)], queue)
			}
		}
		busiest := slices.Max(slices.Collect(maps.Values(load)))
		ratio := float64(busiest) * shards / keys
		t.Logf("max/mean %.2f", ratio)
		require.Less(t, ratio, 1.15)
	})
}

func TestRoutingCantBeChanged(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		other := amqpshard.Slots
		if on.routing == other {
			other = amqpshard.ConsistentHash
		}
		with := func(c *amqpshard.Config) { c.Routing = other }
		require.NoError(t, f.open("group").Declare(t.Context(), f.topic))
		broker := f.open("group", with)
		err := broker.Declare(t.Context(), f.topic)
		var refused *amqpshard.TopologyError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, f.topic+".group", refused.Name)
		require.ErrorContains(t, err, "another Routing")
		_, err = broker.Subscriber().Subscribe(t.Context(), f.topic)
		require.ErrorIs(t, err, amqpshard.ErrTopology)

		// Another group may: publishers need not know.
		second := f.open("second", with)
		require.NoError(t, second.Declare(t.Context(), f.topic))
		for _, broker := range []*amqpshard.Broker{broker, second} {
			require.NoError(t, broker.Publisher().Publish(f.topic, newMessage("a", ""), newMessage("b", "")))
		}
		require.Equal(t, 4, f.depth(f.queues("group", 2)...))
		require.Equal(t, 4, f.depth(f.queues("second", 2)...))
	})
}

// A message that one group has no queue for is refused, although another group
// stored it: the publisher sends it again. Without that it was lost in silence.
func TestGroupWithoutQueueIsNotSkipped(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		first, second := f.open("first"), f.open("second")
		require.NoError(t, first.Declare(t.Context(), f.topic))
		require.NoError(t, second.Declare(t.Context(), f.topic))
		f.with(func(ch *amqp.Channel) {
			for _, queue := range f.queues("second", 2) {
				_, err := ch.QueueDelete(queue, false, false, false)
				require.NoError(t, err)
			}
		})
		msg := newMessage("a", "")
		err := first.Publisher().Publish(f.topic, msg)
		var failed *amqpshard.PublishError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, []string{msg.UUID}, failed.Unconfirmed)
		f.eventuallyDepth(1, f.queues("first", 2)...)
		f.eventuallyDepth(1, f.topic+".second.unrouted")

		log := newLog()
		repaired, err := amqpshard.Open(t.Context(), amqpshard.Config{URL: f.url, Group: "second", Shards: 2, Routing: on.routing}, log)
		require.NoError(t, err)
		messages := f.subscribe(repaired)
		require.NoError(t, first.Publisher().Publish(f.topic, msg))
		got := f.receive(messages)
		require.Equal(t, msg.UUID, got.UUID)
		got.Ack()
		require.Eventually(t, func() bool { return log.has(f.topic + ".second.unrouted") }, timeout, minPoll)
		require.NoError(t, repaired.Close())
	})
}

// A foreign publisher that leaves the routing key out is told, and can be seen.
func TestSlotsRefuseOtherRoutingKeys(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group")
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		f.with(func(ch *amqp.Channel) {
			require.NoError(t, ch.Confirm(false))
			confirm, err := ch.PublishWithDeferredConfirm(f.topic, "orders", true, false, amqp.Publishing{
				Headers: amqp.Table{ordering.PartitionKeyMetadata: "a"},
			})
			require.NoError(t, err)
			stored := on.routing == amqpshard.ConsistentHash
			require.Equal(t, stored, confirm.Wait())
			if !stored {
				f.eventuallyDepth(1, f.topic+".group.unrouted")
			}
		})
	})
}

// Deleting the queue of a shard leaves all keys where they are.
func TestDeletedQueueMovesNoKey(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		broker := f.open("group", withShards(4))
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		before := f.place(broker, "group", 4, 100)
		gone := f.queues("group", 4)[1]
		f.with(func(ch *amqp.Channel) {
			_, err := ch.QueueDelete(gone, false, false, false)
			require.NoError(t, err)
		})
		moved := 0
		for key, queue := range before {
			err := broker.Publisher().Publish(f.topic, newMessage(key, ""))
			require.Equal(t, queue == gone, err != nil, "%s: %v", key, err)
			if err == nil && f.depth(queue) == 0 {
				moved++
			}
			f.with(func(ch *amqp.Channel) { _, _ = ch.QueuePurge(queue, false) })
		}
		require.Zero(t, moved)
		require.NoError(t, broker.Declare(t.Context(), f.topic))
		require.Equal(t, before, f.place(broker, "group", 4, 100))
	})
}

// The number of shards changes with a new group, while publishers go on.
func TestReshardByNewGroup(t *testing.T) {
	onAll(t, func(t *testing.T, on server) {
		f := setup(t, on)
		small, large := f.open("small"), f.open("large", withShards(5))
		messages := f.subscribe(small)
		var handled []string // what Deduplicate would let through
		seen := map[string]bool{}
		take := func(messages <-chan *message.Message) {
			msg := f.receive(messages)
			if !seen[msg.UUID] {
				seen[msg.UUID] = true
				handled = append(handled, string(msg.Payload))
			}
			msg.Ack()
		}
		publish := func(payload int) {
			require.NoError(t, small.Publisher().Publish(f.topic, newMessage("a", strconv.Itoa(payload))))
		}
		publish(1)
		require.NoError(t, large.Declare(t.Context(), f.topic)) // both groups get what comes from here on
		publish(2)
		publish(3)
		take(messages)
		take(messages) // the old group has handled all from before: it stops
		require.NoError(t, small.Close())
		later := f.subscribe(large)
		for range 2 {
			take(later)
		}
		require.Equal(t, []string{"1", "2", "3"}, handled)
	})
}

// log remembers the queues that were logged.
type log struct {
	watermill.NopLogger
	*logged
}

type logged struct {
	mu     sync.Mutex
	queues map[any]bool
	texts  []string // of errors
	debugs []string
}

func newLog() log { return log{logged: &logged{queues: map[any]bool{}}} }

func (l log) With(watermill.LogFields) watermill.LoggerAdapter { return l }

func (l log) Error(text string, err error, fields watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queues[fields["queue"]] = true
	l.texts = append(l.texts, fmt.Sprint(text, ": ", err))
}

func (l log) Debug(text string, _ watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.debugs = append(l.debugs, text)
}

// count returns how many of the errors, and of what is at level debug, have text in them.
func (l log) count(text string) (errs, debugs int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.texts {
		if strings.Contains(t, text) {
			errs++
		}
	}
	for _, t := range l.debugs {
		if strings.Contains(t, text) {
			debugs++
		}
	}
	return errs, debugs
}

func (l log) has(queue string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.queues[queue]
}

func (l log) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.texts)
}
