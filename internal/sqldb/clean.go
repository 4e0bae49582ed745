package sqldb

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
)

// DeleteOldest returns the statement that deletes a batch of rows of a quoted table
// whose time column is before end, oldest first, by the index on that column. A
// condition on the rows, which are p there, begins with AND. key is the table's
// primary key.
func (d Dialect) DeleteOldest(table, column, end, condition string, rows int, key ...string) string {
	batch := column + " < " + end + condition + fmt.Sprintf(" ORDER BY %s LIMIT %d", column, rows)
	columns := strings.Join(key, ", ")
	switch d {
	case PostgreSQL:
		// Rows that another cleaner is at are skipped, not waited for. Those that are
		// locked here stay where they are, so that ctid finds them.
		return "DELETE FROM " + table + " WHERE ctid = ANY (ARRAY(SELECT ctid FROM " + table + " p WHERE " + batch +
			" FOR UPDATE OF p SKIP LOCKED))"
	case MySQL:
		// A DELETE with ORDER BY and LIMIT would read and lock the whole table where
		// the optimizer thinks that most rows are due. Inside a DELETE, MySQL locks what
		// a subquery reads, shared: two cleaners would then wait for each other. So it is
		// locked for update, and another cleaner's rows are skipped.
		same := make([]string, len(key))
		for i, column := range key {
			same[i] = "d." + column + " = b." + column
		}
		return "DELETE d FROM (SELECT " + columns + " FROM " + table + " p WHERE " + batch + " FOR UPDATE SKIP LOCKED) b STRAIGHT_JOIN " + table +
			" d ON " + strings.Join(same, " AND ")
	default:
		return "DELETE FROM " + table + " WHERE (" + columns + ") IN (SELECT " + columns + " FROM " + table + " p WHERE " + batch + ")"
	}
}

// DeleteBatch runs a statement of DeleteOldest at read committed: MySQL's default
// would also lock the gaps between the rows.
func DeleteBatch(ctx context.Context, db *sql.DB, d Dialect, statement string) (rows int64, err error) {
	opts := &sql.TxOptions{Isolation: sql.LevelReadCommitted}
	if d == SQLite {
		opts = nil
	}
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	result, err := tx.ExecContext(ctx, statement)
	if err != nil {
		return 0, err
	}
	if rows, err = result.RowsAffected(); err != nil {
		return 0, err
	}
	return rows, tx.Commit()
}
