package producer_test

import (
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// K5: each start of a name has the next epoch, and many at once have different
// ones.
func TestEpochs(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		for want := uint32(1); want <= 3; want++ {
			p := newProducer(t, db, d, "shop")
			require.Equal(t, want, p.Epoch())
			require.Equal(t, "shop", p.Name())
		}
		require.EqualValues(t, 1, newProducer(t, db, d, "Shop").Epoch())

		const starts = 8
		var epochs [starts]uint32
		var errs [starts]error
		var wg sync.WaitGroup
		for i := range starts {
			wg.Go(func() {
				var p *ordering.Producer
				if p, errs[i] = ordering.NewProducer(t.Context(), db, d.Dialect, "clone"); errs[i] == nil {
					epochs[i] = p.Epoch()
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs[:]...))
		require.ElementsMatch(t, []uint32{1, 2, 3, 4, 5, 6, 7, 8}, epochs[:])

		_, err := db.ExecContext(t.Context(), fmt.Sprintf("UPDATE producers SET epoch = %d WHERE name = 'shop'", uint32(math.MaxUint32)))
		require.NoError(t, err)
		_, err = ordering.NewProducer(t.Context(), db, d.Dialect, "shop")
		require.ErrorContains(t, err, "4294967296")
	})
}

func TestTablesThatAreMissing(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		_, producerErr := ordering.NewProducer(t.Context(), db, d.Dialect, "shop")
		_, windowsErr := ordering.NewWindows(t.Context(), db, d.Dialect)
		for table, err := range map[string]error{
			"producers": producerErr, "producer_streams": windowsErr,
			"topic_partitioning": ordering.RecordPartitioning(t.Context(), db, d.Dialect, "orders", "", 8),
		} {
			require.ErrorIs(t, err, ordering.ErrSchema)
			require.ErrorContains(t, err, "table "+table)
			require.ErrorContains(t, err, "ordering.Migrate")
		}
		tables := ordering.WithProducerTables("p1", "p2", "p3")
		require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect, tables))
		require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect, tables))
		newProducer(t, db, d, "shop", tables)
		newProducer(t, db, d, "shop", tables)
		windows := newWindows(t, db, d, tables)
		for range 2 {
			_, err := apply(t.Context(), db, windows, number(1, 1))
			require.NoError(t, err)
		}
		require.NoError(t, ordering.RecordPartitioning(t.Context(), db, d.Dialect, "orders", "", 8, tables))
	})
}

// A message keeps its number when it is published again; a number is used up by a
// publish that fails.
func TestRepublishKeepsTheNumber(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	producer := newProducer(t, db, testdb.SQLite, "shop", ordering.WithStreams(1, ""))
	down := errors.New("broker is down")
	r := &recorder{fail: func(*message.Message) error { return down }}
	pub := producer.Publisher(r, nil)

	first := newMessage("a", "1")
	require.Equal(t, down, pub.Publish("orders", first))
	require.Equal(t, ordering.Stamp{Producer: "shop", Epoch: 1, Stream: "orders/0", Sequence: 1}, stampOf(t, first))
	r.fail = nil
	second := newMessage("b", "2")
	require.NoError(t, pub.Publish("orders", second, first, second))
	require.EqualValues(t, 2, stampOf(t, second).Sequence)
	require.EqualValues(t, 1, stampOf(t, first).Sequence)
	require.Len(t, r.sent, 3)

	// Nothing is numbered or sent when a message has no key.
	err := pub.Publish("orders", newMessage("a", "3"), message.NewMessage("keyless", nil))
	require.ErrorIs(t, err, ordering.ErrInvalidKey)
	require.ErrorIs(t, producer.Stamp("orders", message.NewMessage("keyless", nil)), ordering.ErrInvalidKey)
	third := newMessage("a", "3")
	require.NoError(t, pub.Publish("orders", third))
	require.EqualValues(t, 3, stampOf(t, third).Sequence)
	other := newMessage("a", "1")
	require.NoError(t, pub.Publish("invoices", other), "each topic has its streams")
	require.Equal(t, ordering.Stamp{Producer: "shop", Epoch: 1, Stream: "invoices/0", Sequence: 1}, stampOf(t, other))
}

