package producer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/routers"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// consumer is a router with one handler that writes what it gets into a table,
// and counts what became of each delivery.
type consumer struct {
	retried func() // before an attempt after the first; may be nil
	t       *testing.T
	db      *sql.DB
	poison  *recorder

	mu       sync.Mutex
	outcomes map[middleware.Outcome]int
	reasons  []string
}

// anew is a key that no two deliveries share: what is refused is refused by the
// number alone.
func anew(*message.Message) (string, error) { return watermill.NewUUID(), nil }

func byEventID() deduplicator.KeyFunc { return deduplicator.FromMetadata("event_id") }

// consume starts a consumer named name on its own table of db.
func consume(t *testing.T, db *sql.DB, sub message.Subscriber, topic, name string, key deduplicator.KeyFunc, links ...middleware.Link) *consumer {
	t.Helper()
	c := &consumer{t: t, db: db, poison: &recorder{}, outcomes: map[middleware.Outcome]int{}}
	require.NoError(t, deduplicator.Migrate(t.Context(), db, deduplicator.SQLite))
	_, err := db.ExecContext(t.Context(), "CREATE TABLE IF NOT EXISTS effects (n INTEGER PRIMARY KEY, consumer TEXT, payload TEXT)")
	require.NoError(t, err)
	store, err := deduplicator.NewSQLStore(t.Context(), db, deduplicator.SQLite)
	require.NoError(t, err)
	chain, err := middleware.Chain(append([]middleware.Link{
		middleware.WithObserver(c.observe),
		middleware.WithPoisonQueue(c.poison, "poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}),
		middleware.Deduplicate(store, middleware.WithKey(key)),
	}, links...)...)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(chain...)
	router.AddConsumerHandler(name, topic, sub, func(msg *message.Message) error {
		tx, _ := middleware.Tx(msg.Context())
		_, err := tx.ExecContext(msg.Context(), "INSERT INTO effects (consumer, payload) VALUES (?, ?)", name, string(msg.Payload))
		return err
	})
	routers.Run(t, router)
	return c
}

func (c *consumer) observe(_ context.Context, event middleware.Event) {
	if event.Outcome == middleware.Retried && c.retried != nil {
		c.retried()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outcomes[event.Outcome]++
	if event.Err != nil {
		c.reasons = append(c.reasons, event.Err.Error())
	}
}

// await waits until exactly these outcomes were seen.
func (c *consumer) await(want map[middleware.Outcome]int) {
	c.t.Helper()
	var got map[middleware.Outcome]int
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		c.mu.Lock()
		got = maps.Clone(c.outcomes)
		c.mu.Unlock()
		if maps.Equal(got, want) {
			return
		}
	}
	require.Equal(c.t, want, got, "%v", c.reasons)
}

// effects are the payloads that the handler has written, in order.
func (c *consumer) effects(name string) []string {
	c.t.Helper()
	rows, err := c.db.QueryContext(c.t.Context(), "SELECT payload FROM effects WHERE consumer = ? ORDER BY n", name)
	require.NoError(c.t, err)
	defer rows.Close()
	var all []string
	for rows.Next() {
		var payload string
		require.NoError(c.t, rows.Scan(&payload))
		all = append(all, payload)
	}
	require.NoError(c.t, rows.Err())
	return all
}

func newChannel(t *testing.T) *gochannel.GoChannel {
	t.Helper()
	channel := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	t.Cleanup(func() { require.NoError(t, channel.Close()) })
	return channel
}

// event returns a message of an entity with a key of its own.
func event(entity, payload string) *message.Message {
	msg := newMessage(entity, payload)
	msg.Metadata.Set("event_id", watermill.NewUUID())
	return msg
}

// K2: every answer of RejectReplayed, and what an observer sees of it.
func TestRejectReplayed(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	channel := newChannel(t)
	accepting := consume(t, db, channel, "orders", "accepting", byEventID(), middleware.RejectReplayed(newWindows(t, db, testdb.SQLite)))
	refusing := consume(t, db, channel, "orders", "refusing", byEventID(),
		middleware.RejectReplayed(newWindows(t, db, testdb.SQLite, ordering.WithProducerGaps(ordering.RefuseGaps))))
	producer := newProducer(t, db, testdb.SQLite, "shop")
	messages := make([]*message.Message, 5)
	for i := range messages {
		messages[i] = event("a", strconv.Itoa(i+1))
	}
	require.NoError(t, producer.Stamp("orders", messages...))
	send := func(messages ...*message.Message) {
		t.Helper()
		for _, msg := range messages {
			require.NoError(t, channel.Publish("orders", msg.Copy()))
		}
	}
	again := messages[0].Copy()
	again.Metadata.Set("event_id", "another one")
	send(messages[0], messages[1], messages[1], again) // in order, a redelivery, a copy that the inbox does not know
	send(messages[3])                                  // 3 is missing
	send(messages[2], messages[4])                     // it was only late
	foreign := event("a", "foreign")
	send(foreign) // nobody has numbered it
	broken := messages[4].Copy()
	broken.Metadata.Set(ordering.ProducerEpochMetadata, "-1")
	broken.Metadata.Set("event_id", "broken")
	broken.Payload = []byte("broken")
	send(broken)
	copied := event("a", "copied") // its metadata are another message's
	for field, value := range messages[0].Metadata {
		if field != "event_id" {
			copied.Metadata.Set(field, value)
		}
	}
	send(copied)

	accepting.await(map[middleware.Outcome]int{
		middleware.Processed: 7, middleware.Duplicate: 2, middleware.ProducerGap: 1, middleware.Parked: 1,
	})
	require.Equal(t, []string{"1", "2", "4", "3", "5", "foreign", "copied"}, accepting.effects("accepting"))
	// The one that refuses has parked 4, and then 5, which comes before 4 is back.
	refusing.await(map[middleware.Outcome]int{
		middleware.Processed: 5, middleware.Duplicate: 2, middleware.Retried: 4, middleware.Parked: 3,
	})
	require.Equal(t, []string{"1", "2", "3", "foreign", "copied"}, refusing.effects("refusing"))
	require.Contains(t, refusing.poison.sent[0].Metadata.Get("reason_poisoned"), "message 4")
	require.Contains(t, refusing.poison.sent[0].Metadata.Get("reason_poisoned"), "before message 3")

	// Parked messages go on where they were: they keep their numbers.
	send(refusing.poison.sent[0], refusing.poison.sent[1])
	refusing.await(map[middleware.Outcome]int{
		middleware.Processed: 7, middleware.Duplicate: 2, middleware.Retried: 4, middleware.Parked: 3,
	})
	require.Equal(t, []string{"1", "2", "3", "foreign", "copied", "4", "5"}, refusing.effects("refusing"))
}

// A number counts only with the handler's work: after a failed attempt the same
// message is no duplicate. And below the window the message's key decides.
func TestNumberCountsWithTheWork(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	channel := newChannel(t)
	c := consume(t, db, channel, "orders", "c", byEventID(), middleware.RejectReplayed(newWindows(t, db, testdb.SQLite)))
	// The first attempt of the first message fails after everything else.
	_, err := db.ExecContext(t.Context(), "CREATE TRIGGER refuse BEFORE INSERT ON effects BEGIN SELECT RAISE(ABORT, 'planned'); END")
	require.NoError(t, err)
	c.retried = func() {
		if _, err := db.ExecContext(t.Context(), "DROP TRIGGER refuse"); err != nil {
			t.Error(err)
		}
	}
	producer := newProducer(t, db, testdb.SQLite, "shop")
	pub := producer.Publisher(channel, nil)
	first := event("a", "first")
	require.NoError(t, pub.Publish("orders", first))
	c.await(map[middleware.Outcome]int{middleware.Retried: 1, middleware.Processed: 1})

	unsent := event("a", "unsent")
	require.NoError(t, producer.Stamp("orders", unsent))
	for range ordering.WindowSize {
		require.NoError(t, producer.Stamp("orders", event("a", "lost")))
	}
	require.NoError(t, pub.Publish("orders", event("a", "far ahead")))
	require.NoError(t, channel.Publish("orders", unsent.Copy(), unsent.Copy()))
	c.await(map[middleware.Outcome]int{
		middleware.Retried: 1, middleware.Processed: 3, middleware.ProducerGap: 1, middleware.Duplicate: 1,
	})
	require.Equal(t, []string{"first", "far ahead", "unsent"}, c.effects("c"))
}

// K3: two clones of one name and a zombie, on RabbitMQ and on Kafka: the later one
// goes on, what the other one still publishes is parked as fenced.
func TestTwoClones(t *testing.T) {
	t.Parallel()
	for name, connect := range brokers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, testdb.SQLite)
			topic := "orders-" + watermill.NewShortUUID()
			broker := connect(t, topic, "group")
			require.NoError(t, broker.Declare(t.Context(), topic))
			c := consume(t, db, broker.Subscriber(), topic, "c", byEventID(), middleware.RejectReplayed(newWindows(t, db, testdb.SQLite)))

			first := newProducer(t, db, testdb.SQLite, "shop")
			require.NoError(t, first.Publisher(broker.Publisher(), nil).Publish(topic, event("a", "first 1"), event("b", "first 2")))
			c.await(map[middleware.Outcome]int{middleware.Processed: 2})
			second := newProducer(t, db, testdb.SQLite, "shop")
			require.NoError(t, second.Publisher(broker.Publisher(), nil).Publish(topic, event("a", "second 1"), event("b", "second 2")))
			c.await(map[middleware.Outcome]int{middleware.Processed: 4})
			for i := range 3 {
				require.NoError(t, first.Publisher(broker.Publisher(), nil).Publish(topic, event("a", fmt.Sprint("zombie ", i))))
				require.NoError(t, second.Publisher(broker.Publisher(), nil).Publish(topic, event("b", fmt.Sprint("goes on ", i))))
			}
			c.await(map[middleware.Outcome]int{middleware.Processed: 7, middleware.Fenced: 3})

			effects := c.effects("c")
			slices.Sort(effects)
			require.Equal(t, []string{"first 1", "first 2", "goes on 0", "goes on 1", "goes on 2", "second 1", "second 2"}, effects)
			for i, parked := range c.poison.sent {
				require.Equal(t, fmt.Sprint("zombie ", i), string(parked.Payload))
				require.Contains(t, parked.Metadata.Get("reason_poisoned"), "fenced")
			}
			require.ErrorIs(t, first.Check(t.Context()), ordering.ErrReplaced)
		})
	}
}

