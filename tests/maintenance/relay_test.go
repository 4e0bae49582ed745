package maintenance_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	osexec "os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// broker is a publisher that accepts messages one by one.
type broker struct {
	accept func(topic string, msg *message.Message, n int) error // n counts the messages from 1; nil accepts all

	mu    sync.Mutex // guards what follows
	n     int
	sent  []deduplicator.Output // accepted, in order
	calls int
}

func (b *broker) Publish(topic string, messages ...*message.Message) error {
	b.mu.Lock()
	b.calls++
	b.mu.Unlock()
	for _, msg := range messages {
		b.mu.Lock()
		b.n++
		n := b.n
		b.mu.Unlock()
		if b.accept != nil {
			if err := b.accept(topic, msg, n); err != nil {
				return err
			}
		}
		b.mu.Lock()
		b.sent = append(b.sent, deduplicator.Output{Topic: topic, UUID: msg.UUID, Metadata: maps.Clone(msg.Metadata), Payload: msg.Payload})
		b.mu.Unlock()
	}
	return nil
}

func (b *broker) Close() error { return nil }

func (b *broker) got() []deduplicator.Output {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.sent)
}

func (b *broker) uuids() []string {
	var all []string
	for _, output := range b.got() {
		all = append(all, output.UUID)
	}
	return all
}

func newRelay(t *testing.T, store *deduplicator.SQLStore, pub message.Publisher, opts ...deduplicator.RelayOption) *deduplicator.Relay {
	t.Helper()
	relay, err := deduplicator.NewRelay(store, pub, opts...)
	require.NoError(t, err)
	return relay
}

// outputs are n outputs of a claim for topic t.
func outputs(name string, n int) []deduplicator.Output {
	all := make([]deduplicator.Output, n)
	for i := range all {
		all[i] = deduplicator.Output{
			Topic: "t", UUID: fmt.Sprintf("%s-%d", name, i), Payload: fmt.Appendf(nil, "payload %s %d", name, i),
			Metadata: map[string]string{"name": name, "i": fmt.Sprint(i)},
		}
	}
	return all
}

// age makes all outputs that are stored older.
func age(t *testing.T, db *sql.DB, d testdb.Driver) {
	t.Helper()
	switch d.Dialect {
	case deduplicator.PostgreSQL:
		exec(t, db, "UPDATE produced_messages SET created_at = created_at - interval '1 hour'")
	case deduplicator.MySQL:
		exec(t, db, "UPDATE produced_messages SET created_at = created_at - INTERVAL 1 HOUR")
	case deduplicator.SQLite:
		exec(t, db, "UPDATE produced_messages SET created_at = strftime('%Y-%m-%d %H:%M:%f', created_at, '-1 hour')")
	}
}

func flush(t *testing.T, relay *deduplicator.Relay) deduplicator.RelayResult {
	t.Helper()
	result, err := relay.Flush(t.Context())
	require.NoError(t, err)
	return result
}

func left(t *testing.T, db *sql.DB) int {
	return count(t, db, "SELECT COUNT(*) FROM produced_messages")
}

func TestRelayOptions(t *testing.T) {
	t.Parallel()
	_, store := open(t, testdb.SQLite)
	_, err := deduplicator.NewRelay(store, &broker{}, deduplicator.WithMinAge(time.Second),
		deduplicator.WithPublishTimeout(100*time.Millisecond), deduplicator.WithInterval(10*time.Millisecond))
	require.NoError(t, err)
	_, err = deduplicator.NewRelay(nil, nil, deduplicator.WithMinAge(time.Second-1), deduplicator.WithPublishTimeout(0),
		deduplicator.WithInterval(0), deduplicator.WithRelayObserver(nil), deduplicator.WithConsumers("stock", ""))
	require.ErrorIs(t, err, deduplicator.ErrInvalidOption)
	for _, part := range []string{
		"store is nil", "publisher is nil", "WithMinAge: 999.999999ms", "1s", "WithPublishTimeout: 0s", "100ms", "WithInterval: 0s", "WithRelayObserver",
		"WithConsumers: a name is empty",
	} {
		require.ErrorContains(t, err, part)
	}
	_, err = deduplicator.NewRelay(store, &broker{}, deduplicator.WithMinAge(math.MaxInt64), deduplicator.WithPublishTimeout(math.MaxInt64))
	require.ErrorContains(t, err, "WithMinAge: 2562047h47m16.854775807s is over the most, 438000h0m0s")
	require.ErrorContains(t, err, "WithPublishTimeout: 2562047h47m16.854775807s is over the most")
	_, err = deduplicator.NewRelay(store, &broker{}, deduplicator.WithConsumers())
	require.ErrorIs(t, err, deduplicator.ErrInvalidOption)
	require.ErrorContains(t, err, "WithConsumers: no names")
}

