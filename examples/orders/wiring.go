package main

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// topics are the names on the broker.
type topics struct {
	orders       string
	reservations string
	poison       string
}

// brokers are the connections of one router: a consumer group is a Broker.
type brokers struct {
	orders, stock, shipping ordering.Broker
}

// addProtected adds the shop's handlers to router so that their effects happen
// once and in order. This is all that a program of your own needs.
//
// inject is the demonstration's: it makes handlers fail.
func addProtected(ctx context.Context, router *message.Router, db *sql.DB, s shop, b brokers, t topics,
	observer idempotent.Observer, inject func(work) work,
) error {
	store, err := deduplicator.NewSQLStore(ctx, db, s.dialect)
	if err != nil {
		return err
	}
	versions, err := ordering.NewVersions(ctx, db, s.dialect)
	if err != nil {
		return err
	}

	links := []idempotent.Link{
		idempotent.WithObserver(observer),
		idempotent.WithPoisonQueue(b.orders.Publisher(), t.poison),
		idempotent.WithRetry(idempotent.Retry{MaxRetries: 5, InitialInterval: 10 * time.Millisecond}),
		idempotent.Deduplicate(store, idempotent.WithKey(deduplicator.FromMetadata(metaEventID))),
	}
	once, err := idempotent.Chain(links...)
	if err != nil {
		return err
	}
	// Only the handler that overwrites needs the newest event last: one that
	// subtracts must see each event, in whatever order.
	newestWins, err := idempotent.Chain(append(links,
		idempotent.RejectStale(versions, idempotent.WithVersion(ordering.VersionFromMetadata(metaVersion))))...)
	if err != nil {
		return err
	}

	inTx := func(w work) message.HandlerFunc { return inOurTx(inject(w)) }
	addHandlers(router, s, b, t, inTx, newestWins, once)
	return nil
}

// addUnprotected adds the same handlers as they are often written: each in a
// transaction of its own.
func addUnprotected(router *message.Router, db *sql.DB, s shop, b brokers, t topics, inject func(work) work) {
	inTx := func(w work) message.HandlerFunc { return inOwnTx(db, inject(w)) }
	plain := []message.HandlerMiddleware{middleware.Recoverer}
	addHandlers(router, s, b, t, inTx, plain, plain)
}

func addHandlers(router *message.Router, s shop, b brokers, t topics, inTx func(work) message.HandlerFunc,
	overwriting, counting []message.HandlerMiddleware,
) {
	router.AddConsumerHandler(ordersHandler, t.orders, b.orders.Subscriber(),
		consumer(inTx(s.keepOrder))).AddMiddleware(overwriting...)

	router.AddHandler(stockHandler, t.orders, b.stock.Subscriber(), t.reservations, b.stock.Publisher(),
		inTx(s.reserveStock)).AddMiddleware(counting...)

	router.AddConsumerHandler(shippingHandler, t.reservations, b.shipping.Subscriber(),
		consumer(inTx(s.countReservation))).AddMiddleware(counting...)
}

// inOurTx gives w the transaction in which the message's key is claimed.
func inOurTx(w work) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		tx, ok := idempotent.Tx(msg.Context())
		if !ok {
			return nil, errors.New("the handler runs outside of Deduplicate")
		}
		return w(tx, msg)
	}
}

// inOwnTx gives w a transaction that knows nothing of the message.
func inOwnTx(db *sql.DB, w work) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		tx, err := db.BeginTx(msg.Context(), nil)
		if err != nil {
			return nil, err
		}
		defer func() { _ = tx.Rollback() }() // after Commit it does nothing
		produced, err := w(tx, msg)
		if err != nil {
			return nil, err
		}
		return produced, tx.Commit()
	}
}

func consumer(h message.HandlerFunc) message.NoPublishHandlerFunc {
	return func(msg *message.Message) error {
		_, err := h(msg)
		return err
	}
}
