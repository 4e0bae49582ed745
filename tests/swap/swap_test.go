// Package swap_test runs one scenario, unchanged, over every broker and every
// database: what differs is one call of Open.
package swap_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/sqlshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/rabbitmq"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// sarama's metrics share one ticker per process, which never ends.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"))
}

// patience is for what must happen.
const patience = time.Minute

const shards = 4

type open func(t *testing.T, group string) ordering.Broker

// brokers are the lines in which the rows of this suite differ.
var brokers = map[string]func(t *testing.T) open{
	"kafka": func(t *testing.T) open {
		return onKafka(strings.Split(services.Value(t, services.Kafka), ","))
	},
	"kfake": func(t *testing.T) open {
		cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
		require.NoError(t, err)
		t.Cleanup(cluster.Close)
		return onKafka(cluster.ListenAddrs())
	},
	"amqp": func(t *testing.T) open {
		return onRabbit(services.Value(t, services.AMQP), amqpshard.ConsistentHash)
	},
	"amqp4": func(t *testing.T) open {
		return onRabbit(services.Value(t, services.AMQP4), amqpshard.Slots)
	},
	"postgres": func(t *testing.T) open { return onSQL(t, testdb.PGX) },
	"mariadb":  func(t *testing.T) open { return onSQL(t, testdb.MySQL) },
}

func onRabbit(url string, routing amqpshard.Routing) open {
	return func(t *testing.T, group string) ordering.Broker {
		t.Cleanup(func() { // all topics and groups of a scenario have one suffix
			_, suffix, _ := strings.Cut(group, "-")
			for _, topic := range []string{"orders", "reserved", "poison"} {
				rabbitmq.Drop(t, url, topic+"-"+suffix, shards, group)
			}
		})
		broker, err := amqpshard.Open(t.Context(), amqpshard.Config{URL: url, Group: group, Shards: shards, Routing: routing}, nil)
		require.NoError(t, err)
		return broker
	}
}

func onSQL(t *testing.T, driver testdb.Driver) open {
	db := testdb.Create(t, driver)
	require.NoError(t, sqlshard.Migrate(t.Context(), db.Open(t), driver.Dialect))
	return func(t *testing.T, group string) ordering.Broker {
		pool := db.Open(t)
		pool.SetMaxOpenConns(2*shards + 2) // for two topics
		broker, err := sqlshard.Open(t.Context(), sqlshard.Config{
			DB: pool, Dialect: driver.Dialect, Group: group, Shards: shards, PollInterval: 50 * time.Millisecond,
		}, nil)
		require.NoError(t, err)
		return broker
	}
}

func onKafka(addresses []string) open {
	return func(t *testing.T, group string) ordering.Broker {
		broker, err := kafkashard.Open(t.Context(), kafkashard.Config{Brokers: addresses, Group: group, Shards: shards}, nil)
		require.NoError(t, err)
		return broker
	}
}

func TestSwap(t *testing.T) {
	t.Parallel()
	for broker, connect := range brokers {
		for _, driver := range testdb.Servers {
			t.Run(broker+"/"+driver.Name, func(t *testing.T) {
				t.Parallel()
				run(t, connect(t), driver)
			})
		}
	}
}

func TestSwapStrict(t *testing.T) {
	t.Parallel()
	for broker, connect := range brokers {
		for _, driver := range testdb.Servers {
			t.Run(broker+"/"+driver.Name, func(t *testing.T) {
				t.Parallel()
				runStrict(t, connect(t), driver)
			})
		}
	}
}

// A returned message that the broker's publisher would refuse, because it has no
// partition key, is refused before the commit: afterwards it would hold up its shard
// for ever.
func TestReturnedMessageWithoutKey(t *testing.T) {
	t.Parallel()
	for broker, connect := range brokers {
		t.Run(broker, func(t *testing.T) {
			t.Parallel()
			ctx, open, suffix := t.Context(), connect(t), watermill.NewShortUUID()
			s := &shop{
				t: t, db: testdb.Open(t, testdb.SQLite), dialect: testdb.SQLite.Dialect,
				orders: "orders-" + suffix, reserved: "reserved-" + suffix, poison: "poison-" + suffix,
				ended: map[string]map[string]middleware.Outcome{"stock": {}},
			}
			s.migrate(ctx)
			b := open(t, "stock-"+suffix)
			require.NoError(t, b.Declare(ctx, s.orders, s.reserved, s.poison))
			router := s.router(b)
			router.AddHandler("stock", s.orders, b.Subscriber(), s.reserved, b.Publisher(), func(msg *message.Message) ([]*message.Message, error) {
				return []*message.Message{message.NewMessage(watermill.NewUUID(), msg.Payload)}, s.record(msg, "history")
			})
			defer s.start(router, b)()
			require.NoError(t, b.Publisher().Publish(s.orders, newEvent("1", "P-1", 1, "order")))
			s.eventually(ctx, func() (bool, string) {
				s.mu.Lock()
				defer s.mu.Unlock()
				return s.first("stock")[middleware.Parked] == 1, "the message is not parked"
			})
			require.Zero(t, s.count(ctx, "SELECT COUNT(*) FROM history"))
		})
	}
}

