package text_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/seed-2f56a981/watermill-idempotent/internal/text"
)

func TestCut(t *testing.T) {
	t.Parallel()
	full := strings.Repeat("a", text.Max)
	for _, tt := range []struct{ in, out string }{
		{"", ""},
		{"a\xffb\x00", "a\ufffdb\ufffd"},
		{full, full},
		{full + "a", full[3:] + "…"},
		{"\xff" + full[1:], "\ufffd" + full[6:] + "…"}, // longer than it was
		{full[1:] + "é", full[3:] + "…"},
	} {
		if out := text.Cut(tt.in); out != tt.out {
			t.Errorf("%q: %q, want %q", tt.in, out, tt.out)
		}
	}
}

func FuzzCut(f *testing.F) {
	f.Add(strings.Repeat("€", 400))
	f.Add(strings.Repeat("\xff\x00", 600))
	f.Fuzz(func(t *testing.T, s string) {
		out := text.Cut(s)
		if len(out) > text.Max || !utf8.ValidString(out) || strings.Contains(out, "\x00") {
			t.Errorf("%q: %q", s, out)
		}
		if len(s) <= text.Max && utf8.ValidString(s) && !strings.Contains(s, "\x00") && out != s {
			t.Errorf("%q became %q", s, out)
		}
	})
}
