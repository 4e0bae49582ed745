package kafka_test

import (
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

// A topic with another partition count is refused on every way to it; without
// an explicit count any is taken, and a new topic gets the default.
func TestShardCount(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.Shards = 3
		require.NoError(t, open(t, cfg).Declare(t.Context(), topic))
		require.NoError(t, open(t, cfg).Declare(t.Context(), topic))

		cfg.Shards = 5
		other := open(t, cfg)
		_, subscribeErr := other.Subscriber().Subscribe(t.Context(), topic)
		for way, err := range map[string]error{
			"declare":   other.Declare(t.Context(), topic),
			"publish":   other.Publisher().Publish(topic, newMessage("key", "")),
			"subscribe": subscribeErr,
		} {
			var count *kafkashard.ShardCountError
			require.ErrorAs(t, err, &count, way)
			require.Equal(t, kafkashard.ShardCountError{Topic: topic, Have: 3, Want: 5}, *count, way)
		}

		cfg.Shards = 0
		anyCount, fresh := open(t, cfg), unique("topic")
		require.NoError(t, anyCount.Declare(t.Context(), topic, fresh))
		cfg.Shards = kafkashard.DefaultShards
		require.NoError(t, open(t, cfg).Declare(t.Context(), fresh))
	})
}

// Partitions that are added to a topic would move its keys: a publisher that has
// declared it before refuses to go on, as soon as it knows.
func TestPartitionsAreAdded(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.Sarama = func(c *sarama.Config) { c.Metadata.RefreshFrequency = 100 * time.Millisecond }
		broker := open(t, cfg)
		require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "")))
		admin, err := sarama.NewClusterAdmin(brokers, sarama.NewConfig())
		require.NoError(t, err)
		defer admin.Close()
		require.NoError(t, admin.CreatePartitions(topic, 6, nil, false))
		require.Eventually(t, func() bool {
			err = broker.Publisher().Publish(topic, newMessage("key", ""))
			return err != nil
		}, patience, 10*time.Millisecond)
		var count *kafkashard.ShardCountError
		require.ErrorAs(t, err, &count)
		require.Equal(t, kafkashard.ShardCountError{Topic: topic, Have: 6, Want: 4}, *count)
	})
}

// Many processes may start at the same time.
func TestConcurrentDeclare(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		topic := unique("topic")
		var wg sync.WaitGroup
		errs := make([]error, 4)
		for i := range errs {
			broker := open(t, config(brokers))
			wg.Go(func() { errs[i] = broker.Declare(t.Context(), topic) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
	})
}

// B75: a message without a usable key is an error, and nothing is sent.
func TestMissingKey(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		broker, topic := open(t, config(brokers)), unique("topic")
		keyless := message.NewMessage("keyless", nil)
		err := broker.Publisher().Publish(topic, newMessage("key", "1"), keyless, newMessage("key", "2"))
		var keyErr *ordering.KeyError
		require.ErrorAs(t, err, &keyErr)
		require.Equal(t, "keyless", keyErr.UUID)
		require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "first")))
		require.Equal(t, []string{"first"}, payloads(take(t, subscribe(t, broker, topic), 1)))
	})
}

func TestKeyFunc(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.Key = ordering.KeyFromMetadata("sku")
		broker := open(t, cfg)
		msg := message.NewMessage("u", nil)
		msg.Metadata.Set("sku", "sku-1")
		require.NoError(t, broker.Publisher().Publish(topic, msg))
		got := take(t, subscribe(t, broker, topic), 1)[0]
		require.Equal(t, "sku-1", got.Metadata.Get(ordering.PartitionKeyMetadata))
	})
}

