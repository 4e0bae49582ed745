package middleware

import (
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Partition gives each message that the handler returns its partition key, so
// that all events of one entity go through one shard (see [ordering.StampKey]).
// A message without a usable key is a permanent error: nothing is published and
// the transaction is rolled back.
//
// Where the handler's messages come from amqpshard or kafkashard and go to such a
// publisher, Deduplicate does the same with the Key of the broker's Config, so
// Partition is for other publishers, and for handlers with a key of their own.
func Partition(key ordering.KeyFunc) Link {
	link := Link{name: "Partition", rank: rankPartition}
	if key == nil {
		link.err = errors.New("key function is nil")
	}
	link.middleware = func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			if err != nil {
				return nil, err
			}
			topic := message.PublishTopicFromCtx(msg.Context())
			for _, output := range produced {
				if err := ordering.StampKey(topic, output, key); err != nil {
					return nil, err
				}
			}
			return produced, nil
		}
	}
	return link
}
