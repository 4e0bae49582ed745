package deduplicator

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// SQLStore is the [Store] on database/sql. It works with any driver of its
// dialect and uses one connection per Process. It is safe for concurrent use.
type SQLStore struct {
	db      *sql.DB
	config  *config
	queries queries
	known   *knownKeys

	txOptions *sql.TxOptions

	consumers sync.Map // from names to their owners: see Reserve
}

// NewSQLStore returns a store on db. It asks the database for its version and
// checks that the tables are there: see [Migrate] and [Schema]. ctx bounds that.
// Closing db ends the store.
//
// It returns [ErrInvalidOption], naming every wrong argument and option, also where
// db's connections are at read uncommitted, have autocommit off, or are each a SQLite
// database in memory; [ErrUnavailable]; or [ErrSchema], naming what is missing and how
// to create it.
func NewSQLStore(ctx context.Context, db *sql.DB, dialect Dialect, opts ...Option) (*SQLStore, error) {
	cfg, err := newConfig(dialect, opts)
	if db == nil {
		err = errors.Join(fmt.Errorf("%w: db is nil", ErrInvalidOption), err)
	}
	if err != nil {
		return nil, err
	}
	if err := sqldb.Ping(ctx, db); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	if dialect == SQLite {
		if err := sqldb.CheckMemory(ctx, db); errors.Is(err, sqldb.ErrSplit) {
			return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
		}
		// Other errors are those of the checks that follow.
	}
	if err := cfg.check(ctx, db); err != nil {
		return nil, err
	}
	srv, err := cfg.inspect(ctx, db)
	if err != nil {
		return nil, err
	}
	s := &SQLStore{db: db, config: cfg, queries: newQueries(cfg, srv), txOptions: srv.txOptions, known: newKnownKeys(cfg.knownKeys)}
	if err := sqldb.Prepare(ctx, db, dialect, &s.queries.claim, &s.queries.stored, &s.queries.insertOne, &s.queries.forgetOne); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return s, nil
}

// Database returns the pool that the store was made with, and its dialect: for what
// must not share it, or must know how it is bounded.
func (s *SQLStore) Database() (*sql.DB, Dialect) { return s.db, s.config.dialect }

// Retention returns what [WithRetention] has set; false if claims are kept for ever.
func (s *SQLStore) Retention() (time.Duration, bool) {
	if s.config.retention == nil {
		return 0, false
	}
	return *s.config.retention, true
}

// MaxAttempts returns what [WithMaxAttempts] has set; false if attempts are not counted.
func (s *SQLStore) MaxAttempts() (int, bool) {
	if s.config.maxAttempts == nil {
		return 0, false
	}
	return *s.config.maxAttempts, true
}

// Process implements [Store].
func (s *SQLStore) Process(ctx context.Context, claim Claim, work Work) (Result, error) {
	if err := s.Check(claim); err != nil {
		return Result{}, err
	}
	if s.known.duplicate(claim) {
		return Result{Outcome: Duplicate}, nil
	}
	if claim.Redelivered {
		// When this fails, the transaction has the same failure or none.
		result, known, err := s.stored(ctx, nil, claim)
		if known && (err == nil || errors.Is(err, ErrConflict)) {
			return result, err
		}
	}
	if s.config.maxAttempts != nil && !sqldb.Uncounted(ctx) {
		return s.countedProcess(ctx, claim, work)
	}
	return s.process(ctx, claim, work)
}

// Check returns the error with which Process refuses claim without asking the
// database, for a wrapper that answers copies itself: [ErrInvalidClaim], [ErrNoTime]
// or [ErrTooOld].
func (s *SQLStore) Check(claim Claim) error {
	if err := claim.Validate(); err != nil {
		return err
	}
	return s.config.checkTime(claim)
}

// process runs attempts until one is not undone by other transactions.
func (s *SQLStore) process(ctx context.Context, claim Claim, work Work) (result Result, err error) {
	err = s.retry(ctx, func() (err error) {
		result, err = s.attempt(ctx, claim, work)
		return err
	})
	return result, err
}

// retry calls once again while other transactions make the database refuse it.
func (s *SQLStore) retry(ctx context.Context, once func() error) error {
	started := time.Now()
	pauses := sqldb.Pauses()
	for retries := 0; ; retries++ {
		err := once()
		again := errors.Is(err, errAgain)
		if !again && !sqldb.Transient(err) || errors.Is(err, ErrInFlight) || errors.Is(err, ErrClaimKept) || retries >= s.config.txRetries && !again {
			return err
		}
		// SQLite has one writer: waiting for it is bounded by time, not by count.
		if again && time.Since(started) > s.config.claimTimeout {
			return fmt.Errorf("%w: %w", ErrInFlight, err)
		}
		if !sqldb.Pause(ctx, pauses.NextBackOff()) {
			return errors.Join(ctx.Err(), err)
		}
	}
}

// errAgain marks a begin or claim that found SQLite's write lock taken.
var errAgain = errors.New("database is busy")

