// Package redis_test runs deduplicator/redisstore on real servers, and on a Redis
// that stops, hangs and forgets.
package redis_test

import (
	"context"
	"database/sql"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/redis/go-redis/v9"
	"github.com/rs/zerolog"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/redisstore"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// claimTimeout is short for the tests that wait for it, and long for a busy machine.
const claimTimeout = 3 * time.Second

// connect returns a client that has no time limits of its own, so that only contexts
// end a wait.
func connect(t *testing.T, addr string) *redis.Client {
	t.Helper()
	client := redis.NewClient(&redis.Options{
		Addr: addr, ContextTimeoutEnabled: true, ReadTimeout: -1, WriteTimeout: -1, DialTimeout: time.Minute,
	})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

func namespace() string { return "test-" + watermill.NewShortUUID() }

func newBestEffort(t *testing.T, client redis.UniversalClient, opts ...redisstore.BestEffortOption) *redisstore.BestEffort {
	t.Helper()
	store, err := redisstore.NewBestEffort(t.Context(), client, namespace(), opts...)
	require.NoError(t, err)
	return store
}

func newSQLStore(t *testing.T, d testdb.Driver, opts ...deduplicator.Option) (*sql.DB, *deduplicator.SQLStore) {
	t.Helper()
	db := testdb.Open(t, d)
	require.NoError(t, deduplicator.Migrate(t.Context(), db, d.Dialect, opts...))
	store, err := deduplicator.NewSQLStore(t.Context(), db, d.Dialect, append([]deduplicator.Option{
		deduplicator.WithClaimTimeout(claimTimeout), deduplicator.WithKnownKeys(0), // so that each copy is Redis' or the database's
	}, opts...)...)
	require.NoError(t, err)
	return db, store
}

func newFilter(t *testing.T, store deduplicator.Store, client redis.UniversalClient, namespace string, opts ...redisstore.FilterOption) *redisstore.Filter {
	t.Helper()
	filter, err := redisstore.NewFilter(store, client, namespace, opts...)
	require.NoError(t, err)
	return filter
}

// errorLog collects what a store reports.
type errorLog struct {
	mu   sync.Mutex
	errs []error
}

func (l *errorLog) add(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errs = append(l.errs, err)
}

func (l *errorLog) all() []error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.errs
}

// counted counts the claims that reach the store.
type counted struct {
	deduplicator.Store
	mu     sync.Mutex
	claims int
}

func (c *counted) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	c.mu.Lock()
	c.claims++
	c.mu.Unlock()
	return c.Store.Process(ctx, claim, work)
}

func (c *counted) reached() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.claims
}

// proxy is a toxiproxy in this process.
type proxy struct {
	t *testing.T
	*toxiproxy.Proxy
}

func newProxy(t *testing.T, upstream string) proxy {
	t.Helper()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := proxy{t, toxiproxy.NewProxy(server, t.Name(), "127.0.0.1:0", upstream)}
	require.NoError(t, p.Start())
	t.Cleanup(p.Stop)
	return p
}

func (p proxy) add(toxic string) {
	p.t.Helper()
	_, err := p.Toxics.AddToxicJson(strings.NewReader(toxic))
	require.NoError(p.t, err)
}

func (p proxy) remove(name string) {
	p.t.Helper()
	require.NoError(p.t, p.Toxics.RemoveToxic(context.WithoutCancel(p.t.Context()), name))
}

func ownRedis(t *testing.T) *services.Instance {
	t.Helper()
	return services.NewInstance(t, services.Redis)
}
