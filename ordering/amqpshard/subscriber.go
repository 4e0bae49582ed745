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

	// leaderTimeout is how long the first consumer of a queue waits for its leader.
	leaderTimeout = 5 * time.Second
)

type subscriber struct {
	cfg    Config
	check  func(topic string, msg *message.Message) error // of the publisher
	logger watermill.LoggerAdapter

	mu     sync.Mutex // guards the rest
	closed bool
	active map[string]*subscription // by topic
}

func newSubscriber(cfg Config, check func(topic string, msg *message.Message) error, logger watermill.LoggerAdapter) *subscriber {
	return &subscriber{cfg: cfg, check: check, logger: logger, active: map[string]*subscription{}}
}

// String is the subscriber's name in message.SubscriberNameFromCtx.
func (s *subscriber) String() string { return s.cfg.subscriberName() }

// Subscribe is described at [Broker.Subscriber].
func (s *subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if err := checkTopic(s.cfg, topic); err != nil {
		return nil, err
	}
	ctx = outputs.WithStamp(ctx, s.cfg.publisherName(), s.check)
	intake, stop := context.WithCancel(ctx)
	sub := &subscription{
		cfg: s.cfg, topic: topic, stop: stop,
		logger: s.logger.With(watermill.LogFields{"topic": topic, "group": s.cfg.Group}),
		output: make(chan *message.Message), done: make(chan struct{}),
		interruptions: map[interruption]*repeats{},
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

	logging       sync.Mutex // guards interruptions
	interruptions map[interruption]*repeats

	declaring sync.Mutex // held by the shard that declares the topic again
}

// start declares the topic, opens all shards and starts them. When intake ends they
// stop, and then finished is called.
func (s *subscription) start(intake context.Context, finished func()) error {
	conn, err := s.connect(intake)
	if err != nil {
		return err
	}
	if err := checkAndDeclare(intake, conn, s.cfg, s.topic, s.logger); err != nil {
		conn.close()
		return err
	}
	streams, err := s.openAll(intake, conn)
	if err != nil {
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
		shards.Go(func() { c.run(intake, streams[shard]) })
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

// openAll consumes from the queues of all shards. It is the proof that they work: a
// queue that the broker has made by half can be declared again and is found by the
// probe. It aborts conn when intake ends.
func (s *subscription) openAll(intake context.Context, conn *connection) ([]*stream, error) {
	unwatch := conn.abortOn(intake)
	streams := make([]*stream, s.cfg.Shards)
	for shard := range streams {
		name := shardName(s.cfg, s.topic, shard)
		open, err := openStream(conn, name)
		// It was declared just now: its leader is not there, or not yet.
		for deadline := time.Now().Add(leaderTimeout); isNotFound(err) && time.Now().Before(deadline) && intake.Err() == nil; {
			wait(intake, lockPause)
			open, err = openStream(conn, name)
		}
		if isNotFound(err) {
			err = fmt.Errorf("%w: %w", errInternal, err)
		}
		if err != nil {
			if !unwatch() {
				err = intake.Err()
			}
			return nil, topologyError("queue", name, err)
		}
		streams[shard] = open
	}
	if !unwatch() {
		return nil, fmt.Errorf("amqpshard: subscribe to topic %q: %w", s.topic, intake.Err())
	}
	return streams, nil
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
// channel or the queue. It begins with a stream that is open.
func (c *consumer) run(intake context.Context, open *stream) {
	missing := false
	for {
		began := time.Now()
		var err error
		if open == nil {
			open, err = c.reopen(intake, missing)
		}
		if err == nil {
			err = c.consume(intake, open)
			open = nil
		}
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
		c.logInterruption(c.queue, explain(err), pause)
		if wait(intake, pause); intake.Err() != nil {
			return
		}
	}
}

// reopen connects where that is needed, declares a queue that is missing, and
// consumes from it.
func (c *consumer) reopen(intake context.Context, missing bool) (*stream, error) {
	conn, err := c.connect(intake)
	if err != nil {
		return nil, &connectionError{err}
	}
	if missing {
		// The broker's lock keeps out other connections, not this one's shards.
		c.declaring.Lock()
		err := redeclare(intake, conn, c.cfg, c.topic, c.shard)
		c.declaring.Unlock()
		if err != nil {
			return nil, conn.blame(err)
		}
	}
	open, err := openStream(conn, c.queue)
	return open, conn.blame(err)
}

// stream is what comes from one queue.
type stream struct {
	conn       *connection
	ch         *amqp.Channel
	closed     <-chan *amqp.Error
	deliveries <-chan amqp.Delivery
}

func openStream(conn *connection, queue string) (*stream, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	s := &stream{conn: conn, ch: ch, closed: ch.NotifyClose(make(chan *amqp.Error, 1))}
	if err = ch.Qos(1, 0, false); err != nil { // with more a nacked message loses its place
		err = fmt.Errorf("set prefetch: %w", err)
	} else if s.deliveries, err = ch.Consume(queue, "", false, false, false, false, nil); err != nil {
		err = fmt.Errorf("consume: %w", err)
	}
	if err != nil {
		_ = ch.Close()
		return nil, err
	}
	return s, nil
}

// consume hands on what comes from open until it or the intake ends, and closes it.
// It returns the reason unless that is the intake.
func (c *consumer) consume(intake context.Context, open *stream) error {
	// Closing the channel is what hands the shard over. basic.cancel would start
	// the successor while the handler here still runs.
	defer open.ch.Close()
	for {
		select {
		case <-intake.Done():
			return nil
		case delivery, ok := <-open.deliveries:
			if !ok { // else it would be taken for an empty message
				select {
				case reason := <-open.closed:
					return open.conn.blame(closedError(reason))
				default:
					return errConsumerCancelled
				}
			}
			if err := c.handle(intake, open.closed, delivery); err != nil {
				return open.conn.blame(err)
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
