package kafka_test

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

// Brokers that take requests and answer nothing hold up neither Publish, nor
// Declare, nor Close.
func TestSilentBrokers(t *testing.T) {
	t.Parallel()
	var silent atomic.Bool
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.ListenFn(func(network, address string) (net.Listener, error) {
		listener, err := net.Listen(network, address)
		return faultyListener{listener, func(c net.Conn, b []byte) (int, error) {
			if silent.Load() {
				return len(b), nil
			}
			return c.Write(b)
		}}, err
	}))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)

	cfg, topic := config(cluster.ListenAddrs()), unique("topic")
	cfg.PublishTimeout, cfg.DialTimeout, cfg.DrainTimeout = time.Second, time.Second, time.Second
	cfg.Sarama = func(c *sarama.Config) { // so that what is left behind ends soon
		c.Net.ReadTimeout = time.Second
		c.Metadata.Retry.Max = 0
		c.Producer.Retry.Max = 1
		c.Consumer.Offsets.Retry.Max = 0
	}
	broker, err := kafkashard.Open(t.Context(), cfg, nil)
	require.NoError(t, err)
	require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "1")))
	receive(t, subscribe(t, broker, topic)).Ack()

	silent.Store(true)
	within := func(d time.Duration, call func() error) error {
		t.Helper()
		begin := time.Now()
		err := call()
		require.Less(t, time.Since(begin), d+time.Second)
		return err
	}
	err = within(time.Second, func() error { return broker.Publisher().Publish(topic, newMessage("key", "2")) })
	require.ErrorIs(t, err, kafkashard.ErrOutcomeUnknown)
	err = within(time.Second, func() error { return broker.Publisher().Publish(unique("topic"), newMessage("key", "")) })
	require.Error(t, err)
	require.NotErrorIs(t, err, kafkashard.ErrOutcomeUnknown)
	require.Error(t, within(3*time.Second, broker.Close))
}

// faultyListener lets write decide what becomes of an answer.
type faultyListener struct {
	net.Listener
	write func(net.Conn, []byte) (int, error)
}

func (l faultyListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	return faultyConn{conn, l.write}, err
}

type faultyConn struct {
	net.Conn
	write func(net.Conn, []byte) (int, error)
}

func (c faultyConn) Write(b []byte) (int, error) { return c.write(c.Conn, b) }
