package history_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/env"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/history"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// Three consumers share a topic that is full of copies and late events, with a
// handler that fails now and then. They are killed and stopped, their connections
// cut, the broker restarted and its queues deleted. Afterwards every event that was
// not overtaken has taken effect once, and none after a later one; with Sequence
// each has, in order.
//
// Before that the same traffic runs without the middlewares, which the comparison
// must notice.
func TestChaos(t *testing.T) {
	t.Parallel()
	for _, broker := range []struct {
		name services.Name
		runs []chaosRun
	}{
		{services.Kafka, []chaosRun{
			{guard: nothing, driver: testdb.PGX},
			{guard: rejectStale, driver: testdb.PGX},
			{guard: strictSequence, driver: testdb.MySQL},
		}},
		{services.AMQP, []chaosRun{
			{guard: nothing, driver: testdb.PGX},
			{guard: rejectStale, driver: testdb.MySQL, routing: amqpshard.Slots},
			{guard: strictSequence, driver: testdb.PGX},
		}},
		{services.AMQP4, []chaosRun{
			{guard: deduplicateOnly, driver: testdb.PGX},
			{guard: rejectStale, driver: testdb.PGX},
			{guard: strictSequence, driver: testdb.PGX, routing: amqpshard.Slots},
		}},
	} {
		t.Run(string(broker.name), func(t *testing.T) {
			t.Parallel()
			server := services.NewInstance(t, broker.name)
			for _, run := range broker.runs { // one after the other: they share the server
				t.Run(fmt.Sprint(run.guard, " on ", run.driver.Name), func(t *testing.T) { run.do(t, server) })
			}
		})
	}
}

type chaosRun struct {
	guard   guard
	driver  testdb.Driver
	routing amqpshard.Routing
}

func (c chaosRun) do(t *testing.T, server *services.Instance) {
	proxy := newProxy(t, server.Addr())
	s := settings{Proxy: proxy.Listen, Shards: 16, Session: 2 * time.Second, Routing: c.routing, Guard: c.guard, ErrorsIn: 50}
	if server.Name() == services.Kafka {
		s.Kafka = server.Value()
	} else {
		s.AMQP = server.Value()
	}
	unguarded := c.guard == nothing || c.guard == deduplicateOnly
	ch := &chaos{run: newRun(t, c.driver, s), server: server, proxy: proxy}
	ch.entities, ch.events = int(env.Number(t, "HISTORY_ENTITIES", 30)), int(env.Number(t, "HISTORY_EVENTS", 600))
	all := []string{"kill", "stop", "cut", "restart"}
	if s.AMQP != "" {
		all = append(all, "delete queue")
	}
	faults := slices.Repeat(all, int(env.Number(t, "HISTORY_ROUNDS", 0)))
	switch {
	case unguarded: // what the traffic alone does to it is enough
		ch.entities, ch.events, faults = 20, 200, nil
	case len(faults) == 0 && c.guard == rejectStale: // the short form: each fault once per broker
		faults = all[:2]
	case len(faults) == 0:
		faults = all[2:]
	}

	began := time.Now()
	ch.disturb(faults)
	mode := history.Newest
	if c.guard == strictSequence {
		mode = history.Strict
	}
	report := ch.history(mode)
	t.Logf("%s, 3 consumers, %d shards, %v, faults: %v", server.Name(), s.Shards, time.Since(began).Round(time.Second), ch.struck)
	t.Log(ch.summary(report))

	if unguarded {
		require.Positive(t, report.Count(history.Doubled), "copies, with Deduplicate those under another id")
		require.Positive(t, report.Count(history.Stale)+report.Count(history.Inverted), "%d events were held back", ch.heldBack)
		return
	}
	requireNoFault(t, report)
	require.Equal(t, ch.published, ch.states(), "every entity has the state of its last event")
	if c.guard == strictSequence {
		require.Equal(t, ch.entities*ch.last(), report.Effects)
	}
	if server.Name() == services.Kafka && c.guard == rejectStale {
		require.Equal(t, ch.heldBack, report.Overtaken, "nothing else comes out of order from one partition")
	}
}

