package ordering

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/internal/text"
)

// sequenceTx is an entity's row, locked, and what is done under that lock.
type sequenceTx struct {
	*Sequence
	tx               *sql.Tx
	consumer, entity string // as they are stored
	result           SequenceResult

	last          Position
	fingerprint   []byte // of the event at last
	state         string
	blockedReason sql.NullString
	parked        int // messages, of all epochs
	changed       bool
}

// ProcessTx does with an event what its place in the sequence demands, under a
// lock on the entity's row that lasts until tx ends:
//
//   - The position was processed or is parked: OutOfDate. With other content, an
//     ErrSequenceConflict; of the processed ones only the last is compared.
//   - The entity is blocked: parked.
//   - It is the next event, or the first one of a later epoch: Handle is called.
//     Then parked events that follow are released, up to the limit of
//     [WithReleaseBatch]; the rest is left to [Sequence.ReleaseTx] and to the next
//     event of the entity.
//   - Predecessors are missing: the gap policy decides.
//
// A released message whose Handle fails changes nothing but its attempts: it
// stays parked. After the attempts of [WithReleaseAttempts], or an error that
// wraps ErrPermanent, the entity is blocked.
//
// It neither commits nor rolls back. After an error, a [SequenceError], one of
// Handle or of the database, tx must be rolled back.
func (s *Sequence) ProcessTx(ctx context.Context, tx *sql.Tx, d SequencedDelivery) (SequenceResult, error) {
	e := d.Event
	if e.Epoch < 0 || e.Seq < 1 {
		return SequenceResult{}, &SequenceError{Kind: ErrInvalidSequence, Consumer: e.Consumer, Entity: e.Entity, At: e.Position}
	}
	t := &sequenceTx{Sequence: s, tx: tx, consumer: sqldb.EncodeKey(e.Consumer), entity: sqldb.EncodeKey(e.Entity)}
	if d.Failure == nil {
		advanced, err := t.advance(ctx, e)
		if err != nil {
			return SequenceResult{}, fmt.Errorf("ordering: advance sequence: %w", err)
		}
		if advanced {
			return SequenceResult{Outcome: InOrder}, d.Handle(d.Message)
		}
	}
	found, err := t.lock(ctx)
	if err == nil && !found {
		var isFirst bool
		if isFirst, err = t.start(ctx, e, d.Failure == nil); isFirst && err == nil {
			return SequenceResult{Outcome: InOrder}, d.Handle(d.Message)
		}
	}
	if err != nil {
		return SequenceResult{}, fmt.Errorf("ordering: lock sequence: %w", err)
	}
	if err := t.admit(ctx, d); err != nil {
		return SequenceResult{}, err
	}
	if !d.KeepParked {
		if err := t.release(ctx, d.Handle); err != nil {
			return SequenceResult{}, err
		}
	}
	return t.result, t.save(ctx)
}

// advance is the whole work for an event that is next while nothing is parked.
func (t *sequenceTx) advance(ctx context.Context, e SequencedEvent) (bool, error) {
	result, err := t.Sequence.advance.ExecTx(ctx, t.tx, e.Seq, e.Fingerprint, t.consumer, t.entity, e.Epoch, e.Seq-1)
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	return rows == 1, err
}

