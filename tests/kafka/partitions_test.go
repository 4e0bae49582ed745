package kafka_test

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// Partitions are added while a producer publishes that does not mind, having no
// Config.Shards. A group that starts after ten messages and runs meanwhile gets
// everything, the first messages of the new partitions too (B67). Keys move, so an
// entity's events may overtake each other (B78): RejectStale keeps the newest state.
// RecordPartitioning and Config.Shards refuse the new count at the next start.
func TestPartitionsAreAddedB67B78(t *testing.T) {
	t.Parallel()
	brokers := strings.Split(services.Value(t, services.Kafka), ",")
	ctx := t.Context()
	const entities, before, after = 20, 4, 8
	cfg, topic := config(brokers), unique("topic")
	cfg.Shards = before
	adjust := cfg.Sarama
	cfg.Sarama = func(c *sarama.Config) {
		adjust(c)
		c.Metadata.RefreshFrequency = 500 * time.Millisecond // when clients notice: 10 minutes by default
	}
	db := testdb.Open(t, testdb.PGX)
	require.NoError(t, deduplicator.Migrate(ctx, db, testdb.PGX.Dialect))
	require.NoError(t, ordering.Migrate(ctx, db, testdb.PGX.Dialect))
	_, err := db.ExecContext(ctx, "CREATE TABLE states (entity text PRIMARY KEY, version bigint NOT NULL)")
	require.NoError(t, err)
	_, err = db.ExecContext(ctx, "CREATE TABLE effects (id bigserial PRIMARY KEY, entity text NOT NULL, version bigint NOT NULL)")
	require.NoError(t, err)

	consuming := open(t, cfg)
	require.NoError(t, consuming.Declare(ctx, topic))
	foreign := cfg
	foreign.Shards = 0
	publishing := open(t, foreign)
	require.NoError(t, ordering.RecordPartitioning(ctx, db, testdb.PGX.Dialect, topic, ordering.Murmur2Partitioner, before))
	version := 0
	publish := func() {
		t.Helper()
		version++
		messages := make([]*message.Message, entities)
		for i := range messages {
			messages[i] = newMessage("entity-"+strconv.Itoa(i), strconv.Itoa(version))
		}
		require.NoError(t, publishing.Publisher().Publish(topic, messages...))
	}
	for version < 10 {
		publish()
	}

	store, err := deduplicator.NewSQLStore(ctx, db, testdb.PGX.Dialect)
	require.NoError(t, err)
	versions, err := ordering.NewVersions(ctx, db, testdb.PGX.Dialect)
	require.NoError(t, err)
	var mu sync.Mutex
	ended := map[string]middleware.Outcome{} // by UUID
	partitions := map[string]bool{}
	chain, err := middleware.Chain(
		middleware.WithObserver(func(_ context.Context, e middleware.Event) {
			mu.Lock()
			defer mu.Unlock()
			ended[e.MessageUUID] = e.Outcome
		}),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())),
		middleware.RejectStale(versions, middleware.WithVersion(func(msg *message.Message) (int64, error) {
			return strconv.ParseInt(string(msg.Payload), 10, 64)
		})),
	)
	require.NoError(t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("states", topic, consuming.Subscriber(), func(msg *message.Message) error {
		mu.Lock()
		partitions[msg.Metadata.Get(kafkashard.PartitionMetadata)] = true
		mu.Unlock()
		tx, _ := middleware.Tx(msg.Context())
		entity := msg.Metadata.Get(ordering.PartitionKeyMetadata)
		if _, err := tx.ExecContext(msg.Context(), `INSERT INTO states (entity, version) VALUES ($1, $2)
			ON CONFLICT (entity) DO UPDATE SET version = excluded.version`, entity, string(msg.Payload)); err != nil {
			return err
		}
		_, err := tx.ExecContext(msg.Context(), "INSERT INTO effects (entity, version) VALUES ($1, $2)", entity, string(msg.Payload))
		return err
	})
	done := make(chan error, 1)
	go func() { done <- router.Run(context.WithoutCancel(ctx)) }()
	defer func() {
		require.NoError(t, router.Close())
		require.NoError(t, <-done)
	}()
	<-router.Running()
	handled := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(ended)
	}
	require.Eventually(t, func() bool { return handled() > 0 }, time.Minute, 10*time.Millisecond)

	admin, err := sarama.NewClusterAdmin(brokers, nil)
	require.NoError(t, err)
	defer admin.Close() //nolint:errcheck // it has done its work
	require.NoError(t, admin.CreatePartitions(topic, after, nil, false))
	// The producer goes on until new partitions have messages and a consumer.
	deadline := time.Now().Add(time.Minute)
	for moved := false; !moved; {
		require.True(t, time.Now().Before(deadline), "nothing came from a new partition: %v", partitions)
		publish()
		mu.Lock()
		for p := before; p < after; p++ {
			moved = moved || partitions[strconv.Itoa(p)]
		}
		mu.Unlock()
	}
	publish()
	require.Eventually(t, func() bool { return handled() >= entities*version }, time.Minute, 10*time.Millisecond, "lost")

	rows, err := db.QueryContext(ctx, "SELECT entity, version FROM effects ORDER BY id")
	require.NoError(t, err)
	defer rows.Close() //nolint:errcheck // Err tells
	highest := map[string]int{}
	for rows.Next() {
		var entity string
		var v int
		require.NoError(t, rows.Scan(&entity, &v))
		require.Greater(t, v, highest[entity], entity)
		highest[entity] = v
	}
	require.NoError(t, rows.Err())
	for i := range entities {
		var v int
		require.NoError(t, db.QueryRowContext(ctx, "SELECT version FROM states WHERE entity = $1", "entity-"+strconv.Itoa(i)).Scan(&v))
		require.Equal(t, version, v)
	}
	mu.Lock()
	stale := 0
	for _, outcome := range ended {
		require.Contains(t, []middleware.Outcome{middleware.Processed, middleware.Stale, middleware.Duplicate}, outcome)
		if outcome == middleware.Stale {
			stale++
		}
	}
	t.Logf("%d messages, %d overtaken, partitions %v", len(ended), stale, partitions)
	mu.Unlock()

	var changed *ordering.PartitioningError
	require.ErrorAs(t, ordering.RecordPartitioning(ctx, db, testdb.PGX.Dialect, topic, ordering.Murmur2Partitioner, after), &changed)
	require.Equal(t, before, changed.RecordedShards)
	var count *kafkashard.ShardCountError
	require.ErrorAs(t, open(t, cfg).Declare(ctx, topic), &count)
}