// After a message that fails, no later one of its key is sent, and the error
// says which are stored.
func TestFailedMessageStopsTheCall(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		broker, topic := open(t, config(brokers)), unique("topic")
		a1, b1, c1 := newMessage("a", "a1"), newMessage("b", strings.Repeat("b", 2<<20)), newMessage("c", "c1")
		b2, a2 := newMessage("b", "b2"), newMessage("a", "a2")
		err := broker.Publisher().Publish(topic, a1, b1, c1, b2, a2)
		var failed *kafkashard.PublishError
		require.ErrorAs(t, err, &failed)
		require.ErrorIs(t, err, kafkashard.ErrOutcomeUnknown)
		require.Equal(t, uuids(b1), failed.Unknown)
		require.Equal(t, uuids(b2, a2), failed.Unsent)

		require.NoError(t, broker.Publisher().Publish(topic, b2, a2))
		got := payloads(take(t, subscribe(t, broker, topic), 4))
		require.ElementsMatch(t, []string{"a1", "c1", "b2", "a2"}, got)
	})
}

func TestClosedBroker(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		broker, topic := open(t, config(brokers)), unique("topic")
		require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "")))
		require.NoError(t, broker.Publisher().Close())
		require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "")))
		require.NoError(t, broker.Close())
		require.NoError(t, broker.Close())
		for _, err := range []error{
			broker.Publisher().Publish(topic, newMessage("key", "")),
			broker.Publisher().Publish(unique("topic"), newMessage("key", "")),
			broker.Declare(t.Context(), topic),
		} {
			require.ErrorIs(t, err, kafkashard.ErrClosed)
			require.NotErrorIs(t, err, kafkashard.ErrOutcomeUnknown)
		}
		_, err := broker.Subscriber().Subscribe(t.Context(), topic)
		require.ErrorIs(t, err, kafkashard.ErrClosed)
	})
}

// Connections that break before or after a record is stored are no error, and
// nothing is stored twice or out of order.
func TestPublishSurvivesCutConnections(t *testing.T) {
	t.Parallel()
	var cutAnswer atomic.Bool
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.ListenFn(func(network, address string) (net.Listener, error) {
		listener, err := net.Listen(network, address)
		return faultyListener{listener, func(c net.Conn, b []byte) (int, error) {
			if cutAnswer.Swap(false) {
				return 0, c.Close()
			}
			return c.Write(b)
		}}, err
	}))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	broker, topic := open(t, config(cluster.ListenAddrs())), unique("topic")
	var requests atomic.Int64
	cluster.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		switch requests.Add(1) % 6 {
		case 2:
			return nil, errors.New("cut"), true
		case 5:
			cutAnswer.Store(true)
		}
		return nil, nil, false
	})
	const keys, each = 8, 20
	var wg sync.WaitGroup
	errs := make([]error, keys)
	for k := range keys {
		wg.Go(func() {
			errs[k] = broker.Publisher().Publish(topic, series("key-"+strconv.Itoa(k), each)...)
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Greater(t, requests.Load(), int64(6))

	last := map[string]int{}
	for _, msg := range take(t, subscribe(t, broker, topic), keys*each) {
		key, seq := msg.Metadata.Get(ordering.PartitionKeyMetadata), payloads([]*message.Message{msg})[0]
		last[key]++
		require.Equal(t, strconv.Itoa(last[key]), seq, key)
	}
}

// B84: when the cluster gives no answer, Publish ends in time, says that the
// outcome is unknown, and works again afterwards with nothing overtaken.
func TestPublishIsBounded(t *testing.T) {
	t.Parallel()
	cluster := fake(t)
	cfg, topic := config(cluster.ListenAddrs()), unique("topic")
	cfg.PublishTimeout = time.Second
	broker := open(t, cfg)
	require.NoError(t, broker.Declare(t.Context(), topic))
	var gone atomic.Bool
	gone.Store(true)
	cluster.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if gone.Load() {
			return nil, errors.New("cut"), true
		}
		return nil, nil, false
	})
	messages := series("key", 2)
	begin := time.Now()
	err := broker.Publisher().Publish(topic, messages...)
	require.Less(t, time.Since(begin), 3*time.Second)
	var failed *kafkashard.PublishError
	require.ErrorAs(t, err, &failed)
	require.ErrorIs(t, err, kafkashard.ErrOutcomeUnknown)
	require.Equal(t, uuids(messages[0]), failed.Unknown)
	require.Equal(t, uuids(messages[1]), failed.Unsent)

	gone.Store(false)
	require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "later")))
	got := take(t, subscribe(t, broker, topic), 2)
	require.Equal(t, []string{"1", "later"}, payloads(got))
}