// What is published is what was stored: topics, UUIDs, metadata, payloads, order,
// whatever bytes they have.
func TestRelayPublishesWhatIsStored(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		binary := string([]byte{0, 0xff, 0xfe})
		long := strings.Repeat("k", 5000)
		claims := map[string][]deduplicator.Output{
			"a": {
				{Topic: "z", UUID: "9"},
				{Topic: "a", UUID: "1", Payload: []byte(binary), Metadata: map[string]string{binary: binary, "": ""}},
				{Topic: "a", UUID: "", Metadata: map[string]string{"k": "v"}},
				{Topic: "z", UUID: "2", Payload: []byte("last")},
			},
			"bin" + binary: outputs("binary", 2),
			long:           outputs("long", 2),
		}
		var want []deduplicator.Output
		for _, key := range slices.Sorted(maps.Keys(claims)) {
			process(t, store, claimOf(key), claims[key]...)
			if d.Dialect == deduplicator.SQLite {
				time.Sleep(2 * time.Millisecond) // its times have milliseconds
			}
			want = append(want, claims[key]...)
		}
		other := claimOf("a")
		other.Consumer = "d" + binary
		process(t, store, other, outputs("other", 250)...) // more than one call takes
		want = append(want, outputs("other", 250)...)

		broker := &broker{}
		relay := newRelay(t, store, broker)
		require.Zero(t, flush(t, relay).Messages, "they are not old enough")
		age(t, db, d)
		result := flush(t, relay)
		require.Equal(t, 4, result.Claims)
		require.Equal(t, len(want), result.Messages)
		got := broker.got()
		require.Len(t, got, len(want))
		if got[0].UUID != "9" { // the other consumer came first
			got = slices.Concat(got[250:], got[:250])
		}
		for i := range want {
			require.Equal(t, want[i].Topic, got[i].Topic, i)
			require.Equal(t, want[i].UUID, got[i].UUID, i)
			require.Equal(t, string(want[i].Payload), string(got[i].Payload), i)
			require.True(t, maps.Equal(want[i].Metadata, got[i].Metadata), "%d: %v", i, got[i].Metadata)
		}
		require.Zero(t, left(t, db))
		require.Zero(t, count(t, db, "SELECT COUNT(*) FROM message_leases"))
		require.Zero(t, flush(t, relay).Messages)

		// Their messages are duplicates without outputs now.
		again, err := store.Process(t.Context(), claimOf("a"), nil)
		require.NoError(t, err)
		require.Equal(t, deduplicator.Result{Outcome: deduplicator.Duplicate}, again)
	})
}

// Two services with different brokers share the tables: each relay publishes what
// its own handlers have stored.
func TestRelayOfSomeConsumers(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		long := "long " + strings.Repeat("n", 300) // stored as a hash
		for _, consumer := range []string{"billing", "stock", "stock\x00", long, "zoo"} {
			claim := claimOf("a")
			claim.Consumer = consumer
			process(t, store, claim, outputs(strings.TrimSuffix(consumer, "\x00"), 2)...)
		}
		age(t, db, d)
		kafka, amqp := &broker{}, &broker{}
		relay := newRelay(t, store, kafka, deduplicator.WithConsumers("stock", long, "none", "stock"))
		require.Equal(t, 2, flush(t, relay).Claims)
		require.ElementsMatch(t, []string{"stock-0", "stock-1", long + "-0", long + "-1"}, kafka.uuids())
		require.Equal(t, 6, left(t, db))
		require.Zero(t, flush(t, relay).Messages)
		require.Equal(t, 3, flush(t, newRelay(t, store, amqp, deduplicator.WithConsumers("billing", "stock\x00", "zoo"))).Claims)
		require.Zero(t, left(t, db))
		require.Len(t, kafka.got(), 4)
	})
}

