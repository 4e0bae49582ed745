package ledger_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
)

// childVariable has the settings of a worker process.
const childVariable = "LEDGER_CHILD"

// point is a moment at which a worker stops and waits.
type point string

const (
	beforeStarted point = "before started" // the ledger knows nothing yet
	started       point = "started"
	answered      point = "answered" // the call has returned
	recorded      point = "recorded"
	committed     point = "committed"
)

// settings are those of a worker that handles one message.
type settings struct {
	Dialect  deduplicator.Dialect
	DSN      [2]string // of the store and of the ledger
	Provider string
	Message  string
	Lease    time.Duration
	Stop     point // or none
}

// What a worker writes, one line each.
const (
	saysStopped = "stopped"
	saysOutcome = "outcome "
)

// runChild is the worker process. It ends when its parent does, which closes its
// standard input, and goes on where it has stopped when there is a line on it.
func runChild(encoded string) {
	goOn := make(chan struct{})
	go func() {
		for scanner := bufio.NewScanner(os.Stdin); scanner.Scan(); {
			goOn <- struct{}{}
		}
		os.Exit(3)
	}()
	var s settings
	err := json.Unmarshal([]byte(encoded), &s)
	outcome := ""
	if err == nil {
		outcome, err = s.work(context.Background(), func(at point) {
			if at == s.Stop {
				_, _ = fmt.Println(saysStopped)
				<-goOn
			}
		})
	}
	if err != nil {
		outcome = "error " + strings.ReplaceAll(err.Error(), "\n", " ")
		if errors.Is(err, ledger.ErrFenced) {
			outcome = "fenced"
		}
	}
	_, _ = fmt.Println(saysOutcome + outcome)
	select {} // until it is killed
}

var driverNames = map[deduplicator.Dialect]string{
	deduplicator.PostgreSQL: "pgx", deduplicator.MySQL: "mysql", deduplicator.SQLite: "sqlite",
}

func (s settings) work(ctx context.Context, at func(point)) (string, error) {
	storeDB, err := sql.Open(driverNames[s.Dialect], s.DSN[0])
	if err != nil {
		return "", err
	}
	plain, err := sql.Open(driverNames[s.Dialect], s.DSN[1])
	if err != nil {
		return "", err
	}
	db := sql.OpenDB(sqlhook.Wrap(sqlhook.Borrow(plain), func(_ context.Context, e sqlhook.Event) error {
		switch {
		case strings.HasPrefix(e.Query, "INSERT") && e.Step == sqlhook.Statement:
			at(beforeStarted)
		case strings.HasPrefix(e.Query, "INSERT") && e.Step == sqlhook.StatementDone:
			at(started)
		case strings.HasPrefix(e.Query, "UPDATE") && strings.Contains(e.Query, "result =") && e.Step == sqlhook.StatementDone:
			at(recorded)
		}
		return nil
	}))
	store, err := deduplicator.NewSQLStore(ctx, storeDB, s.Dialect)
	if err != nil {
		return "", err
	}
	l, err := ledger.New(ctx, store, db, s.Dialect, ledger.WithLease(s.Lease))
	if err != nil {
		return "", err
	}
	effect, err := ledger.NewEffect("charge", ledger.AskOperator()) // what a first delivery does is the same under all rules
	if err != nil {
		return "", err
	}
	claim := deduplicator.Claim{Consumer: consumer, Key: s.Message}
	result, err := store.Process(ctx, claim, func(ctx context.Context) ([]deduplicator.Output, error) {
		_, err := ledger.Do(deduplicator.ContextWithClaim(ctx, claim), l, effect, 100, func(ctx context.Context, key string) (string, error) {
			receipt, err := post(ctx, http.DefaultClient, s.Provider, key)
			at(answered)
			return receipt, err
		})
		return nil, err
	})
	if err != nil {
		return "", err
	}
	at(committed)
	return fmt.Sprint(result.Outcome), nil
}

// child is a worker process.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan string // is closed when there will be no more
}

// spawn starts a worker with a message of k. It is killed at the end of the test.
func (k *kit) spawn(t *testing.T, message string, lease time.Duration, stop point) *child {
	t.Helper()
	encoded, err := json.Marshal(settings{
		Dialect: k.driver.Dialect, DSN: [2]string{k.databases[0].DSN, k.databases[1].DSN},
		Provider: k.provider.url, Message: message, Lease: lease, Stop: stop,
	})
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	c := &child{t: t, cmd: exec.Command(self), lines: make(chan string, 10)}
	c.cmd.Env = append(os.Environ(), childVariable+"="+string(encoded))
	c.cmd.Stderr = os.Stderr
	c.stdin, err = c.cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := c.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, c.cmd.Start())
	go func() {
		defer close(c.lines)
		for scanner := bufio.NewScanner(stdout); scanner.Scan(); {
			c.lines <- scanner.Text()
		}
	}()
	t.Cleanup(c.kill)
	return c
}

// next is what the worker says next.
func (c *child) next() string {
	c.t.Helper()
	select {
	case line, ok := <-c.lines:
		require.True(c.t, ok, "the worker has ended")
		return line
	case <-time.After(patience):
		require.FailNow(c.t, "the worker does not get on")
		return ""
	}
}

func (c *child) goOn() {
	c.t.Helper()
	_, err := c.stdin.Write([]byte("\n"))
	require.NoError(c.t, err)
}

func (c *child) signal(s syscall.Signal) {
	c.t.Helper()
	require.NoError(c.t, c.cmd.Process.Signal(s))
}

// kill ends the worker by SIGKILL, which a paused one dies of too.
func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}
