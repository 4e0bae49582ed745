package metadata_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
)

// Metadata comes back as it was, whatever bytes it holds.
func FuzzMetadata(f *testing.F) {
	f.Add("", "", "", "")
	f.Add("k", "v", "K", "V")
	f.Add("\xff", "\xfe", "\xfe", "\xff") // JSON would make all of them U+FFFD
	f.Add("\xff", "1", "\ufffd", "2")
	f.Add("a", "\x00", "binary:", "binary:[]")
	f.Add("<", "& \u2028", `"`, `\u0041`)
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		fields := map[string]string{k1: v1, k2: v2}
		got, err := metadata.Decode(metadata.Encode(fields))
		if err != nil || !maps.Equal(got, fields) {
			t.Errorf("%q came back as %q, %v", fields, got, err)
		}
	})
}

func TestMetadataOfNothing(t *testing.T) {
	t.Parallel()
	for _, fields := range []map[string]string{nil, {}} {
		got, err := metadata.Decode(metadata.Encode(fields))
		if err != nil || got == nil || len(got) != 0 {
			t.Errorf("%#v came back as %#v, %v; want an empty map that can be written to", fields, got, err)
		}
	}
}

func TestMetadataThatIsDamaged(t *testing.T) {
	t.Parallel()
	for _, encoded := range []string{"", "x", "{", `{"a":1}`, `["secret"]`, "binary:", "binary:{}", `binary:[["!","!"]]`} {
		_, err := metadata.Decode([]byte(encoded))
		if err == nil {
			t.Errorf("%q was accepted", encoded)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("the error shows the data: %v", err)
		}
	}
}
