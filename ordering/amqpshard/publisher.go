package amqpshard

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

type publisher struct {
	cfg Config

	// closing is read-locked by a running Publish.
	closing sync.RWMutex
	closed  bool

	// turn holds a token while somebody sends. It guards link.
	turn chan struct{}
	link *link

	frameSize atomic.Int64 // of the last connection
}

func newPublisher(cfg Config) *publisher {
	return &publisher{cfg: cfg, turn: make(chan struct{}, 1)}
}

// Publish is described at [Broker.Publisher].
func (p *publisher) Publish(topic string, messages ...*message.Message) error {
	p.closing.RLock()
	defer p.closing.RUnlock()
	if p.closed {
		return ErrClosed
	}
	if len(messages) == 0 {
		return nil
	}
	publishings, err := p.marshal(topic, messages)
	if err != nil {
		return err
	}

	timeout := fmt.Errorf("not confirmed within %s", p.cfg.PublishTimeout)
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(messages[0].Context()), p.cfg.PublishTimeout, timeout)
	defer cancel()
	results := &batch{topic: topic, messages: messages, fates: make([]fate, len(messages))}
	if err = p.send(ctx, results, publishings); errors.Is(err, ErrInvalidMessage) {
		return err
	}
	results.unsettled.Wait() // ends with ctx at the latest, see link.send
	if results.stop != nil {
		results.stop() // before cancel, which would abort the link
	}
	return results.error(err)
}

// String is the name that the Router knows the publisher by. It has the group,
// because Brokers of several groups can have different Keys.
func (p *publisher) String() string { return p.cfg.publisherName() }

// Close does nothing, see [ordering.Broker].
func (p *publisher) Close() error { return nil }

func (p *publisher) close() {
	p.closing.Lock()
	defer p.closing.Unlock()
	p.closed = true
	if p.link != nil {
		p.link.conn.close()
		<-p.link.done
	}
}

func (p *publisher) marshal(topic string, messages []*message.Message) ([]amqp.Publishing, error) {
	if err := checkTopic(p.cfg, topic); err != nil {
		return nil, err
	}
	publishings := make([]amqp.Publishing, len(messages))
	for i, msg := range messages {
		if err := ordering.StampKey(topic, msg, p.cfg.Key); err != nil {
			return nil, err
		}
		var err error
		if publishings[i], err = (Marshaler{}).Marshal(msg); err != nil {
			var invalid *MessageError
			if errors.As(err, &invalid) {
				invalid.Topic = topic
			}
			return nil, err
		}
	}
	return publishings, nil
}

// check refuses a message that a handler returns and [publisher.Publish] never takes.
func (p *publisher) check(topic string, msg *message.Message) error {
	publishings, err := p.marshal(topic, []*message.Message{msg})
	if err != nil {
		return err
	}
	return checkFrame(topic, msg, publishings[0], int(p.frameSize.Load()))
}

func checkFrame(topic string, msg *message.Message, publishing amqp.Publishing, limit int) error {
	if size := headerFrameSize(publishing) + brokerHeaders; limit > 0 && size > limit {
		return &MessageError{Topic: topic, UUID: msg.UUID, Reason: fmt.Sprintf(
			"metadata takes a frame of %d bytes with what the broker adds, the limit is %d (frame_max)", size, limit)}
	}
	return nil
}