// A number that came with copied metadata, or from another producer, is replaced:
// otherwise consumers would take the new message for a copy of the old one.
func TestCopiedNumbersAreReplaced(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	shop, stock := newProducer(t, db, testdb.SQLite, "shop"), newProducer(t, db, testdb.SQLite, "stock")
	r := &recorder{}
	order := newMessage("a", "order")
	require.NoError(t, shop.Publisher(r, nil).Publish("orders", order))

	derived := newMessage("a", "derived")
	for field, value := range order.Metadata {
		derived.Metadata.Set(field, value)
	}
	_, ok, err := ordering.ParseStamp(derived)
	require.False(t, ok, "a consumer must not trust it")
	require.NoError(t, err)
	require.NoError(t, shop.Publisher(r, nil).Publish("orders", derived))
	require.EqualValues(t, 2, stampOf(t, derived).Sequence)

	forwarded := order.Copy()
	require.NoError(t, stock.Publisher(r, nil).Publish("orders", forwarded))
	require.Equal(t, "stock", stampOf(t, forwarded).Producer)

	broken := newMessage("a", "broken")
	broken.Metadata.Set(ordering.ProducerEpochMetadata, "x")
	require.NoError(t, stock.Publisher(r, nil).Publish("orders", broken))
	require.EqualValues(t, 2, stampOf(t, broken).Sequence)
}

// K5: the successor sends stored messages again with the numbers that they have,
// and vouches for them.
func TestSuccessorSendsStoredNumbers(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	before := newProducer(t, db, testdb.SQLite, "shop")
	stored := []*message.Message{newMessage("a", "1"), newMessage("a", "2")}
	require.NoError(t, before.Stamp("orders", stored...))
	stamp := stampOf(t, stored[1])

	after := newProducer(t, db, testdb.SQLite, "shop")
	fresh, r := newMessage("a", "3"), &recorder{}
	require.NoError(t, after.Publisher(r, nil).Publish("orders", stored[0], fresh, stored[1]))
	stamp.Sender = 2
	require.Equal(t, stamp, stampOf(t, stored[1]))
	require.Equal(t, ordering.Stamp{Producer: "shop", Epoch: 2, Stream: stamp.Stream, Sequence: 1}, stampOf(t, fresh))

	windows := newWindows(t, db, testdb.SQLite)
	want := []ordering.WindowResult{ordering.Accepted, ordering.Accepted, ordering.Unknown} // Unknown: the message's key decides
	for i, msg := range r.sent {
		result, err := apply(t.Context(), db, windows, stampOf(t, msg))
		require.NoError(t, err)
		require.Equal(t, want[i], result)
	}
	// What the one that was replaced sends by itself is fenced.
	late := newMessage("a", "late")
	require.NoError(t, before.Stamp("orders", late))
	_, err := apply(t.Context(), db, windows, stampOf(t, late))
	require.ErrorIs(t, err, ordering.ErrFenced)
	// It learns it from a message of its successor, too.
	require.ErrorIs(t, before.Stamp("orders", fresh), ordering.ErrReplaced)
}

func TestCheckStopsTheOneThatWasReplaced(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		first := newProducer(t, db, d, "shop")
		require.NoError(t, first.Check(t.Context()))
		second := newProducer(t, db, d, "shop")
		r := &recorder{}
		require.NoError(t, first.Publisher(r, nil).Publish("orders", newMessage("a", "1")), "it does not ask by itself")

		require.ErrorIs(t, first.Check(t.Context()), ordering.ErrReplaced)
		require.ErrorIs(t, first.Check(t.Context()), ordering.ErrReplaced)
		require.ErrorIs(t, first.Publisher(r, nil).Publish("orders", newMessage("a", "2")), ordering.ErrReplaced)
		require.ErrorIs(t, first.Stamp("orders", newMessage("a", "2")), ordering.ErrReplaced)
		require.NoError(t, second.Check(t.Context()))
		require.NoError(t, second.Publisher(r, nil).Publish("orders", newMessage("a", "3")))
		require.Len(t, r.sent, 2)
	})
}

