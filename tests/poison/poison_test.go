// Package poison_test sends messages that can't be processed through every
// transport: Kafka, RabbitMQ and watermill-sql.
package poison_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// sarama's metrics share one ticker per process, which never ends.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"))
}

// patience is for what must happen.
const patience = 2 * time.Minute

// transport is one end of a broker, for one consumer group.
type transport struct {
	pub   message.Publisher
	sub   message.Subscriber
	close func() error
}

// open connects to a broker and makes sure that topics are there.
type open func(t *testing.T, group string, topics ...string) transport

var transports = map[string]func(t *testing.T) open{
	"kafka": func(t *testing.T) open {
		return onBroker(func(ctx context.Context, group string) (ordering.Broker, error) {
			return kafkashard.Open(ctx, kafkashard.Config{Brokers: strings.Split(services.Value(t, services.Kafka), ","), Group: group, Shards: 1}, nil)
		})
	},
	"amqp":      func(t *testing.T) open { return onRabbit(services.Value(t, services.AMQP)) },
	"amqp4":     func(t *testing.T) open { return onRabbit(services.Value(t, services.AMQP4)) },
	"sql/pgx":   func(t *testing.T) open { return onSQL(testdb.Open(t, testdb.PGX), testdb.PGX) },
	"sql/mysql": func(t *testing.T) open { return onSQL(testdb.Open(t, testdb.MySQL), testdb.MySQL) },
}

func onRabbit(url string) open {
	return onBroker(func(ctx context.Context, group string) (ordering.Broker, error) {
		return amqpshard.Open(ctx, amqpshard.Config{URL: url, Group: group, Shards: 1}, nil)
	})
}

func onBroker(connect func(ctx context.Context, group string) (ordering.Broker, error)) open {
	return func(t *testing.T, group string, topics ...string) transport {
		t.Helper()
		broker, err := connect(t.Context(), group)
		require.NoError(t, err)
		require.NoError(t, broker.Declare(t.Context(), topics...))
		return transport{broker.Publisher(), broker.Subscriber(), broker.Close}
	}
}

func onSQL(db *sql.DB, d testdb.Driver) open {
	return func(t *testing.T, group string, topics ...string) transport {
		t.Helper()
		schema, offsets := wsql.SchemaAdapter(wsql.DefaultPostgreSQLSchema{}), wsql.OffsetsAdapter(wsql.DefaultPostgreSQLOffsetsAdapter{})
		if d.Dialect == deduplicator.MySQL {
			schema, offsets = wsql.DefaultMySQLSchema{}, wsql.DefaultMySQLOffsetsAdapter{}
		}
		pub, err := wsql.NewPublisher(db, wsql.PublisherConfig{SchemaAdapter: schema, AutoInitializeSchema: true}, watermill.NopLogger{})
		require.NoError(t, err)
		deadline := patience // the default is shorter than the retries of a loaded machine
		sub, err := wsql.NewSubscriber(db, wsql.SubscriberConfig{
			ConsumerGroup: group, AckDeadline: &deadline, PollInterval: 20 * time.Millisecond, ResendInterval: 20 * time.Millisecond,
			SchemaAdapter: schema, OffsetsAdapter: offsets,
		}, watermill.NopLogger{})
		require.NoError(t, err)
		for _, topic := range topics {
			require.NoError(t, sub.SubscribeInitialize(topic))
		}
		once := &closedOnce{Subscriber: sub} // two calls at once would race, and the Router makes one
		return transport{pub, once, func() error { return errors.Join(once.Close(), pub.Close()) }}
	}
}

type closedOnce struct {
	message.Subscriber
	once sync.Once
	err  error
}

func (s *closedOnce) Close() error {
	s.once.Do(func() { s.err = s.Subscriber.Close() })
	return s.err
}

// onEach runs test on each transport.
func onEach(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	for name, connect := range transports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			suffix := strings.ToLower(watermill.NewShortUUID()[:10])
			test(t, newRig(t, connect(t), suffix))
		})
	}
}

// rig is a consumer with the whole chain on a database of its own.
type rig struct {
	*testing.T
	open                  open
	group, orders, poison string
	db                    *sql.DB
	store                 *deduplicator.SQLStore
	transactions          atomic.Int32

	mu         sync.Mutex // guards what follows
	deliveries map[string]int
	calls      map[string]int // of the handler
	events     []event
}

