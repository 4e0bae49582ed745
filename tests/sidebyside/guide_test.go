package sidebyside_test

import (
	"context"
	"database/sql"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// The code of the guides. TestGuidesShowThisCode compares it.

func deduplicatorBefore(router *message.Router, subscriber message.Subscriber, db *sql.DB) {
	router.AddMiddleware((&watermillmw.Deduplicator{
		KeyFactory: watermillmw.NewMessageHasherFromMetadataField("event_id"),
		Timeout:    time.Second,
	}).Middleware)
	router.AddConsumerHandler("stock", "orders", subscriber, func(msg *message.Message) error {
		_, err := db.ExecContext(msg.Context(), `UPDATE stock SET qty = qty - 1 WHERE sku = $1`, string(msg.Payload))
		return err
	})
}

func deduplicatorAfter(ctx context.Context, router *message.Router, subscriber message.Subscriber, publisher message.Publisher, db *sql.DB) error {
	if err := deduplicator.Migrate(ctx, db, deduplicator.PostgreSQL); err != nil {
		return err
	}
	store, err := deduplicator.NewSQLStore(ctx, db, deduplicator.PostgreSQL)
	if err != nil {
		return err
	}
	chain, err := middleware.Chain(
		middleware.WithPoisonQueue(publisher, "orders.poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 5}),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromMetadata("event_id"))),
	)
	if err != nil {
		return err
	}
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("stock", "orders", subscriber, func(msg *message.Message) error {
		tx, _ := middleware.Tx(msg.Context())
		_, err := tx.ExecContext(msg.Context(), `UPDATE stock SET qty = qty - 1 WHERE sku = $1`, string(msg.Payload))
		return err
	})
	return nil
}

func watermillSQLBefore(router *message.Router, subscriber message.Subscriber) {
	router.AddConsumerHandler("stock", "orders", subscriber, func(msg *message.Message) error {
		tx, _ := wsql.TxFromContext(msg.Context())
		_, err := tx.ExecContext(msg.Context(), `UPDATE stock SET qty = qty - 1 WHERE sku = $1`, msg.Metadata.Get("sku"))
		return err
	})
}

func watermillSQLAfter(ctx context.Context, router *message.Router, poison message.Publisher, db *sql.DB, logger watermill.LoggerAdapter) error {
	ackDeadline := 5 * time.Minute
	subscriber, err := wsql.NewSubscriber(db, wsql.SubscriberConfig{
		AckDeadline:      &ackDeadline,
		SchemaAdapter:    wsql.DefaultPostgreSQLSchema{SubscribeBatchSize: 10},
		OffsetsAdapter:   wsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true,
	}, logger)
	if err != nil {
		return err
	}
	if err := deduplicator.Migrate(ctx, db, deduplicator.PostgreSQL); err != nil {
		return err
	}
	store, err := deduplicator.NewSQLStore(ctx, db, deduplicator.PostgreSQL)
	if err != nil {
		return err
	}
	chain, err := middleware.Chain(
		middleware.WithPoisonQueue(poison, "orders_poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 5}),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())),
	)
	if err != nil {
		return err
	}
	router.AddMiddleware(chain...)
	router.AddConsumerHandler("stock", "orders", subscriber, func(msg *message.Message) error {
		tx, _ := middleware.Tx(msg.Context())
		_, err := tx.ExecContext(msg.Context(), `UPDATE stock SET qty = qty - 1 WHERE sku = $1`, msg.Metadata.Get("sku"))
		return err
	})
	return nil
}

// What the guides show works, before and after.
func TestGuidesRun(t *testing.T) {
	t.Parallel()
	// Each sends one order twice, and a poison queue where there is one.
	inProcess := func(f *fixture, configure func(*message.Router, *gochannel.GoChannel) error) {
		broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
		side{fixture: f}.run(func(router *message.Router) { require.NoError(f, configure(router, broker)) })
		for range 2 {
			require.NoError(f, broker.Publish("orders", event("1", "A")))
		}
	}
	overSQL := func(f *fixture, configure func(*message.Router, transport) error) {
		tr := f.transport(noDeadline)
		order := event("1", "{}")
		order.Metadata.Set("sku", "A")
		require.NoError(f, tr.pub.Publish("orders", order, order))
		side{fixture: f}.run(func(router *message.Router) { require.NoError(f, configure(router, tr)) })
		f.eventually("acknowledged", func() bool {
			return f.count("SELECT COALESCE(MAX(offset_acked), 0) FROM watermill_offsets_orders") == 2
		})
	}
	for name, guide := range map[string]struct {
		run  func(f *fixture)
		want int // of 10
	}{
		"deduplicator before": {func(f *fixture) {
			inProcess(f, func(router *message.Router, broker *gochannel.GoChannel) error {
				deduplicatorBefore(router, broker, f.db)
				return nil
			})
		}, 9},
		"deduplicator after": {func(f *fixture) {
			inProcess(f, func(router *message.Router, broker *gochannel.GoChannel) error {
				return deduplicatorAfter(f.Context(), router, broker, broker, f.db)
			})
		}, 9},
		"watermill-sql before": {func(f *fixture) {
			overSQL(f, func(router *message.Router, tr transport) error {
				watermillSQLBefore(router, tr.sub)
				return nil
			})
		}, 8}, // nothing tells copies that the producer sent
		"watermill-sql after": {func(f *fixture) {
			overSQL(f, func(router *message.Router, tr transport) error {
				return watermillSQLAfter(f.Context(), router, tr.pub, f.db, watermill.NopLogger{})
			})
		}, 9},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, testdb.PGX)
			f.exec("CREATE TABLE stock (sku text PRIMARY KEY, qty integer NOT NULL)")
			f.exec("INSERT INTO stock VALUES ('A', 10)")
			guide.run(f)
			require.Equal(t, guide.want, f.count("SELECT qty FROM stock"))
		})
	}
}

var (
	goBlock  = regexp.MustCompile("(?s)```go\n(.*?)```")
	testName = regexp.MustCompile("`(Test[A-Za-z0-9_]+)`")
)

// The guides show the code above and name tests of this package.
func TestGuidesShowThisCode(t *testing.T) {
	t.Parallel()
	guides, err := filepath.Glob("../../docs/migrate-*.md")
	require.NoError(t, err)
	require.Len(t, guides, 2)
	source, tests := code(t)
	for _, guide := range guides {
		content, err := os.ReadFile(guide)
		require.NoError(t, err)
		blocks := goBlock.FindAllStringSubmatch(string(content), -1)
		require.GreaterOrEqual(t, len(blocks), 2, "%s: before and after", guide)
		for _, block := range blocks {
			require.Contains(t, source, trim(block[1]), "%s shows other code than guide_test.go", guide)
		}
		names := testName.FindAllStringSubmatch(string(content), -1)
		require.NotEmpty(t, names)
		for _, name := range names {
			require.True(t, tests[name[1]], "%s names %s, which does not exist", guide, name[1])
		}
	}
}

// code returns this file and the names of the package's tests.
func code(t *testing.T) (source string, tests map[string]bool) {
	t.Helper()
	tests = map[string]bool{}
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, decl := range parsed.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok {
				tests[f.Name.Name] = true
			}
		}
	}
	content, err := os.ReadFile("guide_test.go")
	require.NoError(t, err)
	return trim(string(content)), tests
}

// trim returns the lines of code without indentation and empty ones.
func trim(code string) string {
	var out strings.Builder
	for line := range strings.Lines(code) {
		if line = strings.TrimSpace(line); line != "" {
			out.WriteString(line + "\n")
		}
	}
	return out.String()
}
