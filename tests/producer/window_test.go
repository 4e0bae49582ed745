package producer_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// K2: what becomes of each number.
func TestWindow(t *testing.T) {
	t.Parallel()
	const size = ordering.WindowSize
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		db.SetMaxOpenConns(1) // the mark of a row that was there must not outlive its statement
		windows := newWindows(t, db, d)
		for i, tt := range []struct {
			stamp  ordering.Stamp
			want   ordering.WindowResult
			fenced bool
		}{
			{stamp: number(1, 1), want: ordering.Accepted},
			{stamp: number(1, 1), want: ordering.Replayed},
			{stamp: number(1, 2), want: ordering.Accepted},
			{stamp: number(1, 5), want: ordering.AcceptedAhead},
			{stamp: number(1, 4), want: ordering.Accepted}, // a late one, once
			{stamp: number(1, 4), want: ordering.Replayed},
			{stamp: number(1, 2), want: ordering.Replayed},
			{stamp: number(1, 5+size), want: ordering.AcceptedAhead},
			{stamp: number(1, 5), want: ordering.Unknown}, // seen, but just out of the window
			{stamp: number(1, 3), want: ordering.Unknown}, // not seen, and nobody can tell
			{stamp: number(1, 6), want: ordering.Accepted},
			{stamp: number(1, 6), want: ordering.Replayed},
			{stamp: number(1, 4+size), want: ordering.Accepted},
			{stamp: number(1, ordering.MaxSequence), want: ordering.AcceptedAhead}, // no wrap
			{stamp: number(1, ordering.MaxSequence), want: ordering.Replayed},
			{stamp: number(1, 6+size), want: ordering.Unknown},
			{stamp: number(3, 1), want: ordering.Accepted}, // K3: a later epoch begins anew
			{stamp: number(3, 1), want: ordering.Replayed},
			{stamp: number(1, ordering.MaxSequence-1), fenced: true},
			{stamp: number(2, 1), fenced: true},
			{stamp: number(3, 2), want: ordering.Accepted},
			{stamp: ordering.Stamp{Producer: "shop", Epoch: 1, Stream: "orders/0", Sequence: 9, Sender: 3}, want: ordering.Unknown},
			{stamp: ordering.Stamp{Producer: "shop", Epoch: 1, Stream: "orders/0", Sequence: 9, Sender: 2}, fenced: true},
			{stamp: ordering.Stamp{Producer: "shop", Epoch: 3, Stream: "orders/0", Sequence: 2, Sender: 4}, want: ordering.Replayed},
			{stamp: number(4, 7), want: ordering.AcceptedAhead},
			{stamp: number(4, 6), want: ordering.Accepted},
			{stamp: ordering.Stamp{Producer: "other", Epoch: 1, Stream: "orders/0", Sequence: 7}, want: ordering.Accepted},
			{stamp: ordering.Stamp{Producer: "shop", Epoch: 1, Stream: "orders/1", Sequence: 7}, want: ordering.Accepted},
			{stamp: number(1<<32-1, 1), want: ordering.Accepted},
		} {
			got, err := apply(t.Context(), db, windows, tt.stamp)
			if tt.fenced {
				require.ErrorIs(t, err, ordering.ErrFenced, "step %d: %+v", i, tt.stamp)
				var fenced *ordering.FencedError
				require.ErrorAs(t, err, &fenced)
				require.Equal(t, ordering.FencedError{Consumer: "c", Producer: "shop", Epoch: tt.stamp.Epoch, Current: 3}, *fenced)
				continue
			}
			require.NoError(t, err, "step %d: %+v", i, tt.stamp)
			require.Equal(t, tt.want, got, "step %d: %+v", i, tt.stamp)
			if i%3 == 0 { // the same with and without what the process remembers
				windows = newWindows(t, db, d)
			}
		}
		err := inTx(t.Context(), db, nil, func(tx *sql.Tx) error {
			result, err := windows.ApplyTx(t.Context(), tx, "c2", number(1, 1))
			require.Equal(t, ordering.Accepted, result, "another consumer")
			return err
		})
		require.NoError(t, err)
	})
}

func TestRefuseGaps(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		windows := newWindows(t, db, d, ordering.WithProducerGaps(ordering.RefuseGaps))
		accept := func(stamp ordering.Stamp) {
			t.Helper()
			result, err := apply(t.Context(), db, windows, stamp)
			require.NoError(t, err)
			require.Equal(t, ordering.Accepted, result)
		}
		refuse := func(stamp ordering.Stamp, next uint64) {
			t.Helper()
			_, err := apply(t.Context(), db, windows, stamp)
			var gap *ordering.ProducerGapError
			require.ErrorAs(t, err, &gap)
			require.ErrorIs(t, err, ordering.ErrProducerGap)
			require.Equal(t, ordering.ProducerGapError{
				Consumer: "c", Producer: "shop", Stream: "orders/0", Next: next, Got: stamp.Sequence,
			}, *gap)
		}
		accept(number(1, 500)) // a consumer that comes later has not missed the ones before
		accept(number(1, 501))
		refuse(number(1, 503), 502)
		refuse(number(1, 503), 502) // refusing changes nothing
		accept(number(1, 502))
		accept(number(1, 503))
		accept(number(1, 499))
		refuse(number(2, 2), 1) // a later epoch begins with 1
		accept(number(2, 1))
	})
}

