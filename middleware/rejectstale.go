package middleware

import (
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// RejectStaleOption configures [RejectStale].
type RejectStaleOption interface{ applyRejectStale(*rejectStale) }

type rejectStaleOptionFunc func(*rejectStale)

func (f rejectStaleOptionFunc) applyRejectStale(r *rejectStale) { f(r) }

type rejectStale struct {
	versions *ordering.Versions
	entity   ordering.KeyFunc
	version  ordering.VersionFunc
}

// WithEntity sets where the id of a message's entity is, instead of the partition
// key that the message carries (ordering.PartitionKeyMetadata).
// It is for [RejectStale] and [Sequence].
func WithEntity(entity ordering.KeyFunc) EntityOption { return EntityOption{entity} }

// EntityOption is what [WithEntity] returns.
type EntityOption struct{ entity ordering.KeyFunc }

func (o EntityOption) applyRejectStale(r *rejectStale) { r.entity = o.entity }

// WithVersion sets where the version of a message's entity is. It is required.
func WithVersion(version ordering.VersionFunc) RejectStaleOption {
	return rejectStaleOptionFunc(func(r *rejectStale) { r.version = version })
}

// RejectStale acknowledges, without calling the handler, an event whose version
// is not higher than what the handler has already processed of its entity. The
// version is written in the handler's transaction, so it counts only if the
// handler's work does, and events of one entity wait for each other there.
//
// A message without an entity or with an invalid version, and one with the
// entity's version but another fingerprint, are permanent errors. For handlers
// that keep the version in their own table there is [ordering.ErrStale] instead.
func RejectStale(versions *ordering.Versions, opts ...RejectStaleOption) Link {
	r := &rejectStale{versions: versions, entity: ordering.KeyFromMetadata(ordering.PartitionKeyMetadata)}
	for _, opt := range opts {
		opt.applyRejectStale(r)
	}
	var errs []error
	if versions == nil {
		errs = append(errs, errors.New("versions is nil"))
	}
	if r.entity == nil {
		errs = append(errs, errors.New("WithEntity: function is nil"))
	}
	if r.version == nil {
		errs = append(errs, errors.New("no version: use WithVersion"))
	}
	return Link{name: "RejectStale", rank: rankRejectStale, middleware: r.middleware, err: errors.Join(errs...)}
}

func (r *rejectStale) middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		d := deliveryFrom(ctx)
		tx, ok := Tx(ctx)
		if !ok {
			return nil, errors.New("middleware: RejectStale needs a store on database/sql around it")
		}
		topic := message.SubscribeTopicFromCtx(ctx)
		entity, err := r.entity(topic, msg)
		if err != nil {
			return nil, Permanent(err)
		}
		if entity == "" {
			return nil, &ordering.KeyError{Topic: topic, UUID: msg.UUID, Reason: "no entity id"}
		}
		d.entity = entity
		version, err := r.version(msg)
		if err != nil {
			return nil, Permanent(err)
		}
		result, err := r.versions.ApplyTx(ctx, tx, ordering.Event{
			Consumer:    d.claim.Consumer,
			Entity:      entity,
			Version:     version,
			Fingerprint: d.claim.Fingerprint,
		})
		if err != nil {
			return nil, err
		}
		if result == ordering.Stale {
			d.outcome = Stale
			return nil, nil // the claim is committed: a copy is a duplicate
		}
		return h(msg)
	}
}
