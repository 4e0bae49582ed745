package ledger_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// B105: a call that takes three times the lease keeps it, so that a second worker
// does not call, whatever the rule is.
func TestCallLongerThanTheLeaseB105(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		const lease = 3 * time.Second
		k := newKit(t, d, ledger.WithLease(lease))
		effect := newEffect(t, "charge", ledger.CallAgain())
		called, first := make(chan struct{}), make(chan error)
		go func() {
			_, err := ledger.Do(k.of("m"), k.ledger, effect, 100, func(ctx context.Context, key string) (string, error) {
				close(called)
				select {
				case <-time.After(3 * lease):
				case <-ctx.Done():
					return "", context.Cause(ctx)
				}
				return key, nil
			})
			first <- err
		}()
		<-called
		for second := 0; ; second++ {
			select {
			case err := <-first:
				require.NoError(t, err)
				require.Positive(t, second)
				require.Equal(t, "succeeded", k.state("m"))
				return
			case <-time.After(lease / 10):
				_, err := k.charge("m", effect)
				if k.state("m") != "succeeded" { // otherwise it just ended
					require.ErrorIs(t, err, ledger.ErrInProgress)
				}
				calls, _, _ := k.provider.count()
				require.Zero(t, calls)
			}
		}
	})
}

// Trap 8: an owner that was away for longer than its lease can't complete what
// another has taken over: neither a result nor a failure, and its transaction rolls
// back. Its call is told.
func TestOwnerThatWasAwayIsFenced(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		for name, failure := range map[string]error{
			"result": nil, "unknown": errProvider, "permanent": middleware.Permanent(errProvider), "not done": ledger.NotDone(errProvider),
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				k := newKit(t, d, ledger.WithLease(3*time.Second))
				effect := newEffect(t, "charge", ledger.RetryWithKey(24*time.Hour))
				_, err := ledger.Do(k.of("m"), k.ledger, effect, 100, func(ctx context.Context, _ string) (string, error) {
					// While it is away, its lease ends and another delivery takes over.
					require.Eventually(t, func() bool {
						k.later(time.Minute)
						got, err := k.charge("m", effect)
						return err == nil && got != ""
					}, patience, time.Millisecond)
					select { // the heartbeat finds out
					case <-ctx.Done():
						require.ErrorIs(t, context.Cause(ctx), ledger.ErrFenced)
					case <-time.After(patience):
						t.Error("the call was not told")
					}
					return "late", failure
				})
				require.ErrorIs(t, err, ledger.ErrFenced)
				require.ErrorIs(t, err, deduplicator.ErrInFlight, "the message goes back to the broker")
				require.False(t, middleware.IsPermanent(err))
				if failure != nil {
					require.ErrorContains(t, err, failure.Error())
				}
				got, err := k.charge("m", effect)
				require.NoError(t, err)
				require.NotEqual(t, "late", got)
				calls, _, _ := k.provider.count()
				require.Equal(t, 1, calls)
			})
		}
	})
}

// A retry that could reach the provider after it has forgotten the key is refused.
func TestRedeliveryAfterDays(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		k.provider.keys = true
		effect := newEffect(t, "charge", ledger.RetryWithKey(24*time.Hour))
		k.provider.set(func() { k.provider.lose = true })
		for _, message := range []string{"lost", "in time"} {
			_, err := k.charge(message, effect)
			require.ErrorIs(t, err, ledger.ErrUnknown)
			require.False(t, middleware.IsPermanent(err))
		}
		k.provider.set(func() { k.provider.lose = false })
		_, err := k.charge("done", effect)
		require.NoError(t, err)

		k.later(24*time.Hour - 2*ledger.DefaultLease)
		_, err = k.charge("in time", effect)
		require.NoError(t, err)

		k.later(2 * ledger.DefaultLease)
		k.provider.set(func() { k.provider.charged = map[string]int{} }) // it has forgotten
		_, err = k.charge("lost", effect)
		require.ErrorIs(t, err, ledger.ErrKeyExpired)
		require.ErrorIs(t, err, ledger.ErrUnknown)
		require.ErrorContains(t, err, "the key is good for 24h0m0s")
		require.True(t, middleware.IsPermanent(err), "parked")
		require.Equal(t, []string{"lost"}, k.unknown())

		k.later(30 * 24 * time.Hour)
		got, err := k.charge("done", effect)
		require.NoError(t, err, "what is known stays known")
		require.NotEmpty(t, got)
		_, _, total := k.provider.count()
		require.Zero(t, total)
	})
}