// What a rolled back transaction has recorded counts for nothing, although the
// process remembers it.
func TestWindowsAreUndoneByRollback(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		windows := newWindows(t, db, d)
		planned := errors.New("planned")
		for _, stamp := range []ordering.Stamp{number(1, 1), number(1, 2), number(1, 7), number(2, 1), number(2, 2)} {
			want := ordering.Accepted
			if stamp.Sequence == 7 {
				want = ordering.AcceptedAhead
			}
			for range 2 {
				err := inTx(t.Context(), db, nil, func(tx *sql.Tx) error {
					result, err := windows.ApplyTx(t.Context(), tx, "c", stamp)
					require.NoError(t, err)
					require.Equal(t, want, result, "%+v", stamp)
					return planned
				})
				require.Equal(t, planned, err)
			}
			result, err := apply(t.Context(), db, windows, stamp)
			require.NoError(t, err)
			require.Equal(t, want, result, "%+v", stamp)
			result, err = apply(t.Context(), db, windows, stamp)
			require.NoError(t, err)
			require.Equal(t, ordering.Replayed, result)
		}
	})
}

func TestNamesInWindowsAreExact(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		windows := newWindows(t, db, d)
		for _, want := range []ordering.WindowResult{ordering.Accepted, ordering.Replayed} {
			for _, name := range []string{"a", "A", "á", "a ", " a", "a\x00", "1", "01"} {
				result, err := apply(t.Context(), db, windows, ordering.Stamp{Producer: name, Epoch: 1, Stream: "s", Sequence: 1})
				require.NoError(t, err)
				require.Equal(t, want, result, "producer %q", name)
				result, err = apply(t.Context(), db, windows, ordering.Stamp{Producer: "p", Epoch: 1, Stream: name, Sequence: 1})
				require.NoError(t, err)
				require.Equal(t, want, result, "stream %q", name)
			}
		}
	})
}

