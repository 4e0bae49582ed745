// Package maintenance_test tests what works on the store's tables beside the
// handlers: the cleaner and the relay.
package maintenance_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	flag.Parse()
	parallel := flag.Lookup("test.parallel")
	if parallel.Value.String() == parallel.DefValue {
		_ = parallel.Value.Set("8") // the tests wait for databases, not for the CPU
	}
	// A Router whose Run fails leaves its own watcher behind.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/message.(*Router).watchAllHandlersStopped.func1"))
}

// patience bounds what a loaded machine may take.
const patience = 2 * time.Minute

// each runs test once per driver, each in parallel.
func each(t *testing.T, drivers []testdb.Driver, test func(t *testing.T, d testdb.Driver)) {
	t.Helper()
	for _, d := range drivers {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			test(t, d)
		})
	}
}

func open(t *testing.T, d testdb.Driver, opts ...deduplicator.Option) (*sql.DB, *deduplicator.SQLStore) {
	t.Helper()
	db := testdb.Open(t, d)
	require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect, opts...))
	return db, newStore(t, db, d, opts...)
}

func newStore(t *testing.T, db *sql.DB, d testdb.Driver, opts ...deduplicator.Option) *deduplicator.SQLStore {
	t.Helper()
	store, err := deduplicator.NewSQLStore(t.Context(), db, d.Dialect, opts...)
	require.NoError(t, err)
	return store
}

func exec(t *testing.T, db *sql.DB, query string) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), query)
	require.NoError(t, err, query)
}

func count(t *testing.T, db *sql.DB, query string) int {
	t.Helper()
	var n int
	require.NoError(t, db.QueryRowContext(t.Context(), query).Scan(&n), query)
	return n
}

// ago is a time column's value from before.
func ago(d testdb.Driver, age time.Duration) string {
	switch d.Dialect {
	case deduplicator.PostgreSQL:
		return fmt.Sprintf("clock_timestamp() - interval '%d microseconds'", age.Microseconds())
	case deduplicator.MySQL:
		return fmt.Sprintf("UTC_TIMESTAMP(6) - INTERVAL %d MICROSECOND", age.Microseconds())
	default:
		return fmt.Sprintf("strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '-%.3f seconds')", age.Seconds())
	}
}

// claimOf is a claim of consumer c, published now.
func claimOf(key string) deduplicator.Claim {
	return deduplicator.Claim{Consumer: "c", Key: key, Time: time.Now()}
}

// process runs a claim that must be new and whose work returns outputs.
func process(t *testing.T, store deduplicator.Store, claim deduplicator.Claim, outputs ...deduplicator.Output) {
	t.Helper()
	result, err := store.Process(t.Context(), claim, func(context.Context) ([]deduplicator.Output, error) { return outputs, nil })
	require.NoError(t, err)
	require.Equal(t, deduplicator.Processed, result.Outcome, claim.Key)
}

// spy is a connector that shows each statement without arguments or with them to
// before, which may refuse it.
type spy struct {
	driver driver.Driver
	dsn    string

	mu     sync.Mutex // guards before
	before func(query string) error
}

func spied(t *testing.T, database *testdb.Database) (*sql.DB, *spy) {
	t.Helper()
	s := &spy{driver: database.Open(t).Driver(), dsn: database.DSN}
	db := sql.OpenDB(s)
	db.SetMaxOpenConns(testdb.PoolSize)
	t.Cleanup(func() { _ = db.Close() })
	return db, s
}

func (s *spy) onExec(before func(query string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = before
}

func (s *spy) Driver() driver.Driver { return s.driver }

func (s *spy) Connect(context.Context) (driver.Conn, error) {
	conn, err := s.driver.Open(s.dsn)
	return &spyConn{conn, s}, err
}

type spyConn struct {
	driver.Conn
	spy *spy
}

func (c *spyConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

func (c *spyConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	return c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
}

func (c *spyConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.spy.mu.Lock()
	before := c.spy.before
	c.spy.mu.Unlock()
	if before != nil {
		if err := before(query); err != nil {
			return nil, err
		}
	}
	return c.Conn.(driver.ExecerContext).ExecContext(ctx, query, args)
}
