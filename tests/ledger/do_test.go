package ledger_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

var errProvider = errors.New("503")

// The effect outlives the rollback of the transaction in which it was run, and the
// next delivery gets its result instead of calling.
func TestResultIsReplayed(t *testing.T) {
	t.Parallel()
	with(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		effect := newEffect(t, "charge", ledger.AskOperator())
		type receipt struct {
			ID   string
			Paid int64
		}
		calls := 0
		handler := func(fail error) (got receipt, err error) {
			err = k.handle("m", func(ctx context.Context) error {
				var err error
				got, err = ledger.Do(ctx, k.ledger, effect, 100, func(_ context.Context, key string) (receipt, error) {
					calls++
					require.Equal(t, "started", k.state("m"), "before the call")
					return receipt{key, 100}, nil
				})
				return errors.Join(err, fail)
			})
			return got, err
		}
		first, err := handler(errors.New("rolled back"))
		require.EqualError(t, err, "rolled back")
		require.Equal(t, "succeeded", k.state("m"))
		second, err := handler(nil)
		require.NoError(t, err)
		require.Equal(t, first, second)
		require.Equal(t, 1, calls)
		key, err := ledger.KeyFor(k.of("m"), "charge")
		require.NoError(t, err)
		require.Equal(t, receipt{key, 100}, first)
		require.Empty(t, k.unknown())
	})
}

// What follows a call that did not return nil, for each rule.
func TestStates(t *testing.T) {
	t.Parallel()
	rules := map[string]func(k *kit) ledger.Rule{
		"call again":     func(*kit) ledger.Rule { return ledger.CallAgain() },
		"retry with key": func(*kit) ledger.Rule { return ledger.RetryWithKey(24 * time.Hour) },
		"ask provider":   func(k *kit) ledger.Rule { return ledger.AskProvider(k.provider.ask) },
		"ask operator":   func(*kit) ledger.Rule { return ledger.AskOperator() },
	}
	with(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		for name, rule := range rules {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				k := newKit(t, d)
				effect := newEffect(t, "charge", rule(k))
				calls := 0
				// run is a delivery whose call ends with err; called says whether it was one.
				run := func(message string, failure error) (called bool, err error) {
					before := calls
					_, err = ledger.Do(k.of(message), k.ledger, effect, nil, func(context.Context, string) (int, error) {
						calls++
						return 7, failure
					})
					return calls > before, err
				}

				called, err := run("permanent", middleware.Permanent(errProvider))
				require.True(t, called)
				require.ErrorIs(t, err, ledger.ErrFailed)
				require.True(t, middleware.IsPermanent(err))
				require.Equal(t, "failed", k.state("permanent"))
				called, again := run("permanent", nil)
				require.False(t, called)
				require.Equal(t, err, again, "the same at each delivery")

				called, err = run("not done", ledger.NotDone(errProvider))
				require.True(t, called)
				require.ErrorIs(t, err, errProvider)
				require.False(t, middleware.IsPermanent(err))
				require.Equal(t, "planned", k.state("not done"))
				called, err = run("not done", nil)
				require.True(t, called)
				require.NoError(t, err)
				require.Equal(t, "succeeded", k.state("not done"))

				called, err = run("lost", errProvider)
				require.True(t, called)
				require.ErrorIs(t, err, ledger.ErrUnknown)
				require.ErrorIs(t, err, errProvider)
				require.Equal(t, name == "ask operator", middleware.IsPermanent(err))
				require.Equal(t, "unknown", k.state("lost"))
				require.Equal(t, []string{"lost"}, k.unknown())
				called, err = run("lost", nil)
				switch name {
				case "ask operator":
					require.False(t, called)
					require.ErrorIs(t, err, ledger.ErrUnknown)
					require.ErrorContains(t, err, "503", "why it is unknown")
					require.True(t, middleware.IsPermanent(err))
					require.Equal(t, []string{"lost"}, k.unknown())
				default: // the provider was not asked to charge anything, and says so
					require.True(t, called)
					require.NoError(t, err)
					require.Equal(t, "succeeded", k.state("lost"))
					require.Empty(t, k.unknown())
				}
			})
		}
	})
}

// A panic and a Goexit go on as they are, and leave the effect unknown.
func TestCallThatDoesNotReturn(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		effect := newEffect(t, "charge", ledger.AskOperator())
		require.PanicsWithValue(t, "boom", func() {
			_, _ = ledger.Do(k.of("panic"), k.ledger, effect, nil, func(context.Context, string) (int, error) { panic("boom") })
		})
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _ = ledger.Do(k.of("exit"), k.ledger, effect, nil, func(context.Context, string) (int, error) {
				runtime.Goexit()
				return 0, nil
			})
		}()
		<-done
		require.Equal(t, "unknown", k.state("panic"))
		require.Equal(t, "unknown", k.state("exit"))
	})
}

