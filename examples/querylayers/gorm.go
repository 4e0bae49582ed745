package querylayers

import (
	"github.com/ThreeDotsLabs/watermill/message"
	"gorm.io/gorm"

	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// Stock is a model of GORM.
type Stock struct {
	SKU string `gorm:"primaryKey;column:sku"`
	Qty int
}

// GORM returns a handler with GORM. g is what gorm.Open returned at start.
func GORM(g *gorm.DB) message.NoPublishHandlerFunc {
	return func(msg *message.Message) error {
		o, err := decode(msg)
		if err != nil {
			return err
		}
		tx, _ := idempotent.Tx(msg.Context())
		db := g.Session(&gorm.Session{NewDB: true, Context: msg.Context(), SkipDefaultTransaction: true})
		db.Statement.ConnPool = tx // Context gave db a Statement of its own

		return db.Model(&Stock{SKU: o.SKU}).Update("qty", gorm.Expr("qty - ?", o.Qty)).Error
	}
}
