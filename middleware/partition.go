package middleware

import (
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Partition gives each message that the handler returns its partition key, so
// that all events of one entity go through one shard (see [ordering.StampKey]).
// A message without a usable key is a permanent error: nothing is published and
// the transaction is rolled back. It is for publishers that do not stamp keys
// themselves; those of amqpshard and kafkashard do.
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
