package middleware

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// SequenceOption configures [Sequence]. [WithEntity] is one too.
type SequenceOption interface{ applySequence(*sequence) }

type sequenceOptionFunc func(*sequence)

func (f sequenceOptionFunc) applySequence(s *sequence) { f(s) }

func (o EntityOption) applySequence(s *sequence) { s.entity = o.entity }

type sequence struct {
	sequence   *ordering.Sequence
	entity     ordering.KeyFunc
	seq, epoch ordering.VersionFunc
}

// WithSequence sets where the sequence number of a message is: 1 for the first
// event of an entity, 1 more for each that follows. It is required.
func WithSequence(seq ordering.VersionFunc) SequenceOption {
	return sequenceOptionFunc(func(s *sequence) { s.seq = seq })
}

// WithEpoch sets where the epoch of a message is, for entities that can be created
// anew and then count from 1 again. Without it every message has epoch 0.
func WithEpoch(epoch ordering.VersionFunc) SequenceOption {
	return sequenceOptionFunc(func(s *sequence) {
		s.epoch = epoch
		if epoch == nil {
			s.epoch = func(*message.Message) (int64, error) { return 0, errors.New("middleware: WithEpoch: function is nil") }
		}
	})
}

// Sequence calls the handler with the events of each entity strictly in order. An
// event that comes too early is kept in the database, and acknowledged, until its
// predecessors were processed; then the handler is called with it in the
// transaction of the message that closed the gap, and what it returns is published
// with that message's outputs. See [ordering.Sequence.ProcessTx] for the details
// and the options of [ordering.NewSequence] for the policies. Use it instead of
// RejectStale, which ignores gaps.
//
// A message whose attempts are used up because its handler fails is kept in the
// database as well, in the place of the poison queue, and its entity is blocked
// until an [ordering.Operator] acts: other entities go on. A message without an
// entity, with an invalid sequence number or with the number of another one is a
// permanent error, and so is one that the bounds leave no room for.
//
// One transaction releases a limited number of messages. Run a [Releaser] beside
// the router for the rest, for what an operator lets through, and for the age
// that bounds give a gap.
//
// A handler must not return [ordering.ErrStale] here: that its transaction is
// rolled back but the message acknowledged would be a gap. It counts as an error.
func Sequence(seq *ordering.Sequence, opts ...SequenceOption) Link {
	s := &sequence{sequence: seq, entity: ordering.KeyFromMetadata(ordering.PartitionKeyMetadata)}
	for _, opt := range opts {
		opt.applySequence(s)
	}
	var errs []error
	if seq == nil {
		errs = append(errs, errors.New("sequence is nil"))
	}
	if s.entity == nil {
		errs = append(errs, errors.New("WithEntity: function is nil"))
	}
	if s.seq == nil {
		errs = append(errs, errors.New("no sequence number: use WithSequence"))
	}
	return Link{name: "Sequence", rank: rankSequence, middleware: s.middleware, outer: blockFailed, err: errors.Join(errs...)}
}

// sequenced is what Sequence remembers of a delivery between its attempts.
type sequenced struct {
	events  []Event // of the last attempt
	failed  bool    // the handler failed with the message in the last attempt
	cause   error   // the attempts are used up: block the entity
	release bool    // parked messages were released in an attempt
}

// blockFailed stands outside the retries. A message that they could not help gets
// one more attempt, which parks it in the handler's place.
func blockFailed(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := h(msg)
		ctx := msg.Context()
		d := deliveryFrom(ctx)
		if err == nil || !d.sequenced.failed || blameless(err) || ctx.Err() != nil {
			return produced, err
		}
		d.sequenced.cause = err
		defer func() { d.sequenced.cause = nil }()
		return h(msg)
	}
}

