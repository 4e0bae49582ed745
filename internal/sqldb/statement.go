package sqldb

import (
	"context"
	"database/sql"
	"errors"
)

// Statement is one that is prepared where the driver does not do that itself. It is
// safe for concurrent use once it is.
type Statement struct {
	Text string

	stmt *sql.Stmt
}

// Prepare prepares statements on db, all or none. PostgreSQL's drivers are left to
// prepare as their configuration says: a connection pooler may not allow it.
func Prepare(ctx context.Context, db *sql.DB, d Dialect, statements ...*Statement) error {
	if d == PostgreSQL {
		return nil
	}
	for i, s := range statements {
		stmt, err := db.PrepareContext(ctx, s.Text)
		if err != nil {
			for _, s := range statements[:i] {
				err = errors.Join(err, s.stmt.Close())
			}
			return err
		}
		s.stmt = stmt
	}
	return nil
}

// Exec runs s in a transaction of its own.
func (s *Statement) Exec(ctx context.Context, db *sql.DB, args ...any) (sql.Result, error) {
	if s.stmt != nil {
		return s.stmt.ExecContext(ctx, args...)
	}
	return db.ExecContext(ctx, s.Text, args...)
}

// Query runs s in a transaction of its own.
func (s *Statement) Query(ctx context.Context, db *sql.DB, args ...any) (*sql.Rows, error) {
	if s.stmt != nil {
		return s.stmt.QueryContext(ctx, args...)
	}
	return db.QueryContext(ctx, s.Text, args...)
}

// ExecTx runs s in tx, which may be of another pool than s was prepared on.
func (s *Statement) ExecTx(ctx context.Context, tx *sql.Tx, args ...any) (sql.Result, error) {
	if s.stmt != nil {
		result, err := tx.StmtContext(ctx, s.stmt).ExecContext(ctx, args...)
		if !fromOtherPool(err) {
			return result, err
		}
	}
	return tx.ExecContext(ctx, s.Text, args...)
}

// QueryTx runs s in tx, which may be of another pool than s was prepared on.
func (s *Statement) QueryTx(ctx context.Context, tx *sql.Tx, args ...any) (*sql.Rows, error) {
	if s.stmt != nil {
		rows, err := tx.StmtContext(ctx, s.stmt).QueryContext(ctx, args...)
		if !fromOtherPool(err) {
			return rows, err
		}
	}
	return tx.QueryContext(ctx, s.Text, args...)
}

// fromOtherPool tells the error with which database/sql refuses a prepared statement
// in a transaction of another pool, before it asks the server.
func fromOtherPool(err error) bool {
	return err != nil && err.Error() == "sql: Tx.Stmt: statement from different database used"
}
