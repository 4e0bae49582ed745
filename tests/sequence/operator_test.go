package sequence_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// blockedAt2 is a consumer whose entity "e" is blocked by event 2; 3 and 5 wait.
func blockedAt2(t *testing.T, d testdb.Driver) *kit {
	t.Helper()
	k := newKit(t, d)
	k.send(1, processed)
	k.failAt(2, middleware.Permanent(errPlanned))
	k.send(2, deferred, blocked)
	k.failWith(nil)
	k.send(3, deferred)
	k.send(5, deferred)
	k.parked("e", "0/2 failed", "0/3 blocked", "0/5 blocked")
	return k
}

func TestOperatorList(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := blockedAt2(t, d)
		k.sendAs("E", 0, 3, deferred)
		list := func(filter ordering.ParkedFilter) []string {
			t.Helper()
			listed, err := k.operator.List(t.Context(), filter)
			require.NoError(t, err)
			got := []string{}
			for _, m := range listed {
				got = append(got, m.Entity+" "+m.Position.String())
			}
			return got
		}
		require.Equal(t, []string{"E 0/3", "e 0/2", "e 0/3", "e 0/5"}, list(ordering.ParkedFilter{}))
		require.Equal(t, []string{"E 0/3", "e 0/2"}, list(ordering.ParkedFilter{Limit: 2}))
		require.Equal(t, []string{"e 0/2"}, list(ordering.ParkedFilter{Reason: "failed"}))
		require.Equal(t, []string{"e 0/3", "e 0/5"}, list(ordering.ParkedFilter{Consumer: consumer, Entity: "e", Reason: "blocked"}))
		require.Empty(t, list(ordering.ParkedFilter{Consumer: "Stock"}))

		listed, err := k.operator.List(t.Context(), ordering.ParkedFilter{Entity: "e", Limit: 1})
		require.NoError(t, err)
		m := listed[0]
		require.Equal(t, consumer, m.Consumer)
		require.Equal(t, "planned", m.Error)
		require.Equal(t, "planned", m.EntityBlocked)
		require.Equal(t, ordering.Position{Seq: 1}, m.EntityLast)
		require.Equal(t, ordering.DefaultReleaseAttempts, m.Attempts)
		require.Equal(t, "e 0/2", string(m.Payload))
		require.Equal(t, "\x00é", m.Metadata["\xff"])

		for _, filter := range []ordering.ParkedFilter{{Limit: -1}, {Limit: 10_001}, {Reason: "other"}} {
			_, err := k.operator.List(t.Context(), filter)
			require.ErrorIs(t, err, ordering.ErrInvalidOption)
		}
	})
}

func TestOperatorRetry(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := blockedAt2(t, d)
		action, err := k.operator.Retry(t.Context(), consumer, "e")
		require.NoError(t, err)
		require.Equal(t, ordering.OperatorAction{
			Consumer: consumer, Entity: "e", Unblocked: "planned", Before: ordering.Position{Seq: 1}, After: ordering.Position{Seq: 1},
		}, action)
		k.parked("e", "0/2 gap", "0/3 gap", "0/5 gap")
		_, err = k.operator.Retry(t.Context(), consumer, "e")
		require.ErrorIs(t, err, ordering.ErrNotBlocked)
		k.send(4, deferred, released, released, released, released)
		k.applied("e", series(1, 5)...)
	})
}

func TestOperatorSkip(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := blockedAt2(t, d)
		action, err := k.operator.Skip(t.Context(), consumer, "e")
		require.NoError(t, err)
		require.Equal(t, ordering.Position{Seq: 2}, action.After)
		require.Len(t, action.Deleted, 1)
		require.Equal(t, "e 0/2", string(action.Deleted[0].Payload))
		_, err = k.operator.Skip(t.Context(), consumer, "e")
		require.ErrorIs(t, err, ordering.ErrNotBlocked, "3 can be released")
		k.release(released)
		k.send(2, stale)
		action, err = k.operator.Skip(t.Context(), consumer, "e") // the gap before 5
		require.NoError(t, err)
		require.Equal(t, ordering.Position{Seq: 4}, action.After)
		require.Empty(t, action.Deleted)
		require.Empty(t, action.Unblocked)
		k.release(released)
		_, err = k.operator.Skip(t.Context(), consumer, "e")
		require.ErrorIs(t, err, ordering.ErrNotParked)
		k.applied("e", "0/1", "0/3", "0/5")

		// Blocked by a bound, and the missing event came meanwhile: nothing is lost.
		k = newKit(t, d, ordering.WithBounds(ordering.Bounds{PerEntity: 2}, ordering.BlockEntity))
		k.send(2, deferred)
		k.send(3, deferred, blocked)
		_, err = k.operator.Drop(t.Context(), consumer, "e", ordering.Position{Seq: 3})
		require.NoError(t, err)
		k.send(1, deferred)
		action, err = k.operator.Skip(t.Context(), consumer, "e")
		require.NoError(t, err)
		require.Empty(t, action.Deleted)
		k.release(released, released)
		k.applied("e", series(1, 2)...)
	})
}

func TestOperatorDrop(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := blockedAt2(t, d)
		action, err := k.operator.Drop(t.Context(), consumer, "e", ordering.Position{Seq: 5})
		require.NoError(t, err)
		require.Empty(t, action.Unblocked)
		k.parked("e", "0/2 failed", "0/3 blocked")
		_, err = k.operator.Drop(t.Context(), consumer, "e", ordering.Position{Seq: 5})
		require.ErrorIs(t, err, ordering.ErrNotParked)

		// A repaired event takes the place of the one that failed.
		action, err = k.operator.Drop(t.Context(), consumer, "e", ordering.Position{Seq: 2})
		require.NoError(t, err)
		require.Equal(t, "planned", action.Unblocked)
		repaired := k.event("e", 0, 2)
		repaired.Payload = []byte("repaired")
		require.NoError(t, k.process(repaired))
		require.Equal(t, []middleware.Outcome{processed, released}, k.outcomes())
		k.applied("e", series(1, 3)...)

		// An entity stays blocked when all that was parked is gone.
		k = newKit(t, d, ordering.WithBounds(ordering.Bounds{PerEntity: 1}, ordering.BlockEntity))
		k.send(2, deferred, blocked)
		_, err = k.operator.Drop(t.Context(), consumer, "e", ordering.Position{Seq: 2})
		require.NoError(t, err)
		k.send(1, deferred)
		k.parked("e", "0/1 blocked")
		_, err = k.operator.Retry(t.Context(), consumer, "e")
		require.NoError(t, err)
		k.release(released)
		k.send(2, processed)
	})
}

func TestOperatorNames(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		long := strings.Repeat("e", 300)
		k.sendAs(long, 0, 2, deferred)
		for _, name := range []string{long, ""} {
			listed, err := k.operator.List(t.Context(), ordering.ParkedFilter{Entity: name})
			require.NoError(t, err)
			require.Len(t, listed, 1)
			_, err = k.operator.Retry(t.Context(), consumer, listed[0].Entity) // as it is listed
			require.ErrorIs(t, err, ordering.ErrNotBlocked)
		}
		_, err := k.operator.Skip(t.Context(), consumer, long)
		require.NoError(t, err)
		_, err = k.operator.Skip(t.Context(), consumer, "nobody")
		require.ErrorIs(t, err, ordering.ErrNoEntity)
		require.ErrorContains(t, err, `skip: consumer "stock", entity "nobody"`)
		_, err = k.operator.Drop(t.Context(), "other", long, ordering.Position{Seq: 2})
		require.ErrorIs(t, err, ordering.ErrNoEntity)
	})
}
