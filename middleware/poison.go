package middleware

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// unkeyed is the partition key of parked messages that have no usable one.
const unkeyed = "unkeyed"

// WithPoisonQueue publishes a message whose error came through the links inside
// it to topic, and acknowledges it once the publisher has confirmed that. The
// parked message is a copy with the metadata fields of Watermill's PoisonQueue:
// reason_poisoned (the error's text, cut to 1 KiB), topic_poisoned,
// handler_poisoned and subscriber_poisoned.
//
// Not parked, but returned to the broker, are messages whose error does not speak
// against them: the store is unavailable, the key is in flight, the outcome of the
// commit is unknown, this process was replaced (see Stamp), or the message's context
// was cancelled, as subscribers do when they close. When publishing fails the message
// is returned to the broker as well.
//
// A database connection that is lost while the handler works can't be told from the
// handler's own failure. With WithRetry inside, the next attempt finds out; without
// it, that message is parked.
//
// topic must exist on the broker: see Declare of ordering.Broker.
func WithPoisonQueue(pub message.Publisher, topic string) Link {
	link := Link{name: "WithPoisonQueue", rank: rankPoisonQueue}
	if isNil(pub) {
		link.err = errors.New("publisher is nil")
	}
	if topic == "" {
		link.err = errors.Join(link.err, errors.New("topic is empty"))
	}
	link.middleware = func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if err == nil || blameless(err) || errors.Is(msg.Context().Err(), context.Canceled) {
				return produced, err
			}
			if parkErr := pub.Publish(topic, poisoned(msg, err)); parkErr != nil {
				return nil, errors.Join(err, fmt.Errorf("park in %q: %w", topic, parkErr))
			}
			deliveryFrom(msg.Context()).parked = err
			return nil, nil
		}
	}
	return link
}

func poisoned(msg *message.Message, err error) *message.Message {
	ctx := msg.Context()
	parked := message.NewMessageWithContext(ctx, msg.UUID, msg.Payload)
	maps.Copy(parked.Metadata, msg.Metadata)
	parked.Metadata.Set(watermillmw.ReasonForPoisonedKey, reason(err))
	parked.Metadata.Set(watermillmw.PoisonedTopicKey, message.SubscribeTopicFromCtx(ctx))
	parked.Metadata.Set(watermillmw.PoisonedHandlerKey, message.HandlerNameFromCtx(ctx))
	parked.Metadata.Set(watermillmw.PoisonedSubscriberKey, message.SubscriberNameFromCtx(ctx))
	if ordering.CheckKey(parked.Metadata.Get(ordering.PartitionKeyMetadata)) != "" {
		parked.Metadata.Set(ordering.PartitionKeyMetadata, unkeyed)
	}
	return parked
}
