package crash_test

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// outage is a worker in this process whose database goes away.
type outage struct {
	*trial
	mu       sync.Mutex // guards what follows
	steps    map[step]int
	outcomes map[string]int
	watched  []watch
}

// watch is what happens when a step is taken for the nth time.
type watch struct {
	at  step
	nth int
	do  func()
}

// work runs a worker until the end of the test.
func (o *outage) work() {
	o.t.Helper()
	o.steps, o.outcomes = map[step]int{}, map[string]int{}
	ctx := context.WithoutCancel(o.t.Context())
	w, err := startWorker(ctx, o.settings, o.hook, func(_ context.Context, e middleware.Event) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.outcomes[e.Handler+"/"+string(e.Outcome)]++
	})
	require.NoError(o.t, err)
	o.t.Cleanup(func() { require.NoError(o.t, w.close()) })
}

func (o *outage) hook(_ delivery, at step) error {
	o.mu.Lock()
	o.steps[at]++
	var due []func()
	for _, w := range o.watched {
		if w.at == at && w.nth == o.steps[at] {
			due = append(due, w.do)
		}
	}
	o.mu.Unlock()
	for _, do := range due {
		do()
	}
	return nil
}

func (o *outage) counts() (map[step]int, map[string]int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.steps), maps.Clone(o.outcomes)
}

// proxy is a TCP proxy before a database.
type proxy struct {
	t *testing.T
	*toxiproxy.Proxy
}

func newProxy(t *testing.T, upstream string) proxy {
	t.Helper()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := proxy{t, toxiproxy.NewProxy(server, "database", "127.0.0.1:0", upstream)}
	require.NoError(t, p.Start())
	t.Cleanup(p.Stop)
	return p
}

// cut ends every connection and accepts new ones.
func (p proxy) cut() {
	p.Stop()
	if err := p.Start(); err != nil {
		p.t.Errorf("restart the proxy: %v", err)
	}
}

// loseAnswers cuts each connection on which the server answers from now on.
func (p proxy) loseAnswers() {
	_, err := p.Toxics.AddToxicJson(strings.NewReader(`{"name":"lose","type":"limit_data","stream":"downstream","attributes":{"bytes":0}}`))
	if err != nil {
		p.t.Errorf("add a toxic: %v", err)
	}
}

func (p proxy) passAnswers() { _ = p.Toxics.RemoveToxic(p.t.Context(), "lose") }

// Connections are cut while a claim is on its way, in the middle of handlers, and
// between COMMIT and its answer (B93).
func TestConnectionsAreCut(t *testing.T) {
	t.Parallel()
	for _, driver := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			o := &outage{trial: onDatabase(t, driver, kafka)}
			p := newProxy(t, address(t, o.settings))
			o.Proxy = p.Listen
			for i := 1; i <= 5; i++ {
				o.watched = append(o.watched,
					watch{claiming, 15 * i, p.cut},
					watch{written, 15*i + 5, p.cut},
					watch{committing, 15*i + 10, p.loseAnswers})
			}
			// One answer is lost each time; the question what became of the commit
			// gets one.
			for i := 1; i <= 100; i++ {
				o.watched = append(o.watched, watch{commitFailed, i, p.passAnswers})
			}
			o.work()
			o.publishNext(60)
			o.requireExactlyOnce()
			steps, outcomes := o.counts()
			t.Logf("%d events, steps %v, outcomes %v", len(o.events), steps, outcomes)
			require.GreaterOrEqual(t, steps[commitFailed], 5)
		})
	}
}

// address is where the database listens.
func address(t *testing.T, s settings) string {
	t.Helper()
	if s.Dialect == deduplicator.PostgreSQL {
		config, err := pgx.ParseConfig(s.DSN)
		require.NoError(t, err)
		return net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	}
	config, err := mysql.ParseDSN(s.DSN)
	require.NoError(t, err)
	return config.Addr
}

// The database is killed and started again, twice, under traffic. Nobody helps
// the worker.
func TestDatabaseIsKilled(t *testing.T) {
	t.Parallel()
	for _, db := range []struct {
		name    services.Name
		dialect deduplicator.Dialect
		driver  string
	}{
		{services.Postgres, deduplicator.PostgreSQL, "pgx"},
		{testdb.MySQLServer(t), deduplicator.MySQL, "mysql"},
	} {
		t.Run(string(db.name), func(t *testing.T) {
			t.Parallel()
			server := services.NewInstance(t, db.name)
			pool, err := sql.Open(db.driver, server.Value())
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, pool.Close()) })
			o := &outage{trial: newTrial(t, db.dialect, server.Value(), pool, kafka)}
			kill := make(chan struct{}, 2)
			for i := 1; i <= 2; i++ {
				o.watched = append(o.watched, watch{written, 25 * i, func() { kill <- struct{}{} }})
			}
			o.work()
			o.publishNext(60)
			for i := range 2 {
				select {
				case <-kill:
				case <-time.After(patience):
					require.FailNow(t, "the worker does not get on")
				}
				require.NoError(t, server.Kill())
				o.publishNext(10)
				require.NoError(t, server.Start(t.Context()), fmt.Sprintf("start %d", i+1))
			}
			o.requireExactlyOnce()
			steps, outcomes := o.counts()
			t.Logf("%d events, steps %v, outcomes %v", len(o.events), steps, outcomes)
		})
	}
}
