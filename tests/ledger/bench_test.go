package ledger_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// BenchmarkDo compares the ledger around a call that does nothing with what one would
// write by hand: a row before the call and an update after it. Both alternate, so that
// what else the machine does strikes both; ratio is the ledger's throughput by that of
// the other.
func BenchmarkDo(b *testing.B) {
	for _, d := range testdb.Servers {
		b.Run(d.Name, func(b *testing.B) {
			k := newKit(b, d)
			ctx := b.Context()
			table := "CREATE TABLE by_hand (id varchar(255) PRIMARY KEY, state varchar(16) NOT NULL, result text)"
			if d.Dialect == deduplicator.SQLite {
				table += " WITHOUT ROWID"
			}
			_, err := k.db.ExecContext(ctx, table)
			require.NoError(b, err)
			insert, err := k.db.PrepareContext(ctx, d.Dialect.Rebind("INSERT INTO by_hand (id, state) VALUES (?, 'started')"))
			require.NoError(b, err)
			update, err := k.db.PrepareContext(ctx, d.Dialect.Rebind("UPDATE by_hand SET state = 'done', result = ? WHERE id = ?"))
			require.NoError(b, err)
			effect := newEffect(b, "charge", ledger.AskOperator())
			call := func(context.Context, string) (string, error) { return "receipt", nil }

			var took [2]float64
			n := 0
			for b.Loop() {
				n++
				id := "0197c1f4-2f56-7a98-8b1c-" + string(rune('a'+n%26)) + strconv.Itoa(n)
				claimed := deduplicator.ContextWithClaim(ctx, deduplicator.Claim{Consumer: consumer, Key: id})
				for turn := range 2 {
					begin := b.Elapsed()
					if (n+turn)%2 == 0 {
						if _, err := ledger.Do(claimed, k.ledger, effect, 100, call); err != nil {
							b.Fatal(err)
						}
						took[0] += (b.Elapsed() - begin).Seconds()
						continue
					}
					if _, err := insert.ExecContext(ctx, id); err != nil {
						b.Fatal(err)
					}
					if _, err := update.ExecContext(ctx, `"receipt"`, id); err != nil {
						b.Fatal(err)
					}
					took[1] += (b.Elapsed() - begin).Seconds()
				}
			}
			b.ReportMetric(took[1]/took[0], "ratio")
			b.ReportMetric(float64(n)/took[0], "ledger/s")
			b.ReportMetric(float64(n)/took[1], "by-hand/s")
		})
	}
}
