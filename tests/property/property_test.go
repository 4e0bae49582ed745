// Package property_test compares the middlewares with a small model, under random
// deliveries and faults, and keys with their bytes.
package property_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/env"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is for what must happen.
const patience = time.Minute

// checks sets how many random runs a property has. PROPERTY_CHECKS multiplies it.
// The flag is rapid's only way, so these tests do not run in parallel.
func checks(t *testing.T, n int) {
	t.Helper()
	n *= int(env.Number(t, "PROPERTY_CHECKS", 1))
	before := flag.Lookup("rapid.checks").Value.String()
	if err := flag.Set("rapid.checks", strconv.Itoa(n)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = flag.Set("rapid.checks", before) })
}

// What can go wrong with a delivery. Where it strikes says whether the effect is
// durable then.
type fault string

const (
	none         fault = "none"
	handlerFails fault = "handler fails"
	panics       fault = "panic"
	goexit       fault = "goexit"
	contextEnds  fault = "context ends in the handler"
	cutClaim     fault = "connection lost while claiming"
	cutHandler   fault = "connection lost in the handler"
	cutOutputs   fault = "connection lost while storing outputs"
	cutCommit    fault = "connection lost before the commit"
	answerLost   fault = "answer to the commit lost"
	publishFails fault = "publishing fails"
	publishHalf  fault = "publishing fails after half of it"
	crashNoAck   fault = "crash between publishing and ack"
	forgetFails  fault = "outputs are not forgotten"
)

var faults = []fault{
	none, handlerFails, panics, goexit, contextEnds, cutClaim, cutHandler, cutOutputs, cutCommit,
	answerLost, publishFails, publishHalf, crashNoAck, forgetFails,
}

// entry is what the model knows of one key.
type entry struct {
	committed bool
	pending   bool   // the outputs are stored
	least     [2]int // how often each output is published
	most      [2]int
}

// model predicts a delivery.
func (e *entry) deliver(f fault) (acked bool) {
	switch {
	case f == cutClaim:
		return false
	case !e.committed:
		switch f {
		case handlerFails, panics, goexit, contextEnds, cutHandler, cutOutputs, cutCommit:
			return false
		}
		e.committed, e.pending = true, true
	}
	if !e.pending {
		return true
	}
	switch f {
	case publishFails:
		return false
	case publishHalf:
		e.emits(0)
		return false
	case crashNoAck:
		e.emits(0, 1)
		return false
	}
	e.emits(0, 1)
	e.pending = f == forgetFails
	return true
}

func (e *entry) emits(outputs ...int) {
	for _, i := range outputs {
		e.least[i]++
		e.most[i]++
	}
}

// messages is how many a run has.
const messages = 10

// TestModel interleaves deliveries of a few messages, each with a fault or none,
// with copies at once and restarts. After each of them, effects, claims, stored
// outputs and what was published are what the model says.
func TestModel(t *testing.T) { //nolint:paralleltest // see checks
	total := map[fault]int{}
	for _, row := range []struct {
		driver testdb.Driver
		checks int
	}{{testdb.SQLite, 50}, {testdb.PGX, 15}, {testdb.MySQL, 15}} {
		t.Run(row.driver.Name, func(t *testing.T) {
			checks(t, row.checks)
			db := testdb.Open(t, row.driver)
			prepare(t, db, row.driver.Dialect)
			struck := map[fault]int{}
			run := 0
			rapid.Check(t, func(rt *rapid.T) {
				run++
				r := newRig(rt, db, row.driver.Dialect, fmt.Sprintf("run-%d", run), none)
				defer r.close()
				r.compareWithModel(rt, struck)
			})
			t.Logf("faults that came about in %d runs: %v", run, struck)
			for f, n := range struck {
				total[f] += n
			}
		})
	}
	for _, f := range faults[1:] {
		if total[f] == 0 {
			t.Errorf("%q never came about", f)
		}
	}
}

func prepare(t *testing.T, db *sql.DB, dialect deduplicator.Dialect) {
	t.Helper()
	if err := deduplicator.Migrate(t.Context(), db, dialect); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), "CREATE TABLE effects (event varchar(80) NOT NULL, outputs varchar(100) NOT NULL)"); err != nil {
		t.Fatal(err)
	}
}

