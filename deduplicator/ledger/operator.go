package ledger

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/internal/text"
)

// UnknownEffect is an effect of which nobody knows whether it took place.
type UnknownEffect struct {
	Consumer   string
	MessageKey string // in a list: as it is stored, which is a hash for keys longer than 255 bytes
	Effect     string
	Epoch      int
	Key        string // the idempotency key, which the call gave the provider

	Attempts int           // calls so far
	Age      time.Duration // since the first one, by the database's clock
	Reason   string        // the error of the last call; empty if its process died

	token string
}

// Unknown lists the effects whose outcome is unknown, the oldest first, limit at
// most (1 or more): those that wait for an operator, those that the next delivery
// will settle by their rule, and those whose key has expired. Effects in progress
// are not among them.
func (l *Ledger) Unknown(ctx context.Context, limit int) ([]UnknownEffect, error) {
	if limit < 1 {
		return nil, fmt.Errorf("%w: limit %d is under the least, 1", ErrInvalidOption, limit)
	}
	rows, err := l.db.QueryContext(ctx, l.queries.unknown, limit)
	if err != nil {
		return nil, fmt.Errorf("ledger: list unknown effects: %w", err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	var listed []UnknownEffect
	for rows.Next() {
		var u UnknownEffect
		var reason sql.NullString
		var age int64
		if err := rows.Scan(&u.Key, &u.Consumer, &u.MessageKey, &u.Effect, &u.Epoch, &u.token, &u.Attempts, &reason, &age); err != nil {
			return nil, fmt.Errorf("ledger: list unknown effects: %w", err)
		}
		u.Reason, u.Age = reason.String, time.Duration(age)*time.Microsecond
		listed = append(listed, u)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("ledger: list unknown effects: %w", err)
	}
	return listed, nil
}

// Resolve records what an operator found out about an effect that [Ledger.Unknown]
// listed. Then publish its message again from the poison queue: the handler gets the
// answer.
//
// It returns [ErrNotUnknown] if the effect has changed since it was listed, even if
// it is unknown again; [ErrResult] for a result that can't be kept; or the database's
// error. Nothing has changed then, except that after a database error it may have.
func (l *Ledger) Resolve(ctx context.Context, unknown UnknownEffect, answer Answer) error {
	state, result, reason, lost := l.outcome(answer)
	if lost != nil {
		return fmt.Errorf("%w: %w", ErrResult, lost)
	}
	if state == stateUnknown {
		return nil
	}
	resolved, err := l.changed(l.exec(ctx, &sqldb.Statement{Text: l.queries.resolve},
		state, result, sql.NullString{String: text.Cut(reason), Valid: reason != ""}, rand.Text(),
		unknown.Key, unknown.token))
	if err != nil {
		return fmt.Errorf("ledger: resolve effect: %w", err)
	}
	if !resolved {
		return fmt.Errorf("%w: consumer %q, message %q, effect %q", ErrNotUnknown, unknown.Consumer, unknown.MessageKey, unknown.Effect)
	}
	return nil
}
