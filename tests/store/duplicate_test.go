package store_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"os"
	osexec "os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestSharedMetadataFields(t *testing.T) {
	t.Parallel()
	require.Equal(t, amqpshard.RedeliveredMetadata, metadata.Redelivered)
	require.Equal(t, ordering.PartitionKeyMetadata, metadata.PartitionKey)
}

// A message that this process saw committed is answered without the database, unless
// its content is another one: the database has the stored fingerprint.
func TestKnownKeysNeedNoDatabase(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		store, other := newStore(t, db, d), newStore(t, db, d)
		with := func(key, fingerprint string) deduplicator.Claim {
			claim := claimOf(key)
			claim.Fingerprint = []byte(fingerprint)
			return claim
		}
		process := func(store *deduplicator.SQLStore, claim deduplicator.Claim, outputs ...deduplicator.Output) deduplicator.Result {
			result, err := store.Process(t.Context(), claim, func(context.Context) ([]deduplicator.Output, error) { return outputs, nil })
			require.NoError(t, err)
			return result
		}
		output := deduplicator.Output{Topic: "t", UUID: "u"}
		process(store, with("processed", "f"))
		process(other, with("seen", "f"))
		process(store, with("seen", "f")) // learned from the database
		process(store, with("hint", "f"))
		process(store, with("forgotten", "f"), output)
		require.NoError(t, store.Forget(t.Context(), claimOf("forgotten")))
		process(store, with("outputs", "f"), output)
		process(other, with("forgotten by the other", "f"), output)
		require.Len(t, process(store, with("forgotten by the other", "f")).Outputs, 1)
		require.NoError(t, other.Forget(t.Context(), claimOf("forgotten by the other")))
		failed, err := store.Process(t.Context(), with("failed", "f"), func(context.Context) ([]deduplicator.Output, error) {
			return nil, errors.New("planned")
		})
		require.Error(t, err)
		require.Zero(t, failed)

		for _, key := range []string{"processed", "seen", "forgotten"} {
			_, err = store.Process(t.Context(), with(key, "other"), noWork(t))
			var conflict *deduplicator.ConflictError
			require.ErrorAs(t, err, &conflict, key)
			require.Equal(t, []byte("f"), conflict.Stored)
		}

		require.NoError(t, db.Close())
		for _, key := range []string{"processed", "seen", "forgotten"} {
			result, err := store.Process(t.Context(), with(key, "f"), noWork(t))
			require.NoError(t, err, key)
			require.Equal(t, deduplicator.Result{Outcome: deduplicator.Duplicate}, result, key)
			_, err = store.Process(t.Context(), with(key, "other"), noWork(t))
			require.ErrorIs(t, err, deduplicator.ErrUnavailable, key)
		}
		for _, key := range []string{"outputs", "forgotten by the other", "failed", "new"} {
			_, err := store.Process(t.Context(), with(key, "f"), noWork(t))
			require.ErrorIs(t, err, deduplicator.ErrUnavailable, key)
		}
	})
}

// noTx is a connector whose connections begin no transactions.
type noTx struct {
	driver driver.Driver
	dsn    string
}

func (c *noTx) Driver() driver.Driver { return c.driver }

func (c *noTx) Connect(context.Context) (driver.Conn, error) {
	conn, err := c.driver.Open(c.dsn)
	return noTxConn{conn}, err
}

type noTxConn struct{ driver.Conn }

var errNoTx = errors.New("a transaction was begun")

func (noTxConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return nil, errNoTx }

