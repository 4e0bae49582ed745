package kafkashard

import (
	"errors"
	"fmt"
)

var (
	// ErrInvalidConfig is wrapped by every problem that [Open] finds in its
	// Config. Nothing was opened.
	ErrInvalidConfig = errors.New("kafkashard: invalid config")

	// ErrClosed is returned after [Broker.Close]. Nothing was sent.
	ErrClosed = errors.New("kafkashard: broker closed")

	// ErrSubscribed is returned by Subscribe for a topic that this Broker
	// consumes already: the two subscriptions would share the partitions, and
	// each would see only a part of the messages.
	ErrSubscribed = errors.New("kafkashard: already subscribed: two handlers that both need all messages are two groups, so two Brokers")

	// ErrShardCount is matched by every [ShardCountError].
	ErrShardCount = errors.New("kafkashard: partition count differs")

	// ErrFenced says that another Broker has opened with this
	// Config.TransactionalID. This Broker publishes nothing any more; the
	// [PublishError] around it says what became of the messages.
	ErrFenced = errors.New("kafkashard: fenced by another Broker with the same TransactionalID")

	// ErrTooLarge says that a handler returned a message with more than
	// Producer.MaxMessageBytes of Config.Sarama. Its transaction was rolled back,
	// and the handled message is parked.
	ErrTooLarge error = permanentError("kafkashard: message is too large")

	// ErrOutcomeUnknown is matched by a [PublishError] that has messages of
	// which nobody can tell whether Kafka stored them. Publishing them again
	// with the same UUIDs is safe where consumers deduplicate.
	ErrOutcomeUnknown = errors.New("kafkashard: publish outcome unknown")
)

// permanentError is an error that package middleware does not retry.
type permanentError string

func (e permanentError) Error() string { return string(e) }

// Permanent marks it for IsPermanent of package middleware.
func (permanentError) Permanent() bool { return true }

// ShardCountError reports a topic that has another number of partitions than
// Config.Shards asks for. The topic was not touched: with another count, keys
// move to other partitions and their order is lost.
type ShardCountError struct {
	Topic string
	Have  int // partitions of the topic
	Want  int // Config.Shards
}

func (e *ShardCountError) Error() string {
	return fmt.Sprintf("kafkashard: topic %q has %d partitions, Config.Shards is %d", e.Topic, e.Have, e.Want)
}

// Is reports whether target is ErrShardCount.
func (e *ShardCountError) Is(target error) bool { return target == ErrShardCount }

// PublishError reports a Publish call that was not confirmed as a whole.
// Messages of the call that it does not name are stored.
type PublishError struct {
	Topic   string
	Unknown []string // UUIDs of messages that were sent and not confirmed: stored or not
	Unsent  []string // UUIDs of messages that were not sent
	Err     error    // the first cause
}

func (e *PublishError) Error() string {
	return fmt.Sprintf("kafkashard: publish to topic %q: %d messages not confirmed, %d not sent: %v",
		e.Topic, len(e.Unknown), len(e.Unsent), e.Err)
}

// Is reports whether target is ErrOutcomeUnknown and applies.
func (e *PublishError) Is(target error) bool {
	return target == ErrOutcomeUnknown && len(e.Unknown) > 0
}

// Unwrap returns the first cause.
func (e *PublishError) Unwrap() error { return e.Err }
