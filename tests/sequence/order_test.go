package sequence_test

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

const (
	processed = middleware.Processed
	duplicate = middleware.Duplicate
	stale     = middleware.Stale
	deferred  = middleware.Deferred
	released  = middleware.Released
	retried   = middleware.Retried
	blocked   = middleware.EntityBlocked
	skipped   = middleware.GapSkipped
	reset     = middleware.EntityReset
	failed    = middleware.Failed
)

func TestInOrder(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		for seq := int64(1); seq <= 4; seq++ {
			k.send(seq, processed)
		}
		k.sendAs("other", 0, 1, processed)
		k.applied("e", series(1, 4)...)
		k.applied("other", "0/1")
	})
}

// B82: what was seen, and what is older, is acknowledged and counted.
func TestOutOfDateB82(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		first := k.event("e", 0, 1)
		require.NoError(t, k.process(first))
		require.NoError(t, k.process(first.Copy()))
		require.Equal(t, []middleware.Outcome{processed, duplicate}, k.outcomes())
		k.send(1, stale)
		k.send(2, processed)
		k.send(1, stale)
		k.send(2, stale)
		k.send(4, deferred)
		k.send(4, stale) // it is parked already
		k.sendAs("e", 3, 1, processed, reset)
		k.sendAs("e", 2, 7, stale)
		k.sendAs("e", 0, 3, stale)
		k.applied("e", "0/1", "0/2", "3/1")
		k.parked("e")
	})
}

func TestOtherContentIsAConflict(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		conflict := func(seq int64) {
			t.Helper()
			other := k.event("e", 0, seq)
			other.Payload = []byte("something else")
			err := k.process(other)
			require.ErrorIs(t, err, ordering.ErrSequenceConflict)
			require.True(t, middleware.IsPermanent(err))
			var sequence *ordering.SequenceError
			require.ErrorAs(t, err, &sequence)
			require.Equal(t, ordering.Position{Seq: seq}, sequence.At)
			require.Equal(t, []middleware.Outcome{middleware.Conflict}, k.outcomes())
		}
		k.send(1, processed) // an insert
		conflict(1)
		k.send(2, processed) // an update
		conflict(2)
		k.send(4, deferred)
		conflict(4)
		k.send(3, processed, released) // from the parked row
		conflict(4)
		k.send(5, processed)
		k.applied("e", series(1, 5)...)
	})
}

// The default: a gap parks what follows, whatever closes it releases it.
func TestGapParksAndReleases(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		k.send(3, deferred) // the first that is seen of it
		k.send(1, processed)
		k.send(5, deferred)
		k.send(4, deferred)
		k.send(7, deferred)
		k.applied("e", "0/1")
		k.parked("e", "0/3 gap", "0/4 gap", "0/5 gap", "0/7 gap")
		k.send(2, processed, released, released, released)
		k.applied("e", series(1, 5)...)
		k.parked("e", "0/7 gap")
		k.send(6, processed, released)
		k.applied("e", series(1, 7)...)
		k.parked("e")
		k.send(8, processed)
	})
}

// The handler can't tell a released message from one that comes in time.
func TestReleasedMessageIsAsItCame(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		early, empty := k.event("e", 0, 2), k.event("e", 0, 3)
		early.Payload = message.Payload("\x00\xff payload")
		empty.Payload = nil
		empty.UUID = "no uuid\x00\xff"
		require.NoError(t, k.process(empty))
		require.NoError(t, k.process(early))
		var got []*message.Message
		k.failWith(func(msg *message.Message) error {
			require.NoError(t, msg.Context().Err())
			got = append(got, msg.Copy())
			return nil
		})
		require.NoError(t, k.process(k.event("e", 0, 1)))
		require.Len(t, got, 3)
		for i, want := range []*message.Message{early, empty} {
			require.Equal(t, want.UUID, got[i+1].UUID)
			require.Equal(t, want.Metadata, got[i+1].Metadata)
			require.Equal(t, string(want.Payload), string(got[i+1].Payload))
		}
	})
}

