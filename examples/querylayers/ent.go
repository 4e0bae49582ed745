package querylayers

import (
	"context"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/examples/querylayers/ent"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// Ent is a handler with ent.
func Ent(msg *message.Message) error {
	o, err := decode(msg)
	if err != nil {
		return err
	}
	tx, _ := idempotent.Tx(msg.Context())
	driver := entsql.NewDriver(dialect.SQLite, entsql.Conn{ExecQuerier: tx})
	client := ent.NewClient(ent.Driver(entTx{driver}))

	return client.Stock.UpdateOneID(o.SKU).AddQty(-o.Qty).Exec(msg.Context())
}

// entTx is a driver in a transaction that is not its to end. Where ent wants one
// for several statements, it is in it already.
type entTx struct{ *entsql.Driver }

func (d entTx) Tx(context.Context) (dialect.Tx, error) { return dialect.NopTx(d), nil }
func (d entTx) Close() error                           { return nil }
