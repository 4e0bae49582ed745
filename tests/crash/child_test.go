package crash_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
)

// What a child writes to its parent, one line each, beside "HANDLER STEP".
const (
	running = "running"
	stopped = "stopped at "
	outcome = "outcome "
)

// runChild is the process that is killed. It also ends when its parent does,
// which closes its standard input.
func runChild(encoded string) {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var s settings
	if err := json.Unmarshal([]byte(encoded), &s); err != nil {
		fail(err)
	}
	var mu sync.Mutex
	report := func(line string) {
		mu.Lock()
		defer mu.Unlock()
		_, _ = fmt.Fprintln(os.Stdout, line)
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
	if err != nil {
		fail(err)
	}
	report(running)
	select {}
}

// child is a worker process.
type child struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr bytes.Buffer

	mu    sync.Mutex // guards lines
	lines []string
	grown chan struct{} // has an element when there are more lines
	ended chan struct{} // is closed when there will be no more
}

func spawn(t *testing.T, s settings) *child {
	t.Helper()
	encoded, err := json.Marshal(s)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	c := &child{t: t, cmd: exec.Command(self), grown: make(chan struct{}, 1), ended: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), childVariable+"="+string(encoded))
	c.cmd.Stderr = &c.stderr
	c.stdin, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	go func() {
		defer close(c.ended)
		for scanner := bufio.NewScanner(stdout); scanner.Scan(); {
			c.mu.Lock()
			c.lines = append(c.lines, scanner.Text())
			c.mu.Unlock()
			select {
			case c.grown <- struct{}{}:
			default:
			}
		}
	}()
	return c
}

func (c *child) seen() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lines[:len(c.lines):len(c.lines)]
}

// await waits for a line that match accepts.
func (c *child) await(what string, match func(line string) bool) {
	c.t.Helper()
	timeout := time.After(patience)
	for read := 0; ; {
		lines := c.seen()
		for ; read < len(lines); read++ {
			if match(lines[read]) {
				return
			}
		}
		select {
		case <-c.grown:
		case <-c.ended:
			if read == len(c.seen()) {
				c.kill()
				require.FailNow(c.t, "the worker ended", "before %s:\n%s", what, c.stderr.String())
			}
		case <-timeout:
			c.kill()
			require.FailNow(c.t, "the worker does not get on", "no %s; it said %q\n%s", what, c.seen(), c.stderr.String())
		}
	}
}

func (c *child) awaitStop(at step) {
	c.t.Helper()
	c.await(string(at), func(line string) bool { return line == stopped+string(at) })
}

// kill kills it by SIGKILL and returns when it is gone.
func (c *child) kill() {
	_ = c.cmd.Process.Kill()
	<-c.ended
	_ = c.cmd.Wait() // says that it was killed
	_ = c.stdin.Close()
}

// lastStep is the last step that it took before it was killed.
func (c *child) lastStep() string {
	last := "before the first message"
	for _, line := range c.seen() {
		if strings.HasPrefix(line, stock+" ") || strings.HasPrefix(line, ledger+" ") {
			last = line
		}
	}
	return last
}
