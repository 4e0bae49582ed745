package kafka_test

import (
	"hash/fnv"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

// K6, B77: each key goes to the partition of the chosen partitioner, by default
// the Java client's.
func TestChosenPartitioner(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		for _, p := range []ordering.Partitioner{
			"", ordering.Murmur2Partitioner, ordering.CRC32Partitioner, ordering.FNV1aPartitioner, ordering.FNV1aReferencePartitioner,
		} {
			cfg, topic := config(brokers), unique("topic")
			cfg.Partitioner, cfg.Shards = p, 7
			broker := open(t, cfg)
			messages := make([]*message.Message, 30)
			for i := range messages {
				messages[i] = newMessage("key-"+strconv.Itoa(i), "")
			}
			require.NoError(t, broker.Publisher().Publish(topic, messages...))
			for _, msg := range take(t, subscribe(t, broker, topic), len(messages)) {
				key := msg.Metadata.Get(ordering.PartitionKeyMetadata)
				require.Equal(t, strconv.Itoa(p.Shard(key, 7)), msg.Metadata.Get(kafkashard.PartitionMetadata), "%s %s", p, key)
			}
		}
	})
}

// franz-go places keys in the same way: with its default, and with what it has
// for topics of sarama.
func TestPartitionersOfFranzGo(t *testing.T) {
	t.Parallel()
	fnv1a := func(key []byte) uint32 {
		h := fnv.New32a()
		_, _ = h.Write(key)
		return h.Sum32()
	}
	for p, theirs := range map[ordering.Partitioner]kgo.Partitioner{
		ordering.Murmur2Partitioner:        kgo.StickyKeyPartitioner(nil),
		ordering.FNV1aPartitioner:          kgo.StickyKeyPartitioner(kgo.SaramaCompatHasher(fnv1a)),
		ordering.FNV1aReferencePartitioner: kgo.StickyKeyPartitioner(kgo.KafkaHasher(fnv1a)),
	} {
		topic := theirs.ForTopic("topic")
		for i := range 5_000 {
			key, n := strconv.Itoa(i*i), 1+i%50
			require.Equal(t, topic.Partition(&kgo.Record{Key: []byte(key)}, n), p.Shard(key, n), "%s, key %s of %d", p, key, n)
		}
	}
}
