package handlertest_test

import (
	"context"
	"database/sql"
	"os"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/middleware/handlertest"
)

// reserve is the handler under test.
func reserve(msg *message.Message) error {
	tx, _ := idempotent.Tx(msg.Context())
	_, err := tx.ExecContext(msg.Context(), `INSERT INTO reservations (order_id) VALUES ($1)`, string(msg.Payload))
	return err
}

// In a file of your tests.
func ExampleTest() {
	_ = func(t *testing.T) { // TestReserve
		db, err := sql.Open("pgx", os.Getenv("POSTGRES_DSN"))
		if err != nil {
			t.Fatal(err)
		}
		handlertest.Test(t, handlertest.Case{
			DB:              db,
			Dialect:         deduplicator.PostgreSQL,
			ConsumerHandler: reserve,
			Message: func() *message.Message {
				id := watermill.NewUUID()
				return message.NewMessage(id, []byte(id))
			},
			Effects: func(ctx context.Context) (n int, err error) {
				return n, db.QueryRowContext(ctx, `SELECT COUNT(*) FROM reservations`).Scan(&n)
			},
		})
	}
	// Output:
}
