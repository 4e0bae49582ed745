package bench_test

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	stockamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/rabbitmq"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

const (
	shards = 16
	group  = "bench"
	many   = 500 // messages of a block
)

// opens are the brokers, with a topic that they declare.
var opens = map[string]func(b *testing.B, topic string) ordering.Broker{
	"kafka": func(b *testing.B, topic string) ordering.Broker {
		broker, err := kafkashard.Open(b.Context(), kafkashard.Config{
			Brokers: strings.Split(services.Value(b, services.Kafka), ","), Group: group + "-" + topic, Shards: shards,
		}, nil)
		require.NoError(b, err)
		return broker
	},
	"amqp4": func(b *testing.B, topic string) ordering.Broker {
		url := services.Value(b, services.AMQP4)
		b.Cleanup(func() { rabbitmq.Drop(b, url, topic, shards, group) })
		broker, err := amqpshard.Open(b.Context(), amqpshard.Config{URL: url, Group: group, Shards: shards, Routing: amqpshard.Slots}, nil)
		require.NoError(b, err)
		return broker
	},
}

func open(b *testing.B, name string) (broker ordering.Broker, topic string) {
	b.Helper()
	topic = "bench-" + watermill.NewShortUUID()
	broker = opens[name](b, topic)
	b.Cleanup(func() { require.NoError(b, broker.Close()) })
	require.NoError(b, broker.Declare(b.Context(), topic))
	return broker, topic
}

// BenchmarkPublish stores messages of 500 entities, confirmed and in order.
//
//	watermill  the publisher of watermill-kafka or watermill-amqp, in one call: it
//	           sends one by one; on RabbitMQ to a quorum queue, with one channel and
//	           confirms
//	batch      kafkashard or amqpshard, in one call
//
// The figures are those of BenchmarkSingle, against watermill.
func BenchmarkPublish(b *testing.B) {
	stock := map[string]func(b *testing.B, topic string) message.Publisher{
		"kafka": func(b *testing.B, _ string) message.Publisher {
			pub, err := kafka.NewPublisher(kafka.PublisherConfig{
				Brokers: strings.Split(services.Value(b, services.Kafka), ","), Marshaler: kafka.DefaultMarshaler{},
			}, watermill.NopLogger{})
			require.NoError(b, err)
			return pub
		},
		"amqp4": func(b *testing.B, topic string) message.Publisher {
			url := services.Value(b, services.AMQP4)
			conn, err := amqp.Dial(url)
			require.NoError(b, err)
			ch, err := conn.Channel()
			require.NoError(b, err)
			_, err = ch.QueueDeclare(topic, true, false, false, false, amqp.Table{amqp.QueueTypeArg: amqp.QueueTypeQuorum})
			require.NoError(b, err)
			b.Cleanup(func() {
				_, err := ch.QueueDelete(topic, false, false, false)
				require.NoError(b, err)
				require.NoError(b, conn.Close())
			})
			config := stockamqp.NewDurableQueueConfig(url)
			config.Publish.ConfirmDelivery, config.Publish.ChannelPoolSize = true, 1
			pub, err := stockamqp.NewPublisher(config, watermill.NopLogger{})
			require.NoError(b, err)
			return pub
		},
	}
	for name := range opens {
		b.Run(name, func(b *testing.B) {
			broker, topic := open(b, name)
			stockTopic := topic + "-stock"
			stockPub := stock[name](b, stockTopic)
			defer stockPub.Close()
			publish := func(pub message.Publisher, topic string) (handle func(*message.Message) error, finish func() error) {
				var messages []*message.Message
				return func(msg *message.Message) error {
						msg.Metadata.Set(ordering.PartitionKeyMetadata, strconv.Itoa(len(messages)))
						messages = append(messages, msg)
						return nil
					}, func() error {
						err := pub.Publish(topic, messages...)
						messages = messages[:0]
						return err
					}
			}
			one, batch := variant{name: "watermill", size: many}, variant{name: "batch", size: many}
			one.handle, one.finish = publish(stockPub, stockTopic)
			batch.handle, batch.finish = publish(broker.Publisher(), topic)
			alternate(b, one.name, []variant{one, batch})
		})
	}
}

// BenchmarkEndToEnd handles messages that wait in 16 shards, each handler in its
// transaction.
//
//	bare   the handler begins and commits a transaction itself
//	chain  Deduplicate and RejectStale
//
// The figures are those of BenchmarkSingle, against bare.
func BenchmarkEndToEnd(b *testing.B) {
	for name := range opens {
		for _, driver := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
			b.Run(name+"/"+driver.Name, func(b *testing.B) {
				h := newHand(b, driver)
				h.db.SetMaxOpenConns(shards)
				h.db.SetMaxIdleConns(shards)
				for e := range entities {
					_, err := h.db.ExecContext(b.Context(), fmt.Sprintf("INSERT INTO stock (sku, qty) VALUES ('P-%d', 1000000000)", e))
					require.NoError(b, err)
				}
				versions, err := ordering.NewVersions(b.Context(), h.db, driver.Dialect)
				require.NoError(b, err)
				chain, err := middleware.Chain(
					middleware.Deduplicate(h.newStore(b), middleware.WithKey(deduplicator.FromMetadata("event_id"))),
					middleware.RejectStale(versions, middleware.WithVersion(ordering.VersionFromMetadata("version"))))
				require.NoError(b, err)
				sell := driver.Dialect.Rebind(`UPDATE stock SET qty = qty - 1 WHERE sku = ?`)
				exec := func(msg *message.Message, tx *sql.Tx) error {
					_, err := tx.ExecContext(msg.Context(), sell, msg.Metadata.Get(ordering.PartitionKeyMetadata))
					return err
				}
				alternate(b, "bare", []variant{
					endToEnd(b, name, "bare", nil, func(msg *message.Message) error {
						tx, err := h.db.BeginTx(msg.Context(), nil)
						if err != nil {
							return err
						}
						defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
						if err := exec(msg, tx); err != nil {
							return err
						}
						return tx.Commit()
					}),
					endToEnd(b, name, "chain", chain, func(msg *message.Message) error {
						tx, _ := middleware.Tx(msg.Context())
						return exec(msg, tx)
					}),
				})
			})
		}
	}
}

// endToEnd publishes a block before the clock runs, and opens the gate at which its
// first messages wait.
func endToEnd(b *testing.B, brokerName, name string, chain []message.HandlerMiddleware, handler message.NoPublishHandlerFunc) variant {
	b.Helper()
	broker, topic := open(b, brokerName)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(b, err)
	var gate atomic.Pointer[chan struct{}]
	handled := make(chan struct{}, many)
	router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			<-*gate.Load()
			produced, err := h(msg)
			if err == nil {
				handled <- struct{}{}
			}
			return produced, err
		}
	})
	router.AddMiddleware(chain...)
	router.AddConsumerHandler(name, topic, broker.Subscriber(), handler)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.WithoutCancel(b.Context())) }()
	b.Cleanup(func() {
		require.NoError(b, router.Close())
		require.NoError(b, <-ended)
	})
	<-router.Running()

	var messages []*message.Message
	return variant{
		name: name, size: many,
		prepare: func(msg *message.Message) error {
			if messages = append(messages, msg); len(messages) < many {
				return nil
			}
			closed := make(chan struct{})
			gate.Store(&closed)
			err := broker.Publisher().Publish(topic, messages...)
			messages = messages[:0]
			return err
		},
		handle: func(*message.Message) error { return nil },
		finish: func() error {
			close(*gate.Load())
			for range many {
				<-handled
			}
			return nil
		},
	}
}
