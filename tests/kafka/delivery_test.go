package kafka_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		broker, topic := open(t, config(brokers)), unique("topic")
		sent := newMessage("Käse", "payload")
		sent.Metadata.Set("event_id", "e1")
		before := time.Now().Truncate(time.Millisecond)
		require.NoError(t, broker.Publisher().Publish(topic, sent))

		got := take(t, subscribe(t, broker, topic), 1)[0]
		require.Equal(t, sent.UUID, got.UUID)
		require.Equal(t, sent.Payload, got.Payload)
		written, err := time.Parse(time.RFC3339Nano, got.Metadata.Get(ordering.PublishedAtMetadata))
		require.NoError(t, err)
		require.WithinRange(t, written, before, time.Now())
		delete(got.Metadata, ordering.PublishedAtMetadata)
		require.Equal(t, message.Metadata{
			"event_id":                    "e1",
			ordering.PartitionKeyMetadata: "Käse",
			kafkashard.PartitionMetadata:  strconv.Itoa(ordering.Shard("Käse", 4)),
			kafkashard.OffsetMetadata:     "0",
		}, got.Metadata)
	})
}

// A key's partition is ordering.Shard, for us and for franz-go, which places
// records as the Java client does.
func TestPartitionIsShard(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.Shards = 12
		broker := open(t, cfg)
		const keys = 100
		var messages []*message.Message
		var records []*kgo.Record
		for i := range keys {
			key := "key-" + strconv.Itoa(i)
			messages = append(messages, newMessage(key, ""))
			records = append(records, &kgo.Record{Topic: topic, Key: []byte(key)})
		}
		require.NoError(t, broker.Publisher().Publish(topic, messages...))
		produce(t, brokers, records...)

		perKey := map[string]int{}
		for _, msg := range take(t, subscribe(t, broker, topic), 2*keys) {
			key := msg.Metadata.Get(ordering.PartitionKeyMetadata)
			require.Equal(t, strconv.Itoa(ordering.Shard(key, 12)), msg.Metadata.Get(kafkashard.PartitionMetadata), key)
			perKey[key]++
		}
		require.Len(t, perKey, keys)
	})
}

// B67: a new group gets what was published before its first subscription; and
// each group gets everything.
func TestGroupsStartAtTheOldestMessage(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		first, second, topic := open(t, config(brokers)), open(t, config(brokers)), unique("topic")
		require.NoError(t, first.Publisher().Publish(topic, series("key", 10)...))
		want := payloads(series("key", 10))
		require.Equal(t, want, payloads(take(t, subscribe(t, first, topic), 10)))
		require.Equal(t, want, payloads(take(t, subscribe(t, second, topic), 10)))
	})
}

func TestNackedMessageComesBackBeforeTheNext(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		broker, topic := open(t, config(brokers)), unique("topic")
		require.NoError(t, broker.Publisher().Publish(topic, series("key", 5)...))
		messages := subscribe(t, broker, topic)
		var seen []string
		for nacks := 0; len(seen) < 8; {
			msg := receive(t, messages)
			seen = append(seen, string(msg.Payload))
			if string(msg.Payload) == "3" && nacks < 3 {
				nacks++
				msg.Nack()
				continue
			}
			msg.Ack()
		}
		require.Equal(t, []string{"1", "2", "3", "3", "3", "3", "4", "5"}, seen)
	})
}