const (
	entities = 12
	versions = 6
)

// run is the scenario: each of the entities gets its versions, most of them
// twice, some late once more under another id, one whose handler fails at first.
// One message always fails, one has no id, one has the id of another. Two workers
// share the group. Their outputs go to a second group.
func run(t *testing.T, open open, driver testdb.Driver) {
	ctx := t.Context()
	suffix := watermill.NewShortUUID()
	s := &shop{
		t: t, db: testdb.Open(t, driver), dialect: driver.Dialect,
		orders: "orders-" + suffix, reserved: "reserved-" + suffix, poison: "poison-" + suffix,
		ended: map[string]map[string]middleware.Outcome{"stock": {}, "ledger": {}},
	}
	s.migrate(ctx)

	producer := open(t, "producer-"+suffix)
	defer s.close(producer)
	downstream := open(t, "downstream-"+suffix)
	require.NoError(t, downstream.Declare(ctx, s.reserved, s.poison))
	stock1, stock2 := open(t, "stock-"+suffix), open(t, "stock-"+suffix)
	require.NoError(t, stock1.Declare(ctx, s.orders))

	for _, broker := range []ordering.Broker{stock1, stock2} {
		router := s.router(broker, s.newestWins()...)
		router.AddHandler("stock", s.orders, broker.Subscriber(), s.reserved, broker.Publisher(), s.reserve)
		defer s.start(router, broker)()
	}
	router := s.router(downstream, s.newestWins()...)
	router.AddConsumerHandler("ledger", s.reserved, downstream.Subscriber(), s.book)
	defer s.start(router, downstream)()

	published := s.publish(producer.Publisher())

	// Every message ends, and every output is booked.
	s.eventually(ctx, func() (bool, string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		ended, booked := len(s.ended["stock"]), len(s.ended["ledger"])
		return ended >= published && booked >= entities*versions,
			fmt.Sprintf("%d of %d deliveries ended, %d of %d outputs booked", ended, published, booked, entities*versions)
	})
	s.checkEffects(ctx)
	s.checkParked(ctx, downstream)
	// Outputs are forgotten soon after their message is acknowledged.
	s.eventually(ctx, func() (bool, string) {
		n := s.count(ctx, "SELECT COUNT(*) FROM "+deduplicator.DefaultProducedTable)
		return n == 0, fmt.Sprintf("%d outputs are still stored", n)
	})
}

