package history_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/history"
)

// at returns a run in the given seconds; an end of 0 is not known.
func at(seq int64, worker string, start, end int, place int64) history.Run {
	run := history.Run{Entity: "e", Seq: seq, Worker: worker, Start: second(start), Place: place}
	if end > 0 {
		run.End = second(end)
	}
	return run
}

func second(n int) time.Time { return time.Unix(int64(n), 0) }

func TestCheck(t *testing.T) {
	t.Parallel()
	type fault struct {
		kind history.Kind
		seq  int64
	}
	for name, test := range map[string]struct {
		mode      history.Mode
		published int64
		runs      []history.Run
		faults    []fault
		overlaps  int
		overtaken int
	}{
		"each once, in order": {
			mode: history.Strict, published: 3,
			runs: []history.Run{at(1, "a", 1, 2, 1), at(2, "a", 2, 3, 2), at(3, "b", 3, 4, 3)},
		},
		"runs without an effect": {
			mode: history.Strict, published: 2,
			runs: []history.Run{at(1, "a", 1, 2, 0), at(1, "a", 2, 3, 1), at(2, "b", 4, 5, 2), at(1, "b", 6, 7, 0)},
		},
		"overtaken events, newest wins": {
			published: 4, overtaken: 2,
			runs: []history.Run{at(2, "a", 1, 2, 1), at(4, "a", 3, 4, 2)},
		},
		"overtaken events, strict": {
			mode: history.Strict, published: 4, overtaken: 2,
			runs:   []history.Run{at(2, "a", 1, 2, 1), at(4, "a", 3, 4, 2)},
			faults: []fault{{history.Lost, 1}, {history.Lost, 3}},
		},
		"the last event is lost": {
			published: 3,
			runs:      []history.Run{at(1, "a", 1, 2, 1), at(2, "a", 3, 4, 2)},
			faults:    []fault{{history.Lost, 3}},
		},
		"nothing happened": {
			published: 2,
			faults:    []fault{{history.Lost, 1}, {history.Lost, 2}},
		},
		"an effect twice": {
			mode: history.Strict, published: 2,
			runs:   []history.Run{at(1, "a", 1, 2, 1), at(1, "b", 3, 4, 2), at(2, "b", 4, 5, 3)},
			faults: []fault{{history.Doubled, 1}},
		},
		"an old event twice": {
			mode: history.Strict, published: 2,
			runs:   []history.Run{at(1, "a", 1, 2, 1), at(2, "b", 3, 4, 2), at(1, "b", 4, 5, 3)},
			faults: []fault{{history.Doubled, 1}},
		},
		"a late event": {
			published: 2,
			runs:      []history.Run{at(2, "a", 1, 2, 1), at(1, "a", 2, 3, 2)},
			faults:    []fault{{history.Stale, 1}},
		},
		"a zombie": {
			published: 2, overlaps: 1,
			runs:   []history.Run{at(1, "a", 1, 5, 2), at(2, "b", 2, 3, 1)},
			faults: []fault{{history.Inverted, 1}},
		},
		"a zombie that was refused": {
			published: 2, overlaps: 2,
			runs: []history.Run{at(1, "a", 1, 6, 0), at(1, "b", 2, 3, 1), at(2, "b", 3, 4, 2)},
		},
		"a worker whose end nobody saw": {
			published: 2, overlaps: 2,
			runs: []history.Run{at(1, "a", 1, 0, 0), at(1, "b", 2, 3, 1), at(2, "b", 3, 4, 2)},
		},
		"one worker in its own transaction": { // a parked event that it releases
			mode: history.Strict, published: 2,
			runs: []history.Run{at(1, "a", 1, 4, 1), at(2, "a", 2, 4, 2)},
		},
		"an event of nobody": {
			published: 1,
			runs:      []history.Run{at(1, "a", 1, 2, 1), at(2, "a", 3, 4, 2)},
			faults:    []fault{{history.Unknown, 2}},
		},
		"a place that is missing": {
			published: 2,
			runs:      []history.Run{at(1, "a", 1, 2, 1), at(2, "a", 3, 4, 3)},
			faults:    []fault{{history.Misplaced, 2}},
		},
		"a place that is taken twice": {
			published: 2,
			runs:      []history.Run{at(1, "a", 1, 2, 1), at(2, "a", 3, 4, 1)},
			faults:    []fault{{history.Misplaced, 2}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			report := history.Check(test.mode, map[string]int64{"e": test.published}, test.runs)
			var faults []fault
			for _, f := range report.Faults {
				require.Equal(t, "e", f.Entity)
				faults = append(faults, fault{f.Kind, f.Seq})
			}
			require.Equal(t, test.faults, faults, "%v", report.Faults)
			require.Len(t, report.Overlaps, test.overlaps, "%v", report.Overlaps)
			require.Equal(t, test.overtaken, report.Overtaken)
		})
	}
}

