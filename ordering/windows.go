package ordering

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// WindowResult says what a number tells about its message.
type WindowResult uint8

const (
	// Accepted: the number was not seen before. It is recorded.
	Accepted WindowResult = iota + 1
	// AcceptedAhead is Accepted for a number before which others are missing, under
	// [AcceptGaps]. Each of them is accepted once, if it comes while the window
	// still reaches it.
	AcceptedAhead
	// Replayed: the number was seen before, so this is a copy of a message that was
	// processed.
	Replayed
	// Unknown: the number is below the window, or of an earlier epoch and sent
	// again by the present producer. It tells nothing; the message's key decides.
	Unknown
)

// ProducerGapPolicy says what becomes of a message before which others of its
// stream are missing: see [WithProducerGaps].
type ProducerGapPolicy uint8

const (
	// AcceptGaps processes a message although earlier ones of its stream are
	// missing, and reports it as [AcceptedAhead].
	AcceptGaps ProducerGapPolicy = iota
	// RefuseGaps returns a [ProducerGapError] instead.
	RefuseGaps
)

// FencedError reports a message of a producer that was replaced by one of the
// same name with a later epoch. Nothing was changed.
type FencedError struct {
	Consumer string
	Producer string
	Epoch    uint32 // of the message
	Current  uint32 // what the consumer has seen of the stream
}

func (e *FencedError) Error() string {
	return fmt.Sprintf("ordering: producer %q is fenced: it sends with epoch %d, consumer %q has seen %d", e.Producer, e.Epoch, e.Consumer, e.Current)
}

// Is reports whether target is ErrFenced.
func (e *FencedError) Is(target error) bool { return target == ErrFenced }

// ProducerGapError reports a message under [RefuseGaps] before which others of
// its stream are missing. Nothing was changed.
type ProducerGapError struct {
	Consumer string
	Producer string
	Stream   string
	Next     uint64 // the number that must come next
	Got      uint64
}

func (e *ProducerGapError) Error() string {
	return fmt.Sprintf("ordering: consumer %q: message %d of producer %q, stream %q, comes before message %d",
		e.Consumer, e.Got, e.Producer, e.Stream, e.Next)
}

// Is reports whether target is ErrProducerGap.
func (e *ProducerGapError) Is(target error) bool { return target == ErrProducerGap }

// WindowsOption configures [Windows].
type WindowsOption interface{ applyWindows(*windowsConfig) }

type windowsOptionFunc func(*windowsConfig)

func (f windowsOptionFunc) applyWindows(c *windowsConfig) { f(c) }

type windowsConfig struct {
	dialect Dialect
	tables  producerTables
	gaps    ProducerGapPolicy
}

// WithProducerGaps sets what becomes of a message before which others of its
// stream are missing, instead of [AcceptGaps]. A number is missing for good when
// its message was never published: when Publish failed and was not repeated, and
// where numbers are stored with outputs, when a handler's attempt was rolled
// back. [RefuseGaps] is for streams where that does not happen, or where a person
// is to look.
func WithProducerGaps(policy ProducerGapPolicy) WindowsOption {
	return windowsOptionFunc(func(c *windowsConfig) { c.gaps = policy })
}

// Windows remembers, for each consumer and each stream of a [Producer], the epoch
// and the highest [WindowSize] numbers that the consumer has processed. It is
// safe for concurrent use.
//
// A consumer learns of an epoch stream by stream: until it has processed the
// first message of a producer's successor in a stream, it accepts what the
// producer before still publishes there.
//
// The row of a stream that sends nothing any more may be deleted, by its
// updated_at: the stream then begins anew, and copies of its old messages are
// left to the message's key.
type Windows struct {
	config  windowsConfig
	insert  sqldb.Statement
	swap    sqldb.Statement
	lock    string
	set     string
	guesses guesses
}