// errAborted stands for a panic or Goexit of the work.
var errAborted = errors.New("the work was aborted")

// attempt is one transaction: begin, claim, work, outputs, commit.
func (s *SQLStore) attempt(ctx context.Context, claim Claim, work Work) (Result, error) {
	tx, err := s.db.BeginTx(ctx, s.txOptions)
	if err != nil {
		return Result{}, s.claimError(ctx, err)
	}
	ended, working := false, false
	defer func() {
		switch {
		case working: // it panics, or ended its goroutine
			if err := s.undo(ctx, tx, claim, errAborted); errors.Is(err, ErrClaimKept) {
				if value := recover(); value != nil {
					panic(fmt.Errorf("%w: panic: %v", err, value))
				}
			}
		case !ended:
			_ = tx.Rollback()
		}
	}()

	isNew, err := s.claim(ctx, tx, claim)
	if err != nil {
		return Result{}, s.claimError(ctx, err)
	}
	if !isNew {
		result, _, err := s.stored(ctx, tx, claim)
		result.Outcome = Duplicate // also where its row was deleted just now
		if err != nil {
			result = Result{}
		}
		return result, err
	}
	working = true
	outputs, err := work(&workContext{ctx, tx, claim})
	working = false
	if err != nil {
		ended = true
		return Result{}, s.undo(ctx, tx, claim, err)
	}
	if len(outputs) > 0 {
		if err := s.insertOutputs(ctx, tx, claim, outputs); err != nil {
			if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
				return Result{}, ErrTxEnded
			}
			ended = true
			return Result{}, s.undo(ctx, tx, claim, fmt.Errorf("deduplicator: store outputs: %w", err))
		}
	}
	if s.config.maxAttempts != nil {
		if _, err := tx.ExecContext(ctx, s.queries.forgetAttempts, key(claim)...); err != nil {
			switch {
			case ctx.Err() != nil:
				return Result{}, errors.Join(ctx.Err(), err)
			case errors.Is(err, sql.ErrTxDone):
				return Result{}, ErrTxEnded
			}
			return Result{}, fmt.Errorf("%w: forget attempts: %w", ErrNotCommitted, err)
		}
	}
	if err := ctx.Err(); err != nil {
		return Result{}, err // certainly not committed, which Commit could not say
	}
	ended = true
	if err := tx.Commit(); err != nil {
		return s.commitFailed(ctx, claim, err)
	}
	s.known.committed(claim, claim.Fingerprint, len(outputs) > 0)
	return Result{Outcome: Processed}, nil
}

// undo rolls back after the work's error, which it returns. Where the work has
// ended the transaction before, it finds out whether the claim was committed.
func (s *SQLStore) undo(ctx context.Context, tx *sql.Tx, claim Claim, cause error) error {
	gone := false
	if s.config.dialect == MySQL && (!sqldb.Transient(cause) || sqldb.LockTimeout(cause)) {
		// DDL commits, and the driver does not know. The server refuses this
		// statement within a transaction (MySQL manual, "SET TRANSACTION"). After a
		// deadlock there is none, and a copy may have claimed the key by now.
		_, err := tx.ExecContext(ctx, "SET TRANSACTION READ WRITE")
		gone = err == nil
	}
	gone = errors.Is(tx.Rollback(), sql.ErrTxDone) || gone
	if !gone || ctx.Err() != nil {
		return cause
	}
	if _, known, _ := s.stored(ctx, nil, claim); known {
		return fmt.Errorf("%w: %w", ErrClaimKept, cause)
	}
	return fmt.Errorf("%w: %w", ErrTxEnded, cause) // rolled back, as also by a deadlock on MySQL
}

func (s *SQLStore) claim(ctx context.Context, tx *sql.Tx, claim Claim) (isNew bool, err error) {
	wait := ctx
	if s.queries.unboundedClaim { // it ends with the context, and with it the connection
		var cancel context.CancelFunc
		wait, cancel = context.WithTimeout(ctx, s.config.claimTimeout)
		defer cancel()
	}
	result, err := s.queries.claim.ExecTx(wait, tx, sqldb.EncodeKey(claim.Consumer), sqldb.EncodeKey(claim.Key), claim.Fingerprint)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		return false, fmt.Errorf("%w: %w", ErrInFlight, err)
	}
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	return rows == 1, err
}

