// Package kafka_test runs kafkashard against Kafka in the test process (kfake)
// and against the server that TEST_KAFKA_BROKERS names.
package kafka_test

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

const patience = 20 * time.Second // for an event that must come

// TestMain checks that no goroutine is left. It has patience, because a broker
// that was closed without an answer from the cluster ends by its timeouts.
func TestMain(m *testing.M) {
	code := m.Run()
	// sarama's metrics share one ticker per process, which never ends.
	ticker := goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")
	for deadline := time.Now().Add(patience); code == 0; {
		err := goleak.Find(ticker)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// onEach runs test against both clusters.
func onEach(t *testing.T, test func(t *testing.T, brokers []string)) {
	t.Helper()
	t.Run("kfake", func(t *testing.T) {
		t.Parallel()
		test(t, fake(t).ListenAddrs())
	})
	t.Run("kafka", func(t *testing.T) {
		t.Parallel()
		addresses := os.Getenv("TEST_KAFKA_BROKERS")
		if addresses == "" {
			t.Fatal("TEST_KAFKA_BROKERS is not set: run `make services`")
		}
		test(t, strings.Split(addresses, ","))
	})
}

func fake(t *testing.T) *kfake.Cluster {
	t.Helper()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	return cluster
}

// config is for a group of its own, with heartbeats that notice a rebalance fast.
func config(brokers []string) kafkashard.Config {
	return kafkashard.Config{
		Brokers: brokers,
		Group:   unique("group"),
		Shards:  4,
		Sarama: func(c *sarama.Config) {
			c.Consumer.Group.Heartbeat.Interval = 200 * time.Millisecond
		},
	}
}

func unique(name string) string { return name + "-" + watermill.NewShortUUID() }

func open(t *testing.T, cfg kafkashard.Config) *kafkashard.Broker {
	t.Helper()
	broker, err := kafkashard.Open(t.Context(), cfg, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, broker.Close()) })
	return broker
}

func subscribe(t *testing.T, broker *kafkashard.Broker, topic string) <-chan *message.Message {
	t.Helper()
	messages, err := broker.Subscriber().Subscribe(t.Context(), topic)
	require.NoError(t, err)
	return messages
}

func receive(t *testing.T, messages <-chan *message.Message) *message.Message {
	t.Helper()
	select {
	case msg, ok := <-messages:
		require.True(t, ok, "subscription ended")
		return msg
	case <-time.After(patience):
		require.FailNow(t, "no message")
		return nil
	}
}

// take receives and acks n messages.
func take(t *testing.T, messages <-chan *message.Message, n int) []*message.Message {
	t.Helper()
	taken := make([]*message.Message, n)
	for i := range taken {
		taken[i] = receive(t, messages)
		taken[i].Ack()
	}
	return taken
}

func newMessage(key, payload string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	msg.Metadata.Set(ordering.PartitionKeyMetadata, key)
	return msg
}

// series returns n messages of one key with the payloads 1 … n.
func series(key string, n int) []*message.Message {
	messages := make([]*message.Message, n)
	for i := range messages {
		messages[i] = newMessage(key, strconv.Itoa(i+1))
	}
	return messages
}

func payloads(messages []*message.Message) []string {
	texts := make([]string, len(messages))
	for i, msg := range messages {
		texts[i] = string(msg.Payload)
	}
	return texts
}

func uuids(messages ...*message.Message) []string {
	ids := make([]string, len(messages))
	for i, msg := range messages {
		ids[i] = msg.UUID
	}
	return ids
}

func awaitDone(t *testing.T, ctx context.Context, what string) { //nolint:revive // t first, like the others
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(patience):
		require.FailNow(t, fmt.Sprintf("%s did not end", what))
	}
}