// send sends everything, or what it can before an error. One sender at a time:
// that keeps the order.
func (p *publisher) send(ctx context.Context, results *batch, publishings []amqp.Publishing) error {
	select {
	case p.turn <- struct{}{}:
		defer func() { <-p.turn }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	link, err := p.connect(ctx)
	if err != nil {
		return err
	}
	return link.send(ctx, results, publishings)
}

// connect returns the link, a new one if there is none that works.
func (p *publisher) connect(ctx context.Context) (*link, error) {
	if p.link != nil {
		if p.link.failure() == nil {
			return p.link, nil
		}
		p.link.conn.close() // if only the channel was closed
		p.link = nil
	}
	conn, err := dial(ctx, p.cfg, "publisher")
	if err != nil {
		return nil, err
	}
	defer conn.abortOn(ctx)()
	link, err := newLink(conn)
	if err != nil {
		conn.close()
		return nil, err
	}
	p.link = link
	p.frameSize.Store(int64(conn.Config.FrameSize))
	return link, nil
}

// fate is what became of a message.
type fate int

const (
	unsent fate = iota
	unconfirmed
	confirmed
	unroutable
	nacked
)

// batch holds the messages of one Publish. The fates are written by the link,
// under its mutex, until unsettled is done.
type batch struct {
	topic     string
	messages  []*message.Message
	fates     []fate
	unsettled sync.WaitGroup
	stop      func() bool // see link.send
	err       error       // why the link failed
}

func (b *batch) error(err error) error {
	result := &PublishError{Topic: b.topic, Err: err}
	if b.err != nil {
		result.Err = b.err // more to the point than what the client library returned
	}
	ok := result.Err == nil
	for i, fate := range b.fates {
		uuid := b.messages[i].UUID
		ok = ok && fate == confirmed
		switch fate {
		case unsent:
			result.Unsent = append(result.Unsent, uuid)
		case nacked:
			result.Err = errNacked
			fallthrough // another group's queue may have stored it
		case unconfirmed:
			result.Unconfirmed = append(result.Unconfirmed, uuid)
		case unroutable:
			result.Unroutable = append(result.Unroutable, uuid)
		case confirmed:
		}
	}
	if ok {
		return nil
	}
	return result
}

// link is a connection with one channel in confirm mode. It is given up at the
// first failure.
type link struct {
	conn     *connection
	ch       *amqp.Channel
	declared map[string]bool // topics; guarded by publisher.turn
	done     chan struct{}   // closed when all is settled

	mu       sync.Mutex // guards the rest
	sent     uint64     // delivery tag of the last publish
	returned uint64     // delivery tag of the last publish that came back
	pending  map[uint64]*pending
	blocked  string // why the broker does not read, or ""
	err      error
}

// pending is a message that was sent and is not confirmed yet.
//
// Confirmations come in the order of publishes, after returns, but their Ack can't
// be trusted: where a refusal (nack) comes before the answers to earlier messages,
// the client library forgets it when these are acknowledged together (multiple).
// The verdict is right, and set when the confirmation comes.
type pending struct {
	*batch
	index    int
	key      string
	returned bool
	answered bool // the confirmation has come
	verdict  *amqp.DeferredConfirmation
}

func newLink(conn *connection) (*link, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("amqpshard: open channel: %w", err)
	}
	if err := ch.Confirm(false); err != nil {
		return nil, fmt.Errorf("amqpshard: turn confirms on: %w", err)
	}
	l := &link{
		conn: conn, ch: ch,
		declared: map[string]bool{}, pending: map[uint64]*pending{}, done: make(chan struct{}),
	}
	// Without buffers: the client's reader hands over returns and confirms in the
	// order of their arrival, and the return of a message comes before its confirm.
	go l.collect(
		ch.NotifyReturn(make(chan amqp.Return)),
		ch.NotifyPublish(make(chan amqp.Confirmation)),
		conn.NotifyBlocked(make(chan amqp.Blocking)),
		ch.NotifyClose(make(chan *amqp.Error, 1)),
	)
	return l, nil
}

