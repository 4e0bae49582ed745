package deduplicator

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [NewCleaner].
const (
	DefaultCleanInterval = 10 * time.Minute
	DefaultCleanBatch    = 100
	DefaultCleanPause    = 200 * time.Millisecond
)

// MaxCleanBatch is the largest batch: a longer statement would be felt by handlers.
const MaxCleanBatch = 100_000

// Cleaner deletes claims that are older than the retention of a store, see
// [WithRetention], and counts of attempts (see [WithMaxAttempts]) that are. It goes
// by the database's clock and keeps rows for an hour longer than that, so that the
// clocks of the processes may differ. A claim whose outputs are still stored is
// kept until they are published.
//
// Of several on one table, in one process or many, one works at a time, so that their
// number does not add to the load of the database; the others wait for their turn, and
// take over from one that died after ten seconds and three pauses. It is safe for concurrent use.
type Cleaner struct {
	store    *SQLStore
	interval time.Duration
	batch    int
	pause    time.Duration
	observe  func(context.Context, CleanResult)

	claims, attempts, oldest string // statements
	leases                   *leaseQueries
}

// cleanTurn is about how often a Cleaner that waits asks whether it is its turn.
const cleanTurn = time.Second

// lease is how long the turn of a Cleaner that does not say anything lasts. A third is
// left for its statement when it has been renewed before a pause.
func (c *Cleaner) lease() time.Duration { return 10*time.Second + 3*c.pause }

// cleanLeasePrefix begins the names of the cleaners' leases. No consumer has such a
// name: sqldb.EncodeKey hashes them.
const cleanLeasePrefix = "sha256:cleaner of "

// CleanResult is what one pass of a [Cleaner] did.
type CleanResult struct {
	Rows     int64         // claims that were deleted
	Attempts int64         // counts of attempts that were deleted
	Duration time.Duration // of the pass

	// Oldest is the age of the oldest claim that is left; 0 if there is none. Where
	// it grows beyond the retention and two hours, cleaning does not keep up.
	Oldest time.Duration

	Err error // what ended the pass early
}

// CleanerOption configures a [Cleaner].
type CleanerOption interface{ applyCleaner(*Cleaner) }

type cleanerOptionFunc func(*Cleaner)

func (f cleanerOptionFunc) applyCleaner(c *Cleaner) { f(c) }

// WithCleanBatch sets how many rows one statement deletes, 1 to [MaxCleanBatch],
// and about how long the pause after it is, 0 or more, instead of
// [DefaultCleanBatch] and [DefaultCleanPause], which come to about 500 rows a second.
func WithCleanBatch(rows int, pause time.Duration) CleanerOption {
	return cleanerOptionFunc(func(c *Cleaner) { c.batch, c.pause = rows, pause })
}

// WithCleanObserver sets a function that is called with the result of each pass,
// by the goroutine of [Cleaner.Run], which waits for it: the seam for metrics and
// logs.
func WithCleanObserver(observe func(context.Context, CleanResult)) CleanerOption {
	return cleanerOptionFunc(func(c *Cleaner) { c.observe = observe })
}

// NewCleaner returns a Cleaner for the tables of store, which must have a
// retention. It returns [ErrInvalidOption], naming every wrong argument and
// option.
func NewCleaner(store *SQLStore, opts ...CleanerOption) (*Cleaner, error) {
	c := &Cleaner{
		store:    store,
		interval: DefaultCleanInterval,
		batch:    DefaultCleanBatch,
		pause:    DefaultCleanPause,
		observe:  func(context.Context, CleanResult) {},
	}
	for _, opt := range opts {
		opt.applyCleaner(c)
	}
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	cfg := store.config
	// The hint keeps MySQL from reading, and locking, all outputs for each batch.
	unpublished := " AND NOT EXISTS (SELECT /*+ NO_SEMIJOIN(MATERIALIZATION) */ 1 FROM " + cfg.dialect.Quote(cfg.produced) + " o" +
		" WHERE o.consumer_name = p.consumer_name AND o.message_key = p.message_key)"
	c.claims = c.statement(cfg.processed, "processed_at", unpublished)
	c.attempts = c.statement(cfg.attempts, "updated_at", "")
	c.leases = newLeaseQueries(cfg, c.lease())
	c.oldest = "SELECT " + cfg.dialect.Age("MIN(processed_at)") + " FROM " + cfg.dialect.Quote(cfg.processed)
	return c, nil
}