// A context that ends during the call does not keep the result from being recorded.
func TestResultIsRecordedAfterTheContextEnds(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		ctx, cancel := context.WithCancel(k.of("m"))
		got, err := ledger.Do(ctx, k.ledger, newEffect(t, "charge", ledger.AskOperator()), nil, func(ctx context.Context, _ string) (int, error) {
			cancel()
			<-ctx.Done()
			return 7, nil
		})
		require.NoError(t, err)
		require.Equal(t, 7, got)
		require.Equal(t, "succeeded", k.state("m"))
	})
}

// A context that ends before the call leaves nothing behind that nobody knows.
func TestContextEndsBeforeTheCall(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		ctx, cancel := context.WithCancel(k.of("m"))
		db := sql.OpenDB(sqlhook.Wrap(sqlhook.Borrow(k.db), func(_ context.Context, e sqlhook.Event) error {
			if e.Step == sqlhook.StatementDone && strings.HasPrefix(e.Query, "INSERT") {
				cancel()
			}
			return nil
		}))
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		_, err := ledger.Do(ctx, k.newLedger(db), newEffect(t, "charge", ledger.AskOperator()), nil, func(context.Context, string) (int, error) {
			t.Error("called")
			return 0, nil
		})
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, "planned", k.state("m"))
	})
}

// An answer decides for good or until the next delivery, and a provider that can't be
// asked leaves the effect listed.
func TestAskProvider(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		for _, tt := range []struct {
			name   string
			answer ledger.Answer
			err    error
			state  string
			calls  int
			want   error
		}{
			{"done", ledger.AnswerDone(7), nil, "succeeded", 1, nil},
			{"not done", ledger.AnswerNotDone(), nil, "succeeded", 2, nil},
			{"failed", ledger.AnswerFailed("declined"), nil, "failed", 1, ledger.ErrFailed},
			{"unknown", ledger.AnswerUnknown(), nil, "unknown", 1, ledger.ErrUnknown},
			{"zero", ledger.Answer{}, nil, "unknown", 1, ledger.ErrUnknown},
			{"error", ledger.AnswerDone(8), errProvider, "unknown", 1, errProvider},
			{"too large", ledger.AnswerDone(strings.Repeat("x", ledger.DefaultMaxResult)), nil, "succeeded", 1, ledger.ErrResult},
			{"other type", ledger.AnswerDone("text"), nil, "succeeded", 1, ledger.ErrResult},
		} {
			t.Run(tt.name, func(t *testing.T) {
				t.Parallel()
				k := newKit(t, d)
				calls := 0
				effect := newEffect(t, "charge", ledger.AskProvider(func(ctx context.Context, u ledger.UnknownEffect) (ledger.Answer, error) {
					key, err := ledger.KeyFor(k.of("m"), "charge")
					require.NoError(t, err)
					require.Equal(t, key, u.Key)
					require.Equal(t, []any{consumer, "m", "charge", 1, "503"}, []any{u.Consumer, u.MessageKey, u.Effect, u.Attempts, u.Reason})
					require.Empty(t, k.unknown(), "it is in progress")
					return tt.answer, tt.err
				}))
				run := func() (int, error) {
					return ledger.Do(k.of("m"), k.ledger, effect, nil, func(context.Context, string) (int, error) {
						calls++
						if calls == 1 {
							return 0, errProvider
						}
						return 7, nil
					})
				}
				_, err := run()
				require.ErrorIs(t, err, ledger.ErrUnknown)
				got, err := run()
				if tt.want == nil {
					require.NoError(t, err)
					require.Equal(t, 7, got)
				} else {
					require.ErrorIs(t, err, tt.want)
				}
				require.Equal(t, tt.calls, calls)
				require.Equal(t, tt.state, k.state("m"))
				if tt.state == "unknown" {
					require.Equal(t, []string{"m"}, k.unknown())
					require.False(t, middleware.IsPermanent(err))
				}
			})
		}
	})
}

