// Package sqlhook lets tests stop, fail and cut what database/sql asks of a
// driver. It works with any driver and is for test support only.
package sqlhook

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"
)

// Step is a moment in the life of a transaction.
type Step string

// The steps. A statement is anything that is executed or queried.
const (
	Begin         Step = "begin"          // before it is sent
	Statement     Step = "statement"      // before it is sent
	StatementDone Step = "statement done" // answered without an error
	Commit        Step = "commit"         // before it is sent
	CommitDone    Step = "commit done"    // answered, see Event.Err
)

// Event tells a hook what happens.
type Event struct {
	Step  Step
	Query string      // of a statement
	InTx  bool        // it is one of a transaction
	Err   error       // of a commit that is done
	Conn  driver.Conn // the driver's own
}

// Hook is called at each step by the goroutine that takes it. ctx is that of the
// statement; for a commit, of its BeginTx. It must be safe for concurrent use.
//
// An error before a step takes its place: nothing is sent. An error after a step
// takes the place of its answer. With an error that matches [ErrCut], the
// connection is lost as well, and the database rolls back what was open on it.
type Hook func(ctx context.Context, e Event) error

// ErrCut is the error of a connection that was cut, as a program sees it.
var ErrCut error = &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}

// Wrap returns connector with hook in all its connections.
func Wrap(connector driver.Connector, hook Hook) driver.Connector {
	return &wrapped{connector, hook}
}

type wrapped struct {
	driver.Connector
	hook Hook
}

func (w *wrapped) Connect(ctx context.Context) (driver.Conn, error) {
	inner, err := w.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: inner, hook: w.hook}, nil
}

// Borrow returns a connector whose connections are those of db, each borrowed
// until it is closed. A connection that was cut is closed in db as well.
func Borrow(db *sql.DB) driver.Connector { return borrower{db} }

type borrower struct{ db *sql.DB }

func (b borrower) Driver() driver.Driver { return b.db.Driver() }

func (b borrower) Connect(ctx context.Context) (driver.Conn, error) {
	pooled, err := b.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	inner, end, done := make(chan driver.Conn, 1), make(chan error, 1), make(chan error, 1)
	go func() { // ends with borrowed.Close; a driver's connection is valid inside Raw only
		err := pooled.Raw(func(dc any) error {
			c, ok := dc.(driver.Conn)
			if !ok {
				return fmt.Errorf("sqlhook: the driver's connection is a %T", dc)
			}
			inner <- c
			return <-end
		})
		if errors.Is(err, driver.ErrBadConn) {
			err = nil // as it was asked to
		} else {
			err = errors.Join(err, pooled.Close())
		}
		done <- err
	}()
	select {
	case c := <-inner:
		return &borrowed{Conn: c, end: end, done: done}, nil
	case err := <-done:
		return nil, err
	}
}

type borrowed struct {
	driver.Conn
	cut  bool
	end  chan<- error
	done <-chan error
}

func (b *borrowed) Close() error {
	var verdict error
	if b.cut {
		verdict = driver.ErrBadConn
	}
	b.end <- verdict
	return <-b.done
}

// conn is used from one goroutine at a time, except for IsValid of a pool.
type conn struct {
	driver.Conn
	hook Hook
	cut  atomic.Bool
	inTx bool

	// skipped is a statement that the driver wants to be prepared first
	// (driver.ErrSkip), as go-sql-driver/mysql does: its hook was called already.
	skipped string
}

func (c *conn) check() error {
	if c.cut.Load() {
		return ErrCut
	}
	return nil
}

// call asks the hook.
func (c *conn) call(ctx context.Context, e Event) error {
	if err := c.check(); err != nil {
		return err
	}
	e.Conn, e.InTx = c.inner(), c.inTx
	err := c.hook(ctx, e)
	if errors.Is(err, ErrCut) {
		c.cut.Store(true)
	}
	return err
}

func (c *conn) IsValid() bool {
	if v, ok := c.inner().(driver.Validator); ok && !v.IsValid() {
		return false
	}
	return !c.cut.Load()
}

// inner is the driver's own connection, whose optional methods count.
func (c *conn) inner() driver.Conn {
	if b, ok := c.Conn.(*borrowed); ok {
		return b.Conn
	}
	return c.Conn
}

