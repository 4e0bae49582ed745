package deduplicator

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [NewRelay].
const (
	DefaultRelayInterval  = 10 * time.Second
	DefaultMinAge         = 30 * time.Second
	DefaultPublishTimeout = 10 * time.Second
)

// Floors of the options of [NewRelay].
const (
	MinMinAge         = time.Second
	MinPublishTimeout = 100 * time.Millisecond
)

const (
	relayPage     = 100    // claims that are looked up at a time
	publishBatch  = 100    // messages in one call of the publisher
	maxFailures   = 100    // claims of a consumer that fail in one pass before it ends
	maxHeld       = 10_000 // claims that a pass passes over because they failed in those before
	finishTimeout = 5 * time.Second
)

// Relay publishes the stored outputs that nobody else does: the process that
// stored them died before it published them, and their message was not delivered
// again. They are published as they are stored: topic, UUID, metadata, payload and
// order. Then they are forgotten.
//
// The outputs of one consumer are published by one Relay at a time, whatever the
// number of instances, and in the order in which they were stored (on SQLite, to
// the millisecond). When a claim
// can't be published, later ones of the same consumer, topic and partition key
// wait for it; others go on. No transaction is open and no connection in use while
// a publisher works.
//
// Outputs are published at least once: again, with the same UUIDs, when a publish
// succeeded and deleting the rows did not, when only some messages of a claim
// were accepted, or when their message is delivered again at the same moment. A
// Relay is safe for concurrent use.
type Relay struct {
	store    *SQLStore
	pub      message.Publisher
	interval time.Duration
	minAge   time.Duration
	timeout  time.Duration
	observe  func(context.Context, RelayResult)

	only      bool     // the outputs of consumers
	consumers []string // as stored, in order

	publishing chan struct{} // full while the publisher works
	queries    relayQueries
	leases     *leaseQueries

	mu    sync.Mutex         // guards what follows
	first string             // the consumer at which the last pass ended early: the next one begins after it
	held  map[string]*heldUp // of consumers with which a pass ended early
}

// heldUp is what a pass could not publish of a consumer. The next one goes on after
// it: otherwise what is refused for good would use up each pass.
type heldUp struct {
	failed  map[string]bool    // keys of claims that wait for another pass
	blocked map[[2]string]bool // topics and partition keys of their messages
}

func newHeldUp() *heldUp { return &heldUp{make(map[string]bool), make(map[[2]string]bool)} }

// RelayResult is what one pass of a [Relay] did.
type RelayResult struct {
	Claims   int           // processed messages whose outputs were published and forgotten
	Messages int           // outputs that the publisher accepted
	Failed   int           // claims that wait for the next pass because of an error
	Duration time.Duration // of the pass
	Err      error         // the first error of each consumer, or that of a context that ended
}

// RelayOption configures a [Relay].
type RelayOption interface{ applyRelay(*Relay) }

type relayOptionFunc func(*Relay)

func (f relayOptionFunc) applyRelay(r *Relay) { f(r) }

// WithConsumers makes the Relay publish the outputs of these consumers only, instead
// of all in the tables. It is for services that share tables and publish to different
// brokers: each has a Relay of its own, for its handlers' names and what WithConsumer
// of package middleware gives them. One name or more is needed; none may be empty.
func WithConsumers(names ...string) RelayOption {
	return relayOptionFunc(func(r *Relay) {
		r.only, r.consumers = true, nil
		for _, name := range names {
			r.consumers = append(r.consumers, sqldb.EncodeKey(name))
		}
		slices.Sort(r.consumers)
	})
}

// WithMinAge sets how long outputs have been stored before the Relay publishes
// them, instead of [DefaultMinAge]. It should be longer than it takes to publish
// them on the usual way; until then they are published twice. Values under
// [MinMinAge] are refused. The database's clock counts.
func WithMinAge(d time.Duration) RelayOption {
	return relayOptionFunc(func(r *Relay) { r.minAge = d })
}

// WithPublishTimeout sets how long one call of the publisher, with up to 100
// messages, may take, instead of [DefaultPublishTimeout]. When it passes, the pass
// ends with [ErrPublishTimeout], and no other call is made before that one returns.
// Another instance takes over after three times as long. Values under
// [MinPublishTimeout] are refused.
func WithPublishTimeout(d time.Duration) RelayOption {
	return relayOptionFunc(func(r *Relay) { r.timeout = d })
}

