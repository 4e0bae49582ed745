package redisstore_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/redisstore"
)

type noStore struct{ deduplicator.Store }

func TestConstructorsRefuse(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{ContextTimeoutEnabled: true})
	unbounded := redis.NewClient(&redis.Options{})
	unboundedCluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	unboundedRing := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() {
		for _, c := range []redis.UniversalClient{client, unbounded, unboundedCluster, unboundedRing} {
			_ = c.Close()
		}
	})
	bestEffort := func(client redis.UniversalClient, namespace string, opts ...redisstore.BestEffortOption) error {
		_, err := redisstore.NewBestEffort(t.Context(), client, namespace, opts...)
		return err
	}
	filter := func(store deduplicator.Store, client redis.UniversalClient, namespace string, opts ...redisstore.FilterOption) error {
		_, err := redisstore.NewFilter(store, client, namespace, opts...)
		return err
	}
	for name, tt := range map[string]struct {
		err  error
		want []string
	}{
		"nothing":               {bestEffort(nil, ""), []string{"client is nil", "namespace is empty"}},
		"filter, nothing":       {filter(nil, nil, ""), []string{"store is nil", "client is nil", "namespace is empty"}},
		"contexts":              {bestEffort(unbounded, "a"), []string{"ContextTimeoutEnabled"}},
		"contexts of a cluster": {filter(noStore{}, unboundedCluster, "a"), []string{"ContextTimeoutEnabled"}},
		"contexts of a ring":    {filter(noStore{}, unboundedRing, "a"), []string{"ContextTimeoutEnabled"}},
		"times": {
			bestEffort(client, "a", redisstore.WithTTL(1), redisstore.WithLease(2), redisstore.WithClaimTimeout(3), redisstore.WithErrorHandler(nil)),
			[]string{"WithTTL: 1ns", "1s", "WithLease: 2ns", "WithClaimTimeout: 3ns", "10ms", "WithErrorHandler"},
		},
		"filter, times":               {filter(noStore{}, client, "a", redisstore.WithTTL(-1), redisstore.WithTimeout(0)), []string{"WithTTL: -1ns", "WithTimeout: 0s", "1ms"}},
		"a filter before no database": {filter(&redisstore.BestEffort{}, client, "a"), []string{"store has no transaction"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !errors.Is(tt.err, deduplicator.ErrInvalidOption) {
				t.Fatalf("got %v", tt.err)
			}
			for _, part := range tt.want {
				if !strings.Contains(tt.err.Error(), part) {
					t.Errorf("%q is not in %q", part, tt.err)
				}
			}
		})
	}
}

// A BestEffort can't do without Redis, so it says at the start that there is none.
func TestBestEffortNeedsRedis(t *testing.T) {
	t.Parallel()
	client := redis.NewClient(&redis.Options{ContextTimeoutEnabled: true, MaxRetries: -1, Dialer: nil, Addr: "127.0.0.1:1"})
	defer client.Close() //nolint:errcheck // it was never open
	if _, err := redisstore.NewBestEffort(context.WithoutCancel(t.Context()), client, "a"); !errors.Is(err, deduplicator.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

// After a failure nobody asks for a while, then one of all who could; the rest follow
// when that has succeeded.
func TestCircuit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var c redisstore.Circuit
		ask := func() (asked int32) {
			var wg sync.WaitGroup
			var n atomic.Int32
			for range 50 {
				wg.Go(func() {
					if c.Closed() {
						n.Add(1)
					}
				})
			}
			wg.Wait()
			return n.Load()
		}
		step := func(what string, want int32) {
			t.Helper()
			if got := ask(); got != want {
				t.Errorf("%s: %d of 50 ask, want %d", what, got, want)
			}
		}
		step("in the beginning", 50)
		c.Failed()
		step("after a failure", 0)
		time.Sleep(redisstore.OpenFor - 1)
		step("before the time is up", 0)
		time.Sleep(time.Nanosecond)
		step("when the time is up", 1)
		step("while that one asks", 0)
		c.Failed()
		time.Sleep(redisstore.OpenFor)
		step("after it failed again", 1)
		c.Succeeded()
		step("after it succeeded", 50)
		c.Failed()
		time.Sleep(redisstore.OpenFor)
		step("the next time", 1)
		time.Sleep(redisstore.OpenFor)
		step("when the one who asked never came back", 1)
	})
}