// Numbers of a stream are sent in their order and without gaps, whoever publishes
// at the same time; calls that share several streams do not block each other.
func TestNumbersAreInPublishOrder(t *testing.T) {
	t.Parallel()
	const publishers, calls, streams = 8, 50, 3
	for name, opts := range map[string][]ordering.ProducerOption{
		"per key": nil, "per shard": {ordering.WithStreams(streams, ordering.Murmur2Partitioner)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, testdb.SQLite)
			r := &recorder{}
			pub := newProducer(t, db, testdb.SQLite, "shop", opts...).Publisher(r, ordering.KeyFromMetadata("id"))
			var wg sync.WaitGroup
			errs := make([]error, publishers)
			for p := range publishers {
				wg.Go(func() {
					for c := range calls {
						batch := make([]*message.Message, 4)
						for i := range batch {
							batch[i] = message.NewMessage(fmt.Sprint(p, c, i), nil)
							batch[i].Metadata.Set("id", fmt.Sprint("key-", (p+c*i)%7))
						}
						errs[p] = errors.Join(errs[p], pub.Publish("orders", batch...))
					}
				})
			}
			wg.Wait()
			require.NoError(t, errors.Join(errs...))
			last, keys := map[string]uint64{}, map[string]string{}
			for _, msg := range r.sent {
				stamp := stampOf(t, msg)
				last[stamp.Stream]++
				require.Equal(t, last[stamp.Stream], stamp.Sequence, stamp.Stream)
				key := msg.Metadata.Get("id")
				require.Equal(t, stamp.Stream, keyOr(keys, key, stamp.Stream), "a key is in one stream")
			}
			require.Len(t, r.sent, publishers*calls*4)
			if opts == nil {
				require.Len(t, last, 7)
			} else {
				require.LessOrEqual(t, len(last), streams)
			}
		})
	}
}

func keyOr(m map[string]string, key, value string) string {
	if _, ok := m[key]; !ok {
		m[key] = value
	}
	return m[key]
}

// The names of streams fit into a column, whatever the topic's.
func TestStreamNames(t *testing.T) {
	t.Parallel()
	db := open(t, testdb.SQLite)
	long := strings.Repeat("t", 255)
	seen := map[string]bool{}
	for _, opts := range [][]ordering.ProducerOption{nil, {ordering.WithStreams(1000, "")}} {
		producer := newProducer(t, db, testdb.SQLite, "shop", opts...)
		for _, tt := range [][2]string{{"orders", "a"}, {"orders", "b"}, {"ordersa", "a"}, {"order", "sa"}, {long, "a"}, {long[1:], "a"}} {
			msg := newMessage(tt[1], "")
			require.NoError(t, producer.Stamp(tt[0], msg))
			stream := stampOf(t, msg).Stream
			require.False(t, seen[stream], "%q", stream)
			seen[stream] = true
		}
	}
}

// The partitioning of a topic is recorded once, and another one refused.
func TestRecordPartitioning(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		record := func(topic string, p ordering.Partitioner, shards int) error {
			return ordering.RecordPartitioning(t.Context(), db, d.Dialect, topic, p, shards)
		}
		var wg sync.WaitGroup
		errs := make([]error, 6)
		for i := range errs { // all processes start at once
			wg.Go(func() { errs[i] = record("orders", "", 8) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		require.NoError(t, record("orders", ordering.Murmur2Partitioner, 8))
		require.NoError(t, record("Orders", ordering.CRC32Partitioner, 3), "topics are exact")

		err := record("orders", ordering.FNV1aPartitioner, 12)
		var other *ordering.PartitioningError
		require.ErrorAs(t, err, &other)
		require.ErrorIs(t, err, ordering.ErrPartitioning)
		require.Equal(t, ordering.PartitioningError{
			Topic: "orders", Recorded: ordering.Murmur2Partitioner, Wanted: ordering.FNV1aPartitioner, RecordedShards: 8, WantShards: 12,
		}, *other)
		for _, part := range []string{`"orders"`, "murmur2 over 8", "fnv1a over 12"} {
			require.ErrorContains(t, err, part)
		}
		require.ErrorIs(t, record("orders", "", 9), ordering.ErrPartitioning)
		require.ErrorIs(t, record("Orders", "", 3), ordering.ErrPartitioning)
		require.NoError(t, record("orders", "", 8), "a refusal changes nothing")
	})
}

// A transaction that ends elsewhere must not be numbered in: the constructors use
// no connection for longer than they run.
func TestConstructorsWorkOnOneConnection(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		db.SetMaxOpenConns(1)
		producer, windows := newProducer(t, db, d, "shop"), newWindows(t, db, d)
		require.NoError(t, inTx(t.Context(), db, nil, func(tx *sql.Tx) error {
			msg := newMessage("a", "1") // inside a transaction, with no second connection
			if err := producer.Publisher(&recorder{}, nil).Publish("orders", msg); err != nil {
				return err
			}
			_, err := windows.ApplyTx(t.Context(), tx, "c", stampOf(t, msg))
			return err
		}))
	})
}
