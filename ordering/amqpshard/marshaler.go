package amqpshard

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// UUIDHeader is the header that holds the message's UUID, as in watermill-amqp.
const UUIDHeader = "_watermill_message_uuid"

// Metadata of received messages. Fields with the prefix amqpshard_ say something
// about one delivery: they are not sent when the message is published again.
const (
	// DeliveryCountMetadata says how often the message was returned to its queue
	// before, as a decimal number (header x-delivery-count of quorum queues).
	// It is absent at the first delivery.
	DeliveryCountMetadata = "amqpshard_delivery_count"
	// RedeliveredMetadata is "true" if the message may have been delivered
	// before, else absent.
	RedeliveredMetadata = "amqpshard_redelivered"
	// MessageIDMetadata is the AMQP message-id property, if set.
	MessageIDMetadata = "amqpshard_message_id"
	// CCMetadata is the header CC, if set, as a JSON array. The broker reads that
	// header as further routing keys.
	CCMetadata = "amqpshard_cc"

	reservedPrefix = "amqpshard_"
)

// Marshaler converts between Watermill and AMQP messages. It is watermill-amqp's
// Marshaler interface, so it can replace amqp.DefaultMarshaler there. The zero
// value is ready to use, and it is safe for concurrent use.
type Marshaler struct{}

// Marshal returns msg as a persistent publishing with the present time: metadata
// as string headers, the UUID as UUIDHeader and, up to 255 bytes, as message-id
// property.
//
// What the broker or Unmarshal wrote on receiving is left out: metadata with the
// prefix amqpshard_, and the headers x-death, x-delivery-count, x-acquired-count,
// x-first-death-… and x-last-death-…. It returns a [MessageError] for metadata
// that would close the connection or channel: a field name of more than 255
// bytes, or CC or BCC, which the broker reads as routing keys.
func (Marshaler) Marshal(msg *message.Message) (amqp.Publishing, error) {
	headers := make(amqp.Table, len(msg.Metadata)+1)
	for field, value := range msg.Metadata {
		switch {
		case isReserved(field):
			continue
		case len(field) > maxShortString:
			return amqp.Publishing{}, &MessageError{UUID: msg.UUID, Reason: fmt.Sprintf(
				"metadata field name %.20q… has %d bytes, the limit is %d", field, len(field), maxShortString)}
		case field == "CC" || field == "BCC":
			return amqp.Publishing{}, &MessageError{UUID: msg.UUID, Reason: fmt.Sprintf(
				"metadata field %q is a routing instruction to the broker", field)}
		}
		headers[field] = value
	}
	headers[UUIDHeader] = msg.UUID
	publishing := amqp.Publishing{Headers: headers, DeliveryMode: amqp.Persistent, Timestamp: time.Now(), Body: msg.Payload}
	if len(msg.UUID) <= maxShortString {
		publishing.MessageId = msg.UUID
	}
	return publishing, nil
}

// Unmarshal returns a delivery as a message. It never fails: scalar headers
// become metadata in their plain form (numbers in decimal, timestamps in RFC
// 3339, null as ""), arrays and tables become JSON. The UUID is UUIDHeader, else
// the message-id property, else empty. The timestamp property becomes
// [ordering.PublishedAtMetadata] if there is no such header.
func (Marshaler) Unmarshal(delivery amqp.Delivery) (*message.Message, error) {
	uuid := plain(delivery.Headers[UUIDHeader])
	if uuid == "" {
		uuid = delivery.MessageId
	}
	msg := message.NewMessage(uuid, delivery.Body)
	for header, value := range delivery.Headers {
		switch {
		case header == UUIDHeader || strings.HasPrefix(header, reservedPrefix):
		case header == "CC" || header == "BCC":
			msg.Metadata[CCMetadata] = plain(value)
		default:
			msg.Metadata[header] = plain(value)
		}
	}
	if count, ok := delivery.Headers["x-delivery-count"]; ok {
		msg.Metadata[DeliveryCountMetadata] = plain(count)
	}
	if delivery.Redelivered {
		msg.Metadata[RedeliveredMetadata] = "true"
	}
	if msg.Metadata[ordering.PublishedAtMetadata] == "" && !delivery.Timestamp.IsZero() {
		msg.Metadata[ordering.PublishedAtMetadata] = plain(delivery.Timestamp)
	}
	if delivery.MessageId != "" {
		msg.Metadata[MessageIDMetadata] = delivery.MessageId
	}
	return msg, nil
}

