package main

import (
	"context"
	"database/sql/driver"
	"errors"
	"net"
	"sync/atomic"
	"syscall"
)

// errReset is what a program sees when the database, or the way to it, is gone.
var errReset error = &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}

// faultyConnector is one worker's way to the database. It can lose the answer to
// a commit, and it can die with all its connections. It works with any driver.
type faultyConnector struct {
	driver.Connector
	faults *injector
	dead   atomic.Bool
}

func (c *faultyConnector) Connect(ctx context.Context) (driver.Conn, error) {
	if c.dead.Load() {
		return nil, errReset
	}
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &faultyConn{Conn: conn, connector: c}, nil
}

// faultyConn is a connection. database/sql uses it from one goroutine at a time.
type faultyConn struct {
	driver.Conn
	connector *faultyConnector
	broken    bool
}

func (c *faultyConn) err() error {
	if c.broken || c.connector.dead.Load() {
		return errReset
	}
	return nil
}

// IsValid makes database/sql close a broken connection, and with it the server
// roll back what was open on it.
func (c *faultyConn) IsValid() bool {
	if v, ok := c.Conn.(driver.Validator); ok && !v.IsValid() {
		return false
	}
	return c.err() == nil
}

func (c *faultyConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if err := c.err(); err != nil {
		return nil, err
	}
	beginner, ok := c.Conn.(driver.ConnBeginTx)
	if !ok {
		return nil, errors.New("the driver has no BeginTx")
	}
	tx, err := beginner.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	p, _ := pointFrom(ctx)
	return &faultyTx{tx, c, p}, nil
}

type faultyTx struct {
	driver.Tx
	conn *faultyConn
	at   point
}

func (t *faultyTx) Commit() error {
	if err := t.conn.err(); err != nil {
		return err
	}
	if err := t.Tx.Commit(); err != nil {
		return err
	}
	if t.conn.connector.faults.strike(commitAnswerLost, t.at) {
		t.conn.broken = true
		return errReset
	}
	return nil
}

func (t *faultyTx) Rollback() error {
	if err := t.conn.err(); err != nil {
		return driver.ErrBadConn // closes the connection, without a word to the server
	}
	return t.Tx.Rollback()
}

func (c *faultyConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if err := c.err(); err != nil {
		return nil, err
	}
	if e, ok := c.Conn.(driver.ExecerContext); ok {
		return e.ExecContext(ctx, query, args)
	}
	return nil, driver.ErrSkip
}

func (c *faultyConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if err := c.err(); err != nil {
		return nil, err
	}
	if q, ok := c.Conn.(driver.QueryerContext); ok {
		return q.QueryContext(ctx, query, args)
	}
	return nil, driver.ErrSkip
}

func (c *faultyConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if err := c.err(); err != nil {
		return nil, err
	}
	if p, ok := c.Conn.(driver.ConnPrepareContext); ok {
		return p.PrepareContext(ctx, query)
	}
	return c.Prepare(query)
}

func (c *faultyConn) Ping(ctx context.Context) error {
	if err := c.err(); err != nil {
		return err
	}
	if p, ok := c.Conn.(driver.Pinger); ok {
		return p.Ping(ctx)
	}
	return nil
}

func (c *faultyConn) ResetSession(ctx context.Context) error {
	if err := c.err(); err != nil {
		return driver.ErrBadConn
	}
	if r, ok := c.Conn.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

func (c *faultyConn) CheckNamedValue(v *driver.NamedValue) error {
	if checker, ok := c.Conn.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return driver.ErrSkip
}
