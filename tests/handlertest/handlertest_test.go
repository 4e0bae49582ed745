// Package handlertest_test runs handlertest on good handlers, which it must
// accept, and on bad ones, which it must find, on every database.
package handlertest_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/middleware/handlertest"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue {
		_ = parallel.Value.Set("8") // the tests wait for databases and pauses, not for the CPU
	}
	goleak.VerifyTestMain(m)
}

// shop is what the handlers under test work on.
type shop struct {
	*sql.DB
	dialect deduplicator.Dialect
	pub     *handlertest.Publisher
	orders  atomic.Int64
}

func open(t *testing.T, d testdb.Driver) *shop {
	t.Helper()
	s := &shop{DB: testdb.Open(t, d), dialect: d.Dialect, pub: &handlertest.Publisher{}}
	for _, query := range []string{
		"CREATE TABLE stock (sku varchar(20) PRIMARY KEY, qty int NOT NULL)",
		"INSERT INTO stock VALUES ('sku-1', 1000000)",
		"CREATE TABLE reservations (id varchar(40) NOT NULL, qty int NOT NULL)",
	} {
		_, err := s.ExecContext(t.Context(), query)
		require.NoError(t, err)
	}
	return s
}

func (s *shop) newCase(handler message.HandlerFunc) handlertest.Case {
	return handlertest.Case{
		DB: s.DB, Dialect: s.dialect, Handler: handler, Publisher: s.pub,
		Message: func() *message.Message {
			return message.NewMessage(watermill.NewUUID(), fmt.Appendf(nil, "order-%d", s.orders.Add(1)))
		},
		Effects: func(ctx context.Context) (n int, err error) {
			return n, s.QueryRowContext(ctx, "SELECT COUNT(*) + 1000000 - (SELECT qty FROM stock) FROM reservations").Scan(&n)
		},
	}
}

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// take and reserve are the two writes of a handler.
func (s *shop) take(ctx context.Context, db execer) error {
	_, err := db.ExecContext(ctx, "UPDATE stock SET qty = qty - 2 WHERE sku = 'sku-1'")
	return err
}

func (s *shop) reserve(ctx context.Context, db execer, msg *message.Message) error {
	values := "(?, 2)"
	if s.dialect == deduplicator.PostgreSQL {
		values = "($1, 2)"
	}
	_, err := db.ExecContext(ctx, "INSERT INTO reservations VALUES "+values, string(msg.Payload))
	return err
}

func (s *shop) good(msg *message.Message) ([]*message.Message, error) {
	ctx := msg.Context()
	tx, ok := middleware.Tx(ctx)
	if !ok {
		return nil, errors.New("no transaction")
	}
	if err := errors.Join(s.take(ctx, tx), s.reserve(ctx, tx, msg)); err != nil {
		return nil, err
	}
	return []*message.Message{
		message.NewMessage(watermill.NewUUID(), msg.Payload),
		message.NewMessage(watermill.NewUUID(), msg.Payload),
	}, nil
}

func TestGoodHandlers(t *testing.T) {
	t.Parallel()
	for _, d := range []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL, testdb.SQLite} {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			t.Run("with outputs", func(t *testing.T) {
				t.Parallel()
				s := open(t, d)
				handlertest.Test(t, s.newCase(s.good))
			})
			t.Run("on one connection", func(t *testing.T) {
				t.Parallel()
				s := open(t, d)
				s.SetMaxOpenConns(1)
				handlertest.Test(t, s.newCase(s.good))
			})
			t.Run("without outputs, in a chain of its own", func(t *testing.T) {
				t.Parallel()
				s := open(t, d)
				c := s.newCase(nil)
				c.ConsumerHandler = func(msg *message.Message) error {
					_, err := s.good(msg)
					return err
				}
				c.Chain = func(store deduplicator.Store) ([]message.HandlerMiddleware, error) {
					return middleware.Chain(
						middleware.WithRetry(middleware.Retry{MaxRetries: 3, InitialInterval: 1}),
						middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())))
				}
				handlertest.Test(t, c)
			})
		})
	}
}

// B05 and its relatives: each handler passes a test that delivers one message.
// Effects is measured while the store forgets outputs, which locks a SQLite file that
// was opened without a busy timeout.
func TestEffectsOfALockedFile(t *testing.T) {
	t.Parallel()
	s := open(t, testdb.SQLite)
	c := s.newCase(s.good)
	effects, busy := c.Effects, false
	c.Effects = func(ctx context.Context) (int, error) {
		if busy {
			return effects(ctx)
		}
		busy = true
		return 0, lockedFile(t)
	}
	require.NoError(t, handlertest.Check(t.Context(), c))
}

// lockedFile returns the driver's error of a file that another connection has locked.
func lockedFile(t *testing.T) error {
	t.Helper()
	db, err := sql.Open(testdb.SQLite.Name, filepath.Join(t.TempDir(), "locked.db"))
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	_, err = db.ExecContext(t.Context(), "CREATE TABLE t (id int)")
	require.NoError(t, err)
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	_, err = conn.ExecContext(t.Context(), "BEGIN EXCLUSIVE")
	require.NoError(t, err)
	_, err = db.ExecContext(t.Context(), "SELECT * FROM t")
	require.ErrorContains(t, err, "locked")
	return err
}

