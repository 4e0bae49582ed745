package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// Metadata of the shop's events. The event id is made when the event is born and
// goes with it from then on: a producer that sends again sends the same id.
const (
	metaEventID = "event_id"
	metaOrderID = "order_id"
	metaVersion = "version"
)

// The three handlers; each is a consumer group.
const (
	ordersHandler   = "orders"   // keeps the newest state of each order
	stockHandler    = "stock"    // takes goods from the stock and says so
	shippingHandler = "shipping" // counts what was reserved
)

const statusPlaced = "placed"

// line is one position of an order.
type line struct {
	SKU string `json:"sku"`
	Qty int    `json:"qty"`
}

// orderEvent says that an order is now in this state.
type orderEvent struct {
	Order   string `json:"order"`
	Version int64  `json:"version"`
	Status  string `json:"status"`
	Lines   []line `json:"lines"` // in the order of SKUs, so that two orders don't lock each other out
}

// reservation says that an order's goods have been taken from the stock.
type reservation struct {
	Order string `json:"order"`
	Lines []line `json:"lines"`
}

// work is what a handler does. It writes in tx, which is not its to commit, and
// returns the messages to publish. The shop's code is the same with and without
// protection: what differs is who opens tx.
type work func(tx *sql.Tx, msg *message.Message) ([]*message.Message, error)

type shop struct {
	dialect deduplicator.Dialect
}

// keepOrder overwrites the order's state: the newest event must come last.
func (s shop) keepOrder(tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
	var e orderEvent
	if err := json.Unmarshal(msg.Payload, &e); err != nil {
		return nil, fmt.Errorf("order event: %w", err)
	}
	upsert := `INSERT INTO orders (id, version, status) VALUES (?, ?, ?)
		ON CONFLICT (id) DO UPDATE SET version = excluded.version, status = excluded.status`
	if s.dialect == deduplicator.MySQL {
		upsert = `INSERT INTO orders (id, version, status) VALUES (?, ?, ?)
			ON DUPLICATE KEY UPDATE version = VALUES(version), status = VALUES(status)`
	}
	if err := s.exec(msg.Context(), tx, upsert, e.Order, e.Version, e.Status); err != nil {
		return nil, err
	}
	return nil, s.record(tx, msg, ordersHandler, e.Order, e.Version)
}

// reserveStock takes the goods of a new order from the stock: done twice, they
// are gone twice.
func (s shop) reserveStock(tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
	var e orderEvent
	if err := json.Unmarshal(msg.Payload, &e); err != nil {
		return nil, fmt.Errorf("order event: %w", err)
	}
	if e.Status != statusPlaced {
		return nil, nil
	}
	for _, l := range e.Lines {
		if err := s.exec(msg.Context(), tx, `UPDATE stock SET qty = qty - ? WHERE sku = ?`, l.Qty, l.SKU); err != nil {
			return nil, err
		}
	}
	if err := s.record(tx, msg, stockHandler, e.Order, e.Version); err != nil {
		return nil, err
	}
	payload, err := json.Marshal(reservation{Order: e.Order, Lines: e.Lines})
	if err != nil {
		return nil, err
	}
	reserved := message.NewMessage(watermill.NewUUID(), payload)
	reserved.Metadata.Set(metaEventID, watermill.NewUUID())
	reserved.Metadata.Set(metaOrderID, e.Order)
	return []*message.Message{reserved}, nil
}

// countReservation adds up what has been reserved of each product.
func (s shop) countReservation(tx *sql.Tx, msg *message.Message) ([]*message.Message, error) {
	var r reservation
	if err := json.Unmarshal(msg.Payload, &r); err != nil {
		return nil, fmt.Errorf("reservation: %w", err)
	}
	for _, l := range r.Lines {
		if err := s.exec(msg.Context(), tx, `UPDATE shipping SET reserved = reserved + ? WHERE sku = ?`, l.Qty, l.SKU); err != nil {
			return nil, err
		}
	}
	return nil, s.record(tx, msg, shippingHandler, r.Order, 1)
}

// record adds to the audit, to which rows are only ever added: it shows what
// happened in which order, where the other tables show only the sum of it.
func (s shop) record(tx *sql.Tx, msg *message.Message, handler, order string, version int64) error {
	return s.exec(msg.Context(), tx, `INSERT INTO audit (handler, order_id, version, event_id) VALUES (?, ?, ?, ?)`,
		handler, order, version, msg.Metadata.Get(metaEventID))
}

func (s shop) exec(ctx context.Context, tx *sql.Tx, query string, args ...any) error {
	_, err := tx.ExecContext(ctx, s.dialect.Rebind(query), args...)
	return err
}

// createTables creates the shop's tables and fills its shelves.
func (s shop) createTables(ctx context.Context, db *sql.DB, stock map[string]int) error {
	serial := map[deduplicator.Dialect]string{
		deduplicator.PostgreSQL: "bigserial PRIMARY KEY",
		deduplicator.MySQL:      "bigint AUTO_INCREMENT PRIMARY KEY",
		deduplicator.SQLite:     "integer PRIMARY KEY AUTOINCREMENT",
	}[s.dialect]
	for _, statement := range []string{
		`CREATE TABLE orders (id varchar(64) PRIMARY KEY, version bigint NOT NULL, status varchar(32) NOT NULL)`,
		`CREATE TABLE stock (sku varchar(64) PRIMARY KEY, qty bigint NOT NULL)`,
		`CREATE TABLE shipping (sku varchar(64) PRIMARY KEY, reserved bigint NOT NULL)`,
		`CREATE TABLE audit (id ` + serial + `, handler varchar(16) NOT NULL, order_id varchar(64) NOT NULL,
			version bigint NOT NULL, event_id varchar(64) NOT NULL)`,
	} {
		if _, err := db.ExecContext(ctx, statement); err != nil {
			return fmt.Errorf("%s: %w", strings.Join(strings.Fields(statement)[:3], " "), err)
		}
	}
	for sku, qty := range stock {
		if _, err := db.ExecContext(ctx, s.dialect.Rebind(`INSERT INTO stock (sku, qty) VALUES (?, ?)`), sku, qty); err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, s.dialect.Rebind(`INSERT INTO shipping (sku, reserved) VALUES (?, 0)`), sku); err != nil {
			return err
		}
	}
	return nil
}