// runStrict is the scenario of numbered producers and strict sequences: the events
// of each entity come out of order, with copies that have keys of their own. A
// second process takes the producer's name in the middle, the first goes on as a
// zombie. One event has no sequence number, one always fails. Two workers share the
// group.
func runStrict(t *testing.T, open open, driver testdb.Driver) {
	ctx := t.Context()
	suffix := watermill.NewShortUUID()
	s := &shop{
		t: t, db: testdb.Open(t, driver), dialect: driver.Dialect,
		orders: "orders-" + suffix, poison: "poison-" + suffix,
		ended: map[string]map[string]middleware.Outcome{"strict": {}},
	}
	s.migrate(ctx)
	worker1, worker2 := open(t, "strict-"+suffix), open(t, "strict-"+suffix)
	require.NoError(t, worker1.Declare(ctx, s.orders, s.poison))
	for _, broker := range []ordering.Broker{worker1, worker2} {
		windows, err := ordering.NewWindows(ctx, s.db, s.dialect)
		require.NoError(t, err)
		sequence, err := ordering.NewSequence(ctx, s.db, s.dialect)
		require.NoError(t, err)
		router := s.router(broker, middleware.RejectReplayed(windows),
			middleware.Sequence(sequence, middleware.WithSequence(ordering.VersionFromMetadata("version"))))
		router.AddConsumerHandler("strict", s.orders, broker.Subscriber(), func(msg *message.Message) error {
			if string(msg.Payload) == "bad" {
				return errors.New("bad order")
			}
			return s.record(msg, "history")
		})
		defer s.start(router, broker)()
	}

	shop := open(t, "producer-"+suffix)
	defer s.close(shop)
	var published int
	publish := func(producer *ordering.Producer, messages ...*message.Message) {
		published += len(messages)
		require.NoError(t, producer.Publisher(shop.Publisher(), nil).Publish(s.orders, messages...))
	}
	event := func(entity string, seq int) *message.Message {
		return newEvent(fmt.Sprint(entity, "/", seq), entity, seq, fmt.Sprint("state ", seq))
	}
	takeName := func() *ordering.Producer {
		producer, err := ordering.NewProducer(ctx, s.db, s.dialect, "shop")
		require.NoError(t, err)
		return producer
	}
	const strictEntities = entities / 2
	zombie := takeName()
	for e := range strictEntities {
		entity := fmt.Sprint("P-", e)
		third := event(entity, 3)
		publish(zombie, event(entity, 2), event(entity, 1), third)
		// The same number under another key, as a broker that lost a confirm has it.
		again := third.Copy()
		again.Metadata.Set("event_id", entity+"/again")
		published++
		require.NoError(t, shop.Publisher().Publish(s.orders, again))
	}
	producer := takeName()
	for e := range strictEntities {
		entity := fmt.Sprint("P-", e)
		publish(producer, event(entity, 5), event(entity, 4), event(entity, 6))
		publish(zombie, newEvent(entity+"/zombie", entity, 7, "zombie"))
	}
	failing := newEvent("P-bad/1", "P-bad", 1, "bad")
	unnumbered := newEvent("P-0/none", "P-0", 0, "no sequence number")
	unnumbered.Metadata.Set("version", "")
	publish(producer, failing, event("P-bad", 2), unnumbered)

	// A delivery that is repeated, after a rebalance for example, is not counted.
	s.eventually(ctx, func() (bool, string) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.ended["strict"]) >= published-strictEntities, fmt.Sprintf("%d of %d messages ended", len(s.ended["strict"]), published-strictEntities)
	})
	s.eventually(ctx, func() (bool, string) {
		n := s.count(ctx, "SELECT COUNT(*) FROM history")
		return n >= strictEntities*versions, fmt.Sprintf("%d effects", n)
	})
	s.checkHistory(ctx, "history", strictEntities)
	s.mu.Lock()
	require.Equal(t, strictEntities, s.first("strict")[middleware.Fenced], "zombies")
	require.Equal(t, 1, s.first("strict")[middleware.Parked], "the one without a number")
	s.mu.Unlock()
	require.Equal(t, 2, s.count(ctx, "SELECT COUNT(*) FROM parked_messages"), "of the blocked entity")
	require.Equal(t, 1, s.count(ctx, "SELECT COUNT(*) FROM entity_sequences WHERE state = 'blocked'"))
}

// shop is what the handlers work on and what is checked.
type shop struct {
	t                        *testing.T
	db                       *sql.DB
	dialect                  deduplicator.Dialect
	orders, reserved, poison string
	failed                   atomic.Bool // the handler has failed once

	mu sync.Mutex
	// ended has, by handler and message UUID, the outcome of the first delivery
	// that was not returned to the broker. The broker may deliver again.
	ended map[string]map[string]middleware.Outcome
}

// first counts the outcomes of the handler's messages. It needs mu.
func (s *shop) first(handler string) map[middleware.Outcome]int {
	counts := map[middleware.Outcome]int{}
	for _, outcome := range s.ended[handler] {
		counts[outcome]++
	}
	return counts
}

func (s *shop) migrate(ctx context.Context) {
	require.NoError(s.t, deduplicator.Migrate(ctx, s.db, s.dialect))
	require.NoError(s.t, ordering.Migrate(ctx, s.db, s.dialect))
	id := map[deduplicator.Dialect]string{
		deduplicator.PostgreSQL: "bigserial",
		deduplicator.MySQL:      "bigint AUTO_INCREMENT",
		deduplicator.SQLite:     "integer",
	}[s.dialect]
	for _, table := range []string{"history", "ledger"} {
		_, err := s.db.ExecContext(ctx, "CREATE TABLE "+table+" (id "+id+" PRIMARY KEY, entity varchar(64) NOT NULL, version bigint NOT NULL)")
		require.NoError(s.t, err)
	}
}