func isReserved(field string) bool {
	switch field {
	case "x-death", "x-delivery-count", "x-acquired-count":
		return true
	}
	return strings.HasPrefix(field, reservedPrefix) ||
		strings.HasPrefix(field, "x-first-death-") || strings.HasPrefix(field, "x-last-death-")
}

// plain returns a header value as text.
func plain(value any) string {
	switch v := value.(type) {
	case nil:
		return ""
	case string:
		return v
	case []byte:
		return string(v)
	case float32:
		return strconv.FormatFloat(float64(v), 'g', -1, 32)
	case float64:
		return strconv.FormatFloat(v, 'g', -1, 64)
	case time.Time:
		return v.UTC().Format(time.RFC3339)
	case amqp.Decimal:
		return decimal(v)
	case amqp.Table, []any:
		text, err := json.Marshal(jsonValue(v))
		if err != nil {
			return fmt.Sprint(v) // not reached: jsonValue returns what JSON can hold
		}
		return string(text)
	}
	return fmt.Sprint(value) // bool and integers
}

// jsonValue returns a header value as one that encoding/json takes.
func jsonValue(value any) any {
	switch v := value.(type) {
	case amqp.Table:
		object := make(map[string]any, len(v))
		for field, value := range v {
			object[field] = jsonValue(value)
		}
		return object
	case []any:
		array := make([]any, len(v))
		for i, value := range v {
			array[i] = jsonValue(value)
		}
		return array
	case []byte:
		if utf8.Valid(v) {
			return string(v)
		}
		return base64.StdEncoding.EncodeToString(v)
	case float32:
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			return plain(v)
		}
		return v
	case float64:
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return plain(v)
		}
		return v
	case amqp.Decimal:
		return json.Number(decimal(v))
	case time.Time:
		return plain(v)
	}
	return value
}

// decimal returns {Scale: 2, Value: -5} as "-0.05".
func decimal(d amqp.Decimal) string {
	digits, sign := strconv.FormatInt(int64(d.Value), 10), ""
	if d.Value < 0 {
		digits, sign = digits[1:], "-"
	}
	scale := int(d.Scale)
	if scale == 0 {
		return sign + digits
	}
	if missing := scale + 1 - len(digits); missing > 0 {
		digits = strings.Repeat("0", missing) + digits
	}
	point := len(digits) - scale
	return sign + digits[:point] + "." + digits[point:]
}

const (
	// maxShortString is the limit of header names and short properties in bytes.
	maxShortString = 255

	// brokerHeaders is the space in bytes that is left to what the broker adds
	// later (x-delivery-count, x-death): a frame that came to exceed frame_max
	// would end each connection that it is delivered to.
	brokerHeaders = 2048
)

// headerFrameSize returns the size of the frame that holds the headers and
// properties which Marshal sets (AMQP 0-9-1, sections 2.3.5.2 and 4.2.6.1). The
// broker closes the connection when it exceeds frame_max.
func headerFrameSize(p amqp.Publishing) int {
	const (
		frame      = 7 + 1         // header, end octet
		content    = 2 + 2 + 8 + 2 // class, weight, body size, flags
		properties = 1 + 1         // delivery mode, length of message-id
		field      = 1 + 1 + 4     // length of name, type, length of value
	)
	size := frame + content + 4 + properties + len(p.MessageId)
	for name, value := range p.Headers {
		text, _ := value.(string) // Marshal writes strings only
		size += field + len(name) + len(text)
	}
	return size
}
