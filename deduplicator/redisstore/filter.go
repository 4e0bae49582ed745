package redisstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// Filter is a [deduplicator.Store] that answers copies from Redis, for all instances
// that share it, and gives everything else to the store behind it. It knows of
// messages that it saw committed and whose outputs, if they had any, are forgotten; it
// compares fingerprints, so it knows conflicts too. It never says that a message is
// new.
//
// Redis may fail in any way: an answer that does not come in time ([WithTimeout])
// counts as none, and then Redis is not asked for 5 s. A Filter can be made while it
// is down. What Redis has lost is found by the store.
//
// While Redis knows a message, deleting its row by hand does not make the store
// process it again; nor does a database that lost commits, as one that was restored
// from a backup: choose another namespace then.
//
// It is for databases on a server: SQLite, in this process, is no slower than Redis.
//
// It is safe for concurrent use.
type Filter struct {
	*config
	store   deduplicator.Store
	circuit circuit
}

var _ deduplicator.Store = (*Filter)(nil)

// NewFilter returns a Filter before store. Keys in Redis begin with namespace, which
// names the tables of the store: two databases that share a Redis must not share it,
// or each would take the other's messages for its own. The options of store stay in
// force. Redis is not asked yet. It returns deduplicator.ErrInvalidOption.
func NewFilter(store deduplicator.Store, client redis.UniversalClient, namespace string, opts ...FilterOption) (*Filter, error) {
	cfg := newConfig(client, namespace)
	for _, opt := range opts {
		opt.applyFilter(cfg)
	}
	err := cfg.validate()
	if store == nil {
		err = errors.Join(errors.New("store is nil"), err)
	}
	if _, ok := store.(deduplicator.Untransactional); ok {
		err = errors.Join(errors.New("store has no transaction: a filter before it adds nothing"), err)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", deduplicator.ErrInvalidOption, err)
	}
	return &Filter{config: cfg, store: store}, nil
}

// Reserve asks the store, if it keeps consumer names apart.
func (f *Filter) Reserve(consumer, owner string) error {
	if store, ok := f.store.(interface {
		Reserve(consumer, owner string) error
	}); ok {
		return store.Reserve(consumer, owner)
	}
	return nil
}

// MaxAttempts asks the store, if it can count attempts.
func (f *Filter) MaxAttempts() (int, bool) {
	if store, ok := f.store.(interface{ MaxAttempts() (int, bool) }); ok {
		return store.MaxAttempts()
	}
	return 0, false
}

// ForgetAttempts tells the store, if it can count attempts.
func (f *Filter) ForgetAttempts(ctx context.Context, claim deduplicator.Claim) {
	if store, ok := f.store.(interface {
		ForgetAttempts(ctx context.Context, claim deduplicator.Claim)
	}); ok {
		store.ForgetAttempts(ctx, claim)
	}
}

// Retention asks the store, for package ledger.
func (f *Filter) Retention() (time.Duration, bool) {
	if store, ok := f.store.(interface{ Retention() (time.Duration, bool) }); ok {
		return store.Retention()
	}
	return 0, false
}

// Database asks the store, for package ledger; nil if it is not on database/sql.
func (f *Filter) Database() (*sql.DB, deduplicator.Dialect) {
	if store, ok := f.store.(interface {
		Database() (*sql.DB, deduplicator.Dialect)
	}); ok {
		return store.Database()
	}
	return nil, ""
}

// Process implements [deduplicator.Store].
func (f *Filter) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	if store, ok := f.store.(interface {
		Check(claim deduplicator.Claim) error
	}); ok {
		if err := store.Check(claim); err != nil {
			return deduplicator.Result{}, err // for a copy too
		}
	}
	key := f.key(claim)
	var value string
	f.ask(ctx, func(ctx context.Context) (err error) {
		value, err = f.client.Get(ctx, key).Result()
		return err
	})
	if state(value) == done {
		return known(claim, value)
	}
	hasOutputs := false
	result, err := f.store.Process(ctx, claim, func(ctx context.Context) ([]deduplicator.Output, error) {
		outputs, err := work(ctx)
		hasOutputs = len(outputs) > 0
		return outputs, err
	})
	// A duplicate does not say with which fingerprint it is stored.
	if err == nil && result.Outcome == deduplicator.Processed {
		value := string(done)
		if hasOutputs {
			value = string(stored)
		}
		f.ask(context.WithoutCancel(ctx), func(ctx context.Context) error {
			return f.client.Set(ctx, key, value+string(claim.Fingerprint), f.ttl).Err()
		})
	}
	return result, err
}

// forget marks the claims that are known to be stored as done, and no others: that a
// claim has no outputs says nothing about whether it was processed.
var forget = redis.NewScript(`for _, key in ipairs(KEYS) do
	local value = redis.call('GET', key)
	if value and string.sub(value, 1, 1) == ARGV[1] then
		redis.call('SET', key, ARGV[2] .. string.sub(value, 2), 'KEEPTTL')
	end
end
return 0`)

// Forget implements [deduplicator.Store].
func (f *Filter) Forget(ctx context.Context, claims ...deduplicator.Claim) error {
	if err := f.store.Forget(ctx, claims...); err != nil {
		return err
	}
	for _, claim := range claims { // one by one: in a cluster, each has its node
		if !f.ask(ctx, func(ctx context.Context) error {
			return forget.Run(ctx, f.client, []string{f.key(claim)}, string(stored), string(done)).Err()
		}) {
			break
		}
	}
	return nil
}

// ask calls Redis in bounded time and reports whether it answered.
func (f *Filter) ask(ctx context.Context, call func(context.Context) error) bool {
	if !f.circuit.closed() {
		return false
	}
	bounded, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	err := call(bounded)
	switch {
	case err == nil || errors.Is(err, redis.Nil):
		f.circuit.succeeded()
		return true
	case ctx.Err() != nil:
		return false // says nothing about Redis
	}
	f.circuit.failed()
	f.report(fmt.Errorf("redisstore: filter: %w", err))
	return false
}

// openFor is how long Redis is not asked after it failed.
const openFor = 5 * time.Second

// circuit is closed (Redis is asked) until a failure opens it. When it has been open
// for its time, one caller tries.
type circuit struct {
	until atomic.Pointer[time.Time] // nil while closed
}

func (c *circuit) closed() bool {
	until := c.until.Load()
	if until == nil {
		return true
	}
	now := time.Now()
	if now.Before(*until) {
		return false
	}
	next := now.Add(openFor)
	return c.until.CompareAndSwap(until, &next)
}

func (c *circuit) failed() {
	until := time.Now().Add(openFor)
	c.until.Store(&until)
}

func (c *circuit) succeeded() {
	if c.until.Load() != nil {
		c.until.Store(nil)
	}
}
