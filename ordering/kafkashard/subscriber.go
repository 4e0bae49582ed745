package kafkashard

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cenkalti/backoff/v5"

	"github.com/seed-2f56a981/watermill-idempotent/internal/outputs"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

const (
	// While a nacked message waits, its partition waits: short, but no spin.
	nackResendSleep     = 100 * time.Millisecond
	reconnectRetrySleep = 200 * time.Millisecond
	maxReconnectSleep   = 5 * time.Second
)

// subscriber runs one watermill-kafka subscriber, and so one group member, per
// topic. Its subscriptions end with their contexts, which the drain around it
// owns.
type subscriber struct {
	broker *Broker

	mu     sync.Mutex // guards topics
	topics map[string]struct{}
}

func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if !s.take(topic) {
		return nil, fmt.Errorf("subscribe to topic %q: %w", topic, ErrSubscribed)
	}
	out, err := s.subscribe(ctx, topic)
	if err != nil {
		s.release(topic)
		return nil, err
	}
	return out, nil
}

func (s *subscriber) subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	b := s.broker
	if err := b.Declare(ctx, topic); err != nil {
		return nil, err
	}
	config := *b.config
	if id := config.Consumer.Group.InstanceId; id != "" { // members with one id fence each other
		config.Consumer.Group.InstanceId = id + "." + topic
	}
	sessions := newSessions(ctx)
	inner, err := kafka.NewSubscriber(kafka.SubscriberConfig{
		Brokers:               b.cfg.Brokers,
		Unmarshaler:           Marshaler{},
		OverwriteSaramaConfig: &config,
		ConsumerGroup:         b.cfg.Group,
		NackResendSleep:       nackResendSleep,
		ReconnectRetrySleep:   reconnectRetrySleep,
		Tracer:                sessions,
	}, b.logger)
	if err != nil {
		return nil, fmt.Errorf("kafkashard: subscribe to topic %q: %w", topic, err)
	}
	ctx = outputs.WithStamp(ctx, b.cfg.publisherName(), func(topic string, msg *message.Message) error {
		if err := ordering.StampKey(topic, msg, b.cfg.Key); err != nil {
			return err
		}
		return b.checkSize(topic, msg)
	})
	in, err := inner.Subscribe(ctx, topic)
	if err != nil {
		return nil, fmt.Errorf("kafkashard: subscribe to topic %q: %w", topic, err)
	}
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		defer s.release(topic)
		for msg := range in {
			sessions.forward(msg, out)
		}
	}()
	return out, nil
}

// String is the subscriber's name in message.SubscriberNameFromCtx.
func (s *subscriber) String() string { return s.broker.cfg.subscriberName() }

// Close does nothing, see subscriber.
func (*subscriber) Close() error { return nil }

func (s *subscriber) take(topic string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.topics[topic]; taken {
		return false
	}
	s.topics[topic] = struct{}{}
	return true
}

func (s *subscriber) release(topic string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.topics, topic)
}

// sessions ends the contexts of messages with the group session that delivered
// them. watermill-kafka derives them from the subscription alone, so a handler
// would work on while the partition's new owner handles the same message.
//
// watermill-kafka lets a tracer see its sessions, so this is one. A session
// starts only when every message of the one before has been given back, so
// the current session is the one of every message that is on its way.
//
// It also slows down attempts to join that fail at once, such as for a lack of
// permission: watermill-kafka makes the next one immediately, with a new client
// (190 a second were seen).
type sessions struct {
	current atomic.Pointer[session]

	subscription <-chan struct{}
	pauses       *backoff.ExponentialBackOff
	attempted    bool // to join, without a session since; attempts follow each other
}

func newSessions(subscription context.Context) *sessions {
	pauses := backoff.NewExponentialBackOff()
	pauses.InitialInterval, pauses.MaxInterval, pauses.Multiplier = reconnectRetrySleep, maxReconnectSleep, 2
	return &sessions{subscription: subscription.Done(), pauses: pauses}
}

type session struct {
	ctx context.Context //nolint:containedctx // sarama gives it to Setup, messages come elsewhere
}

// forward hands msg out for as long as its session lasts.
func (s *sessions) forward(msg *message.Message, out chan<- *message.Message) {
	session := s.current.Load().ctx
	ctx, cancel := context.WithCancel(msg.Context())
	unlink := context.AfterFunc(session, cancel)
	context.AfterFunc(ctx, func() { unlink() }) // a session lives much longer than a message
	msg.SetContext(ctx)

	if session.Err() == nil {
		select {
		case out <- msg:
			return
		case <-ctx.Done():
		}
	}
	// watermill-kafka resends a nacked message even when its session is over,
	// and the rebalance waits for that. It marks no offset then, so an ack lets
	// go of the message without losing it. If the session is not over, the
	// subscription is, and it lets go by itself: an ack could still be marked.
	if session.Err() != nil {
		msg.Ack()
	}
}

// WrapConsumerGroupHandler is called before each attempt to join.
func (s *sessions) WrapConsumerGroupHandler(h sarama.ConsumerGroupHandler) sarama.ConsumerGroupHandler {
	if s.attempted {
		select {
		case <-time.After(s.pauses.NextBackOff()):
		case <-s.subscription:
		}
	}
	s.attempted = true
	return sessionHandler{h, s}
}

func (s *sessions) WrapConsumer(c sarama.Consumer) sarama.Consumer { return c }

func (s *sessions) WrapPartitionConsumer(c sarama.PartitionConsumer) sarama.PartitionConsumer {
	return c
}

func (s *sessions) WrapSyncProducer(_ *sarama.Config, p sarama.SyncProducer) sarama.SyncProducer {
	return p
}

type sessionHandler struct {
	sarama.ConsumerGroupHandler
	sessions *sessions
}

func (h sessionHandler) Setup(s sarama.ConsumerGroupSession) error {
	h.sessions.current.Store(&session{s.Context()})
	h.sessions.attempted = false
	h.sessions.pauses.Reset()
	return h.ConsumerGroupHandler.Setup(s)
}
