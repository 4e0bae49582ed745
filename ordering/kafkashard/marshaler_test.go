package kafkashard_test

import (
	"encoding/hex"
	"errors"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

var _ kafka.MarshalerUnmarshaler = kafkashard.Marshaler{}

func header(key, value string) *sarama.RecordHeader {
	return &sarama.RecordHeader{Key: []byte(key), Value: []byte(value)}
}

func TestUnmarshal(t *testing.T) {
	t.Parallel()
	written := time.Date(2026, 5, 4, 3, 2, 1, 987e6, time.FixedZone("", 7200))
	place := message.Metadata{
		kafkashard.PartitionMetadata: "3",
		kafkashard.OffsetMetadata:    "41",
		ordering.PublishedAtMetadata: "2026-05-04T01:02:01.987Z",
	}
	for name, test := range map[string]struct {
		record   sarama.ConsumerMessage
		uuid     string
		payload  string
		metadata message.Metadata // besides place
	}{
		"ours": {
			record: sarama.ConsumerMessage{
				Key: []byte("sku-1"), Value: []byte("{}"),
				Headers: []*sarama.RecordHeader{header(kafka.UUIDHeaderKey, "u1"), header(ordering.PartitionKeyMetadata, "sku-1"), header("a", "b")},
			},
			uuid: "u1", payload: "{}",
			metadata: message.Metadata{ordering.PartitionKeyMetadata: "sku-1", "a": "b"},
		},
		"foreign with a key": {
			record:   sarama.ConsumerMessage{Key: []byte("sku-1"), Value: []byte("x")},
			payload:  "x",
			metadata: message.Metadata{ordering.PartitionKeyMetadata: "sku-1"},
		},
		"key header wins": {
			record: sarama.ConsumerMessage{
				Key:     []byte("other"),
				Headers: []*sarama.RecordHeader{header(ordering.PartitionKeyMetadata, "sku-1")},
			},
			metadata: message.Metadata{ordering.PartitionKeyMetadata: "sku-1"},
		},
		"tombstone":    {record: sarama.ConsumerMessage{Key: []byte("k")}, metadata: message.Metadata{ordering.PartitionKeyMetadata: "k"}},
		"nothing":      {},
		"binary key":   {record: sarama.ConsumerMessage{Key: []byte{0xff, 0}}},
		"empty key":    {record: sarama.ConsumerMessage{Key: []byte{}}},
		"key too long": {record: sarama.ConsumerMessage{Key: []byte(strings.Repeat("k", ordering.MaxKeyLength+1))}},
		"binary headers": {
			record: sarama.ConsumerMessage{Headers: []*sarama.RecordHeader{
				header("\xff\x00", "\x80\x00"), {Key: nil, Value: nil}, nil, header("b", "1"), header("b", "2"),
			}},
			metadata: message.Metadata{"\xff\x00": "\x80\x00", "": "", "b": "2"},
		},
		"forged place": {
			record: sarama.ConsumerMessage{Headers: []*sarama.RecordHeader{
				header(kafkashard.OffsetMetadata, "0"), header("kafkashard_other", "1"),
			}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test.record.Partition, test.record.Offset, test.record.Timestamp = 3, 41, written
			msg, err := kafkashard.Marshaler{}.Unmarshal(&test.record)
			if err != nil {
				t.Fatal(err)
			}
			if msg.UUID != test.uuid || string(msg.Payload) != test.payload || msg.Payload == nil {
				t.Errorf("UUID %q, payload %#v, want %q, %q", msg.UUID, msg.Payload, test.uuid, test.payload)
			}
			want := maps.Clone(place)
			maps.Copy(want, test.metadata)
			if !maps.Equal(msg.Metadata, want) {
				t.Errorf("metadata %q\nwant %q", msg.Metadata, want)
			}
		})
	}

	t.Run("no timestamp", func(t *testing.T) {
		t.Parallel()
		msg, err := kafkashard.Marshaler{}.Unmarshal(&sarama.ConsumerMessage{})
		if _, has := msg.Metadata[ordering.PublishedAtMetadata]; err != nil || has {
			t.Errorf("metadata %q, error %v", msg.Metadata, err)
		}
	})
}

func TestMarshal(t *testing.T) {
	t.Parallel()
	msg := message.NewMessage("u1", []byte("payload"))
	msg.Metadata = message.Metadata{
		ordering.PartitionKeyMetadata: "sku-1",
		"reason":                      "poison",
		kafkashard.PartitionMetadata:  "3",
		kafkashard.OffsetMetadata:     "41",
		ordering.PublishedAtMetadata:  "2026-05-04T01:02:01Z",
	}
	before := time.Now()
	record, err := kafkashard.Marshaler{}.Marshal("orders", msg)
	if err != nil {
		t.Fatal(err)
	}
	headers := map[string]string{}
	for _, h := range record.Headers {
		headers[string(h.Key)] = string(h.Value)
	}
	want := map[string]string{
		kafka.UUIDHeaderKey: "u1", ordering.PartitionKeyMetadata: "sku-1", "reason": "poison",
		ordering.PublishedAtMetadata: "2026-05-04T01:02:01Z", // the first time counts
	}
	if !maps.Equal(headers, want) {
		t.Errorf("headers %q, want %q", headers, want)
	}
	if record.Topic != "orders" || encoded(t, record.Key) != "sku-1" || encoded(t, record.Value) != "payload" {
		t.Errorf("record %+v", record)
	}
	if record.Timestamp.Before(before) || record.Timestamp.After(time.Now()) {
		t.Errorf("timestamp %s", record.Timestamp)
	}

	msg.Payload = nil
	if record, err = (kafkashard.Marshaler{}).Marshal("orders", msg); err != nil || record.Value != nil {
		t.Errorf("value of a nil payload %#v, error %v", record.Value, err)
	}
	msg.Payload = message.Payload{}
	if record, err = (kafkashard.Marshaler{}).Marshal("orders", msg); err != nil || record.Value == nil {
		t.Errorf("value of an empty payload %#v, error %v", record.Value, err)
	}
	msg.Metadata.Set(kafka.UUIDHeaderKey, "u2")
	if _, err = (kafkashard.Marshaler{}).Marshal("orders", msg); err == nil {
		t.Error("reserved metadata was accepted")
	}
	for _, key := range []string{"", "\xff", strings.Repeat("k", ordering.MaxKeyLength+1)} {
		msg.Metadata = message.Metadata{ordering.PartitionKeyMetadata: key}
		if _, err = (kafkashard.Marshaler{}).Marshal("orders", msg); !errors.Is(err, ordering.ErrInvalidKey) {
			t.Errorf("key %q: %v, want ErrInvalidKey", key, err)
		}
	}
}

// The partitioner, Shard and the Java client must agree on every key.
func TestPartitionerIsShard(t *testing.T) {
	t.Parallel()
	partitioner := sarama.NewMurmur2Partitioner("topic")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	check := func(key string, n int) {
		t.Helper()
		got, err := partitioner.Partition(&sarama.ProducerMessage{Key: sarama.StringEncoder(key)}, int32(n))
		if want := ordering.Shard(key, n); err != nil || int(got) != want {
			t.Fatalf("key %q, %d partitions: sarama %d, Shard %d (%v)", key, n, got, want, err)
		}
	}
	for range 10_000 {
		key := make([]byte, 1+random.IntN(ordering.MaxKeyLength))
		for i := range key {
			key[i] = byte(random.Uint32())
		}
		check(string(key), 1+random.IntN(1000))
	}
	// Kafka's UtilsTest, with the sign bit cleared.
	for key, murmur2 := range map[string]int32{
		"21": -973932308, "foobar": -790332482, "a-little-bit-long-string": -985981536,
		"a-little-bit-longer-string":                       -1486304829,
		"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971, "abc": 479470107,
	} {
		check(key, 12)
		if want := int(uint32(murmur2)&0x7fffffff) % 12; ordering.Shard(key, 12) != want {
			t.Errorf("Shard(%q, 12) = %d, the Java client has %d", key, ordering.Shard(key, 12), want)
		}
	}
}

// For any record, Unmarshal gives a message that keeps its bytes; and a message
// with a usable key comes back as it was.
func FuzzMarshaler(f *testing.F) {
	f.Add("key", "value", "name", "header", int64(0), int64(1_777_777_777_777))
	f.Add("", "", "", "", int64(-1), int64(-1))
	f.Add("\xff\x00", "\x00", kafka.UUIDHeaderKey, "\xff", int64(1), int64(1<<62))
	f.Add("key", "value", ordering.PartitionKeyMetadata, "\xfe", int64(1), int64(0))
	f.Add("key", "value", kafkashard.OffsetMetadata, "forged", int64(1), int64(0))
	f.Fuzz(func(t *testing.T, key, value, name, content string, offset, millis int64) {
		msg, err := kafkashard.Marshaler{}.Unmarshal(&sarama.ConsumerMessage{
			Key: []byte(key), Value: []byte(value), Offset: offset, Timestamp: time.UnixMilli(millis),
			Headers: []*sarama.RecordHeader{header(name, content)},
		})
		if err != nil || msg == nil || string(msg.Payload) != value {
			t.Fatalf("record became %+v, %v", msg, err)
		}

		record, err := kafkashard.Marshaler{}.Marshal("topic", msg)
		if ordering.CheckKey(msg.Metadata.Get(ordering.PartitionKeyMetadata)) != "" {
			if !errors.Is(err, ordering.ErrInvalidKey) {
				t.Fatalf("unusable key: %v", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		again := &sarama.ConsumerMessage{
			Key: []byte(encoded(t, record.Key)), Value: []byte(encoded(t, record.Value)),
			Offset: offset, Timestamp: time.UnixMilli(millis),
		}
		for _, h := range record.Headers {
			again.Headers = append(again.Headers, &h)
		}
		twin, err := kafkashard.Marshaler{}.Unmarshal(again)
		if err != nil || !twin.Equals(msg) {
			t.Fatalf("%+v became %+v (%v), payload %s", msg, twin, err, hex.EncodeToString(twin.Payload))
		}
	})
}

func encoded(t *testing.T, e sarama.Encoder) string {
	t.Helper()
	if e == nil {
		return ""
	}
	b, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