// B83: history is gone, so the next event is far ahead.
func TestStartPoliciesB83(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		database := migrate(t, d)
		first := instance(t, database, ordering.WithStart(ordering.AcceptFirstSeen()))
		first.sendAs("seen", 2, 25, processed)
		first.sendAs("seen", 2, 24, stale)
		first.sendAs("seen", 2, 26, processed)
		first.sendAs("seen", 2, 28, deferred)
		first.sendAs("last", 0, math.MaxInt64, processed)
		first.sendAs("last", 0, math.MaxInt64, stale)

		required := instance(t, database)
		required.sendAs("required", 0, 25, deferred)
		required.parked("required", "0/25 gap")
		required.sendAs("new", 7, 1, processed)

		_, err := first.db.ExecContext(t.Context(), "CREATE TABLE snapshots (entity varchar(64) PRIMARY KEY, seq bigint NOT NULL)")
		require.NoError(t, err)
		_, err = first.db.ExecContext(t.Context(), "INSERT INTO snapshots VALUES ('base', 10)")
		require.NoError(t, err)
		base := instance(t, database, ordering.WithStart(ordering.Baseline(func(ctx context.Context, tx *sql.Tx, entity string) (at ordering.Position, err error) {
			err = tx.QueryRowContext(ctx, d.Dialect.Rebind("SELECT seq FROM snapshots WHERE entity = ?"), entity).Scan(&at.Seq)
			return at, err
		})))
		base.sendAs("base", 0, 10, stale)
		base.sendAs("base", 0, 12, deferred)
		base.sendAs("base", 0, 11, processed, released)
		base.applied("base", "0/11", "0/12")
		require.ErrorIs(t, base.process(base.event("nobody", 0, 1)), sql.ErrNoRows)
	})
}

func TestEpochs(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		k.sendAs("e", 1, 1, processed)
		k.sendAs("e", 1, 3, deferred)
		k.sendAs("e", 2, 3, deferred)
		k.sendAs("e", 2, 2, deferred)
		k.sendAs("e", 1, 2, processed, released)
		k.sendAs("e", 1, 5, deferred)
		k.parked("e", "1/5 gap", "2/2 gap", "2/3 gap")
		k.sendAs("e", 2, 1, processed, reset, released, released)
		k.applied("e", "1/1", "1/2", "1/3", "2/1", "2/2", "2/3")
		k.parked("e")
		k.sendAs("e", 1, 4, stale)

		// The epoch begins while the entity is blocked.
		k.failAt(4, middleware.Permanent(errors.New("bad")))
		k.sendAs("e", 2, 4, deferred, blocked)
		k.sendAs("e", 3, 2, deferred)
		k.sendAs("e", 3, 1, deferred)
		k.failWith(nil)
		_, err := k.operator.Retry(t.Context(), consumer, "e")
		require.NoError(t, err)
		k.release(released, reset, released, released)
		k.applied("e", "1/1", "1/2", "1/3", "2/1", "2/2", "2/3", "2/4", "3/1", "3/2")
		k.parked("e")
	})
}

func TestReject(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithGap(ordering.Reject))
		k.send(1, processed)
		err := k.process(k.event("e", 0, 3))
		require.ErrorIs(t, err, ordering.ErrGap)
		require.False(t, middleware.IsPermanent(err), "the predecessor may come meanwhile")
		require.Equal(t, []middleware.Outcome{retried, failed}, k.outcomes())
		k.parked("e")
		k.send(2, processed)
		k.send(3, processed)
		k.applied("e", series(1, 3)...)
	})
}

// B80: a sequence number that is none goes to the poison queue.
func TestInvalidSequenceB80(t *testing.T) {
	t.Parallel()
	k := newKit(t, testdb.SQLite)
	for field, values := range map[string][]string{
		"seq":    {"", "0", "-1", "01", "1e3", "9223372036854775808"},
		"epoch":  {"", "-1", "x"},
		"entity": {""},
	} {
		for _, value := range values {
			msg := k.event("e", 0, 1)
			msg.Metadata[field] = value
			err := k.process(msg)
			require.True(t, middleware.IsPermanent(err), "%s %q: %v", field, value, err)
			require.Equal(t, []middleware.Outcome{failed}, k.outcomes())
		}
	}
	_, err := k.sequence.ProcessTx(t.Context(), nil, ordering.SequencedDelivery{Event: ordering.SequencedEvent{Position: ordering.Position{Epoch: -1, Seq: 1}}})
	require.ErrorIs(t, err, ordering.ErrInvalidSequence)
	k.applied("e")
}

// Events say which entity they are about, also those about other messages than the
// one that was delivered.
func TestEventsNameTheEntity(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithReleaseBatch(1))
		for _, seq := range []int64{4, 3, 2, 1, 1} {
			require.NoError(t, k.process(k.event("order 7", 0, seq)))
		}
		require.NoError(t, k.releaser().Release(t.Context()))
		k.failAt(5, middleware.Permanent(errPlanned))
		require.NoError(t, k.process(k.event("order 7", 0, 5)))
		entities := map[middleware.Outcome]string{}
		for _, event := range k.events {
			require.Equal(t, "order 7", event.Entity, "%v", event)
			entities[event.Outcome] = event.Entity
		}
		require.Len(t, entities, 5, "processed, deferred, released, stale and blocked: %v", entities)
	})
}