type event struct {
	middleware.Event
	at time.Time
}

func newRig(t *testing.T, open open, suffix string) *rig {
	t.Helper()
	r := &rig{
		T: t, open: open, group: "group-" + suffix, orders: "orders_" + suffix, poison: "poison_" + suffix,
		deliveries: map[string]int{}, calls: map[string]int{},
	}
	plain := testdb.Open(t, testdb.SQLite)
	require.NoError(t, deduplicator.Migrate(t.Context(), plain, deduplicator.SQLite))
	_, err := plain.ExecContext(t.Context(), "CREATE TABLE effects (uuid text NOT NULL)")
	require.NoError(t, err)
	r.db = sql.OpenDB(sqlhook.Wrap(sqlhook.Borrow(plain), func(_ context.Context, e sqlhook.Event) error {
		if e.Step == sqlhook.Begin {
			r.transactions.Add(1)
		}
		return nil
	}))
	t.Cleanup(func() { require.NoError(t, r.db.Close()) })
	r.store, err = deduplicator.NewSQLStore(t.Context(), r.db, deduplicator.SQLite)
	require.NoError(t, err)
	return r
}

// start runs a consumer of orders, which stop ends as its process would: what is
// not acknowledged comes again.
func (r *rig) start(poison message.Publisher, retry middleware.Retry, fails func(msg *message.Message) error) (stop func()) {
	r.Helper()
	consumer := r.open(r.T, r.group, r.orders)
	if poison == nil {
		poison = consumer.pub
	}
	chain, err := middleware.Chain(
		middleware.WithObserver(func(_ context.Context, e middleware.Event) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.events = append(r.events, event{e, time.Now()})
		}),
		middleware.WithPoisonQueue(poison, r.poison),
		middleware.WithRetry(retry),
		middleware.Deduplicate(r.store, middleware.WithKey(deduplicator.FromUUID())),
	)
	require.NoError(r, err)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, watermill.NopLogger{})
	require.NoError(r, err)
	router.AddMiddleware(func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			r.count(r.deliveries, msg)
			return h(msg)
		}
	})
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("stock", r.orders, consumer.sub, func(msg *message.Message) error {
		r.count(r.calls, msg)
		tx, _ := middleware.Tx(msg.Context())
		_, err := tx.ExecContext(msg.Context(), "INSERT INTO effects (uuid) VALUES (?)", msg.UUID)
		return errors.Join(err, fails(msg))
	})
	done := make(chan error, 1)
	go func() { done <- router.Run(context.WithoutCancel(r.Context())) }()
	<-router.Running()
	return sync.OnceFunc(func() {
		require.NoError(r, router.Close())
		require.NoError(r, <-done)
		require.NoError(r, consumer.close())
	})
}

func (r *rig) count(in map[string]int, msg *message.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	in[msg.UUID]++
}

// publish publishes n orders and returns their UUIDs.
func (r *rig) publish(n int) (uuids []string) {
	r.Helper()
	producer := r.open(r.T, r.group, r.orders, r.poison)
	defer func() { require.NoError(r, producer.close()) }()
	messages := make([]*message.Message, n)
	for i := range messages {
		messages[i] = message.NewMessage(watermill.NewUUID(), []byte(fmt.Sprintf(`{"order": %d}`, i)))
		messages[i].Metadata.Set(ordering.PartitionKeyMetadata, fmt.Sprint(i))
		uuids = append(uuids, messages[i].UUID)
	}
	require.NoError(r, producer.pub.Publish(r.orders, messages...))
	return uuids
}

// of returns the events of a message, or of all if uuid is empty.
func (r *rig) of(uuid string, outcomes ...middleware.Outcome) (found []event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if (uuid == "" || e.MessageUUID == uuid) && (len(outcomes) == 0 || slices.Contains(outcomes, e.Outcome)) {
			found = append(found, e)
		}
	}
	return found
}

func (r *rig) until(what string, condition func() bool) {
	r.Helper()
	require.Eventually(r, condition, patience, 10*time.Millisecond, what)
}

