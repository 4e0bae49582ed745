package middleware

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/internal/text"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Outcome says what became of a delivery.
type Outcome string

// The outcomes. Every delivery has exactly one; Retried comes in addition, once
// for each attempt that failed and was followed by another one, and so do
// ProducerGap, Released, GapSkipped, EntityBlocked and EntityReset.
const (
	// Processed: the handler returned nil and its transaction is committed.
	Processed Outcome = "processed"
	// Duplicate: the key was processed before. The message is acknowledged.
	Duplicate Outcome = "duplicate"
	// Stale: the entity has seen this version or a higher one. The message is
	// acknowledged.
	Stale Outcome = "stale"
	// Conflict: the key or version was seen with other content. The message was
	// parked; without a poison queue, returned to the broker.
	Conflict Outcome = "conflict"
	// Fenced: the message's producer was replaced by one with a later epoch (see
	// RejectReplayed). The message was parked; without a poison queue, returned to
	// the broker.
	Fenced Outcome = "fenced"
	// ProducerGap: the message was processed although earlier ones of its producer
	// are missing (see RejectReplayed).
	ProducerGap Outcome = "producer_gap"
	// Parked: the message is in the poison queue, and acknowledged.
	Parked Outcome = "parked"
	// InFlight: another delivery of the message held its key for too long. The
	// message was returned to the broker.
	InFlight Outcome = "in_flight"
	// Failed: the message was returned to the broker because of an error.
	Failed Outcome = "failed"
	// Retried: an attempt failed and the next one follows after a pause.
	Retried Outcome = "retried"
	// Deferred: the message waits in the database, for its predecessors or because
	// its entity is blocked (see Sequence). It is acknowledged.
	Deferred Outcome = "deferred"
	// Released: a deferred message was processed.
	Released Outcome = "released"
	// GapSkipped: missing events of an entity were given up.
	GapSkipped Outcome = "gap_skipped"
	// EntityBlocked: an entity waits for an operator from now on.
	EntityBlocked Outcome = "entity_blocked"
	// EntityReset: an entity has begun a new epoch. The error, if there is one,
	// says what was deleted of older ones.
	EntityReset Outcome = "entity_reset"
)

// Event tells an [Observer] what became of a delivery.
//
// Processed, Duplicate and Stale are reported when the middlewares return, before
// the Router publishes what the handler returned: when that fails, the message is
// delivered again as a duplicate.
type Event struct {
	Outcome     Outcome
	Handler     string
	Topic       string
	MessageUUID string
	Key         string        // the message's idempotency key; "" if it is not known, as for Released
	Entity      string        // of RejectStale or Sequence; before them the message's partition key; "" if there is none
	Duration    time.Duration // since the message entered the chain; for Retried, of the attempt
	Attempt     int           // 1 for the first
	Err         error         // why: nil for Processed, Duplicate, Stale, ProducerGap, Deferred and Released
}

// Observer is called for each [Event], by the goroutine of the delivery, which
// waits for it. It must be safe for concurrent use. ctx is the message's.
type Observer func(ctx context.Context, event Event)

// WithObserver calls observers, in turn, with what becomes of each delivery. It
// is the seam for metrics and logs; [LogObserver] is one.
func WithObserver(observers ...Observer) Link {
	link := Link{name: "WithObserver", rank: rankObserver, observers: observers}
	if len(observers) == 0 {
		link.err = errors.New("no observers")
	}
	for _, observe := range observers {
		if observe == nil {
			link.err = errors.New("observer is nil")
		}
	}
	return link
}

// LogObserver returns an Observer that writes one line per event to logger: with
// level debug for Processed and Released; info for Duplicate, Stale, Deferred and
// EntityReset; warn for Retried, InFlight, ProducerGap and GapSkipped; error for the
// rest, but info for Failed where the message was taken away from its handler, as by a
// close or a rebalance: its context is cancelled, and it comes again. Lines have the
// message's UUID, its key and its entity, which are ids, and the error's text, each cut
// to 1 KiB, never its payload or other metadata.
func LogObserver(logger *slog.Logger) Observer {
	levels := map[Outcome]slog.Level{
		Processed: slog.LevelDebug,
		Duplicate: slog.LevelInfo,
		Stale:     slog.LevelInfo,
		Retried:   slog.LevelWarn,
		InFlight:  slog.LevelWarn,
		Conflict:  slog.LevelError,
		Fenced:    slog.LevelError,
		Parked:    slog.LevelError,
		Failed:    slog.LevelError,

		ProducerGap:   slog.LevelWarn,
		Deferred:      slog.LevelInfo,
		Released:      slog.LevelDebug,
		GapSkipped:    slog.LevelWarn,
		EntityBlocked: slog.LevelError,
		EntityReset:   slog.LevelInfo,
	}
	return func(ctx context.Context, e Event) {
		level := levels[e.Outcome]
		if e.Outcome == Failed && errors.Is(ctx.Err(), context.Canceled) && errors.Is(e.Err, context.Canceled) {
			level = slog.LevelInfo
		}
		if !logger.Enabled(ctx, level) {
			return
		}
		attrs := []slog.Attr{
			slog.String("outcome", string(e.Outcome)),
			slog.String("handler", e.Handler),
			slog.String("topic", e.Topic),
			slog.String("message_uuid", e.MessageUUID),
			slog.String("key", text.Cut(e.Key)),
			slog.String("entity", text.Cut(e.Entity)),
			slog.Duration("duration", e.Duration),
			slog.Int("attempt", e.Attempt),
		}
		if e.Err != nil {
			attrs = append(attrs, slog.String("reason", reason(e.Err)))
		}
		var panicked *PanicError
		if errors.As(e.Err, &panicked) {
			attrs = append(attrs, slog.String("stack", string(panicked.Stack)))
		}
		logger.LogAttrs(ctx, level, "message "+string(e.Outcome), attrs...)
	}
}