// One fault that is put into a good history is found, and nothing else.
func TestCheckFindsExactlyWhatIsWrong(t *testing.T) {
	t.Parallel()
	plants := map[string]func(t *rapid.T, g *good) (history.Kind, string, int64){
		"nothing": func(*rapid.T, *good) (history.Kind, string, int64) { return "", "", 0 },
		"lost": func(t *rapid.T, g *good) (history.Kind, string, int64) {
			entity, seq := g.any(t)
			if g.mode == history.Newest {
				seq = g.published[entity]
			}
			g.remove(entity, seq)
			return history.Lost, entity, seq
		},
		"unknown": func(t *rapid.T, g *good) (history.Kind, string, int64) {
			entity, _ := g.any(t)
			last := g.published[entity]
			g.published[entity]--
			if last == 1 {
				delete(g.published, entity)
			}
			return history.Unknown, entity, last
		},
		"doubled": func(t *rapid.T, g *good) (history.Kind, string, int64) {
			entity, seq := g.any(t)
			again := *g.effect(entity, seq)
			again.Place = g.published[entity] + 1
			again.Start, again.End = g.next(), g.next()
			g.runs = append(g.runs, again)
			return history.Doubled, entity, seq
		},
		"stale": func(t *rapid.T, g *good) (history.Kind, string, int64) {
			entity, seq := g.pair(t)
			old, newer := g.effect(entity, seq), g.effect(entity, seq+1)
			old.Place, newer.Place = newer.Place, old.Place
			old.Start, old.End, newer.Start, newer.End = newer.Start, newer.End, old.Start, old.End
			return history.Stale, entity, seq
		},
		"inverted": func(t *rapid.T, g *good) (history.Kind, string, int64) {
			entity, seq := g.pair(t)
			old, newer := g.effect(entity, seq), g.effect(entity, seq+1)
			old.Place, newer.Place = newer.Place, old.Place
			newer.Worker = old.Worker // two workers would overlap as well
			old.End = newer.End
			return history.Inverted, entity, seq
		},
		"misplaced": func(t *rapid.T, g *good) (history.Kind, string, int64) {
			entity, _ := g.any(t)
			last := g.effect(entity, g.published[entity])
			last.Place++
			return history.Misplaced, entity, last.Seq
		},
		"overlap": func(t *rapid.T, g *good) (history.Kind, string, int64) {
			entity, seq := g.pair(t)
			first, second := g.effect(entity, seq), g.effect(entity, seq+1)
			second.Worker = first.Worker + "'"
			second.Start = first.End.Add(-time.Millisecond)
			return overlap, entity, seq
		},
	}
	names := slices.Sorted(maps.Keys(plants))
	rapid.Check(t, func(t *rapid.T) {
		g := newGood(t)
		name := rapid.SampledFrom(names).Draw(t, "plant")
		kind, entity, seq := plants[name](t, g)
		report := history.Check(g.mode, g.published, rapid.Permutation(g.runs).Draw(t, "runs"))
		switch kind {
		case "":
			require.Empty(t, report.Faults)
			require.Empty(t, report.Overlaps)
		case overlap:
			require.Empty(t, report.Faults)
			require.Len(t, report.Overlaps, 1)
			require.Equal(t, entity, report.Overlaps[0].First.Entity)
			require.ElementsMatch(t, []int64{seq, seq + 1}, []int64{report.Overlaps[0].First.Seq, report.Overlaps[0].Second.Seq})
		default:
			require.Empty(t, report.Overlaps)
			require.Len(t, report.Faults, 1, "%v", report.Faults)
			require.Equal(t, 1, report.Count(kind))
			require.Equal(t, history.Fault{Kind: kind, Entity: entity, Seq: seq, Detail: report.Faults[0].Detail}, report.Faults[0])
		}
	})
}

const overlap = history.Kind("overlap")

// good is a history without a fault: one run after the other, some of them without
// an effect.
type good struct {
	mode      history.Mode
	published map[string]int64
	runs      []history.Run
	clock     int
}

func newGood(t *rapid.T) *good {
	g := &good{mode: rapid.SampledFrom([]history.Mode{history.Newest, history.Strict}).Draw(t, "mode"), published: map[string]int64{}}
	worker := rapid.SampledFrom([]string{"a", "b", "c"})
	for i := range rapid.IntRange(1, 4).Draw(t, "entities") {
		g.published[fmt.Sprint("e", i)] = rapid.Int64Range(2, 6).Draw(t, "events")
	}
	for entity, last := range g.published {
		for seq := int64(1); seq <= last; seq++ {
			for rapid.IntRange(0, 3).Draw(t, "failures") == 3 {
				g.run(entity, seq, worker.Draw(t, "worker"), 0)
			}
			g.run(entity, seq, worker.Draw(t, "worker"), seq)
		}
	}
	return g
}

func (g *good) next() time.Time {
	g.clock++
	return second(g.clock)
}

func (g *good) run(entity string, seq int64, worker string, place int64) {
	g.runs = append(g.runs, history.Run{Entity: entity, Seq: seq, Worker: worker, Start: g.next(), End: g.next(), Place: place})
}

func (g *good) any(t *rapid.T) (entity string, seq int64) {
	run := rapid.SampledFrom(g.runs).Draw(t, "run")
	return run.Entity, run.Seq
}

// pair returns an event that is not its entity's last, and drops what lies between
// it and the next one.
func (g *good) pair(t *rapid.T) (entity string, seq int64) {
	entity, seq = g.any(t)
	seq = min(seq, g.published[entity]-1)
	g.runs = slices.DeleteFunc(g.runs, func(r history.Run) bool { return r.Entity == entity && r.Place == 0 })
	return entity, seq
}

func (g *good) effect(entity string, seq int64) *history.Run {
	for i, r := range g.runs {
		if r.Entity == entity && r.Seq == seq && r.Place > 0 {
			return &g.runs[i]
		}
	}
	return nil
}

func (g *good) remove(entity string, seq int64) {
	g.runs = slices.DeleteFunc(g.runs, func(r history.Run) bool { return r.Entity == entity && r.Seq == seq && r.Place > 0 })
	for i, r := range g.runs {
		if r.Entity == entity && r.Place > seq {
			g.runs[i].Place--
		}
	}
}
