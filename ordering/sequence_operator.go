package ordering

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Operator lets a person look at parked messages and unblock entities. Consumers
// and entities are named as messages name them or as List returns them. It is safe
// for concurrent use and beside running consumers: each method is one transaction
// that locks the entity. What it lets through is processed by the releaser or with
// the next event of the entity.
type Operator struct{ sequence *Sequence }

// NewOperator returns an operator of the sequences that are kept in db. Of the
// options only [WithSequenceTables] matters. Its errors are those of
// [NewSequence].
func NewOperator(ctx context.Context, db *sql.DB, dialect Dialect, opts ...SequenceOption) (*Operator, error) {
	s, err := NewSequence(ctx, db, dialect, opts...)
	if err != nil {
		return nil, err
	}
	return &Operator{s}, nil
}

// ParkedMessage is a message that waits in the database, and the entity that it
// waits for.
type ParkedMessage struct {
	Consumer string
	Entity   string // "sha256:…" for one that is too long for its column
	Position
	UUID     string
	Metadata map[string]string
	Payload  []byte
	Reason   string // "gap", "blocked" or "failed"
	Error    string // of its last attempt; empty if there was none
	Attempts int
	ParkedAt time.Time // by the database's clock

	EntityLast    Position // what the consumer has processed
	EntityBlocked string   // why the entity is blocked; empty if it is not
}

// ParkedFilter says what [Operator.List] returns. Empty fields match everything.
type ParkedFilter struct {
	Consumer string
	Entity   string
	Reason   string // "gap", "blocked" or "failed"
	Limit    int    // 1 to 10,000; 0 means 100
}

const maxListed = 10_000

// List returns parked messages, ordered by consumer, entity and position. It
// returns [ErrInvalidOption] or the database's error.
func (o *Operator) List(ctx context.Context, filter ParkedFilter) ([]ParkedMessage, error) {
	if filter.Limit == 0 {
		filter.Limit = 100
	}
	if filter.Limit < 1 || filter.Limit > maxListed {
		return nil, fmt.Errorf("%w: Limit: %d is not 1 to %d", ErrInvalidOption, filter.Limit, maxListed)
	}
	switch filter.Reason {
	case "", reasonGap, reasonBlocked, reasonFailed:
	default:
		return nil, fmt.Errorf("%w: Reason: %q is not %q, %q or %q", ErrInvalidOption, filter.Reason, reasonGap, reasonBlocked, reasonFailed)
	}
	query, args := o.sequence.queries.list+"WHERE 1 = 1", []any(nil)
	for column, value := range map[string]string{
		"p.consumer_name": storedKey(filter.Consumer), "p.entity": storedKey(filter.Entity), "p.reason": filter.Reason,
	} {
		if value != "" {
			query += " AND " + column + " = ?"
			args = append(args, value)
		}
	}
	query += " ORDER BY p.consumer_name, p.entity, p.epoch, p.seq LIMIT " + strconv.Itoa(filter.Limit)
	return readParked(o.sequence.db.QueryContext(ctx, o.sequence.config.dialect.Rebind(query), args...))
}

