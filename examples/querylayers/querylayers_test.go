package querylayers_test

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/libtnb/sqlite"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	_ "modernc.org/sqlite"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/examples/querylayers"
	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// What each query layer wrote is committed with its message, and rolled back with
// it: the first delivery fails after the write, the second one counts, the third
// is a duplicate.
func TestLayersWriteInTheTransaction(t *testing.T) {
	t.Parallel()
	for name, handler := range map[string]func(t *testing.T, db *sql.DB) message.NoPublishHandlerFunc{
		"sqlc": func(*testing.T, *sql.DB) message.NoPublishHandlerFunc { return querylayers.SQLC },
		"sqlx": func(*testing.T, *sql.DB) message.NoPublishHandlerFunc { return querylayers.SQLX },
		"ent":  func(*testing.T, *sql.DB) message.NoPublishHandlerFunc { return querylayers.Ent },
		"bun":  func(_ *testing.T, db *sql.DB) message.NoPublishHandlerFunc { return querylayers.Bun(db) },
		"gorm": func(t *testing.T, db *sql.DB) message.NoPublishHandlerFunc {
			g, err := gorm.Open(sqlite.Dialector{Conn: db}, &gorm.Config{Logger: logger.Discard})
			if err != nil {
				t.Fatal(err)
			}
			return querylayers.GORM(g)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t)
			write := handler(t, db)
			deliveries := make(chan idempotent.Outcome, 10)
			failed := false
			broker := consume(t, db, deliveries, func(msg *message.Message) error {
				if err := write(msg); err != nil {
					t.Error(err)
					return err
				}
				if !failed {
					failed = true
					return errors.New("fails after its write")
				}
				return nil
			})
			msg := message.NewMessage("P-1", []byte(`{"SKU": "apple", "Qty": 3}`))
			for _, want := range []struct {
				outcome idempotent.Outcome
				qty     int
			}{{idempotent.Failed, 10}, {idempotent.Processed, 7}, {idempotent.Duplicate, 7}} {
				if want.outcome != idempotent.Processed { // the broker returns what has failed
					if err := broker.Publish("orders", msg.Copy()); err != nil {
						t.Fatal(err)
					}
				}
				if got := <-deliveries; got != want.outcome {
					t.Fatalf("outcome %s, want %s", got, want.outcome)
				}
				if want.outcome == idempotent.Failed {
					continue // the next delivery may have begun
				}
				var qty int
				if err := db.QueryRowContext(t.Context(), `SELECT qty FROM stocks WHERE sku = 'apple'`).Scan(&qty); err != nil {
					t.Fatal(err)
				}
				if qty != want.qty {
					t.Errorf("%d pieces after %s, want %d", qty, want.outcome, want.qty)
				}
			}
		})
	}
}

func open(t *testing.T) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "shop.db")+"?_pragma=busy_timeout(1000)&_pragma=journal_mode(WAL)")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	for _, query := range []string{
		`CREATE TABLE stocks (sku TEXT NOT NULL PRIMARY KEY, qty INTEGER NOT NULL)`,
		`INSERT INTO stocks (sku, qty) VALUES ('apple', 10)`,
	} {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	if err := deduplicator.Migrate(t.Context(), db, deduplicator.SQLite); err != nil {
		t.Fatal(err)
	}
	return db
}

func consume(t *testing.T, db *sql.DB, deliveries chan<- idempotent.Outcome, handler message.NoPublishHandlerFunc) *gochannel.GoChannel {
	t.Helper()
	store, err := deduplicator.NewSQLStore(t.Context(), db, deduplicator.SQLite)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := idempotent.Chain(
		idempotent.WithObserver(func(_ context.Context, event idempotent.Event) { deliveries <- event.Outcome }),
		idempotent.Deduplicate(store, idempotent.WithKey(deduplicator.FromUUID())),
	)
	if err != nil {
		t.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router.AddMiddleware(chain...)
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	router.AddConsumerHandler("stock", "orders", broker, handler)
	ctx, done := context.WithoutCancel(t.Context()), make(chan error, 1)
	go func() { done <- router.Run(ctx) }()
	<-router.Running()
	t.Cleanup(func() {
		if err := errors.Join(router.Close(), <-done); err != nil {
			t.Error(err)
		}
	})
	return broker
}

// README.md shows what the compiler sees.
func TestReadmeShowsTheCode(t *testing.T) {
	t.Parallel()
	readme := read(t, "README.md")
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var code strings.Builder
	for _, file := range files {
		code.WriteString(read(t, file))
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(readme, -1)
	if len(blocks) < 5 {
		t.Fatalf("README.md has %d Go blocks", len(blocks))
	}
	for _, block := range blocks {
		if !strings.Contains(squeeze(code.String()), squeeze(block[1])) {
			t.Errorf("not in the code:\n%s", block[1])
		}
	}
}

func squeeze(code string) string { return strings.Join(strings.Fields(code), " ") }

func read(t *testing.T, file string) string {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
