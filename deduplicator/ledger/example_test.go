package ledger_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// provider stands for the client of a payment provider.
type provider struct{}

var errDown = errors.New("connection refused")

func (provider) Charge(context.Context, int, string) (string, error) { return "ch_1", nil }

// A handler charges a card, at a provider that remembers idempotency keys for a day.
func ExampleDo() {
	setUp := func(ctx context.Context, db, ledgerDB *sql.DB) (func(msg *message.Message) error, error) {
		store, err := deduplicator.NewSQLStore(ctx, db, deduplicator.PostgreSQL)
		if err != nil {
			return nil, err
		}
		effects, err := ledger.New(ctx, store, ledgerDB, deduplicator.PostgreSQL) // a pool of its own
		if err != nil {
			return nil, err
		}
		charge, err := ledger.NewEffect("charge", ledger.RetryWithKey(24*time.Hour))
		if err != nil {
			return nil, err
		}
		return func(msg *message.Message) error { // inside middleware.Deduplicate
			const amount = 4200
			receipt, err := ledger.Do(msg.Context(), effects, charge, amount, func(ctx context.Context, key string) (string, error) {
				receipt, err := provider{}.Charge(ctx, amount, key)
				if errors.Is(err, errDown) {
					err = ledger.NotDone(err) // it was certainly not charged
				}
				return receipt, err
			})
			if err != nil {
				return err
			}
			tx, _ := middleware.Tx(msg.Context())
			_, err = tx.ExecContext(msg.Context(), `UPDATE orders SET receipt = $1 WHERE id = $2`, receipt, msg.UUID)
			return err
		}, nil
	}
	_ = setUp
}

// The key of an effect is the same at every attempt.
func ExampleKeyFor() {
	ctx := deduplicator.ContextWithClaim(context.Background(), deduplicator.Claim{Consumer: "billing", Key: "order-1"}) // as Deduplicate does
	for range 2 {
		key, err := ledger.KeyFor(ctx, "charge")
		fmt.Println(key, err)
	}
	// Output:
	// f9d66ba3-af6f-8a63-af72-cfc4d3cd0cbd <nil>
	// f9d66ba3-af6f-8a63-af72-cfc4d3cd0cbd <nil>
}