// effects counts what handlers wrote and the store committed.
func (r *rig) effects() (effects map[string]int) {
	r.Helper()
	rows, err := r.db.QueryContext(r.Context(), "SELECT uuid, COUNT(*) FROM effects GROUP BY uuid")
	require.NoError(r, err)
	defer rows.Close()
	effects = map[string]int{}
	for rows.Next() {
		var uuid string
		var n int
		require.NoError(r, rows.Scan(&uuid, &n))
		effects[uuid] = n
	}
	require.NoError(r, rows.Err())
	return effects
}

// parked reads the poison queue up to a message that is published now.
func (r *rig) parked() (parked []*message.Message) {
	r.Helper()
	reader := r.open(r.T, "operator-"+r.group, r.poison)
	defer func() { require.NoError(r, reader.close()) }()
	last := message.NewMessage(watermill.NewUUID(), []byte("{}"))
	last.Metadata.Set(ordering.PartitionKeyMetadata, "last")
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	require.NoError(r, reader.pub.Publish(r.poison, last))
	messages, err := reader.sub.Subscribe(ctx, r.poison)
	require.NoError(r, err)
	for msg := range messages {
		msg.Ack()
		if msg.UUID == last.UUID {
			return parked
		}
		parked = append(parked, msg)
	}
	require.FailNow(r, "the poison queue was not read to its end")
	return nil
}

func once(uuids []string) map[string]int {
	effects := map[string]int{}
	for _, uuid := range uuids {
		effects[uuid] = 1
	}
	return effects
}

var errBad = errors.New("bad order")

// A parked message that is published again, as it was read, to the topic that it came
// from is processed once: published once more, it is a duplicate, as for every group
// that has processed it before.
func TestParkedMessageIsPublishedAgain(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, r *rig) {
		operator := r.open(t, "operator-"+r.group, r.poison)
		defer func() { require.NoError(t, operator.close()) }()
		uuid := r.publish(1)[0]
		var mended atomic.Bool
		stop := r.start(nil, middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond}, func(*message.Message) error {
			if mended.Load() {
				return nil
			}
			return errBad
		})
		defer stop()
		r.until("it is parked", func() bool { return len(r.of(uuid, middleware.Parked)) == 1 })
		mended.Store(true)

		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		messages, err := operator.sub.Subscribe(ctx, r.poison)
		require.NoError(t, err)
		parked := <-messages
		require.NotNil(t, parked)
		topic, again := parked.Metadata.Get(watermillmw.PoisonedTopicKey), parked.Copy()
		require.NoError(t, operator.pub.Publish(topic, parked))
		parked.Ack()
		r.until("it is processed", func() bool { return len(r.of(uuid, middleware.Processed)) == 1 })
		require.NoError(t, operator.pub.Publish(topic, again))
		r.until("it is a duplicate", func() bool { return len(r.of(uuid, middleware.Duplicate)) == 1 })
		require.Equal(t, once([]string{uuid}), r.effects())
	})
}

// B51: one of a hundred messages always fails. The others are done, once each; it
// is tried as often as declared, with pauses that grow and in which nothing
// happens, and then parked.
func TestOneInAHundredB51(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, r *rig) {
		const messages = 100
		retry := middleware.Retry{MaxRetries: 4, InitialInterval: 100 * time.Millisecond}
		operator := r.open(t, "operator-"+r.group, r.poison) // before anything is parked
		require.NoError(t, operator.close())
		uuids := r.publish(messages)
		bad := uuids[37]
		before := r.transactions.Load()
		stop := r.start(nil, retry, func(msg *message.Message) error {
			if msg.UUID == bad {
				return errBad
			}
			return nil
		})
		defer stop()
		r.until("all messages end", func() bool {
			return len(r.of("", middleware.Processed)) >= messages-1 && len(r.of(bad, middleware.Parked)) >= 1
		})
		stop()

		tries := r.of(bad)
		require.Len(t, tries, retry.MaxRetries+1, "%v", tries)
		for i, e := range tries {
			want := middleware.Retried
			if i == retry.MaxRetries {
				want = middleware.Parked
			}
			require.Equal(t, want, e.Outcome)
			require.Equal(t, i+1, e.Attempt)
			require.ErrorIs(t, e.Err, errBad)
			if i > 0 { // each pause is at least half of what it is on average
				require.GreaterOrEqual(t, e.at.Sub(tries[i-1].at), retry.InitialInterval<<(i-1)/2, "pause %d", i)
			}
		}
		// Whatever waits without looping: one delivery, one call per try, one
		// transaction per call.
		require.Equal(t, retry.MaxRetries+1, r.calls[bad])
		delete(r.calls, bad)
		healthy := slices.DeleteFunc(slices.Clone(uuids), func(uuid string) bool { return uuid == bad })
		require.Equal(t, once(uuids), r.deliveries)
		require.Equal(t, once(healthy), r.calls)
		require.EqualValues(t, messages+retry.MaxRetries, r.transactions.Load()-before)
		require.Equal(t, once(healthy), r.effects())

		parked := r.parked()
		require.Len(t, parked, 1)
		require.Equal(t, bad, parked[0].UUID)
		require.JSONEq(t, `{"order": 37}`, string(parked[0].Payload))
		require.Contains(t, parked[0].Metadata.Get(watermillmw.ReasonForPoisonedKey), errBad.Error())
	})
}

