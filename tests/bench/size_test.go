package bench_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/env"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// BenchmarkTableSize handles new messages, whose keys are random.
//
//	empty  Deduplicate on tables that are empty at first
//	full   the same with BENCH_ROWS rows of random keys in processed_messages
//
// The figures are those of BenchmarkSingle, with x-NAME against empty.
func BenchmarkTableSize(b *testing.B) {
	rows := int(env.Number(b, "BENCH_ROWS", 100_000))
	compare(b, "empty", func(b *testing.B, driver testdb.Driver) []variant {
		if driver.Dialect == deduplicator.SQLite {
			rows = min(rows, 1_000_000) // its file is in a temporary folder
		}
		empty, full := newHand(b, driver), newHand(b, driver)
		full.fill(b, rows)
		return []variant{
			{name: "empty", handle: chained(b, empty.newStore(b), "c")},
			{name: "full", handle: chained(b, full.newStore(b), "c")},
		}
	})
}

// fill inserts rows of one day. Their keys begin like those of random UUIDs, spread
// evenly, and are inserted in their order, which is fast.
func (h *hand) fill(b *testing.B, rows int) {
	b.Helper()
	step := (1 << 32) / max(rows, 1)
	key, at, analyze := "lpad(to_hex(i::bigint * %d), 8, '0') || md5(i::text)", "now() - interval '1 day' + i * interval '1 millisecond'", "ANALYZE processed_messages"
	switch h.dialect {
	case deduplicator.MySQL:
		key, at, analyze = "CONCAT(LOWER(LPAD(HEX(i * %d), 8, '0')), MD5(i))", "UTC_TIMESTAMP(6) - INTERVAL 1 DAY + INTERVAL i * 1000 MICROSECOND", "ANALYZE TABLE processed_messages"
	case deduplicator.SQLite:
		key, at, analyze = "printf('%%08x', i * %d) || lower(hex(randomblob(16)))", "strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 day', '+' || (i / 1000.0) || ' seconds')", "ANALYZE"
	}
	const batch = 500_000 // a transaction of this size fits into every server's logs
	for from := 0; from < rows; from += batch {
		_, err := h.db.ExecContext(b.Context(), "INSERT INTO processed_messages (consumer_name, message_key, processed_at) SELECT 'c', "+fmt.Sprintf(key, step)+", "+at+
			fmt.Sprintf(" FROM (SELECT %d + i AS i FROM %s) s ORDER BY i", from, testdb.Numbers(min(batch, rows-from))))
		require.NoError(b, err)
	}
	_, err := h.db.ExecContext(b.Context(), analyze)
	require.NoError(b, err)
}
