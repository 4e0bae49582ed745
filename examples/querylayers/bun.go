package querylayers

import (
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/sqlitedialect"

	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// Bun returns a handler with bun.
func Bun(pool *sql.DB) message.NoPublishHandlerFunc {
	db := bun.NewDB(pool, sqlitedialect.New())
	return func(msg *message.Message) error {
		o, err := decode(msg)
		if err != nil {
			return err
		}
		tx, _ := idempotent.Tx(msg.Context())
		_, err = db.NewUpdate().Conn(tx).Table("stocks").
			Set("qty = qty - ?", o.Qty).Where("sku = ?", o.SKU).Exec(msg.Context())
		return err
	}
}
