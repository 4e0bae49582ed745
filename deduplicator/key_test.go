package deduplicator_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// checkKey compares with want; an empty want is ErrNoKey, which shows no payload.
func checkKey(t *testing.T, key deduplicator.KeyFunc, msg *message.Message, want string) {
	t.Helper()
	got, err := key(msg)
	if got != want || (err == nil) != (want != "") {
		t.Errorf("key %q, error %v; want %q", got, err, want)
	}
	if err != nil && (!errors.Is(err, deduplicator.ErrNoKey) || strings.Contains(err.Error(), "secret")) {
		t.Errorf("error %v", err)
	}
}

func TestFromJSON(t *testing.T) {
	t.Parallel()
	const order = `{"id":"o-1","n":42,"big":12345678901234567890,"f":1.50,"e":"","null":null,"yes":true,
		"order":{"id":7,"lines":[{"sku":"a"},{"sku":"b"}]},"a/b":"slash","c~d":"tilde","":"empty name","obj":{"secret":1},
		"01":"digits","neg":-0,"exp":1e3,"ü":"ünï","ctl":"a\u0000b"}`
	for _, tt := range []struct{ field, payload, want string }{
		{"id", order, "o-1"},
		{"n", order, "42"},
		{"big", order, "12345678901234567890"}, // no float64 on the way
		{"f", order, "1.50"},
		{"neg", order, "-0"},
		{"exp", order, "1e3"},
		{"ü", order, "ünï"},
		{"ctl", order, "a\x00b"},
		{"a/b", order, "slash"},
		{"/a~1b", order, "slash"},
		{"c~d", order, "tilde"},
		{"/c~0d", order, "tilde"},
		{"/", order, "empty name"},
		{"", order, "empty name"},
		{"01", order, "digits"},
		{"/order/id", order, "7"},
		{"/order/lines/1/sku", order, "b"},

		{"id", "{\"id\":\"\xff\"}", ""}, // each of these is U+FFFD to encoding/json
		{"id", "{\"id\":\"\xfe\"}", ""},
		{"id", `{"id":"\ud800"}`, ""},

		{"e", order, ""},
		{"null", order, ""},
		{"yes", order, ""},
		{"order", order, ""},
		{"obj", order, ""},
		{"ID", order, ""}, // names are exact
		{"missing", order, ""},
		{"order/id", order, ""}, // a name, not a pointer
		{"/order/lines", order, ""},
		{"/order/lines/2/sku", order, ""},
		{"/order/lines/-1/sku", order, ""},
		{"/order/lines/x", order, ""},
		{"/order/lines/99999999999999999999", order, ""},
		{"/id/deeper", order, ""},
		{"id", ``, ""},
		{"id", `secret`, ""},
		{"id", `{"id":"secret`, ""},
		{"id", `null`, ""},
		{"id", `"secret"`, ""},
		{"id", `[{"id":1}]`, ""},
		{"/0/id", `[{"id":1}]`, "1"},
	} {
		t.Run(tt.field, func(t *testing.T) {
			t.Parallel()
			checkKey(t, deduplicator.FromJSON(tt.field), message.NewMessage("u", []byte(tt.payload)), tt.want)
		})
	}
}

func TestFromMetadata(t *testing.T) {
	t.Parallel()
	msg := message.NewMessage("u", nil)
	msg.Metadata.Set("event_id", "E-1 ")
	msg.Metadata.Set("empty", "")
	checkKey(t, deduplicator.FromMetadata("event_id"), msg, "E-1 ")
	checkKey(t, deduplicator.FromMetadata("Event_id"), msg, "")
	checkKey(t, deduplicator.FromMetadata("empty"), msg, "")
	msg.Metadata = nil
	checkKey(t, deduplicator.FromMetadata("event_id"), msg, "")
}

// B36: foreign messages come without a UUID; they have no key rather than one
// that they share.
func TestFromUUIDB36(t *testing.T) {
	t.Parallel()
	checkKey(t, deduplicator.FromUUID(), message.NewMessage("u-1", nil), "u-1")
	checkKey(t, deduplicator.FromUUID(), message.NewMessage("", nil), "")
}

func TestPayloadFingerprint(t *testing.T) {
	t.Parallel()
	print := func(payload []byte) []byte { return deduplicator.PayloadFingerprint(message.NewMessage("u", payload)) }
	if len(print(nil)) != 32 || !bytes.Equal(print(nil), print([]byte{})) || bytes.Equal(print([]byte("a")), print([]byte("b"))) {
		t.Error("fingerprints do not tell payloads apart")
	}
}

func TestFromParts(t *testing.T) {
	t.Parallel()
	message := func(a, b string) *message.Message {
		msg := message.NewMessage("u", nil)
		msg.Metadata.Set("a", a)
		msg.Metadata.Set("b", b)
		return msg
	}
	key := deduplicator.FromParts(deduplicator.FromMetadata("a"), deduplicator.FromMetadata("b"))
	one, err1 := key(message("a", "bc"))
	two, err2 := key(message("ab", "c"))
	if err1 != nil || err2 != nil || one != "1:a2:bc" || one == two {
		t.Errorf("%q %v, %q %v", one, err1, two, err2)
	}
	if _, err := key(message("a", "")); !errors.Is(err, deduplicator.ErrNoKey) {
		t.Errorf("a missing part: %v", err)
	}
}

func TestFirstOf(t *testing.T) {
	t.Parallel()
	key := deduplicator.FirstOf(deduplicator.FromMetadata("id"), deduplicator.FromUUID())
	msg := message.NewMessage("uuid", nil)
	if got, err := key(msg); got != "uuid" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	msg.Metadata.Set("id", "id")
	if got, err := key(msg); got != "id" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	msg = message.NewMessage("", nil)
	if _, err := key(msg); !errors.Is(err, deduplicator.ErrNoKey) {
		t.Errorf("neither: %v", err)
	}
	if _, err := deduplicator.FirstOf()(msg); !errors.Is(err, deduplicator.ErrNoKey) {
		t.Errorf("of nothing: %v", err)
	}
}