// An operator's answer is what the next delivery gets.
func TestResolve(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		effect := newEffect(t, "charge", ledger.AskOperator())
		answers := map[string]ledger.Answer{
			"done": ledger.AnswerDone("by hand"), "failed": ledger.AnswerFailed("declined"),
			"not done": ledger.AnswerNotDone(), "unknown": ledger.AnswerUnknown(),
		}
		k.provider.set(func() { k.provider.lose = true })
		for message := range answers {
			_, err := k.charge(message, effect)
			require.ErrorIs(t, err, ledger.ErrUnknown)
		}
		k.provider.set(func() { k.provider.lose = false })
		listed, err := k.ledger.Unknown(t.Context(), 1)
		require.NoError(t, err)
		require.Len(t, listed, 1)
		listed, err = k.ledger.Unknown(t.Context(), 10)
		require.NoError(t, err)
		require.Len(t, listed, len(answers))
		for _, u := range listed {
			key, err := ledger.KeyFor(k.of(u.MessageKey), "charge")
			require.NoError(t, err)
			require.Equal(t, []any{consumer, "charge", 0, key, 1}, []any{u.Consumer, u.Effect, u.Epoch, u.Key, u.Attempts})
			require.Contains(t, u.Reason, "EOF")
			require.Greater(t, u.Age, -time.Second)
			require.Less(t, u.Age, patience)
			require.NoError(t, k.ledger.Resolve(t.Context(), u, answers[u.MessageKey]))
		}
		require.Equal(t, []string{"unknown"}, k.unknown())

		got, err := k.charge("done", effect)
		require.NoError(t, err)
		require.Equal(t, "by hand", got)
		_, err = k.charge("failed", effect)
		require.ErrorIs(t, err, ledger.ErrFailed)
		require.ErrorContains(t, err, "declined")
		calls, _, _ := k.provider.count()
		got, err = k.charge("not done", effect)
		require.NoError(t, err)
		require.NotEmpty(t, got)
		after, _, _ := k.provider.count()
		require.Equal(t, calls+1, after)

		u := listed[0]
		require.ErrorIs(t, k.ledger.Resolve(t.Context(), u, ledger.AnswerDone(func() {})), ledger.ErrResult)
		_, err = k.ledger.Unknown(t.Context(), 0)
		require.ErrorIs(t, err, ledger.ErrInvalidOption)
	})
}

// B21: what was listed as unknown and has gone on since is not touched by an answer
// that comes late: not while it runs, not when it is done, not when it is unknown anew.
func TestLateAnswerChangesNothingB21(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		effect := newEffect(t, "charge", ledger.CallAgain())
		late := func(message string) {
			t.Helper()
			listed, err := k.ledger.Unknown(t.Context(), 10)
			require.NoError(t, err)
			require.Len(t, listed, 1)
			require.Equal(t, message, listed[0].MessageKey)
			_, err = ledger.Do(k.of(message), k.ledger, effect, 100, func(context.Context, string) (string, error) {
				err := k.ledger.Resolve(t.Context(), listed[0], ledger.AnswerNotDone())
				require.ErrorIs(t, err, ledger.ErrNotUnknown, "while it runs")
				require.Equal(t, "started", k.state(message))
				if message == "unknown" {
					return "", errProvider
				}
				return "receipt", nil
			})
			if message == "done" {
				require.NoError(t, err)
			}
			before := k.state(message)
			require.ErrorIs(t, k.ledger.Resolve(t.Context(), listed[0], ledger.AnswerNotDone()), ledger.ErrNotUnknown)
			require.Equal(t, before, k.state(message))
		}
		for _, message := range []string{"done", "unknown"} {
			_, err := ledger.Do(k.of(message), k.ledger, effect, 100, func(context.Context, string) (string, error) { return "", errProvider })
			require.ErrorIs(t, err, ledger.ErrUnknown)
			late(message)
		}
	})
}

// Nothing is forgotten that a message could still ask for, and nothing at all that is
// unknown.
func TestCleanedTooEarlyIsRefused(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		_, err := k.ledger.Clean(t.Context())
		require.ErrorIs(t, err, ledger.ErrNoRetention)

		store, err := deduplicator.NewSQLStore(t.Context(), k.storeDB, d.Dialect, deduplicator.WithRetention(48*time.Hour))
		require.NoError(t, err)
		k.store = store
		_, err = ledger.New(t.Context(), store, k.db, d.Dialect, ledger.WithRetention(47*time.Hour))
		require.ErrorIs(t, err, ledger.ErrInvalidOption)
		require.ErrorContains(t, err, "47h0m0s is under the store's retention, 48h0m0s")
		k.ledger = k.newLedger(k.db)
		longer := k.newLedger(k.db, ledger.WithRetention(100*time.Hour))

		effect := newEffect(t, "charge", ledger.AskOperator())
		endings := map[string]error{
			"succeeded": nil, "failed": middleware.Permanent(errProvider), "planned": ledger.NotDone(errProvider), "unknown": errProvider,
		}
		for message, failure := range endings {
			_, err := ledger.Do(k.of(message), k.ledger, effect, nil, func(context.Context, string) (int, error) { return 1, failure })
			require.Equal(t, failure == nil, err == nil)
			require.Equal(t, message, k.state(message))
		}
		clean := func(l *ledger.Ledger, want int64) {
			t.Helper()
			n, err := l.Clean(t.Context())
			require.NoError(t, err)
			require.Equal(t, want, n)
		}
		k.later(48*time.Hour + 59*time.Minute)
		clean(k.ledger, 0)
		k.later(2 * time.Minute)
		clean(longer, 0)
		clean(k.ledger, 3)
		clean(k.ledger, 0)
		require.Equal(t, []string{"unknown"}, k.unknown())
		for message := range endings {
			require.Equal(t, message == "unknown", k.state(message) != "")
		}

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = k.ledger.Clean(ctx)
		require.True(t, errors.Is(err, context.Canceled), err)
	})
}
