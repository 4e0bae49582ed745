package sqldb

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// Pauses returns the pauses between attempts that the database undid or refused
// because of other transactions: 5 ms, doubled up to 500 ms, with jitter.
func Pauses() *backoff.ExponentialBackOff {
	pauses := backoff.NewExponentialBackOff()
	pauses.InitialInterval, pauses.MaxInterval, pauses.Multiplier = 5*time.Millisecond, 500*time.Millisecond, 2
	return pauses
}

// Retry runs do again while its error is transient, for about as long as limit.
func Retry(ctx context.Context, limit time.Duration, do func() error) error {
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		err := do()
		if err != nil && !Transient(err) {
			err = backoff.Permanent(err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(Pauses()), backoff.WithMaxElapsedTime(limit))
	var permanent *backoff.PermanentError
	if errors.As(err, &permanent) {
		return permanent.Unwrap()
	}
	return err
}

// Pause waits for d or until ctx ends, and reports whether d passed.
func Pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
