package sequence_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestSkipGap(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithBounds(ordering.Bounds{PerEntity: 3}, ordering.SkipGap))
		k.send(1, processed)
		k.send(4, deferred)
		k.send(7, deferred)
		k.send(5, deferred, skipped, released, released)
		k.applied("e", "0/1", "0/4", "0/5")
		k.parked("e", "0/7 gap")
		k.send(3, stale)
		k.send(6, processed, released)

		// In total: the entity whose event reaches the bound gives its gap up.
		k = newKit(t, d, ordering.WithBounds(ordering.Bounds{Total: 3}, ordering.SkipGap))
		k.sendAs("a", 0, 2, deferred)
		k.sendAs("b", 0, 2, deferred)
		k.sendAs("c", 0, 5, deferred, skipped, released)
		k.sendAs("c", 0, 9, deferred, skipped, released)
		k.parked("a", "0/2 gap")

		// An epoch whose beginning is missing.
		k = newKit(t, d, ordering.WithBounds(ordering.Bounds{PerEntity: 1}, ordering.SkipGap))
		k.sendAs("e", 0, 1, processed)
		k.sendAs("e", 4, 3, deferred, skipped, released)
		k.sendAs("e", 4, 4, processed)
		k.sendAs("e", 4, 2, stale)
		k.applied("e", "0/1", "4/3", "4/4")
	})
}

func TestBlockEntity(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithBounds(ordering.Bounds{PerEntity: 3}, ordering.BlockEntity))
		k.send(1, processed)
		k.send(4, deferred)
		k.send(6, deferred)
		k.send(5, deferred, blocked)
		err := k.refused(7, ordering.ErrParkedFull)
		require.True(t, middleware.IsPermanent(err))
		k.refused(2, ordering.ErrParkedFull) // it is blocked for an operator to see
		k.sendAs("other", 0, 1, processed)
		k.parked("e", "0/4 gap", "0/5 gap", "0/6 gap")

		action, err := k.operator.Skip(t.Context(), consumer, "e")
		require.NoError(t, err)
		require.Contains(t, action.Unblocked, "3 of its messages are parked")
		require.Equal(t, ordering.OperatorAction{
			Consumer: consumer, Entity: "e", Unblocked: action.Unblocked, Before: ordering.Position{Seq: 1}, After: ordering.Position{Seq: 3},
		}, action)
		k.release(released, released, released)
		k.send(7, processed)
		k.applied("e", "0/1", "0/4", "0/5", "0/6", "0/7")
	})
}

func TestStopConsumer(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		for _, bounds := range []ordering.Bounds{{PerEntity: 2}, {Total: 2}} {
			k := newKit(t, d, ordering.WithBounds(bounds, ordering.StopConsumer))
			k.send(3, deferred)
			k.send(4, deferred)
			stopped := make(chan error)
			go func() { stopped <- k.process(k.event("e", 0, 5)) }()
			// It is tried as long as it takes, beyond the chain's one retry.
			require.Eventually(t, func() bool {
				k.mu.Lock()
				defer k.mu.Unlock()
				return len(k.events) > 4
			}, 30*time.Second, time.Millisecond)
			require.NoError(t, k.process(k.event("e", 0, 1)))
			require.NoError(t, k.process(k.event("e", 0, 2)))
			require.NoError(t, <-stopped)
			k.applied("e", series(1, 5)...)
		}
	})
}

func TestAge(t *testing.T) {
	t.Parallel()
	bounds := ordering.Bounds{Age: time.Hour}
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		age := func(k *kit) {
			t.Helper()
			past := map[deduplicator.Dialect]string{
				deduplicator.PostgreSQL: "parked_at - interval '61 minutes'",
				deduplicator.MySQL:      "parked_at - INTERVAL 61 MINUTE",
				deduplicator.SQLite:     "strftime('%Y-%m-%d %H:%M:%f', parked_at, '-61 minutes')",
			}[d.Dialect]
			_, err := k.db.ExecContext(t.Context(), "UPDATE parked_messages SET parked_at = "+past)
			require.NoError(t, err)
		}
		k := newKit(t, d, ordering.WithBounds(bounds, ordering.SkipGap))
		k.send(3, deferred)
		k.release()
		age(k)
		k.release(skipped, released)
		k.send(5, deferred)
		k.send(7, deferred)
		age(k)
		k.send(9, deferred, skipped, released) // the next message looks, too
		k.parked("e", "0/7 gap", "0/9 gap")
		k.applied("e", "0/3", "0/5")

		k = newKit(t, d, ordering.WithBounds(bounds, ordering.BlockEntity))
		k.send(3, deferred)
		age(k)
		k.release(blocked)
		k.release()
		k.send(4, deferred)
		_, err := k.operator.Retry(t.Context(), consumer, "e")
		require.NoError(t, err)
		k.release() // it may wait for another hour
		k.send(1, processed)
		k.send(2, processed, released, released)

		k = newKit(t, d, ordering.WithBounds(bounds, ordering.StopConsumer))
		k.send(3, deferred)
		age(k)
		k.release()
		listed, err := k.operator.List(t.Context(), ordering.ParkedFilter{})
		require.NoError(t, err)
		require.InDelta(t, 61*60, time.Since(listed[0].ParkedAt).Seconds(), 30, "the clock of List")
		tx, err := k.db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer tx.Rollback()
		_, err = k.sequence.ProcessTx(t.Context(), tx, ordering.SequencedDelivery{
			Event:   ordering.SequencedEvent{Consumer: consumer, Entity: "e", Position: ordering.Position{Seq: 4}},
			Message: k.event("e", 0, 4),
		})
		require.ErrorIs(t, err, ordering.ErrConsumerStopped)
	})
}

