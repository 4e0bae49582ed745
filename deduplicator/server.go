package deduplicator

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// server is what the store does otherwise because of the database's settings.
type server struct {
	mariaDB bool

	// lockWait is how long its connections let a statement wait for a lock; 0 is
	// without end.
	lockWait time.Duration

	// txOptions are those of every transaction: nil where the isolation level is the
	// one that transactions have anyway, since drivers spend a round trip or the
	// server some parsing on it.
	txOptions *sql.TxOptions
}

// inspect asks the server, and refuses connections that lose what is written.
func (c *config) inspect(ctx context.Context, db *sql.DB) (server, error) {
	var s server
	level, err := s.ask(ctx, db, c.dialect)
	if err == nil {
		err = sqldb.CheckAutocommit(ctx, db, c.dialect)
	}
	switch {
	case errors.Is(err, sqldb.ErrNoAutocommit):
		return server{}, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	case err != nil:
		return server{}, fmt.Errorf("%w: %w", ErrUnavailable, c.dialect.Explain(err, ""))
	case level == "read uncommitted" && c.dialect != PostgreSQL: // which never is
		// The claim of a message that is in work would make its redelivery a
		// duplicate, and be lost with it when the work fails.
		return server{}, fmt.Errorf("%w: the connections of db are at read uncommitted", ErrInvalidOption)
	case c.dialect == SQLite: // it has one level, and drivers refuse to be told
	case level != strings.ToLower(c.isolation.String()):
		s.txOptions = &sql.TxOptions{Isolation: c.isolation}
	}
	return s, nil
}

// ask returns the level of transactions that don't say one, in small letters.
func (s *server) ask(ctx context.Context, db *sql.DB, d Dialect) (level string, err error) {
	var wait int64
	switch d {
	case PostgreSQL:
		err = db.QueryRowContext(ctx, "SELECT current_setting('default_transaction_isolation'), setting::bigint FROM pg_settings WHERE name = 'lock_timeout'").
			Scan(&level, &wait)
		s.lockWait = time.Duration(wait) * time.Millisecond
	case MySQL:
		var version, name string
		err = db.QueryRowContext(ctx, "SELECT VERSION(), @@innodb_lock_wait_timeout").Scan(&version, &wait)
		if err == nil { // the first of the names is MariaDB's and that of MySQL before 8
			err = db.QueryRowContext(ctx, "SHOW VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')").Scan(&name, &level)
		}
		s.mariaDB = strings.Contains(version, "MariaDB")
		s.lockWait = time.Duration(wait) * time.Second
		level = strings.ToLower(strings.ReplaceAll(level, "-", " "))
	case SQLite:
		var dirty bool
		if err = db.QueryRowContext(ctx, "PRAGMA read_uncommitted").Scan(&dirty); dirty {
			level = "read uncommitted"
		}
	}
	return level, err
}
