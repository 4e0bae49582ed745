package ordering

import (
	"github.com/ThreeDotsLabs/watermill/message"
)

// NewPublisher returns pub with the partition key stamped on every message (see
// [StampKey]). Publish sends nothing and returns a [KeyError] if one of its
// messages has no usable key. The publishers of amqpshard, kafkashard and
// sqlshard do this already; use it around another one, such as watermill-sql's.
func NewPublisher(pub message.Publisher, key KeyFunc) message.Publisher {
	return stampingPublisher{pub, key}
}

type stampingPublisher struct {
	message.Publisher
	key KeyFunc
}

func (p stampingPublisher) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if err := StampKey(topic, msg, p.key); err != nil {
			return err
		}
	}
	return p.Publisher.Publish(topic, messages...)
}
