package ordering

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// PartitionKeyMetadata is the metadata field that carries a message's partition
// key: on RabbitMQ the (string) header that the exchange hashes, on Kafka the
// record key and a header of this name, in SQL a field of the stored metadata. It is set once, where the message is
// first published, and kept by retries, forwarders and the poison queue.
const PartitionKeyMetadata = "ordering_partition_key"

// PublishedAtMetadata is the metadata field with the time when a message was
// first published, in RFC 3339. A subscriber of amqpshard or kafkashard sets it
// from the broker's timestamp where the message does not carry it yet, the publisher
// of sqlshard when it stores the message; it is kept
// by retries, forwarders and the poison queue, so that a message that comes back
// from there after weeks does not look new. It is missing if the broker has no
// timestamp for the message.
const PublishedAtMetadata = "ordering_published_at"

// MaxKeyLength is the longest partition key in bytes: an AMQP short string and
// hash header value have 255 bytes at most (AMQP 0-9-1, section 4.2.5.3).
const MaxKeyLength = 255

// ErrInvalidKey is matched by every [KeyError].
var ErrInvalidKey = errors.New("ordering: invalid partition key")

// KeyError reports a message that can't be given a shard because it has no
// usable partition key. Nothing was published when it is returned.
type KeyError struct {
	Topic  string // where the message was going; empty if not known
	UUID   string // of the message
	Reason string // never holds the key itself
	Err    error  // what the KeyFunc returned, if it did
}

func (e *KeyError) Error() string {
	text := fmt.Sprintf("ordering: message %q for topic %q: %s", e.UUID, e.Topic, e.Reason)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Is reports whether target is ErrInvalidKey.
func (e *KeyError) Is(target error) bool { return target == ErrInvalidKey }

// Unwrap returns the error of the KeyFunc.
func (e *KeyError) Unwrap() error { return e.Err }

// KeyFunc returns the partition key of a message: the id of the entity that the
// message is about. Keys are raw bytes: nothing is trimmed, folded or
// normalised. An empty key, one longer than [MaxKeyLength] bytes and one that
// is not UTF-8 are refused at publish. There is one KeyFunc per topic: two
// producers that disagree on it lose the order.
type KeyFunc func(topic string, msg *message.Message) (string, error)

// KeyFromMetadata returns a KeyFunc that reads one metadata field.
func KeyFromMetadata(field string) KeyFunc {
	return func(_ string, msg *message.Message) (string, error) {
		return msg.Metadata.Get(field), nil
	}
}

// CheckKey returns the reason why key can't be a partition key, or "".
func CheckKey(key string) string {
	switch {
	case key == "":
		return "no partition key: set the metadata field " + PartitionKeyMetadata + ", or Key in the broker's Config"
	case len(key) > MaxKeyLength:
		return fmt.Sprintf("partition key has %d bytes, the limit is %d", len(key), MaxKeyLength)
	case !utf8.ValidString(key):
		return "partition key is not valid UTF-8"
	}
	return ""
}

// StampKey sets [PartitionKeyMetadata] on a message that does not carry it yet
// to what key returns; a key that the message already carries is kept. It
// returns a [KeyError] for a message without a usable key and leaves it as it
// was. A nil key accepts only messages that carry their key.
func StampKey(topic string, msg *message.Message, key KeyFunc) error {
	value := msg.Metadata.Get(PartitionKeyMetadata)
	if value == "" && key != nil {
		var err error
		if value, err = key(topic, msg); err != nil {
			return &KeyError{Topic: topic, UUID: msg.UUID, Reason: "key function failed", Err: err}
		}
	}
	if reason := CheckKey(value); reason != "" {
		return &KeyError{Topic: topic, UUID: msg.UUID, Reason: reason}
	}
	if msg.Metadata == nil {
		msg.Metadata = message.Metadata{}
	}
	msg.Metadata.Set(PartitionKeyMetadata, value)
	return nil
}

// EntityInt64 is the partition key of an entity with a numeric id: decimal.
func EntityInt64(id int64) string { return strconv.FormatInt(id, 10) }

// EntityUUID is the partition key of an entity with a UUID as its id: the
// canonical form, 36 characters in lower case, whatever case text has. It returns
// [ErrInvalidKey] for text that is not 8-4-4-4-12 hexadecimal digits.
func EntityUUID(text string) (string, error) {
	valid := len(text) == 36
	for i := 0; valid && i < len(text); i++ {
		switch c := text[i]; i {
		case 8, 13, 18, 23:
			valid = c == '-'
		default:
			valid = '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f'
		}
	}
	if !valid {
		return "", fmt.Errorf("%w: not a UUID of 36 characters", ErrInvalidKey)
	}
	return strings.ToLower(text), nil
}

// EntityParts is the partition key of an entity that several parts identify, each
// with its length in bytes before it, so that "a", "bc" and "ab", "c" differ.
func EntityParts(parts ...string) string {
	var b strings.Builder
	for _, part := range parts {
		b.WriteString(strconv.Itoa(len(part)))
		b.WriteByte(':')
		b.WriteString(part)
	}
	return b.String()
}
