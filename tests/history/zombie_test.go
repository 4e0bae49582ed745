package history_test

import (
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/history"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// A consumer is stopped with the first event of an entity in its hands until the
// broker gives up on it. Another one takes over and finishes what there is. Then the
// first goes on as if nothing had happened (B65). Its effect is refused, and the
// state stays what the last event made it. The broker may as well give up on it
// between the commit and the acknowledgement (B66, B70).
//
// Without the middlewares it overwrites what its successor has done.
func TestZombieB65(t *testing.T) {
	t.Parallel()
	const last = 5
	for _, broker := range []services.Name{services.Kafka, services.AMQP, services.AMQP4} {
		t.Run(string(broker), func(t *testing.T) {
			t.Parallel()
			s := settings{Shards: 2, Session: 6 * time.Second} // the shortest that Kafka allows by default
			if broker == services.Kafka {
				s.Kafka = services.Value(t, broker)
			} else {
				s.AMQP = services.Value(t, broker)
			}
			for name, test := range map[string]struct {
				guard  guard
				driver testdb.Driver
				stop   step
				zombie bool // its effect counts
			}{
				"before its transaction, unprotected": {
					guard: nothing, driver: testdb.PGX, stop: received, zombie: true,
				},
				"after its commit, unprotected B70": {
					guard: nothing, driver: testdb.PGX, stop: committed, zombie: true,
				},
				"before its transaction": {
					guard: rejectStale, driver: testdb.PGX, stop: received,
				},
				"in its transaction, which the database ends": {
					guard: rejectStale, driver: testdb.PGX, stop: written,
				},
				"in its transaction, which the database ends, strict": {
					guard: strictSequence, driver: testdb.MySQL, stop: written,
				},
				"after its commit B70": {
					guard: rejectStale, driver: testdb.MySQL, stop: committed, zombie: true,
				},
			} {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					s := s
					s.Guard = test.guard
					r := newRun(t, test.driver, s)
					r.DSN = withIdleTransactionTimeout(t, r.settings)
					r.add("entity")
					for seq := int64(1); seq <= last; seq++ {
						require.NoError(t, r.publish(t.Context(), newEvent("entity", seq, event("entity", seq))))
					}
					r.start("zombie", func(s *settings) { s.Stop, s.StopIn = test.stop, event("entity", 1) })
					zombie := r.workers["zombie"]
					zombie.Await("stop", func(line string) bool { return line == stopping })
					r.start("successor")
					r.awaitRows("the last event", 1, "SELECT COUNT(*) FROM history WHERE seq = ?", last)
					if test.stop == committed && test.guard != nothing {
						r.await("the copy", func() bool { return r.outcomes["duplicate"] > 0 })
					}

					zombie.Continue()
					zombie.Await("end of the run", func(line string) bool { return line[:len(end)] == end })
					if test.guard != nothing {
						// Refused for its claim, or because its delivery or its transaction is over.
						refused := slices.Contains(zombie.Lines(), outcome+" duplicate") || slices.Contains(zombie.Lines(), outcome+" failed")
						require.Equal(t, !test.zombie, refused, "%q", zombie.Lines())
					}
					report := r.history(history.Newest)
					t.Log(r.summary(report))
					require.NotEmpty(t, report.Overlaps)
					if test.guard == nothing {
						require.Positive(t, report.Count(history.Doubled))
						if test.stop == received {
							require.Less(t, r.states()["entity"], int64(last))
						}
						return
					}
					requireNoFault(t, report)
					require.Equal(t, last, report.Effects)
					require.Equal(t, int64(last), r.states()["entity"])
					zombies := r.effects("zombie1")
					require.Equal(t, test.zombie, zombies == 1, "%d effects of the zombie", zombies)
				})
			}
		})
	}
}

// effects counts the effects of a worker.
func (r *run) effects(worker string) int {
	r.t.Helper()
	var n int
	require.NoError(r.t, r.db.QueryRowContext(r.t.Context(), r.Dialect.Rebind("SELECT COUNT(*) FROM history WHERE run LIKE ?"), worker+"/%").Scan(&n))
	return n
}

// withIdleTransactionTimeout returns a DSN with which the database ends transactions
// of which it hears nothing for 3 seconds. The claim of a process that is stopped
// would stay locked otherwise, and its successor would wait.
func withIdleTransactionTimeout(t *testing.T, s settings) string {
	t.Helper()
	if s.Dialect == deduplicator.MySQL {
		separator := "?"
		if strings.Contains(s.DSN, "?") {
			separator = "&"
		}
		return s.DSN + separator + "idle_transaction_timeout=3"
	}
	u, err := url.Parse(s.DSN)
	require.NoError(t, err)
	q := u.Query()
	q.Set("idle_in_transaction_session_timeout", "3000")
	u.RawQuery = q.Encode()
	return u.String()
}
