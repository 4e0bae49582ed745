// Package crash_test kills workers, connections and databases, and counts what
// took effect.
//
// Workers are processes of their own: this test binary again, with a variable
// that says what to do. They are killed by SIGKILL at named steps and at random
// moments; a new one goes on each time. The broker outlives them, so what they
// did not acknowledge is delivered again.
//
// The environment sets how long this takes:
//
//	CRASH_CUTS  random cuts per database, 25 if unset
//	CRASH_SEED  of the random cuts, chosen and printed if unset
package crash_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/child"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/env"
)

// patience is for what must happen.
const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	child.Main(runChild)
	goleak.VerifyTestMain(m,
		// sarama's metrics share one ticker per process, which never ends.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"))
}

// random returns a generator whose seed is in the log.
func random(t *testing.T) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(env.Seed(t, "CRASH_SEED"), 0))
}