// B10: the broker refuses after 400 of 1,000 messages; what it has accepted comes
// again with the same UUIDs, and all of it in the end.
func TestBrokerRefusesB10(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		for _, perClaim := range []int{1000, 50} {
			db, store := open(t, d)
			var want []string
			for i := range 1000 / perClaim {
				name := fmt.Sprintf("%02d", i)
				process(t, store, claimOf(name), outputs(name, perClaim)...)
				for _, output := range outputs(name, perClaim) {
					want = append(want, output.UUID)
				}
			}
			age(t, db, d)
			refuse := true
			broker := &broker{accept: func(_ string, _ *message.Message, n int) error {
				if refuse && n > 410 {
					return errors.New("resource alarm")
				}
				return nil
			}}
			relay := newRelay(t, store, broker)
			result, err := relay.Flush(t.Context())
			require.ErrorContains(t, err, "resource alarm")
			require.Equal(t, err, result.Err)
			require.Positive(t, result.Failed)
			require.GreaterOrEqual(t, left(t, db), 590)
			require.Zero(t, count(t, db, "SELECT COUNT(*) FROM message_leases"), "the next one may try at once")
			refuse = false
			flush(t, relay)
			require.Zero(t, left(t, db))
			got := broker.uuids()
			require.LessOrEqual(t, len(got), 1000+410)
			require.ElementsMatch(t, want, slices.Compact(slices.Sorted(slices.Values(got))))
		}
	})
}

const relayVariable = "TEST_KILLED_RELAY"

// B10: a relay is killed in the middle of a batch, and two others take over. Only
// what it was at comes twice.
func TestRelayIsKilledB10(t *testing.T) {
	t.Parallel()
	const timeout = 300 * time.Millisecond
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		if dsn := os.Getenv(relayVariable + string(d.Dialect)); dsn != "" {
			store := newStore(t, (&testdb.Database{Driver: d, DSN: dsn}).Open(t), d)
			relay := newRelay(t, store, &broker{accept: func(_ string, msg *message.Message, n int) error {
				fmt.Fprintln(os.Stderr, "sent", msg.UUID)
				if n == 405 {
					return syscall.Kill(os.Getpid(), syscall.SIGKILL)
				}
				return nil
			}}, deduplicator.WithPublishTimeout(timeout))
			_, err := relay.Flush(t.Context())
			t.Fatal("alive", err)
		}
		database := testdb.Create(t, d)
		db := database.Open(t)
		require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect))
		store := newStore(t, db, d)
		for i := range 100 {
			process(t, store, claimOf(fmt.Sprintf("%03d", i)), outputs(fmt.Sprintf("%03d", i), 10)...)
		}
		age(t, db, d)
		command := osexec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestRelayIsKilledB10$/^"+d.Name+"$")
		command.Env = append(os.Environ(), relayVariable+string(d.Dialect)+"="+database.DSN)
		out, err := command.CombinedOutput()
		var exit *osexec.ExitError
		require.ErrorAs(t, err, &exit, string(out))
		require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal(), string(out))
		var sent []string
		for line := range strings.Lines(string(out)) {
			if uuid, ok := strings.CutPrefix(strings.TrimSpace(line), "sent "); ok {
				sent = append(sent, uuid)
			}
		}
		require.Len(t, sent, 405)
		require.Equal(t, 600, left(t, db))

		broker := &broker{}
		var relays sync.WaitGroup
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		for range 2 {
			relays.Go(func() {
				newRelay(t, newStore(t, db, d), broker, deduplicator.WithInterval(20*time.Millisecond), deduplicator.WithPublishTimeout(timeout)).Run(ctx)
			})
		}
		for left(t, db) > 0 && ctx.Err() == nil {
			time.Sleep(20 * time.Millisecond)
		}
		cancel()
		relays.Wait()
		require.Zero(t, left(t, db))
		got := broker.uuids()
		require.Len(t, got, 600, "only the claim that it was at is published again")
		require.Len(t, slices.Compact(slices.Sorted(slices.Values(append(sent, got...)))), 1000)
	})
}

