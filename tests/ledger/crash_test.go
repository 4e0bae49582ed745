package ledger_test

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// The moments at which a worker dies. Two of them are the provider's.
const (
	arrived point = "arrived" // at the provider, which has done nothing yet
	charged point = "charged" // by the provider, whose response is lost
)

var points = []point{beforeStarted, started, arrived, charged, answered, recorded, committed}

// kinds are what providers are like, with the rule for each.
var kinds = []struct {
	name string
	keys bool
	rule func(k *kit) ledger.Rule
}{
	{"knows keys", true, func(*kit) ledger.Rule { return ledger.RetryWithKey(24 * time.Hour) }},
	{"can be asked", false, func(k *kit) ledger.Rule { return ledger.AskProvider(k.provider.ask) }},
	{"neither", false, func(*kit) ledger.Rule { return ledger.AskOperator() }},
}

// B102: a worker is killed at each point, and its message is delivered again after
// the lease and then, where the effect is listed as unknown, after an operator has
// looked it up. In the end there is one payment for the order, whatever the provider
// is like; without keys there was no second call that could have paid again.
func TestKilledAtEachPointB102(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		for _, kind := range kinds {
			for _, at := range points {
				t.Run(kind.name+"/"+string(at), func(t *testing.T) {
					t.Parallel()
					k := newKit(t, d)
					k.provider.keys = kind.keys
					effect := newEffect(t, "charge", kind.rule(k))
					k.die(t, at)

					k.later(ledger.DefaultLease)
					err := k.deliver(effect)
					wantUnknown := kind.name == "neither" && slices.Contains([]point{started, arrived, charged, answered}, at)
					if wantUnknown {
						require.ErrorIs(t, err, ledger.ErrUnknown)
						k.operator()
						err = k.deliver(effect)
					}
					require.NoError(t, err)
					require.Empty(t, k.unknown())
					calls, most, total := k.provider.count()
					require.Equal(t, []int{1, 1}, []int{most, total}, "payments")
					want := 1
					if kind.keys && slices.Contains([]point{arrived, charged, answered}, at) {
						want = 2 // with the same key
					}
					require.Equal(t, want, calls)
					require.Equal(t, "succeeded", k.state("order"))
				})
			}
		}
	})
}

// die runs a worker with the message "order" and kills it at a point.
func (k *kit) die(t *testing.T, at point) {
	t.Helper()
	reached, release, gone := make(chan struct{}), make(chan struct{}), make(chan struct{})
	stop := func() {
		close(reached)
		<-release
	}
	k.provider.set(func() {
		k.provider.onDone = func() { close(gone) }
		switch at {
		case arrived:
			k.provider.onArrival = stop
		case charged:
			k.provider.onDone = func() { stop(); close(gone) }
		}
	})
	c := k.spawn(t, "order", ledger.DefaultLease, at)
	if at == arrived || at == charged {
		select {
		case <-reached:
		case <-time.After(patience):
			require.FailNow(t, "the worker does not call")
		}
	} else {
		require.Equal(t, saysStopped, c.next())
	}
	c.kill()
	close(release)
	if at != beforeStarted && at != started { // what has arrived is done, although nobody waits for it
		select {
		case <-gone:
		case <-time.After(patience):
			require.FailNow(t, "the provider does not get on")
		}
	}
	k.provider.set(func() { k.provider.onArrival, k.provider.onDone = nil, nil })
}

// deliver is a delivery of the message "order" to this process.
func (k *kit) deliver(effect ledger.Effect) error {
	return k.handle("order", func(ctx context.Context) error {
		_, err := ledger.Do(ctx, k.ledger, effect, 100, k.provider.charge)
		return err
	})
}

// operator looks up what is listed.
func (k *kit) operator() {
	k.t.Helper()
	listed, err := k.ledger.Unknown(k.t.Context(), 10)
	require.NoError(k.t, err)
	require.Len(k.t, listed, 1, "listed for reconciliation")
	answer, err := k.provider.ask(k.t.Context(), listed[0])
	require.NoError(k.t, err)
	require.NoError(k.t, k.ledger.Resolve(k.t.Context(), listed[0], answer))
}

// B19: what a killed worker has left behind holds the message up until the lease is
// over, by the real clock, and no longer.
func TestKilledWorkerHoldsUpForALeaseB19(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		const lease = 2 * time.Second
		k := newKit(t, d)
		effect := newEffect(t, "charge", ledger.RetryWithKey(24*time.Hour))
		begin := time.Now()
		c := k.spawn(t, "order", lease, started)
		require.Equal(t, saysStopped, c.next())
		c.kill()
		for {
			err := k.deliver(effect)
			if err == nil {
				break
			}
			require.ErrorIs(t, err, ledger.ErrInProgress)
			require.Less(t, time.Since(begin), patience)
		}
		require.GreaterOrEqual(t, time.Since(begin), lease)
		calls, _, _ := k.provider.count()
		require.Equal(t, 1, calls)
	})
}

