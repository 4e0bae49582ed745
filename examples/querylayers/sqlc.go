package querylayers

import (
	"context"
	"database/sql"

	"github.com/ThreeDotsLabs/watermill/message"

	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// SQLC is a handler with code that sqlc generates.
func SQLC(msg *message.Message) error {
	o, err := decode(msg)
	if err != nil {
		return err
	}
	tx, _ := idempotent.Tx(msg.Context())
	return New(tx).TakeStock(msg.Context(), TakeStockParams{Qty: int64(o.Qty), SKU: o.SKU})
}

// What follows is what sqlc generates for
//
//	-- name: TakeStock :exec
//	UPDATE stocks SET qty = qty - ? WHERE sku = ?;

// DBTX is *sql.DB or *sql.Tx.
type DBTX interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	PrepareContext(context.Context, string) (*sql.Stmt, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

// Queries has the queries.
type Queries struct{ db DBTX }

// New returns queries on db.
func New(db DBTX) *Queries { return &Queries{db: db} }

const takeStock = `UPDATE stocks SET qty = qty - ? WHERE sku = ?`

// TakeStockParams are the arguments of TakeStock.
type TakeStockParams struct {
	Qty int64
	SKU string
}

// TakeStock takes pieces of a product.
func (q *Queries) TakeStock(ctx context.Context, arg TakeStockParams) error {
	_, err := q.db.ExecContext(ctx, takeStock, arg.Qty, arg.SKU)
	return err
}
