// Package querylayers shows how query layers work in the transaction that a
// message's key is claimed in: code that sqlc generates, sqlx, GORM, ent and bun.
// Each is a handler that takes pieces of a product from stock.
//
// It is a module of its own, so that these libraries are nobody else's.
package querylayers

import (
	"encoding/json"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// order is the payload of the messages.
type order struct {
	SKU string
	Qty int
}

func decode(msg *message.Message) (order, error) {
	var o order
	if err := json.Unmarshal(msg.Payload, &o); err != nil {
		return o, idempotent.Permanent(fmt.Errorf("order: %w", err))
	}
	return o, nil
}
