package ledger

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Ledger keeps what is known of effects. It is safe for concurrent use, also by
// several processes on one database.
type Ledger struct {
	db      *sql.DB
	config  *config
	queries queries
	keep    time.Duration // 0: the store has no retention
}

// statementLimit bounds a statement and the wait for its connection.
const statementLimit = 5 * time.Second

// New returns a ledger for the handlers of store, on db: a pool of its own, or the
// store's if that has connections to spare (see [WithSharedPool]). The ledger's rows
// are written outside the handlers' transactions, which each hold a connection of the
// store. db may be another database than the store's; on SQLite it must be another
// file, since a transaction there locks the whole file.
//
// It asks the database whether the table is there: see [Migrate] and [Schema]. ctx
// bounds that. Closing db ends the ledger.
//
// It returns [ErrInvalidOption], naming every wrong argument and option, pools that
// could wait for themselves, and connections with autocommit off; [deduplicator.ErrUnavailable]; or [ErrSchema],
// naming what is missing and how to create it.
func New(ctx context.Context, store deduplicator.Store, db *sql.DB, dialect deduplicator.Dialect, opts ...Option) (*Ledger, error) {
	cfg, err := newConfig(dialect, opts)
	if store == nil {
		err = errors.Join(err, fmt.Errorf("%w: store is nil", ErrInvalidOption))
	}
	if db == nil {
		err = errors.Join(err, fmt.Errorf("%w: db is nil", ErrInvalidOption))
	}
	if err != nil {
		return nil, err
	}
	l := &Ledger{db: db, config: cfg, queries: newQueries(cfg)}
	if err := errors.Join(l.checkPool(store), l.setRetention(store)); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if err := sqldb.Ping(ctx, db); err != nil {
		return nil, fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
	}
	switch err := sqldb.CheckAutocommit(ctx, db, dialect); {
	case errors.Is(err, sqldb.ErrNoAutocommit):
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
	}
	if dialect == deduplicator.SQLite {
		if err := l.checkFile(ctx, store); err != nil {
			return nil, err
		}
	}
	if err := cfg.check(ctx, db); err != nil {
		return nil, err
	}
	if err := sqldb.Prepare(ctx, db, dialect, &l.queries.insert, &l.queries.finish); err != nil {
		return nil, fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
	}
	return l, nil
}

// database is what stores on database/sql offer, as deduplicator.SQLStore does.
type database interface {
	Database() (*sql.DB, deduplicator.Dialect)
}

// checkPool refuses a pool that handlers could use up, so that each waits for a
// connection that another one holds.
func (l *Ledger) checkPool(store deduplicator.Store) error {
	var shared *sql.DB
	if s, ok := store.(database); ok {
		shared, _ = s.Database()
	}
	if shared != l.db {
		if l.config.handlers != nil {
			return errors.New("WithSharedPool: the ledger has a pool of its own")
		}
		return nil
	}
	connections := l.db.Stats().MaxOpenConnections // 0: without a bound
	switch {
	case connections == 1:
		return errors.New("db is the store's pool, which has 1 connection: a handler holds it while the ledger needs another one")
	case connections > 0 && l.config.handlers == nil:
		return fmt.Errorf("db is the store's pool, which has %d connections: as many handlers at once would wait for each other; "+
			"give the ledger a pool of its own, or say with WithSharedPool how many run at a time", connections)
	case connections > 0 && connections <= *l.config.handlers:
		return fmt.Errorf("WithSharedPool: %d handlers need %d connections or more, the pool has %d",
			*l.config.handlers, *l.config.handlers+1, connections)
	}
	return nil
}

// checkFile refuses the file of the store: the handler's transaction holds the only
// write lock of it.
func (l *Ledger) checkFile(ctx context.Context, store deduplicator.Store) error {
	own, err := sqldb.SQLiteFiles(ctx, l.db)
	if err != nil {
		return fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
	}
	main := own["main"]
	if main == "" {
		return fmt.Errorf("%w: db is in memory, where nothing is durable", ErrInvalidOption)
	}
	s, ok := store.(database)
	if !ok {
		return nil
	}
	db, dialect := s.Database()
	if dialect != deduplicator.SQLite {
		return nil
	}
	others, err := sqldb.SQLiteFiles(ctx, db)
	if err != nil {
		return fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
	}
	info, err := os.Stat(main)
	if err != nil {
		return fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
	}
	for _, other := range others {
		if otherInfo, err := os.Stat(other); err == nil && os.SameFile(info, otherInfo) {
			return fmt.Errorf("%w: db is the SQLite file of the store, which a handler's transaction locks: give the ledger a file of its own", ErrInvalidOption)
		}
	}
	return nil
}