// B12: three relays on one table publish each row once.
func TestThreeRelaysB12(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		for _, consumers := range []int{1, 4} {
			db, store := open(t, d)
			var want []string
			for i := range 200 {
				claim := claimOf(fmt.Sprintf("%03d", i))
				claim.Consumer = fmt.Sprint("c", i%consumers)
				process(t, store, claim, outputs(claim.Key, 1)...)
				want = append(want, claim.Key+"-0")
			}
			age(t, db, d)
			broker := &broker{accept: func(string, *message.Message, int) error {
				time.Sleep(time.Millisecond)
				return nil
			}}
			var relays sync.WaitGroup
			for range 3 {
				relays.Go(func() {
					relay := newRelay(t, newStore(t, db, d), broker)
					for range 3 {
						if _, err := relay.Flush(t.Context()); err != nil {
							t.Error(err)
						}
					}
				})
			}
			relays.Wait()
			require.Zero(t, left(t, db))
			got := broker.uuids()
			require.ElementsMatch(t, want, got)
			for c := range consumers { // in order, consumer by consumer
				of := slices.DeleteFunc(slices.Clone(got), func(uuid string) bool {
					var i int
					_, err := fmt.Sscanf(uuid, "%d-", &i)
					return err != nil || i%consumers != c
				})
				require.True(t, slices.IsSorted(of), "consumer %d: %v", c, of)
			}
		}
	})
}

// B13: the connection is cut between the publish and the deletion. Both are
// repeated, with the same UUID and metadata.
func TestConnectionIsCutAfterPublishB13(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db, spy := spied(t, testdb.Create(t, d))
		require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect))
		store := newStore(t, db, d)
		process(t, store, claimOf("a"), outputs("a", 2)...)
		process(t, store, claimOf("b"), outputs("b", 1)...)
		age(t, db, d)
		reset := errors.New("connection reset")
		spy.onExec(func(query string) error {
			if strings.HasPrefix(query, "DELETE FROM "+d.Dialect.Quote("produced_messages")) {
				return reset
			}
			return nil
		})
		broker := &broker{}
		relay := newRelay(t, store, broker)
		result, err := relay.Flush(t.Context())
		require.ErrorIs(t, err, reset)
		require.Zero(t, result.Claims)
		require.Equal(t, 2, result.Messages)
		require.Equal(t, 3, left(t, db))
		spy.onExec(nil)
		require.Equal(t, 2, flush(t, relay).Claims)
		got := broker.got()
		require.Len(t, got, 5)
		require.Equal(t, got[:2], got[2:4])
		require.Zero(t, left(t, db))
	})
}

// B15: what is stored since less than the minimum age is left to those who are
// about to publish it.
func TestYoungOutputsB15(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		for name, stored := range map[string]time.Duration{"young": 40 * time.Second, "old": 90 * time.Second} {
			process(t, store, claimOf(name), outputs(name, 2)...)
			exec(t, db, "UPDATE produced_messages SET created_at = "+ago(d, stored)+" WHERE message_key = '"+name+"'")
		}
		process(t, store, claimOf("now"), outputs("now", 2)...)
		broker := &broker{}
		require.Equal(t, 1, flush(t, newRelay(t, store, broker, deduplicator.WithMinAge(time.Minute))).Claims)
		require.Equal(t, []string{"old-0", "old-1"}, broker.uuids())
		require.Equal(t, 1, flush(t, newRelay(t, store, broker)).Claims)
		require.Equal(t, []string{"old-0", "old-1", "young-0", "young-1"}, broker.uuids())
		require.Equal(t, 2, left(t, db))
	})
}

// B16: a transaction that began first commits last. Its outputs are published,
// although younger ones have been.
func TestLateCommitB16(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL}, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		late, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer late.Rollback()
		const insert = "INSERT INTO produced_messages (consumer_name, message_key, ordinal, topic, uuid, metadata, payload, created_at) VALUES "
		_, err = late.ExecContext(t.Context(), insert+"('c', 'a', 0, 't', 'late', '{}', '', "+ago(d, time.Hour)+")")
		require.NoError(t, err)
		exec(t, db, insert+"('c', 'b', 0, 't', 'early', '{}', '', "+ago(d, time.Minute)+")")
		broker := &broker{}
		relay := newRelay(t, store, broker)
		flush(t, relay)
		require.Equal(t, []string{"early"}, broker.uuids())
		require.NoError(t, late.Commit())
		flush(t, relay)
		require.Equal(t, []string{"early", "late"}, broker.uuids())
		require.Zero(t, left(t, db))
	})
}