func (t *sequenceTx) lock(ctx context.Context) (found bool, err error) {
	err = t.tx.QueryRowContext(ctx, t.queries.lock, t.consumer, t.entity).
		Scan(&t.last.Epoch, &t.last.Seq, &t.fingerprint, &t.state, &t.blockedReason, &t.parked)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

// start creates the entity's row. It reports true if that made e, the next event,
// the last one.
func (t *sequenceTx) start(ctx context.Context, e SequencedEvent, mayAdvance bool) (bool, error) {
	last, err := t.config.start.last(ctx, t.tx, e)
	if err != nil {
		return false, err
	}
	var fingerprint []byte
	isNext := mayAdvance && e.follows(last)
	if isNext {
		last, fingerprint = e.Position, e.Fingerprint
	}
	result, err := t.tx.ExecContext(ctx, t.queries.insert, t.consumer, t.entity, last.Epoch, last.Seq, fingerprint)
	if err != nil {
		return false, err
	}
	inserted, err := (&Versions{dialect: t.config.dialect}).applied(result) // the same insert, told apart in the same way
	if err != nil || inserted && isNext {
		return inserted, err
	}
	_, err = t.lock(ctx) // another transaction may have been first
	return false, err
}

// admit does what the event's position demands.
func (t *sequenceTx) admit(ctx context.Context, d SequencedDelivery) error {
	e := d.Event
	if !t.last.before(e.Position) {
		if e.Position == t.last && differ(e.Fingerprint, t.fingerprint) {
			return t.error(ErrSequenceConflict, e, nil)
		}
		t.result.Outcome = OutOfDate
		return nil
	}
	if t.parked > 0 {
		var fingerprint []byte
		err := t.tx.QueryRowContext(ctx, t.queries.known, t.consumer, t.entity, e.Epoch, e.Seq).Scan(&fingerprint)
		switch {
		case err == nil && differ(e.Fingerprint, fingerprint):
			return t.error(ErrSequenceConflict, e, nil)
		case err == nil:
			t.result.Outcome = OutOfDate
			return nil
		case !errors.Is(err, sql.ErrNoRows):
			return fmt.Errorf("ordering: read parked message: %w", err)
		}
	}
	switch {
	case t.state == stateBlocked:
		return t.park(ctx, d, ParkedBlocked)
	case !e.follows(t.last) && t.config.gap == Reject:
		return t.error(ErrGap, e, nil)
	case !e.follows(t.last):
		return t.park(ctx, d, ParkedEarly)
	case d.Failure != nil:
		return t.park(ctx, d, ParkedFailed)
	}
	if e.Epoch > t.last.Epoch {
		if err := t.reset(ctx, e.Epoch); err != nil {
			return err
		}
	}
	if err := d.Handle(d.Message); err != nil {
		return err
	}
	t.last, t.fingerprint, t.changed = e.Position, e.Fingerprint, true
	t.result.Outcome = InOrder
	return nil
}

func differ(a, b []byte) bool { return len(a) > 0 && len(b) > 0 && string(a) != string(b) }

func (t *sequenceTx) error(kind error, e SequencedEvent, cause error) error {
	return &SequenceError{Kind: kind, Consumer: e.Consumer, Entity: e.Entity, At: e.Position, Last: t.last, Err: cause}
}

// park stores the message. If that reaches a bound, the breach policy decides.
func (t *sequenceTx) park(ctx context.Context, d SequencedDelivery, outcome SequenceOutcome) error {
	var total int
	if err := t.tx.QueryRowContext(ctx, t.queries.total, t.consumer).Scan(&total); err != nil {
		return fmt.Errorf("ordering: count parked messages: %w", err)
	}
	bounds, breach := t.config.bounds, t.config.breach
	if t.parked >= bounds.PerEntity || total >= bounds.Total {
		_, isGap, err := t.gap(ctx)
		if err != nil {
			return err
		}
		switch {
		case t.state == stateOpen && t.parked > 0 && !isGap: // a backlog that is being released
		case breach == StopConsumer:
			return t.error(ErrConsumerStopped, d.Event, d.Failure)
		case breach != SkipGap || outcome != ParkedEarly:
			return t.error(ErrParkedFull, d.Event, d.Failure)
		}
	}
	reason := map[SequenceOutcome]string{ParkedEarly: reasonGap, ParkedBlocked: reasonBlocked, ParkedFailed: reasonFailed}[outcome]
	var cause sql.NullString
	attempts := 0
	if outcome == ParkedFailed {
		cause, attempts = errorText(d.Failure), t.config.attempts
	}
	msg, payload := d.Message, []byte(d.Message.Payload)
	if payload == nil {
		payload = []byte{} // nil would be NULL
	}
	if _, err := t.tx.ExecContext(ctx, t.queries.park, t.consumer, t.entity, d.Event.Epoch, d.Event.Seq,
		append([]byte{}, msg.UUID...), metadata.Encode(msg.Metadata), payload, d.Event.Fingerprint, reason, cause, attempts); err != nil {
		return fmt.Errorf("ordering: park message: %w", err)
	}
	t.parked++
	t.changed = true
	t.result.Outcome = outcome
	if outcome == ParkedFailed {
		t.block(SequenceNotice{UUID: msg.UUID, At: d.Event.Position, Err: d.Failure})
		return nil
	}
	why := ""
	switch {
	case t.parked >= bounds.PerEntity:
		why = fmt.Sprintf("%d of its messages are parked", t.parked)
	case total+1 >= bounds.Total:
		why = fmt.Sprintf("%d messages are parked in total", total+1)
	}
	if breach == StopConsumer && why != "" {
		return nil // the next one stops it
	}
	if why == "" && t.parked == 1 {
		return nil // it is not old
	}
	err := t.breach(ctx, why)
	if errors.Is(err, ErrConsumerStopped) {
		return t.error(ErrConsumerStopped, d.Event, nil)
	}
	return err
}

// breach applies the breach policy to a gap that reached a bound: the one that
// why names or, without a name, the age.
func (t *sequenceTx) breach(ctx context.Context, why string) error {
	if t.state != stateOpen {
		return nil
	}
	if why == "" && t.parked > 0 {
		var expired int
		if err := t.tx.QueryRowContext(ctx, t.queries.expired, t.consumer, t.entity).Scan(&expired); err != nil {
			return fmt.Errorf("ordering: read age of parked messages: %w", err)
		}
		if expired > 0 {
			why = fmt.Sprintf("a message is parked for longer than %v", t.config.bounds.Age)
		}
	}
	if why == "" {
		return nil
	}
	lowest, isGap, err := t.gap(ctx)
	if err != nil || !isGap {
		return err
	}
	cause := &SequenceError{Kind: ErrGap, Consumer: t.consumer, Entity: t.entity, At: lowest, Last: t.last, Err: errors.New(why)}
	switch t.config.breach {
	case StopConsumer:
		return ErrConsumerStopped
	case BlockEntity:
		t.block(SequenceNotice{At: lowest, Err: cause})
	case SkipGap:
		lowest.Seq--
		t.last, t.fingerprint, t.changed = lowest, nil, true
		t.result.notice(SequenceNotice{Kind: Skipped, At: lowest, Err: cause})
	}
	return nil
}

// gap returns the lowest parked position, and true if something is missing before
// it. Otherwise what is parked only waits for its release.
func (t *sequenceTx) gap(ctx context.Context) (lowest Position, isGap bool, err error) {
	err = t.tx.QueryRowContext(ctx, t.queries.lowest, t.consumer, t.entity, t.last.Epoch, t.last.Seq, t.last.Epoch).
		Scan(&lowest.Epoch, &lowest.Seq)
	if errors.Is(err, sql.ErrNoRows) {
		return lowest, false, nil
	}
	if err != nil {
		return lowest, false, fmt.Errorf("ordering: read lowest parked message: %w", err)
	}
	return lowest, !lowest.follows(t.last), nil
}

func (t *sequenceTx) block(n SequenceNotice) {
	n.Kind = Blocked
	t.state, t.blockedReason, t.changed = stateBlocked, errorText(n.Err), true
	t.result.notice(n)
}

// reset begins an epoch. What is parked of older ones is out of date.
func (t *sequenceTx) reset(ctx context.Context, epoch int64) error {
	var deletion error
	if t.parked > 0 {
		result, err := t.tx.ExecContext(ctx, t.queries.unparkOlder, t.consumer, t.entity, epoch)
		if err != nil {
			return fmt.Errorf("ordering: delete parked messages: %w", err)
		}
		deleted, err := result.RowsAffected()
		if err != nil {
			return fmt.Errorf("ordering: delete parked messages: %w", err)
		}
		if deleted > 0 {
			deletion = &SequenceError{
				Kind: ErrGap, Consumer: t.consumer, Entity: t.entity, At: Position{epoch, 1}, Last: t.last,
				Err: fmt.Errorf("%d parked messages of older epochs are deleted", deleted),
			}
		}
		t.parked -= int(deleted)
	}
	t.last, t.fingerprint, t.changed = Position{epoch, 0}, nil, true
	t.result.notice(SequenceNotice{Kind: Reset, At: t.last, Err: deletion})
	return nil
}

type parkedEvent struct {
	seq         int64
	attempts    int
	fingerprint []byte
	msg         *message.Message
}

// release processes parked messages that follow the last one. Each has a
// savepoint, so that one that fails undoes nothing else, while all that succeed
// share the transaction, and its outputs, with the message that closed the gap: a
// separate transaction could leave outputs behind that no redelivery publishes.
func (t *sequenceTx) release(ctx context.Context, handle func(*message.Message) error) error {
	for left := t.config.batch; t.state == stateOpen && t.parked > 0 && left > 0; {
		batch, err := t.batch(ctx, left)
		if err != nil {
			return fmt.Errorf("ordering: read parked messages: %w", err)
		}
		first := t.last.Seq + 1
		var failed *parkedEvent
		var failure error
		n := 0
		for _, p := range batch {
			if p.seq != t.last.Seq+1 {
				break
			}
			if failure, err = t.inSavepoint(ctx, func() error { return handle(p.msg) }); err != nil {
				return err
			}
			if failure != nil {
				failed = &p
				break
			}
			t.last.Seq, t.fingerprint, t.changed = p.seq, p.fingerprint, true
			t.result.notice(SequenceNotice{Kind: Released, UUID: p.msg.UUID, At: t.last})
			n++
		}
		if n > 0 {
			if _, err := t.tx.ExecContext(ctx, t.queries.unparkRange, t.consumer, t.entity, t.last.Epoch, first, t.last.Seq); err != nil {
				return fmt.Errorf("ordering: delete parked messages: %w", err)
			}
			t.parked -= n
			left -= n
		}
		if failed != nil {
			return t.releaseFailed(ctx, failed, failure)
		}
		if n == 0 {
			var epoch int64
			err := t.tx.QueryRowContext(ctx, t.queries.nextEpoch, t.consumer, t.entity, t.last.Epoch).Scan(&epoch)
			if errors.Is(err, sql.ErrNoRows) {
				return nil
			}
			if err == nil {
				err = t.reset(ctx, epoch)
			}
			if err != nil {
				return fmt.Errorf("ordering: read parked messages: %w", err)
			}
		}
	}
	return nil
}

func (t *sequenceTx) batch(ctx context.Context, limit int) ([]parkedEvent, error) {
	to := t.last.Seq + int64(limit)
	if to < t.last.Seq {
		to = math.MaxInt64
	}
	rows, err := t.tx.QueryContext(ctx, t.queries.batch, t.consumer, t.entity, t.last.Epoch, t.last.Seq, to)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	var batch []parkedEvent
	for rows.Next() {
		var p parkedEvent
		var uuid, fields, payload []byte
		if err := rows.Scan(&p.seq, &uuid, &fields, &payload, &p.fingerprint, &p.attempts); err != nil {
			return nil, err
		}
		p.msg = message.NewMessageWithContext(ctx, string(uuid), payload)
		if p.msg.Metadata, err = metadata.Decode(fields); err != nil {
			return nil, err
		}
		batch = append(batch, p)
	}
	return batch, rows.Err()
}

// inSavepoint undoes what work did if it fails. err says that the transaction is
// of no use any more.
func (t *sequenceTx) inSavepoint(ctx context.Context, work func() error) (failure, err error) {
	if _, err := t.tx.ExecContext(ctx, "SAVEPOINT released_message"); err != nil {
		return nil, fmt.Errorf("ordering: savepoint: %w", err)
	}
	failure = work()
	if failure == nil {
		_, failure = t.tx.ExecContext(ctx, "RELEASE SAVEPOINT released_message")
		if failure == nil {
			return nil, nil
		}
		failure = fmt.Errorf("ordering: release savepoint: %w", failure)
	}
	if ctx.Err() != nil || sqldb.Transient(failure) {
		return nil, failure // the database may have undone the whole transaction
	}
	if _, err := t.tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT released_message"); err != nil {
		return nil, errors.Join(failure, fmt.Errorf("ordering: roll back to savepoint: %w", err))
	}
	return failure, nil
}

