package ordering

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [NewSequence].
const (
	DefaultSequencesTable  = "entity_sequences"
	DefaultParkedTable     = "parked_messages"
	DefaultReleaseBatch    = 100
	DefaultReleaseAttempts = 5
	DefaultParkedPerEntity = 10_000
	DefaultParkedTotal     = 100_000
	DefaultParkedAge       = 24 * time.Hour
	maxReleaseBatch        = 10_000
)

// Position is a place in the sequence of an entity's events.
type Position struct {
	// Epoch grows when the entity is created anew: 0 for those that never are.
	Epoch int64

	// Seq is 1 for the first event of an epoch and grows by 1 with each one.
	Seq int64
}

func (p Position) String() string { return fmt.Sprintf("%d/%d", p.Epoch, p.Seq) }

// follows reports whether p is what comes after last: the next event, or the
// first one of a later epoch.
func (p Position) follows(last Position) bool {
	return p.Epoch == last.Epoch && p.Seq-1 == last.Seq || p.Epoch > last.Epoch && p.Seq == 1
}

func (p Position) before(other Position) bool {
	return p.Epoch < other.Epoch || p.Epoch == other.Epoch && p.Seq < other.Seq
}

// SequencedEvent is one event of an entity as a consumer sees it.
type SequencedEvent struct {
	Consumer string
	Entity   string
	Position

	// Fingerprint identifies the event's content, at most 255 bytes, so that the
	// same position with other content is noticed. Nil switches the check off.
	Fingerprint []byte
}

// SequenceError says what is wrong with an event's place in its sequence. It
// matches, with errors.Is, its Kind and what it wraps. Nothing has changed when
// it is returned.
type SequenceError struct {
	Kind     error // ErrInvalidSequence, ErrGap, ErrSequenceConflict, ErrParkedFull or ErrConsumerStopped
	Consumer string
	Entity   string
	At       Position // of the event
	Last     Position // what the consumer has processed of the entity
	Err      error    // the cause, if there is one
}

