package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	idempotent "github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// result is a half that ran to its end.
type result struct {
	half     *half
	findings findings
}

// line is the result for machines.
func (r result) line() string {
	f := r.findings
	return fmt.Sprintf("result %s messages=%d duplicates_refused=%d stale_refused=%d "+
		"lost=%d doubled=%d stale_applied=%d outputs_lost=%d outputs_doubled=%d inversions=%d",
		r.half.name, len(r.half.traffic.events),
		r.half.outcomes.count(idempotent.Duplicate), r.half.outcomes.count(idempotent.Stale),
		f.lost, f.doubled, f.staleApplied, f.outputsLost, f.outputsDoubled, f.inversions)
}

// report writes the two halves side by side.
func report(out io.Writer, protected, unprotected result) {
	var text bytes.Buffer
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	row := func(name string, a, b any) { say(table, "%s\t%v\t%v", name, a, b) }
	both := func(name string, value func(result) any) { row(name, value(protected), value(unprotected)) }
	title := func(name string) { row("\t\t\n"+name, "protected", "unprotected") }

	title("WHAT HAPPENED")
	both("events of the shop", func(r result) any { return len(r.half.traffic.events) })
	both("messages published, outputs too", func(r result) any { sent, _ := r.half.deliveries.progress(); return sent })
	for _, f := range allFaults {
		both(string(f), func(r result) any { return r.half.faults.counts(f) })
	}
	both("seconds", func(r result) any { return fmt.Sprintf("%.1f", r.half.took.Seconds()) })

	title("WHAT THE MIDDLEWARE DID")
	for _, o := range []struct {
		outcome idempotent.Outcome
		name    string
	}{
		{idempotent.Processed, "deliveries processed"},
		{idempotent.Duplicate, "duplicates refused"},
		{idempotent.Stale, "stale events refused"},
		{idempotent.Retried, "attempts retried"},
		{idempotent.InFlight, "returned: its twin is being processed"},
		{idempotent.Failed, "returned because of an error"},
		{idempotent.Parked, "parked in the poison queue"},
		{idempotent.Conflict, "refused: same key, other content"},
	} {
		row(o.name, protected.half.outcomes.count(o.outcome), "-")
	}

	title("WHAT IS WRONG IN THE DATABASE")
	both("effects lost", func(r result) any { return r.findings.lost })
	both("effects doubled", func(r result) any { return r.findings.doubled })
	both("orders set back by an older event", func(r result) any { return r.findings.staleApplied })
	both("outputs lost", func(r result) any { return r.findings.outputsLost })
	both("outputs doubled", func(r result) any { return r.findings.outputsDoubled })
	both("effects in the wrong order", func(r result) any { return r.findings.inversions })
	_ = table.Flush()
	for line := range strings.Lines(text.String()) {
		say(out, "%s", strings.TrimRight(line, " \n"))
	}
	if n := protected.findings.overtaken; n > 0 {
		say(out, "\nnote: in the protected half %d events took effect in another order than they were published in", n)
	}
	say(out, "")
}

// showProgress writes how far h is until ctx ends: over one line on a terminal,
// else a line every other second.
func showProgress(ctx context.Context, out io.Writer, h *half) {
	interval, begin, end := 2*time.Second, "", "\n"
	if isTerminal(out) {
		interval, begin, end = 200*time.Millisecond, "\r\x1b[K", ""
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			_, _ = fmt.Fprint(out, begin)
			return
		case <-ticker.C:
			sent, open := h.deliveries.progress()
			_, _ = fmt.Fprintf(out, "%s%s: %d messages published, %d deliveries open, %d workers died%s",
				begin, h.name, sent, open, h.faults.counts(workerDeath), end)
		}
	}
}

func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
