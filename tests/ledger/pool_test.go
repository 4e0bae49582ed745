package ledger_test

import (
	"context"
	"database/sql"
	"math"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/redisstore"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// B91: pools in which handlers would wait for each other are refused.
func TestPoolsAreRefusedB91(t *testing.T) {
	t.Parallel()
	for _, d := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, d)
			refused := func(text string, connections int, db *sql.DB, opts ...ledger.Option) {
				t.Helper()
				k.storeDB.SetMaxOpenConns(connections)
				_, err := ledger.New(t.Context(), k.store, db, d.Dialect, opts...)
				require.ErrorIs(t, err, ledger.ErrInvalidOption)
				require.ErrorContains(t, err, text)
			}
			refused("has 1 connection", 1, k.storeDB)
			refused("has 1 connection", 1, k.storeDB, ledger.WithSharedPool(1))
			refused("has 5 connections", 5, k.storeDB)
			refused("5 handlers need 6 connections or more, the pool has 5", 5, k.storeDB, ledger.WithSharedPool(5))
			refused("0 handlers", 5, k.storeDB, ledger.WithSharedPool(0))
			refused("a pool of its own", 5, k.db, ledger.WithSharedPool(4))
			for connections, opts := range map[int][]ledger.Option{0: nil, 5: {ledger.WithSharedPool(4)}} {
				k.storeDB.SetMaxOpenConns(connections)
				_, err := ledger.New(t.Context(), k.store, k.storeDB, d.Dialect, opts...)
				require.NoError(t, err)
			}
		})
	}
}

// B91: the store behind a filter is the one whose pool and file the handlers use. Redis
// is not asked here.
func TestStoreBehindAFilterB91(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", ContextTimeoutEnabled: true})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	refused := func(text string, d testdb.Driver) {
		t.Helper()
		k := newKit(t, d)
		store, err := deduplicator.NewSQLStore(t.Context(), k.storeDB, d.Dialect, deduplicator.WithRetention(time.Hour))
		require.NoError(t, err)
		filter, err := redisstore.NewFilter(store, client, "ns")
		require.NoError(t, err)
		_, err = ledger.New(t.Context(), filter, k.storeDB, d.Dialect)
		require.ErrorIs(t, err, ledger.ErrInvalidOption)
		require.ErrorContains(t, err, text)
		own, err := ledger.New(t.Context(), filter, k.db, d.Dialect)
		require.NoError(t, err)
		_, err = own.Clean(t.Context())
		require.NoError(t, err, "it has the store's retention")
	}
	refused("db is the store's pool, which has", testdb.PGX)
	refused("db is the store's pool, which has", testdb.SQLite)
}

// On SQLite the handler's transaction locks its file, so the ledger needs another.
func TestSQLiteFilesAreRefusedB91(t *testing.T) {
	t.Parallel()
	k := newKit(t, testdb.SQLite)
	refused := func(text string, db *sql.DB) {
		t.Helper()
		_, err := ledger.New(t.Context(), k.store, db, deduplicator.SQLite)
		require.ErrorIs(t, err, ledger.ErrInvalidOption)
		require.ErrorContains(t, err, text)
	}
	k.storeDB.SetMaxOpenConns(0)
	refused("is the SQLite file of the store", k.storeDB)
	refused("is the SQLite file of the store", k.databases[0].Open(t))
	link := filepath.Join(t.TempDir(), "link.db")
	require.NoError(t, os.Symlink(k.databases[0].Name, link))
	other := *k.databases[0]
	other.DSN = testdb.SQLiteDSN(link, time.Second)
	refused("is the SQLite file of the store", other.Open(t))
	other.DSN = "file::memory:"
	refused("in memory", other.Open(t))
}

// B91: as many handlers as there are connections, all of them in their transactions,
// do not wait for each other.
func TestAsManyHandlersAsConnectionsB91(t *testing.T) {
	t.Parallel()
	for _, d := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		for name, shared := range map[string]bool{"own pool": false, "shared pool": true} {
			t.Run(d.Name+" "+name, func(t *testing.T) {
				t.Parallel()
				k := newKit(t, d)
				l, handlers := k.ledger, testdb.PoolSize
				if shared {
					handlers--
					l = k.newLedger(k.storeDB, ledger.WithSharedPool(handlers))
				} else {
					k.db.SetMaxOpenConns(1)
				}
				effect := newEffect(t, "charge", ledger.AskOperator())
				var inside, wg sync.WaitGroup
				inside.Add(handlers)
				errs := make([]error, handlers)
				for i := range errs {
					wg.Go(func() {
						errs[i] = k.handle(string(rune('a'+i)), func(ctx context.Context) error {
							inside.Done()
							inside.Wait()
							_, err := ledger.Do(ctx, l, effect, nil, k.provider.charge)
							return err
						})
					})
				}
				wg.Wait()
				for _, err := range errs {
					require.NoError(t, err)
				}
			})
		}
	}
}

