package ordering

import (
	"context"
	"database/sql"
)

// statement is one that is prepared where the driver does not do that itself.
type statement struct {
	text string
	stmt *sql.Stmt
}

// prepare prepares s on db, except on PostgreSQL: see deduplicator.NewSQLStore.
func (s *statement) prepare(ctx context.Context, db *sql.DB, dialect Dialect) (err error) {
	if dialect != PostgreSQL {
		s.stmt, err = db.PrepareContext(ctx, s.text)
	}
	return err
}

func (s *statement) exec(ctx context.Context, tx *sql.Tx, args ...any) (sql.Result, error) {
	if s.stmt != nil {
		result, err := tx.StmtContext(ctx, s.stmt).ExecContext(ctx, args...)
		if err == nil || err.Error() != otherPool {
			return result, err
		}
	}
	return tx.ExecContext(ctx, s.text, args...)
}

// otherPool is what database/sql says, before it asks the server, when tx is not of
// the pool that a statement was prepared on. It can be of the same database.
const otherPool = "sql: Tx.Stmt: statement from different database used"
