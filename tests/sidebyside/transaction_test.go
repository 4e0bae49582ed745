package sidebyside_test

import (
	"context"
	"database/sql"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	watermillmw "github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

type txKey struct{}

// transaction is the middleware that many write: begin, handler, commit.
func transaction(db *sql.DB) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			ctx, cancel := context.WithCancel(msg.Context())
			defer cancel()
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return nil, err
			}
			defer tx.Rollback() //nolint:errcheck // after Commit it does nothing
			msg.SetContext(context.WithValue(ctx, txKey{}, tx))
			produced, err := h(msg)
			if err != nil {
				return nil, err
			}
			return produced, tx.Commit()
		}
	}
}

// byHand is the side with that middleware between outer and inner ones.
func byHand(f *fixture, outer, inner []message.HandlerMiddleware) side {
	middlewares := append(append(outer, transaction(f.db)), inner...)
	return inTx(f, middlewares, func(ctx context.Context) (*sql.Tx, bool) {
		tx, ok := ctx.Value(txKey{}).(*sql.Tx)
		return tx, ok
	})
}

func stockPoison(t *testing.T, pub message.Publisher) message.HandlerMiddleware {
	t.Helper()
	poison, err := watermillmw.PoisonQueue(pub, "poison")
	require.NoError(t, err)
	return poison
}

// M8: a poison queue inside the transaction.
func TestM8PoisonQueueInsideTheTransaction(t *testing.T) {
	t.Parallel()
	// The handler writes and then fails: its write must not stay.
	scenario := func(s side) int {
		send := s.serve(func(msg *message.Message) error {
			if err := s.write(msg); err != nil {
				return err
			}
			return errTransient
		})
		await(s.T, send(event("1", "{}")), "acked")
		return s.effects()
	}

	poison := &publisher{}
	require.Equal(t, 1, scenario(byHand(setup(t, testdb.PGX), nil, []message.HandlerMiddleware{stockPoison(t, poison)})),
		"stock: the transaction sees nil and commits what the failed handler wrote")
	require.Len(t, poison.messages, 1)

	f, poison := setup(t, testdb.PGX), &publisher{}
	_, err := middleware.Chain(f.deduplicate(), middleware.WithPoisonQueue(poison, "poison"))
	require.ErrorIs(t, err, middleware.ErrInvalidOption, "that order is refused")
	require.Zero(t, scenario(ours(f, middleware.WithPoisonQueue(poison, "poison"))))
	require.Len(t, poison.messages, 1)

	// Watermill's poison queue, added after our chain, is found out by what it
	// writes into the message.
	f, poison = setup(t, testdb.PGX), &publisher{}
	s := ours(f)
	s.middlewares = append(s.middlewares, stockPoison(t, poison))
	require.Zero(t, scenario(s))
	require.Len(t, poison.messages, 1)
}

// With the poison queue inside the retry, nothing is ever retried.
func TestPoisonQueueInsideRetry(t *testing.T) {
	t.Parallel()
	scenario := func(s side) (calls, effects int) {
		var n atomic.Int32
		send := s.serve(func(msg *message.Message) error {
			if n.Add(1) == 1 {
				return errTransient
			}
			return s.write(msg)
		})
		await(s.T, send(event("1", "{}")), "acked")
		return int(n.Load()), s.effects()
	}

	poison := &publisher{}
	outer := []message.HandlerMiddleware{stockRetry(), stockPoison(t, poison)}
	calls, effects := scenario(byHand(setup(t, testdb.PGX), outer, nil))
	require.Equal(t, 1, calls, "stock")
	require.Zero(t, effects, "stock")
	require.Len(t, poison.messages, 1, "stock: a transient error is parked at once")

	f, poison := setup(t, testdb.PGX), &publisher{}
	_, err := middleware.Chain(retry(), middleware.WithPoisonQueue(poison, "poison"), f.deduplicate())
	require.ErrorIs(t, err, middleware.ErrInvalidOption, "that order is refused")
	calls, effects = scenario(ours(f, middleware.WithPoisonQueue(poison, "poison"), retry()))
	require.Equal(t, 2, calls)
	require.Equal(t, 1, effects)
	require.Empty(t, poison.messages)
}

func stockRetry() message.HandlerMiddleware {
	return watermillmw.Retry{MaxRetries: 3, InitialInterval: 5 * time.Millisecond}.Middleware
}

