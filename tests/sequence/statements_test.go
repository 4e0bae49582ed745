package sequence_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// counter is SQLite's driver with a count of the statements that are run.
type counter struct {
	sqlite     driver.Driver
	dsn        string
	statements *atomic.Int64
}

func (c counter) Driver() driver.Driver { return c.sqlite }

func (c counter) Connect(context.Context) (driver.Conn, error) {
	conn, err := c.sqlite.Open(c.dsn)
	return countingConn{conn, c.statements}, err
}

// countingConn has no Exec or Query of its own, so that all goes through Prepare.
type countingConn struct {
	driver.Conn
	statements *atomic.Int64
}

func (c countingConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return c.Conn.(driver.ConnBeginTx).BeginTx(ctx, opts)
}

func (c countingConn) Prepare(query string) (driver.Stmt, error) {
	stmt, err := c.Conn.Prepare(query)
	return countingStmt{stmt, c.statements}, err
}

type countingStmt struct {
	driver.Stmt
	statements *atomic.Int64
}

func (s countingStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.statements.Add(1)
	return s.Stmt.(driver.StmtExecContext).ExecContext(ctx, args)
}

func (s countingStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.statements.Add(1)
	return s.Stmt.(driver.StmtQueryContext).QueryContext(ctx, args)
}

// What the comment on sequenceQueries says.
func TestStatements(t *testing.T) {
	t.Parallel()
	database := testdb.Create(t, testdb.SQLite)
	plain := database.Open(t)
	require.NoError(t, ordering.Migrate(t.Context(), plain, ordering.SQLite))
	var statements atomic.Int64
	db := sql.OpenDB(counter{plain.Driver(), database.DSN, &statements})
	defer db.Close()
	sequence, err := ordering.NewSequence(t.Context(), db, ordering.SQLite)
	require.NoError(t, err)
	cost := func(seq int64) int64 {
		t.Helper()
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		statements.Store(0)
		_, err = sequence.ProcessTx(t.Context(), tx, ordering.SequencedDelivery{
			Event:   ordering.SequencedEvent{Consumer: consumer, Entity: "e", Position: ordering.Position{Seq: seq}},
			Message: message.NewMessage("uuid", nil),
			Handle:  func(*message.Message) error { return nil },
		})
		require.NoError(t, err)
		n := statements.Load()
		require.NoError(t, tx.Commit())
		return n
	}
	require.EqualValues(t, 3, cost(1), "first")
	require.EqualValues(t, 1, cost(2), "in order")
	require.EqualValues(t, 2, cost(1), "stale")
	require.EqualValues(t, 7, cost(4), "parked")
	require.EqualValues(t, 9, cost(5), "parked behind others")
	require.EqualValues(t, 9, cost(6), "parked behind others")
	require.EqualValues(t, 6+2*3, cost(3), "three released")
}
