package middleware

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
	"github.com/seed-2f56a981/watermill-idempotent/internal/outputs"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// ErrNoConsumer says that Deduplicate can't tell in whose name to claim, because the
// message did not come through a Router. Nothing is durable; the message is returned
// to the broker.
var ErrNoConsumer = errors.New("middleware: no consumer name")

// DeduplicateOption configures [Deduplicate].
type DeduplicateOption interface{ applyDeduplicate(*deduplicate) }

type deduplicateOptionFunc func(*deduplicate)

func (f deduplicateOptionFunc) applyDeduplicate(d *deduplicate) { f(d) }

type deduplicate struct {
	store       deduplicator.Store
	key         deduplicator.KeyFunc
	fingerprint deduplicator.FingerprintFunc
	time        deduplicator.TimeFunc
	consumer    string
	owner       atomic.Pointer[owner] // that has reserved last
	forget      *forgetter
	noTx        bool
	err         error
}

// WithKey sets where the idempotency key of a message is. It is required.
func WithKey(key deduplicator.KeyFunc) DeduplicateOption {
	return deduplicateOptionFunc(func(d *deduplicate) { d.key = key })
}

// WithConsumer sets the scope of the keys, instead of the handler's name: for a
// handler that was renamed. One name serves one handler.
func WithConsumer(name string) DeduplicateOption {
	return deduplicateOptionFunc(func(d *deduplicate) {
		d.consumer = name
		if name == "" {
			d.err = errors.New("WithConsumer: name is empty")
		}
	})
}

// WithFingerprint sets what two messages with one key must have in common,
// instead of the SHA-256 of the payload. Where a producer that sends again builds
// the payload anew, with another time for example, choose the part that stays the
// same; nil switches the comparison off.
func WithFingerprint(fingerprint deduplicator.FingerprintFunc) DeduplicateOption {
	return deduplicateOptionFunc(func(d *deduplicate) { d.fingerprint = fingerprint })
}

// WithTime sets where the time is at which a message was first published, instead
// of ordering.PublishedAtMetadata, which the subscribers of amqpshard and
// kafkashard set. Only a store with [deduplicator.WithRetention] needs it. A
// malformed time is a permanent error; a missing one is for the store to judge.
func WithTime(time deduplicator.TimeFunc) DeduplicateOption {
	return deduplicateOptionFunc(func(d *deduplicate) { d.time = time })
}

// Deduplicate runs the handler in a transaction of store that also claims the
// message's key: see [deduplicator.Store]. A message whose key is claimed already
// is acknowledged, its handler not called. Messages that the handler returns are
// stored in the same transaction until the message is acknowledged, and returned
// again, as they were, when a duplicate comes before that. A handler that has no
// publisher any more leaves them to the [deduplicator.Relay].
//
// Everything that goes wrong rolls the transaction back: an error, a panic, a
// Goexit, the end of the message's context. A message without a key and one with
// the key of another message are permanent errors, and so are, for a store with
// [deduplicator.WithRetention], one that is too old and one of unknown age.
//
// The transaction is what [Tx] returns. Middlewares added after this one run
// inside it. What they and the handler change of the message itself (UUID, payload,
// metadata) is undone after each attempt, so that a next one has the same key; in
// the place of a message that the handler returns there is a copy with the changes.
//
// A store that is [deduplicator.Untransactional] promises less, and is for handlers
// without a publisher: one that has a publisher is refused, before it is called, with
// [deduplicator.ErrNoTransaction], and its messages are returned to the broker.
func Deduplicate(store deduplicator.Store, opts ...DeduplicateOption) Link {
	d := &deduplicate{store: store, fingerprint: deduplicator.PayloadFingerprint, forget: &forgetter{store: store}}
	d.time = deduplicator.TimeFromMetadata(ordering.PublishedAtMetadata)
	for _, opt := range opts {
		opt.applyDeduplicate(d)
	}
	_, d.noTx = store.(deduplicator.Untransactional)
	errs := []error{d.err}
	if isNil(store) {
		errs = append(errs, errors.New("store is nil"))
	}
	if d.key == nil {
		errs = append(errs, errors.New("no key: use WithKey"))
	}
	if d.time == nil {
		errs = append(errs, errors.New("WithTime: function is nil"))
	}
	link := Link{name: "Deduplicate", rank: rankDeduplicate, middleware: d.middleware, noTx: d.noTx, err: errors.Join(errs...)}
	if counting, ok := store.(interface{ MaxAttempts() (int, bool) }); ok && !isNil(store) {
		link.maximum, _ = counting.MaxAttempts()
	}
	return link
}