// router has what all chains of this suite begin with, and then links.
func (s *shop) router(broker ordering.Broker, links ...middleware.Link) *message.Router {
	store, err := deduplicator.NewSQLStore(s.t.Context(), s.db, s.dialect)
	require.NoError(s.t, err)
	chain, err := middleware.Chain(append([]middleware.Link{
		middleware.WithObserver(s.observe),
		middleware.WithPoisonQueue(broker.Publisher(), s.poison),
		middleware.WithRetry(middleware.Retry{MaxRetries: 2, InitialInterval: 10 * time.Millisecond}),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromMetadata("event_id"))),
	}, links...)...)
	require.NoError(s.t, err)
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(s.t, err)
	router.AddMiddleware(chain...)
	return router
}

func (s *shop) newestWins() []middleware.Link {
	versions, err := ordering.NewVersions(s.t.Context(), s.db, s.dialect)
	require.NoError(s.t, err)
	return []middleware.Link{
		middleware.RejectStale(versions, middleware.WithVersion(ordering.VersionFromMetadata("version"))),
		middleware.Partition(ordering.KeyFromMetadata("order_id")),
	}
}

func (s *shop) observe(_ context.Context, event middleware.Event) {
	switch event.Outcome {
	case middleware.Retried, middleware.Failed, middleware.InFlight,
		middleware.ProducerGap, middleware.Released, middleware.EntityBlocked:
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, again := s.ended[event.Handler][event.MessageUUID]; !again {
		s.ended[event.Handler][event.MessageUUID] = event.Outcome
	}
}

// start runs router and returns what closes it and its broker.
func (s *shop) start(router *message.Router, broker ordering.Broker) func() {
	done := make(chan error, 1)
	go func() { done <- router.Run(context.WithoutCancel(s.t.Context())) }()
	select {
	case <-router.Running():
	case err := <-done:
		require.FailNow(s.t, "router did not start", "%v", err)
	}
	return func() {
		require.NoError(s.t, errors.Join(router.Close(), <-done))
		s.close(broker)
	}
}

func (s *shop) close(broker ordering.Broker) { require.NoError(s.t, broker.Close()) }

// reserve is the handler of the orders.
func (s *shop) reserve(msg *message.Message) ([]*message.Message, error) {
	if string(msg.Payload) == "bad" {
		return nil, errors.New("bad order")
	}
	if err := s.record(msg, "history"); err != nil {
		return nil, err
	}
	if s.failed.CompareAndSwap(false, true) {
		return nil, errors.New("first message fails after its write")
	}
	out := message.NewMessage(watermill.NewUUID(), msg.Payload)
	for _, field := range []string{"order_id", "version"} {
		out.Metadata.Set(field, msg.Metadata.Get(field))
	}
	out.Metadata.Set("event_id", "reserved-"+msg.Metadata.Get("event_id"))
	return []*message.Message{out}, nil
}

// book is the handler of their outputs.
func (s *shop) book(msg *message.Message) error { return s.record(msg, "ledger") }

func (s *shop) record(msg *message.Message, table string) error {
	tx, ok := middleware.Tx(msg.Context())
	if !ok {
		return errors.New("no transaction")
	}
	placeholders := "(?, ?)"
	if s.dialect == deduplicator.PostgreSQL {
		placeholders = "($1, $2)"
	}
	_, err := tx.ExecContext(msg.Context(), "INSERT INTO "+table+" (entity, version) VALUES "+placeholders,
		msg.Metadata.Get("order_id"), msg.Metadata.Get("version"))
	return err
}

func newEvent(id, entity string, version int, payload string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	if id != "" {
		msg.Metadata.Set("event_id", id)
	}
	msg.Metadata.Set("order_id", entity)
	msg.Metadata.Set("version", strconv.Itoa(version))
	msg.Metadata.Set(ordering.PartitionKeyMetadata, entity)
	return msg
}

// publish sends the traffic and returns how many messages that is.
func (s *shop) publish(pub message.Publisher) int {
	var messages []*message.Message
	for version := 1; version <= versions; version++ {
		for e := range entities {
			entity := fmt.Sprint("P-", e)
			id := fmt.Sprint(entity, "/", version)
			payload := fmt.Sprint("state ", version)
			messages = append(messages, newEvent(id, entity, version, payload))
			if e%3 > 0 { // the producer sends again, as a new message
				messages = append(messages, newEvent(id, entity, version, payload))
			}
			if version > 2 && e%4 == 0 { // an old state comes late, under another id
				messages = append(messages, newEvent(id+"-late", entity, version-2, fmt.Sprint("state ", version-2)))
			}
		}
	}
	messages = append(messages,
		newEvent("bad", "P-bad", 1, "bad"),
		newEvent("", "P-0", 100, "no id"),
		newEvent("P-0/1", "P-0", 101, "another event with the id of one that was processed"),
		newEvent("P-0/equal", "P-0", versions, "another state with the version of one that was processed"),
	)
	for _, msg := range messages {
		require.NoError(s.t, pub.Publish(s.orders, msg))
	}
	return len(messages)
}

func (s *shop) checkEffects(ctx context.Context) {
	for _, table := range []string{"history", "ledger"} {
		s.checkHistory(ctx, table, entities)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// A commit during a rebalance or a lost ack turns a message's own redelivery
	// into the one that is seen to end, so some may count as duplicates.
	got := s.first("stock")
	require.Equal(s.t, 2, got[middleware.Parked])
	require.Equal(s.t, 2, got[middleware.Conflict])
	require.LessOrEqual(s.t, got[middleware.Processed], entities*versions)
	require.LessOrEqual(s.t, got[middleware.Stale], (versions-2)*entities/4)
	require.GreaterOrEqual(s.t, got[middleware.Duplicate], entities*versions*2/3)
}

// checkHistory checks that table has each version of n entities once, in order.
func (s *shop) checkHistory(ctx context.Context, table string, n int) {
	rows, err := s.db.QueryContext(ctx, "SELECT entity, version FROM "+table+" ORDER BY id")
	require.NoError(s.t, err)
	applied := map[string][]int{}
	for rows.Next() {
		var entity string
		var version int
		require.NoError(s.t, rows.Scan(&entity, &version))
		applied[entity] = append(applied[entity], version)
	}
	require.NoError(s.t, errors.Join(rows.Err(), rows.Close()))
	require.Len(s.t, applied, n, table)
	for entity, got := range applied {
		require.Equal(s.t, []int{1, 2, 3, 4, 5, 6}, got, "%s of %s: each version once, in order", table, entity)
	}
}

// checkParked reads the poison queue.
func (s *shop) checkParked(ctx context.Context, broker ordering.Broker) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	messages, err := broker.Subscriber().Subscribe(ctx, s.poison)
	require.NoError(s.t, err)
	want := map[string]string{ // payload, part of the reason
		"bad":   "bad order",
		"no id": `metadata field "event_id" is missing`,
		"another event with the id of one that was processed":      "other content",
		"another state with the version of one that was processed": "other content",
	}
	seen := map[string]bool{}
	for len(want) > 0 {
		select {
		case msg := <-messages:
			reason, ok := want[string(msg.Payload)]
			if seen[msg.UUID] { // delivered again after it was parked
				msg.Ack()
				continue
			}
			seen[msg.UUID] = true
			require.True(s.t, ok, "parked by mistake: %s", msg.Payload)
			require.Contains(s.t, msg.Metadata.Get("reason_poisoned"), reason)
			require.Equal(s.t, s.orders, msg.Metadata.Get("topic_poisoned"))
			require.Regexp(s.t, `^(amqp|kafka|sql)shard\.subscriber\(.+\)$`, msg.Metadata.Get("subscriber_poisoned"))
			delete(want, string(msg.Payload))
			msg.Ack()
		case <-ctx.Done():
			require.FailNow(s.t, "not parked", "%v", want)
		}
	}
}

func (s *shop) count(ctx context.Context, query string) int {
	var n int
	require.NoError(s.t, s.db.QueryRowContext(ctx, query).Scan(&n))
	return n
}

// eventually waits until condition holds; it says what is missing otherwise.
func (s *shop) eventually(ctx context.Context, condition func() (bool, string)) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		ok, missing := condition()
		if ok {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			s.mu.Lock()
			defer s.mu.Unlock()
			require.FailNow(s.t, missing, "stock %v, ledger %v", s.first("stock"), s.first("ledger"))
		}
	}
}
