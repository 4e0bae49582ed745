package crash_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/env"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// A worker is killed at each step of a message in turn. What it leaves behind is
// all or nothing, and its successor completes it.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	for _, driver := range testdb.Servers {
		t.Run("kafka/"+driver.Name, func(t *testing.T) {
			t.Parallel()
			killAtEachStep(t, onDatabase(t, driver, kafka))
		})
	}
	t.Run("amqp/"+testdb.PGX.Name, func(t *testing.T) {
		t.Parallel()
		killAtEachStep(t, onDatabase(t, testdb.PGX, rabbitMQ))
	})
}

func killAtEachStep(t *testing.T, tr *trial) {
	for _, at := range []struct {
		step    step
		durable string // "no", "yes", or "maybe"
		outputs int    // stored
	}{
		{claimed, "no", 0},
		{written, "no", 0},
		{committing, "no", 0},
		{commitSent, "maybe", 2},
		{committed, "yes", 2}, // the database has answered, nobody has read it
		{publishing, "yes", 2},
		{publishedHalf, "yes", 2},
		{published, "yes", 2},
	} {
		if at.step == commitSent && tr.Dialect == deduplicator.SQLite {
			continue // it is in the worker's process
		}
		event := strings.ReplaceAll(string(at.step), " ", "-")
		tr.publish(tr.newEvent(event, "entity"))
		s := tr.settings
		s.Stop, s.StopIn, s.Relay = at.step, delivery{stock, event}, false
		c := spawn(t, s)
		c.awaitStop(at.step)
		c.Kill()

		of := " WHERE consumer_name = 'stock' AND message_key = '" + event + "'"
		// The server notices the lost connection in its own time.
		var state string
		tr.eventually("the state after "+event, func(ctx context.Context) (bool, error) {
			var effects, claims, outputs int
			for query, n := range map[string]*int{
				"SELECT COUNT(*) FROM effects WHERE handler = 'stock' AND event = '" + event + "'": &effects,
				"SELECT COUNT(*) FROM " + deduplicator.DefaultProcessedTable + of:                  &claims,
				"SELECT COUNT(*) FROM " + deduplicator.DefaultProducedTable + of:                   &outputs,
			} {
				if err := tr.db.QueryRowContext(ctx, query).Scan(n); err != nil {
					return false, err
				}
			}
			state = fmt.Sprintf("%d effects, %d claims, %d outputs", effects, claims, outputs)
			nothing, all := state == "0 effects, 0 claims, 0 outputs", state == fmt.Sprintf("1 effects, 1 claims, %d outputs", at.outputs)
			return nothing && at.durable != "yes" || all && at.durable != "no", nil
		})
		t.Logf("killed at %q: %s", at.step, state)
	}
	c := spawn(t, tr.settings)
	defer c.Kill()
	tr.requireExactlyOnce()
}

// A handler returns a thousand messages, of which the broker takes 400. The worker
// dies before it has told the broker, and so does the next one, halfway. Downstream
// each has one effect, under the UUIDs of the attempt that took effect.
func TestThousandOutputsB09(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) *trial{
		"kafka/pgx":  func(t *testing.T) *trial { return onDatabase(t, testdb.PGX, apacheKafka) },
		"amqp/mysql": func(t *testing.T) *trial { return onDatabase(t, testdb.MySQL, rabbitMQ) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const outputs = 1000
			tr := open(t)
			many := tr.newEvent("many", "entity")
			many.Metadata.Set("outputs", strconv.Itoa(outputs))
			tr.publish(many)
			s := tr.settings
			s.StopIn, s.Relay = delivery{stock, "many"}, false
			for _, refuseAfter := range []int{400, 700} {
				s.RefuseAfter, s.Stop = refuseAfter, refused
				c := spawn(t, s)
				c.awaitStop(refused)
				c.Kill()
			}
			c := spawn(t, tr.settings)
			defer c.Kill()
			booked := "SELECT COUNT(*) FROM effects WHERE handler = 'ledger' AND detail = 'many'"
			tr.eventually("the outputs in the ledger", func(ctx context.Context) (bool, error) {
				var n int
				err := tr.db.QueryRowContext(ctx, booked).Scan(&n)
				return n >= outputs, err
			})
			tr.requireExactlyOnce()
			require.Equal(t, outputs, tr.count(booked))
		})
	}
}

// A worker dies when its message is acknowledged but its outputs are still stored.
// Nobody redelivers them: they are the relay's.
func TestAcknowledgedOutputsAreTheRelays(t *testing.T) {
	t.Parallel()
	tr := onDatabase(t, testdb.PGX, kafka)
	tr.publish(tr.newEvent("only", "entity"))
	s := tr.settings
	s.Stop, s.StopIn, s.Relay = forgetting, delivery{}, false
	c := spawn(t, s)
	c.awaitStop(forgetting)
	tr.awaitAck()
	c.Kill()
	require.Equal(t, 2, tr.count("SELECT COUNT(*) FROM "+deduplicator.DefaultProducedTable))
	c = spawn(t, tr.settings)
	defer c.Kill()
	tr.requireExactlyOnce()
}

// A worker is killed again and again at random moments, under traffic.
func TestKilledAtRandom(t *testing.T) {
	t.Parallel()
	for _, driver := range testdb.Servers {
		t.Run("kafka/"+driver.Name, func(t *testing.T) {
			t.Parallel()
			killAtRandom(t, driver, kafka)
		})
	}
	t.Run("amqp/"+testdb.PGX.Name, func(t *testing.T) {
		t.Parallel()
		killAtRandom(t, testdb.PGX, rabbitMQ)
	})
}

func killAtRandom(t *testing.T, driver testdb.Driver, broker brokerKind) {
	rng := random(t)
	cuts := int(env.Number(t, "CRASH_CUTS", 25))
	tr := onDatabase(t, driver, broker)
	where := map[string]int{}
	started := time.Now()
	for range cuts {
		tr.publishNext(10)
		c := spawn(t, tr.settings)
		var moment time.Duration
		if rng.IntN(8) > 0 { // else anywhere, perhaps while it starts
			c.Await("message", func(line string) bool { return line == stock+" "+string(claimed) || line == ledger+" "+string(claimed) })
			moment = time.Duration(rng.Int64N(int64(150 * time.Millisecond)))
		} else {
			moment = time.Duration(rng.Int64N(int64(2 * time.Second)))
		}
		time.Sleep(moment)
		c.Kill()
		where[c.lastStep()]++
	}
	t.Logf("%d cuts in %v, by the last step before:", cuts, time.Since(started).Round(time.Second))
	for _, last := range slices.Sorted(maps.Keys(where)) {
		t.Logf("%4d %s", where[last], last)
	}
	c := spawn(t, tr.settings)
	defer c.Kill()
	tr.requireExactlyOnce()
	t.Logf("%d events, each took effect once", len(tr.events))
}
