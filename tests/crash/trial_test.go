package crash_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// trial is one run: a database, topics, what was published, and in the end the
// comparison of both.
type trial struct {
	settings
	t        *testing.T
	db       *sql.DB // not the workers'
	producer ordering.Broker
	audit    ordering.Broker
	events   []string
	stale    []string // events that must take no effect
	version  int
}

type brokerKind func(t *testing.T, s *settings)

// kafka is Kafka in this process, reached through TCP.
func kafka(t *testing.T, s *settings) {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	s.Kafka = cluster.ListenAddrs()
}

// apacheKafka is a server.
func apacheKafka(t *testing.T, s *settings) {
	s.Kafka = strings.Split(services.Value(t, services.Kafka), ",")
}

func rabbitMQ(t *testing.T, s *settings) { s.AMQP = services.Value(t, services.AMQP) }

func newTrial(t *testing.T, dialect deduplicator.Dialect, dsn string, db *sql.DB, broker brokerKind) *trial {
	t.Helper()
	ctx := t.Context()
	tr := &trial{t: t, db: db, settings: settings{Dialect: dialect, DSN: dsn, Run: watermill.NewShortUUID(), Relay: true}}
	require.NoError(t, errors.Join(deduplicator.Migrate(ctx, db, dialect), ordering.Migrate(ctx, db, dialect)))
	_, err := db.ExecContext(ctx, "CREATE TABLE effects (handler varchar(20) NOT NULL, event varchar(64) NOT NULL, detail text NOT NULL)")
	require.NoError(t, err)
	broker(t, &tr.settings)
	open := func(group string) ordering.Broker {
		b, err := tr.open(ctx, group)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, b.Close()) })
		return b
	}
	tr.producer, tr.audit = open("producer"), open("audit")
	require.NoError(t, tr.audit.Declare(ctx, tr.reserved(), tr.poison()))
	for _, group := range []struct{ name, topic string }{{stock, tr.orders()}, {ledger, tr.reserved()}} {
		b, err := tr.open(ctx, group.name)
		require.NoError(t, err)
		require.NoError(t, errors.Join(b.Declare(ctx, group.topic), b.Close()))
	}
	return tr
}

// onDatabase is a trial on one of the running servers.
func onDatabase(t *testing.T, driver testdb.Driver, broker brokerKind) *trial {
	t.Helper()
	database := testdb.Create(t, driver)
	dsn := database.DSN
	if driver.Dialect == deduplicator.SQLite {
		dsn = testdb.SQLiteDSN(database.Name, time.Second)
	}
	return newTrial(t, driver.Dialect, dsn, database.Open(t), broker)
}

func (tr *trial) newEvent(name, entity string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte("order "+name))
	msg.Metadata.Set("event_id", name)
	msg.Metadata.Set(ordering.PartitionKeyMetadata, entity)
	msg.Metadata.Set("outputs", "2")
	tr.version++
	msg.Metadata.Set("version", strconv.Itoa(tr.version))
	return msg
}

func (tr *trial) publish(messages ...*message.Message) {
	tr.t.Helper()
	require.NoError(tr.t, tr.producer.Publisher().Publish(tr.orders(), messages...))
	for _, msg := range messages {
		if event := msg.Metadata.Get("event_id"); !slices.Contains(tr.events, event) {
			tr.events = append(tr.events, event)
		}
	}
}

// publishNext publishes n new events, every third one twice. The copy is of the
// same shard, or of another one and so is handled at the same time. An old version
// comes last.
func (tr *trial) publishNext(n int) {
	tr.t.Helper()
	var messages []*message.Message
	for i := range n {
		name := fmt.Sprintf("event-%d", len(tr.events)+i)
		entity := fmt.Sprintf("entity-%d", i%7)
		messages = append(messages, tr.newEvent(name, entity))
		if i%3 == 0 {
			messages = append(messages, tr.newEvent(name, fmt.Sprintf("entity-%d", i%2*i)))
		}
	}
	tr.publish(messages...)
	old := tr.newEvent(fmt.Sprintf("stale-%d", len(tr.stale)), "entity-0")
	old.Metadata.Set("version", "0")
	require.NoError(tr.t, tr.producer.Publisher().Publish(tr.orders(), old))
	tr.stale = append(tr.stale, old.Metadata.Get("event_id"))
}

// sentinels returns one entity for each shard.
func sentinels() []string {
	entities := make([]string, shards)
	for i, found := 0, 0; found < shards; i++ {
		entity := fmt.Sprintf("sentinel-%d", i)
		if shard := ordering.Shard(entity, shards); entities[shard] == "" {
			entities[shard] = entity
			found++
		}
	}
	return entities
}

// finish ends the traffic with one event in each shard, which comes last there,
// waits until these have gone through both handlers, and returns everything that
// is not as it must be.
func (tr *trial) finish() []string {
	tr.t.Helper()
	last := make([]*message.Message, shards)
	for i, entity := range sentinels() {
		last[i] = tr.newEvent(entity, entity)
	}
	tr.publish(last...)
	tr.eventually("the last messages in the ledger", func(ctx context.Context) (bool, error) {
		var n int
		err := tr.db.QueryRowContext(ctx, "SELECT COUNT(*) FROM effects WHERE handler = 'ledger' AND detail LIKE 'sentinel-%'").Scan(&n)
		return n >= 2*shards, err
	})
	return tr.compare()
}

