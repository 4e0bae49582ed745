package sqldb

import (
	"context"
	"database/sql"
	"errors"
)

// ErrNoAutocommit says that statements outside of transactions are not committed.
var ErrNoAutocommit = errors.New("the connections of db have autocommit off: what is written outside of a transaction " +
	"would be lost with its connection; leave autocommit out of the DSN")

// CheckAutocommit returns ErrNoAutocommit for such connections, which only MySQL has.
func CheckAutocommit(ctx context.Context, db *sql.DB, d Dialect) error {
	if d != MySQL {
		return nil
	}
	var on bool
	if err := db.QueryRowContext(ctx, "SELECT @@autocommit").Scan(&on); err != nil {
		return err
	}
	if !on {
		return ErrNoAutocommit
	}
	return nil
}