// Trap 8 with real processes: a worker is paused by SIGSTOP, before its call or during
// it, until its lease is over and another delivery has settled the effect. When it
// wakes it does not call any more, its result does not count, and it does not commit.
func TestPausedPastTheLease(t *testing.T) {
	t.Parallel()
	const lease = 3 * time.Second
	each(t, func(t *testing.T, d testdb.Driver) {
		for _, kind := range kinds {
			for _, at := range []point{started, arrived} {
				t.Run(fmt.Sprintf("%s/%s", kind.name, at), func(t *testing.T) {
					t.Parallel()
					k := newKit(t, d)
					k.provider.keys = kind.keys
					effect := newEffect(t, "charge", kind.rule(k))
					reached, release := make(chan struct{}), make(chan struct{})
					if at == arrived { // it pays while the worker is paused
						k.provider.set(func() { k.provider.onDone = func() { close(reached); <-release } })
					}
					c := k.spawn(t, "order", lease, at)
					if at == arrived {
						<-reached
					} else {
						require.Equal(t, saysStopped, c.next())
					}
					c.signal(syscall.SIGSTOP)
					k.provider.set(func() { k.provider.onDone = nil })

					// The worker's transaction is open and holds the claim, so only the
					// ledger sees this delivery.
					var err error
					for begin := time.Now(); ; {
						if _, err = k.charge("order", effect); err == nil || kind.name == "neither" && len(k.unknown()) == 1 {
							break
						}
						require.ErrorIs(t, err, ledger.ErrInProgress)
						require.Less(t, time.Since(begin), patience)
					}
					if err != nil {
						_, err = k.charge("order", effect)
						require.ErrorIs(t, err, ledger.ErrUnknown)
						k.operator()
						_, err = k.charge("order", effect)
						require.NoError(t, err)
					}
					state := k.state("order")
					calls, _, _ := k.provider.count()

					if at == started {
						c.goOn()
					}
					close(release)
					c.signal(syscall.SIGCONT)
					require.Equal(t, saysOutcome+"fenced", c.next())
					require.Equal(t, state, k.state("order"))
					after, _, total := k.provider.count()
					require.Equal(t, calls, after, "it did not call after it woke")
					require.Equal(t, 1, total)

					var claims int
					require.NoError(t, k.storeDB.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM processed_messages").Scan(&claims))
					require.Zero(t, claims, "it did not commit")
					require.NoError(t, k.deliver(effect))
				})
			}
		}
	})
}

// The provider pays and its response is lost: the next delivery, of the same process,
// does what the rule says at once.
func TestLostResponse(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		for _, kind := range kinds {
			t.Run(kind.name, func(t *testing.T) {
				t.Parallel()
				k := newKit(t, d)
				k.provider.keys = kind.keys
				effect := newEffect(t, "charge", kind.rule(k))
				k.provider.set(func() { k.provider.lose = true })
				require.ErrorIs(t, k.deliver(effect), ledger.ErrUnknown)
				k.provider.set(func() { k.provider.lose = false })
				require.Equal(t, []string{"order"}, k.unknown())
				err := k.deliver(effect)
				if kind.name == "neither" {
					require.ErrorIs(t, err, ledger.ErrUnknown)
					k.operator()
					err = k.deliver(effect)
				}
				require.NoError(t, err)
				calls, most, total := k.provider.count()
				require.Equal(t, []int{1, 1}, []int{most, total})
				require.Equal(t, kind.keys, calls == 2)
			})
		}
	})
}

// The ledger's database is away: before the call nothing was done and the message is
// not to blame; after it the effect is unknown when the lease is over.
func TestLedgerIsDown(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		effect := newEffect(t, "charge", ledger.AskOperator())
		_, err := ledger.Do(k.of("after"), k.ledger, effect, nil, func(context.Context, string) (int, error) {
			return 1, k.db.Close()
		})
		require.ErrorIs(t, err, ledger.ErrUnknown)
		require.ErrorContains(t, err, "record that it is succeeded")
		_, err = ledger.Do(k.of("before"), k.ledger, effect, nil, func(context.Context, string) (int, error) {
			t.Error("called")
			return 1, nil
		})
		require.ErrorIs(t, err, deduplicator.ErrUnavailable)

		k.db = k.databases[1].Open(t)
		k.ledger = k.newLedger(k.db)
		k.later(time.Minute)
		require.Empty(t, k.state("before"))
		require.Equal(t, []string{"after"}, k.unknown())
	})
}