func (t *sequenceTx) releaseFailed(ctx context.Context, p *parkedEvent, failure error) error {
	attempts := p.attempts + 1
	at := Position{t.last.Epoch, p.seq}
	reason, kind := reasonGap, ReleaseFailed
	if attempts >= t.config.attempts || errors.Is(failure, ErrPermanent) {
		reason, kind = reasonFailed, Blocked
	}
	if _, err := t.tx.ExecContext(ctx, t.queries.failed, reason, errorText(failure), attempts, t.consumer, t.entity, at.Epoch, at.Seq); err != nil {
		return fmt.Errorf("ordering: record failed attempt: %w", err)
	}
	notice := SequenceNotice{Kind: kind, UUID: p.msg.UUID, At: at, Err: failure}
	if kind == Blocked {
		t.block(notice)
	} else {
		t.result.notice(notice)
	}
	return nil
}

func (t *sequenceTx) save(ctx context.Context) error {
	if !t.changed {
		return nil
	}
	if _, err := t.tx.ExecContext(ctx, t.queries.save, t.last.Epoch, t.last.Seq, t.fingerprint, t.state, t.blockedReason, t.parked,
		t.consumer, t.entity); err != nil {
		return fmt.Errorf("ordering: save sequence: %w", err)
	}
	return nil
}