// compareWithModel is one run.
func (r *rig) compareWithModel(rt *rapid.T, struck map[fault]int) {
	entries := map[string]*entry{}
	for i := range messages {
		entries[fmt.Sprintf("%s-key-%d", r.name, i)] = &entry{}
	}
	keys := rapid.SampledFrom(sorted(entries))
	rt.Repeat(map[string]func(*rapid.T){
		"deliver": func(rt *rapid.T) {
			key, f := keys.Draw(rt, "key"), rapid.SampledFrom(faults).Draw(rt, "fault")
			want := entries[key].deliver(f)
			if got := r.deliver(key, f); got != want {
				rt.Fatalf("acknowledged: %v, want %v", got, want)
			}
			if r.struck() {
				struck[f]++
			}
		},
		"two copies at once": func(rt *rapid.T) {
			key := keys.Draw(rt, "key")
			r.copies(key)
			e := entries[key]
			if !e.committed || e.pending {
				e.emits(0, 1)
				// The other copy sees the outputs, or comes when they are forgotten.
				e.most[0]++
				e.most[1]++
			}
			e.committed, e.pending = true, false
		},
		"the worker starts anew": func(*rapid.T) { r.restart() },
		"": func(rt *rapid.T) {
			s, err := r.state()
			if err != nil {
				rt.Fatalf("%v", err)
			}
			for key, e := range entries {
				if err := r.check(s, key, e); err != nil {
					rt.Fatalf("%s: %v", key, err)
				}
			}
		},
	})
}

// state is what the database has of a run, by key.
type state struct {
	effects map[string][]string // the UUIDs of the outputs, for each effect
	claims  map[string]int
	outputs map[string]int
}

func (r *rig) state() (state, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := state{map[string][]string{}, map[string]int{}, map[string]int{}}
	of := " WHERE consumer_name = '" + r.name + "'"
	for query, add := range map[string]func(key, value string){
		"SELECT event, outputs FROM effects WHERE event LIKE '" + r.name + "-key%'": func(key, value string) { s.effects[key] = append(s.effects[key], value) },
		"SELECT message_key, '' FROM processed_messages" + of:                       func(key, _ string) { s.claims[key]++ },
		"SELECT message_key, uuid FROM produced_messages" + of:                      func(key, _ string) { s.outputs[key]++ },
	} {
		rows, err := r.plain.QueryContext(ctx, query)
		if err != nil {
			return s, err
		}
		for rows.Next() {
			var key, value string
			if err := rows.Scan(&key, &value); err != nil {
				return s, errors.Join(err, rows.Close())
			}
			add(key, value)
		}
		if err := errors.Join(rows.Err(), rows.Close()); err != nil {
			return s, err
		}
	}
	return s, nil
}

// check compares the database and what was published with the model.
func (r *rig) check(s state, key string, e *entry) error {
	want, stored := 0, 0
	if e.committed {
		want = 1
	}
	if e.pending {
		stored = 2
	}
	if len(s.effects[key]) != want || s.claims[key] != want || s.outputs[key] != stored {
		return fmt.Errorf("%d effects, %d claims, %d stored outputs; want %d, %d, %d",
			len(s.effects[key]), s.claims[key], s.outputs[key], want, want, stored)
	}
	r.mu.Lock()
	emitted := r.emitted[key]
	r.mu.Unlock()
	if !e.committed {
		if len(emitted) > 0 {
			return fmt.Errorf("published %v, but there is no effect", emitted)
		}
		return nil
	}
	var uuids [2]string
	if _, err := fmt.Sscan(s.effects[key][0], &uuids[0], &uuids[1]); err != nil {
		return err
	}
	counts := map[string]int{}
	for _, uuid := range emitted {
		counts[uuid]++
	}
	for i, uuid := range uuids {
		if n := counts[uuid]; n < e.least[i] || n > e.most[i] {
			return fmt.Errorf("output %d was published %d times, want %d to %d", i, n, e.least[i], e.most[i])
		}
		delete(counts, uuid)
	}
	if len(counts) > 0 {
		return errors.New("published is what no attempt that took effect has returned")
	}
	return nil
}

// A worker that claims in a transaction of its own is told from the model.
func TestModelFindsMutant(t *testing.T) {
	t.Parallel()
	db := testdb.Open(t, testdb.SQLite)
	prepare(t, db, deduplicator.SQLite)
	r := newRig(t, db, deduplicator.SQLite, "mutant", "claim alone")
	defer r.close()
	e := &entry{}
	acked := r.deliver("mutant-key", handlerFails)
	s, err := r.state()
	if err != nil {
		t.Fatal(err)
	}
	if acked == e.deliver(handlerFails) && r.check(s, "mutant-key", e) == nil {
		t.Error("the claim of a failed attempt was not noticed")
	}
}
