package redis_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/redisstore"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// generous is a timeout for tests in which Redis answers.
var generous = redisstore.WithTimeout(10 * time.Second)

func claim(key, fingerprint string) deduplicator.Claim {
	return deduplicator.Claim{Consumer: "stock", Key: key, Fingerprint: []byte(fingerprint), Time: time.Now()}
}

func work(outputs ...deduplicator.Output) deduplicator.Work {
	return func(context.Context) ([]deduplicator.Output, error) { return outputs, nil }
}

func never(t *testing.T) deduplicator.Work {
	return func(context.Context) ([]deduplicator.Output, error) {
		t.Error("the work of a copy was called")
		return nil, errors.New("called")
	}
}

// process wants an outcome and returns how many claims have reached the database.
func process(t *testing.T, store deduplicator.Store, c deduplicator.Claim, work deduplicator.Work, want deduplicator.Outcome) deduplicator.Result {
	t.Helper()
	result, err := store.Process(t.Context(), c, work)
	require.NoError(t, err)
	require.Equal(t, want, result.Outcome)
	return result
}

// Copies and conflicts are answered without the database, for another instance too.
func TestFilterAnswersForAllInstances(t *testing.T) {
	t.Parallel()
	_, store := newSQLStore(t, testdb.SQLite)
	client, name := connect(t, services.Value(t, services.Redis)), namespace()
	database := &counted{Store: store}
	one := newFilter(t, database, client, name, generous)
	other := newFilter(t, database, connect(t, services.Value(t, services.Redis)), name, generous)

	process(t, one, claim("a", "one"), work(), deduplicator.Processed)
	require.Equal(t, 1, database.reached())
	for _, filter := range []*redisstore.Filter{one, other} {
		process(t, filter, claim("a", "one"), never(t), deduplicator.Duplicate)
		process(t, filter, claim("a", ""), never(t), deduplicator.Duplicate)
		_, err := filter.Process(t.Context(), claim("a", "two"), never(t))
		var conflict *deduplicator.ConflictError
		require.ErrorAs(t, err, &conflict)
		require.Equal(t, &deduplicator.ConflictError{Consumer: "stock", Key: "a", Stored: []byte("one"), Got: []byte("two")}, conflict)
	}
	require.Equal(t, 1, database.reached())
	ttl, err := client.PTTL(t.Context(), name+"\x00stock\x00a").Result()
	require.NoError(t, err)
	require.Positive(t, ttl, "it is forgotten in the end")

	// A namespace is one database: another one's copy is new.
	elsewhere := newFilter(t, database, client, name+"2", generous)
	process(t, elsewhere, claim("a", "one"), never(t), deduplicator.Duplicate)
	require.Equal(t, 2, database.reached())
}

// What has outputs is the database's until they are forgotten, and nothing becomes
// known by being forgotten.
func TestFilterKnowsNothingWithOutputs(t *testing.T) {
	t.Parallel()
	_, store := newSQLStore(t, testdb.SQLite)
	database := &counted{Store: store}
	filter := newFilter(t, database, connect(t, services.Value(t, services.Redis)), namespace(), generous)
	output := deduplicator.Output{Topic: "t", UUID: "u"}

	process(t, filter, claim("a", "one"), work(output), deduplicator.Processed)
	for range 2 {
		require.Len(t, process(t, filter, claim("a", "one"), never(t), deduplicator.Duplicate).Outputs, 1)
	}
	require.Equal(t, 3, database.reached())
	require.NoError(t, filter.Forget(t.Context(), claim("new", "one"), claim("a", "one")))
	process(t, filter, claim("a", "one"), never(t), deduplicator.Duplicate)
	_, err := filter.Process(t.Context(), claim("a", "two"), never(t))
	require.ErrorIs(t, err, deduplicator.ErrConflict)
	require.Equal(t, 3, database.reached())

	process(t, filter, claim("new", "one"), work(), deduplicator.Processed)
}