func readParked(rows *sql.Rows, err error) ([]ParkedMessage, error) {
	if err != nil {
		return nil, fmt.Errorf("ordering: list parked messages: %w", err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	var listed []ParkedMessage
	for rows.Next() {
		var (
			m             ParkedMessage
			uuid, fields  []byte
			text, blocked sql.NullString
			parkedAt      int64
			state         string
		)
		if err := rows.Scan(&m.Consumer, &m.Entity, &m.Epoch, &m.Seq, &uuid, &fields, &m.Payload, &m.Reason, &text, &m.Attempts, &parkedAt,
			&m.EntityLast.Epoch, &m.EntityLast.Seq, &state, &blocked); err != nil {
			return nil, fmt.Errorf("ordering: list parked messages: %w", err)
		}
		m.UUID, m.Error, m.ParkedAt = string(uuid), text.String, fromUnixMicro(parkedAt)
		if state == stateBlocked {
			m.EntityBlocked = blocked.String
		}
		if m.Metadata, err = metadata.Decode(fields); err != nil {
			return nil, fmt.Errorf("ordering: list parked messages: %w", err)
		}
		listed = append(listed, m)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("ordering: list parked messages: %w", err)
	}
	return listed, nil
}

var hashedKey = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// storedKey is EncodeKey for a key that may be encoded already.
func storedKey(key string) string {
	if hashedKey.MatchString(key) {
		return key
	}
	return sqldb.EncodeKey(key)
}

// OperatorAction is what a method of [Operator] has done.
type OperatorAction struct {
	Consumer, Entity string
	Unblocked        string   // why the entity was blocked; empty if it was not
	Before, After    Position // the entity's last position

	// Deleted are the messages that are gone: nothing else keeps them.
	Deleted []ParkedMessage
}

// Retry unblocks an entity: its messages get new attempts and may wait for a gap
// as long again as [Bounds] say. It returns [ErrNoEntity], [ErrNotBlocked] or the
// database's error.
func (o *Operator) Retry(ctx context.Context, consumer, entity string) (OperatorAction, error) {
	return o.act(ctx, "retry", consumer, entity, func(t *sequenceTx, _ *OperatorAction) error {
		if t.state != stateBlocked {
			return ErrNotBlocked
		}
		return t.renew(ctx)
	})
}

// Skip goes on after what holds an entity up, and unblocks it: a message that
// failed is deleted and counts as processed; a gap before the lowest parked
// message is given up. What was missing is stale if it comes later. If there is
// neither, it only unblocks the entity.
//
// It returns [ErrNoEntity], [ErrNotParked] if nothing is parked behind the
// entity's last event, [ErrNotBlocked] if the next message can be released
// anyway, or the database's error.
func (o *Operator) Skip(ctx context.Context, consumer, entity string) (OperatorAction, error) {
	return o.act(ctx, "skip", consumer, entity, func(t *sequenceTx, action *OperatorAction) error {
		lowest, isGap, err := t.gap(ctx)
		if err != nil {
			return err
		}
		if lowest == (Position{}) {
			return ErrNotParked
		}
		if isGap {
			t.last, t.fingerprint = Position{lowest.Epoch, lowest.Seq - 1}, nil
			return t.renew(ctx)
		}
		if t.state != stateBlocked {
			return ErrNotBlocked
		}
		next, err := t.find(ctx, lowest)
		if err != nil || next.Reason != reasonFailed {
			return errors.Join(err, t.renew(ctx))
		}
		if err := t.drop(ctx, next, action); err != nil {
			return err
		}
		t.last, t.fingerprint = lowest, nil
		return t.renew(ctx)
	})
}

// Drop deletes one parked message, as if it had never come. If it is the one that
// its entity is blocked for, the entity is unblocked and waits for another message
// with that position, which needs an idempotency key of its own.
//
// It returns [ErrNoEntity], [ErrNotParked] or the database's error.
func (o *Operator) Drop(ctx context.Context, consumer, entity string, at Position) (OperatorAction, error) {
	return o.act(ctx, "drop", consumer, entity, func(t *sequenceTx, action *OperatorAction) error {
		found, err := t.find(ctx, at)
		if err != nil {
			return err
		}
		if err := t.drop(ctx, found, action); err != nil {
			return err
		}
		if t.state == stateBlocked && found.Reason == reasonFailed {
			return t.renew(ctx)
		}
		return nil
	})
}

// act locks the entity, lets do change it, and commits.
func (o *Operator) act(ctx context.Context, name, consumer, entity string, do func(*sequenceTx, *OperatorAction) error) (OperatorAction, error) {
	fail := func(err error) (OperatorAction, error) {
		return OperatorAction{}, fmt.Errorf("ordering: %s: consumer %q, entity %q: %w", name, consumer, entity, err)
	}
	tx, err := o.sequence.db.BeginTx(ctx, nil)
	if err != nil {
		return fail(err)
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	t := &sequenceTx{Sequence: o.sequence, tx: tx, consumer: storedKey(consumer), entity: storedKey(entity)}
	if _, err := tx.ExecContext(ctx, t.queries.touch, t.consumer, t.entity); err != nil {
		return fail(err)
	}
	found, err := t.lock(ctx)
	if err != nil {
		return fail(err)
	}
	if !found {
		return fail(ErrNoEntity)
	}
	action := OperatorAction{Consumer: t.consumer, Entity: t.entity, Before: t.last}
	wasBlocked, why := t.state == stateBlocked, t.blockedReason.String
	if err := do(t, &action); err != nil {
		return fail(err)
	}
	t.changed = true
	if err := t.save(ctx); err != nil {
		return fail(err)
	}
	action.After = t.last
	if wasBlocked && t.state == stateOpen {
		action.Unblocked = why
	}
	if err := tx.Commit(); err != nil {
		return fail(fmt.Errorf("commit, whose outcome is unknown: %w", err))
	}
	return action, nil
}

// renew unblocks the entity and gives its messages new attempts and time.
func (t *sequenceTx) renew(ctx context.Context) error {
	t.state, t.blockedReason = stateOpen, sql.NullString{}
	_, err := t.tx.ExecContext(ctx, t.queries.parkedAt, t.consumer, t.entity)
	return err
}

func (t *sequenceTx) find(ctx context.Context, at Position) (ParkedMessage, error) {
	query := t.queries.list + "WHERE p.consumer_name = ? AND p.entity = ? AND p.epoch = ? AND p.seq = ?"
	found, err := readParked(t.tx.QueryContext(ctx, t.config.dialect.Rebind(query), t.consumer, t.entity, at.Epoch, at.Seq))
	if err != nil {
		return ParkedMessage{}, err
	}
	if len(found) == 0 {
		return ParkedMessage{}, ErrNotParked
	}
	return found[0], nil
}

func (t *sequenceTx) drop(ctx context.Context, m ParkedMessage, action *OperatorAction) error {
	_, err := t.tx.ExecContext(ctx, t.queries.unparkRange, t.consumer, t.entity, m.Epoch, m.Seq, m.Seq)
	t.parked--
	action.Deleted = append(action.Deleted, m)
	return err
}
