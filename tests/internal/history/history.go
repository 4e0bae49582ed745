// Package history checks what handlers have done to entities, from a record of
// each of their runs.
package history

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Run is one call of a handler with one event. Of an attempt that had no effect
// there is a record too: it can overlap.
type Run struct {
	Entity string
	Seq    int64 // version or sequence number of the event, from 1
	Worker string

	// Start and End are read from one clock: End after the commit or rollback, or
	// after the worker's death. The zero End is later than all others.
	Start, End time.Time

	// Place is where the effect stands among those of the entity, 1, 2, 3, … in
	// the order of their commits; 0 is a run without an effect. The database must
	// prove it: by a counter in a row that the transaction keeps locked, not by an
	// id that it draws from a sequence.
	Place int64
}

func (r Run) String() string { return fmt.Sprintf("%d by %s at place %d", r.Seq, r.Worker, r.Place) }

// Mode is what is promised of an entity's events.
type Mode int

const (
	// Newest: effects rise, and the last event has one. Events that were overtaken
	// have none.
	Newest Mode = iota
	// Strict: the effects are exactly those of 1, 2, 3, …, n.
	Strict
)

// Kind is what is wrong.
type Kind string

// The kinds of faults. An effect has at most one: the first of this list.
const (
	// Misplaced: places of effects are missing or taken twice. The history itself
	// is broken.
	Misplaced Kind = "misplaced"
	// Unknown: an effect of an event that was not published.
	Unknown Kind = "unknown"
	// Doubled: a further effect of an event.
	Doubled Kind = "doubled"
	// Stale: an effect after that of a later event whose run had ended before this
	// one began.
	Stale Kind = "stale applied"
	// Inverted: an effect after that of a later event whose run overlaps this one.
	Inverted Kind = "inverted"
	// Lost: an event without an effect. With Newest, if no later one has any.
	Lost Kind = "lost"
)

// Fault is one thing that is wrong.
type Fault struct {
	Kind   Kind
	Entity string
	Seq    int64
	Detail string
}

func (f Fault) String() string {
	return fmt.Sprintf("%s: %s/%d: %s", f.Kind, f.Entity, f.Seq, f.Detail)
}

// Overlap is two runs of one entity in two workers at the same time. Brokers
// don't exclude it when a shard changes hands, so it is no fault.
type Overlap struct{ First, Second Run }

// Report is what Check has found.
type Report struct {
	Faults    []Fault
	Overlaps  []Overlap
	Effects   int
	Overtaken int // events without an effect before the last one that has one: faults in Strict, else not
}

// Count returns how many faults of a kind there are.
func (r Report) Count(kind Kind) int {
	n := 0
	for _, f := range r.Faults {
		if f.Kind == kind {
			n++
		}
	}
	return n
}

// Check compares runs, in any order, with what was published: by entity the number
// of its last event; its first one is 1.
func Check(mode Mode, published map[string]int64, runs []Run) Report {
	byEntity := map[string][]Run{}
	for entity := range published {
		byEntity[entity] = nil
	}
	for _, r := range runs {
		byEntity[r.Entity] = append(byEntity[r.Entity], r)
	}
	var report Report
	for _, entity := range slices.Sorted(maps.Keys(byEntity)) {
		report.effects(mode, entity, published[entity], byEntity[entity])
		report.overlaps(byEntity[entity])
	}
	return report
}

func (r *Report) effects(mode Mode, entity string, last int64, runs []Run) {
	fault := func(kind Kind, seq int64, format string, args ...any) {
		r.Faults = append(r.Faults, Fault{kind, entity, seq, fmt.Sprintf(format, args...)})
	}
	var effects []Run
	for _, run := range runs {
		if run.Place != 0 {
			effects = append(effects, run)
		}
	}
	slices.SortStableFunc(effects, func(a, b Run) int { return cmp.Compare(a.Place, b.Place) })
	r.Effects += len(effects)

	first := map[int64]Run{} // effect of an event
	var highest Run
	for i, e := range effects {
		if e.Place != int64(i+1) {
			fault(Misplaced, e.Seq, "%v, expected at %d", e, i+1)
			return // what follows would be about places that nobody knows
		}
		earlier, again := first[e.Seq]
		if !again {
			first[e.Seq] = e
		}
		switch {
		case e.Seq < 1 || e.Seq > last:
			fault(Unknown, e.Seq, "%v, published are 1 to %d", e, last)
		case again:
			fault(Doubled, e.Seq, "%v, after %v", e, earlier)
		case e.Seq < highest.Seq && before(highest.End, e.Start):
			fault(Stale, e.Seq, "%v, after %v", e, highest)
		case e.Seq < highest.Seq:
			fault(Inverted, e.Seq, "%v, after %v", e, highest)
		default:
			highest = e
		}
	}
	for seq := int64(1); seq <= last; seq++ {
		if _, ok := first[seq]; ok {
			continue
		}
		if seq < highest.Seq {
			r.Overtaken++
			if mode == Newest {
				continue
			}
		}
		fault(Lost, seq, "no effect, published are 1 to %d", last)
	}
}

func (r *Report) overlaps(runs []Run) {
	slices.SortStableFunc(runs, func(a, b Run) int { return a.Start.Compare(b.Start) })
	var open []Run
	for _, run := range runs {
		open = slices.DeleteFunc(open, func(o Run) bool { return before(o.End, run.Start) })
		for _, o := range open {
			if o.Worker != run.Worker {
				r.Overlaps = append(r.Overlaps, Overlap{o, run})
			}
		}
		open = append(open, run)
	}
}

// before reports whether an end is not later than a start.
func before(end, start time.Time) bool { return !end.IsZero() && !end.After(start) }
