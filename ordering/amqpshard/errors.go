package amqpshard

import (
	"errors"
	"fmt"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

var (
	// ErrInvalidConfig is matched by every problem that [Open] finds in a
	// [Config].
	ErrInvalidConfig = errors.New("amqpshard: invalid config")

	// ErrInvalidTopic is matched by the error for a topic that can't be a name
	// on the broker. Nothing was declared or published.
	ErrInvalidTopic = errors.New("amqpshard: invalid topic")

	// ErrClosed is returned by everything that is called after Close. Nothing
	// was declared or published.
	ErrClosed = errors.New("amqpshard: closed")

	// ErrAlreadySubscribed is returned by Subscribe while another subscription
	// of the same topic is active on the same Broker.
	ErrAlreadySubscribed = errors.New("amqpshard: topic is already subscribed")

	// ErrPluginMissing is returned when the broker lacks the exchange type
	// x-consistent-hash, which ConsistentHash needs.
	ErrPluginMissing = errors.New("amqpshard: exchange type x-consistent-hash is not available: " +
		"run `rabbitmq-plugins enable rabbitmq_consistent_hash_exchange` on every node of the broker, " +
		"or set Config.Routing to Slots")

	// ErrTopology is matched by every [TopologyError].
	ErrTopology = errors.New("amqpshard: topology")

	// ErrInvalidMessage is matched by every [MessageError].
	ErrInvalidMessage = errors.New("amqpshard: message can't be sent")

	// ErrUnroutable is matched by a [PublishError] that has Unroutable messages.
	ErrUnroutable = errors.New("amqpshard: unroutable")

	// ErrDeliveryLost is the cause (see [context.Cause]) with which a message's
	// context ends when its channel or connection is gone: the broker delivers
	// the message again, so what its handler does must be rolled back.
	ErrDeliveryLost = errors.New("amqpshard: delivery lost")

	// ErrDrainTimeout is the cause with which a message's context ends when its
	// handler still runs DrainTimeout after the subscription was told to stop.
	// The broker delivers the message again.
	ErrDrainTimeout = errors.New("amqpshard: drain timeout")
)

var (
	errConsumerCancelled = errors.New("the broker cancelled the consumer, or its queue was deleted")
	errDead              = errors.New("they came to the delivery limit")
	errUnrouted          = errors.New("no shard took them, and their publishers were refused")
	errNacked            = errors.New("the broker refused a message (basic.nack): a queue is full or broken, see the broker's log, " +
		"or a group has no queue for the message and shows a copy in <topic>.<group>.unrouted")
	errInternal = errors.New("the broker failed itself, see its log (RabbitMQ 3.10 may need a restart of the node, see docs/rabbitmq.md)")
)

// explain says what an INTERNAL_ERROR of the broker means: its own text says nothing.
func explain(err error) error {
	var refused *amqp.Error
	if errors.As(err, &refused) && refused.Code == amqp.InternalError && !errors.Is(err, errInternal) {
		return fmt.Errorf("%w: %w", errInternal, err)
	}
	return err
}

// TopologyError reports an exchange or queue that could not be declared or
// bound, or that does not get the messages that it should. What existed before is unchanged; what was declared before it stays.
type TopologyError struct {
	Kind string // "exchange", "queue" or "binding"
	Name string
	Err  error
}

func (e *TopologyError) Error() string {
	return fmt.Sprintf("amqpshard: %s %q: %v", e.Kind, e.Name, e.Err)
}

// Is reports whether target is ErrTopology.
func (e *TopologyError) Is(target error) bool { return target == ErrTopology }

// Unwrap returns the cause, an *amqp091.Error if the broker refused.
func (e *TopologyError) Unwrap() error { return e.Err }

// MessageError reports a message that AMQP can't carry and that would close the
// connection. Nothing was published when it is returned.
type MessageError struct {
	Topic  string
	UUID   string // of the message
	Reason string
}

func (e *MessageError) Error() string {
	return fmt.Sprintf("amqpshard: message %q for topic %q: %s", e.UUID, e.Topic, e.Reason)
}

// Permanent reports to IsPermanent of package middleware that a handler which returns
// such a message is not to be tried again.
func (*MessageError) Permanent() bool { return true }

// Is reports whether target is ErrInvalidMessage.
func (e *MessageError) Is(target error) bool { return target == ErrInvalidMessage }

// PublishError says what became of the messages of a Publish that failed. The
// messages that are in none of its lists are stored. The lists hold message
// UUIDs in the order of the call.
type PublishError struct {
	Topic       string
	Unroutable  []string // no queue took them: not stored
	Unconfirmed []string // sent and not confirmed: stored in all, some or none of the queues
	Unsent      []string // not stored
	Err         error    // nil if the only problem is Unroutable
}

func (e *PublishError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "amqpshard: publish to topic %q", e.Topic)
	list := func(what string, uuids []string) {
		if len(uuids) == 0 {
			return
		}
		const shown = 3
		fmt.Fprintf(&b, ": %d %s %q", len(uuids), what, uuids[:min(shown, len(uuids))])
		if len(uuids) > shown {
			b.WriteString(" and others")
		}
	}
	list("unroutable, no group has declared the topic (see Broker.Declare),", e.Unroutable)
	list("unconfirmed, may or may not be stored,", e.Unconfirmed)
	list("not sent", e.Unsent)
	if e.Err != nil {
		fmt.Fprintf(&b, ": %v", e.Err)
	}
	return b.String()
}

// Is reports whether target is ErrUnroutable and there are Unroutable messages.
func (e *PublishError) Is(target error) bool {
	return target == ErrUnroutable && len(e.Unroutable) > 0
}

// Unwrap returns the cause.
func (e *PublishError) Unwrap() error { return e.Err }