func TestBadHandlers(t *testing.T) {
	t.Parallel()
	type bad struct {
		name    string
		handler func(s *shop) message.HandlerFunc
		chain   func(deduplicator.Store) ([]message.HandlerMiddleware, error)
		found   string
		on      func(deduplicator.Dialect) bool // nil: everywhere
	}
	notSQLite := func(d deduplicator.Dialect) bool { return d != deduplicator.SQLite }
	for _, b := range []bad{
		{
			name: "B05 writes through the pool",
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					return nil, errors.Join(s.take(msg.Context(), s), s.reserve(msg.Context(), s, msg))
				}
			},
			found: "writes outside of its transaction",
		},
		{
			name: "B05 writes one of two rows through the pool",
			on:   notSQLite, // which has one writer: it fails at once
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					tx, _ := middleware.Tx(msg.Context())
					return nil, errors.Join(s.take(msg.Context(), tx), s.reserve(msg.Context(), s, msg))
				}
			},
			found: "Effects has changed by 1: the handler writes outside of its transaction",
		},
		{
			name: "B24 ignores the error of a statement",
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					tx, _ := middleware.Tx(msg.Context())
					_ = s.take(msg.Context(), tx)
					return nil, s.reserve(msg.Context(), tx, msg)
				}
			},
			found: "statement 1 fails, UPDATE stock",
		},
		{
			name: "B24 provokes an error and ignores it",
			on:   func(d deduplicator.Dialect) bool { return d == deduplicator.PostgreSQL },
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					tx, _ := middleware.Tx(msg.Context())
					err := s.reserve(msg.Context(), tx, msg)
					_, _ = tx.ExecContext(msg.Context(), "INSERT INTO stock VALUES ('sku-1', 1)")
					return nil, err
				}
			},
			found: "does the handler ignore the error of a statement?",
		},
		{
			name: "commits itself",
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					tx, _ := middleware.Tx(msg.Context())
					return nil, errors.Join(s.reserve(msg.Context(), tx, msg), tx.Commit())
				}
			},
			found: "commits or rolls back its transaction itself",
		},
		{
			name: "publishes itself",
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					outputs, err := s.good(msg)
					if err != nil {
						return nil, err
					}
					return nil, s.pub.Publish("reserved", outputs...)
				}
			},
			found: "publishes 2 messages itself",
		},
		{
			name: "opens a transaction of its own",
			on:   notSQLite,
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					tx, err := s.BeginTx(msg.Context(), nil)
					if err != nil {
						return nil, err
					}
					defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
					return nil, errors.Join(s.take(msg.Context(), tx), tx.Commit())
				}
			},
			found: "writes outside of its transaction",
		},
		{
			name: "has no effect that Effects sees",
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) { return nil, nil }
			},
			found: "Effects returns the same as before",
		},
		{
			name:    "a chain without Deduplicate",
			handler: func(s *shop) message.HandlerFunc { return s.withoutTx },
			chain: func(deduplicator.Store) ([]message.HandlerMiddleware, error) {
				return middleware.Chain(middleware.WithRetry(middleware.Retry{MaxRetries: 1}))
			},
			found: "has run no statement in its transaction",
		},
		{
			name: "a chain that gives outputs new ids",
			handler: func(s *shop) message.HandlerFunc {
				return s.good
			},
			chain: func(store deduplicator.Store) ([]message.HandlerMiddleware, error) {
				chain, err := middleware.Chain(middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())))
				return append([]message.HandlerMiddleware{func(h message.HandlerFunc) message.HandlerFunc {
					return func(msg *message.Message) ([]*message.Message, error) {
						produced, err := h(msg)
						for _, output := range produced {
							output.UUID = watermill.NewUUID()
						}
						return produced, err
					}
				}}, chain...), err
			},
			found: "was not published",
		},
		{
			name: "has another effect each time",
			handler: func(s *shop) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					tx, _ := middleware.Tx(msg.Context())
					var err error
					for range s.orders.Load() {
						err = errors.Join(err, s.take(msg.Context(), tx))
					}
					return nil, err
				}
			},
			found: "the first one by",
		},
	} {
		for _, d := range testdb.Servers {
			if b.on != nil && !b.on(d.Dialect) {
				continue
			}
			t.Run(b.name+"/"+d.Name, func(t *testing.T) {
				t.Parallel()
				s := open(t, d)
				c := s.newCase(b.handler(s))
				c.Chain = b.chain
				err := handlertest.Check(t.Context(), c)
				require.ErrorContains(t, err, b.found)
			})
		}
	}
}

// withoutTx is a handler whose author never heard of the transaction.
func (s *shop) withoutTx(msg *message.Message) ([]*message.Message, error) {
	return nil, s.take(msg.Context(), s)
}

func TestIncompleteCase(t *testing.T) {
	t.Parallel()
	err := handlertest.Check(t.Context(), handlertest.Case{})
	for _, field := range []string{"DB", "Dialect", "Handler or ConsumerHandler", "Message", "Effects"} {
		require.ErrorContains(t, err, "Case."+field+" is not set")
	}
	require.NotContains(t, strings.ToLower(err.Error()), "panic")
}
