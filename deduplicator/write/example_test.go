package write_test

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/write"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// A handler of each kind. The tables are
//
//	CREATE TABLE orders (id text PRIMARY KEY, status text NOT NULL)
//	CREATE TABLE stock  (sku text PRIMARY KEY, qty bigint NOT NULL, version bigint NOT NULL)
//	CREATE TABLE labels (order_id text, label text, PRIMARY KEY (order_id, label))
func Example() {
	orders, err := write.NewTable(deduplicator.PostgreSQL, "orders", "id")
	if err != nil {
		panic(err)
	}
	stock, err := write.NewTable(deduplicator.PostgreSQL, "stock", "sku")
	if err != nil {
		panic(err)
	}
	labels, err := write.NewTable(deduplicator.PostgreSQL, "labels", "order_id", "label")
	if err != nil {
		panic(err)
	}
	type event struct {
		ID, SKU, Label string
		Qty, Version   int64
	}

	// An order is paid once. What is to happen then happens once.
	_ = func(msg *message.Message) error {
		var e event
		if err := json.Unmarshal(msg.Payload, &e); err != nil {
			return middleware.Permanent(err)
		}
		ctx := msg.Context()
		tx, _ := middleware.Tx(ctx)
		switch result, err := orders.Transition(ctx, tx, write.Row{"id": e.ID}, "status", "placed", "paid"); {
		case err != nil:
			return err
		case result == write.OtherState:
			return fmt.Errorf("order %s is not placed", e.ID) // yet: tried again
		case result == write.AlreadyThere:
			return nil
		}
		_, err := labels.Insert(ctx, tx, write.Row{"order_id": e.ID, "label": "paid"})
		return err
	}

	// The newest count wins. An older one is acknowledged as stale.
	_ = func(ctx context.Context, e event) error {
		tx, _ := middleware.Tx(ctx)
		return ordering.RequireApplied(stock.UpsertNewer(ctx, tx,
			write.Row{"sku": e.SKU, "qty": e.Qty, "version": e.Version}, "version"))
	}

	// The last state that was said.
	_ = func(ctx context.Context, e event) error {
		tx, _ := middleware.Tx(ctx)
		return orders.Upsert(ctx, tx, write.Row{"id": e.ID, "status": "cancelled"})
	}
	// Output:
}
