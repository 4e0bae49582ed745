package sqlshard

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/outputs"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

const (
	// While a nacked message waits, its shard waits: short, but no spin.
	nackResendSleep = 100 * time.Millisecond

	// ackTimeout is how long a closing subscription waits for the database to take
	// the last offsets.
	ackTimeout = 5 * time.Second
)

// subscriber runs one watermill-sql subscriber per shard. Its subscriptions end with
// their contexts, which the drain around it owns.
type subscriber struct {
	broker *Broker

	mu     sync.Mutex     // guards topics
	topics map[string]int // shards of each active one
}

func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	b := s.broker
	if err := b.Declare(ctx, topic); err != nil {
		return nil, err
	}
	shards, err := b.known(topic)
	if err != nil {
		return nil, err
	}
	if err := s.take(topic, shards); err != nil {
		return nil, err
	}
	out, err := s.subscribe(ctx, topic, shards)
	if err != nil {
		s.release(topic)
		return nil, fmt.Errorf("sqlshard: subscribe to topic %q: %w", topic, err)
	}
	return out, nil
}

// String is the subscriber's name in message.SubscriberNameFromCtx.
func (s *subscriber) String() string { return s.broker.cfg.subscriberName() }

// Close does nothing, see subscriber.
func (*subscriber) Close() error { return nil }

func (s *subscriber) subscribe(ctx context.Context, topic string, shards int) (<-chan *message.Message, error) {
	b := s.broker
	// An ack that comes while ctx ends must still reach the database, so the inner
	// subscribers are closed when it does, and their own context ends last.
	inner, cancel := context.WithCancel(outputs.WithStamp(context.WithoutCancel(ctx), b.cfg.publisherName(), func(topic string, msg *message.Message) error {
		return ordering.StampKey(topic, msg, b.cfg.Key)
	}))
	var subscribers []*watermillsql.Subscriber
	closeAll := func() {
		timer := time.AfterFunc(ackTimeout, cancel)
		defer timer.Stop()
		var all sync.WaitGroup
		for _, sub := range subscribers {
			all.Go(func() { _ = sub.Close() }) // it returns nil
		}
		all.Wait()
		cancel()
	}
	var inputs []<-chan *message.Message
	for shard := range shards {
		a := adapter{b.cfg.Dialect, b.cfg.Group, topic, shard}
		sub, err := watermillsql.NewSubscriber(b.cfg.DB, watermillsql.SubscriberConfig{
			ConsumerGroup:  b.cfg.Group,
			AckDeadline:    &b.cfg.AckDeadline,
			PollInterval:   b.cfg.PollInterval,
			RetryInterval:  b.cfg.PollInterval,
			ResendInterval: nackResendSleep,
			SchemaAdapter:  a,
			OffsetsAdapter: a,
		}, b.logger.With(watermill.LogFields{"shard": shard}))
		if err == nil {
			subscribers = append(subscribers, sub)
			var in <-chan *message.Message
			in, err = sub.Subscribe(inner, topic)
			inputs = append(inputs, in)
		}
		if err != nil {
			closeAll()
			return nil, err
		}
	}

	out := make(chan *message.Message)
	var forwarders sync.WaitGroup
	for _, in := range inputs {
		forwarders.Go(func() { forward(in, out) })
	}
	go func() {
		<-ctx.Done()
		closeAll()
		forwarders.Wait()
		s.release(topic)
		close(out)
	}()
	return out, nil
}

// forward hands out each message for as long as its delivery lasts.
func forward(in <-chan *message.Message, out chan<- *message.Message) {
	for msg := range in {
		select {
		case out <- msg:
		case <-msg.Context().Done():
		}
	}
}

// spareConnections are for a publish, and for a handler whose store has the same
// pool: with none left, subscriptions would wait for themselves.
const spareConnections = 2

func (s *subscriber) take(topic string, shards int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.topics[topic]; taken {
		return fmt.Errorf("subscribe to topic %q: %w", topic, ErrSubscribed)
	}
	need := shards + spareConnections
	for _, n := range s.topics {
		need += n
	}
	if limit := s.broker.cfg.DB.Stats().MaxOpenConnections; limit > 0 && limit < need {
		return fmt.Errorf("subscribe to topic %q: %w: DB has a limit of %d open connections, its subscribed shards and publishing need %d: raise it with SetMaxOpenConns",
			topic, ErrConnections, limit, need)
	}
	s.topics[topic] = shards
	return nil
}

func (s *subscriber) release(topic string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.topics, topic)
}
