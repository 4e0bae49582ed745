package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func testOutputs(k *kit) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	outputs := []deduplicator.Output{
		{Topic: "z", UUID: "9", Payload: []byte("plain")}, // not in the order of any column
		{Topic: "a", UUID: "1", Payload: nil},
		{Topic: "a", UUID: "1", Payload: []byte{}}, // the same UUID twice is not ours to judge
		{Topic: "a", UUID: "", Payload: []byte(`{"id":1}`)},
		{Topic: "Ünï/кодⓒ", UUID: "UUID ", Payload: every, Metadata: map[string]string{}},
		{Topic: "a", UUID: "2", Metadata: map[string]string{"": "", "empty": "", "k": "v", "K": "V", "héader ": "välue😀"}},
		{Topic: "a", UUID: "3", Metadata: map[string]string{"bin": string(every), "\xff": "\xfe", "\xfe": "\xff", "nul": "a\x00b"}},
		{Topic: "a", UUID: "4", Metadata: map[string]string{"<html>": "& \u2028 \\u0041 \" '", "json": `{"a":1}`, "binary:": "binary:"}},
		{Topic: "a", UUID: "5", Metadata: map[string]string{"long": strings.Repeat("m", 100_000)}},
		{Topic: "a", UUID: "6", Payload: bytes.Repeat(every, 3<<20/256+1)},
		{Topic: "a", UUID: "7", Payload: bytes.Repeat(every, 1<<20/256+1)},
		{Topic: "a", UUID: "8", Payload: []byte("last")},
	}
	k.processed(k.claim("a"), k.write("a", outputs...))
	for range 2 { // they stay until they are forgotten
		k.sameOutputs(k.duplicate(k.claim("a")), outputs)
	}
}

func (k *kit) sameOutputs(got, want []deduplicator.Output) {
	k.Helper()
	if len(got) != len(want) {
		k.Fatalf("%d outputs, want %d", len(got), len(want))
	}
	for i := range want {
		g, w := got[i], want[i]
		if g.Topic != w.Topic || g.UUID != w.UUID {
			k.Errorf("output %d is %q for %q, want %q for %q", i, g.UUID, g.Topic, w.UUID, w.Topic)
		}
		if !maps.Equal(g.Metadata, w.Metadata) {
			k.Errorf("output %d has metadata %.300q, want %.300q", i, g.Metadata, w.Metadata)
		}
		if !bytes.Equal(g.Payload, w.Payload) {
			k.Errorf("output %d has a payload of %d bytes that differs from the %d it should have", i, len(g.Payload), len(w.Payload))
		}
	}
}

func testManyOutputs(k *kit) {
	outputs := make([]deduplicator.Output, 1000)
	for i := range outputs {
		outputs[i] = deduplicator.Output{
			Topic:    fmt.Sprintf("topic %d", i%7),
			UUID:     fmt.Sprintf("%x", i*7919%1000),
			Payload:  fmt.Appendf(nil, "payload %d", i),
			Metadata: map[string]string{"i": fmt.Sprint(i)},
		}
	}
	k.processed(k.claim("a"), k.write("a", outputs...))
	k.sameOutputs(k.duplicate(k.claim("a")), outputs)
}

func testFailedOutputs(k *kit) {
	_, err := k.process(k.claim("a"), func(context.Context) ([]deduplicator.Output, error) {
		return []deduplicator.Output{{Topic: "t", UUID: "failed"}, {Topic: "t", UUID: "failed too"}}, errors.New("planned")
	})
	if err == nil {
		k.Fatal("no error")
	}
	want := []deduplicator.Output{{Topic: "t", UUID: "good"}}
	k.processed(k.claim("a"), k.write("a", want...))
	k.sameOutputs(k.duplicate(k.claim("a")), want)
}

func testForget(k *kit) {
	ctx := k.ctx
	outputs := func(i int) []deduplicator.Output {
		return []deduplicator.Output{{Topic: "t", UUID: fmt.Sprint(i)}, {Topic: "t", UUID: fmt.Sprint(i, " second")}}
	}
	// The last two have keys that are not stored as they are.
	keys := []string{"a", "A", "a ", "b", "c", "bin\x00\xff", strings.Repeat("k", 5000)}
	for i, key := range keys {
		k.processed(k.claim(key), k.write(fmt.Sprint(i), outputs(i)...))
	}
	other := k.claim("a")
	other.Consumer += "-2"
	k.processed(other, k.write("other", outputs(99)...))

	if err := k.Store.Forget(ctx); err != nil {
		k.Fatalf("forget nothing: %v", err)
	}
	if err := k.Store.Forget(ctx, k.claim("unknown"), deduplicator.Claim{Consumer: "unknown " + k.consumer, Key: "a"}); err != nil {
		k.Fatalf("forget unknown claims: %v", err)
	}
	for i, key := range keys {
		k.sameOutputs(k.duplicate(k.claim(key)), outputs(i))
	}

	if err := k.Store.Forget(ctx, k.claim("a"), k.claim("a")); err != nil {
		k.Fatalf("forget: %v", err)
	}
	k.sameOutputs(k.duplicate(k.claim("a")), nil)
	for i, key := range keys[1:] {
		k.sameOutputs(k.duplicate(k.claim(key)), outputs(i+1))
	}
	k.sameOutputs(k.duplicate(other), outputs(99))

	batch := make([]deduplicator.Claim, 250) // the known ones are spread over it
	for i := range batch {
		batch[i] = k.claim(fmt.Sprint("unknown ", i))
	}
	for i, key := range keys[1:] {
		batch[(i+1)*40] = k.claim(key)
	}
	if err := k.Store.Forget(ctx, batch...); err != nil {
		k.Fatalf("forget %d claims: %v", len(batch), err)
	}
	for _, key := range keys {
		k.sameOutputs(k.duplicate(k.claim(key)), nil)
	}
	k.sameOutputs(k.duplicate(other), outputs(99))
}
