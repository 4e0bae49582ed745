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

// SQLStore is the [Store] on database/sql. It works with any driver of its
// dialect and uses one connection per Process. It is safe for concurrent use.
type SQLStore struct {
	db      *sql.DB
	config  *config
	queries queries

	claimStmt *sql.Stmt // nil where the driver keeps prepared statements itself
}

// NewSQLStore returns a store on db. It asks the database for its version and
// checks that the tables are there: see [Migrate] and [Schema]. ctx bounds that.
// Closing db ends the store.
//
// It returns [ErrInvalidOption], naming every wrong argument and option,
// [ErrUnavailable], or [ErrSchema], naming what is missing and how to create it.
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
	if err := cfg.check(ctx, db); err != nil {
		return nil, err
	}
	s := &SQLStore{db: db, config: cfg}
	mariaDB := false
	if dialect == MySQL {
		var version string
		if err := db.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		mariaDB = strings.Contains(version, "MariaDB")
	}
	s.queries = newQueries(cfg, mariaDB)
	if dialect != PostgreSQL {
		// PostgreSQL's drivers are left to prepare as their configuration says:
		// a connection pooler may not allow it.
		if s.claimStmt, err = db.PrepareContext(ctx, s.queries.claim); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
	}
	return s, nil
}

// Process implements [Store].
func (s *SQLStore) Process(ctx context.Context, claim Claim, work Work) (Result, error) {
	if err := validate(claim); err != nil {
		return Result{}, err
	}
	started := time.Now()
	pauses := sqldb.Pauses()
	for retries := 0; ; retries++ {
		result, err := s.attempt(ctx, claim, work)
		again := errors.Is(err, errAgain)
		if !again && !sqldb.Transient(err) || errors.Is(err, ErrInFlight) || retries >= s.config.txRetries && !again {
			return result, err
		}
		// SQLite has one writer: waiting for it is bounded by time, not by count.
		if again && time.Since(started) > s.config.claimTimeout {
			return Result{}, fmt.Errorf("%w: %w", ErrInFlight, err)
		}
		timer := time.NewTimer(pauses.NextBackOff())
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return Result{}, errors.Join(ctx.Err(), err)
		}
	}
}

// errAgain marks a begin or claim that found SQLite's write lock taken.
var errAgain = errors.New("database is busy")

// attempt is one transaction: begin, claim, work, outputs, commit.
func (s *SQLStore) attempt(ctx context.Context, claim Claim, work Work) (Result, error) {
	tx, err := s.db.BeginTx(ctx, s.config.txOptions())
	if err != nil {
		return Result{}, s.claimError(ctx, err)
	}
	ended := false
	defer func() {
		if !ended { // an error, a panic or a Goexit
			_ = tx.Rollback()
		}
	}()

	isNew, err := s.claim(ctx, tx, claim)
	if err != nil {
		return Result{}, s.claimError(ctx, err)
	}
	if !isNew {
		return s.duplicate(ctx, tx, claim)
	}
	outputs, err := work(sqldb.ContextWithTx(ctx, tx))
	if err != nil {
		return Result{}, err
	}
	if len(outputs) > 0 {
		if err := s.insertOutputs(ctx, tx, claim, outputs); err != nil {
			if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
				return Result{}, ErrTxEnded
			}
			return Result{}, fmt.Errorf("deduplicator: store outputs: %w", err)
		}
	}
	if err := ctx.Err(); err != nil {
		return Result{}, err // certainly not committed, which Commit could not say
	}
	ended = true
	if err := tx.Commit(); err != nil {
		return s.commitFailed(ctx, claim, err)
	}
	return Result{Outcome: Processed, Outputs: outputs}, nil
}

func (s *SQLStore) claim(ctx context.Context, tx *sql.Tx, claim Claim) (isNew bool, err error) {
	args := s.queries.claimArgs(claim)
	var result sql.Result
	if s.claimStmt != nil {
		result, err = tx.StmtContext(ctx, s.claimStmt).ExecContext(ctx, args...)
	} else {
		result, err = tx.ExecContext(ctx, s.queries.claim, args...)
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
	case sqldb.LockTimeout(err):
		return fmt.Errorf("%w: %w", ErrInFlight, err)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// duplicate reads what is stored of a claim that is not new.
func (s *SQLStore) duplicate(ctx context.Context, tx *sql.Tx, claim Claim) (Result, error) {
	rows, err := tx.QueryContext(ctx, s.queries.stored, key(claim)...)
	if err != nil {
		return Result{}, s.claimError(ctx, err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	result := Result{Outcome: Duplicate}
	for rows.Next() {
		var (
			fingerprint, metadata, payload []byte
			topic, uuid                    sql.NullString
		)
		if err := rows.Scan(&fingerprint, &topic, &uuid, &metadata, &payload); err != nil {
			return Result{}, s.claimError(ctx, err)
		}
		if len(claim.Fingerprint) > 0 && len(fingerprint) > 0 && string(claim.Fingerprint) != string(fingerprint) {
			return Result{}, &ConflictError{Consumer: claim.Consumer, Key: claim.Key, Stored: fingerprint, Got: claim.Fingerprint}
		}
		if !topic.Valid { // the claim has no outputs
			continue
		}
		output := Output{Topic: topic.String, UUID: uuid.String, Payload: payload}
		if output.Metadata, err = decodeMetadata(metadata); err != nil {
			return Result{}, fmt.Errorf("deduplicator: stored output: %w", err)
		}
		result.Outputs = append(result.Outputs, output)
	}
	if err := rows.Err(); err != nil {
		return Result{}, s.claimError(ctx, err)
	}
	return result, nil
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

// forgetLimit is how long Forget gives way to other transactions.
const forgetLimit = 5 * time.Second

// Forget implements [Store].
func (s *SQLStore) Forget(ctx context.Context, claims ...Claim) error {
	for len(claims) > 0 {
		n := min(len(claims), maxRows)
		args := make([]any, 0, 2*n)
		for _, claim := range claims[:n] {
			args = append(args, key(claim)...)
		}
		err := sqldb.Retry(ctx, forgetLimit, func() error {
			_, err := s.db.ExecContext(ctx, s.queries.forget(n), args...)
			return err
		})
		if err != nil {
			return fmt.Errorf("deduplicator: forget outputs: %w", err)
		}
		claims = claims[n:]
	}
	return nil
}

func validate(claim Claim) error {
	switch {
	case claim.Consumer == "":
		return fmt.Errorf("%w: no consumer", ErrInvalidClaim)
	case claim.Key == "":
		return fmt.Errorf("%w: no key", ErrInvalidClaim)
	case len(claim.Fingerprint) > sqldb.MaxKeyBytes:
		return fmt.Errorf("%w: fingerprint has %d bytes, the limit is %d", ErrInvalidClaim, len(claim.Fingerprint), sqldb.MaxKeyBytes)
	}
	return nil
}

func key(claim Claim) []any {
	return []any{sqldb.EncodeKey(claim.Consumer), sqldb.EncodeKey(claim.Key)}
}