func (tr *trial) requireExactlyOnce() {
	tr.t.Helper()
	if faults := tr.finish(); len(faults) > 0 {
		require.FailNow(tr.t, fmt.Sprintf("%d faults", len(faults)), "%s", strings.Join(faults[:min(len(faults), 20)], "\n"))
	}
	// Those whose message was acknowledged just before a kill are the relay's.
	tr.eventually("no stored outputs", func(ctx context.Context) (bool, error) {
		var n int
		err := tr.db.QueryRowContext(ctx, "SELECT COUNT(*) FROM "+deduplicator.DefaultProducedTable).Scan(&n)
		return n == 0, err
	})
}

type effect struct{ event, detail string }

// compare checks effects, claims and outputs against what was published.
func (tr *trial) compare() (faults []string) {
	tr.t.Helper()
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	effects := tr.effects()

	reserved := map[string][]string{} // by event, the UUIDs that its handler returned
	for _, e := range effects[stock] {
		if reserved[e.event] != nil {
			fault("event %s took effect twice", e.event)
			continue
		}
		reserved[e.event] = strings.Fields(e.detail)
	}
	for _, event := range tr.stale {
		if reserved[event] != nil {
			fault("stale event %s took effect", event)
		}
	}
	for _, event := range tr.events {
		if reserved[event] == nil {
			fault("event %s is missing: it took no effect", event)
		}
	}
	if len(reserved) > len(tr.events) {
		fault("%d events took effect, %d were published", len(reserved), len(tr.events))
	}

	booked := map[string]string{} // by UUID, the event
	for _, e := range effects[ledger] {
		if booked[e.event] != "" {
			fault("output %s of event %s is booked twice", e.event, e.detail)
		}
		booked[e.event] = e.detail
	}
	emitted := tr.emitted()
	outputs := 0
	for event, uuids := range reserved {
		outputs += len(uuids)
		for _, uuid := range uuids {
			if emitted[uuid] == "" {
				fault("output %s of event %s was never emitted", uuid, event)
			}
			if booked[uuid] != event {
				fault("output %s of event %s is missing in the ledger", uuid, event)
			}
		}
	}
	for uuid, event := range emitted {
		if !slices.Contains(reserved[event], uuid) {
			fault("message %s of event %s was emitted, which its handler did not return in the attempt that took effect", uuid, event)
		}
	}
	if len(booked) > outputs {
		fault("%d messages are booked, %d were returned", len(booked), outputs)
	}
	for handler, want := range map[string]int{stock: len(tr.events) + len(tr.stale), ledger: outputs} {
		if got := tr.claims(handler); got != want {
			fault("%s has %d claims, want %d", handler, got, want)
		}
	}
	slices.SortFunc(faults, func(a, b string) int { return cmp.Compare(len(a), len(b)) })
	return faults
}

func (tr *trial) effects() map[string][]effect {
	tr.t.Helper()
	rows, err := tr.db.QueryContext(tr.t.Context(), "SELECT handler, event, detail FROM effects")
	require.NoError(tr.t, err)
	effects := map[string][]effect{}
	for rows.Next() {
		var handler string
		var e effect
		require.NoError(tr.t, rows.Scan(&handler, &e.event, &e.detail))
		effects[handler] = append(effects[handler], e)
	}
	require.NoError(tr.t, errors.Join(rows.Err(), rows.Close()))
	return effects
}

func (tr *trial) claims(handler string) int {
	tr.t.Helper()
	return tr.count("SELECT COUNT(*) FROM " + deduplicator.DefaultProcessedTable + " WHERE consumer_name = '" + handler + "'")
}

func (tr *trial) count(query string) int {
	tr.t.Helper()
	var n int
	require.NoError(tr.t, tr.db.QueryRowContext(tr.t.Context(), query).Scan(&n))
	return n
}

// emitted reads the topic of the outputs up to the last ones, and returns the
// event of each UUID.
func (tr *trial) emitted() map[string]string {
	tr.t.Helper()
	ctx, cancel := context.WithTimeout(tr.t.Context(), patience)
	defer cancel()
	messages, err := tr.audit.Subscriber().Subscribe(ctx, tr.reserved())
	require.NoError(tr.t, err)
	emitted := map[string]string{}
	for last := 0; last < 2*shards; {
		select {
		case msg, ok := <-messages:
			require.True(tr.t, ok, "the audit's subscription ended")
			event := msg.Metadata.Get("event_id")
			if emitted[msg.UUID] == "" && strings.HasPrefix(event, "sentinel-") {
				last++
			}
			emitted[msg.UUID] = event
			msg.Ack()
		case <-ctx.Done():
			require.FailNow(tr.t, "the outputs of the last messages were not emitted")
		}
	}
	cancel()
	for range messages { //nolint:revive // until it is closed
	}
	return emitted
}

// eventually waits until condition holds. Errors are a database that is not there.
func (tr *trial) eventually(what string, condition func(ctx context.Context) (bool, error)) {
	tr.t.Helper()
	ctx, cancel := context.WithTimeout(tr.t.Context(), patience)
	defer cancel()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		ok, err := condition(ctx)
		if ok && err == nil {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			require.FailNow(tr.t, "not there: "+what, "error %v", err)
		}
	}
}
