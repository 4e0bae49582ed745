package bench_test

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/redisstore"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// BenchmarkDuplicates refuses messages that were processed before, one at a time.
//
//	by-hand      begin, insert on conflict do nothing, roll back
//	transaction  Deduplicate without known keys
//	redelivered  the same, for a message that says that it is redelivered
//	filter       the same behind a redisstore.Filter: any process has seen it
//	known        Deduplicate as it is by default: this process has seen it
//
// The figures are those of BenchmarkSingle.
func BenchmarkDuplicates(b *testing.B) {
	compare(b, "by-hand", func(b *testing.B, driver testdb.Driver) []variant {
		h := newHand(b, driver)
		database := h.newStore(b, deduplicator.WithKnownKeys(0))
		transaction, known := chained(b, database, "transaction"), chained(b, h.newStore(b), "known")
		redelivered := chained(b, database, "redelivered")
		client := redis.NewClient(&redis.Options{Addr: services.Value(b, services.Redis), ContextTimeoutEnabled: true})
		b.Cleanup(func() { require.NoError(b, client.Close()) })
		inRedis, err := redisstore.NewFilter(database, client, "bench "+watermill.NewUUID(), redisstore.WithTTL(time.Minute), redisstore.WithTimeout(time.Minute),
			redisstore.WithErrorHandler(func(err error) { b.Error(err) }))
		require.NoError(b, err)
		filter := chained(b, inRedis, "filter")
		return []variant{
			{name: "by-hand", prepare: h.byHand, handle: h.byHand},
			{name: "transaction", prepare: transaction, handle: transaction},
			{name: "redelivered", prepare: func(msg *message.Message) error {
				err := redelivered(msg)
				msg.Metadata.Set(amqpshard.RedeliveredMetadata, "true")
				return err
			}, handle: redelivered},
			{name: "filter", prepare: filter, handle: filter},
			{name: "known", prepare: known, handle: known},
		}
	})
}
