package deduplicator

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
)

// attemptsTimeout bounds a correction of the count of attempts.
const attemptsTimeout = 5 * time.Second

func (q *queries) setAttempts(c *config) {
	table, now := c.dialect.Quote(c.attempts), c.dialect.Now()
	switch c.dialect {
	case MySQL:
		// LAST_INSERT_ID with an argument hands the value to the client (MySQL
		// manual, "Information Functions"): MySQL has no RETURNING.
		q.countAttempt = "INSERT INTO " + table + " (consumer_name, message_key, attempts, updated_at) VALUES (?, ?, LAST_INSERT_ID(1), " + now +
			") ON DUPLICATE KEY UPDATE attempts = LAST_INSERT_ID(attempts + 1), updated_at = " + now
	case PostgreSQL, SQLite:
		q.countAttempt = c.dialect.Rebind("INSERT INTO " + table + " AS a (consumer_name, message_key, attempts, updated_at) VALUES (?, ?, 1, " + now +
			") ON CONFLICT (consumer_name, message_key) DO UPDATE SET attempts = a.attempts + 1, updated_at = excluded.updated_at RETURNING attempts")
	}
	where := " WHERE consumer_name = ? AND message_key = ?"
	q.uncountAttempt = c.dialect.Rebind("UPDATE " + table + " SET attempts = attempts - 1" + where + " AND attempts > 0")
	q.forgetAttempts = c.dialect.Rebind("DELETE FROM " + table + where)
}

// countedProcess is process with a count of attempts that survives them.
func (s *SQLStore) countedProcess(ctx context.Context, claim Claim, work Work) (Result, error) {
	attempts, err := s.countAttempt(ctx, claim)
	if err != nil {
		return Result{}, err
	}
	if limit := int64(*s.config.maxAttempts); attempts > limit {
		// Only who holds the claim can say that it is neither processed nor in work.
		work = func(context.Context) ([]Output, error) {
			return nil, fmt.Errorf("%w: %d of %d", ErrTooManyAttempts, attempts, limit)
		}
	}
	result, err := s.process(ctx, claim, work)
	switch {
	case err == nil && result.Outcome == Duplicate, errors.Is(err, ErrTooManyAttempts):
		s.correctAttempts(ctx, s.queries.forgetAttempts, claim)
	case errors.Is(err, ErrInFlight), errors.Is(err, ErrUnavailable), // they don't speak against the message
		err != nil && errors.Is(ctx.Err(), context.Canceled): // nor does a delivery that ended
		s.correctAttempts(ctx, s.queries.uncountAttempt, claim)
	}
	return result, err
}

// ForgetAttempts ends the count of [WithMaxAttempts] for claim, whose message was
// acknowledged without being processed: one that is published again from the poison
// queue has all its attempts. It takes up to five seconds; without the database the
// count stays, and the message may be refused earlier.
func (s *SQLStore) ForgetAttempts(ctx context.Context, claim Claim) {
	if s.config.maxAttempts != nil {
		s.correctAttempts(ctx, s.queries.forgetAttempts, claim)
	}
}

func (s *SQLStore) countAttempt(ctx context.Context, claim Claim) (attempts int64, err error) {
	err = s.retry(ctx, func() (err error) {
		if s.config.dialect == MySQL {
			var result sql.Result
			if result, err = s.db.ExecContext(ctx, s.queries.countAttempt, key(claim)...); err == nil {
				attempts, err = result.LastInsertId()
			}
		} else {
			err = s.db.QueryRowContext(ctx, s.queries.countAttempt, key(claim)...).Scan(&attempts)
		}
		if err != nil {
			return s.claimError(ctx, err)
		}
		return nil
	})
	return attempts, err
}

// correctAttempts runs a statement that is not needed for anything to be right:
// without it a message may be refused earlier.
func (s *SQLStore) correctAttempts(ctx context.Context, query string, claim Claim) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), attemptsTimeout)
	defer cancel()
	_, _ = s.exec(ctx, query, key(claim)...)
}
