package amqpshard_test

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"strings"
	"testing"
	"time"

	watermillamqp "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

var _ ordering.Broker = (*amqpshard.Broker)(nil)

// The marshaler also serves watermill-amqp's own publisher and subscriber.
var _ watermillamqp.Marshaler = amqpshard.Marshaler{}

func TestUnmarshalHeaderTypes(t *testing.T) {
	t.Parallel()
	at := time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
	for name, test := range map[string]struct {
		value any
		want  string
	}{
		"string":            {"plain \x00", "plain \x00"},
		"empty":             {"", ""},
		"null":              {nil, ""},
		"bool":              {true, "true"},
		"byte":              {byte(255), "255"},
		"int8":              {int8(-8), "-8"},
		"int16":             {int16(-16), "-16"},
		"int32":             {int32(-32), "-32"},
		"int64":             {int64(math.MinInt64), "-9223372036854775808"},
		"uint16":            {uint16(65535), "65535"},
		"uint32":            {uint32(math.MaxUint32), "4294967295"},
		"float32":           {float32(0.1), "0.1"},
		"float64":           {1e300, "1e+300"},
		"NaN":               {math.NaN(), "NaN"},
		"decimal":           {amqp.Decimal{Scale: 2, Value: 12345}, "123.45"},
		"decimal below one": {amqp.Decimal{Scale: 2, Value: -5}, "-0.05"},
		"decimal integer":   {amqp.Decimal{Value: math.MinInt32}, "-2147483648"},
		"timestamp":         {at.In(time.FixedZone("", 3600)), "2024-05-06T07:08:09Z"},
		"bytes":             {[]byte("raw\xff"), "raw\xff"},
		"array":             {[]any{int64(1), "a", nil, false}, `[1,"a",null,false]`},
		"empty table":       {amqp.Table{}, `{}`},
		"nested": {
			amqp.Table{
				"array": []any{amqp.Table{"time": at, "decimal": amqp.Decimal{Scale: 1, Value: 5}}},
				"bytes": []byte("raw"), "binary": []byte{0xff}, "inf": math.Inf(1), "nan": float32(math.NaN()), "half": float32(0.5),
			},
			`{"array":[{"decimal":0.5,"time":"2024-05-06T07:08:09Z"}],"binary":"/w==","bytes":"raw","half":0.5,"inf":"+Inf","nan":"NaN"}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			msg, err := amqpshard.Marshaler{}.Unmarshal(amqp.Delivery{Headers: amqp.Table{"field": test.value}})
			if err != nil {
				t.Fatal(err)
			}
			if got := msg.Metadata.Get("field"); got != test.want {
				t.Errorf("%#v became %q, want %q", test.value, got, test.want)
			}
		})
	}
}

func TestUnmarshalProperties(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		delivery amqp.Delivery
		uuid     string
		metadata message.Metadata
	}{
		"nothing":           {amqp.Delivery{}, "", message.Metadata{}},
		"UUID header":       {amqp.Delivery{Headers: amqp.Table{amqpshard.UUIDHeader: "u"}, MessageId: "id"}, "u", message.Metadata{amqpshard.MessageIDMetadata: "id"}},
		"integer as UUID":   {amqp.Delivery{Headers: amqp.Table{amqpshard.UUIDHeader: int32(7)}}, "7", message.Metadata{}},
		"empty UUID header": {amqp.Delivery{Headers: amqp.Table{amqpshard.UUIDHeader: ""}, MessageId: "id"}, "id", message.Metadata{amqpshard.MessageIDMetadata: "id"}},
		"message-id":        {amqp.Delivery{MessageId: "id"}, "id", message.Metadata{amqpshard.MessageIDMetadata: "id"}},
		"redelivery": {
			amqp.Delivery{Redelivered: true, Headers: amqp.Table{"x-delivery-count": int64(3)}}, "",
			message.Metadata{amqpshard.RedeliveredMetadata: "true", amqpshard.DeliveryCountMetadata: "3", "x-delivery-count": "3"},
		},
		"timestamp":     {amqp.Delivery{Timestamp: time.Unix(0, 0)}, "", message.Metadata{ordering.PublishedAtMetadata: "1970-01-01T00:00:00Z"}},
		"routing":       {amqp.Delivery{Headers: amqp.Table{"CC": []any{"a"}}}, "", message.Metadata{amqpshard.CCMetadata: `["a"]`}},
		"forged fields": {amqp.Delivery{Headers: amqp.Table{amqpshard.DeliveryCountMetadata: "9"}}, "", message.Metadata{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			msg, err := amqpshard.Marshaler{}.Unmarshal(test.delivery)
			if err != nil {
				t.Fatal(err)
			}
			if msg.UUID != test.uuid || !maps.Equal(msg.Metadata, test.metadata) {
				t.Errorf("got %q %v, want %q %v", msg.UUID, msg.Metadata, test.uuid, test.metadata)
			}
		})
	}
}

// A message that was received and is published again, as the poison queue and
// forwarders do, does not carry what the broker wrote: as a string, x-death
// would be taken for the sender's own.
func TestMarshalLeavesOutWhatReceivingWrote(t *testing.T) {
	t.Parallel()
	received, err := amqpshard.Marshaler{}.Unmarshal(amqp.Delivery{
		MessageId: "id", Redelivered: true, Timestamp: time.Unix(1, 0), Body: []byte("body"),
		Headers: amqp.Table{
			amqpshard.UUIDHeader: "u", "kept": "value", "x-kept": int32(1), "CC": []any{"key"},
			"x-delivery-count": int64(2), "x-acquired-count": int64(2), "x-death": []any{amqp.Table{"count": int64(1)}},
			"x-first-death-queue": "q", "x-last-death-reason": "rejected",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	publishing, err := amqpshard.Marshaler{}.Marshal(received)
	if err != nil {
		t.Fatal(err)
	}
	want := amqp.Table{
		amqpshard.UUIDHeader: "u", "kept": "value", "x-kept": "1",
		ordering.PublishedAtMetadata: "1970-01-01T00:00:01Z", // the first time counts
	}
	if !maps.Equal(publishing.Headers, want) {
		t.Errorf("headers are %v, want %v", publishing.Headers, want)
	}
	if publishing.Timestamp.Before(time.Unix(2, 0)) || publishing.MessageId != "u" || publishing.DeliveryMode != amqp.Persistent || string(publishing.Body) != "body" {
		t.Errorf("publishing is %+v", publishing)
	}
}

func TestMarshalRefuses(t *testing.T) {
	t.Parallel()
	for name, field := range map[string]string{"long name": strings.Repeat("x", 256), "CC": "CC", "BCC": "BCC"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			msg := message.NewMessage("u", nil)
			msg.Metadata.Set(field, "value")
			_, err := amqpshard.Marshaler{}.Marshal(msg)
			var invalid *amqpshard.MessageError
			if !errors.Is(err, amqpshard.ErrInvalidMessage) || !errors.As(err, &invalid) || invalid.UUID != "u" {
				t.Errorf("Marshal returned %v", err)
			}
		})
	}
}

func TestMarshalLongUUID(t *testing.T) {
	t.Parallel()
	uuid := strings.Repeat("u", 256)
	publishing, err := amqpshard.Marshaler{}.Marshal(message.NewMessage(uuid, nil))
	if err != nil || publishing.MessageId != "" || publishing.Headers[amqpshard.UUIDHeader] != uuid {
		t.Errorf("got %v and message-id %q, error %v", publishing.Headers, publishing.MessageId, err)
	}
}

// FuzzRoundTrip checks that metadata, UUID and payload arrive as they were sent,
// except for reserved fields.
func FuzzRoundTrip(f *testing.F) {
	f.Add("uuid", "field", "value", []byte("payload"))
	f.Add("", "", "", []byte(nil))
	f.Add("u", amqpshard.UUIDHeader, "other", []byte{0xff})
	f.Add("u", "x-death", "forged", []byte{})
	f.Add("u", "CC", "\xff\x00", []byte{})
	f.Fuzz(func(t *testing.T, uuid, field, value string, payload []byte) {
		msg := message.NewMessage(uuid, payload)
		msg.Metadata.Set(field, value)
		publishing, err := amqpshard.Marshaler{}.Marshal(msg)
		if err != nil {
			if !errors.Is(err, amqpshard.ErrInvalidMessage) {
				t.Fatalf("Marshal returned %v", err)
			}
			return
		}
		got, err := amqpshard.Marshaler{}.Unmarshal(amqp.Delivery{
			Headers: publishing.Headers, MessageId: publishing.MessageId, Body: publishing.Body,
		})
		if err != nil {
			t.Fatal(err)
		}
		if got.UUID != uuid || string(got.Payload) != string(payload) {
			t.Errorf("sent %q %q, got %q %q", uuid, payload, got.UUID, got.Payload)
		}
		if sent, ok := publishing.Headers[field]; ok && field != amqpshard.UUIDHeader && (sent != value || got.Metadata.Get(field) != value) {
			t.Errorf("sent %q=%q as %q, got %q", field, value, sent, got.Metadata.Get(field))
		}
	})
}

// FuzzUnmarshal checks that Unmarshal takes every header, and that what it makes
// of tables and arrays is JSON.
func FuzzUnmarshal(f *testing.F) {
	f.Add("field", "text", int64(1), 0.5, []byte("bytes"), uint8(2))
	f.Add(amqpshard.UUIDHeader, "\xff", int64(-1), math.Inf(-1), []byte{0xff}, uint8(255))
	f.Add("x-death", "", int64(math.MaxInt64), math.NaN(), []byte(nil), uint8(0))
	f.Fuzz(func(t *testing.T, header, text string, integer int64, float float64, bytes []byte, scale uint8) {
		scalars := []any{
			nil, text, integer, int32(integer), int16(integer), int8(integer), uint16(integer), uint32(integer), scale,
			float, float32(float), bytes, integer < 0, amqp.Decimal{Scale: scale, Value: int32(integer)}, time.Unix(integer, 0),
		}
		values := append(scalars, any(scalars), amqp.Table{text: scalars, header: amqp.Table{text: bytes}})
		for _, value := range values {
			msg, err := amqpshard.Marshaler{}.Unmarshal(amqp.Delivery{Headers: amqp.Table{header: value}, MessageId: text})
			if err != nil {
				t.Fatal(err)
			}
			got, ok := msg.Metadata[header]
			if _, isTable := value.(amqp.Table); ok && isTable && !json.Valid([]byte(got)) {
				t.Errorf("%#v became %q, which is not JSON", value, got)
			}
			if again, err := (amqpshard.Marshaler{}).Marshal(msg); err != nil {
				if !errors.Is(err, amqpshard.ErrInvalidMessage) {
					t.Fatalf("Marshal returned %v", err)
				}
			} else if err := again.Headers.Validate(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
