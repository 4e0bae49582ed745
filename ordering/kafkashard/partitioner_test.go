package kafkashard_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

// Each partitioner places every key where sarama's own does, and Open takes it.
func TestPartitioners(t *testing.T) {
	t.Parallel()
	for partitioner, constructor := range map[ordering.Partitioner]sarama.PartitionerConstructor{
		"":                                 sarama.NewMurmur2Partitioner,
		ordering.Murmur2Partitioner:        sarama.NewMurmur2Partitioner,
		ordering.CRC32Partitioner:          sarama.NewConsistentCRCHashPartitioner,
		ordering.FNV1aPartitioner:          sarama.NewHashPartitioner,
		ordering.FNV1aReferencePartitioner: sarama.NewReferenceHashPartitioner,
	} {
		t.Run(string(partitioner), func(t *testing.T) {
			t.Parallel()
			theirs := constructor("topic")
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			for range 20_000 {
				key, n := make([]byte, random.IntN(ordering.MaxKeyLength+1)), 1+random.IntN(1000)
				for i := range key {
					key[i] = byte(random.Uint32())
				}
				want, err := theirs.Partition(&sarama.ProducerMessage{Key: sarama.ByteEncoder(key)}, int32(n))
				if got := partitioner.Shard(string(key), n); err != nil || got != int(want) {
					t.Fatalf("seed %d, key %q, %d partitions: %d, sarama has %d (%v)", seed, key, n, got, want, err)
				}
			}
			_, err := kafkashard.Open(t.Context(), kafkashard.Config{
				Brokers: []string{"127.0.0.1:1"}, Group: "group", Partitioner: partitioner, DialTimeout: 200 * time.Millisecond,
				Sarama: func(c *sarama.Config) { c.Producer.Partitioner = constructor },
			}, nil)
			if err == nil || errors.Is(err, kafkashard.ErrInvalidConfig) {
				t.Errorf("Open = %v, want an error of the network", err)
			}
		})
	}
}