// Of many deliveries at once one calls.
func TestManyAtOnceCallOnce(t *testing.T) {
	t.Parallel()
	with(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		effect := newEffect(t, "charge", ledger.RetryWithKey(24*time.Hour))
		var wg sync.WaitGroup
		errs := make([]error, 50)
		for i := range errs {
			wg.Go(func() { _, errs[i] = k.charge("m", effect) })
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				require.ErrorIs(t, err, ledger.ErrInProgress)
				require.ErrorIs(t, err, deduplicator.ErrInFlight, "the message goes back to the broker")
			}
		}
		require.Contains(t, errs, error(nil))
		calls, _, _ := k.provider.count()
		require.Equal(t, 1, calls)
	})
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ledger.WithMaxResult(10))
		effect := newEffect(t, "charge", ledger.AskOperator())
		ok := func(context.Context, string) (string, error) { return "ok", nil }
		never := func(context.Context, string) (string, error) {
			t.Error("called")
			return "", nil
		}

		t.Run("outside", func(t *testing.T) {
			_, err := ledger.Do(t.Context(), k.ledger, effect, nil, never)
			require.ErrorIs(t, err, ledger.ErrNoClaim)
		})
		t.Run("names B41", func(t *testing.T) {
			for _, name := range []string{"", strings.Repeat("n", 1024), "a\x00"} {
				_, err := ledger.NewEffect(name, ledger.AskOperator())
				require.ErrorIs(t, err, ledger.ErrInvalidEffect)
			}
			_, err := ledger.Do(k.of("part"), k.ledger, effect.Part(strings.Repeat("p", 300)), nil, never)
			require.ErrorIs(t, err, ledger.ErrInvalidEffect)
			require.True(t, middleware.IsPermanent(err))
			require.Empty(t, k.state("part"))
		})
		t.Run("no rule", func(t *testing.T) {
			for _, rule := range []ledger.Rule{{}, ledger.AskProvider(nil), ledger.RetryWithKey(0)} {
				_, err := ledger.NewEffect("charge", rule)
				require.ErrorIs(t, err, ledger.ErrInvalidEffect)
			}
			_, err := ledger.Do(k.of("rule"), k.ledger, ledger.Effect{}, nil, never)
			require.ErrorIs(t, err, ledger.ErrInvalidEffect)
			_, err = ledger.Do(k.of("rule"), k.ledger, newEffect(t, "short", ledger.RetryWithKey(ledger.DefaultLease)), nil, never)
			require.ErrorIs(t, err, ledger.ErrInvalidEffect)
			require.ErrorContains(t, err, "not longer than the lease")
			require.Empty(t, k.state("rule"))
		})
		t.Run("no function", func(t *testing.T) {
			_, err := ledger.Do[int](k.of("nil"), k.ledger, effect, nil, nil)
			require.ErrorIs(t, err, ledger.ErrInvalidEffect)
			require.Empty(t, k.state("nil"))
		})
		t.Run("other arguments", func(t *testing.T) {
			err := k.handle("args", func(ctx context.Context) error {
				for range 2 { // twice the same is one effect
					got, err := ledger.Do(ctx, k.ledger, effect, 100, ok)
					require.NoError(t, err)
					require.Equal(t, "ok", got)
				}
				_, err := ledger.Do(ctx, k.ledger, effect, 200, never)
				return err
			})
			require.ErrorIs(t, err, ledger.ErrArguments)
			require.Regexp(t, "comes from the message .* Effect.Part$", err.Error())
			require.True(t, middleware.IsPermanent(err))
			require.Equal(t, "succeeded", k.state("args"))
			_, err = ledger.Do(k.of("args2"), k.ledger, effect, func() {}, never)
			require.ErrorIs(t, err, ledger.ErrInvalidEffect)
		})
		t.Run("parts", func(t *testing.T) {
			for parcel := range 3 {
				got, err := ledger.Do(k.of("parts"), k.ledger, effect.Part(fmt.Sprint(parcel)), parcel, func(context.Context, string) (int, error) {
					return parcel, nil
				})
				require.NoError(t, err)
				require.Equal(t, parcel, got)
			}
		})
		t.Run("nested", func(t *testing.T) {
			_, err := ledger.Do(k.of("nested"), k.ledger, effect, nil, func(ctx context.Context, _ string) (string, error) {
				return ledger.Do(ctx, k.ledger, newEffect(t, "inner", ledger.AskOperator()), nil, never)
			})
			require.ErrorIs(t, err, ledger.ErrNested)
			require.True(t, middleware.IsPermanent(err))
			require.Equal(t, "unknown", k.state("nested"), "the outer call may have done something")
		})
		t.Run("result over the bound", func(t *testing.T) {
			calls := 0
			for range 2 {
				_, err := ledger.Do(k.of("large"), k.ledger, effect, nil, func(context.Context, string) (string, error) {
					calls++
					return strings.Repeat("x", 9), nil // and two quotes
				})
				require.ErrorIs(t, err, ledger.ErrResult)
				require.ErrorContains(t, err, "it has 11 bytes, the limit is 10")
				require.True(t, middleware.IsPermanent(err))
			}
			require.Equal(t, 1, calls)
			require.Equal(t, "succeeded", k.state("large"))
		})
		t.Run("result that can't be encoded", func(t *testing.T) {
			_, err := ledger.Do(k.of("chan"), k.ledger, effect, nil, func(context.Context, string) (chan int, error) { return nil, nil })
			require.ErrorIs(t, err, ledger.ErrResult)
			require.Equal(t, "succeeded", k.state("chan"))
		})
	})
}

// Another epoch is another effect.
func TestEpoch(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		for epoch := range 2 {
			for range 2 {
				_, err := k.charge("m", newEffect(t, "charge", ledger.AskOperator(), ledger.WithEpoch(epoch)))
				require.NoError(t, err)
			}
		}
		calls, most, _ := k.provider.count()
		require.Equal(t, 2, calls)
		require.Equal(t, 1, most, "under keys of their own")
	})
}
