package redisstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [NewBestEffort] and [NewFilter].
const (
	DefaultTTL          = 24 * time.Hour
	DefaultLease        = time.Minute
	DefaultClaimTimeout = deduplicator.DefaultClaimTimeout
	DefaultTimeout      = 50 * time.Millisecond
)

// The least values of options.
const (
	MinTTL          = time.Second
	MinLease        = time.Second
	MinClaimTimeout = deduplicator.MinClaimTimeout
	MinTimeout      = time.Millisecond
)

// BestEffortOption configures [NewBestEffort].
type BestEffortOption interface{ applyBestEffort(*config) }

// FilterOption configures [NewFilter].
type FilterOption interface{ applyFilter(*config) }

// Option is an option of both.
type Option interface {
	BestEffortOption
	FilterOption
}

type option func(*config)

func (f option) applyBestEffort(c *config) { f(c) }
func (f option) applyFilter(c *config)     { f(c) }

// WithTTL sets how long Redis knows a message after it was processed, instead of
// [DefaultTTL]. At least [MinTTL].
func WithTTL(d time.Duration) Option { return option(func(c *config) { c.ttl = d }) }

// WithErrorHandler calls f with each error of Redis that Process and Forget do not
// return: those of a Filter, and those that keep a BestEffort from noting what is done.
// f may be called at the same time by several goroutines, which wait for it.
func WithErrorHandler(f func(error)) Option { return option(func(c *config) { c.report = f }) }

// WithLease sets how long a message in work keeps its copies waiting, and with it how
// long the work may take, instead of [DefaultLease]: the work's context ends then. It
// is also how long the copies wait for a process that died. At least [MinLease].
func WithLease(d time.Duration) BestEffortOption { return option(func(c *config) { c.lease = d }) }

// WithClaimTimeout sets how long a copy waits for a message that is in work elsewhere,
// instead of [DefaultClaimTimeout], before it is deduplicator.ErrInFlight. At least
// [MinClaimTimeout].
func WithClaimTimeout(d time.Duration) BestEffortOption {
	return option(func(c *config) { c.claimTimeout = d })
}

// WithTimeout sets how long Redis may take for an answer, instead of [DefaultTimeout].
// A message waits for two at most. At least [MinTimeout].
func WithTimeout(d time.Duration) FilterOption { return option(func(c *config) { c.timeout = d }) }

type config struct {
	client    redis.UniversalClient
	namespace string
	report    func(error)

	ttl, lease, claimTimeout, timeout time.Duration
}

func newConfig(client redis.UniversalClient, namespace string) *config {
	return &config{
		client: client, namespace: namespace, report: func(error) {},
		ttl: DefaultTTL, lease: DefaultLease, claimTimeout: DefaultClaimTimeout, timeout: DefaultTimeout,
	}
}

func (c *config) validate() error {
	errs := []error{checkClient(c.client)}
	if c.namespace == "" {
		errs = append(errs, errors.New("namespace is empty"))
	}
	if c.report == nil {
		errs = append(errs, errors.New("WithErrorHandler: function is nil"))
	}
	for _, d := range []struct {
		option     string
		got, least time.Duration
	}{
		{"WithTTL", c.ttl, MinTTL},
		{"WithLease", c.lease, MinLease},
		{"WithClaimTimeout", c.claimTimeout, MinClaimTimeout},
		{"WithTimeout", c.timeout, MinTimeout},
	} {
		if d.got < d.least {
			errs = append(errs, fmt.Errorf("%s: %v is under the least, %v", d.option, d.got, d.least))
		}
	}
	return errors.Join(errs...)
}

func checkClient(client redis.UniversalClient) error {
	bounded := true
	switch c := client.(type) {
	case nil:
		return errors.New("client is nil")
	case *redis.Client:
		bounded = c.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		bounded = c.Options().ContextTimeoutEnabled
	case *redis.Ring:
		bounded = c.Options().ContextTimeoutEnabled
	}
	if !bounded {
		return errors.New("client: set ContextTimeoutEnabled in its options, or it ignores the end of a context")
	}
	return nil
}

// pingTimeout bounds the question whether Redis is there.
const pingTimeout = 5 * time.Second

func ping(ctx context.Context, client redis.UniversalClient) error {
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	return client.Ping(ctx).Err()
}

// key is unambiguous: the parts after the namespace have no NUL.
func (c *config) key(claim deduplicator.Claim) string {
	return c.namespace + "\x00" + sqldb.EncodeKey(claim.Consumer) + "\x00" + sqldb.EncodeKey(claim.Key)
}

// The first byte of a value.
const (
	leased = 'l' // in work; a token follows
	stored = 'o' // committed, may have outputs; the fingerprint follows
	done   = 'd' // committed, has no outputs; the fingerprint follows
)

// known is what a value that begins with done says about claim.
func known(claim deduplicator.Claim, value string) (deduplicator.Result, error) {
	fingerprint := value[1:]
	if len(claim.Fingerprint) > 0 && fingerprint != "" && string(claim.Fingerprint) != fingerprint {
		return deduplicator.Result{}, &deduplicator.ConflictError{
			Consumer: claim.Consumer, Key: claim.Key, Stored: []byte(fingerprint), Got: claim.Fingerprint,
		}
	}
	return deduplicator.Result{Outcome: deduplicator.Duplicate}, nil
}

func state(value string) byte {
	if value == "" {
		return 0
	}
	return value[0]
}
