package ordering_test

import (
	"errors"
	"maps"
	"strconv"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

func numbered(changes ...string) *message.Message {
	msg := message.NewMessage("uuid-1", nil)
	msg.Metadata = message.Metadata{
		ordering.ProducerMetadata: "shop", ordering.ProducerEpochMetadata: "3", ordering.ProducerStreamMetadata: "orders/7",
		ordering.ProducerSequenceMetadata: "41", ordering.ProducerMessageMetadata: "uuid-1",
	}
	for i := 0; i < len(changes); i += 2 {
		msg.Metadata[changes[i]] = changes[i+1]
	}
	return msg
}

func TestParseStamp(t *testing.T) {
	t.Parallel()
	stamp := ordering.Stamp{Producer: "shop", Epoch: 3, Stream: "orders/7", Sequence: 41}
	with := func(change func(*ordering.Stamp)) ordering.Stamp {
		s := stamp
		change(&s)
		return s
	}
	for name, tt := range map[string]struct {
		msg  *message.Message
		want ordering.Stamp
	}{
		"all": {numbered(), stamp},
		"the highest": {
			numbered(ordering.ProducerEpochMetadata, "4294967295", ordering.ProducerSequenceMetadata, "9223372036854775807"),
			with(func(s *ordering.Stamp) { s.Epoch, s.Sequence = 1<<32-1, ordering.MaxSequence }),
		},
		"sent again":            {numbered(ordering.ProducerSenderMetadata, "4"), with(func(s *ordering.Stamp) { s.Sender = 4 })},
		"sent again by itself":  {numbered(ordering.ProducerSenderMetadata, "3"), stamp},
		"none":                  {message.NewMessage("u", nil), ordering.Stamp{}},
		"copied metadata":       {numbered(ordering.ProducerMessageMetadata, "uuid-0"), ordering.Stamp{}},
		"only a sender's epoch": {&message.Message{Metadata: message.Metadata{ordering.ProducerSenderMetadata: "1"}}, ordering.Stamp{}},
		"nil metadata":          {&message.Message{}, ordering.Stamp{}},
	} {
		got, ok, err := ordering.ParseStamp(tt.msg)
		if err != nil || got != tt.want || ok != (tt.want.Producer != "") {
			t.Errorf("%s: %+v, %t, %v", name, got, ok, err)
		}
	}

	long := strings.Repeat("x", ordering.MaxKeyLength+1)
	for field, texts := range map[string][]string{
		ordering.ProducerMetadata:         {"", long, "\xff"},
		ordering.ProducerStreamMetadata:   {"", long, "\xff"},
		ordering.ProducerEpochMetadata:    {"", "0", "-1", "+1", "01", "1.0", "1e3", " 1", "4294967296", long, "x"},
		ordering.ProducerSenderMetadata:   {"", "0", "-1", "4294967296"},
		ordering.ProducerSequenceMetadata: {"", "0", "-1", "+1", "01", "0x1", "9223372036854775808", "18446744073709551616", "١"},
	} {
		for _, text := range texts {
			_, ok, err := ordering.ParseStamp(numbered(field, text))
			if ok || !errors.Is(err, ordering.ErrInvalidStamp) || !strings.Contains(err.Error(), strconv.Quote(field)) {
				t.Errorf("%s %.20q: %t, %v", field, text, ok, err)
			}
		}
	}
	for field := range numbered().Metadata { // a part of it is no stamp
		msg := numbered()
		delete(msg.Metadata, field)
		if _, ok, err := ordering.ParseStamp(msg); ok || !errors.Is(err, ordering.ErrInvalidStamp) || !strings.Contains(err.Error(), field) {
			t.Errorf("without %s: %t, %v", field, ok, err)
		}
	}
}

// ParseStamp never panics, changes nothing, and what it accepts is in its bounds
// and reads as it is written.
func FuzzParseStamp(f *testing.F) {
	f.Add("shop", "1", "orders/0", "1", "", "u", "u")
	f.Add("shop", "4294967295", "s", "9223372036854775807", "4294967296", "u", "v")
	f.Add("\xff", "00", "", "-1", "0", "", "")
	f.Fuzz(func(t *testing.T, producer, epoch, stream, sequence, sender, of, uuid string) {
		msg := message.NewMessage(uuid, nil)
		msg.Metadata = message.Metadata{
			ordering.ProducerMetadata: producer, ordering.ProducerEpochMetadata: epoch, ordering.ProducerStreamMetadata: stream,
			ordering.ProducerSequenceMetadata: sequence, ordering.ProducerMessageMetadata: of,
		}
		if sender != "" {
			msg.Metadata[ordering.ProducerSenderMetadata] = sender
		}
		before := maps.Clone(msg.Metadata)
		s, ok, err := ordering.ParseStamp(msg)
		if !maps.Equal(before, msg.Metadata) {
			t.Fatal("metadata changed")
		}
		if !ok {
			if s != (ordering.Stamp{}) || err != nil && !errors.Is(err, ordering.ErrInvalidStamp) {
				t.Fatalf("%+v, %v", s, err)
			}
			return
		}
		if err != nil || of != uuid || s.Producer != producer || s.Stream != stream || ordering.CheckKey(producer) != "" || ordering.CheckKey(stream) != "" ||
			strconv.FormatUint(uint64(s.Epoch), 10) != epoch || strconv.FormatUint(s.Sequence, 10) != sequence ||
			s.Epoch < 1 || s.Sequence < 1 || s.Sequence > ordering.MaxSequence || s.Sender != 0 && s.Sender <= s.Epoch {
			t.Fatalf("%+v, %v", s, err)
		}
	})
}

func TestProducerOptions(t *testing.T) {
	t.Parallel()
	refused := func(err error, parts ...string) {
		t.Helper()
		if !errors.Is(err, ordering.ErrInvalidOption) {
			t.Fatalf("got %v", err)
		}
		for _, part := range parts {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s is not in: %v", part, err)
			}
		}
	}
	tables := ordering.WithProducerTables("a b", "", "c;")
	_, err := ordering.NewProducer(t.Context(), nil, "oracle", "", ordering.WithStreams(0, "md5"), tables)
	refused(err, `"oracle"`, "producer name", "1 to 255", "db is nil", "WithStreams: 0", `"md5"`, `"a b"`, `""`, `"c;"`)
	for _, name := range []string{strings.Repeat("n", ordering.MaxKeyLength+1), "\xff"} {
		_, err = ordering.NewProducer(t.Context(), nil, ordering.SQLite, name)
		refused(err, "producer name")
	}
	_, err = ordering.NewWindows(t.Context(), nil, "oracle", ordering.WithProducerGaps(9), tables)
	refused(err, `"oracle"`, "db is nil", "policy 9", `"a b"`)
	err = ordering.RecordPartitioning(t.Context(), nil, "oracle", "", "md5", 0, tables)
	refused(err, `"oracle"`, "db is nil", "topic is empty", `"md5"`, "shards: 0", `"c;"`)
	_, err = ordering.Schema(ordering.MySQL, tables)
	refused(err, `"a b"`)
	for _, dialect := range []ordering.Dialect{ordering.PostgreSQL, ordering.MySQL, ordering.SQLite} {
		schema, err := ordering.Schema(dialect, ordering.WithProducerTables("app.p", "app.s", "app.t"))
		if err != nil || strings.ContainsAny(schema, "{}") || !strings.Contains(schema, dialect.Quote("app.s")) {
			t.Errorf("%s: %v\n%s", dialect, err, schema)
		}
	}
}