func (e *SequenceError) Error() string {
	text := fmt.Sprintf("%v: consumer %q, entity %q, event %v after %v", e.Kind, e.Consumer, e.Entity, e.At, e.Last)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns Kind and Err.
func (e *SequenceError) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

// StartPolicy says where the sequence of an entity begins for a consumer that
// has not seen it yet: [RequireFirst], [AcceptFirstSeen] or [Baseline].
type StartPolicy struct {
	last func(ctx context.Context, tx *sql.Tx, event SequencedEvent) (Position, error)
}

// RequireFirst begins with sequence number 1: anything higher is a gap.
func RequireFirst() StartPolicy {
	return StartPolicy{func(context.Context, *sql.Tx, SequencedEvent) (Position, error) { return Position{}, nil }}
}

// AcceptFirstSeen begins with whatever event comes first. What is older and comes
// later is stale.
func AcceptFirstSeen() StartPolicy {
	return StartPolicy{func(_ context.Context, _ *sql.Tx, event SequencedEvent) (Position, error) {
		return Position{event.Epoch, event.Seq - 1}, nil
	}}
}

// Baseline begins after the position that last returns: the one of the entity's
// state that the consumer has from elsewhere, a snapshot for example. It is called
// in the handler's transaction and must use tx for what it reads. Its error is
// returned as it is.
func Baseline(last func(ctx context.Context, tx *sql.Tx, entity string) (Position, error)) StartPolicy {
	if last == nil {
		return StartPolicy{}
	}
	return StartPolicy{func(ctx context.Context, tx *sql.Tx, event SequencedEvent) (Position, error) {
		return last(ctx, tx, event.Entity)
	}}
}

// GapPolicy says what becomes of an event whose predecessors are missing.
type GapPolicy uint8

const (
	// Park stores the event in the handler's transaction and acknowledges it. It
	// is processed once its predecessors have been, by whatever instance.
	Park GapPolicy = iota + 1
	// Reject returns ErrGap: the message is tried again and then goes to the
	// poison queue. Where one entity's events come through a shard one at a time,
	// the predecessor may be behind the message, so that trying again is in vain.
	Reject
)

// BreachPolicy says what is done about a gap when the [Bounds] are reached.
type BreachPolicy uint8

const (
	// BlockEntity keeps the entity's events parked until an [Operator] acts.
	BlockEntity BreachPolicy = iota + 1
	// SkipGap goes on with the lowest parked event. What was missing is stale if
	// it comes later.
	SkipGap
	// StopConsumer returns ErrConsumerStopped for each event that would have to be
	// parked: its shard stands still until there is room.
	StopConsumer
)

// Bounds limit what is parked for one consumer. 0 means the default.
type Bounds struct {
	// PerEntity is how many parked messages of one entity reach the bound. The
	// default is DefaultParkedPerEntity, but not more than Total.
	PerEntity int

	// Total is the same for all entities together. It is counted without a lock,
	// so it may be exceeded by one for each transaction that parks at the same
	// time. The default is DefaultParkedTotal.
	Total int

	// Age is how long a message may wait for a gap, by the database's clock. It is
	// looked at when another message of the entity is parked and by the releaser.
	// The default is DefaultParkedAge.
	Age time.Duration
}

// SequenceOption configures [NewSequence] and, where it says so, [NewOperator].
type SequenceOption interface{ applySequence(*sequenceConfig) }

type sequenceOptionFunc func(*sequenceConfig)

func (f sequenceOptionFunc) applySequence(c *sequenceConfig) { f(c) }

type sequenceConfig struct {
	dialect Dialect
	sequenceTables
	start    StartPolicy
	gap      GapPolicy
	bounds   Bounds
	breach   BreachPolicy
	batch    int
	attempts int
}

type sequenceTables struct{ sequences, parked string }

var defaultSequenceTables = sequenceTables{DefaultSequencesTable, DefaultParkedTable}

func (t sequenceTables) validate() error {
	err := errors.Join(sqldb.CheckTable("WithSequenceTables", t.sequences), sqldb.CheckTable("WithSequenceTables", t.parked))
	if t.sequences == t.parked {
		err = errors.Join(err, fmt.Errorf("WithSequenceTables: both tables are %q", t.parked))
	}
	return err
}

// SequenceTablesOption is what [WithSequenceTables] returns.
type SequenceTablesOption struct{ tables sequenceTables }

func (o SequenceTablesOption) apply(c *versionsConfig)         { c.sequenceTables = o.tables }
func (o SequenceTablesOption) applySequence(c *sequenceConfig) { c.sequenceTables = o.tables }

// WithSequenceTables sets the names of the two tables, instead of
// [DefaultSequencesTable] and [DefaultParkedTable], as [WithVersionsTable] does.
// It is for [Migrate], [Schema], [NewSequence] and [NewOperator].
func WithSequenceTables(sequences, parked string) SequenceTablesOption {
	return SequenceTablesOption{sequenceTables{sequences, parked}}
}

// WithStart sets where sequences begin. The default is RequireFirst.
func WithStart(policy StartPolicy) SequenceOption {
	return sequenceOptionFunc(func(c *sequenceConfig) { c.start = policy })
}

// WithGap sets what becomes of an event whose predecessors are missing. The
// default is Park.
//
// There is no policy that keeps a message waiting in memory: both brokers of this
// module deliver an entity's events one at a time, so that the predecessor may be
// behind the message that waits for it.
func WithGap(policy GapPolicy) SequenceOption {
	return sequenceOptionFunc(func(c *sequenceConfig) { c.gap = policy })
}

// WithBounds limits what is parked and says what is done then. The default policy
// is BlockEntity.
//
// While as many messages are parked as the bounds allow, an event that would have
// to be parked as well is ErrParkedFull (under StopConsumer ErrConsumerStopped);
// under SkipGap that happens only to events of blocked entities.
func WithBounds(bounds Bounds, breach BreachPolicy) SequenceOption {
	return sequenceOptionFunc(func(c *sequenceConfig) { c.bounds, c.breach = bounds, breach })
}

// WithReleaseBatch sets how many parked messages are released in one transaction
// at most, instead of [DefaultReleaseBatch]: 1 to 10,000.
func WithReleaseBatch(n int) SequenceOption {
	return sequenceOptionFunc(func(c *sequenceConfig) { c.batch = n })
}

// WithReleaseAttempts sets how many times a parked message is tried before it
// counts as failed and its entity is blocked, instead of
// [DefaultReleaseAttempts]: 1 or more. Attempts follow each other with the next
// messages of the entity and the passes of the releaser.
func WithReleaseAttempts(n int) SequenceOption {
	return sequenceOptionFunc(func(c *sequenceConfig) { c.attempts = n })
}

func newSequenceConfig(dialect Dialect, opts []SequenceOption) (*sequenceConfig, error) {
	cfg := &sequenceConfig{
		dialect: dialect, sequenceTables: defaultSequenceTables, start: RequireFirst(), gap: Park,
		breach: BlockEntity, batch: DefaultReleaseBatch, attempts: DefaultReleaseAttempts,
	}
	for _, opt := range opts {
		opt.applySequence(cfg)
	}
	if cfg.bounds.Total == 0 {
		cfg.bounds.Total = DefaultParkedTotal
	}
	if cfg.bounds.PerEntity == 0 {
		cfg.bounds.PerEntity = min(DefaultParkedPerEntity, cfg.bounds.Total)
	}
	if cfg.bounds.Age == 0 {
		cfg.bounds.Age = DefaultParkedAge
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	return cfg, nil
}

func (c *sequenceConfig) validate() error {
	errs := []error{c.dialect.Validate(), c.sequenceTables.validate()}
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.start.last != nil, "WithStart: no policy")
	check(c.gap == Park || c.gap == Reject, "WithGap: unknown policy %d", c.gap)
	check(c.breach >= BlockEntity && c.breach <= StopConsumer, "WithBounds: unknown policy %d", c.breach)
	check(c.bounds.PerEntity > 0, "WithBounds: PerEntity is %d", c.bounds.PerEntity)
	check(c.bounds.Total >= c.bounds.PerEntity, "WithBounds: Total, %d, is under PerEntity, %d", c.bounds.Total, c.bounds.PerEntity)
	check(c.bounds.Age >= time.Millisecond, "WithBounds: Age is %v, under the least, 1ms", c.bounds.Age)
	check(c.batch >= 1 && c.batch <= maxReleaseBatch, "WithReleaseBatch: %d is not 1 to %d", c.batch, maxReleaseBatch)
	check(c.attempts >= 1, "WithReleaseAttempts: %d is under the least, 1", c.attempts)
	return errors.Join(errs...)
}

// Sequence processes the events of each entity strictly in order, in the
// transactions of their handlers, and keeps those that come too early. It is safe
// for concurrent use, also by several processes on one database.
type Sequence struct {
	db      *sql.DB
	config  *sequenceConfig
	queries sequenceQueries
	advance sqldb.Statement
}

// NewSequence returns the sequences that are kept in db, the database of the
// handlers' transactions. It checks that the tables are there: see [Migrate] and
// [Schema]. ctx bounds that.
//
// It returns [ErrInvalidOption], [ErrSchema], which names what is missing and
// how to create it, or the error of a database that does not answer.
func NewSequence(ctx context.Context, db *sql.DB, dialect Dialect, opts ...SequenceOption) (*Sequence, error) {
	cfg, err := newSequenceConfig(dialect, opts)
	if db == nil {
		err = errors.Join(fmt.Errorf("%w: db is nil", ErrInvalidOption), err)
	}
	if err != nil {
		return nil, err
	}
	if err := sqldb.Ping(ctx, db); err != nil {
		return nil, fmt.Errorf("ordering: %w", err)
	}
	if err := errors.Join(
		sqldb.CheckColumns(ctx, db, dialect, cfg.sequences, schemaHint,
			"consumer_name", "entity", "epoch", "last_seq", "fingerprint", "state", "blocked_reason", "parked", "updated_at"),
		sqldb.CheckColumns(ctx, db, dialect, cfg.parked, schemaHint,
			"consumer_name", "entity", "epoch", "seq", "uuid", "metadata", "payload", "fingerprint", "reason", "error", "attempts", "parked_at"),
	); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSchema, err)
	}
	s := &Sequence{db: db, config: cfg, queries: newSequenceQueries(cfg)}
	s.advance.Text = s.queries.advance
	if err := sqldb.Prepare(ctx, db, dialect, &s.advance); err != nil {
		return nil, fmt.Errorf("ordering: %w", err)
	}
	return s, nil
}

