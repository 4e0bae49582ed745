package store_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

var errReset = errors.New("connection reset")

// lossy is a connector whose next commit is done by fault, whose answer is lost
// with the connection. What fault returns runs after the connection is given up.
type lossy struct {
	driver driver.Driver
	dsn    string
	fault  atomic.Pointer[func(tx driver.Tx) (later func())]
}

func (l *lossy) Driver() driver.Driver { return l.driver }

func (l *lossy) Connect(context.Context) (driver.Conn, error) {
	conn, err := l.driver.Open(l.dsn)
	return &lossyConn{Conn: conn, lossy: l}, err
}

type lossyConn struct {
	driver.Conn
	lossy *lossy
	lost  bool
	later func()
}

func (c *lossyConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	tx, err := c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
	return &lossyTx{tx, c}, err
}

func (c *lossyConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	return c.Conn.(driver.ConnPrepareContext).PrepareContext(ctx, query)
}

func (c *lossyConn) IsValid() bool { return !c.lost }

func (c *lossyConn) Close() error {
	if c.later == nil {
		return c.Conn.Close()
	}
	go func() {
		c.later()
		_ = c.Conn.Close()
	}()
	return nil
}

type lossyTx struct {
	driver.Tx
	conn *lossyConn
}

func (t *lossyTx) Commit() error {
	fault := t.conn.lossy.fault.Swap(nil)
	if fault == nil {
		return t.Tx.Commit()
	}
	t.conn.lost = true
	t.conn.later = (*fault)(t.Tx)
	return errReset
}

// B93: the answer to a commit is lost. What became of it is found out, also when
// the server is still at it.
func TestLostCommitB93(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.MySQL, testdb.SQLite, testdb.SQLite3}, func(t *testing.T, d testdb.Driver) {
		database := testdb.Create(t, d)
		plain := database.Open(t)
		connector := &lossy{driver: plain.Driver(), dsn: database.DSN}
		db := sql.OpenDB(connector)
		t.Cleanup(func() { _ = db.Close() })
		migrate(t, plain, d)
		store := newStore(t, db, d)
		process := func(key string, fault func(driver.Tx) func()) (deduplicator.Result, error) {
			connector.fault.Store(&fault)
			return store.Process(t.Context(), claimOf(key), func(context.Context) ([]deduplicator.Output, error) {
				return []deduplicator.Output{{Topic: "t", UUID: key}}, nil
			})
		}

		result, err := process("done", func(tx driver.Tx) func() {
			_ = tx.Commit()
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, deduplicator.Duplicate, result.Outcome)
		require.Equal(t, "done", result.Outputs[0].UUID)

		finished := make(chan struct{})
		result, err = process("late", func(tx driver.Tx) func() {
			return func() {
				defer close(finished)
				time.Sleep(100 * time.Millisecond) // the server takes its time
				_ = tx.Commit()
			}
		})
		<-finished
		require.NoError(t, err)
		require.Equal(t, deduplicator.Duplicate, result.Outcome)
		require.Equal(t, "late", result.Outputs[0].UUID)

		_, err = process("undone", func(tx driver.Tx) func() {
			_ = tx.Rollback()
			return nil
		})
		require.ErrorIs(t, err, deduplicator.ErrNotCommitted)
		require.ErrorIs(t, err, errReset)
		result, err = store.Process(t.Context(), claimOf("undone"), func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
		require.NoError(t, err)
		require.Equal(t, deduplicator.Processed, result.Outcome)
		require.Zero(t, db.Stats().InUse)
	})
}

// A context that ends with the commit under way does not hide its outcome.
func TestLostCommitOfAnEndedContext(t *testing.T) {
	t.Parallel()
	database := testdb.Create(t, testdb.PGX)
	plain := database.Open(t)
	connector := &lossy{driver: plain.Driver(), dsn: database.DSN}
	db := sql.OpenDB(connector)
	t.Cleanup(func() { _ = db.Close() })
	migrate(t, plain, testdb.PGX)
	store := newStore(t, db, testdb.PGX)
	ctx, cancel := context.WithCancel(t.Context())
	fault := func(tx driver.Tx) func() {
		_ = tx.Commit()
		cancel()
		return nil
	}
	connector.fault.Store(&fault)
	result, err := store.Process(ctx, claimOf("k"), func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
	require.NoError(t, err)
	require.Equal(t, deduplicator.Duplicate, result.Outcome)
}
