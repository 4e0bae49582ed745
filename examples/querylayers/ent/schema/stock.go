// Package schema is what the ent client beside it is generated from.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/schema/field"
)

// Stock is how many pieces of a product are there.
type Stock struct{ ent.Schema }

// Fields of Stock.
func (Stock) Fields() []ent.Field {
	return []ent.Field{
		field.String("id").StorageKey("sku"),
		field.Int("qty"),
	}
}
