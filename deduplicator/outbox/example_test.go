package outbox_test

import (
	"context"
	"database/sql"
	"log"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/outbox"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

func Example() {
	var (
		ctx    context.Context
		db     *sql.DB
		broker ordering.Broker
	)
	box, err := outbox.New(deduplicator.PostgreSQL)
	if err != nil {
		log.Fatal(err)
	}
	if err := box.Migrate(ctx, db); err != nil {
		log.Fatal(err)
	}

	// The handler, behind Deduplicate. Its messages get their partition key where
	// a mistake still undoes the transaction.
	pub := ordering.NewPublisher(box, ordering.KeyFromMetadata("order_id"))
	_ = func(msg *message.Message) error {
		out := message.NewMessageWithContext(msg.Context(), watermill.NewUUID(), msg.Payload)
		out.Metadata.Set("order_id", msg.Metadata.Get("order_id"))
		return pub.Publish("reserved", out)
	}

	// What moves them to the broker after the commit.
	forwarder, err := box.Forwarder(db, broker.Publisher(), watermill.NewSlogLogger(nil))
	if err != nil {
		log.Fatal(err)
	}
	if err := forwarder.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
