package redisstore

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// BestEffort is a [deduplicator.Store] on Redis alone, for work that is not critical:
// see the package documentation for what it does not promise. It is
// [deduplicator.Untransactional], so package middleware refuses to combine it with
// what needs a transaction, and its Tx in its handlers.
//
// Messages in work hold a lease; those whose work succeeded are remembered for a time.
// It is safe for concurrent use, by several processes too.
type BestEffort struct {
	*config
	consumers sync.Map // from names to their owners: see Reserve
}

var _ deduplicator.Untransactional = (*BestEffort)(nil)

// NewBestEffort returns a BestEffort whose keys in Redis begin with namespace, which
// all instances of a service share and others do not. ctx bounds the question whether
// Redis is there. It returns deduplicator.ErrInvalidOption or
// deduplicator.ErrUnavailable.
func NewBestEffort(ctx context.Context, client redis.UniversalClient, namespace string, opts ...BestEffortOption) (*BestEffort, error) {
	cfg := newConfig(client, namespace)
	for _, opt := range opts {
		opt.applyBestEffort(cfg)
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", deduplicator.ErrInvalidOption, err)
	}
	if err := ping(ctx, client); err != nil {
		return nil, fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
	}
	return &BestEffort{config: cfg}, nil
}

// Untransactional implements [deduplicator.Untransactional].
func (*BestEffort) Untransactional() {}

// Reserve gives the consumer name to owner, as [deduplicator.SQLStore.Reserve] does.
func (s *BestEffort) Reserve(consumer, owner string) error {
	if first, taken := s.consumers.LoadOrStore(consumer, owner); taken && first != owner {
		return fmt.Errorf("%w: %q is used by %s, so not by %s", deduplicator.ErrConsumerTaken, consumer, first, owner)
	}
	return nil
}

// noteTimeout bounds what is left to do when the work has returned.
const noteTimeout = 5 * time.Second

// Process implements [deduplicator.Store] as far as the package documentation says.
// The work's context ends with the lease.
//
// Before the work is called it returns deduplicator.ErrInvalidClaim, ErrConflict,
// ErrInFlight or ErrUnavailable. Then an error is the work's own, or
// deduplicator.ErrNoTransaction for work that returned outputs; what the work has done
// stays, and the claim is free again. Once the work has succeeded Process does,
// also when that can't be noted.
func (s *BestEffort) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	if err := claim.Validate(); err != nil {
		return deduplicator.Result{}, err
	}
	key, lease := s.key(claim), string(leased)+rand.Text()
	free := func(ctx context.Context) error { return release.Run(ctx, s.client, []string{key}, lease).Err() }
	value, end, err := s.acquire(ctx, key, lease)
	if err != nil {
		s.note(ctx, free) // it may have been granted, and the answer lost
		return deduplicator.Result{}, err
	}
	if value != lease {
		return known(claim, value)
	}
	succeeded := false
	defer func() {
		if !succeeded { // an error, a panic or a Goexit
			s.note(ctx, free)
		}
	}()
	working, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	outputs, err := work(working)
	if err == nil && len(outputs) > 0 {
		err = fmt.Errorf("redisstore: %d outputs: %w, so nothing would keep them", len(outputs), deduplicator.ErrNoTransaction)
	}
	if err != nil {
		return deduplicator.Result{}, err
	}
	succeeded = true
	s.note(ctx, func(ctx context.Context) error { // whoever has the lease by now: the work is done
		return s.client.Set(ctx, key, string(done)+string(claim.Fingerprint), s.ttl).Err()
	})
	return deduplicator.Result{Outcome: deduplicator.Processed}, nil
}

// note tells Redis what became of the work, also when ctx has ended.
func (s *BestEffort) note(ctx context.Context, call func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), noteTimeout)
	defer cancel()
	if err := call(ctx); err != nil {
		s.report(fmt.Errorf("redisstore: note the end of the work: %w", err))
	}
}

// release deletes a lease, unless it has ended and somebody else has one.
var release = redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 0`)

// acquire returns lease and its end once key holds it, or what says that the claim is
// done.
func (s *BestEffort) acquire(ctx context.Context, key, lease string) (value string, end time.Time, err error) {
	wait, cancel := context.WithTimeout(ctx, s.claimTimeout)
	defer cancel()
	pauses := sqldb.Pauses()
	for inWork := false; ; inWork = true {
		end = time.Now().Add(s.lease)
		value, err = s.take(wait, key, lease)
		if err == nil && (value == lease || state(value) == done) {
			return value, end, nil
		}
		if err == nil && sqldb.Pause(wait, pauses.NextBackOff()) {
			continue
		}
		switch {
		case ctx.Err() != nil:
			err = fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, errors.Join(ctx.Err(), err))
		case err == nil || inWork && wait.Err() != nil:
			err = fmt.Errorf("%w for %v", deduplicator.ErrInFlight, s.claimTimeout)
		default:
			err = fmt.Errorf("%w: %w", deduplicator.ErrUnavailable, err)
		}
		return "", end, err
	}
}

// take returns what key holds: lease, if nobody had it.
func (s *BestEffort) take(ctx context.Context, key, lease string) (string, error) {
	taken, err := s.client.SetNX(ctx, key, lease, s.lease).Result()
	if err != nil {
		return "", err
	}
	if taken {
		return lease, nil
	}
	// It may be ours: go-redis sends a command again whose answer was lost.
	value, err := s.client.Get(ctx, key).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil // it has ended in between
	}
	return value, err
}

// Forget implements [deduplicator.Store]: there are no outputs.
func (*BestEffort) Forget(context.Context, ...deduplicator.Claim) error { return nil }
