package history_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/child"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/env"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/history"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// run is a topic on a broker, a database, consumers, and what they have reported.
type run struct {
	settings
	t        *testing.T
	db       *sql.DB
	producer ordering.Broker
	seed     uint64

	// workers by slot. Each process in a slot has a name of its own.
	workers map[string]*child.Process
	starts  map[string]int

	mu        sync.Mutex // guards what follows
	published map[string]int64
	runs      map[string]*history.Run
	holder    map[string]string // by entity, the slot that got its last message
	seen      map[string]bool   // events that some worker has got
	outcomes  map[middleware.Outcome]int
	progress  chan struct{} // is closed when there is more
}

// newRun prepares everything and starts no worker. The settings are those of the
// broker and of the guard.
func newRun(t *testing.T, driver testdb.Driver, s settings) *run {
	t.Helper()
	ctx := t.Context()
	database := testdb.Create(t, driver)
	s.Dialect, s.DSN, s.Topic = driver.Dialect, database.DSN, "history-"+watermill.NewShortUUID()
	r := &run{
		settings: s, t: t, db: database.Open(t), seed: env.Seed(t, "HISTORY_SEED"),
		workers: map[string]*child.Process{}, starts: map[string]int{},
		published: map[string]int64{}, runs: map[string]*history.Run{}, holder: map[string]string{},
		seen: map[string]bool{}, outcomes: map[middleware.Outcome]int{}, progress: make(chan struct{}),
	}
	require.NoError(t, deduplicator.Migrate(ctx, r.db, r.Dialect))
	require.NoError(t, ordering.Migrate(ctx, r.db, r.Dialect))
	for _, table := range historyTables {
		_, err := r.db.ExecContext(ctx, table)
		require.NoError(t, err)
	}
	var err error
	r.producer, err = r.open(ctx)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.producer.Close()) })
	require.NoError(t, r.producer.Declare(ctx, r.Topic, r.poison()))
	t.Cleanup(func() {
		for slot := range r.workers {
			r.kill(slot)
		}
	})
	return r
}

// start starts the next process in a slot.
func (r *run) start(slot string, changes ...func(*settings)) {
	r.t.Helper()
	r.starts[slot]++
	s := r.settings
	s.Worker = fmt.Sprint(slot, r.starts[slot])
	for _, change := range changes {
		change(&s)
	}
	r.workers[slot] = child.Spawn(r.t, s, func(line string) { r.listen(slot, line) })
}

// kill kills the process in a slot.
func (r *run) kill(slot string) {
	p := r.workers[slot]
	delete(r.workers, slot)
	p.Kill()
	if r.t.Failed() {
		r.t.Logf("%s%d, end of its log:\n%s", slot, r.starts[slot], tail(p.Stderr()))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, run := range r.runs {
		if run.End.IsZero() && run.Worker == fmt.Sprint(slot, r.starts[slot]) {
			run.End = time.Now()
		}
	}
}

func tail(text string) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

func (r *run) listen(slot, line string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch word := strings.Fields(line); word[0] {
	case got:
		run := &history.Run{Worker: strings.Split(word[1], "/")[0], Entity: word[2], Start: nanoseconds(word[4])}
		run.Seq, _ = strconv.ParseInt(word[3], 10, 64)
		r.runs[word[1]] = run
		r.holder[run.Entity] = slot
		r.seen[event(run.Entity, run.Seq)] = true
		close(r.progress)
		r.progress = make(chan struct{})
	case end:
		r.runs[word[1]].End = nanoseconds(word[2])
	case outcome:
		r.outcomes[middleware.Outcome(word[1])]++
	}
}

func nanoseconds(text string) time.Time {
	n, _ := strconv.ParseInt(text, 10, 64)
	return time.Unix(0, n)
}

func event(entity string, seq int64) string { return fmt.Sprint(entity, "/", seq) }

// await waits until condition holds, which needs mu and is asked when a worker has
// got another message.
func (r *run) await(what string, condition func() bool) {
	r.t.Helper()
	timeout := time.After(patience)
	for {
		r.mu.Lock()
		ok, progress := condition(), r.progress
		state := fmt.Sprintf("%d events seen, outcomes %v", len(r.seen), r.outcomes)
		r.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-progress:
		case <-timeout:
			require.FailNow(r.t, "not there: "+what, state)
		}
	}
}

// awaitRows waits until a query returns want.
func (r *run) awaitRows(what string, want int, query string, args ...any) {
	r.t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	n := 0
	for deadline := time.Now().Add(patience); n < want; <-ticker.C {
		require.NoError(r.t, r.db.QueryRowContext(r.t.Context(), r.Dialect.Rebind(query), args...).Scan(&n))
		require.False(r.t, n < want && time.Now().After(deadline), "not there: %s: %d of %d", what, n, want)
	}
}