// Around a call there are two statements, and one more where somebody was there
// before.
func TestStatements(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		var statements atomic.Int64
		db := sql.OpenDB(sqlhook.Wrap(sqlhook.Borrow(k.db), func(_ context.Context, e sqlhook.Event) error {
			if e.Step != sqlhook.StatementDone {
				statements.Add(1)
			}
			return nil
		}))
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		k.ledger = k.newLedger(db)
		counted := func(message string, effect ledger.Effect) int64 {
			before := statements.Load()
			_, _ = k.charge(message, effect)
			return statements.Load() - before
		}
		effect := newEffect(t, "charge", ledger.CallAgain())
		require.EqualValues(t, 2, counted("m", effect), "first delivery")
		require.EqualValues(t, 2, counted("m", effect), "replay")
		k.provider.set(func() { k.provider.lose = true })
		require.EqualValues(t, 2, counted("n", effect), "lost response")
		require.EqualValues(t, 4, counted("n", effect), "called again")
	})
}

func TestNewRefusesOptions(t *testing.T) {
	t.Parallel()
	k := newKit(t, testdb.SQLite)
	for text, opts := range map[string][]ledger.Option{
		`WithTable: table name "a b"`:    {ledger.WithTable("a b")},
		"WithLease: 99ms is under":       {ledger.WithLease(99 * time.Millisecond)},
		"854775807s is over the most, ":  {ledger.WithRetention(math.MaxInt64)},
		"WithCodec: codec is nil":        {ledger.WithCodec(nil)},
		"WithMaxResult: 0 is not 1 to":   {ledger.WithMaxResult(0)},
		"WithMaxResult: 8388609 is not":  {ledger.WithMaxResult(ledger.MaxMaxResult + 1)},
		"the store has no retention":     {ledger.WithRetention(time.Hour)},
		"a pool of its own":              {ledger.WithSharedPool(1)},
		"WithSharedPool: -1 handlers is": {ledger.WithSharedPool(-1)},
	} {
		_, err := ledger.New(t.Context(), k.store, k.db, deduplicator.SQLite, opts...)
		require.ErrorIs(t, err, ledger.ErrInvalidOption)
		require.ErrorContains(t, err, text)
	}
	_, err := ledger.New(t.Context(), nil, nil, "oracle")
	for _, text := range []string{"store is nil", "db is nil", `dialect "oracle"`} {
		require.ErrorContains(t, err, text)
	}
	_, err = ledger.New(t.Context(), k.store, k.db, deduplicator.SQLite, ledger.WithTable("missing"))
	require.ErrorIs(t, err, ledger.ErrSchema)
	require.ErrorContains(t, err, "ledger.Migrate")
	require.ErrorIs(t, ledger.Migrate(t.Context(), nil, deduplicator.SQLite), ledger.ErrInvalidOption)
	_, err = ledger.Schema("oracle")
	require.ErrorIs(t, err, ledger.ErrInvalidOption)
}

// The table can have another name, in another schema, and be created by the
// statements that Schema returns.
func TestTableMayHaveAnotherName(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		name := "main.my_effects"
		if d.Dialect != deduplicator.SQLite {
			name = k.databases[1].Name + ".my_effects"
		}
		for range 2 {
			require.NoError(t, ledger.Migrate(t.Context(), k.db, d.Dialect, ledger.WithTable(name)))
		}
		k.ledger = k.newLedger(k.db, ledger.WithTable(name))
		for range 2 {
			_, err := k.charge("m", newEffect(t, "charge", ledger.AskOperator()))
			require.NoError(t, err)
		}
		calls, _, _ := k.provider.count()
		require.Equal(t, 1, calls)
		require.Empty(t, k.state("m"), "in the default table")
	})
}