// B57: records of which nothing is known are delivered, and the group goes on.
func TestForeignRecords(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		broker, topic := open(t, config(brokers)), unique("topic")
		require.NoError(t, broker.Declare(t.Context(), topic))
		partition := int32(ordering.Shard("ours", 4))
		produce(
			t, brokers,
			&kgo.Record{Topic: topic, Partition: partition},
			&kgo.Record{Topic: topic, Partition: partition, Key: []byte("sku-1"), Value: []byte("\xff\x00")},
			&kgo.Record{
				Topic: topic, Partition: partition, Key: []byte("\xff"), Value: []byte("v"),
				Headers: []kgo.RecordHeader{{Key: "h", Value: []byte("\x80\x00")}, {Key: "", Value: nil}},
			},
		)
		require.NoError(t, broker.Publisher().Publish(topic, newMessage("ours", "last")))

		got := take(t, subscribe(t, broker, topic), 4)
		require.Equal(t, []string{"", "\xff\x00", "v", "last"}, payloads(got))
		require.Equal(t, []string{"", "", ""}, uuids(got[:3]...))
		require.NotNil(t, got[0].Payload)
		require.NotContains(t, got[0].Metadata, ordering.PartitionKeyMetadata)
		require.Equal(t, "sku-1", got[1].Metadata.Get(ordering.PartitionKeyMetadata))
		require.NotContains(t, got[2].Metadata, ordering.PartitionKeyMetadata)
		require.Equal(t, "\x80\x00", got[2].Metadata.Get("h"))
	})
}

func TestSecondSubscribeIsRefused(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		broker, topic := open(t, config(brokers)), unique("topic")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		messages, err := broker.Subscriber().Subscribe(ctx, topic)
		require.NoError(t, err)
		_, err = broker.Subscriber().Subscribe(t.Context(), topic)
		require.ErrorIs(t, err, kafkashard.ErrSubscribed)
		require.ErrorContains(t, err, "two groups")
		require.ErrorContains(t, err, topic)
		subscribe(t, broker, unique("other"))

		cancel()
		for range messages {
		}
		subscribe(t, broker, topic)
	})
}

// A Router that closes lets the running handler finish with a living context;
// nothing that was acked comes back to the next process of the group.
func TestGracefulClose(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.Sarama = func(c *sarama.Config) {
			c.Consumer.Offsets.AutoCommit.Interval = time.Hour // only the close commits
		}
		broker := open(t, cfg)
		require.NoError(t, broker.Publisher().Publish(topic, series("key", 20)...))

		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		require.NoError(t, err)
		running, release := make(chan *message.Message), make(chan struct{})
		router.AddConsumerHandler("handler", topic, broker.Subscriber(), func(msg *message.Message) error {
			if string(msg.Payload) == "20" {
				running <- msg
				<-release
			}
			return msg.Context().Err()
		})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ended := make(chan error, 1)
		go func() { ended <- router.Run(ctx) }()
		last := receive(t, running)

		cancel()
		closed := make(chan error, 1)
		go func() { closed <- broker.Close() }()
		select {
		case <-last.Context().Done():
			require.FailNow(t, "the close ended the context of a running handler")
		case err := <-closed:
			require.FailNow(t, "the broker was closed under a running handler", "%v", err)
		case <-time.After(300 * time.Millisecond):
		}
		close(release)
		require.NoError(t, <-ended)
		require.NoError(t, <-closed)

		again := open(t, cfg)
		require.NoError(t, again.Publisher().Publish(topic, newMessage("key", "next")))
		require.Equal(t, []string{"next"}, payloads(take(t, subscribe(t, again, topic), 1)))
	})
}

// A handler that does not finish in time is cut, and its message comes back.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.DrainTimeout = 200 * time.Millisecond
		broker, err := kafkashard.Open(t.Context(), cfg, nil)
		require.NoError(t, err)
		require.NoError(t, broker.Publisher().Publish(topic, series("key", 2)...))
		messages := subscribe(t, broker, topic)
		stuck := receive(t, messages)
		require.ErrorContains(t, broker.Close(), "1 messages were still running")
		awaitDone(t, stuck.Context(), "the context")
		_, open1 := <-messages
		require.False(t, open1)

		again := open(t, cfg)
		require.Equal(t, []string{"1", "2"}, payloads(take(t, subscribe(t, again, topic), 2)))
	})
}

// produce writes records as a program without Watermill does: with a key by
// the Java client's partitioner, and otherwise where the record says.
func produce(t *testing.T, brokers []string, records ...*kgo.Record) {
	t.Helper()
	options := []kgo.Opt{kgo.SeedBrokers(brokers...)}
	if records[0].Key == nil {
		options = append(options, kgo.RecordPartitioner(kgo.ManualPartitioner()))
	}
	client, err := kgo.NewClient(options...)
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(t.Context(), records...).FirstErr())
}
