package sequence_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// BenchmarkRelease closes a gap behind which 1,000 messages of one entity are
// parked and releases all of them.
func BenchmarkRelease(b *testing.B) {
	const parked = 1000
	for _, d := range testdb.Servers {
		for _, batch := range []int{1, 10, 100, 1000} {
			b.Run(fmt.Sprintf("%s/batch=%d", d.Name, batch), func(b *testing.B) {
				k := newKit(b, d, ordering.WithReleaseBatch(batch))
				for n := 0; b.Loop(); n++ {
					b.StopTimer()
					entity := fmt.Sprint("e", n)
					for seq := int64(2); seq <= parked+1; seq++ {
						require.NoError(b, k.process(k.event(entity, 0, seq)))
					}
					b.StartTimer()
					require.NoError(b, k.process(k.event(entity, 0, 1)))
					require.NoError(b, k.releaser().Release(b.Context()))
					b.StopTimer()
					require.Len(b, k.effects(entity), parked+1)
					b.StartTimer()
				}
				b.ReportMetric(parked*float64(b.N)/b.Elapsed().Seconds(), "released/s")
			})
		}
	}
}
