package kafka_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

// The broker is killed while several goroutines publish. Everything
// whose Publish returned nil is stored, and once unless a call before had failed
// with an unknown outcome. The order of each key is kept, and publishing goes on by
// itself.
func TestBrokerIsKilledB84(t *testing.T) {
	t.Parallel()
	server := services.NewInstance(t, services.Kafka)
	cfg, topic := config([]string{server.Value()}), unique("topic")
	cfg.PublishTimeout = 5 * time.Second
	broker := open(t, cfg)
	require.NoError(t, broker.Declare(t.Context(), topic))

	const keys = 8
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	finish := make(chan struct{})
	var publishers sync.WaitGroup
	var confirmed [keys]atomic.Int64
	var failures atomic.Int64
	var mu sync.Mutex
	unknown := map[string]int{} // by payload, how often its publish ended with an unknown outcome
	for k := range keys {
		publishers.Go(func() {
			for n := 1; ; n++ {
				key := "key-" + strconv.Itoa(k)
				msg := newMessage(key, strconv.Itoa(n))
				for {
					err := broker.Publisher().Publish(topic, msg)
					if err == nil {
						break
					}
					failures.Add(1)
					if errors.Is(err, kafkashard.ErrOutcomeUnknown) {
						mu.Lock()
						unknown[key+"/"+strconv.Itoa(n)]++
						mu.Unlock()
					}
					if ctx.Err() != nil {
						t.Errorf("publish: %v", err)
						return
					}
				}
				confirmed[k].Store(int64(n))
				select {
				case <-finish:
					return
				default:
				}
			}
		})
	}
	progress := func(when string) {
		t.Helper()
		var from [keys]int64
		for k := range confirmed {
			from[k] = confirmed[k].Load()
		}
		require.Eventually(t, func() bool {
			for k := range confirmed {
				if confirmed[k].Load() < from[k]+20 {
					return false
				}
			}
			return true
		}, 2*time.Minute, 10*time.Millisecond, when)
	}
	progress("before")
	require.NoError(t, server.Kill())
	require.NoError(t, server.Start(ctx))
	progress("after the kill")
	close(finish)
	publishers.Wait()

	stored := readAll(t, server.Value(), topic)
	total, copies := 0, 0
	for k := range keys {
		key, last := "key-"+strconv.Itoa(k), 0
		seen := map[int]int{}
		for _, n := range stored[key] {
			seen[n]++
			if seen[n] == 1 {
				require.Equal(t, last+1, n, "%s: %v", key, stored[key])
				last = n
				continue
			}
			copies++
			require.LessOrEqual(t, seen[n], 1+unknown[key+"/"+strconv.Itoa(n)], "%s/%d: only a caller makes copies", key, n)
		}
		require.Equal(t, int(confirmed[k].Load()), last, key)
		total += last
	}
	t.Logf("%d messages, %d failed publishes, %d messages whose outcome was unknown for a while, %d copies", total, failures.Load(), len(unknown), copies)
}

// readAll returns the payloads that are stored, by key and in order, read by another
// client than the one that has published.
func readAll(t *testing.T, address, topic string) map[string][]int {
	t.Helper()
	client, err := sarama.NewClient([]string{address}, sarama.NewConfig())
	require.NoError(t, err)
	defer client.Close() //nolint:errcheck // it only reads
	partitions, err := client.Partitions(topic)
	require.NoError(t, err)
	left := int64(0)
	for _, p := range partitions {
		end, err := client.GetOffset(topic, p, sarama.OffsetNewest)
		require.NoError(t, err)
		left += end
	}
	reader, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	require.NoError(t, err)
	defer reader.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	stored := map[string][]int{}
	for left > 0 {
		fetches := reader.PollFetches(ctx)
		require.NoError(t, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			n, err := strconv.Atoi(string(r.Value))
			require.NoError(t, err)
			stored[string(r.Key)] = append(stored[string(r.Key)], n)
			left--
		})
	}
	return stored
}
