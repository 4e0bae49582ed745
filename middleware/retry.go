package middleware

import (
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/cenkalti/backoff/v5"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [Retry].
const (
	DefaultInitialInterval = 100 * time.Millisecond
	DefaultMaxInterval     = 10 * time.Second
)

// Retry says how an attempt that failed is followed by the next one.
type Retry struct {
	// MaxRetries is how many attempts follow the first one, 1 or more.
	MaxRetries int

	// InitialInterval is the pause before the first retry; it doubles with each
	// one. 0 means DefaultInitialInterval. Each pause varies by half, up or down.
	InitialInterval time.Duration

	// MaxInterval is the longest pause. 0 means DefaultMaxInterval.
	MaxInterval time.Duration
}

func (r Retry) validate() error {
	var errs []error
	if r.MaxRetries < 1 {
		errs = append(errs, fmt.Errorf("MaxRetries: %d is under the least, 1; leave WithRetry out for no retries", r.MaxRetries))
	}
	if r.InitialInterval < 0 {
		errs = append(errs, fmt.Errorf("InitialInterval: %v is negative", r.InitialInterval))
	}
	if r.MaxInterval < 0 {
		errs = append(errs, fmt.Errorf("MaxInterval: %v is negative", r.MaxInterval))
	}
	if r.MaxInterval > 0 && r.MaxInterval < r.InitialInterval {
		errs = append(errs, fmt.Errorf("MaxInterval: %v is under InitialInterval, %v", r.MaxInterval, r.InitialInterval))
	}
	return errors.Join(errs...)
}

// WithRetry runs the links inside it again after an error, with a pause that
// grows and no transaction open meanwhile. It ends with the last error when the
// retries are used up, when the error is permanent (see [IsPermanent]), and when
// the message's context ends. While it pauses, the message's shard waits, so the
// order is kept.
//
// A store that is unavailable is waited for as long as it takes, without using up
// retries: consuming goes on when the database is back. A subscriber that closes
// meanwhile ends the wait with the message's context, which amqpshard and
// kafkashard do after their drain timeout.
func WithRetry(r Retry) Link {
	link := Link{name: "WithRetry", rank: rankRetry, retries: r.MaxRetries, err: r.validate()}
	if r.InitialInterval == 0 {
		r.InitialInterval = DefaultInitialInterval
	}
	if r.MaxInterval == 0 {
		r.MaxInterval = max(DefaultMaxInterval, r.InitialInterval)
	}
	link.middleware = r.middleware
	return link
}

func (r Retry) middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		d := deliveryFrom(ctx)
		intervals := backoff.ExponentialBackOff{
			InitialInterval:     r.InitialInterval,
			MaxInterval:         r.MaxInterval,
			Multiplier:          2,
			RandomizationFactor: 0.5,
		}
		for retries := 0; ; {
			started := time.Now()
			produced, err := h(msg)
			down := errors.Is(err, deduplicator.ErrUnavailable) || errors.Is(err, deduplicator.ErrOutcomeUnknown)
			if err == nil || IsPermanent(err) || retries == r.MaxRetries && !down || ctx.Err() != nil {
				return produced, err
			}
			if !down {
				retries++
			}
			d.report(msg, Retried, started, err)
			if !sqldb.Pause(ctx, intervals.NextBackOff()) {
				return produced, err
			}
			d.attempt++
		}
	}
}