// chaos is a run with traffic and faults.
type chaos struct {
	*run
	server   *services.Instance
	proxy    *toxiproxy.Proxy
	entities int
	events   int
	heldBack int // events that were published after later ones
	struck   map[string]int
}

var slots = []string{"a", "b", "c"}

// last is the number of each entity's last event.
func (c *chaos) last() int { return c.events / c.entities }

// disturb publishes everything while the faults strike, in random order, and waits
// until all is done.
func (c *chaos) disturb(faults []string) {
	rng := c.random(1)
	rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })

	names := make([]string, c.entities)
	for i := range names {
		names[i] = fmt.Sprint("entity-", i)
	}
	c.add(names...)
	for _, slot := range slots {
		c.start(slot)
	}
	ctx, cancel := context.WithTimeout(c.t.Context(), 2*time.Hour)
	defer cancel()
	published := make(chan error, 1)
	go func() { published <- c.produce(ctx, names) }()
	defer func() { cancel(); <-published }()

	c.struck = map[string]int{}
	for i, fault := range faults {
		c.await("traffic before the next fault", func() bool { return len(c.seen) >= (i+1)*c.entities*c.last()/(len(faults)+1) })
		c.strike(ctx, fault)
		c.struck[fault]++
	}
	require.NoError(c.t, <-published)
	published <- nil
	defer func() {
		if c.t.Failed() {
			c.explain()
		}
	}()
	c.awaitRows("the last event of each entity", c.entities, "SELECT COUNT(DISTINCT entity) FROM history WHERE seq = ?", c.last())
}

// explain logs what holds up which entities.
func (c *chaos) explain() {
	processed, states := c.processed(), c.states()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, entity := range slices.Sorted(maps.Keys(states)) {
		if next := states[entity] + 1; next <= int64(c.last()) {
			c.t.Logf("%s is at %d; the next event was seen by a worker: %t, its key recorded: %t", entity, states[entity],
				c.seen[event(entity, next)], processed[event(entity, next)])
		}
	}
}

func (c *chaos) queue(shard int) string { return fmt.Sprintf("%s.%s.%03d", c.Topic, group, shard) }

// ahead is how many events are published before they are handled.
func (c *chaos) ahead() int { return max(200, c.events/20) }