// B63: the broker hangs. No transaction is open and no connection in use; the
// relay gives up, makes no second call beside the first one, and goes on when
// that has returned.
func TestBrokerHangsB63(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		const timeout = 500 * time.Millisecond
		db, store := open(t, d)
		process(t, store, claimOf("a"), outputs("a", 3)...)
		age(t, db, d)
		hanging, release := make(chan struct{}), make(chan struct{})
		var once sync.Once
		broker := &broker{accept: func(string, *message.Message, int) error {
			once.Do(func() { close(hanging) })
			<-release
			return nil
		}}
		relay := newRelay(t, store, broker, deduplicator.WithPublishTimeout(timeout))
		done := make(chan error, 1)
		go func() {
			_, err := relay.Flush(t.Context())
			done <- err
		}()
		<-hanging
		require.Zero(t, db.Stats().InUse)
		if d.Dialect == deduplicator.PostgreSQL {
			// What has touched the table in a transaction that is open holds a lock on it.
			require.Zero(t, count(t, db, "SELECT COUNT(*) FROM pg_stat_activity a JOIN pg_locks l USING (pid)"+
				" WHERE a.pid <> pg_backend_pid() AND a.xact_start IS NOT NULL AND l.relation IN ('produced_messages'::regclass, 'message_leases'::regclass)"))
		}
		process(t, store, claimOf("b"), outputs("b", 1)...) // handlers go on
		require.ErrorIs(t, <-done, deduplicator.ErrPublishTimeout)

		age(t, db, d)
		calls := func() int {
			broker.mu.Lock()
			defer broker.mu.Unlock()
			return broker.calls
		}
		require.Equal(t, 1, calls())
		require.Zero(t, flush(t, relay).Messages, "its lease has to end first")
		exec(t, db, "DELETE FROM message_leases")
		_, err := relay.Flush(t.Context())
		require.ErrorIs(t, err, deduplicator.ErrPublishTimeout)
		require.Equal(t, 1, calls(), "a second call beside the one that hangs")
		require.Equal(t, 4, left(t, db))

		close(release)
		exec(t, db, "DELETE FROM message_leases")
		require.Eventually(t, func() bool {
			result, err := relay.Flush(t.Context())
			return err == nil && result.Claims == 2
		}, patience, 10*time.Millisecond)
		require.Equal(t, []string{"a-0", "a-1", "a-2", "a-0", "a-1", "a-2", "b-0"}, broker.uuids())
	})
}

// A relay that was paused for longer than its lease, while another one took over,
// deletes nothing and stops.
func TestRelayThatLostItsLease(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		for i := range 3 {
			process(t, store, claimOf(fmt.Sprint(i)), outputs(fmt.Sprint(i), 1)...)
		}
		age(t, db, d)
		second := &broker{accept: func(string, *message.Message, int) error { return errors.New("refused") }}
		first := &broker{accept: func(_ string, _ *message.Message, n int) error {
			if n == 1 { // paused: the lease ends, and the other one takes it and keeps it
				exec(t, db, "UPDATE message_leases SET token = 'other'")
			}
			return nil
		}}
		result, err := newRelay(t, store, first).Flush(t.Context())
		require.ErrorContains(t, err, "another process has taken over")
		require.Zero(t, result.Claims)
		require.Equal(t, []string{"0-0"}, first.uuids())
		require.Equal(t, 3, left(t, db), "the other one's rows are deleted")
		require.Equal(t, 1, count(t, db, "SELECT COUNT(*) FROM message_leases WHERE token = 'other'"), "the other one's lease is gone")

		// While the lease lasts nobody else is at it; then the next one is.
		require.Zero(t, flush(t, newRelay(t, store, second)).Messages)
		require.Empty(t, second.calls)
		exec(t, db, "UPDATE message_leases SET expires_at = "+ago(d, time.Second))
		_, err = newRelay(t, store, second).Flush(t.Context())
		require.ErrorContains(t, err, "refused")
		require.Equal(t, 3, flush(t, newRelay(t, store, first)).Claims)
	})
}

