package amqpshard

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Defaults and bounds of [Config].
const (
	DefaultShards         = 8
	DefaultDeliveryLimit  = 50
	DefaultDialTimeout    = 10 * time.Second
	DefaultPublishTimeout = 30 * time.Second
	DefaultDrainTimeout   = 30 * time.Second

	MaxShards        = 1000 // shard numbers have three digits
	MaxDeliveryLimit = 1_000_000

	// SlotCount is the number of slots, and the limit of Shards with [Slots].
	SlotCount = 256
	// MaxUnrouted is how many messages the queue <topic>.<group>.unrouted keeps,
	// the newest ones.
	MaxUnrouted = 1000
)

// Routing is how the messages of a group are spread over its shards. Publishers
// need not know it: groups of one topic may differ.
type Routing int

const (
	// ConsistentHash lets an exchange of type x-consistent-hash choose the shard by
	// the header [ordering.PartitionKeyMetadata]. It needs the broker's plugin
	// rabbitmq_consistent_hash_exchange. Keys can move when the broker restarts.
	ConsistentHash Routing = iota

	// Slots lets a direct exchange choose the shard by the message's routing key,
	// which a publisher of this package sets to the slot of the partition key:
	// ordering.Shard(key, SlotCount), in decimal. Slot s belongs to shard s modulo
	// Shards. No plugin is needed, and where Shards is a power of two a key has the
	// number of its Kafka partition. Foreign publishers must set the routing key:
	// what comes with another is refused.
	//
	// Slots are dealt out as they come: with Shards a power of two all shards have
	// the same number, else the largest has one more than the smallest, so that
	// it gets up to SlotCount/Shards rounded up of SlotCount of the keys.
	Slots
)

func (r Routing) String() string {
	switch r {
	case ConsistentHash:
		return "ConsistentHash"
	case Slots:
		return "Slots"
	}
	return "Routing(" + strconv.Itoa(int(r)) + ")"
}

// Config holds the settings of a [Broker]. The zero value of an optional field
// means its default.
type Config struct {
	// URL of the broker, amqp:// or amqps://. Required. It is never part of an
	// error or a log.
	URL string

	// Group is the consumer group: each group gets every message of a topic.
	// Required; without a ".", which separates it from the topic in the names of
	// queues and exchanges.
	Group string

	// Shards is the number of queues per topic and group, 1 to MaxShards,
	// DefaultShards (8) if 0; up to SlotCount with Slots. It can't be changed while
	// the shards' exchanges exist.
	Shards int

	// Routing spreads messages over the shards, ConsistentHash if 0. It can't be
	// changed while the group's exchange exists.
	Routing Routing

	// Key returns the partition key of a message that does not carry
	// ordering.PartitionKeyMetadata yet. Nil: every message must carry it.
	Key ordering.KeyFunc

	// DeliveryLimit is how often the broker returns a message to its shard before
	// it moves it to the queue <topic>.<group>.dead, 1 to MaxDeliveryLimit,
	// DefaultDeliveryLimit (50) if 0. A message that was nacked comes back first
	// in its shard, after a pause that grows from 10ms to 5s.
	DeliveryLimit int

	// DialTimeout bounds one attempt to connect, AMQP handshake included.
	// DefaultDialTimeout (10s) if 0.
	DialTimeout time.Duration

	// PublishTimeout bounds one Publish, from the wait for its turn to the last
	// confirm. DefaultPublishTimeout (30s) if 0.
	PublishTimeout time.Duration

	// DrainTimeout bounds how long running handlers are waited for when a
	// subscription ends. DefaultDrainTimeout (30s) if 0.
	DrainTimeout time.Duration

	// TLS for an amqps:// URL. Nil: what the URL's parameters say, else the
	// system's certificate authorities.
	TLS *tls.Config
}

func (c Config) publisherName() string { return "amqpshard.publisher(" + c.Group + ")" }

// subscriberName is how the Router knows the subscriber of this group's Brokers.
func (c Config) subscriberName() string { return "amqpshard.subscriber(" + c.Group + ")" }

func (c Config) withDefaults() Config {
	setDefault(&c.Shards, DefaultShards)
	setDefault(&c.DeliveryLimit, DefaultDeliveryLimit)
	setDefault(&c.DialTimeout, DefaultDialTimeout)
	setDefault(&c.PublishTimeout, DefaultPublishTimeout)
	setDefault(&c.DrainTimeout, DefaultDrainTimeout)
	return c
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// validate reports all problems of a config with defaults.
func (c Config) validate() error {
	var problems []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Errorf("%w: "+format, append([]any{ErrInvalidConfig}, args...)...))
		}
	}
	// The parser's own error is left out, because it quotes the URL.
	uri, err := amqp.ParseURI(c.URL)
	check(c.URL != "", "URL is required")
	check(c.URL == "" || err == nil, "URL is not an amqp:// or amqps:// URL "+
		"(reserved characters in its user name and password must be percent-encoded)")
	check(c.TLS == nil || err != nil || uri.Scheme == "amqps", "TLS is set, but the URL is not amqps://")
	check(c.Group != "", "Group is required")
	check(!strings.Contains(c.Group, "."), `Group is %q, it can't contain "."`, c.Group)
	check(utf8.ValidString(c.Group), "Group is %q, it must be UTF-8", c.Group)
	check(len(c.Group) <= maxNameLength/2, "Group has %d bytes, the limit is %d", len(c.Group), maxNameLength/2)
	check(c.Shards >= 1 && c.Shards <= MaxShards, "Shards is %d, it must be 1 to %d", c.Shards, MaxShards)
	check(c.Routing == ConsistentHash || c.Routing == Slots, "Routing is %d, it must be ConsistentHash or Slots", int(c.Routing))
	check(c.Routing != Slots || c.Shards <= SlotCount, "Shards is %d, with Slots it must be at most %d", c.Shards, SlotCount)
	check(c.DeliveryLimit >= 1 && c.DeliveryLimit <= MaxDeliveryLimit,
		"DeliveryLimit is %d, it must be 1 to %d", c.DeliveryLimit, MaxDeliveryLimit)
	check(c.DialTimeout > 0, "DialTimeout is %s, it must be positive", c.DialTimeout)
	check(c.PublishTimeout > 0, "PublishTimeout is %s, it must be positive", c.PublishTimeout)
	check(c.DrainTimeout > 0, "DrainTimeout is %s, it must be positive", c.DrainTimeout)
	return errors.Join(problems...)
}

// address returns host:port of the URL.
func (c Config) address() string {
	uri, err := amqp.ParseURI(c.URL)
	if err != nil {
		return ""
	}
	return net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port))
}
