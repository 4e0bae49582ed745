package ledger_test

import (
	"context"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// BenchmarkDo compares the ledger around a call that does nothing with what one would
// write by hand: a row before the call, with a time that old rows can be found and
// deleted by, and an update after it. Both alternate, so that what else the machine
// does strikes both; ratio is the ledger's throughput by that of the other, from the
// median times of each.
func BenchmarkDo(b *testing.B) {
	for _, d := range testdb.Servers {
		b.Run(d.Name, func(b *testing.B) {
			k := newKit(b, d)
			ctx := b.Context()
			table := "CREATE TABLE by_hand (id varchar(255) PRIMARY KEY, idempotency_key varchar(64) NOT NULL, state varchar(16) NOT NULL, result text, "
			now := d.Dialect.Now()
			switch d.Dialect {
			case deduplicator.PostgreSQL:
				table += "started_at timestamptz NOT NULL)"
			case deduplicator.MySQL:
				table += "started_at datetime(6) NOT NULL)"
			default:
				table += "started_at TEXT NOT NULL) WITHOUT ROWID"
			}
			for _, statement := range []string{table, "CREATE INDEX by_hand_started_at ON by_hand (started_at)"} {
				_, err := k.db.ExecContext(ctx, statement)
				require.NoError(b, err)
			}
			insert, err := k.db.PrepareContext(ctx, d.Dialect.Rebind("INSERT INTO by_hand (id, idempotency_key, state, started_at) VALUES (?, ?, 'started', "+now+")"))
			require.NoError(b, err)
			update, err := k.db.PrepareContext(ctx, d.Dialect.Rebind("UPDATE by_hand SET state = 'done', result = ? WHERE id = ?"))
			require.NoError(b, err)
			effect := newEffect(b, "charge", ledger.AskOperator())
			call := func(context.Context, string) (string, error) { return "receipt", nil }

			var took [2][]float64
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
						took[0] = append(took[0], (b.Elapsed() - begin).Seconds())
						continue
					}
					if _, err := insert.ExecContext(ctx, id, id); err != nil {
						b.Fatal(err)
					}
					if _, err := update.ExecContext(ctx, `"receipt"`, id); err != nil {
						b.Fatal(err)
					}
					took[1] = append(took[1], (b.Elapsed() - begin).Seconds())
				}
			}
			for _, times := range took {
				slices.Sort(times)
			}
			byLedger, byHand := took[0][n/2], took[1][n/2]
			b.ReportMetric(byHand/byLedger, "ratio")
			b.ReportMetric(1/byLedger, "ledger/s")
			b.ReportMetric(1/byHand, "by-hand/s")
		})
	}
}