// WithRelayObserver sets a function that is called with the result of each pass,
// by the goroutine of [Relay.Run], which waits for it: the seam for metrics and
// logs.
func WithRelayObserver(observe func(context.Context, RelayResult)) RelayOption {
	return relayOptionFunc(func(r *Relay) { r.observe = observe })
}

// NewRelay returns a Relay that publishes the outputs in store's tables through
// pub, which must have confirmed messages when it returns nil. It returns
// [ErrInvalidOption], naming every wrong argument and option.
//
// These are the outputs of all consumers that use the tables. Where some of them
// publish to another broker than pub's, limit it with [WithConsumers], or give their
// store tables of its own ([WithTables], [WithLeasesTable]): otherwise their outputs
// go to the wrong broker, and are forgotten.
func NewRelay(store *SQLStore, pub message.Publisher, opts ...RelayOption) (*Relay, error) {
	r := &Relay{
		store:      store,
		pub:        pub,
		interval:   DefaultRelayInterval,
		minAge:     DefaultMinAge,
		timeout:    DefaultPublishTimeout,
		observe:    func(context.Context, RelayResult) {},
		publishing: make(chan struct{}, 1),
		held:       make(map[string]*heldUp),
	}
	for _, opt := range opts {
		opt.applyRelay(r)
	}
	if err := r.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	r.queries = newRelayQueries(store.config, r.minAge)
	// A lease is renewed once a publish timeout has passed, so two are left for a publish.
	r.leases = newLeaseQueries(store.config, 3*r.timeout)
	return r, nil
}

func (r *Relay) validate() error {
	errs := []error{
		checkInterval(r.interval),
		sqldb.CheckDuration("WithMinAge", r.minAge, MinMinAge),
		sqldb.CheckDuration("WithPublishTimeout", r.timeout, MinPublishTimeout),
	}
	if r.store == nil {
		errs = append(errs, errors.New("store is nil"))
	}
	if r.pub == nil {
		errs = append(errs, errors.New("publisher is nil"))
	}
	if r.only && len(r.consumers) == 0 {
		errs = append(errs, errors.New("WithConsumers: no names; leave it out for all consumers"))
	}
	if slices.Contains(r.consumers, "") {
		errs = append(errs, errors.New("WithConsumers: a name is empty"))
	}
	if r.observe == nil {
		errs = append(errs, errors.New("WithRelayObserver: function is nil"))
	}
	return errors.Join(errs...)
}

// Run relays until ctx ends. A publish that is under way then is waited for, up to
// its timeout.
func (r *Relay) Run(ctx context.Context) { r.run(ctx, r.observe) }

// Plugin runs the Relay as long as a Router: router.AddPlugin(relay.Plugin).
// Router.Close waits for it. The Router's logger gets the errors of its passes.
func (r *Relay) Plugin(router *message.Router) error {
	return plugin(router, "deduplicator relay", func(ctx context.Context) {
		r.run(ctx, func(ctx context.Context, result RelayResult) {
			if result.Err != nil && ctx.Err() == nil {
				router.Logger().Error("Relaying of produced messages failed", result.Err, nil)
			}
			r.observe(ctx, result)
		})
	})
}

func (r *Relay) run(ctx context.Context, observe func(context.Context, RelayResult)) {
	loop(ctx, r.interval, func(ctx context.Context) bool {
		result, err := r.Flush(ctx)
		observe(ctx, result)
		return err == nil || result.Messages > 0
	})
}

// Flush publishes what is due, once. Consumers that another Relay is at are left
// to it. What could not be published stays stored; the error says why. Where much is
// refused, it takes several calls to come to what is not.
func (r *Relay) Flush(ctx context.Context) (RelayResult, error) {
	started := time.Now()
	var result RelayResult
	var errs []error
	r.mu.Lock()
	first := r.first
	r.first = ""
	r.mu.Unlock()
	for consumer, around := first, first == ""; ; {
		next, err := r.nextConsumer(ctx, consumer)
		if err != nil {
			errs = append(errs, fmt.Errorf("deduplicator: relay: %w", err))
			break
		}
		if next == "" && !around {
			consumer, around = "", true
			continue
		}
		if next == "" || around && first != "" && next > first {
			break
		}
		consumer = next
		pass := &relayPass{Relay: r, consumer: consumer, result: &result, heldUp: newHeldUp(),
			lease: lease{store: r.store, queries: r.leases, name: consumer}}
		if err := pass.run(ctx); err != nil {
			errs = append(errs, fmt.Errorf("deduplicator: relay outputs of %q: %w", consumer, err))
		}
		if pass.down { // the same is likely for the next consumer
			r.mu.Lock()
			r.first = consumer
			r.mu.Unlock()
			break
		}
	}
	err := errors.Join(errs...)
	result.Duration, result.Err = time.Since(started), err
	return result, err
}