// A redelivery is answered before a transaction is opened.
func TestRedeliveredNeedsNoTransaction(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		database := testdb.Create(t, d)
		plain := database.Open(t)
		migrate(t, plain, d)
		first := newStore(t, plain, d)
		for _, key := range []string{"a", "b"} {
			claim := claimOf(key)
			claim.Fingerprint = []byte("f")
			_, err := first.Process(t.Context(), claim, func(context.Context) ([]deduplicator.Output, error) {
				return []deduplicator.Output{{Topic: "t", UUID: key}}, nil
			})
			require.NoError(t, err)
		}
		require.NoError(t, first.Forget(t.Context(), claimOf("b")))

		db := sql.OpenDB(&noTx{plain.Driver(), database.DSN})
		t.Cleanup(func() { _ = db.Close() })
		store := newStore(t, db, d, deduplicator.WithKnownKeys(0))
		hint := func(key, fingerprint string) deduplicator.Claim {
			claim := claimOf(key)
			claim.Redelivered, claim.Fingerprint = true, []byte(fingerprint)
			return claim
		}
		result, err := store.Process(t.Context(), hint("a", "f"), noWork(t))
		require.NoError(t, err)
		require.Equal(t, deduplicator.Duplicate, result.Outcome)
		require.Len(t, result.Outputs, 1)
		result, err = store.Process(t.Context(), hint("b", "f"), noWork(t))
		require.NoError(t, err)
		require.Equal(t, deduplicator.Result{Outcome: deduplicator.Duplicate}, result)
		_, err = store.Process(t.Context(), hint("a", "other"), noWork(t))
		require.ErrorIs(t, err, deduplicator.ErrConflict)

		// What is not found is claimed as ever, and so is what has no hint.
		_, err = store.Process(t.Context(), hint("new", "f"), noWork(t))
		require.ErrorIs(t, err, errNoTx)
		_, err = store.Process(t.Context(), claimOf("a"), noWork(t))
		require.ErrorIs(t, err, errNoTx)
	})
}

// killVariable, with the dialect, makes TestKilledByItsMessage the process that
// dies: it has the DSN.
const killVariable = "TEST_KILLED_BY_ITS_MESSAGE"

// A message that kills its process at each delivery is refused in the end,
// although the broker counts nothing; one that is killed once is processed.
func TestKilledByItsMessage(t *testing.T) {
	t.Parallel()
	const limit = 3
	opts := []deduplicator.Option{deduplicator.WithMaxAttempts(limit)}
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		if dsn := os.Getenv(killVariable + string(d.Dialect)); dsn != "" {
			database := testdb.Database{Driver: d, DSN: dsn}
			store := newStore(t, database.Open(t), d, opts...)
			_, err := store.Process(t.Context(), claimOf("deadly"), func(context.Context) ([]deduplicator.Output, error) {
				return nil, syscall.Kill(os.Getpid(), syscall.SIGKILL)
			})
			t.Fatal("alive", err)
		}
		database := testdb.Create(t, d)
		db := database.Open(t)
		migrate(t, db, d)
		deliver := func() {
			command := osexec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestKilledByItsMessage$/^"+d.Name+"$")
			command.Env = append(os.Environ(), killVariable+string(d.Dialect)+"="+database.DSN)
			out, err := command.CombinedOutput()
			var exit *osexec.ExitError
			require.ErrorAs(t, err, &exit, string(out))
			require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal(), string(out))
		}
		for range limit {
			deliver()
		}
		store := newStore(t, db, d, opts...)
		_, err := store.Process(t.Context(), claimOf("deadly"), noWork(t))
		require.ErrorIs(t, err, deduplicator.ErrTooManyAttempts)
		require.EqualError(t, err, fmt.Sprintf("%v: %d of %d", deduplicator.ErrTooManyAttempts, limit+1, limit))

		deliver()
		result, err := store.Process(t.Context(), claimOf("deadly"), func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
		require.NoError(t, err)
		require.Equal(t, deduplicator.Processed, result.Outcome)
		var left int
		require.NoError(t, db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM message_attempts").Scan(&left))
		require.Zero(t, left)
	})
}