// claimError says why the work was not called.
func (s *SQLStore) claimError(ctx context.Context, err error) error {
	if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err) // not every driver says so
	}
	switch {
	case s.config.dialect == SQLite && sqldb.LockTimeout(err):
		return fmt.Errorf("%w: %w", errAgain, err)
	case errors.Is(err, ErrInFlight):
		return err
	case sqldb.LockTimeout(err):
		return fmt.Errorf("%w: %w", ErrInFlight, err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// stored reads what is committed of a claim, in tx or, if that is nil, by itself:
// whether it is, and then its outputs or that it is a conflict.
func (s *SQLStore) stored(ctx context.Context, tx *sql.Tx, claim Claim) (result Result, known bool, err error) {
	var rows *sql.Rows
	if tx != nil {
		rows, err = s.queries.stored.QueryTx(ctx, tx, key(claim)...)
	} else {
		rows, err = s.queries.stored.Query(ctx, s.db, key(claim)...)
	}
	if err != nil {
		return Result{}, false, s.claimError(ctx, err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	result.Outcome = Duplicate
	var fingerprint []byte
	var found []storedOutput
	for rows.Next() {
		var row storedOutput
		if err := rows.Scan(&fingerprint, &row.ordinal, &row.topic, &row.uuid, &row.metadata, &row.payload); err != nil {
			return Result{}, known, s.claimError(ctx, err)
		}
		known = true
		if claim.conflicts(fingerprint) {
			return Result{}, known, &ConflictError{Consumer: claim.Consumer, Key: claim.Key, Stored: fingerprint, Got: claim.Fingerprint}
		}
		if row.topic.Valid { // otherwise the claim has no outputs
			found = append(found, row)
		}
	}
	if err := rows.Err(); err != nil {
		return Result{}, known, s.claimError(ctx, err)
	}
	slices.SortFunc(found, func(a, b storedOutput) int { return cmp.Compare(a.ordinal.Int64, b.ordinal.Int64) })
	for _, row := range found {
		output, err := row.output()
		if err != nil {
			return Result{}, known, err
		}
		result.Outputs = append(result.Outputs, output)
	}
	if known {
		s.known.committed(claim, fingerprint, len(result.Outputs) > 0)
	}
	return result, known, nil
}

// storedOutput is a row of the table of outputs, or of NULLs from an outer join.
type storedOutput struct {
	ordinal           sql.NullInt64
	topic, uuid       sql.NullString
	metadata, payload []byte
}

var errDamaged = errors.New("deduplicator: stored output is damaged")

func (row *storedOutput) output() (Output, error) {
	fields, err := metadata.Decode(row.metadata)
	if err != nil {
		return Output{}, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return Output{Topic: row.topic.String, UUID: row.uuid.String, Metadata: fields, Payload: row.payload}, nil
}

// recheckTimeout bounds the question whether a commit took place, beyond the
// claim timeout.
const recheckTimeout = 5 * time.Second

// errNotThere is what the work of a recheck returns.
var errNotThere = errors.New("the claim is not recorded")

// commitFailed finds out what became of a commit that returned an error, since
// its answer may be lost while the commit is not. It claims the key again: that
// waits for a commit that is still under way, where reading would not see it.
func (s *SQLStore) commitFailed(ctx context.Context, claim Claim, cause error) (Result, error) {
	if errors.Is(cause, sql.ErrTxDone) && ctx.Err() == nil {
		return Result{}, ErrTxEnded
	}
	if sqldb.Transient(cause) { // the database has answered
		return Result{}, fmt.Errorf("%w: %w", ErrNotCommitted, cause)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.config.claimTimeout+recheckTimeout)
	defer cancel()
	result, err := s.attempt(ctx, claim, func(context.Context) ([]Output, error) { return nil, errNotThere })
	switch {
	case err == nil:
		return result, nil // recorded, by this transaction or by another one
	case errors.Is(err, errNotThere):
		return Result{}, fmt.Errorf("%w: %w", ErrNotCommitted, cause)
	case errors.Is(err, ErrConflict):
		return Result{}, err // so another transaction has recorded it
	}
	return Result{}, fmt.Errorf("%w: %w", ErrOutcomeUnknown, errors.Join(cause, err))
}

// aloneLimit is how long a statement of its own gives way to other transactions.
const aloneLimit = 5 * time.Second

// Forget implements [Store].
func (s *SQLStore) Forget(ctx context.Context, claims ...Claim) error {
	for len(claims) > 0 {
		n := min(len(claims), maxRows)
		args := make([]any, 0, 2*n)
		for _, claim := range claims[:n] {
			args = append(args, key(claim)...)
		}
		forget := &s.queries.forgetOne
		if n > 1 {
			forget = &sqldb.Statement{Text: s.queries.forget(n)}
		}
		if _, err := s.execStatement(ctx, forget, args...); err != nil {
			return fmt.Errorf("deduplicator: forget outputs: %w", err)
		}
		s.known.forgotten(claims[:n])
		claims = claims[n:]
	}
	return nil
}

// exec runs one statement in a transaction of its own, again while other
// transactions make the database refuse it.
func (s *SQLStore) exec(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return s.execStatement(ctx, &sqldb.Statement{Text: query}, args...)
}

func (s *SQLStore) execStatement(ctx context.Context, statement *sqldb.Statement, args ...any) (result sql.Result, err error) {
	err = sqldb.Retry(ctx, aloneLimit, func() (err error) {
		result, err = statement.Exec(ctx, s.db, args...)
		return err
	})
	return result, err
}

func key(claim Claim) []any {
	return []any{sqldb.EncodeKey(claim.Consumer), sqldb.EncodeKey(claim.Key)}
}
