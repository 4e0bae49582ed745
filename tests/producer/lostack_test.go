package producer_test

import (
	"context"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/Shopify/toxiproxy/v2"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/rabbitmq"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// brokers open one on RabbitMQ or Kafka that ends with the test.
var brokers = map[string]func(t *testing.T, topic, group string) ordering.Broker{
	"amqp": func(t *testing.T, topic, group string) ordering.Broker {
		deleteTopic(t, topic, group)
		return openAMQP(t, amqpshard.Config{URL: services.Value(t, services.AMQP), Group: group})
	},
	"kfake": func(t *testing.T, _, group string) ordering.Broker {
		cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
		require.NoError(t, err)
		t.Cleanup(cluster.Close)
		return openKafka(t, kafkashard.Config{Brokers: cluster.ListenAddrs(), Group: group})
	},
}

const shards = 2

// deleteTopic deletes what a topic has on RabbitMQ when the brokers that are
// opened after it are closed.
func deleteTopic(t *testing.T, topic string, groups ...string) {
	t.Helper()
	t.Cleanup(func() { rabbitmq.Drop(t, services.Value(t, services.AMQP), topic, shards, groups...) })
}

func openAMQP(t *testing.T, cfg amqpshard.Config) ordering.Broker {
	t.Helper()
	cfg.Shards = shards
	broker, err := amqpshard.Open(t.Context(), cfg, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, broker.Close()) })
	return broker
}

func openKafka(t *testing.T, cfg kafkashard.Config) ordering.Broker {
	t.Helper()
	cfg.Shards = shards
	broker, err := kafkashard.Open(t.Context(), cfg, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, broker.Close()) })
	return broker
}

// proxy is a toxiproxy in this process.
type proxy struct {
	t *testing.T
	*toxiproxy.Proxy
}

func newProxy(t *testing.T, upstream string) proxy {
	t.Helper()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := toxiproxy.NewProxy(server, t.Name(), "127.0.0.1:0", upstream)
	require.NoError(t, p.Start())
	t.Cleanup(p.Stop)
	return proxy{t, p}
}

// loseAnswers lets requests pass and drops what the server answers.
func (p proxy) loseAnswers() {
	p.t.Helper()
	_, err := p.Toxics.AddToxicJson(strings.NewReader(`{"name": "lose", "type": "limit_data", "stream": "downstream", "attributes": {"bytes": 0}}`))
	require.NoError(p.t, err)
}

func (p proxy) heal() {
	p.t.Helper()
	require.NoError(p.t, p.Toxics.RemoveToxic(context.WithoutCancel(p.t.Context()), "lose"))
}

// K8 and K2, without protection by the broker: RabbitMQ stores a message, the
// confirm is lost, the producer sends it again, RabbitMQ has it twice. A consumer
// of the numbers acts once; one that has only a key that the copy does not share
// acts twice.
func TestLostConfirmOnRabbitMQ(t *testing.T) {
	t.Parallel()
	address := services.Value(t, services.AMQP)
	db, topic := open(t, testdb.SQLite), "orders-"+watermill.NewShortUUID()
	deleteTopic(t, topic, "protected", "bare")
	protected := openAMQP(t, amqpshard.Config{URL: address, Group: "protected"})
	bare := openAMQP(t, amqpshard.Config{URL: address, Group: "bare"})
	require.NoError(t, protected.Declare(t.Context(), topic))
	require.NoError(t, bare.Declare(t.Context(), topic))
	with := consume(t, db, protected.Subscriber(), topic, "protected", anew, middleware.RejectReplayed(newWindows(t, db, testdb.SQLite)))
	without := consume(t, db, bare.Subscriber(), topic, "bare", anew)

	through, err := url.Parse(address)
	require.NoError(t, err)
	p := newProxy(t, through.Host)
	through.Host = p.Listen
	broker := openAMQP(t, amqpshard.Config{URL: through.String(), Group: "protected", PublishTimeout: 5 * time.Second})
	producer := newProducer(t, db, testdb.SQLite, "shop")
	pub := producer.Publisher(broker.Publisher(), nil)

	require.NoError(t, pub.Publish(topic, newMessage("a", "1")))
	lost := newMessage("a", "2")
	p.loseAnswers()
	var failed *amqpshard.PublishError
	require.ErrorAs(t, pub.Publish(topic, lost), &failed)
	require.Equal(t, []string{lost.UUID}, failed.Unconfirmed)
	p.heal()
	first := stampOf(t, lost)
	require.NoError(t, pub.Publish(topic, lost))
	require.Equal(t, first, stampOf(t, lost), "sent again as it was")
	require.NoError(t, pub.Publish(topic, newMessage("a", "3")))

	without.await(map[middleware.Outcome]int{middleware.Processed: 4})
	require.Equal(t, []string{"1", "2", "2", "3"}, without.effects("bare"))
	with.await(map[middleware.Outcome]int{middleware.Processed: 3, middleware.Duplicate: 1})
	require.Equal(t, []string{"1", "2", "3"}, with.effects("protected"))
}

