// Package child runs the test binary again as a process of its own, which a test
// can kill and stop.
package child

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience is for what must happen.
const patience = 2 * time.Minute

// variable has the settings of a child.
const variable = "TEST_CHILD"

// Main makes this process a child if it was started by Spawn, and then does not
// return: call it first in TestMain. Work gets the settings as JSON and writes lines
// to the parent with report, from any goroutine. When it returns an error the
// process ends; else it goes on until it is killed or its parent has ended.
func Main(work func(settings []byte, report func(line string)) error) {
	settings := os.Getenv(variable)
	if settings == "" {
		return
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // the end of the parent closes it
		os.Exit(3)
	}()
	var mu sync.Mutex
	err := work([]byte(settings), func(line string) {
		mu.Lock()
		defer mu.Unlock()
		_, _ = fmt.Fprintln(os.Stdout, line)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	select {}
}

// Process is a child. Its methods belong to the test's goroutine.
type Process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdin  io.Closer
	stderr bytes.Buffer

	mu    sync.Mutex // guards lines
	lines []string
	grown chan struct{} // has an element when there are more lines
	ended chan struct{} // is closed when there will be no more
}

// Spawn starts a child. Each listener is called with each line that it reports.
// The caller kills it.
func Spawn(t *testing.T, settings any, listeners ...func(line string)) *Process {
	t.Helper()
	encoded, err := json.Marshal(settings)
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	p := &Process{t: t, cmd: exec.Command(self), grown: make(chan struct{}, 1), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), variable+"="+string(encoded))
	p.cmd.Stderr = &p.stderr
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.ended)
		for scanner := bufio.NewScanner(stdout); scanner.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, scanner.Text())
			p.mu.Unlock()
			for _, listen := range listeners {
				listen(scanner.Text())
			}
			select {
			case p.grown <- struct{}{}:
			default:
			}
		}
	}()
	return p
}

// Lines returns what it has reported.
func (p *Process) Lines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lines[:len(p.lines):len(p.lines)]
}

// Await waits for a line that match accepts.
func (p *Process) Await(what string, match func(line string) bool) {
	p.t.Helper()
	timeout := time.After(patience)
	for read := 0; ; {
		lines := p.Lines()
		for ; read < len(lines); read++ {
			if match(lines[read]) {
				return
			}
		}
		select {
		case <-p.grown:
		case <-p.ended:
			if read == len(p.Lines()) {
				p.Kill()
				require.FailNow(p.t, "the process ended", "before %s:\n%s", what, p.stderr.String())
			}
		case <-timeout:
			p.Kill()
			require.FailNow(p.t, "the process does not get on", "no %s; it said %q\n%s", what, last(lines), p.stderr.String())
		}
	}
}

func last(lines []string) []string { return lines[max(0, len(lines)-100):] }

// Stop stops it by SIGSTOP, until Continue.
func (p *Process) Stop() { _ = p.cmd.Process.Signal(syscall.SIGSTOP) }

// Continue ends a Stop, or the one of StopSelf.
func (p *Process) Continue() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }

// StopSelf stops the calling process by SIGSTOP. It returns when its parent has
// called Continue.
func StopSelf() {
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, syscall.SIGCONT)
	defer signal.Stop(continued)
	_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
	<-continued // another thread may take the signal, and this one go on for a moment
}

// Kill kills it by SIGKILL, stopped or not, and returns when it is gone and its
// last line is read.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
	_ = p.cmd.Wait() // says that it was killed
	_ = p.stdin.Close()
}

// Stderr returns what a killed process wrote there.
func (p *Process) Stderr() string { return p.stderr.String() }
