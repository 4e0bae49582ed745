package amqpshard

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cenkalti/backoff/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/internal/outputs"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

const (
	minReconnectPause = 50 * time.Millisecond
	maxReconnectPause = 5 * time.Second

	// RabbitMQ 3 tells a consumer that its queue was deleted 10 to 30 ms after the
	// fact. If the queue is there again by then, it makes the consumer one of the
	// new queue instead, and then drops what that queue delivers: the shard stands
	// still for as long as the channel lives.
	redeclarePause = time.Second

	// A nacked message comes back at once and counts towards the delivery limit.
	// The pause before the nack makes the limit last through a short outage.
	minNackPause = 10 * time.Millisecond
	maxNackPause = 5 * time.Second

	watchInterval = time.Minute
)

type subscriber struct {
	cfg    Config
	logger watermill.LoggerAdapter

	mu     sync.Mutex // guards the rest
	closed bool
	active map[string]*subscription // by topic
}

func newSubscriber(cfg Config, logger watermill.LoggerAdapter) *subscriber {
	return &subscriber{cfg: cfg, logger: logger, active: map[string]*subscription{}}
}

// String is the subscriber's name in message.SubscriberNameFromCtx.
func (s *subscriber) String() string { return s.cfg.subscriberName() }

// Subscribe is described at [Broker.Subscriber].
func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if err := checkTopic(s.cfg, topic); err != nil {
		return nil, err
	}
	ctx = outputs.WithStamp(ctx, s.cfg.publisherName(), func(topic string, msg *message.Message) error {
		return ordering.StampKey(topic, msg, s.cfg.Key)
	})
	intake, stop := context.WithCancel(ctx)
	sub := &subscription{
		cfg: s.cfg, topic: topic, stop: stop,
		logger: s.logger.With(watermill.LogFields{"topic": topic, "group": s.cfg.Group}),
		output: make(chan *message.Message), done: make(chan struct{}),
	}
	if err := s.add(sub); err != nil {
		stop()
		return nil, err
	}
	remove := func() {
		stop()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.active, topic)
		close(sub.done)
	}
	if err := sub.start(intake, remove); err != nil {
		remove()
		return nil, err
	}
	return sub.output, nil
}

// Close is described at [Broker.Subscriber].
func (s *subscriber) Close() error {
	s.mu.Lock()
	s.closed = true
	var stopped []*subscription
	for _, sub := range s.active {
		sub.stop()
		stopped = append(stopped, sub)
	}
	s.mu.Unlock()
	for _, sub := range stopped {
		<-sub.done
	}
	return nil
}

func (s *subscriber) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

func (s *subscriber) add(sub *subscription) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return ErrClosed
	}
	if s.active[sub.topic] != nil {
		return fmt.Errorf("%w: topic %q, group %q: two handlers that both need all messages of a topic are two groups, "+
			"so two Brokers", ErrAlreadySubscribed, sub.topic, sub.cfg.Group)
	}
	s.active[sub.topic] = sub
	return nil
}

// subscription is one topic: a connection, a channel and a goroutine per shard,
// one output.
type subscription struct {
	cfg    Config
	topic  string
	logger watermill.LoggerAdapter
	output chan *message.Message
	stop   context.CancelFunc // ends the intake
	done   chan struct{}      // closed when all is over

	mu   sync.Mutex // guards conn, and is held while it is made
	conn *connection

	declaring sync.Mutex // held by the shard that declares the topic again
}

// start declares the topic and starts the shards. When intake ends they stop,
// and then finished is called.
func (s *subscription) start(intake context.Context, finished func()) error {
	conn, err := s.connect(intake)
	if err != nil {
		return err
	}
	if err := checkAndDeclare(intake, conn, s.cfg, s.topic, s.logger); err != nil {
		conn.close()
		return err
	}

	// Handlers go on when the intake ends, for DrainTimeout. What then still waits
	// for an answer of the broker is cut off.
	drain, expire := context.WithCancelCause(context.WithoutCancel(intake))
	context.AfterFunc(intake, func() {
		wait(drain, s.cfg.DrainTimeout)
		expire(ErrDrainTimeout)
		select {
		case <-s.done:
		case <-time.After(closeTimeout):
			s.mu.Lock()
			defer s.mu.Unlock()
			s.conn.abort()
		}
	})
	var shards sync.WaitGroup
	for shard := range s.cfg.Shards {
		c := newConsumer(s, shard, drain)
		shards.Go(func() { c.run(intake) })
	}
	shards.Go(func() { s.watch(intake) })
	go func() {
		shards.Wait()
		expire(nil)
		s.mu.Lock()
		s.conn.close()
		s.mu.Unlock()
		close(s.output)
		finished()
	}()
	return nil
}

// connect returns the connection, a new one if there is none that works.
func (s *subscription) connect(ctx context.Context) (*connection, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil && !s.conn.IsClosed() {
		return s.conn, nil
	}
	conn, err := dial(ctx, s.cfg, "subscriber "+s.topic)
	if err != nil {
		return nil, err
	}
	s.conn = conn
	return conn, nil
}