// K8: Kafka stores a record, the acknowledgement is lost, the client sends it
// again. With the idempotent producer of kafkashard there is one record; with the
// same client without idempotence there are more.
func TestLostAckOnKafka(t *testing.T) {
	t.Parallel()
	address := services.Value(t, services.Kafka)
	for name, idempotent := range map[string]bool{"idempotent": true, "not idempotent": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			upstream, _, _ := strings.Cut(address, ",")
			topic := "orders-" + watermill.NewShortUUID()
			p := newProxy(t, upstream)
			settings := func(c *sarama.Config) {
				c.Net.Proxy.Enable, c.Net.Proxy.Dialer = true, dialer(p.Listen)
				c.Metadata.Retry.Max = 20
				c.Metadata.RefreshFrequency = 0
			}
			direct := openKafka(t, kafkashard.Config{Brokers: []string{upstream}, Group: topic})
			require.NoError(t, direct.Declare(t.Context(), topic))

			var publish func(payload string) error
			if idempotent {
				broker := openKafka(t, kafkashard.Config{Brokers: []string{upstream}, Group: topic, Sarama: settings, PublishTimeout: patience / 2})
				publish = func(payload string) error { return broker.Publisher().Publish(topic, newMessage("a", payload)) }
			} else {
				config := sarama.NewConfig()
				config.Version = sarama.V2_8_0_0
				config.Producer.RequiredAcks, config.Producer.Return.Successes = sarama.WaitForAll, true
				config.Producer.Retry.Max, config.Producer.Retry.Backoff = 20, 100*time.Millisecond
				config.Net.MaxOpenRequests = 1
				settings(config)
				producer, err := sarama.NewSyncProducer([]string{upstream}, config)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, producer.Close()) })
				publish = func(payload string) error {
					_, _, err := producer.SendMessage(&sarama.ProducerMessage{Topic: topic, Key: sarama.StringEncoder("a"), Value: sarama.StringEncoder(payload)})
					return err
				}
			}
			require.NoError(t, publish("1"))
			p.loseAnswers()
			sent := make(chan error, 1)
			go func() { sent <- publish("2") }()
			defer func() { // so that a failure says more
				select {
				case err := <-sent:
					t.Logf("publish of 2: %v", err)
				default:
				}
			}()
			awaitRecords(t, upstream, topic, 2) // stored, and the answer is lost
			p.heal()
			require.NoError(t, <-sent)
			require.NoError(t, publish("3"))

			records := awaitRecords(t, upstream, topic, 3)
			for records[len(records)-1] != "3" {
				records = awaitRecords(t, upstream, topic, len(records)+1)
			}
			if idempotent {
				require.Equal(t, []string{"1", "2", "3"}, records)
			} else {
				require.Greater(t, len(records), 3, "%q", records)
				require.Equal(t, "2", records[2])
			}
		})
	}
}

// dialer connects to itself, whatever address is asked for.
type dialer string

func (d dialer) Dial(network, _ string) (net.Conn, error) { return net.Dial(network, string(d)) }

// awaitRecords returns the payloads of a topic when there are n or more.
func awaitRecords(t *testing.T, address, topic string, n int) []string {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var payloads []string
	for len(payloads) < n {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err(), "%d records of %d, errors %v", len(payloads), n, fetches.Errors())
		fetches.EachRecord(func(r *kgo.Record) { payloads = append(payloads, string(r.Value)) })
	}
	return payloads
}