func (l *link) send(ctx context.Context, results *batch, publishings []amqp.Publishing) error {
	for i, publishing := range publishings {
		if err := checkFrame(results.topic, results.messages[i], publishing, l.conn.Config.FrameSize); err != nil {
			return err
		}
	}
	// A broker with an alarm does not read: only the end of the connection ends a
	// write, and the wait for confirms.
	results.stop = context.AfterFunc(ctx, func() { l.abort(context.Cause(ctx)) })
	if err := l.declare(results.topic); err != nil {
		if cause := l.failure(); cause != nil {
			return cause
		}
		return err
	}
	for i, publishing := range publishings {
		tag, err := l.register(results, i)
		if err != nil {
			return err
		}
		// The routing key is for the groups that route by Slots.
		slot := ordering.Shard(results.messages[i].Metadata.Get(ordering.PartitionKeyMetadata), SlotCount)
		verdict, err := l.ch.PublishWithDeferredConfirm(results.topic, strconv.Itoa(slot), true, false, publishing)
		if err != nil {
			l.abort(err)
			return l.failure()
		}
		l.settle(tag, func(p *pending) { p.verdict = verdict })
	}
	return nil
}

func (l *link) declare(topic string) error {
	if l.declared[topic] {
		return nil
	}
	ch, err := l.conn.Channel() // of its own, because a refusal closes it
	if err != nil {
		return fmt.Errorf("open channel: %w", err)
	}
	defer ch.Close()
	if err := declareTopic(ch, topic); err != nil {
		return err
	}
	l.declared[topic] = true
	return nil
}

// register returns the delivery tag that the message will have.
func (l *link) register(results *batch, index int) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return 0, l.err
	}
	l.sent++
	results.fates[index] = unconfirmed
	results.unsettled.Add(1)
	l.pending[l.sent] = &pending{
		batch: results, index: index,
		key: results.messages[index].Metadata.Get(ordering.PartitionKeyMetadata),
	}
	return l.sent, nil
}

// collect settles what was sent until the channel is closed.
func (l *link) collect(returns <-chan amqp.Return, confirms <-chan amqp.Confirmation,
	blocked <-chan amqp.Blocking, closed <-chan *amqp.Error,
) {
	defer close(l.done)
	for {
		select {
		case returned, ok := <-returns:
			if !ok {
				returns = nil
				continue
			}
			l.settleReturn(returned)
		case confirm, ok := <-confirms:
			if !ok {
				l.fail(<-closed)
				return
			}
			l.settle(confirm.DeliveryTag, func(p *pending) { p.answered = true })
		case state, ok := <-blocked:
			if !ok {
				blocked = nil
				continue
			}
			l.mu.Lock()
			l.blocked = state.Reason
			l.mu.Unlock()
		}
	}
}

// settleReturn finds the message that came back. Returns come in the order of
// the publishes, so the search goes on where the last one ended.
func (l *link) settleReturn(returned amqp.Return) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.returned < l.sent {
		l.returned++
		p, ok := l.pending[l.returned]
		if ok && p.topic == returned.Exchange && p.messages[p.index].UUID == returned.Headers[UUIDHeader] &&
			p.key == returned.Headers[ordering.PartitionKeyMetadata] {
			p.returned = true
			return
		}
	}
	l.abortLocked(errors.New("the broker returned a message that was not sent"))
}

// settle notes what has become known of a message, and ends the wait for it when
// that is all.
func (l *link) settle(tag uint64, note func(*pending)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p, ok := l.pending[tag]
	if !ok {
		return
	}
	if note(p); !p.answered || p.verdict == nil {
		return
	}
	delete(l.pending, tag)
	switch {
	case p.returned:
		p.fates[p.index] = unroutable
	case p.verdict.Acked():
		p.fates[p.index] = confirmed
	default:
		p.fates[p.index] = nacked
	}
	p.unsettled.Done()
}

// fail ends the link: nothing more will be confirmed.
func (l *link) fail(cause *amqp.Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = ErrClosed
		if cause != nil {
			l.err = cause
		}
	}
	for _, p := range l.pending {
		p.err = l.err
		p.unsettled.Done()
	}
	clear(l.pending)
}

func (l *link) abort(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.abortLocked(err)
}

func (l *link) abortLocked(err error) {
	if l.err == nil {
		l.err = err
		if l.blocked != "" {
			l.err = fmt.Errorf("%w (the broker blocks publishers: %s)", err, l.blocked)
		}
	}
	l.conn.abort()
}

func (l *link) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}