// nextConsumer returns the first consumer after one that has stored outputs, or may
// have some where the consumers are given.
func (r *Relay) nextConsumer(ctx context.Context, after string) (string, error) {
	if r.only {
		for _, consumer := range r.consumers {
			if consumer > after {
				return consumer, ctx.Err()
			}
		}
		return "", ctx.Err()
	}
	var next sql.NullString
	err := r.store.db.QueryRowContext(ctx, r.queries.consumer, after).Scan(&next)
	return next.String, err
}

// relayPass publishes the outputs of one consumer.
type relayPass struct {
	*Relay
	consumer string // as stored
	result   *RelayResult

	lease lease

	*heldUp
	failures int           // of this pass
	lost     time.Duration // spent on publishes that failed
	down     bool          // the publisher or the database seems to work for nobody
}

func (p *relayPass) run(ctx context.Context) (err error) {
	if keys, err := p.due(ctx); err != nil || len(keys) == 0 {
		return err
	}
	if ok, err := p.lease.acquire(ctx); err != nil || !ok {
		return err
	}
	defer func() {
		if errors.Is(err, ErrPublishTimeout) {
			return // the publisher may be at it still: the lease ends by itself
		}
		if releaseErr := p.lease.release(ctx); releaseErr != nil {
			err = errors.Join(err, releaseErr)
		}
	}()
	goesOn := p.takeUp()
	var first error
	for !p.down && p.failures < maxFailures {
		keys, err := p.due(ctx)
		if err != nil {
			return errors.Join(first, err)
		}
		if len(keys) == 0 {
			if !goesOn {
				return first
			}
			goesOn, p.heldUp = false, newHeldUp() // from the oldest again
			continue
		}
		for _, key := range keys {
			if err := p.relay(ctx, key); err != nil {
				if errors.Is(err, errLeaseLost) || ctx.Err() != nil {
					return errors.Join(first, err)
				}
				if first == nil {
					first = err
				}
			}
			if p.down || p.failures >= maxFailures {
				break
			}
		}
	}
	if len(p.failed) < maxHeld {
		p.mu.Lock()
		p.held[p.consumer] = p.heldUp
		p.mu.Unlock()
	}
	return first
}

// takeUp reports whether the pass before ended early, and goes on where it did.
func (p *relayPass) takeUp() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	held, ok := p.held[p.consumer]
	if ok {
		p.heldUp = held
		delete(p.held, p.consumer)
	}
	return ok
}

// due returns the keys of the oldest claims with outputs that are old enough,
// without those that have failed. There is no place from which it goes on: a
// transaction that commits late may add rows before it.
func (p *relayPass) due(ctx context.Context) ([]string, error) {
	rows, err := p.store.db.QueryContext(ctx, p.queries.due, p.consumer, relayPage+len(p.failed))
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	var keys []string
	for rows.Next() {
		var key string
		if err := rows.Scan(&key); err != nil {
			return nil, err
		}
		if !p.failed[key] {
			keys = append(keys, key)
		}
	}
	return keys, rows.Err()
}

// relay publishes the outputs of one claim and deletes them.
func (p *relayPass) relay(ctx context.Context, key string) error {
	outputs, err := p.outputs(ctx, key)
	if err != nil && !errors.Is(err, errDamaged) {
		p.down = true
		return err
	}
	waits := err != nil
	for _, output := range outputs {
		waits = waits || p.blocked[partition(output)]
	}
	if !waits {
		err = p.publishAll(ctx, outputs)
		waits = err != nil
	}
	if errors.Is(err, errLeaseLost) {
		return err
	}
	if waits {
		p.failed[key] = true
		p.failures++
		p.result.Failed++
		for _, output := range outputs {
			if partition(output)[1] != "" {
				p.blocked[partition(output)] = true
			}
		}
		return err
	}
	if len(outputs) == 0 {
		return nil // forgotten meanwhile
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishTimeout)
	defer cancel()
	deleted, err := p.store.exec(ctx, p.queries.remove, p.consumer, key, p.consumer, p.lease.token)
	if err != nil {
		p.result.Failed++
		p.down = true
		return fmt.Errorf("published, but not forgotten: %w", err)
	}
	if n, err := deleted.RowsAffected(); err != nil || n == 0 {
		return errors.Join(err, p.lease.renew(ctx)) // forgotten by another, or the lease is lost
	}
	p.result.Claims++
	return nil
}