func TestEntityKeys(t *testing.T) {
	t.Parallel()
	if a, b := ordering.EntityInt64(-1<<63), ordering.EntityInt64(42); a != "-9223372036854775808" || b != "42" {
		t.Error(a, b)
	}
	const canonical = "f47ac10b-58cc-4372-a567-0e02b2c3d479"
	for _, text := range []string{canonical, strings.ToUpper(canonical)} {
		if got, err := ordering.EntityUUID(text); got != canonical || err != nil {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"", canonical + " ", "{" + canonical + "}", strings.ReplaceAll(canonical, "-", ""), strings.Replace(canonical, "f", "g", 1),
		strings.Replace(canonical, "-", "0", 1), "f47ac10b058cc-4372-a567-0e02b2c3d479"[:35] + "\x00",
	} {
		if got, err := ordering.EntityUUID(text); got != "" || !errors.Is(err, ordering.ErrInvalidKey) {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	seen := map[string][]string{}
	for _, parts := range [][]string{nil, {""}, {"", ""}, {"a", "bc"}, {"ab", "c"}, {"abc"}, {"a", "b", "c"}, {"1:a"}, {"1", ":a"}, {"ä"}, {"a", "2:bc"}} {
		key := ordering.EntityParts(parts...)
		if other, ok := seen[key]; ok {
			t.Errorf("%q and %q are both %q", parts, other, key)
		}
		seen[key] = parts
	}
	if key := ordering.EntityParts("shop 1", "ä"); key != "6:shop 12:ä" {
		t.Error(key)
	}
}
