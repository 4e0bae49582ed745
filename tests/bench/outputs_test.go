package bench_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// BenchmarkOutputs handles messages with one output each, which is stored in the
// transaction and forgotten afterwards.
//
//	by-hand  insert on conflict do nothing, handler, insert into an outbox,
//	         commit; delete from the outbox
//	single   Process and Forget of the store, one message at a time
//	batched  the same; what comes to be forgotten while the database is busy is
//	         forgotten together, as Deduplicate does: here, a block at a time
//
// The figures are those of BenchmarkSingle.
func BenchmarkOutputs(b *testing.B) {
	compare(b, "by-hand", func(b *testing.B, driver testdb.Driver) []variant {
		h := newHand(b, driver)
		store := h.newStore(b)
		insert := driver.Dialect.Rebind(`INSERT INTO outbox (id, topic, payload) VALUES (?, ?, ?)`)
		remove := driver.Dialect.Rebind(`DELETE FROM outbox WHERE id = ?`)
		process := func(consumer string, msg *message.Message) (deduplicator.Claim, error) {
			claim := deduplicator.Claim{Consumer: consumer, Key: msg.UUID, Fingerprint: deduplicator.PayloadFingerprint(msg)}
			_, err := store.Process(msg.Context(), claim, func(ctx context.Context) ([]deduplicator.Output, error) {
				tx, _ := middleware.Tx(ctx)
				return []deduplicator.Output{{Topic: "reserved", UUID: msg.UUID, Payload: msg.Payload}}, take(ctx, tx)
			})
			return claim, err
		}
		var block []deduplicator.Claim
		return []variant{
			{name: "by-hand", handle: func(msg *message.Message) error {
				err := h.inTx(msg, h.claim, func(ctx context.Context, tx *sql.Tx) error {
					_, err := tx.ExecContext(ctx, insert, msg.UUID, "reserved", string(msg.Payload))
					return err
				})
				if err == nil {
					_, err = h.db.ExecContext(msg.Context(), remove, msg.UUID)
				}
				return err
			}},
			{name: "single", handle: func(msg *message.Message) error {
				claim, err := process("single", msg)
				if err == nil {
					err = store.Forget(msg.Context(), claim)
				}
				return err
			}},
			{name: "batched", handle: func(msg *message.Message) error {
				claim, err := process("batched", msg)
				block = append(block, claim)
				return err
			}, finish: func() error {
				err := store.Forget(b.Context(), block...)
				block = block[:0]
				return err
			}},
		}
	})
}
