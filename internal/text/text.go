// Package text cuts what goes into headers, columns and log lines.
package text

import "unicode/utf8"

// Max is the longest text in bytes: headers share one frame on RabbitMQ (128 KiB by
// default), and observers write to logs.
const Max = 1024

// Cut returns s, or where it is longer than [Max] as many of its first runes as
// leave room for an ellipsis.
func Cut(s string) string {
	if len(s) <= Max {
		return s
	}
	const more = "…"
	end := Max - len(more)
	for end > 0 && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + more
}