func (d *deduplicate) middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		if topic := message.PublishTopicFromCtx(ctx); d.noTx && topic != "" {
			return nil, fmt.Errorf("middleware: handler %q publishes to %q: %w, so nothing would keep what it returns",
				message.HandlerNameFromCtx(ctx), topic, deduplicator.ErrNoTransaction)
		}
		state := deliveryFrom(ctx)
		claim, err := d.claim(ctx, msg, state)
		if err != nil {
			state.claim = claim
			return nil, err
		}
		state.key = d.key
		state.claim = claim
		uuid, payload, fields := msg.UUID, msg.Payload, maps.Clone(msg.Metadata)
		defer func() { msg.UUID, msg.Payload, msg.Metadata = uuid, payload, fields }()
		result, err := d.store.Process(ctx, claim, func(txCtx context.Context) ([]deduplicator.Output, error) {
			state.outcome = Processed
			if own, _ := deduplicator.ClaimFromContext(txCtx); own.Consumer != claim.Consumer || own.Key != claim.Key {
				txCtx = deduplicator.ContextWithClaim(txCtx, claim)
			}
			if d.noTx {
				txCtx = sqldb.ContextWithoutTx(txCtx)
			}
			msg.SetContext(txCtx)
			defer msg.SetContext(ctx)
			if state.runs++; state.runs > 1 { // the one before may have changed it
				msg.UUID, msg.Payload, msg.Metadata = uuid, payload, maps.Clone(fields)
			}
			reason := msg.Metadata.Get(watermillmw.ReasonForPoisonedKey)
			produced, err := h(msg)
			if err != nil {
				return nil, err
			}
			produced = apart(ctx, produced, msg)
			state.produced = produced
			if now := msg.Metadata.Get(watermillmw.ReasonForPoisonedKey); now != reason {
				return nil, &parkedInside{reason: now}
			}
			if err := outputs.Stamp(ctx, produced); err != nil {
				return nil, err
			}
			return toOutputs(message.PublishTopicFromCtx(ctx), produced)
		})
		produced := state.produced
		state.produced, state.failedIn = nil, nil
		switch {
		case err != nil:
			state.failedIn = d.store
			return nil, state.failed(err)
		case result.Outcome == deduplicator.Duplicate:
			state.outcome = Duplicate
			if message.PublishTopicFromCtx(ctx) != "" { // otherwise the Router would refuse them each time
				produced = fromOutputs(result.Outputs)
			}
		}
		if len(produced) > 0 {
			d.forget.afterAck(msg, claim)
		}
		return produced, nil
	}
}

// apart returns produced with a copy of msg in its place, so that giving msg back
// as it came does not change what is published.
func apart(ctx context.Context, produced []*message.Message, msg *message.Message) []*message.Message {
	i := slices.Index(produced, msg)
	if i < 0 {
		return produced
	}
	output := msg.Copy()
	output.SetContext(ctx)
	produced = slices.Clone(produced)
	for ; i < len(produced); i++ {
		if produced[i] == msg {
			produced[i] = output
		}
	}
	return produced
}

// failed returns what is left of an error of Process.
func (d *delivery) failed(err error) error {
	var parked *parkedInside
	switch {
	case errors.As(err, &parked):
		d.parked = parked
		return nil
	case errors.Is(err, ordering.ErrStale):
		d.outcome = Stale
		return nil
	}
	d.unknown = d.unknown || errors.Is(err, deduplicator.ErrOutcomeUnknown)
	return err
}

// parkedInside rolls back what a handler wrote before Watermill's own PoisonQueue,
// which somebody put inside the transaction, parked its message and hid its error.
type parkedInside struct{ reason string }

func (e *parkedInside) Error() string { return e.reason }

func (d *deduplicate) claim(ctx context.Context, msg *message.Message, state *delivery) (deduplicator.Claim, error) {
	if state.runs > 0 { // a handler may have changed the payload's bytes, which are not given back
		claim := state.claim
		claim.Redelivered = claim.Redelivered || state.unknown
		return claim, nil
	}
	handler := message.HandlerNameFromCtx(ctx)
	consumer := cmp.Or(d.consumer, handler)
	if consumer == "" {
		return deduplicator.Claim{}, fmt.Errorf("%w: the message has no handler name; add the chain to a Router or use WithConsumer", ErrNoConsumer)
	}
	if err := d.reserve(ctx, consumer); err != nil {
		return deduplicator.Claim{}, err
	}
	key, err := d.key(msg)
	if err != nil {
		return deduplicator.Claim{}, Permanent(err)
	}
	if key == "" {
		return deduplicator.Claim{}, Permanent(deduplicator.ErrNoKey)
	}
	claim := deduplicator.Claim{Consumer: consumer, Key: key, Redelivered: state.unknown || msg.Metadata.Get(metadata.Redelivered) == "true"}
	if claim.Time, err = d.time(msg); err != nil {
		return claim, Permanent(err)
	}
	if d.fingerprint != nil {
		claim.Fingerprint = d.fingerprint(msg)
	}
	return claim, nil
}

// owner is who claims under a consumer name: the instances of one handler, which
// share their messages. Handlers of two consumer groups get the same messages, and
// the names of this module's subscribers have the group.
type owner struct{ handler, topic, subscriber string }

// reserve asks the store, once per owner, whether the consumer name is free.
func (d *deduplicate) reserve(ctx context.Context, consumer string) error {
	store, ok := d.store.(interface {
		Reserve(consumer, owner string) error
	})
	now := owner{message.HandlerNameFromCtx(ctx), message.SubscribeTopicFromCtx(ctx), message.SubscriberNameFromCtx(ctx)}
	if last := d.owner.Load(); !ok || last != nil && *last == now {
		return nil
	}
	if err := store.Reserve(consumer, fmt.Sprintf("handler %q of topic %q by %s", now.handler, now.topic, now.subscriber)); err != nil {
		return fmt.Errorf("%w: give each handler its own name, and with WithConsumer its own chain", err)
	}
	reserved := now // on the heap, unlike now
	d.owner.Store(&reserved)
	return nil
}

func toOutputs(topic string, produced []*message.Message) ([]deduplicator.Output, error) {
	if len(produced) == 0 {
		return nil, nil
	}
	if topic == "" { // the Router would refuse them, after the commit
		return nil, message.ErrOutputInNoPublisherHandler
	}
	outputs := make([]deduplicator.Output, len(produced))
	for i, msg := range produced {
		outputs[i] = deduplicator.Output{Topic: topic, UUID: msg.UUID, Metadata: msg.Metadata, Payload: msg.Payload}
	}
	return outputs, nil
}

func fromOutputs(outputs []deduplicator.Output) []*message.Message {
	produced := make([]*message.Message, len(outputs))
	for i, output := range outputs {
		produced[i] = message.NewMessage(output.UUID, output.Payload)
		produced[i].Metadata = output.Metadata
	}
	return produced
}