// K5: numbers are stored with the messages that a handler returns. When their
// publish fails, the redelivery publishes them with the same ones.
func TestStoredOutputsKeepTheirNumbers(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	require.NoError(t, deduplicator.Migrate(t.Context(), db, deduplicator.SQLite))
	store, err := deduplicator.NewSQLStore(t.Context(), db, deduplicator.SQLite)
	require.NoError(t, err)
	producer := newProducer(t, db, testdb.SQLite, "stock")
	chain, err := middleware.Chain(
		middleware.WithRetry(middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}),
		middleware.Deduplicate(store, middleware.WithKey(byEventID())),
		middleware.Stamp(producer),
		middleware.Partition(ordering.KeyFromMetadata("sku")),
	)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(chain...)
	in := newChannel(t)
	var failed []*message.Message
	out := &recorder{}
	out.fail = func(msg *message.Message) error {
		if len(failed) < 2 {
			failed = append(failed, msg.Copy())
			return errors.New("broker is down")
		}
		return nil
	}
	// The messages are numbered already: the publisher keeps the numbers.
	router.AddHandler("stock", "orders", in, "reserved", producer.Publisher(out, nil), func(msg *message.Message) ([]*message.Message, error) {
		result := message.NewMessage(watermill.NewUUID(), msg.Payload)
		for field, value := range msg.Metadata { // as careless handlers do
			result.Metadata.Set(field, value)
		}
		result.Metadata.Set("sku", "s-1")
		return []*message.Message{result}, nil
	})
	routers.Run(t, router)
	shop := newProducer(t, db, testdb.SQLite, "shop")
	for i := range 2 {
		require.NoError(t, shop.Publisher(in, nil).Publish("orders", event("a", fmt.Sprint("order ", i))))
	}
	require.Len(t, out.sent, 2)
	for _, msg := range append(failed, out.sent[0]) {
		require.Equal(t, out.sent[0].UUID, msg.UUID)
		stamp := stampOf(t, msg)
		require.Equal(t, "stock", stamp.Producer)
		require.EqualValues(t, 1, stamp.Sequence)
		require.Equal(t, "s-1", msg.Metadata.Get("sku"))
	}
	// Partition does not replace the key that came with the copied metadata.
	require.EqualValues(t, 2, stampOf(t, out.sent[1]).Sequence)
}
