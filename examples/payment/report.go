package main

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// count returns how many orders have n of what a service does, and more than n.
func (r result) count(service string, plan []delivery) (none, one, more int) {
	for _, d := range plan {
		switch n := r.made[service][d.Order.ID]; {
		case n == 0:
			none++
		case n == 1:
			one++
		default:
			more++
		}
	}
	return none, one, more
}

// right reports whether each order has one charge, one label and one row with both.
func (r result) right(plan []delivery) bool {
	_, oneCharge, _ := r.count(charges, plan)
	_, oneLabel, _ := r.count(labels, plan)
	return oneCharge == len(plan) && oneLabel == len(plan) && r.mismatches == 0
}

// line is the result for machines.
func (r result) line(plan []delivery) string {
	noCharge, _, charges2 := r.count(charges, plan)
	noLabel, _, labels2 := r.count(labels, plan)
	return fmt.Sprintf("result %s orders=%d deliveries=%d killed=%d parked=%d reconciled=%d not_charged=%d charged_twice=%d no_label=%d labels_twice=%d mismatches=%d",
		r.name, len(plan), r.deliveries, r.killed, r.parked, r.reconciled, noCharge, charges2, noLabel, labels2, r.mismatches)
}

// report writes the two halves side by side.
func report(out io.Writer, o options, plan []delivery, protected, unprotected result) {
	var text bytes.Buffer
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	row := func(name string, a, b any) { say(table, "%s\t%v\t%v", name, a, b) }
	both := func(name string, value func(result) any) { row(name, value(protected), value(unprotected)) }
	title := func(name string) { row("\t\t\n"+name, "with ledger", "without") }

	title("WHAT HAPPENED")
	row("orders", len(plan), len(plan))
	for _, f := range faults {
		n := 0
		for _, d := range plan {
			if d.Fault == f {
				n++
			}
		}
		row(string(f), n, n)
	}
	both("deliveries", func(r result) any { return r.deliveries })
	both("workers killed", func(r result) any { return r.killed })
	both("orders parked", func(r result) any { return r.parked })
	row("labels looked up by the operator", protected.reconciled, "-")
	both("seconds", func(r result) any { return fmt.Sprintf("%.1f", r.took.Seconds()) })

	title("WHAT THE PROVIDERS DID")
	for _, service := range []string{charges, labels} {
		times := func(pick int) func(result) any {
			return func(r result) any {
				none, one, more := r.count(service, plan)
				return []int{none, one, more}[pick]
			}
		}
		both("orders without a "+strings.TrimSuffix(service, "s"), times(0))
		both("orders with one "+strings.TrimSuffix(service, "s"), times(1))
		both("orders with two or more "+service, times(2))
	}
	both("orders whose row is not what was done", func(r result) any { return r.mismatches })
	if o.verbose {
		title("CHARGES, LABELS OF EACH ORDER")
		for _, d := range plan {
			both(fmt.Sprintf("%s %s", d.Order.ID, d.Fault), func(r result) any {
				return fmt.Sprintf("%d, %d", r.made[charges][d.Order.ID], r.made[labels][d.Order.ID])
			})
		}
	}
	_ = table.Flush()
	for line := range strings.Lines(text.String()) {
		say(out, "%s", strings.TrimRight(line, " \n"))
	}
	say(out, "")
	say(out, "%s", protected.line(plan))
	say(out, "%s", unprotected.line(plan))
}
