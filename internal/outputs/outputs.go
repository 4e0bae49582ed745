// Package outputs lets a subscriber tell the middlewares what its broker's publisher
// will do to the messages that a handler returns, so that it is done, or refused,
// before the handler's transaction commits.
package outputs

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

type stamperKey struct{}

type stamper struct {
	publisher string
	stamp     func(topic string, msg *message.Message) error
}

// WithStamp returns ctx for messages of a broker that stamps what it publishes with
// stamp. publisher is what the publisher's String method returns, which is the name
// that the Router gives to message.PublisherNameFromCtx.
func WithStamp(ctx context.Context, publisher string, stamp func(topic string, msg *message.Message) error) context.Context {
	return context.WithValue(ctx, stamperKey{}, stamper{publisher, stamp})
}

// Stamp stamps messages that a handler has returned, if its Router publishes them
// with the publisher of the broker that its messages come from.
func Stamp(ctx context.Context, produced []*message.Message) error {
	s, ok := ctx.Value(stamperKey{}).(stamper)
	if !ok || s.publisher != message.PublisherNameFromCtx(ctx) {
		return nil
	}
	topic := message.PublishTopicFromCtx(ctx)
	for _, msg := range produced {
		if err := s.stamp(topic, msg); err != nil {
			return err
		}
	}
	return nil
}