// NewWindows returns the windows that are kept in db, the database of the
// handlers' transactions. It checks that the table is there: see [Migrate] and
// [Schema]. ctx bounds that.
//
// It returns [ErrInvalidOption], [ErrSchema], or the error of a database that
// does not answer.
func NewWindows(ctx context.Context, db *sql.DB, dialect Dialect, opts ...WindowsOption) (*Windows, error) {
	cfg := windowsConfig{dialect: dialect, tables: defaultProducerTables}
	for _, opt := range opts {
		opt.applyWindows(&cfg)
	}
	errs := []error{dialect.Validate(), cfg.tables.validate()}
	if cfg.gaps > RefuseGaps {
		errs = append(errs, fmt.Errorf("WithProducerGaps: policy %d is unknown", cfg.gaps))
	}
	if db == nil {
		errs = append(errs, errors.New("db is nil"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if err := checkTable(ctx, db, dialect, cfg.tables.streams,
		"consumer_name", "producer", "stream", "epoch", "highest", "seen", "updated_at"); err != nil {
		return nil, err
	}
	w := &Windows{config: cfg, guesses: guesses{entries: map[streamID]window{}}}
	w.prepare()
	if err := sqldb.Prepare(ctx, db, dialect, &w.insert, &w.swap); err != nil {
		return nil, fmt.Errorf("ordering: %w", err)
	}
	return w, nil
}

func (w *Windows) prepare() {
	dialect := w.config.dialect
	table := dialect.Quote(w.config.tables.streams)
	const ofStream = " WHERE consumer_name = ? AND producer = ? AND stream = ?"
	set := "UPDATE " + table + " SET epoch = ?, highest = ?, seen = ?, updated_at = " + dialect.Now() + ofStream
	insert := "INSERT INTO " + table + " (consumer_name, producer, stream, epoch, highest, seen, updated_at) VALUES (?, ?, ?, ?, ?, ?, " + dialect.Now() + ")"
	lock := "SELECT epoch, highest, seen FROM " + table + ofStream
	if dialect == MySQL {
		// See versionsConfig.queries and Versions.applied: the mark tells a row that
		// was there.
		insert += " ON DUPLICATE KEY UPDATE epoch = epoch + 0 * LAST_INSERT_ID(1)"
	} else {
		insert += " ON CONFLICT (consumer_name, producer, stream) DO NOTHING"
	}
	if dialect != SQLite { // the insert or update before it has locked the database
		lock += " FOR UPDATE"
	}
	w.insert.Text = dialect.Rebind(insert)
	w.swap.Text = dialect.Rebind(set + " AND epoch = ? AND highest = ? AND seen = ?")
	w.lock = dialect.Rebind(lock)
	w.set = dialect.Rebind(set)
}

// streamID is the primary key of a row, as it is stored.
type streamID struct{ consumer, producer, stream string }

func (id streamID) args(before ...any) []any {
	return append(before, id.consumer, id.producer, id.stream)
}

// ApplyTx records in tx that consumer processes the message with stamp. Until tx
// ends no other transaction can record a message of this stream. It neither
// commits nor rolls back.
//
// It takes one statement as long as this process alone handles the stream, and
// for the first message of one; up to three when another process has handled it
// since, or a transaction was rolled back.
//
// It returns a [FencedError], a [ProducerGapError], or the database's error.
func (w *Windows) ApplyTx(ctx context.Context, tx *sql.Tx, consumer string, stamp Stamp) (WindowResult, error) {
	id := streamID{sqldb.EncodeKey(consumer), sqldb.EncodeKey(stamp.Producer), sqldb.EncodeKey(stamp.Stream)}
	result, err := w.apply(ctx, tx, id, stamp)
	var fenced *FencedError
	var gap *ProducerGapError
	switch {
	case errors.As(err, &fenced):
		fenced.Consumer, fenced.Producer = consumer, stamp.Producer
	case errors.As(err, &gap):
		gap.Consumer, gap.Producer, gap.Stream = consumer, stamp.Producer, stamp.Stream
	case err != nil:
		err = fmt.Errorf("ordering: producer window: %w", err)
	}
	return result, err
}

func (w *Windows) apply(ctx context.Context, tx *sql.Tx, id streamID, stamp Stamp) (WindowResult, error) {
	guess, known := w.guesses.get(id)
	if known {
		// What this process knows may be outdated, so it is only a guess: the
		// statement changes the row if the guess is right. A guess never decides
		// against a message.
		after, result, err := w.decide(guess, stamp)
		if err == nil && after != guess {
			done, err := w.trySwap(ctx, tx, id, guess, after)
			if done || err != nil {
				return result, err
			}
		}
	} else if inserted, err := w.tryInsert(ctx, tx, id, stamp); inserted || err != nil {
		return Accepted, err
	}
	before, err := w.read(ctx, tx, id)
	if errors.Is(err, sql.ErrNoRows) { // rolled back, or deleted, since it was known
		if inserted, err := w.tryInsert(ctx, tx, id, stamp); inserted || err != nil {
			return Accepted, err
		}
		before, err = w.read(ctx, tx, id)
	}
	if err != nil {
		return 0, err
	}
	after, result, err := w.decide(before, stamp)
	if err == nil && after != before {
		_, err = tx.ExecContext(ctx, w.set, id.args(after.columns()...)...)
	}
	if err != nil {
		return 0, err
	}
	w.guesses.set(id, after)
	return result, nil
}

// read returns the row and locks it.
func (w *Windows) read(ctx context.Context, tx *sql.Tx, id streamID) (window, error) {
	var epoch, highest int64
	var seen []byte
	if err := tx.QueryRowContext(ctx, w.lock, id.args()...).Scan(&epoch, &highest, &seen); err != nil {
		return window{}, err
	}
	return parseWindow(epoch, highest, seen)
}

// decide is the whole rule, for a stream that has a row.
func (w *Windows) decide(before window, stamp Stamp) (after window, result WindowResult, err error) {
	next := before.highest + 1
	switch {
	case max(stamp.Epoch, stamp.Sender) < before.epoch:
		return before, 0, &FencedError{Epoch: stamp.Epoch, Current: before.epoch}
	case stamp.Epoch < before.epoch:
		return before, Unknown, nil // the window of that epoch is gone
	case stamp.Epoch > before.epoch:
		next = 1
		after, result = newWindow(stamp.Epoch, stamp.Sequence), Accepted
		if stamp.Sequence > next {
			result = AcceptedAhead
		}
	default:
		after, result = before.admit(stamp.Sequence)
	}
	if result == AcceptedAhead && w.config.gaps == RefuseGaps {
		return before, 0, &ProducerGapError{Next: next, Got: stamp.Sequence}
	}
	return after, result, nil
}

func (w *Windows) trySwap(ctx context.Context, tx *sql.Tx, id streamID, before, after window) (bool, error) {
	result, err := w.swap.ExecTx(ctx, tx, append(id.args(after.columns()...), before.columns()...)...)
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	if err != nil || rows == 0 {
		return false, err
	}
	w.guesses.set(id, after)
	return true, nil
}

func (w *Windows) tryInsert(ctx context.Context, tx *sql.Tx, id streamID, stamp Stamp) (bool, error) {
	first := newWindow(stamp.Epoch, stamp.Sequence)
	result, err := w.insert.ExecTx(ctx, tx, append(id.args(), first.columns()...)...)
	if err != nil {
		return false, err
	}
	inserted, err := (&Versions{dialect: w.config.dialect}).applied(result)
	if inserted {
		w.guesses.set(id, first)
	}
	return inserted, err
}

// guesses are the windows as this process has last written them, committed or
// not.
type guesses struct {
	mu      sync.Mutex // guards entries
	entries map[streamID]window
}

// maxGuesses bounds the memory to about 6 MB.
const maxGuesses = 1 << 14

func (g *guesses) get(id streamID) (window, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	w, ok := g.entries[id]
	return w, ok
}

func (g *guesses) set(id streamID, w window) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, known := g.entries[id]; !known && len(g.entries) >= maxGuesses {
		for other := range g.entries { // any: the order of a map is random
			delete(g.entries, other)
			break
		}
	}
	g.entries[id] = w
}