// delivery is what the links of a chain know together about one delivery, and the
// message's context, in one allocation. It is used by one goroutine at a time.
type delivery struct {
	context.Context

	observers []Observer
	outcome   Outcome // of an attempt without an error
	attempt   int
	runs      int   // of what is inside Deduplicate
	parked    error // why the message is in the poison queue
	ahead     bool  // earlier messages of the producer are missing
	unknown   bool  // an attempt may have been committed

	entity   string               // see Event
	claim    deduplicator.Claim   // of Deduplicate; the zero one outside of it
	key      deduplicator.KeyFunc // of Deduplicate too
	failedIn deduplicator.Store   // the store of an attempt that failed last
	produced []*message.Message   // what the handler returned in the last attempt

	sequenced sequenced
}

type deliveryKey struct{}

func (d *delivery) Value(key any) any {
	if key == (deliveryKey{}) {
		return d
	}
	return d.Context.Value(key)
}

func deliveryFrom(ctx context.Context) *delivery {
	d, ok := ctx.Value(deliveryKey{}).(*delivery)
	if !ok { // a link that is used without its chain
		d = &delivery{}
	}
	return d
}

func (d *delivery) report(msg *message.Message, outcome Outcome, since time.Time, err error) {
	d.notify(msg.Context(), Event{
		Outcome:     outcome,
		MessageUUID: msg.UUID,
		Key:         d.claim.Key,
		Duration:    time.Since(since),
		Attempt:     d.attempt,
		Err:         err,
	})
}

func (d *delivery) notify(ctx context.Context, event Event) {
	if len(d.observers) == 0 {
		return
	}
	event.Handler = message.HandlerNameFromCtx(ctx)
	event.Topic = message.SubscribeTopicFromCtx(ctx)
	event.Entity = d.entity
	for _, observe := range d.observers {
		observe(ctx, event)
	}
}

// result is the outcome of a delivery whose chain returned err.
func (d *delivery) result(err error) (Outcome, error) {
	if err == nil && d.parked == nil {
		return d.outcome, nil
	}
	cause := errors.Join(d.parked, err)
	switch {
	case errors.Is(cause, deduplicator.ErrConflict), errors.Is(cause, ordering.ErrVersionConflict), errors.Is(cause, ordering.ErrSequenceConflict):
		return Conflict, cause
	case errors.Is(cause, ordering.ErrFenced):
		return Fenced, cause
	case d.parked != nil:
		return Parked, cause
	case errors.Is(err, deduplicator.ErrInFlight):
		return InFlight, err
	}
	return Failed, err
}

// guard is the outermost part of every chain.
func guard(observers []Observer) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		h = recoverer(h) // what is outside of the retries can panic too, such as the poison queue's publisher
		return func(msg *message.Message) (produced []*message.Message, err error) {
			ctx := msg.Context()
			d := &delivery{Context: ctx, observers: observers, outcome: Processed, attempt: 1, entity: msg.Metadata.Get(ordering.PartitionKeyMetadata)}
			started := time.Now()
			returned, done := false, false
			defer func() {
				msg.SetContext(ctx)
				if !returned {
					d.report(msg, Failed, started, errGoexit)
				}
				if !done { // or an observer panics. After a Goexit the Router leaves the message without an answer.
					waitToNack(ctx)
					msg.Nack()
				}
			}()
			msg.SetContext(d)
			produced, err = h(msg)
			returned = true
			msg.SetContext(ctx)
			outcome, cause := d.result(err)
			d.report(msg, outcome, started, cause)
			if err == nil {
				d.forgetAttempts(ctx)
			}
			if err == nil && d.parked == nil {
				for _, event := range d.sequenced.events {
					d.notify(ctx, event)
				}
			}
			if outcome == Processed && d.ahead {
				d.report(msg, ProducerGap, started, nil)
			}
			if err != nil {
				waitToNack(ctx)
			}
			done = true
			return produced, err
		}
	}
}

// forgetAttempts lets a message that is acknowledged although its last attempt failed
// begin anew when somebody publishes it again.
func (d *delivery) forgetAttempts(ctx context.Context) {
	if store, ok := d.failedIn.(interface {
		ForgetAttempts(ctx context.Context, claim deduplicator.Claim)
	}); ok {
		store.ForgetAttempts(ctx, d.claim)
	}
}

var errGoexit = errors.New("handler ended its goroutine")

// nackPause is about how long a message waits before it goes back to the broker,
// which may deliver it again at once.
const nackPause = 100 * time.Millisecond

func waitToNack(ctx context.Context) {
	sqldb.Pause(ctx, nackPause/2+rand.N(nackPause)) //nolint:gosec // jitter is no secret
}
