package deduplicator

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

// KeyFunc returns the idempotency key of a message: the value that stays the
// same however often the message is sent. An error, usually one that wraps
// [ErrNoKey], is permanent: the message is parked.
//
// The best key is an id that the producer made when the event was born and
// stored with it. The broker's own message id does not survive a producer that
// sends again.
type KeyFunc func(msg *message.Message) (string, error)

// FromMetadata returns a KeyFunc that reads one metadata field.
func FromMetadata(field string) KeyFunc {
	return func(msg *message.Message) (string, error) {
		if key := msg.Metadata.Get(field); key != "" {
			return key, nil
		}
		return "", fmt.Errorf("%w: metadata field %q is missing or empty", ErrNoKey, field)
	}
}

// FromUUID returns a KeyFunc that reads the message's UUID. It tells copies that
// the broker made; it protects from a producer that sends again only if that
// producer keeps the UUID.
func FromUUID() KeyFunc {
	return func(msg *message.Message) (string, error) {
		if msg.UUID != "" {
			return msg.UUID, nil
		}
		return "", fmt.Errorf("%w: the message UUID is empty", ErrNoKey)
	}
}

// FromParts returns a KeyFunc that joins the keys of several, such as an order
// number and an event type, each with its length in bytes before it: "a", "bc" and
// "ab", "c" are different keys. A part that is missing is an error.
func FromParts(parts ...KeyFunc) KeyFunc {
	return func(msg *message.Message) (string, error) {
		var b strings.Builder
		for _, part := range parts {
			key, err := part(msg)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(&b, "%d:%s", len(key), key)
		}
		return b.String(), nil
	}
}

// FirstOf returns a KeyFunc that takes the first of several keys that a message
// has: for producers that don't all set the preferred one. Copies of a message must
// agree on which they have, so never fall back from an event id to a broker's
// message id for messages that their producer may send again.
func FirstOf(keys ...KeyFunc) KeyFunc {
	return func(msg *message.Message) (string, error) {
		err := fmt.Errorf("%w: FirstOf has no keys", ErrNoKey)
		for _, key := range keys {
			var value string
			if value, err = key(msg); err == nil && value != "" {
				return value, nil
			}
		}
		return "", err
	}
}

// FromJSON returns a KeyFunc that reads a string or number from a JSON payload:
// a top-level field by its name, such as "order_id", or any value by its JSON
// Pointer (RFC 6901), such as "/order/id". A number's key is its text in the
// payload. A string with U+FFFD, which encoding/json puts in the place of what is not
// Unicode, is no key.
func FromJSON(field string) KeyFunc {
	pointer := field
	if !strings.HasPrefix(field, "/") {
		pointer = "/" + escape.Replace(field)
	}
	return func(msg *message.Message) (string, error) {
		decoder := json.NewDecoder(bytes.NewReader(msg.Payload))
		decoder.UseNumber()
		var value any
		if err := decoder.Decode(&value); err != nil {
			return "", fmt.Errorf("%w: the payload is not JSON", ErrNoKey)
		}
		value, ok := lookup(value, pointer)
		if !ok {
			return "", fmt.Errorf("%w: the payload has nothing at %q", ErrNoKey, field)
		}
		switch v := value.(type) {
		case string:
			if strings.ContainsRune(v, utf8.RuneError) { // in the place of what is not text: other keys have it too
				return "", fmt.Errorf("%w: the payload at %q is not Unicode", ErrNoKey, field)
			}
			if v != "" {
				return v, nil
			}
		case json.Number:
			return v.String(), nil
		}
		return "", fmt.Errorf("%w: the payload at %q is not a number or non-empty string", ErrNoKey, field)
	}
}

var (
	escape   = strings.NewReplacer("~", "~0", "/", "~1")
	unescape = strings.NewReplacer("~1", "/", "~0", "~")
)

func lookup(value any, pointer string) (any, bool) {
	for _, token := range strings.Split(pointer[1:], "/") {
		token = unescape.Replace(token)
		switch v := value.(type) {
		case map[string]any:
			next, ok := v[token]
			if !ok {
				return nil, false
			}
			value = next
		case []any:
			i, err := strconv.ParseUint(token, 10, 31)
			if err != nil || int(i) >= len(v) {
				return nil, false
			}
			value = v[i]
		default:
			return nil, false
		}
	}
	return value, true
}

// FingerprintFunc returns what identifies the content of a message. Nil means
// that this message is not compared.
type FingerprintFunc func(msg *message.Message) []byte

// PayloadFingerprint is the SHA-256 of the payload.
func PayloadFingerprint(msg *message.Message) []byte {
	sum := sha256.Sum256(msg.Payload)
	return sum[:]
}
