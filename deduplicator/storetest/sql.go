package storetest

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// SQL returns the Subject for a store whose transactions are *sql.Tx on db; db is
// the subject's alone. claimTimeout is that of store. It creates a table for
// effects.
func SQL(t testing.TB, db *sql.DB, dialect deduplicator.Dialect, store deduplicator.Store, claimTimeout time.Duration) Subject {
	t.Helper()
	const schema = "CREATE TABLE IF NOT EXISTS storetest_effects (effect varchar(250) NOT NULL)"
	if err := sqldb.Apply(t.Context(), db, dialect, schema); err != nil {
		t.Fatalf("create the table for effects: %v", err)
	}
	insert := dialect.Rebind("INSERT INTO storetest_effects (effect) VALUES (?)")
	count := dialect.Rebind("SELECT COUNT(*) FROM storetest_effects WHERE effect = ?")
	s := Subject{
		Store:        store,
		ClaimTimeout: claimTimeout,
		Write: func(ctx context.Context, effect string) error {
			tx, ok := sqldb.TxFromContext(ctx)
			if !ok {
				return errors.New("the context carries no *sql.Tx: see deduplicator.ContextWithTx")
			}
			_, err := tx.ExecContext(ctx, insert, effect)
			return err
		},
		Count: func(ctx context.Context, effect string) (n int, err error) {
			err = db.QueryRowContext(ctx, count, effect).Scan(&n)
			return n, err
		},
		EndTx: func(ctx context.Context, commit bool) error {
			tx, _ := sqldb.TxFromContext(ctx)
			if commit {
				return tx.Commit()
			}
			return tx.Rollback()
		},
		InUse: func() int { return db.Stats().InUse },
	}
	switch dialect {
	case deduplicator.PostgreSQL:
		s.Transient = []error{stateError("40001"), stateError("40P01"), stateError("55P03")}
		s.Break = func(ctx context.Context) error {
			tx, _ := sqldb.TxFromContext(ctx)
			if _, err := tx.ExecContext(ctx, "SELECT 1/0"); err == nil {
				return errors.New("a division by zero is no error")
			}
			return nil
		}
	case deduplicator.MySQL:
		s.Transient = []error{&MySQLError{Number: 1213}, &MySQLError{Number: 1205}}
	case deduplicator.SQLite:
		s.Transient = []error{sqliteError(5), sqliteError(6), sqliteError(5 | 2<<8)} // busy, locked, busy snapshot
	}
	return s
}

// The errors of drivers, as far as stores look at them: by code, since texts
// depend on the server's language.

type stateError string

func (e stateError) Error() string    { return "état SQL" }
func (e stateError) SQLState() string { return string(e) }

// MySQLError stands for the error of github.com/go-sql-driver/mysql, which has a
// field and no method to tell its number.
type MySQLError struct{ Number uint16 }

func (e *MySQLError) Error() string { return "erreur du serveur" }

type sqliteError int

func (e sqliteError) Error() string { return "occupé" }
func (e sqliteError) Code() int     { return int(e) }