func TestOptions(t *testing.T) {
	t.Parallel()
	db := testdb.Open(t, testdb.SQLite)
	require.NoError(t, ordering.Migrate(t.Context(), db, ordering.SQLite))
	for part, opt := range map[string]ordering.SequenceOption{
		"WithStart":             ordering.WithStart(ordering.StartPolicy{}),
		"no policy":             ordering.WithStart(ordering.Baseline(nil)),
		"WithGap":               ordering.WithGap(0),
		"unknown policy 9":      ordering.WithBounds(ordering.Bounds{}, 9),
		"PerEntity is -1":       ordering.WithBounds(ordering.Bounds{PerEntity: -1}, ordering.SkipGap),
		"Total, 1, is under":    ordering.WithBounds(ordering.Bounds{PerEntity: 2, Total: 1}, ordering.SkipGap),
		"Age is 1ns":            ordering.WithBounds(ordering.Bounds{Age: 1}, ordering.SkipGap),
		"WithReleaseBatch: 0":   ordering.WithReleaseBatch(0),
		"WithReleaseAttempts":   ordering.WithReleaseAttempts(0),
		`"a b"`:                 ordering.WithSequenceTables("a b", "c"),
		`both tables are "same`: ordering.WithSequenceTables("same", "same"),
	} {
		_, err := ordering.NewSequence(t.Context(), db, ordering.SQLite, opt)
		require.ErrorIs(t, err, ordering.ErrInvalidOption)
		require.ErrorContains(t, err, part)
	}
	_, err := ordering.NewSequence(t.Context(), nil, ordering.SQLite)
	require.ErrorIs(t, err, ordering.ErrInvalidOption)
	_, err = ordering.NewSequence(t.Context(), db, "oracle")
	require.ErrorIs(t, err, ordering.ErrInvalidOption)
	require.ErrorIs(t, ordering.Migrate(t.Context(), db, ordering.SQLite, ordering.WithSequenceTables("x", "x")), ordering.ErrInvalidOption)
	_, err = middleware.NewReleaser(nil, nil, middleware.ReleaserConfig{Topic: "t", Interval: -1, Observers: []middleware.Observer{nil}})
	require.ErrorIs(t, err, middleware.ErrInvalidOption)
	for _, part := range []string{"store", "sequence", "Consumer", "Handler", "Publisher", "Interval", "observer"} {
		require.ErrorContains(t, err, part)
	}
}

func TestTables(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		_, err := ordering.NewSequence(t.Context(), db, d.Dialect)
		require.ErrorIs(t, err, ordering.ErrSchema)
		for _, part := range []string{"table entity_sequences", "table parked_messages", "ordering.Migrate", "ordering.Schema"} {
			require.ErrorContains(t, err, part)
		}
		names := ordering.WithSequenceTables("order", "Parked")
		for range 2 {
			require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect, names))
		}
		_, err = ordering.NewOperator(t.Context(), db, d.Dialect)
		require.ErrorIs(t, err, ordering.ErrSchema, "the default tables were created too")
		_, err = ordering.NewSequence(t.Context(), db, d.Dialect, names)
		require.NoError(t, err)
		operator, err := ordering.NewOperator(t.Context(), db, d.Dialect, names)
		require.NoError(t, err)
		listed, err := operator.List(t.Context(), ordering.ParkedFilter{})
		require.NoError(t, err)
		require.Empty(t, listed)
		_, err = db.ExecContext(t.Context(), `ALTER TABLE `+d.Dialect.Quote("Parked")+` RENAME COLUMN attempts TO other`)
		require.NoError(t, err)
		_, err = ordering.NewSequence(t.Context(), db, d.Dialect, names)
		require.ErrorIs(t, err, ordering.ErrSchema)
		require.ErrorContains(t, err, "table Parked, column attempts")
	})
}

// A backlog that is being released is no gap, however old and long it is.
func TestBacklogIsNoGap(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		for _, breach := range []ordering.BreachPolicy{ordering.BlockEntity, ordering.SkipGap, ordering.StopConsumer} {
			database := migrate(t, d)
			wide := instance(t, database, ordering.WithReleaseBatch(1))
			for seq := int64(2); seq <= 8; seq++ {
				wide.send(seq, deferred)
			}
			wide.send(1, processed, released)
			time.Sleep(5 * time.Millisecond)
			k := instance(t, database, ordering.WithReleaseBatch(1),
				ordering.WithBounds(ordering.Bounds{PerEntity: 3, Age: time.Millisecond}, breach))
			k.send(9, deferred, released)
			k.send(10, deferred, released)
			k.release(released, released, released, released, released, released)
			k.applied("e", series(1, 10)...)
		}
	})
}
