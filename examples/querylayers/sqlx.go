package querylayers

import (
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jmoiron/sqlx"
	"github.com/jmoiron/sqlx/reflectx"

	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

var mapper = reflectx.NewMapperFunc("db", strings.ToLower) // sqlx's default

// SQLX is a handler with sqlx.
func SQLX(msg *message.Message) error {
	o, err := decode(msg)
	if err != nil {
		return err
	}
	tx, _ := idempotent.Tx(msg.Context())
	x := &sqlx.Tx{Tx: tx, Mapper: mapper} // without a mapper it panics

	var stock struct {
		SKU string
		Qty int
	}
	if err := x.GetContext(msg.Context(), &stock, `SELECT sku, qty FROM stocks WHERE sku = ?`, o.SKU); err != nil {
		return err
	}
	stock.Qty -= o.Qty
	_, err = x.NamedExecContext(msg.Context(), `UPDATE stocks SET qty = :qty WHERE sku = :sku`, stock)
	return err
}
