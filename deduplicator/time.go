package deduplicator

import (
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// TimeFunc returns when a message was first published. The zero time means that
// the message does not say; an error, usually one that wraps [ErrNoTime], that
// what it says makes no sense: the message is parked.
//
// The time must be that of the first publish. One that is renewed when a message
// is sent again, from a dead letter queue for example, makes an old message new.
type TimeFunc func(msg *message.Message) (time.Time, error)

// TimeFromMetadata returns a TimeFunc that reads a metadata field in RFC 3339.
// The time is zero where the field is missing or empty.
func TimeFromMetadata(field string) TimeFunc {
	return func(msg *message.Message) (time.Time, error) {
		value := msg.Metadata.Get(field)
		if value == "" {
			return time.Time{}, nil
		}
		t, err := time.Parse(time.RFC3339Nano, value)
		if err != nil {
			return time.Time{}, fmt.Errorf("%w: metadata field %q is not in RFC 3339", ErrNoTime, field)
		}
		return t, nil
	}
}

// TimeFromUUIDv7 returns a TimeFunc that reads the milliseconds in a key that is
// a UUID of version 7 (RFC 9562), with or without hyphens. Any other key is an
// error.
func TimeFromUUIDv7(key KeyFunc) TimeFunc {
	return func(msg *message.Message) (time.Time, error) {
		text, err := key(msg)
		if err != nil {
			return time.Time{}, err
		}
		raw, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
		if err != nil || len(raw) != 16 || raw[6]>>4 != 7 || raw[8]>>6 != 0b10 {
			return time.Time{}, fmt.Errorf("%w: the key is not a UUID of version 7", ErrNoTime)
		}
		var milliseconds int64
		for _, b := range raw[:6] {
			milliseconds = milliseconds<<8 | int64(b)
		}
		return time.UnixMilli(milliseconds), nil
	}
}

// crockford is the alphabet of ULIDs.
const crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// TimeFromULID returns a TimeFunc that reads the milliseconds in a key that is a
// ULID (https://github.com/ulid/spec), in upper or lower case. Any other key is an
// error.
func TimeFromULID(key KeyFunc) TimeFunc {
	return func(msg *message.Message) (time.Time, error) {
		text, err := key(msg)
		if err != nil {
			return time.Time{}, err
		}
		var milliseconds int64
		valid := len(text) == 26 && text[0] <= '7'
		for i, r := range strings.ToUpper(text) {
			digit := strings.IndexRune(crockford, r)
			valid = valid && digit >= 0
			if i < 10 {
				milliseconds = milliseconds<<5 | int64(digit)
			}
		}
		if !valid {
			return time.Time{}, fmt.Errorf("%w: the key is not a ULID", ErrNoTime)
		}
		return time.UnixMilli(milliseconds), nil
	}
}