// produce is the traffic: the events of each entity in order, except that some come
// up to three rounds late; some again under the same id, and older ones again under
// another. The last round is plain, so that nothing comes after it in any shard.
func (c *chaos) produce(ctx context.Context, entities []string) error {
	rng := c.random(2)
	entities = slices.Clone(entities)
	sent := 0
	type heldBack struct{ seq, due int64 }
	held := map[string]heldBack{}
	for seq := int64(1); seq <= int64(c.last()); seq++ {
		rng.Shuffle(len(entities), func(i, j int) { entities[i], entities[j] = entities[j], entities[i] })
		for chunk := range slices.Chunk(entities, 50) {
			if err := c.pace(ctx, sent-c.ahead()); err != nil {
				return err
			}
			sent += len(chunk)
			var messages, extra []*message.Message
			for i, entity := range chunk {
				// At random, and some in every run.
				late, copied, oldCopied := rng.IntN(30) == 0 || seq == 2 && i < 3, rng.IntN(10) == 0, rng.IntN(20) == 0 || seq == 5 && i < 3
				if _, waits := held[entity]; late && !waits && seq+4 < int64(c.last()) {
					held[entity] = heldBack{seq, seq + 1 + rng.Int64N(3)}
					c.heldBack++
					continue
				}
				messages = append(messages, newEvent(entity, seq, event(entity, seq)))
				if seq == int64(c.last()) {
					continue
				}
				if old, waits := held[entity]; waits && old.due == seq {
					extra = append(extra, newEvent(entity, old.seq, event(entity, old.seq)))
					delete(held, entity)
				}
				if copied {
					extra = append(extra, newEvent(entity, seq, event(entity, seq)))
				}
				if old := seq - 1 - rng.Int64N(3); oldCopied && old > 0 {
					extra = append(extra, newEvent(entity, old, event(entity, old)+"-late"))
				}
			}
			if err := c.publish(ctx, messages...); err != nil {
				return err
			}
			if len(extra) > 0 {
				if err := c.publish(ctx, extra...); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// pace waits until so many events were seen.
func (c *chaos) pace(ctx context.Context, seen int) error {
	for {
		c.mu.Lock()
		ok, progress := len(c.seen) >= seen, c.progress
		c.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return fmt.Errorf("%d events seen, want %d: %w", len(c.seen), seen, ctx.Err())
		}
	}
}

func (c *chaos) strike(ctx context.Context, fault string) {
	switch fault {
	case "kill":
		slot := c.busiest()
		c.kill(slot)
		c.start(slot)
	case "stop":
		c.stop()
	case "cut":
		c.proxy.Stop()
		require.NoError(c.t, c.proxy.Start())
	case "restart":
		require.NoError(c.t, c.server.Restart(ctx))
	case "delete queue":
		c.deleteQueue(ctx)
	}
}

// busiest is the slot that has got the last message of most entities.
func (c *chaos) busiest() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	held := map[string]int{}
	for _, slot := range c.holder {
		held[slot]++
	}
	return slices.MaxFunc(slots, func(a, b string) int { return held[a] - held[b] })
}

// stop stops a worker until the broker has given one of its entities to another.
func (c *chaos) stop() {
	slot := c.busiest()
	c.workers[slot].Stop()
	c.mu.Lock()
	before := maps.Clone(c.holder)
	c.mu.Unlock()
	c.await("another worker takes over", func() bool {
		for entity, now := range c.holder {
			if before[entity] == slot && now != slot {
				return true
			}
		}
		return false
	})
	c.workers[slot].Continue()
}

// deleteQueue deletes the queue of a shard. What was in it is gone, so the producer
// publishes again what has not taken effect yet.
func (c *chaos) deleteQueue(ctx context.Context) {
	conn, err := amqp.Dial(c.AMQP)
	require.NoError(c.t, err)
	defer conn.Close() //nolint:errcheck // it has no channel with anything open
	channel, err := conn.Channel()
	require.NoError(c.t, err)
	n, err := channel.QueueDelete(c.queue(c.random(3).IntN(c.Shards)), false, false, false)
	require.NoError(c.t, err)
	c.struck["messages deleted"] += n

	c.mu.Lock()
	published := maps.Clone(c.published)
	c.mu.Unlock()
	processed := c.processed()
	for seq := int64(1); seq <= int64(c.last()); seq++ {
		var missing []*message.Message
		for _, entity := range slices.Sorted(maps.Keys(published)) {
			if id := event(entity, seq); seq <= published[entity] && !processed[id] {
				missing = append(missing, newEvent(entity, seq, id))
			}
		}
		for chunk := range slices.Chunk(missing, 50) {
			require.NoError(c.t, c.publish(ctx, chunk...))
		}
	}
}

// processed returns the ids of the events whose key is recorded.
func (c *chaos) processed() map[string]bool {
	rows, err := c.db.QueryContext(c.t.Context(), "SELECT message_key FROM "+deduplicator.DefaultProcessedTable)
	require.NoError(c.t, err)
	ids := map[string]bool{}
	for rows.Next() {
		var id []byte
		require.NoError(c.t, rows.Scan(&id))
		ids[string(id)] = true
	}
	require.NoError(c.t, errors.Join(rows.Err(), rows.Close()))
	return ids
}