// partition is what order is kept within.
func partition(output Output) [2]string {
	return [2]string{output.Topic, output.Metadata[metadata.PartitionKey]}
}

// outputs returns those of a claim that can be read, also with errDamaged.
func (p *relayPass) outputs(ctx context.Context, key string) ([]Output, error) {
	rows, err := p.store.db.QueryContext(ctx, p.queries.outputs, p.consumer, key)
	if err != nil {
		return nil, err
	}
	defer rows.Close() //nolint:errcheck // rows.Err has the error of reading
	var outputs []Output
	var damaged error
	for rows.Next() {
		var row storedOutput
		if err := rows.Scan(&row.topic, &row.uuid, &row.metadata, &row.payload); err != nil {
			return nil, err
		}
		if output, err := row.output(); err != nil {
			damaged = err
		} else {
			outputs = append(outputs, output)
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return outputs, damaged
}

// publishAll publishes in order, as many messages at a time as go to one topic.
func (p *relayPass) publishAll(ctx context.Context, outputs []Output) error {
	for len(outputs) > 0 {
		n := 1
		for n < len(outputs) && n < publishBatch && outputs[n].Topic == outputs[0].Topic {
			n++
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if time.Since(p.lease.renewed) > p.timeout {
			if err := p.lease.renew(ctx); err != nil {
				return err
			}
		}
		started := time.Now()
		if err := p.publish(ctx, outputs[:n]); err != nil {
			p.lost += time.Since(started)
			p.down = p.lost >= p.timeout || errors.Is(err, ErrPublishTimeout)
			return err
		}
		p.result.Messages += n
		outputs = outputs[n:]
	}
	return nil
}

// publish calls the publisher, for as long as the timeout allows.
func (r *Relay) publish(ctx context.Context, outputs []Output) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.timeout)
	defer cancel()
	select {
	case r.publishing <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%w: a call that timed out before is still under way", ErrPublishTimeout)
	}
	messages := make([]*message.Message, len(outputs))
	for i, output := range outputs {
		messages[i] = message.NewMessageWithContext(ctx, output.UUID, output.Payload)
		messages[i].Metadata = output.Metadata
	}
	published := make(chan error, 1)
	go func() { // it ends when the publisher returns: nothing else can end that
		defer func() { <-r.publishing }()
		defer func() {
			if value := recover(); value != nil {
				published <- fmt.Errorf("publisher panicked: %v", value)
			}
		}()
		published <- r.pub.Publish(outputs[0].Topic, messages...)
	}()
	select {
	case err := <-published:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w within %v", ErrPublishTimeout, r.timeout)
	}
}

type relayQueries struct{ consumer, due, outputs, remove string }

func newRelayQueries(c *config, minAge time.Duration) relayQueries {
	produced, leases := c.dialect.Quote(c.produced), c.dialect.Quote(c.leases)
	return relayQueries{
		consumer: c.dialect.Rebind("SELECT MIN(consumer_name) FROM " + produced + " WHERE consumer_name > ?"),
		due: c.dialect.Rebind("SELECT message_key FROM " + produced + " WHERE consumer_name = ? AND ordinal = 0 AND created_at < " +
			c.dialect.FromNow(-minAge) + " ORDER BY created_at, message_key LIMIT ?"),
		outputs: c.dialect.Rebind("SELECT topic, uuid, metadata, payload FROM " + produced + " WHERE consumer_name = ? AND message_key = ? ORDER BY ordinal"),
		remove: c.dialect.Rebind("DELETE FROM " + produced + " WHERE consumer_name = ? AND message_key = ?" +
			" AND EXISTS (SELECT 1 FROM " + leases + leaseIsMine + ")"),
	}
}
