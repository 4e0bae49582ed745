package middleware

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// DefaultReleaseInterval is how long a [Releaser] waits between two passes.
const DefaultReleaseInterval = 5 * time.Second

// ReleaserConfig says for which handler a [Releaser] works.
type ReleaserConfig struct {
	// Consumer is the handler's name or what WithConsumer gives it.
	Consumer string

	// Handler is the handler, with the middlewares that it has inside Sequence,
	// such as Partition.
	Handler message.HandlerFunc

	// Key is where the key of a message is, the same as in WithKey. It may be left
	// out for a handler that does not use package ledger.
	Key deduplicator.KeyFunc

	// Publisher and Topic are where the handler's messages go. They may be left
	// out for a handler that returns none.
	Publisher message.Publisher
	Topic     string

	// Interval is about how long it waits between two passes, and so before
	// another attempt with a message whose handler failed. 0 means
	// DefaultReleaseInterval.
	Interval time.Duration

	// Observers are told of Released, Retried, GapSkipped, EntityBlocked,
	// EntityReset and, when a transaction or pass fails, Failed.
	Observers []Observer
}

// Releaser processes the parked messages of a [Sequence] for which no message of
// their entity comes: the rest of a long backlog, what an operator let through,
// and gaps that are too old. Any number of them may run, in any instance, beside
// the consumers. It is safe for concurrent use.
type Releaser struct {
	store    deduplicator.Store
	sequence *ordering.Sequence
	config   ReleaserConfig

	mu     sync.Mutex        // guards unsent
	unsent map[string]unsent // by the claim's key
}

// unsent is what a committed transaction released and the publisher refuses. Its
// entity waits until it is published.
type unsent struct {
	entity  string
	claim   deduplicator.Claim
	outputs []deduplicator.Output
}

const (
	publishTries = 5   // in a row
	maxUnsent    = 100 // transactions
)

// NewReleaser returns a Releaser; store is the one of Deduplicate. It returns
// [ErrInvalidOption].
func NewReleaser(store deduplicator.Store, sequence *ordering.Sequence, config ReleaserConfig) (*Releaser, error) {
	var errs []error
	check := func(ok bool, text string) {
		if !ok {
			errs = append(errs, errors.New("NewReleaser: "+text))
		}
	}
	check(!isNil(store), "store is nil")
	check(sequence != nil, "sequence is nil")
	check(config.Consumer != "", "Consumer is empty")
	check(config.Handler != nil, "Handler is nil")
	check((config.Publisher == nil) == (config.Topic == ""), "Publisher and Topic need each other")
	for _, observe := range config.Observers {
		check(observe != nil, "observer is nil")
	}
	if err := errors.Join(append(errs, sqldb.CheckDuration("NewReleaser: Interval", config.Interval, 0))...); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if config.Interval == 0 {
		config.Interval = DefaultReleaseInterval
	}
	return &Releaser{store: store, sequence: sequence, config: config, unsent: make(map[string]unsent)}, nil
}

// Run makes a pass, see [Releaser.Release], and then one after each interval until
// ctx ends. It returns ctx's error; other errors are told to the observers.
func (r *Releaser) Run(ctx context.Context) error {
	for {
		if err := r.Release(ctx); err != nil && ctx.Err() == nil {
			r.notify(ctx, Event{Outcome: Failed, Attempt: 1, Err: err})
		}
		if !sqldb.Pause(ctx, r.config.Interval/2+rand.N(r.config.Interval)) { //nolint:gosec // jitter is no secret
			return ctx.Err()
		}
	}
}

// Release is one pass over the consumer's entities: it processes, in transactions
// of as many messages as [ordering.WithReleaseBatch] allows, what can be
// processed. An entity whose transaction fails is left to the next pass.
//
// What the handler returned is published after the commit. Where the publisher
// refuses it, its entity waits and each pass tries it again; 100 such entities stop
// all others. Outputs that are not published when the process ends stay stored like
// those of a message that is not delivered again. They may be published after those
// of a later event that a consumer has processed meanwhile.
func (r *Releaser) Release(ctx context.Context) error {
	errs := r.publishUnsent(ctx)
	for after := ""; ; {
		entities, err := r.sequence.Due(ctx, r.config.Consumer, after)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		if len(entities) == 0 {
			return errors.Join(errs...)
		}
		for _, entity := range entities {
			after = entity
			waits, full := r.waits(entity)
			if full {
				return errors.Join(errs...)
			}
			if waits {
				continue
			}
			if err := r.entity(ctx, entity); err != nil {
				errs = append(errs, fmt.Errorf("release entity %q: %w", entity, err))
			}
			if ctx.Err() != nil {
				return errors.Join(append(errs, ctx.Err())...)
			}
		}
	}
}

