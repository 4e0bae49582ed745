// Package text cuts what goes into headers, columns and log lines.
package text

import (
	"strings"
	"unicode/utf8"
)

// Max is the longest text in bytes: headers share one frame on RabbitMQ (128 KiB by
// default), and observers write to logs.
const Max = 1024

// Cut returns s, or where it is longer than [Max] as many of its first runes as
// leave room for an ellipsis. What no text column takes, a NUL and what is not UTF-8,
// is replaced by U+FFFD.
func Cut(s string) string {
	const more = "…"
	tooLong := len(s) > Max
	if tooLong {
		s = s[:Max] // before the rest: it may be huge
	}
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\ufffd"), "\x00", "\ufffd")
	if !tooLong && len(s) <= Max {
		return s
	}
	end := min(len(s), Max-len(more))
	for end > 0 && end < len(s) && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + more
}
