package redis_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/redisstore"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/storetest"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// A filter changes nothing that a store promises: with Redis, with one that is down,
// and with one that does not answer.
func TestFilterConformance(t *testing.T) {
	t.Parallel()
	const retention, maxAttempts = 2 * time.Hour, 100 // see tests/store
	shared := services.Value(t, services.Redis)
	stopped := ownRedis(t)
	require.NoError(t, stopped.Kill())
	silent := newProxy(t, shared)
	silent.add(`{"name": "silent", "type": "timeout", "stream": "downstream", "attributes": {"timeout": 0}}`)
	for _, tt := range []struct {
		name, addr string
		drivers    []testdb.Driver
	}{
		{"Redis is up", shared, []testdb.Driver{testdb.PGX, testdb.SQLite}},
		{"Redis is down", stopped.Addr(), []testdb.Driver{testdb.SQLite}},
		{"Redis is silent", silent.Listen, []testdb.Driver{testdb.SQLite}},
	} {
		for _, d := range tt.drivers {
			t.Run(tt.name+"/"+d.Name, func(t *testing.T) {
				t.Parallel()
				storetest.Test(t, func(t *testing.T) storetest.Subject {
					db, store := newSQLStore(t, d, deduplicator.WithRetention(retention), deduplicator.WithMaxAttempts(maxAttempts))
					filter := newFilter(t, store, connect(t, tt.addr), namespace())
					subject := storetest.SQL(t, db, d.Dialect, filter, claimTimeout)
					subject.Retention, subject.MaxAttempts = retention, maxAttempts
					return subject
				})
			})
		}
	}
}

const inChild = "BEST_EFFORT_SUITE"

// bestEffortSuite is run by TestBestEffortConformance in a process of its own, since
// parts of it must fail.
func TestBestEffortSuite(t *testing.T) {
	if os.Getenv(inChild) == "" {
		return // not the test, but what the test runs
	}
	storetest.Test(t, func(t *testing.T) storetest.Subject {
		store := newBestEffort(t, connect(t, services.Value(t, services.Redis)), redisstore.WithClaimTimeout(claimTimeout))
		var mu sync.Mutex
		effects := map[string]int{}
		nothing := func(context.Context) error { return nil }
		return storetest.Subject{
			Store: store, ClaimTimeout: claimTimeout, Retention: time.Hour, MaxAttempts: 150,
			Write: func(_ context.Context, effect string) error {
				mu.Lock()
				defer mu.Unlock()
				effects[effect]++
				return nil
			},
			Count: func(_ context.Context, effect string) (int, error) {
				mu.Lock()
				defer mu.Unlock()
				return effects[effect], nil
			},
			Transient: []error{errors.New("as a database would say")},
			Break:     nothing, // there is no transaction to break or to end
			EndTx:     func(ctx context.Context, _ bool) error { return nothing(ctx) },
		}
	})
}

// BestEffort passes the suite except for what its documentation lists, no more and no
// less.
func TestBestEffortConformance(t *testing.T) {
	t.Parallel()
	program, err := os.Executable()
	require.NoError(t, err)
	command := exec.CommandContext(t.Context(), program, "-test.run", "^TestBestEffortSuite$", "-test.v", "-test.timeout", "4m")
	command.Env = append(os.Environ(), inChild+"=1")
	out, err := command.CombinedOutput()
	require.IsType(t, (*exec.ExitError)(nil), err, "all of it passes: %s", out)

	results := map[string][]string{}
	result := regexp.MustCompile(`--- (PASS|FAIL): TestBestEffortSuite/(\S+)`)
	for _, match := range result.FindAllStringSubmatch(string(out), -1) {
		results[match[1]] = append(results[match[1]], match[2])
	}
	doc, err := os.ReadFile("../../deduplicator/redisstore/doc.go")
	require.NoError(t, err)
	var listed []string
	lines := bufio.NewScanner(bytes.NewReader(doc))
	for lines.Scan() {
		if name, ok := strings.CutPrefix(lines.Text(), "//   - "); ok {
			listed = append(listed, strings.ReplaceAll(name, " ", "_"))
		}
	}
	require.NotEmpty(t, listed)
	slices.Sort(listed)
	slices.Sort(results["FAIL"])
	require.Equal(t, listed, results["FAIL"], "the documentation lists what fails")
	require.Len(t, results["PASS"], 10, "%s", out)
	require.NotContains(t, string(out), "panic:")
}
