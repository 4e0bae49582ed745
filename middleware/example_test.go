package middleware_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

// PostgreSQL and RabbitMQ; errors end the program.
func Example() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	logger := watermill.NewSlogLogger(nil)

	// Your database, and the tables of this module in it.
	db := must(sql.Open("pgx", os.Getenv("POSTGRES_DSN")))
	check(deduplicator.Migrate(ctx, db, deduplicator.PostgreSQL))
	check(ordering.Migrate(ctx, db, ordering.PostgreSQL))
	store := must(deduplicator.NewSQLStore(ctx, db, deduplicator.PostgreSQL))
	versions := must(ordering.NewVersions(ctx, db, ordering.PostgreSQL))

	// Your broker, with a consumer group: handlers that both need all messages of a
	// topic are two groups. For Kafka only this line changes:
	// kafkashard.Open(ctx, kafkashard.Config{Brokers: []string{"localhost:9092"}, Group: "shop"}, logger)
	broker := must(amqpshard.Open(ctx, amqpshard.Config{URL: os.Getenv("AMQP_URL"), Group: "shop"}, logger))
	check(broker.Declare(ctx, "orders", "orders.poison"))

	// The middlewares, outermost first. Another order is an error.
	chain := must(middleware.Chain(
		middleware.WithObserver(middleware.LogObserver(slog.Default())),
		middleware.WithPoisonQueue(broker.Publisher(), "orders.poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 5}),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromMetadata("event_id"))),
		middleware.RejectStale(versions, middleware.WithVersion(ordering.VersionFromMetadata("version"))),
	))

	// Your router and handlers. What a handler writes through the transaction
	// takes effect once per event, and no older state overwrites a newer one.
	router := must(message.NewRouter(message.RouterConfig{}, logger))
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("status", "orders", broker.Subscriber(), func(msg *message.Message) error {
		var order struct{ ID, Status string }
		if err := json.Unmarshal(msg.Payload, &order); err != nil {
			return middleware.Permanent(err) // to the poison queue at once
		}
		tx, _ := middleware.Tx(msg.Context()) // *sql.Tx: committed after the handler returns nil
		_, err := tx.ExecContext(msg.Context(), `INSERT INTO orders (id, status) VALUES ($1, $2)
			ON CONFLICT (id) DO UPDATE SET status = excluded.status`, order.ID, order.Status)
		return err
	})
	check(router.Run(ctx))
	check(broker.Close())
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
