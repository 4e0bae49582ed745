package sqlshard

import (
	"errors"
	"fmt"
)

var (
	// ErrInvalidConfig is wrapped by every problem that [Open] finds in its Config,
	// and by a dialect that [Migrate] or [Schema] can't serve.
	ErrInvalidConfig = errors.New("sqlshard: invalid config")

	// ErrSchema says that a table or column is missing, which one, and how to
	// create it. Nothing was opened.
	ErrSchema = errors.New("sqlshard: schema is not ready")

	// ErrClosed is returned after [Broker.Close]. Nothing was sent.
	ErrClosed = errors.New("sqlshard: broker closed")

	// ErrSubscribed is returned by Subscribe for a topic that this Broker consumes
	// already: the two subscriptions would share the shards, and each would see only
	// a part of the messages.
	ErrSubscribed = errors.New("sqlshard: already subscribed: two handlers that both need all messages are two groups, so two Brokers")

	// ErrConnections is returned by Subscribe when the pool of Config.DB is too small
	// for one connection per subscribed shard and two more.
	ErrConnections = errors.New("sqlshard: too few connections")

	// ErrInvalidTopic says that a topic is empty, longer than 255 bytes, or has other
	// characters than A-Z a-z 0-9 - $ : . _, to which watermill-sql restricts topics.
	ErrInvalidTopic = errors.New("sqlshard: invalid topic")

	// ErrInvalidMessage says that a message can't be stored as it is. Nothing was
	// sent; trying again can't help.
	ErrInvalidMessage = errors.New("sqlshard: message can't be stored")

	// ErrShardCount is matched by every [ShardCountError].
	ErrShardCount = errors.New("sqlshard: shard count differs")

	// ErrOutcomeUnknown says that the answer to the commit was lost: all messages of
	// the Publish are stored, or none. Publishing them again with the same UUIDs is
	// safe where consumers deduplicate.
	ErrOutcomeUnknown = errors.New("sqlshard: publish outcome unknown")
)

// ShardCountError reports a topic that has another number of shards than
// Config.Shards asks for. The topic was not touched: with another count, keys move
// to other shards and their order is lost.
type ShardCountError struct {
	Topic string
	Have  int // shards of the topic
	Want  int // Config.Shards
}

func (e *ShardCountError) Error() string {
	return fmt.Sprintf("sqlshard: topic %q has %d shards, Config.Shards is %d", e.Topic, e.Have, e.Want)
}

// Is reports whether target is ErrShardCount.
func (e *ShardCountError) Is(target error) bool { return target == ErrShardCount }
