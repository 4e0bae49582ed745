package bench_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// BenchmarkDuplicates refuses messages that were processed before, one at a time.
//
//	by-hand      begin, insert on conflict do nothing, roll back
//	transaction  Deduplicate without known keys
//	redelivered  the same, for a message that says that it is redelivered
//	known        Deduplicate as it is by default: this process has seen it
//
// The figures are those of BenchmarkSingle.
func BenchmarkDuplicates(b *testing.B) {
	compare(b, "by-hand", func(b *testing.B, driver testdb.Driver) []variant {
		h := newHand(b, driver)
		database := h.newStore(b, deduplicator.WithKnownKeys(0))
		transaction, known := chained(b, database, "transaction"), chained(b, h.newStore(b), "known")
		redelivered := chained(b, database, "redelivered")
		return []variant{
			{name: "by-hand", prepare: h.byHand, handle: h.byHand},
			{name: "transaction", prepare: transaction, handle: transaction},
			{name: "redelivered", prepare: func(msg *message.Message) error {
				err := redelivered(msg)
				msg.Metadata.Set(amqpshard.RedeliveredMetadata, "true")
				return err
			}, handle: redelivered},
			{name: "known", prepare: known, handle: known},
		}
	})
}
