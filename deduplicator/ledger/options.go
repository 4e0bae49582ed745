package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [New].
const (
	DefaultTable     = "external_effects"
	DefaultLease     = 30 * time.Second
	DefaultMaxResult = 64 << 10
)

const (
	// MinLease is the shortest lease.
	MinLease = 100 * time.Millisecond

	// MaxMaxResult is the highest bound of a result, in bytes.
	MaxMaxResult = 8 << 20
)

// Option configures a [Ledger].
type Option interface{ apply(*config) }

type optionFunc func(*config)

func (f optionFunc) apply(c *config) { f(c) }

type config struct {
	dialect   deduplicator.Dialect
	table     string
	lease     time.Duration
	codec     Codec
	maxResult int
	handlers  *int           // nil: not declared
	keep      *time.Duration // nil: the store's retention
}

// WithTable sets the table's name, instead of [DefaultTable]: letters, digits and
// underscores, optionally after a schema and a dot.
func WithTable(name string) Option {
	return optionFunc(func(c *config) { c.table = name })
}

// WithLease sets how long an effect belongs to the process that runs it, by the
// database's clock, instead of [DefaultLease]. It is renewed every third of it while
// the call runs. When the process dies, it is what passes before another delivery
// acts on the effect. Values under [MinLease] are refused.
func WithLease(d time.Duration) Option {
	return optionFunc(func(c *config) { c.lease = d })
}

// Codec turns results into bytes and back. It is used concurrently.
type Codec interface {
	Encode(result any) ([]byte, error)
	Decode(encoded []byte, result any) error // into a pointer
}

type jsonCodec struct{}

func (jsonCodec) Encode(result any) ([]byte, error)       { return json.Marshal(result) }
func (jsonCodec) Decode(encoded []byte, result any) error { return json.Unmarshal(encoded, result) }

// WithCodec sets how results are stored, instead of JSON. All that is stored must
// stay readable.
func WithCodec(codec Codec) Option {
	return optionFunc(func(c *config) { c.codec = codec })
}

// WithMaxResult sets how many bytes an encoded result may have, 1 to
// [MaxMaxResult], instead of [DefaultMaxResult]. See [ErrResult] for what is larger.
func WithMaxResult(bytes int) Option {
	return optionFunc(func(c *config) { c.maxResult = bytes })
}

// WithSharedPool says that the ledger's pool is the one of the store, and that not
// more than n handlers of this process run at a time, in all routers together. Each
// of them holds a connection and may need a second one, so the pool must have n+1 or
// more. Without it a bounded pool that is shared is refused.
func WithSharedPool(handlers int) Option {
	return optionFunc(func(c *config) { c.handlers = &handlers })
}

// WithRetention makes [Ledger.Clean] keep effects for longer than the store's
// retention. A shorter time is refused: a message that comes again would find its
// effects forgotten and repeat them.
func WithRetention(d time.Duration) Option {
	return optionFunc(func(c *config) { c.keep = &d })
}

func newConfig(dialect deduplicator.Dialect, opts []Option) (*config, error) {
	cfg := &config{
		dialect:   dialect,
		table:     DefaultTable,
		lease:     DefaultLease,
		codec:     jsonCodec{},
		maxResult: DefaultMaxResult,
	}
	for _, opt := range opts {
		opt.apply(cfg)
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	return cfg, nil
}

func (c *config) validate() error {
	errs := []error{c.dialect.Validate(), sqldb.CheckTable("WithTable", c.table), sqldb.CheckDuration("WithLease", c.lease, MinLease)}
	if c.keep != nil {
		errs = append(errs, sqldb.CheckDuration("WithRetention", *c.keep, 0)) // the store has the least
	}
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.codec != nil, "WithCodec: codec is nil")
	check(c.maxResult >= 1 && c.maxResult <= MaxMaxResult, "WithMaxResult: %d is not 1 to %d", c.maxResult, MaxMaxResult)
	check(c.handlers == nil || *c.handlers >= 1, "WithSharedPool: %d handlers is under the least, 1", deref(c.handlers))
	return errors.Join(errs...)
}

func deref(n *int) int {
	if n == nil {
		return 0
	}
	return *n
}
