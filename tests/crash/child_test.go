package crash_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/child"
)

// What a child writes to its parent, one line each, beside "HANDLER STEP".
const (
	stopped = "stopped at "
	outcome = "outcome "
)

// runChild is the process that is killed.
func runChild(encoded []byte, report func(line string)) error {
	var s settings
	if err := json.Unmarshal(encoded, &s); err != nil {
		return err
	}
	_, err := startWorker(context.Background(), s,
		func(d delivery, at step) error {
			report(d.Handler + " " + string(at))
			if d == s.StopIn && at == s.Stop {
				report(stopped + string(at))
				select {} // until it is killed
			}
			return nil
		},
		func(_ context.Context, e middleware.Event) {
			report(outcome + e.Handler + "/" + string(e.Outcome))
			if e.Err != nil {
				fmt.Fprintln(os.Stderr, e.Outcome, e.Err)
			}
		})
	return err
}

// process is a worker in a process of its own.
type process struct{ *child.Process }

func spawn(t *testing.T, s settings) process {
	t.Helper()
	return process{child.Spawn(t, s)}
}

func (p process) awaitStop(at step) {
	p.Await(string(at), func(line string) bool { return line == stopped+string(at) })
}

// lastStep is the last step that it took before it was killed.
func (p process) lastStep() string {
	last := "before the first message"
	for _, line := range p.Lines() {
		if strings.HasPrefix(line, stock+" ") || strings.HasPrefix(line, ledger+" ") {
			last = line
		}
	}
	return last
}