// Workers of several processes get the copies of one stream's messages in any
// order: each number is accepted once.
func TestWindowsAtOnceAcceptEachNumberOnce(t *testing.T) {
	t.Parallel()
	levels := map[string]*sql.TxOptions{
		"read committed":  {Isolation: sql.LevelReadCommitted},
		"repeatable read": {Isolation: sql.LevelRepeatableRead},
		"serializable":    {Isolation: sql.LevelSerializable},
	}
	run := func(t *testing.T, d testdb.Driver, level *sql.TxOptions) {
		t.Helper()
		const workers, numbers = 4, 25
		db := open(t, d)
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		var accepted [numbers + 1]atomic.Int64
		var wg sync.WaitGroup
		errs := make([]error, workers)
		for w := range workers {
			windows := newWindows(t, db, d)
			order := rand.New(rand.NewPCG(seed, uint64(w))).Perm(numbers)
			wg.Go(func() {
				for _, n := range order {
					n := uint64(n + 1)
					for attempt := 0; ; attempt++ {
						var result ordering.WindowResult
						err := inTx(t.Context(), db, level, func(tx *sql.Tx) (err error) {
							if d.Dialect == deduplicator.MySQL { // a snapshot that is older than the row
								var count int
								if err := tx.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM producer_streams").Scan(&count); err != nil {
									return err
								}
							}
							result, err = windows.ApplyTx(t.Context(), tx, "c", number(1, n))
							return err
						})
						if err == nil {
							if result != ordering.Replayed {
								accepted[n].Add(1)
							}
							break
						}
						if !sqldb.Transient(err) || attempt == 200 {
							errs[w] = err
							return
						}
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		for n := 1; n <= numbers; n++ {
			require.EqualValues(t, 1, accepted[n].Load(), "number %d", n)
		}
	}
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		if d.Dialect == deduplicator.SQLite {
			run(t, d, nil)
			return
		}
		run(t, d, levels["read committed"])
	})
	for _, d := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		for _, name := range []string{"repeatable read", "serializable"} {
			t.Run(d.Name+" "+name, func(t *testing.T) {
				t.Parallel()
				run(t, d, levels[name])
			})
		}
	}
}

// The window is the set of numbers that were seen, as far as it reaches.
func TestWindowModel(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		db := open(t, d)
		processes := []*ordering.Windows{newWindows(t, db, d), newWindows(t, db, d)}
		var stream atomic.Int64
		steps := 8
		if d.Dialect == deduplicator.SQLite {
			steps = 60
		}
		rapid.Check(t, func(rt *rapid.T) {
			name := fmt.Sprint("s", stream.Add(1))
			seen := map[uint64]bool{}
			var epoch uint32
			var highest uint64
			for range rapid.IntRange(1, steps).Draw(rt, "steps") {
				stamp := ordering.Stamp{Producer: "p", Stream: name}
				stamp.Epoch = max(1, epoch)
				if rapid.IntRange(0, 19).Draw(rt, "other epoch") == 0 {
					stamp.Epoch = uint32(rapid.IntRange(1, int(epoch)+2).Draw(rt, "epoch"))
				}
				offset := rapid.OneOf(
					rapid.IntRange(-3, 3), rapid.IntRange(-70, 130), rapid.IntRange(-1100, 1100),
					rapid.SampledFrom([]int{-1024, -1023, -1022, 1023, 1024, 1025}),
				).Draw(rt, "offset")
				stamp.Sequence = uint64(max(1, int(highest)+offset))
				if epoch > 0 && rapid.IntRange(0, 9).Draw(rt, "sent again") == 0 {
					stamp.Sender = stamp.Epoch + uint32(rapid.IntRange(1, 2).Draw(rt, "sender"))
				}
				commit := rapid.IntRange(0, 3).Draw(rt, "commit") > 0
				windows := rapid.SampledFrom(processes).Draw(rt, "process")

				want, wantErr, reset := ordering.Accepted, error(nil), false
				switch {
				case epoch == 0:
					reset = true
				case max(stamp.Epoch, stamp.Sender) < epoch:
					wantErr = ordering.ErrFenced
				case stamp.Epoch < epoch:
					want = ordering.Unknown
				case stamp.Epoch > epoch:
					reset = true
					if stamp.Sequence > 1 {
						want = ordering.AcceptedAhead
					}
				case stamp.Sequence+ordering.WindowSize <= highest:
					want = ordering.Unknown
				case seen[stamp.Sequence]:
					want = ordering.Replayed
				case stamp.Sequence > highest+1:
					want = ordering.AcceptedAhead
				}

				planned := errors.New("planned")
				var got ordering.WindowResult
				err := inTx(t.Context(), db, nil, func(tx *sql.Tx) (err error) {
					if got, err = windows.ApplyTx(t.Context(), tx, "c", stamp); err == nil && !commit {
						err = planned
					}
					return err
				})
				if wantErr != nil {
					if !errors.Is(err, wantErr) {
						rt.Fatalf("%+v at epoch %d, highest %d: %v, want %v", stamp, epoch, highest, err, wantErr)
					}
					continue
				}
				if err != nil && err != planned {
					rt.Fatal(err)
				}
				if got != want {
					rt.Fatalf("%+v at epoch %d, highest %d: %d, want %d", stamp, epoch, highest, got, want)
				}
				if !commit || want == ordering.Unknown {
					continue
				}
				if reset {
					seen, epoch, highest = map[uint64]bool{}, stamp.Epoch, stamp.Sequence
				}
				seen[stamp.Sequence] = true
				highest = max(highest, stamp.Sequence)
			}
		})
	})
}

// counter counts statements.
type counter struct{ atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.Add(1)
	return ctx
}

func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// What ApplyTx costs.
func TestStatementsOfApply(t *testing.T) {
	t.Parallel()
	database := testdb.Create(t, testdb.PGX)
	config, err := pgx.ParseConfig(database.DSN)
	require.NoError(t, err)
	statements := &counter{}
	config.Tracer = statements
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, ordering.Migrate(t.Context(), db, ordering.PostgreSQL))
	windows, restarted := newWindows(t, db, testdb.PGX), newWindows(t, db, testdb.PGX)

	for i, tt := range []struct {
		windows  *ordering.Windows
		sequence uint64
		want     int64
	}{
		{windows, 1, 1}, // the first of a stream
		{windows, 2, 1}, // in order
		{windows, 3, 1},
		{windows, 5, 1},   // ahead
		{windows, 4, 1},   // late
		{windows, 4, 1},   // a copy
		{restarted, 6, 3}, // another process goes on
		{restarted, 7, 1},
		{windows, 8, 3}, // and the first one again, whose guess is wrong
		{windows, 9, 1},
	} {
		require.NoError(t, inTx(t.Context(), db, nil, func(tx *sql.Tx) error {
			before := statements.Load()
			_, err := tt.windows.ApplyTx(t.Context(), tx, "c", number(1, tt.sequence))
			require.Equal(t, tt.want, statements.Load()-before, "step %d, number %d", i, tt.sequence)
			return err
		}))
	}
}