// downPublisher refuses everything until it is up.
type downPublisher struct {
	message.Publisher
	up      atomic.Bool
	refused atomic.Int32
}

func (p *downPublisher) Publish(topic string, messages ...*message.Message) error {
	if !p.up.Load() {
		p.refused.Add(1)
		return errors.New("poison queue is down")
	}
	return p.Publisher.Publish(topic, messages...)
}

// B52: the poison queue is down when the retries are used up. The message is not
// acknowledged, so the next process gets it as well, and it is parked when the
// poison queue is back.
func TestPoisonQueueIsDownB52(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, r *rig) {
		const messages = 10
		operator := r.open(t, "operator-"+r.group, r.poison)
		defer func() { require.NoError(t, operator.close()) }()
		uuids := r.publish(messages)
		bad := uuids[4]
		poison := &downPublisher{Publisher: operator.pub}
		retry := middleware.Retry{MaxRetries: 1, InitialInterval: 10 * time.Millisecond}
		fails := func(msg *message.Message) error {
			if msg.UUID == bad {
				return errBad
			}
			return nil
		}
		for process := range 2 {
			stop := r.start(poison, retry, fails)
			defer stop()
			refused := poison.refused.Load()
			r.until("the message is tried again", func() bool { return poison.refused.Load() >= refused+3 })
			require.Empty(t, r.of(bad, middleware.Parked))
			require.NotEmpty(t, r.of(bad, middleware.Failed))
			if process == 0 {
				stop()
				continue
			}
			poison.up.Store(true)
			r.until("the message is parked", func() bool { return len(r.of(bad, middleware.Parked)) > 0 })
			r.until("the others are done", func() bool { return len(r.effects()) == messages-1 })
			stop()
		}
		healthy := slices.DeleteFunc(slices.Clone(uuids), func(uuid string) bool { return uuid == bad })
		require.Equal(t, once(healthy), r.effects())
		parked := r.parked()
		require.Len(t, parked, 1)
		require.Equal(t, bad, parked[0].UUID)
	})
}

// B54: a reason of 200 kB, which does not fit into a frame of AMQP, is cut. The
// message is parked and its connection lives on.
func TestLongReasonOnTheWireB54(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, r *rig) {
		operator := r.open(t, "operator-"+r.group, r.poison)
		require.NoError(t, operator.close())
		uuids := r.publish(3)
		stop := r.start(nil, middleware.Retry{MaxRetries: 1, InitialInterval: 10 * time.Millisecond}, func(msg *message.Message) error {
			if msg.UUID == uuids[1] {
				return errors.New(strings.Repeat("é", 100_000))
			}
			return nil
		})
		defer stop()
		r.until("all end", func() bool {
			return len(r.of("", middleware.Processed)) >= 2 && len(r.of(uuids[1], middleware.Parked, middleware.Failed)) >= 1
		})
		stop()
		require.Empty(t, r.of("", middleware.Failed))
		require.Equal(t, once(uuids), r.deliveries)
		parked := r.parked()
		require.Len(t, parked, 1)
		require.Equal(t, uuids[1], parked[0].UUID)
		reason := parked[0].Metadata.Get(watermillmw.ReasonForPoisonedKey)
		require.LessOrEqual(t, len(reason), 1024)
		require.Greater(t, len(reason), 1000)
		require.True(t, utf8.ValidString(reason))
	})
}