func (c *Cleaner) validate() error {
	errs := []error{checkInterval(c.interval), sqldb.CheckDuration("WithCleanBatch: pause", c.pause, 0)}
	if c.store == nil {
		errs = append(errs, errors.New("store is nil"))
	} else if c.store.config.retention == nil {
		errs = append(errs, errors.New("store has no retention: use WithRetention"))
	}
	if c.batch < 1 || c.batch > MaxCleanBatch {
		errs = append(errs, fmt.Errorf("WithCleanBatch: %d rows is not from 1 to %d", c.batch, MaxCleanBatch))
	}
	if c.observe == nil {
		errs = append(errs, errors.New("WithCleanObserver: function is nil"))
	}
	return errors.Join(errs...)
}

// statement deletes one batch, oldest first.
func (c *Cleaner) statement(table, column, condition string) string {
	cfg := c.store.config
	return cfg.dialect.DeleteOldest(cfg.dialect.Quote(table), column, cfg.dialect.FromNow(-*cfg.retention-cleanMargin), condition, c.batch,
		"consumer_name", "message_key")
}

// Run cleans until ctx ends.
func (c *Cleaner) Run(ctx context.Context) { c.run(ctx, c.observe) }

// Plugin runs the Cleaner as long as a Router: router.AddPlugin(cleaner.Plugin).
// Router.Close waits for it. The Router's logger gets the errors of its passes.
func (c *Cleaner) Plugin(router *message.Router) error {
	return plugin(router, "deduplicator cleaner", func(ctx context.Context) {
		c.run(ctx, func(ctx context.Context, result CleanResult) {
			if result.Err != nil && ctx.Err() == nil {
				router.Logger().Error("Cleaning of processed messages failed", result.Err, nil)
			}
			c.observe(ctx, result)
		})
	})
}

func (c *Cleaner) run(ctx context.Context, observe func(context.Context, CleanResult)) {
	loop(ctx, c.interval, func(ctx context.Context) bool {
		result, err := c.Clean(ctx)
		observe(ctx, result)
		return err == nil
	})
}

// Clean deletes all rows that are due, in small batches with pauses between them. It
// waits while another Cleaner is at work on the table. When ctx ends or the database
// fails it returns the error with what it did until then: each batch is durable by
// itself.
func (c *Cleaner) Clean(ctx context.Context) (CleanResult, error) {
	started := time.Now()
	var result CleanResult
	err := c.clean(ctx, &result)
	if err != nil {
		err = fmt.Errorf("deduplicator: clean: %w", err)
	}
	result.Duration, result.Err = time.Since(started), err
	return result, err
}

func (c *Cleaner) clean(ctx context.Context, result *CleanResult) (err error) {
	turn := &lease{store: c.store, queries: c.leases, name: cleanLeasePrefix + c.store.config.processed}
	if err := c.awaitTurn(ctx, turn); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, turn.release(ctx)) }()
	if err := c.deleteAll(ctx, turn, c.claims, &result.Rows); err != nil {
		return err
	}
	if err := c.deleteAll(ctx, turn, c.attempts, &result.Attempts); err != nil {
		return err
	}
	var age sql.NullInt64
	err = c.store.db.QueryRowContext(ctx, c.oldest).Scan(&age)
	result.Oldest = time.Duration(age.Int64) * time.Microsecond
	return err
}

// awaitTurn returns when no other Cleaner is at work on the table.
func (c *Cleaner) awaitTurn(ctx context.Context, turn *lease) error {
	for {
		ok, err := turn.acquire(ctx)
		if ok || err != nil {
			return err
		}
		if !sqldb.Pause(ctx, cleanTurn/2+rand.N(cleanTurn)) { //nolint:gosec // jitter is no secret
			return ctx.Err()
		}
	}
}

func (c *Cleaner) deleteAll(ctx context.Context, turn *lease, statement string, rows *int64) error {
	for {
		if time.Since(turn.renewed) > c.lease()/3 {
			err := turn.renew(ctx)
			if errors.Is(err, errLeaseLost) { // two at work do no harm but load
				err = c.awaitTurn(ctx, turn)
			}
			if err != nil {
				return err
			}
		}
		n, err := c.delete(ctx, statement)
		if err != nil {
			return err
		}
		*rows += n
		if n == 0 { // fewer than a batch can be what another cleaner has left
			return nil
		}
		if !sqldb.Pause(ctx, c.pause/2+rand.N(c.pause+1)) { //nolint:gosec // jitter is no secret
			return ctx.Err()
		}
	}
}

func (c *Cleaner) delete(ctx context.Context, statement string) (n int64, err error) {
	err = sqldb.Retry(ctx, aloneLimit, func() (err error) {
		n, err = sqldb.DeleteBatch(ctx, c.store.db, c.store.config.dialect, statement)
		return err
	})
	return n, err
}
