package middleware

import (
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// RejectReplayed compares the number that an [ordering.Producer] gave the message
// with those that the handler has processed. The number is recorded in the
// handler's transaction, so it counts only if the handler's work does, and
// messages of one stream wait for each other there.
//
// A number that was seen is a duplicate: acknowledged, the handler not called,
// whatever key the copy has. A message of a producer that was replaced (an earlier
// epoch) is a permanent error, [ordering.FencedError]. A message before which
// others are missing is processed and reported as ProducerGap, or is an
// [ordering.ProducerGapError]: see [ordering.WithProducerGaps]. A number that is
// too old to be known decides nothing: Deduplicate has found the message's key to
// be new, so the handler is called.
//
// Messages without a number pass, they are not counted: their key protects them.
// One with a part of a number is a permanent error.
func RejectReplayed(windows *ordering.Windows) Link {
	link := Link{name: "RejectReplayed", rank: rankRejectReplayed}
	if windows == nil {
		link.err = errors.New("windows is nil")
	}
	link.middleware = func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			ctx := msg.Context()
			tx, ok := Tx(ctx)
			if !ok {
				return nil, errors.New("middleware: RejectReplayed needs a store on database/sql around it")
			}
			state := deliveryFrom(ctx)
			state.ahead = false
			stamp, numbered, err := ordering.ParseStamp(msg)
			if err != nil {
				return nil, err
			}
			if !numbered {
				return h(msg)
			}
			result, err := windows.ApplyTx(ctx, tx, state.claim.Consumer, stamp)
			if err != nil {
				return nil, err
			}
			if result == ordering.Replayed {
				state.outcome = Duplicate
				return nil, nil // the claim is committed: a copy with this key is a duplicate too
			}
			state.ahead = result == ordering.AcceptedAhead
			return h(msg)
		}
	}
	return link
}

// Stamp gives each message that the handler returns its number in the handler's
// transaction, so that the number is stored with the message and a redelivery
// publishes it with the same one. Messages must carry their partition key then:
// from the handler, or from Partition, which comes after this link.
//
// An attempt that is rolled back leaves its numbers unused, so consumers must
// accept gaps. When producer was replaced, the message is returned to the broker
// (ordering.ErrReplaced), for the process that has replaced this one.
func Stamp(producer *ordering.Producer) Link {
	link := Link{name: "Stamp", rank: rankStamp}
	if producer == nil {
		link.err = errors.New("producer is nil")
	}
	link.middleware = func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if err != nil {
				return nil, err
			}
			if err := producer.Stamp(message.PublishTopicFromCtx(msg.Context()), produced...); err != nil {
				return nil, err
			}
			return produced, nil
		}
	}
	return link
}