// A lease is renewed while its relay works, however long that takes.
func TestLeaseIsRenewed(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		const timeout = time.Second // leases are three times as long
		db, store := open(t, d)
		for i := range 10 {
			process(t, store, claimOf(fmt.Sprint(i)), outputs(fmt.Sprint(i), 1)...)
		}
		age(t, db, d)
		slow := &broker{accept: func(string, *message.Message, int) error {
			time.Sleep(timeout / 2)
			return nil
		}}
		var relays sync.WaitGroup
		for range 2 {
			relays.Go(func() {
				relay := newRelay(t, newStore(t, db, d), slow, deduplicator.WithPublishTimeout(timeout))
				for range 200 {
					if _, err := relay.Flush(t.Context()); err != nil && !errors.Is(err, deduplicator.ErrPublishTimeout) {
						t.Error(err)
					}
					if left(t, db) == 0 {
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
		relays.Wait()
		require.Len(t, slow.uuids(), 10)
	})
}

// A claim that the broker refuses holds up what must come after it, and nothing
// else.
func TestRefusedOutputHoldsUpItsPartition(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		for i, entity := range []string{"a", "b", "a", "", "b", "a", ""} {
			output := outputs(fmt.Sprint(i), 1)
			if entity != "" {
				output[0].Metadata[ordering.PartitionKeyMetadata] = entity
			}
			if i == 5 {
				output[0].Topic = "another"
			}
			process(t, store, claimOf(fmt.Sprint(i)), output...)
		}
		age(t, db, d)
		refuse := true
		broker := &broker{accept: func(_ string, msg *message.Message, _ int) error {
			if refuse && (msg.UUID == "0-0" || msg.UUID == "3-0") {
				return errors.New("refused")
			}
			return nil
		}}
		relay := newRelay(t, store, broker)
		for range 2 { // it is no better the second time
			result, err := relay.Flush(t.Context())
			require.ErrorContains(t, err, "refused")
			require.Equal(t, 3, result.Failed)
			require.Equal(t, []string{"1-0", "4-0", "5-0", "6-0"}, broker.uuids())
		}
		refuse = false
		require.Equal(t, 3, flush(t, relay).Claims)
		require.Equal(t, []string{"1-0", "4-0", "5-0", "6-0", "0-0", "2-0", "3-0"}, broker.uuids())
	})
}

// An output that can't be read holds up its claim, and with it the partitions of the
// claim's other outputs.
func TestDamagedOutputHoldsUpItsClaim(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		for i, entities := range [][]string{{"a", "b"}, {"a"}, {"c"}} {
			output := outputs(fmt.Sprint(i), len(entities))
			for j, entity := range entities {
				output[j].Metadata[ordering.PartitionKeyMetadata] = entity
			}
			process(t, store, claimOf(fmt.Sprint(i)), output...)
		}
		age(t, db, d)
		exec(t, db, "UPDATE produced_messages SET metadata = '{' WHERE uuid = '0-1'")
		broker := &broker{}
		result, err := newRelay(t, store, broker).Flush(t.Context())
		require.ErrorContains(t, err, "damaged")
		require.Equal(t, 2, result.Failed)
		require.Equal(t, []string{"2-0"}, broker.uuids())
	})
}

// However much is refused for good, what is not comes through, and in order.
func TestManyRefusedOutputs(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		const refused = 230
		put := func(name, entity string) {
			output := outputs(name, 1)
			output[0].Metadata[ordering.PartitionKeyMetadata] = entity
			process(t, store, claimOf(name), output...)
		}
		for i := range refused {
			put(fmt.Sprint("refused ", i), fmt.Sprint("refused ", i))
		}
		put("behind", "refused 0")
		put("good", "other")
		age(t, db, d)
		var refuse atomic.Bool
		refuse.Store(true)
		broker := &broker{accept: func(_ string, msg *message.Message, _ int) error {
			if refuse.Load() && strings.HasPrefix(msg.UUID, "refused") {
				return errors.New("refused")
			}
			return nil
		}}
		relay := newRelay(t, store, broker)
		for range 3 {
			_, err := relay.Flush(t.Context())
			require.ErrorContains(t, err, "refused")
		}
		require.Equal(t, []string{"good-0"}, broker.uuids())
		refuse.Store(false)
		flush(t, relay)
		require.Zero(t, left(t, db))
		got := broker.uuids()
		require.Less(t, slices.Index(got, "refused 0-0"), slices.Index(got, "behind-0"))
	})
}