// SequencedDelivery is one event with its message, for [Sequence.ProcessTx].
type SequencedDelivery struct {
	Event   SequencedEvent
	Message *message.Message

	// Handle is the handler: it is called for Message, when it is the next one,
	// and then for the parked messages that follow it. Those have the UUID,
	// metadata and payload with which they were parked, and ctx as their context.
	Handle func(*message.Message) error

	// Failure, if it is not nil, is why the message's attempts are used up: it is
	// parked as failed, instead of handled, and its entity blocked.
	Failure error

	// KeepParked leaves parked messages to a later transaction.
	KeepParked bool
}

// SequenceOutcome says what became of an event.
type SequenceOutcome uint8

const (
	// InOrder: the event was the next one and its handler returned nil.
	InOrder SequenceOutcome = iota + 1
	// OutOfDate: the consumer has processed the position already, or it is parked.
	OutOfDate
	// ParkedEarly: the event is parked until its predecessors were processed.
	ParkedEarly
	// ParkedBlocked: the event is parked because its entity is blocked.
	ParkedBlocked
	// ParkedFailed: the event is parked as failed and its entity is blocked.
	ParkedFailed
)

// SequenceResult is what became of an event and what else happened with it. It is
// true only if the transaction commits.
type SequenceResult struct {
	Outcome SequenceOutcome // 0 for ReleaseTx
	Notices []SequenceNotice
}

// SequenceNotice is something that happened beside the event itself.
type SequenceNotice struct {
	Kind NoticeKind
	UUID string   // of the parked message, if it is about one
	At   Position // of that message; for Skipped and Reset, the new last position
	Err  error    // why; nil for Released, and for a Reset that deleted nothing
}

// NoticeKind says what a [SequenceNotice] is about.
type NoticeKind uint8

const (
	// Released: a parked message was processed.
	Released NoticeKind = iota + 1
	// ReleaseFailed: an attempt with a parked message failed; others follow.
	ReleaseFailed
	// Blocked: the entity is blocked from now on.
	Blocked
	// Skipped: a gap was given up.
	Skipped
	// Reset: a new epoch has begun. What was parked of older ones is deleted.
	Reset
)

func (r *SequenceResult) notice(n SequenceNotice) { r.Notices = append(r.Notices, n) }