// watch logs when messages come to the queues that nothing consumes.
func (s *subscription) watch(intake context.Context) {
	seen := map[string]int{}
	for ; intake.Err() == nil; wait(intake, watchInterval) {
		conn, err := s.connect(intake)
		if err != nil {
			continue
		}
		ch, err := conn.Channel()
		if err != nil {
			continue
		}
		for queue, reason := range map[string]error{
			deadQueue(s.cfg, s.topic): errDead,
			unrouted(s.cfg, s.topic):  errUnrouted,
		} {
			state, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
			if err != nil {
				break // it closes the channel
			}
			if state.Messages > seen[queue] {
				s.logger.Error("Messages wait for somebody to look at them", reason,
					watermill.LogFields{"queue": queue, "messages": state.Messages})
			}
			seen[queue] = state.Messages
		}
		_ = ch.Close()
	}
}

// consumer is one shard of a subscription.
type consumer struct {
	*subscription
	shard    int
	queue    string
	drain    context.Context             // parent of the messages' contexts; ends when the drain timeout is over
	pauses   *backoff.ExponentialBackOff // before the next attempt to consume
	failures int                         // nacks in a row
}

func newConsumer(s *subscription, shard int, drain context.Context) *consumer {
	pauses := backoff.NewExponentialBackOff()
	pauses.InitialInterval, pauses.MaxInterval, pauses.Multiplier = minReconnectPause, maxReconnectPause, 2
	return &consumer{subscription: s, shard: shard, queue: shardName(s.cfg, s.topic, shard), drain: drain, pauses: pauses}
}

// run consumes until the intake ends, whatever happens to the connection, the
// channel or the queue.
func (c *consumer) run(intake context.Context) {
	missing := false
	for intake.Err() == nil {
		began := time.Now()
		err := c.consume(intake, missing)
		if intake.Err() != nil {
			return
		}
		missing = errors.Is(err, errConsumerCancelled) || isNotFound(err)
		if time.Since(began) > maxReconnectPause {
			c.pauses.Reset()
		}
		pause := c.pauses.NextBackOff()
		if missing {
			pause = max(pause, redeclarePause)
		}
		c.logger.Error("Consumer of a shard interrupted", err, watermill.LogFields{"queue": c.queue, "retry_in": pause.String()})
		wait(intake, pause)
	}
}

// consume runs one consumer until it or the intake ends. It returns the reason
// unless that is the intake.
func (c *consumer) consume(intake context.Context, missing bool) error {
	conn, err := c.connect(intake)
	if err != nil {
		return err
	}
	if missing {
		// The broker's lock keeps out other connections, not this one's shards.
		c.declaring.Lock()
		err := redeclare(intake, conn, c.cfg, c.topic, c.shard)
		c.declaring.Unlock()
		if err != nil {
			return err
		}
	}
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	// Closing the channel is what hands the shard over. basic.cancel would start
	// the successor while the handler here still runs.
	defer ch.Close()
	closed := ch.NotifyClose(make(chan *amqp.Error, 1))
	if err := ch.Qos(1, 0, false); err != nil { // with more a nacked message loses its place
		return fmt.Errorf("set prefetch: %w", err)
	}
	deliveries, err := ch.Consume(c.queue, "", false, false, false, false, nil)
	if err != nil {
		return fmt.Errorf("consume: %w", err)
	}
	for {
		select {
		case <-intake.Done():
			return nil
		case delivery, ok := <-deliveries:
			if !ok { // else it would be taken for an empty message
				select {
				case reason := <-closed:
					return closedError(reason)
				default:
					return errConsumerCancelled
				}
			}
			if err := c.handle(intake, closed, delivery); err != nil {
				return err
			}
		}
	}
}

// handle passes a delivery on and waits until it is settled.
func (c *consumer) handle(intake context.Context, closed <-chan *amqp.Error, delivery amqp.Delivery) error {
	if _, canary := delivery.Headers[canaryHeader]; canary {
		return delivery.Ack(false) // of a probe that died
	}
	ctx, cancel := context.WithCancelCause(c.drain)
	defer cancel(nil)
	msg, err := (Marshaler{}).Unmarshal(delivery)
	if err != nil {
		return err // not reached
	}
	msg.SetContext(ctx)

	// A delivery that is not settled goes back when the channel is closed.
	select {
	case c.output <- msg:
	case <-intake.Done():
		return nil
	case reason := <-closed:
		return closedError(reason)
	}
	select {
	case <-msg.Acked():
		c.failures = 0
		c.pauses.Reset()
		return delivery.Ack(false)
	case <-msg.Nacked():
		cancel(nil)
		pause := min(minNackPause<<min(c.failures, 20), maxNackPause)
		c.failures++
		wait(intake, pause)
		return delivery.Nack(false, true)
	case <-c.drain.Done():
		return context.Cause(c.drain)
	case reason := <-closed:
		// The broker delivers the message again, maybe to this process: not before
		// the handler has ended.
		cancel(ErrDeliveryLost)
		select {
		case <-msg.Acked():
		case <-msg.Nacked():
		case <-c.drain.Done():
		}
		return closedError(reason)
	}
}

func closedError(reason *amqp.Error) error {
	if reason == nil {
		return amqp.ErrClosed
	}
	return reason
}

func wait(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
