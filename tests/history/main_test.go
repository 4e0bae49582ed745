// Package history_test breaks consumers and brokers under traffic, and compares
// the history of every entity's effects with what is promised.
//
// Consumers are processes of their own, which are killed and stopped; brokers are
// servers of their own, which are restarted. The history is written by the handlers
// in their transactions. What it proves is in package tests/internal/history.
//
// The environment sets how long this takes:
//
//	HISTORY_EVENTS    events per run, 600 if unset
//	HISTORY_ENTITIES  entities per run, 30 if unset
//	HISTORY_ROUNDS    how often each fault strikes in a run; unset: once per broker
//	HISTORY_SEED      of traffic and faults, chosen and printed if unset
package history_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/child"
)

// patience is for what must happen, on a busy machine.
const patience = 3 * time.Minute

func TestMain(m *testing.M) {
	child.Main(runWorker)
	goleak.VerifyTestMain(m,
		// sarama's metrics share one ticker per process, which never ends.
		goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick"),
		// toxiproxy leaves one behind when it stops while data is on its way.
		goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*ToxicStub).Run"),
		goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2.(*ToxicLink).read"))
}