// publishUnsent tries once more what could not be published.
func (r *Releaser) publishUnsent(ctx context.Context) (errs []error) {
	r.mu.Lock()
	again := slices.Collect(maps.Values(r.unsent))
	r.mu.Unlock()
	for _, u := range again {
		if err := r.publish(ctx, u, 1); err != nil {
			errs = append(errs, fmt.Errorf("release entity %q: %w", u.entity, err))
		}
	}
	return errs
}

// waits reports whether something of entity is not published yet, and whether so
// much is that nothing more can be released.
func (r *Releaser) waits(entity string) (waits, full bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range r.unsent {
		waits = waits || u.entity == entity
	}
	return waits, len(r.unsent) >= maxUnsent
}

// errNothingToRelease rolls back: another instance was faster.
var errNothingToRelease = errors.New("nothing to release")

// entity works until nothing follows the entity's last event, or an attempt fails.
func (r *Releaser) entity(ctx context.Context, entity string) error {
	for {
		progress, err := r.transaction(ctx, entity)
		if err != nil || !progress {
			return err
		}
	}
}

func (r *Releaser) transaction(ctx context.Context, entity string) (progress bool, err error) {
	started := time.Now()
	// The parked rows guarantee that each is processed once; the claim is there
	// because the store keeps outputs under one.
	claim := deduplicator.Claim{Consumer: r.config.Consumer, Key: "ordering release " + watermill.NewUUID(), Time: started}
	var notices []ordering.SequenceNotice
	var outputs []deduplicator.Output
	_, err = r.store.Process(sqldb.ContextUncounted(ctx), claim, func(ctx context.Context) (_ []deduplicator.Output, err error) {
		tx, ok := Tx(ctx)
		if !ok {
			return nil, errors.New("middleware: a Releaser needs a store on database/sql")
		}
		var produced []*message.Message
		released, err := r.sequence.ReleaseTx(ctx, tx, r.config.Consumer, entity, func(msg *message.Message) error {
			outputs, err := callReleased(r.config.Handler, msg, r.config.Consumer, r.config.Key)
			if err == nil {
				produced = append(produced, outputs...)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		if notices = released.Notices; len(notices) == 0 {
			return nil, errNothingToRelease
		}
		outputs, err = toOutputs(r.config.Topic, produced)
		return outputs, err
	})
	if errors.Is(err, errNothingToRelease) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, event := range noticeEvents(notices) {
		event.Entity, event.Duration = entity, time.Since(started)
		r.notify(ctx, event)
	}
	last := notices[len(notices)-1].Kind
	return last != ordering.ReleaseFailed && last != ordering.Blocked, r.publish(ctx, unsent{entity, claim, outputs}, publishTries)
}

// publish publishes u and forgets it. What the publisher refuses is kept in r.unsent.
func (r *Releaser) publish(ctx context.Context, u unsent, tries int) error {
	if len(u.outputs) == 0 {
		return nil
	}
	for wait := nackPause; ; wait *= 2 {
		err := r.config.Publisher.Publish(r.config.Topic, fromOutputs(u.outputs)...)
		r.mu.Lock()
		if err == nil {
			delete(r.unsent, u.claim.Key)
		} else {
			r.unsent[u.claim.Key] = u
		}
		r.mu.Unlock()
		if err == nil {
			return r.store.Forget(ctx, u.claim)
		}
		err = fmt.Errorf("publish to %q: %w", r.config.Topic, err)
		r.notify(ctx, Event{Outcome: Retried, Entity: u.entity, Attempt: 1, Err: err})
		if tries--; tries == 0 || !sqldb.Pause(ctx, wait) {
			return err
		}
	}
}

func (r *Releaser) notify(ctx context.Context, event Event) {
	event.Handler = r.config.Consumer
	for _, observe := range r.config.Observers {
		observe(ctx, event)
	}
}