// What is not an attempt does not count: the key is in flight.
func TestInFlightIsNoAttempt(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		if d.Dialect == deduplicator.SQLite {
			return // nobody can write while a twin is at it, so it never comes to a count
		}
		db := testdb.Open(t, d)
		migrate(t, db, d)
		store := newStore(t, db, d, deduplicator.WithMaxAttempts(1), deduplicator.WithClaimTimeout(time.Second))
		planned := errors.New("planned")
		_, err := store.Process(t.Context(), claimOf("k"), func(context.Context) ([]deduplicator.Output, error) {
			for range 3 {
				_, err := store.Process(t.Context(), claimOf("k"), noWork(t))
				require.ErrorIs(t, err, deduplicator.ErrInFlight)
			}
			return nil, planned
		})
		require.Equal(t, planned, err)
		var attempts int
		require.NoError(t, db.QueryRowContext(t.Context(), "SELECT attempts FROM message_attempts").Scan(&attempts))
		require.Equal(t, 1, attempts)
		_, err = store.Process(t.Context(), claimOf("k"), noWork(t))
		require.ErrorIs(t, err, deduplicator.ErrTooManyAttempts)
	})
}

// Nor does an attempt that was taken away from it: Kafka ends the running handlers of a
// group each time a member joins or leaves, so a rolling deployment would use all up.
func TestCancelledDeliveryIsNoAttempt(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		store := newStore(t, db, d, deduplicator.WithMaxAttempts(1))
		for range 3 {
			ctx, cancel := context.WithCancel(t.Context())
			_, err := store.Process(ctx, claimOf("k"), func(ctx context.Context) ([]deduplicator.Output, error) {
				cancel()
				return nil, ctx.Err()
			})
			require.ErrorIs(t, err, context.Canceled)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := store.Process(ctx, claimOf("k"), func(context.Context) ([]deduplicator.Output, error) { return nil, errors.New("planned") })
		require.EqualError(t, err, "planned")
		_, err = store.Process(t.Context(), claimOf("k"), noWork(t))
		require.ErrorIs(t, err, deduplicator.ErrTooManyAttempts)
	})
}

// A message that was acknowledged without being processed has all its attempts when it
// comes again: after a fault was mended an operator publishes it once more.
func TestAcknowledgedMessageHasNewAttempts(t *testing.T) {
	t.Parallel()
	const limit = 3
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		deliver := func(failure error, links ...middleware.Link) (runs int, err error) {
			store := newStore(t, db, d, deduplicator.WithMaxAttempts(limit))
			chain, err := middleware.Chain(append(links,
				middleware.WithRetry(middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond}),
				middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID()), middleware.WithConsumer("stock")))...)
			require.NoError(t, err)
			handler := func(*message.Message) ([]*message.Message, error) {
				runs++
				return nil, failure
			}
			for _, link := range slices.Backward(chain) {
				handler = link(handler)
			}
			_, err = handler(message.NewMessageWithContext(t.Context(), "k", nil))
			return runs, err
		}
		park := middleware.WithPoisonQueue(published{}, "poison")
		for _, failure := range []error{errors.New("planned"), middleware.Permanent(errors.New("planned")), ordering.ErrStale} {
			for range 2 * limit {
				runs, err := deliver(failure, park)
				require.NoError(t, err)
				want := 2
				if middleware.IsPermanent(failure) || errors.Is(failure, ordering.ErrStale) {
					want = 1
				}
				require.Equal(t, want, runs, "%v", failure)
			}
		}

		// One that goes back to the broker keeps its count.
		runs, err := deliver(errors.New("planned"))
		require.EqualError(t, err, "planned")
		require.Equal(t, 2, runs)
		runs, err = deliver(errors.New("planned"))
		require.ErrorIs(t, err, deduplicator.ErrTooManyAttempts)
		require.Equal(t, 1, runs)
	})
}

// published is a publisher that every message gets through.
type published struct{}

func (published) Publish(string, ...*message.Message) error { return nil }
func (published) Close() error                              { return nil }