// A claim that failed is not known; nor is one that the database knew already, with
// whatever fingerprint.
func TestFilterKnowsOnlyWhatItSawCommitted(t *testing.T) {
	t.Parallel()
	_, store := newSQLStore(t, testdb.SQLite)
	database := &counted{Store: store}
	filter := newFilter(t, database, connect(t, services.Value(t, services.Redis)), namespace(), generous)
	planned := errors.New("planned")
	_, err := filter.Process(t.Context(), claim("fails", "one"), func(context.Context) ([]deduplicator.Output, error) { return nil, planned })
	require.ErrorIs(t, err, planned)
	process(t, filter, claim("fails", "one"), work(), deduplicator.Processed)

	process(t, store, claim("before", ""), work(), deduplicator.Processed)
	for _, fingerprint := range []string{"one", "two"} { // it is stored without one
		process(t, filter, claim("before", fingerprint), never(t), deduplicator.Duplicate)
	}
}

// A Redis that has lost everything: the database knows.
func TestFilterAfterAFlush(t *testing.T) {
	t.Parallel()
	_, store := newSQLStore(t, testdb.SQLite)
	database := &counted{Store: store}
	client := connect(t, ownRedis(t).Addr())
	filter := newFilter(t, database, client, namespace(), generous)
	process(t, filter, claim("a", "one"), work(), deduplicator.Processed)
	require.NoError(t, client.FlushAll(t.Context()).Err())
	process(t, filter, claim("a", "one"), never(t), deduplicator.Duplicate)
	_, err := filter.Process(t.Context(), claim("a", "two"), never(t))
	require.ErrorIs(t, err, deduplicator.ErrConflict)
	require.Equal(t, 3, database.reached())
}

// commands counts what is asked of Redis.
type commands struct{ n atomic.Int32 }

func (c *commands) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c *commands) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "get" || cmd.Name() == "set" { // not what a new connection says
			c.n.Add(1)
		}
		return next(ctx, cmd)
	}
}
func (c *commands) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// Redis goes away in each of its ways while messages come: all are processed, all
// copies found, and Redis is hardly asked. The client has no time limits, so without
// the filter's own these tests would not end.
func TestFilterWhileRedisIsGone(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct {
		fail, heal func(t *testing.T, server *services.Instance, p proxy)
	}{
		"stopped": {
			func(t *testing.T, server *services.Instance, _ proxy) { require.NoError(t, server.Stop(t.Context())) },
			func(t *testing.T, server *services.Instance, _ proxy) { require.NoError(t, server.Start(t.Context())) },
		},
		"paused": {
			func(t *testing.T, server *services.Instance, _ proxy) { require.NoError(t, server.Pause()) },
			func(t *testing.T, server *services.Instance, _ proxy) { require.NoError(t, server.Resume()) },
		},
		"slow": {
			func(_ *testing.T, _ *services.Instance, p proxy) {
				p.add(`{"name": "slow", "type": "latency", "stream": "downstream", "attributes": {"latency": 600000}}`)
			},
			func(_ *testing.T, _ *services.Instance, p proxy) { p.remove("slow") },
		},
		"reset": {
			func(_ *testing.T, _ *services.Instance, p proxy) {
				p.add(`{"name": "reset", "type": "reset_peer", "stream": "downstream", "attributes": {"timeout": 0}}`)
			},
			func(_ *testing.T, _ *services.Instance, p proxy) { p.remove("reset") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := ownRedis(t)
			p := newProxy(t, server.Addr())
			client, asked, reported := connect(t, p.Listen), &commands{}, &errorLog{}
			client.AddHook(asked)
			_, store := newSQLStore(t, testdb.SQLite)
			database := &counted{Store: store}
			filter := newFilter(t, database, client, namespace(), redisstore.WithTimeout(5*time.Second), redisstore.WithErrorHandler(reported.add))
			process(t, filter, claim("before", "one"), work(), deduplicator.Processed)
			process(t, filter, claim("before", "one"), never(t), deduplicator.Duplicate)
			require.Equal(t, 1, database.reached())

			fault.fail(t, server, p)
			before := asked.n.Load()
			const rounds = 20
			for i := range rounds {
				c := claim(fmt.Sprint("meanwhile ", i), "one")
				process(t, filter, c, work(), deduplicator.Processed)
				process(t, filter, c, never(t), deduplicator.Duplicate)
			}
			process(t, filter, claim("before", "one"), never(t), deduplicator.Duplicate)
			_, err := filter.Process(t.Context(), claim("before", "two"), never(t))
			require.ErrorIs(t, err, deduplicator.ErrConflict)
			require.Equal(t, 1+2*rounds+2, database.reached())
			require.NotEmpty(t, reported.all())
			// Once, and once more per 5 s, of the 80 and more that it would be otherwise.
			require.Less(t, asked.n.Load()-before, int32(rounds))

			fault.heal(t, server, p)
			require.Eventually(t, func() bool { // the next try after the pause
				before := database.reached()
				process(t, filter, claim("before", "one"), never(t), deduplicator.Duplicate)
				return database.reached() == before
			}, time.Minute, 100*time.Millisecond)
		})
	}
}