// add makes entities.
func (r *run) add(entities ...string) {
	r.t.Helper()
	for _, entity := range entities {
		_, err := r.db.ExecContext(r.t.Context(), r.Dialect.Rebind("INSERT INTO entities (entity, place, seq) VALUES (?, 0, 0)"), entity)
		require.NoError(r.t, err)
	}
}

func newEvent(entity string, seq int64, id string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte("state "+event(entity, seq)))
	msg.Metadata.Set(eventID, id)
	msg.Metadata.Set(sequence, strconv.FormatInt(seq, 10))
	msg.Metadata.Set(ordering.PartitionKeyMetadata, entity)
	return msg
}

// publish publishes messages until the broker has confirmed all of them: what the
// caller of a Publish that failed does.
func (r *run) publish(ctx context.Context, messages ...*message.Message) error {
	r.mu.Lock()
	for _, msg := range messages {
		entity := msg.Metadata.Get(ordering.PartitionKeyMetadata)
		seq, _ := strconv.ParseInt(msg.Metadata.Get(sequence), 10, 64)
		r.published[entity] = max(r.published[entity], seq)
	}
	r.mu.Unlock()
	for {
		err := r.producer.Publisher().Publish(r.Topic, messages...)
		if err == nil {
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

// history reads what the handlers have written.
func (r *run) history(mode history.Mode) history.Report {
	r.t.Helper()
	rows, err := r.db.QueryContext(r.t.Context(), "SELECT entity, place, seq, run FROM history")
	require.NoError(r.t, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []history.Run
	effective := map[string]bool{}
	for rows.Next() {
		var effect history.Run
		var id string
		require.NoError(r.t, rows.Scan(&effect.Entity, &effect.Place, &effect.Seq, &id))
		run := r.runs[id]
		require.NotNil(r.t, run, "no worker has reported run %s, which has an effect", id)
		require.Equal(r.t, []any{run.Entity, run.Seq}, []any{effect.Entity, effect.Seq}, "run %s", id)
		effect.Worker, effect.Start, effect.End = run.Worker, run.Start, run.End
		all = append(all, effect)
		effective[id] = true
	}
	require.NoError(r.t, errors.Join(rows.Err(), rows.Close()))
	for id, run := range r.runs {
		if !effective[id] {
			all = append(all, *run)
		}
	}
	return history.Check(mode, r.published, all)
}

// states returns the number of the event that each entity's state is from.
func (r *run) states() map[string]int64 {
	r.t.Helper()
	rows, err := r.db.QueryContext(r.t.Context(), "SELECT entity, seq FROM entities")
	require.NoError(r.t, err)
	states := map[string]int64{}
	for rows.Next() {
		var entity string
		var seq int64
		require.NoError(r.t, rows.Scan(&entity, &seq))
		states[entity] = seq
	}
	require.NoError(r.t, errors.Join(rows.Err(), rows.Close()))
	return states
}

// requireNoFault fails with the first faults.
func requireNoFault(t *testing.T, report history.Report) {
	t.Helper()
	if n := len(report.Faults); n > 0 {
		slices.SortStableFunc(report.Faults, func(a, b history.Fault) int { return cmp.Compare(a.Kind, b.Kind) })
		require.FailNow(t, fmt.Sprintf("%d faults", n), "%v", report.Faults[:min(n, 20)])
	}
}

// summary is for the log.
func (r *run) summary(report history.Report) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := map[history.Kind]int{}
	for _, f := range report.Faults {
		counts[f.Kind]++
	}
	var total int64
	for _, n := range r.published {
		total += n
	}
	var longest time.Duration
	for _, o := range report.Overlaps {
		if first := o.First.End; !first.IsZero() && !o.Second.End.IsZero() {
			longest = max(longest, min(first.Sub(o.Second.Start), o.Second.End.Sub(o.Second.Start)))
		}
	}
	var outcomes []string
	for _, o := range slices.Sorted(maps.Keys(r.outcomes)) {
		outcomes = append(outcomes, fmt.Sprint(o, " ", r.outcomes[o]))
	}
	return fmt.Sprintf("%s on %s: %d events of %d entities, %d deliveries and releases; %d effects, %d overtaken; faults %v; %d overlaps, the longest %v; outcomes: %s",
		r.Guard, r.Dialect, total, len(r.published), len(r.runs), report.Effects, report.Overtaken, counts,
		len(report.Overlaps), longest.Round(time.Millisecond), strings.Join(outcomes, ", "))
}

// newProxy is a TCP proxy before a broker.
func newProxy(t *testing.T, upstream string) *toxiproxy.Proxy {
	t.Helper()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := toxiproxy.NewProxy(server, "broker", "127.0.0.1:0", upstream)
	require.NoError(t, p.Start())
	t.Cleanup(p.Stop)
	return p
}

// random is for the traffic and the faults of a run, by different streams.
func (r *run) random(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(r.seed, stream)) }