func (s *sequence) middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		d := deliveryFrom(ctx)
		d.sequenced.failed = false
		tx, ok := Tx(ctx)
		if !ok {
			return nil, errors.New("middleware: Sequence needs a store on database/sql around it")
		}
		event, err := s.event(ctx, msg, d.claim)
		if event.Entity != "" {
			d.entity = event.Entity
		}
		if err != nil {
			return nil, err
		}
		var produced []*message.Message
		// Whatever an attempt failed for once it released parked messages, the
		// message itself must not suffer: its next attempt leaves them alone.
		keep := d.sequenced.release
		result, err := s.sequence.ProcessTx(ctx, tx, ordering.SequencedDelivery{
			Event: event, Message: msg, Failure: d.sequenced.cause, KeepParked: keep,
			Handle: func(m *message.Message) error {
				var outputs []*message.Message
				var err error
				if m == msg {
					d.sequenced.failed = true // also if it panics
					outputs, err = h(m)
					err = notStale(err)
					d.sequenced.failed = err != nil
				} else {
					d.sequenced.release = true
					outputs, err = callReleased(h, m, d.claim.Consumer, d.key)
				}
				if err == nil {
					produced = append(produced, outputs...)
				}
				return err
			},
		})
		if err != nil {
			return nil, sequenceError(err)
		}
		switch result.Outcome {
		case ordering.OutOfDate:
			d.outcome = Stale
		case ordering.ParkedEarly, ordering.ParkedBlocked, ordering.ParkedFailed:
			d.outcome = Deferred
		}
		d.sequenced.events = noticeEvents(result.Notices)
		return produced, nil
	}
}

func (s *sequence) event(ctx context.Context, msg *message.Message, claim deduplicator.Claim) (ordering.SequencedEvent, error) {
	event := ordering.SequencedEvent{Consumer: claim.Consumer, Fingerprint: claim.Fingerprint}
	topic := message.SubscribeTopicFromCtx(ctx)
	var err error
	if event.Entity, err = s.entity(topic, msg); err != nil {
		return event, Permanent(err)
	}
	if event.Entity == "" {
		return event, &ordering.KeyError{Topic: topic, UUID: msg.UUID, Reason: "no entity id"}
	}
	if event.Seq, err = s.seq(msg); err != nil {
		return event, Permanent(err)
	}
	if s.epoch != nil {
		if event.Epoch, err = s.epoch(msg); err != nil {
			return event, Permanent(err)
		}
	}
	return event, nil
}

// callReleased calls h with a parked message, whose context gets its own claim
// instead of the one of the message that released it. A panic is an error of that
// message only, so it must not leave the savepoint.
func callReleased(h message.HandlerFunc, msg *message.Message, consumer string, keyOf deduplicator.KeyFunc) (produced []*message.Message, err error) {
	defer func() {
		if value := recover(); value != nil {
			produced, err = nil, &PanicError{Value: value, Stack: debug.Stack()}
		}
	}()
	claim := deduplicator.Claim{Consumer: consumer}
	if keyOf != nil {
		if claim.Key, err = keyOf(msg); err != nil {
			return nil, fmt.Errorf("%w: %w", ordering.ErrPermanent, err)
		}
	}
	msg.SetContext(deduplicator.ContextWithClaim(msg.Context(), claim))
	produced, err = h(msg)
	if err = notStale(err); IsPermanent(err) {
		err = fmt.Errorf("%w: %w", ordering.ErrPermanent, err)
	}
	return produced, err
}

func notStale(err error) error {
	if errors.Is(err, ordering.ErrStale) {
		return Permanent(fmt.Errorf("middleware: a handler under Sequence must not return ordering.ErrStale: %v", err)) //nolint:errorlint // it must not be found
	}
	return err
}

// sequenceError says how the other links treat an error of ProcessTx.
func sequenceError(err error) error {
	switch {
	case errors.Is(err, ordering.ErrConsumerStopped):
		return stopped{err}
	case errors.Is(err, ordering.ErrInvalidSequence), errors.Is(err, ordering.ErrSequenceConflict), errors.Is(err, ordering.ErrParkedFull):
		return Permanent(err)
	}
	return err
}

// stopped makes the other links treat an error like a store that is unavailable:
// the message is not parked and retries do not run out.
type stopped struct{ error }

func (s stopped) Is(target error) bool { return target == deduplicator.ErrUnavailable }
func (s stopped) Unwrap() error        { return s.error }

func noticeEvents(notices []ordering.SequenceNotice) []Event {
	outcomes := map[ordering.NoticeKind]Outcome{
		ordering.Released:      Released,
		ordering.ReleaseFailed: Retried,
		ordering.Blocked:       EntityBlocked,
		ordering.Skipped:       GapSkipped,
		ordering.Reset:         EntityReset,
	}
	events := make([]Event, len(notices))
	for i, n := range notices {
		events[i] = Event{Outcome: outcomes[n.Kind], MessageUUID: n.UUID, Attempt: 1, Err: n.Err}
	}
	return events
}
