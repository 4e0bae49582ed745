// Package sqlshard_test runs sqlshard on the servers that TEST_POSTGRES_DSN and
// TEST_MARIADB_DSN name.
package sqlshard_test

import (
	"context"
	"database/sql"
	"strconv"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/sqlshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience = 30 * time.Second // for what must happen
	shards   = 4
	topic    = "orders"
)

// kit is an empty database with the tables of sqlshard.
type kit struct {
	*testing.T
	driver testdb.Driver
	server *testdb.Database
	db     *sql.DB // for the test itself
}

func onEach(t *testing.T, test func(k *kit)) {
	t.Helper()
	for _, driver := range []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL} {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			k := &kit{T: t, driver: driver, server: testdb.Create(t, driver)}
			k.db = k.server.Open(t)
			require.NoError(t, sqlshard.Migrate(t.Context(), k.db, driver.Dialect))
			test(k)
		})
	}
}

// pool is one that suffices for two topics.
func (k *kit) pool() *sql.DB {
	db := k.server.Open(k.T)
	db.SetMaxOpenConns(2*shards + 2)
	return db
}

func (k *kit) config(group string) sqlshard.Config {
	return sqlshard.Config{
		DB: k.pool(), Dialect: k.driver.Dialect, Group: group, Shards: shards, PollInterval: 20 * time.Millisecond,
	}
}

func (k *kit) open(cfg sqlshard.Config) *sqlshard.Broker {
	k.Helper()
	broker, err := sqlshard.Open(k.Context(), cfg, nil)
	require.NoError(k, err)
	k.Cleanup(func() { require.NoError(k, broker.Close()) })
	return broker
}

func (k *kit) subscribe(broker *sqlshard.Broker) <-chan *message.Message {
	k.Helper()
	messages, err := broker.Subscriber().Subscribe(k.Context(), topic)
	require.NoError(k, err)
	return messages
}

func (k *kit) count(query string, args ...any) int {
	k.Helper()
	var n int
	require.NoError(k, k.db.QueryRowContext(k.Context(), k.driver.Dialect.Rebind(query), args...).Scan(&n))
	return n
}

func (k *kit) exec(query string, args ...any) {
	k.Helper()
	_, err := k.db.ExecContext(k.Context(), k.driver.Dialect.Rebind(query), args...)
	require.NoError(k, err)
}

// handle runs handler behind Deduplicate in a Router on broker, with a store on db,
// until the function that it returns is called.
func (k *kit) handle(broker *sqlshard.Broker, db *sql.DB, handler message.NoPublishHandlerFunc, links ...middleware.Link) func() {
	k.Helper()
	ctx := k.Context()
	require.NoError(k, deduplicator.Migrate(ctx, db, k.driver.Dialect))
	store, err := deduplicator.NewSQLStore(ctx, db, k.driver.Dialect)
	require.NoError(k, err)
	chain, err := middleware.Chain(append(links, middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())))...)
	require.NoError(k, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(k, err)
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("handler", topic, broker.Subscriber(), handler)
	done := make(chan error, 1)
	go func() { done <- router.Run(context.WithoutCancel(ctx)) }()
	select {
	case <-router.Running():
	case err := <-done:
		require.FailNow(k, "router did not start", "%v", err)
	}
	return func() {
		require.NoError(k, router.Close())
		require.NoError(k, <-done)
	}
}

// effects has a table of what handlers have done.
func (k *kit) effects() (record func(msg *message.Message) error, done func() []string) {
	id := "bigserial"
	if k.driver.Dialect == ordering.MySQL {
		id = "bigint AUTO_INCREMENT"
	}
	k.exec("CREATE TABLE effects (id " + id + " PRIMARY KEY, payload varchar(100) NOT NULL)")
	insert := k.driver.Dialect.Rebind("INSERT INTO effects (payload) VALUES (?)")
	record = func(msg *message.Message) error {
		tx, _ := middleware.Tx(msg.Context())
		_, err := tx.ExecContext(msg.Context(), insert, string(msg.Payload))
		return err
	}
	done = func() []string {
		rows, err := k.db.QueryContext(k.Context(), "SELECT payload FROM effects ORDER BY id")
		require.NoError(k, err)
		defer rows.Close()
		var payloads []string
		for rows.Next() {
			var payload string
			require.NoError(k, rows.Scan(&payload))
			payloads = append(payloads, payload)
		}
		require.NoError(k, rows.Err())
		return payloads
	}
	return record, done
}

// eventually waits until condition holds.
func (k *kit) eventually(condition func() bool, what string) {
	k.Helper()
	require.Eventually(k, condition, patience, 20*time.Millisecond, what)
}

func (k *kit) receive(messages <-chan *message.Message) *message.Message {
	k.Helper()
	return receive(k.T, messages)
}

func receive[T any](t *testing.T, from <-chan T) T {
	t.Helper()
	select {
	case v, open := <-from:
		require.True(t, open, "channel was closed")
		return v
	case <-time.After(patience):
		require.FailNow(t, "nothing came")
		panic("not reached")
	}
}

// take receives and acks n messages and returns their payloads.
func (k *kit) take(messages <-chan *message.Message, n int) []string {
	k.Helper()
	payloads := make([]string, n)
	for i := range payloads {
		msg := k.receive(messages)
		payloads[i] = string(msg.Payload)
		msg.Ack()
	}
	return payloads
}

func newMessage(key, payload string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	msg.Metadata.Set(ordering.PartitionKeyMetadata, key)
	return msg
}

// series returns messages of one key with the payloads from … to.
func series(key string, from, to int) []*message.Message {
	var messages []*message.Message
	for i := from; i <= to; i++ {
		messages = append(messages, newMessage(key, strconv.Itoa(i)))
	}
	return messages
}

// keys returns one key for each shard.
func keys() []string {
	found := make([]string, shards)
	for i, missing := 0, shards; missing > 0; i++ {
		key := strconv.Itoa(i)
		if shard := ordering.Shard(key, shards); found[shard] == "" {
			found[shard] = key
			missing--
		}
	}
	return found
}