func (c *conn) Close() error {
	if b, ok := c.Conn.(*borrowed); ok {
		b.cut = c.cut.Load()
	}
	return c.Conn.Close()
}

func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if err := c.call(ctx, Event{Step: Begin}); err != nil {
		return nil, err
	}
	beginner, ok := c.inner().(driver.ConnBeginTx)
	if !ok {
		return nil, errors.New("sqlhook: the driver has no BeginTx")
	}
	inner, err := beginner.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	c.inTx = true
	return &tx{inner, c, ctx}, nil
}

type tx struct {
	driver.Tx
	conn *conn
	ctx  context.Context //nolint:containedctx // Commit has none of its own
}

func (t *tx) Commit() error {
	if err := t.conn.call(t.ctx, Event{Step: Commit}); err != nil {
		return err
	}
	t.conn.inTx = false
	err := t.Tx.Commit()
	return errors.Join(err, t.conn.call(t.ctx, Event{Step: CommitDone, Err: err}))
}

func (t *tx) Rollback() error {
	t.conn.inTx = false
	if t.conn.check() != nil {
		return driver.ErrBadConn // closes the connection
	}
	return t.Tx.Rollback()
}

// statement runs do between the hook's two calls.
func statement[T any](ctx context.Context, c *conn, query string, do func() (T, error)) (result T, err error) {
	if c.skipped != query || query == "" {
		if err := c.call(ctx, Event{Step: Statement, Query: query}); err != nil {
			return result, err
		}
	}
	c.skipped = ""
	if result, err = do(); err != nil {
		if errors.Is(err, driver.ErrSkip) {
			c.skipped = query
		}
		return result, err
	}
	if err := c.call(ctx, Event{Step: StatementDone, Query: query}); err != nil {
		if rows, ok := any(result).(driver.Rows); ok {
			_ = rows.Close()
		}
		var none T
		return none, err
	}
	return result, nil
}

func (c *conn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	inner, ok := c.inner().(driver.ExecerContext)
	if !ok {
		return nil, driver.ErrSkip
	}
	return statement(ctx, c, query, func() (driver.Result, error) { return inner.ExecContext(ctx, query, args) })
}

func (c *conn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	inner, ok := c.inner().(driver.QueryerContext)
	if !ok {
		return nil, driver.ErrSkip
	}
	return statement(ctx, c, query, func() (driver.Rows, error) { return inner.QueryContext(ctx, query, args) })
}

func (c *conn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	var inner driver.Stmt
	var err error
	if p, ok := c.inner().(driver.ConnPrepareContext); ok {
		inner, err = p.PrepareContext(ctx, query)
	} else {
		inner, err = c.Prepare(query)
	}
	if err != nil {
		return nil, err
	}
	return &stmt{inner, c, query}, nil
}

func (c *conn) Ping(ctx context.Context) error {
	if err := c.check(); err != nil {
		return err
	}
	if p, ok := c.inner().(driver.Pinger); ok {
		return p.Ping(ctx)
	}
	return nil
}

func (c *conn) ResetSession(ctx context.Context) error {
	if c.check() != nil {
		return driver.ErrBadConn
	}
	if r, ok := c.inner().(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	if checker, ok := c.inner().(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

type stmt struct {
	driver.Stmt
	conn  *conn
	query string
}

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	inner, ok := s.Stmt.(driver.StmtExecContext)
	if !ok {
		return nil, errors.New("sqlhook: the driver's statements have no ExecContext")
	}
	return statement(ctx, s.conn, s.query, func() (driver.Result, error) { return inner.ExecContext(ctx, args) })
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	inner, ok := s.Stmt.(driver.StmtQueryContext)
	if !ok {
		return nil, errors.New("sqlhook: the driver's statements have no QueryContext")
	}
	return statement(ctx, s.conn, s.query, func() (driver.Rows, error) { return inner.QueryContext(ctx, args) })
}

func (s *stmt) CheckNamedValue(v *driver.NamedValue) error {
	if checker, ok := s.Stmt.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return s.conn.CheckNamedValue(v)
}