// A message whose own context ends says nothing about Redis.
func TestFilterIsNotSwitchedOffByAContext(t *testing.T) {
	t.Parallel()
	_, store := newSQLStore(t, testdb.SQLite)
	database, reported := &counted{Store: store}, &errorLog{}
	filter := newFilter(t, database, connect(t, services.Value(t, services.Redis)), namespace(), generous, redisstore.WithErrorHandler(reported.add))
	process(t, filter, claim("a", "one"), work(), deduplicator.Processed)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := filter.Process(ctx, claim("a", "one"), never(t))
	require.ErrorIs(t, err, context.Canceled)
	reached := database.reached()
	process(t, filter, claim("a", "one"), never(t), deduplicator.Duplicate)
	require.Equal(t, reached, database.reached())
	require.Empty(t, reported.all())
}

// Many at once while Redis does not answer: the database is not kept waiting either.
func TestFilterUnderLoadWhileRedisIsSilent(t *testing.T) {
	t.Parallel()
	p := newProxy(t, services.Value(t, services.Redis))
	p.add(`{"name": "silent", "type": "timeout", "stream": "upstream", "attributes": {"timeout": 0}}`)
	_, store := newSQLStore(t, testdb.PGX, deduplicator.WithClaimTimeout(time.Minute))
	filter := newFilter(t, store, connect(t, p.Listen), namespace())
	var processed, duplicates atomic.Int32
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			result, err := filter.Process(t.Context(), claim(fmt.Sprint(i%100), "one"), work())
			switch {
			case err != nil:
				t.Error(err)
			case result.Outcome == deduplicator.Processed:
				processed.Add(1)
			default:
				duplicates.Add(1)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 100, processed.Load())
	require.EqualValues(t, 100, duplicates.Load())
}

// A filter can be made while nothing listens where Redis should be.
func TestFilterNeedsNoRedisToBegin(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	_, store := newSQLStore(t, testdb.SQLite)
	filter := newFilter(t, store, connect(t, listener.Addr().String()), namespace())
	process(t, filter, claim("a", "one"), work(), deduplicator.Processed)
	process(t, filter, claim("a", "one"), never(t), deduplicator.Duplicate)
	require.NoError(t, filter.Reserve("stock", "handler a"))
	require.ErrorIs(t, filter.Reserve("stock", "handler b"), deduplicator.ErrConsumerTaken)
}

// What the store says of itself, Chain hears through a filter too.
func TestFilterTellsMaxAttempts(t *testing.T) {
	t.Parallel()
	_, store := newSQLStore(t, testdb.SQLite, deduplicator.WithMaxAttempts(6))
	filter := newFilter(t, store, connect(t, "127.0.0.1:1"), namespace())
	for _, store := range []deduplicator.Store{store, filter} {
		_, err := middleware.Chain(middleware.WithRetry(middleware.Retry{MaxRetries: 5}),
			middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())))
		require.ErrorIs(t, err, middleware.ErrInvalidOption)
		require.ErrorContains(t, err, "WithMaxAttempts, 6,")
	}
	_, store = newSQLStore(t, testdb.SQLite)
	_, counted := newFilter(t, store, connect(t, "127.0.0.1:1"), namespace()).MaxAttempts()
	require.False(t, counted)
}

// A message that was parked has all its attempts again behind a filter too.
func TestFilterForgetsAttempts(t *testing.T) {
	t.Parallel()
	_, store := newSQLStore(t, testdb.SQLite, deduplicator.WithMaxAttempts(1))
	filter := newFilter(t, store, connect(t, "127.0.0.1:1"), namespace())
	planned := errors.New("planned")
	for range 3 {
		_, err := filter.Process(t.Context(), claim("a", "one"), func(context.Context) ([]deduplicator.Output, error) { return nil, planned })
		require.Equal(t, planned, err)
		filter.ForgetAttempts(t.Context(), claim("a", "one"))
	}
}