// A broker that is slow to refuse one consumer's outputs does not keep those of the
// others from being published.
func TestSlowRefusalsOfOneConsumer(t *testing.T) {
	t.Parallel()
	db, store := open(t, testdb.SQLite)
	for _, consumer := range []string{"a", "b", "c"} {
		for i := range 3 {
			output := outputs(fmt.Sprint(consumer, i), 1)
			output[0].Topic = consumer
			claim := claimOf(fmt.Sprint(i))
			claim.Consumer = consumer
			process(t, store, claim, output...)
		}
	}
	age(t, db, testdb.SQLite)
	const timeout = 200 * time.Millisecond
	broker := &broker{accept: func(topic string, _ *message.Message, _ int) error {
		if topic != "b" {
			time.Sleep(timeout * 2 / 3) // no event: the broker takes its time
			return errors.New("refused")
		}
		return nil
	}}
	relay := newRelay(t, store, broker, deduplicator.WithPublishTimeout(timeout))
	for range 2 {
		_, err := relay.Flush(t.Context())
		require.ErrorContains(t, err, "refused")
	}
	require.Equal(t, []string{"b0-0", "b1-0", "b2-0"}, broker.uuids())
}

// A duplicate delivery re-emits and forgets while the relay publishes: nothing
// fails, nothing is left, and all copies have one UUID.
func TestRelayBesideRedelivery(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db, store := open(t, d)
		for i := range 60 {
			process(t, store, claimOf(fmt.Sprintf("%02d", i)), outputs(fmt.Sprintf("%02d", i), 3)...)
		}
		age(t, db, d)
		broker := &broker{}
		var both sync.WaitGroup
		both.Go(func() {
			if _, err := newRelay(t, store, broker).Flush(t.Context()); err != nil {
				t.Error(err)
			}
		})
		both.Go(func() {
			for i := range 60 {
				claim := claimOf(fmt.Sprintf("%02d", 59-i))
				result, err := store.Process(t.Context(), claim, nil)
				if err == nil {
					for _, output := range result.Outputs {
						msg := message.NewMessage(output.UUID, output.Payload)
						msg.Metadata = output.Metadata
						err = errors.Join(err, broker.Publish(output.Topic, msg))
					}
					err = errors.Join(err, store.Forget(t.Context(), claim))
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
		both.Wait()
		require.Zero(t, left(t, db))
		require.Len(t, slices.Compact(slices.Sorted(slices.Values(broker.uuids()))), 180)
	})
}

// Run tells the observer about each pass, pauses longer while the broker is down,
// survives a publisher that panics, and ends with its context.
func TestRelayRuns(t *testing.T) {
	t.Parallel()
	db, store := open(t, testdb.SQLite)
	process(t, store, claimOf("a"), outputs("a", 1)...)
	age(t, db, testdb.SQLite)
	var mu sync.Mutex
	var passes []time.Time
	const failures = 6
	broker := &broker{accept: func(_ string, _ *message.Message, n int) error {
		mu.Lock()
		passes = append(passes, time.Now())
		mu.Unlock()
		if n == 1 {
			panic("lost")
		}
		if n <= failures {
			return errors.New("down")
		}
		return nil
	}}
	results := make(chan deduplicator.RelayResult)
	ctx, cancel := context.WithCancel(t.Context())
	relay := newRelay(t, store, broker, deduplicator.WithInterval(20*time.Millisecond),
		deduplicator.WithRelayObserver(func(ctx context.Context, result deduplicator.RelayResult) {
			select {
			case results <- result:
			case <-ctx.Done():
			}
		}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		relay.Run(ctx)
	}()
	require.ErrorContains(t, (<-results).Err, "publisher panicked: lost")
	for range failures - 1 {
		require.ErrorContains(t, (<-results).Err, "down")
	}
	result := <-results
	require.NoError(t, result.Err)
	require.Equal(t, 1, result.Claims)
	cancel()
	<-done
	// Pauses of about 40, 80, 160, 320, 640, 1,280 ms, each half to one and a half.
	require.Greater(t, passes[len(passes)-1].Sub(passes[0]), time.Second)
}