// A retry outside the transaction, when the transaction's context stays on the
// message.
func TestRetryAfterTheTransactionsContext(t *testing.T) {
	t.Parallel()
	scenario := func(s side) (errs []error, effects int) {
		var n atomic.Int32
		s.middlewares = append([]message.HandlerMiddleware{stockRetry(), collect(&errs)}, s.middlewares...)
		send := s.serve(func(msg *message.Message) error {
			err := s.write(msg)
			if n.Add(1) <= 2 {
				return errTransient
			}
			return err
		})
		await(s.T, send(event("1", "{}")), "acked")
		return errs, s.effects()
	}

	errs, effects := scenario(byHand(setup(t, testdb.PGX), nil, nil))
	require.ErrorIs(t, errs[0], errTransient)
	for _, err := range errs[1:4] {
		require.ErrorIs(t, err, context.Canceled, "stock: the retries start with the context of the first try")
	}
	require.Greater(t, len(errs), 4, "stock: only a redelivery by the broker helps")
	require.Equal(t, 1, effects)

	errs, effects = scenario(ours(setup(t, testdb.PGX)))
	require.Equal(t, []error{errTransient, errTransient, nil}, errs)
	require.Equal(t, 1, effects)
}

// collect notes what comes out of the middlewares inside.
func collect(errs *[]error) message.HandlerMiddleware {
	return func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			*errs = append(*errs, err)
			return produced, err
		}
	}
}

// Watermill's Timeout after the chain bounds one attempt, and the next one can
// succeed.
func TestTimeoutAfterTheChain(t *testing.T) {
	t.Parallel()
	f, poison := setup(t, testdb.PGX), &publisher{}
	s := ours(f, middleware.WithPoisonQueue(poison, "poison"), retry())
	s.middlewares = append(s.middlewares, watermillmw.Timeout(200*time.Millisecond))
	var n atomic.Int32
	send := s.serve(func(msg *message.Message) error {
		if err := s.write(msg); err != nil || n.Add(1) > 1 {
			return err
		}
		<-msg.Context().Done()
		return msg.Context().Err()
	})
	await(t, send(event("1", "{}")), "acked")
	require.EqualValues(t, 2, n.Load())
	require.Equal(t, 1, f.effects())
	require.Empty(t, poison.sent())
}

// M9: two claims of one key at once, by hand and by the store.
func TestM9TwoClaimsAtOnce(t *testing.T) {
	t.Parallel()
	for _, level := range []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable} {
		t.Run(level.String(), func(t *testing.T) {
			t.Parallel()
			f := setup(t, testdb.PGX)
			f.exec("CREATE TABLE claims (message_key text PRIMARY KEY)")
			rows, err := f.claimTwice(level)
			if level == sql.LevelReadCommitted {
				require.NoError(t, err)
				require.Zero(t, rows)
			} else {
				var refused *pgconn.PgError
				require.ErrorAs(t, err, &refused, "by hand: an error where a duplicate was to be found")
				require.Equal(t, "40001", refused.Code)
			}

			store, err := deduplicator.NewSQLStore(t.Context(), f.db, f.driver.Dialect, deduplicator.WithIsolation(level))
			require.NoError(t, err)
			claim := deduplicator.Claim{Consumer: "stock", Key: "1"}
			results := make(chan error, 2)
			running, proceed := make(chan int), make(chan struct{})
			process := func(work deduplicator.Work, want deduplicator.Outcome) {
				result, err := store.Process(t.Context(), claim, work)
				if err == nil && result.Outcome != want {
					err = errors.New("other outcome")
				}
				results <- err
			}
			go process(func(ctx context.Context) ([]deduplicator.Output, error) {
				running <- backend(ctx)
				<-proceed
				return nil, nil
			}, deduplicator.Processed)
			pid := await(t, running, "the first runs")
			go process(func(context.Context) ([]deduplicator.Output, error) {
				return nil, errors.New("ran twice")
			}, deduplicator.Duplicate)
			f.eventually("the second waits", func() bool { return f.blockedBy(pid) })
			close(proceed)
			require.NoError(t, await(t, results, "one returns"))
			require.NoError(t, await(t, results, "the other returns"))
		})
	}
}

// claimTwice inserts one key in two transactions and returns what the second one
// gets when the first one commits.
func (f *fixture) claimTwice(level sql.IsolationLevel) (int64, error) {
	f.Helper()
	const insert = "INSERT INTO claims (message_key) VALUES ('1') ON CONFLICT DO NOTHING"
	begin := func() *sql.Tx {
		tx, err := f.db.BeginTx(f.Context(), &sql.TxOptions{Isolation: level})
		require.NoError(f, err)
		return tx
	}
	first, second := begin(), begin()
	defer second.Rollback() //nolint:errcheck // the database undid it
	var pid int
	require.NoError(f, first.QueryRowContext(f.Context(), "SELECT pg_backend_pid()").Scan(&pid))
	_, err := first.ExecContext(f.Context(), insert)
	require.NoError(f, err)
	type answer struct {
		rows int64
		err  error
	}
	answers := make(chan answer, 1)
	go func() {
		result, err := second.ExecContext(f.Context(), insert)
		if err != nil {
			answers <- answer{0, err}
			return
		}
		rows, err := result.RowsAffected()
		answers <- answer{rows, err}
	}()
	f.eventually("the second claim waits", func() bool { return f.blockedBy(pid) })
	require.NoError(f, first.Commit())
	got := await(f.T, answers, "the second claim returns")
	return got.rows, got.err
}
