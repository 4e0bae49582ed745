// Package outbox is for handlers that publish themselves instead of returning
// messages. An [Outbox] is a Watermill publisher that stores messages with
// watermill-sql, in the transaction that is in their context: they are stored if
// and only if the transaction commits, with everything else that it does.
// Watermill's forwarder, see [Outbox.Forwarder], moves them to the broker.
//
//	box, err := outbox.New(deduplicator.PostgreSQL)
//	err = box.Migrate(ctx, db) // at start, never in a handler
//
//	// In a handler behind Deduplicate: the message has the handler's context.
//	err := box.Publish("reserved", message.NewMessageWithContext(msg.Context(), uuid, payload))
//
//	// Somewhere, in as many processes as you like.
//	forwarder, err := box.Forwarder(db, broker.Publisher(), logger)
//	err = forwarder.Run(ctx)
//
// A bus of Watermill's cqrs component gives its messages the context of Publish,
// so it can be built once, on an Outbox:
//
//	bus, err := cqrs.NewEventBusWithConfig(box, config)
//	err = bus.Publish(ctx, &OrderReserved{ID: id}) // in an event handler: ctx carries the transaction
//
// A program that is no consumer, such as an HTTP server, puts a transaction of
// its own into the context with [deduplicator.ContextWithTx].
//
// # What is guaranteed
//
// A stored message reaches the broker at least once, each time with the same
// UUID, payload and metadata: deduplicate it where it is consumed. Twice happens
// when the forwarder, or its connection to the database, dies after the broker
// has the message and before its row is deleted.
//
// Messages are forwarded one at a time, the oldest of those that are committed
// first. One that is committed late follows then: nothing is skipped, and no open
// transaction holds up the others. So the order of an entity is kept if its
// transactions do not overlap, as on one shard. Forwarded messages are deleted.
//
// A message that the broker refuses for good (no partition key, an exchange that
// nobody declared) holds up all that follow: put ordering.NewPublisher around the
// Outbox, so that a message without its key fails in the handler, and declare the
// topics.
package outbox