// errorText is what is stored of an error.
func errorText(err error) sql.NullString {
	if err == nil {
		return sql.NullString{}
	}
	return sql.NullString{String: text.Cut(err.Error()), Valid: true}
}

// Due returns entities of consumer, as they are stored and in that order after
// the given one, whose parked messages can be released, or that have waited too
// long for a gap: at most 100. They are for [Sequence.ReleaseTx].
//
// It reads the consumer's parked messages, so its cost grows with their number.
func (s *Sequence) Due(ctx context.Context, consumer, after string) ([]string, error) {
	query := s.queries.dueOrExpired
	if s.config.breach == StopConsumer { // that waits for an operator
		query = s.queries.due
	}
	rows, err := s.db.QueryContext(ctx, query, sqldb.EncodeKey(consumer), after)
	if err != nil {
		return nil, fmt.Errorf("ordering: find parked messages: %w", err)
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	var entities []string
	for rows.Next() {
		var entity string
		if err := rows.Scan(&entity); err != nil {
			return nil, fmt.Errorf("ordering: find parked messages: %w", err)
		}
		entities = append(entities, entity)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("ordering: find parked messages: %w", err)
	}
	return entities, nil
}

// ReleaseTx releases parked messages of an entity that [Sequence.Due] returned, as
// ProcessTx does after an event. A gap that is too old is treated as [WithBounds]
// says. The result has no notices if there was nothing to do.
func (s *Sequence) ReleaseTx(ctx context.Context, tx *sql.Tx, consumer, entity string, handle func(*message.Message) error) (SequenceResult, error) {
	t := &sequenceTx{Sequence: s, tx: tx, consumer: sqldb.EncodeKey(consumer), entity: entity}
	found, err := t.lock(ctx)
	if err != nil {
		return SequenceResult{}, fmt.Errorf("ordering: lock sequence: %w", err)
	}
	if !found {
		return SequenceResult{}, nil
	}
	if err := t.release(ctx, handle); err != nil {
		return SequenceResult{}, err
	}
	if len(t.result.Notices) == 0 && s.config.breach != StopConsumer {
		if err := t.breach(ctx, ""); err != nil {
			return SequenceResult{}, err
		}
		if err := t.release(ctx, handle); err != nil {
			return SequenceResult{}, err
		}
	}
	return t.result, t.save(ctx)
}
