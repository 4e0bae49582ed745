package sequence_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

var errPlanned = errors.New("planned")

// A message whose attempts are used up blocks its entity, not the others.
func TestFailedMessageBlocksItsEntity(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		for name, failure := range map[string]func() error{
			"retries":   func() error { return errPlanned },
			"permanent": func() error { return middleware.Permanent(errPlanned) },
			"panic":     func() error { panic(errPlanned) },
			"stale":     func() error { return ordering.ErrStale },
		} {
			k.sendAs(name, 0, 1, processed)
			k.failWith(func(*message.Message) error { return failure() })
			want := []middleware.Outcome{deferred, blocked}
			if name == "retries" || name == "panic" {
				want = append([]middleware.Outcome{retried}, want...)
			}
			k.sendAs(name, 0, 2, want...)
			k.failWith(nil)
			k.sendAs(name, 0, 3, deferred)
			k.sendAs(name, 0, 2, stale)
			k.applied(name, "0/1")
			k.parked(name, "0/2 failed", "0/3 blocked")
			k.release()
			k.sendAs("other "+name, 0, 1, processed)
		}
		listed, err := k.operator.List(t.Context(), ordering.ParkedFilter{Entity: "retries"})
		require.NoError(t, err)
		require.Equal(t, "planned", listed[0].Error)
		require.Equal(t, "planned", listed[0].EntityBlocked)
	})
}

// The message that closes the gap keeps its effect when a parked one fails. That
// one's own effects, and the transaction that its error broke, are undone.
func TestFailedReleaseUndoesNothingElse(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithReleaseAttempts(3))
		for _, seq := range []int64{2, 3, 4} {
			k.send(seq, deferred)
		}
		k.failWith(func(msg *message.Message) error {
			if msg.Metadata.Get("seq") != "3" {
				return nil
			}
			tx, _ := middleware.Tx(msg.Context())
			_, err := tx.ExecContext(msg.Context(), "INSERT INTO applied SELECT * FROM applied") // violates the key
			require.Error(t, err)
			return nil // ignored: on PostgreSQL the transaction is broken now
		})
		want := []middleware.Outcome{processed, released, retried}
		if d.Dialect != deduplicator.PostgreSQL {
			want = []middleware.Outcome{processed, released, released, released}
		}
		k.send(1, want...)
		if d.Dialect != deduplicator.PostgreSQL {
			return
		}
		k.applied("e", series(1, 2)...)
		k.parked("e", "0/3 gap", "0/4 gap")
	})
}

// A parked message is tried with each release until its attempts are used up.
func TestReleaseAttempts(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithReleaseAttempts(3))
		for _, seq := range []int64{2, 3, 4} {
			k.send(seq, deferred)
		}
		k.failAt(3, errPlanned)
		k.send(1, processed, released, retried)
		k.applied("e", series(1, 2)...)
		k.release(retried)
		k.send(6, deferred, blocked) // the next message of the entity tries it too
		k.release()
		k.applied("e", series(1, 2)...)
		k.parked("e", "0/3 failed", "0/4 gap", "0/6 gap")
	})
}

// One entity that fails, and more of them than one page has.
func TestReleaserReachesAllEntities(t *testing.T) {
	t.Parallel()
	const entities = 120
	k := newKit(t, testdb.SQLite, ordering.WithReleaseBatch(1))
	for e := range entities {
		name := fmt.Sprintf("%03d", e)
		k.sendAs(name, 0, 2, deferred)
		k.sendAs(name, 0, 3, deferred)
		k.sendAs(name, 0, 1, processed, released)
	}
	k.failWith(func(msg *message.Message) error {
		if msg.Metadata["entity"] == "000" {
			return errPlanned
		}
		return nil
	})
	require.NoError(t, k.releaser().Release(t.Context()))
	k.parked("000", "0/3 gap")
	for e := range entities - 1 {
		k.applied(fmt.Sprintf("%03d", e+1), series(1, 3)...)
	}
}

// An error that another attempt can't mend blocks at once, a panic counts as an error.
func TestReleaseThatFailsForGood(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		attempts := 5
		for _, failure := range []func(*message.Message) error{
			func(*message.Message) error { return middleware.Permanent(errPlanned) },
			func(*message.Message) error { panic(errPlanned) },
		} {
			k := newKit(t, d, ordering.WithReleaseAttempts(attempts))
			attempts = 1
			k.send(3, deferred)
			k.send(2, deferred)
			k.failWith(func(msg *message.Message) error {
				if msg.Metadata.Get("seq") == "3" {
					return failure(msg)
				}
				return nil
			})
			k.send(1, processed, released, blocked)
			k.applied("e", series(1, 2)...)
			k.parked("e", "0/3 failed")
		}
	})
}

// sqlState is an error that the store takes for a conflict of transactions.
type sqlState string

func (s sqlState) Error() string    { return "conflict" }
func (s sqlState) SQLState() string { return string(s) }

// Whatever a parked message does to the transaction, the message that closes the
// gap is processed with its second attempt at the latest.
func TestReleaseThatBreaksTheTransaction(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		for name, fail := range map[string]func(*message.Message) error{
			"conflict": func(*message.Message) error { return sqlState("40001") },
			"ended": func(msg *message.Message) error {
				tx, _ := middleware.Tx(msg.Context())
				_ = tx.Rollback()
				return errPlanned
			},
		} {
			k := newKit(t, d)
			k.send(2, deferred)
			k.failWith(func(msg *message.Message) error {
				if msg.Metadata.Get("seq") == "2" {
					return fail(msg)
				}
				return nil
			})
			require.NoError(t, k.process(k.event("e", 0, 1)), name)
			k.applied("e", "0/1")
			k.parked("e", "0/2 gap")
			k.outcomes()
			k.failWith(nil)
			k.release(released)
			k.applied("e", series(1, 2)...)
		}
	})
}

// At most a batch per transaction; the rest by the next message or a releaser.
func TestReleaseInBatches(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithReleaseBatch(2))
		for seq := int64(2); seq <= 9; seq++ {
			k.send(seq, deferred)
		}
		k.send(1, processed, released, released)
		k.send(11, deferred, released, released)
		k.send(3, stale, released, released)
		k.applied("e", series(1, 7)...)
		k.release(released, released)
		k.applied("e", series(1, 9)...)
		k.parked("e", "0/11 gap")
	})
}

// What a releaser processes has no age: a store with a retention takes it too.
func TestReleaserOfAStoreWithRetention(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d, ordering.WithReleaseBatch(1))
		k.send(2, deferred)
		k.send(3, deferred)
		k.send(1, processed, released)
		var err error
		k.store, err = deduplicator.NewSQLStore(t.Context(), k.db, d.Dialect, deduplicator.WithRetention(deduplicator.MinRetention))
		require.NoError(t, err)
		k.release(released)
		k.applied("e", series(1, 3)...)
	})
}

// Releasers of two instances and consumers work on the same entities.
func TestRunReleasesWhatIsLeft(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		database := migrate(t, d)
		a, b := instance(t, database, ordering.WithReleaseBatch(1)), instance(t, database, ordering.WithReleaseBatch(1))
		const entities, events = 5, 6
		for e := range entities {
			for seq := int64(2); seq <= events; seq++ {
				a.sendAs(fmt.Sprint(e), 0, seq, deferred)
			}
			a.sendAs(fmt.Sprint(e), 0, 1, processed, released)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, k := range []*kit{a, b} {
			releaser := k.releaser()
			wg.Go(func() {
				if err := releaser.Run(ctx); !errors.Is(err, context.Canceled) {
					t.Errorf("Run returned %v", err)
				}
			})
		}
		require.Eventually(t, func() bool {
			var parked int
			return a.db.QueryRowContext(ctx, "SELECT COUNT(*) FROM parked_messages").Scan(&parked) == nil && parked == 0
		}, 30*time.Second, 5*time.Millisecond)
		cancel()
		wg.Wait()
		for e := range entities {
			a.applied(fmt.Sprint(e), series(1, events)...)
		}
	})
}

// The connection dies, or the context ends, in the middle of a release: nothing
// has happened, and the message's redelivery does all of it.
func TestCrashInTheMiddle(t *testing.T) {
	t.Parallel()
	kill := func(k *kit, msg *message.Message) {
		tx, _ := middleware.Tx(msg.Context())
		query, kill := "SELECT CONNECTION_ID()", "KILL %d"
		if k.d.Dialect == deduplicator.PostgreSQL {
			query, kill = "SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%d)"
		}
		var id int
		require.NoError(k, tx.QueryRowContext(msg.Context(), query).Scan(&id))
		_, err := k.db.ExecContext(k.Context(), fmt.Sprintf(kill, id))
		require.NoError(k, err)
	}
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		for _, at := range []string{"1", "2", "4"} {
			k := newKit(t, d)
			for _, seq := range []int64{2, 3, 4} {
				k.send(seq, deferred)
			}
			msg := k.event("e", 0, 1)
			crash := func(how func(*message.Message)) {
				k.failWith(func(msg *message.Message) error {
					if msg.Metadata.Get("seq") == at {
						how(msg)
					}
					return nil
				})
			}
			ctx, cancel := context.WithCancel(t.Context())
			crash(func(*message.Message) { cancel() })
			delivery := msg.Copy()
			delivery.SetContext(ctx)
			_, err := k.handler(delivery)
			require.ErrorIs(t, err, context.Canceled)
			k.applied("e")
			k.parked("e", "0/2 gap", "0/3 gap", "0/4 gap")

			if d.Dialect != deduplicator.SQLite { // it has no connection
				killed := false
				crash(func(msg *message.Message) {
					if !killed {
						killed = true
						kill(k, msg)
					}
				})
				require.NoError(t, k.process(msg.Copy()), "the second attempt")
				require.True(t, killed)
			}
			k.failWith(nil)
			require.NoError(t, k.process(msg.Copy()))
			require.NoError(t, k.releaser().Release(t.Context()))
			k.applied("e", series(1, 4)...)
			k.parked("e")
			k.outcomes()
			k.send(5, processed)
		}
	})
}

// Two instances get the events of the same entities at once, in any order and
// more than once. B18's wait is on the entity here.
func TestTwoInstances(t *testing.T) {
	t.Parallel()
	each(t, drivers, func(t *testing.T, d testdb.Driver) {
		database := migrate(t, d)
		const entities, events, workers = 3, 12, 4
		var deliveries []*message.Message
		k := instance(t, database, ordering.WithReleaseBatch(3))
		for e := range entities {
			for seq := int64(1); seq <= events; seq++ {
				msg := k.event(fmt.Sprint(e), 0, seq)
				deliveries = append(deliveries, msg, msg.Copy(), k.event(fmt.Sprint(e), 0, seq))
			}
		}
		rand.Shuffle(len(deliveries), func(i, j int) { deliveries[i], deliveries[j] = deliveries[j], deliveries[i] })
		queue := make(chan *message.Message, len(deliveries))
		for _, msg := range deliveries {
			queue <- msg
		}
		close(queue)
		instances := []*kit{k, instance(t, database, ordering.WithReleaseBatch(3))}
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				for msg := range queue {
					for attempt := 0; instances[w%2].process(msg) != nil; attempt++ {
						if attempt == 20 {
							t.Error("a delivery fails again and again")
							return
						}
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, k.releaser().Release(t.Context()))
		for e := range entities {
			k.applied(fmt.Sprint(e), series(1, events)...)
			k.parked(fmt.Sprint(e))
		}
	})
}

// A statement above read committed may have a snapshot that is older than the lock.
func TestIsolationLevels(t *testing.T) {
	t.Parallel()
	for _, d := range []testdb.Driver{testdb.PGX, testdb.MySQL} {
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
			t.Run(d.Name+" "+level.String(), func(t *testing.T) {
				t.Parallel()
				k := newKit(t, d)
				store, err := deduplicator.NewSQLStore(t.Context(), k.db, d.Dialect, deduplicator.WithIsolation(level), deduplicator.WithTxRetries(100))
				require.NoError(t, err)
				const events, workers = 16, 4
				queue := make(chan *message.Message, events)
				for _, seq := range rand.Perm(events) {
					queue <- k.event("e", 0, int64(seq+1))
				}
				close(queue)
				var wg sync.WaitGroup
				for range workers {
					wg.Go(func() {
						for msg := range queue {
							_, err := store.Process(t.Context(), deduplicator.Claim{Consumer: consumer, Key: msg.UUID}, func(ctx context.Context) ([]deduplicator.Output, error) {
								tx, _ := middleware.Tx(ctx)
								var seq int64
								_, _ = fmt.Sscan(msg.Metadata.Get("seq"), &seq)
								msg.SetContext(ctx)
								_, err := k.sequence.ProcessTx(ctx, tx, ordering.SequencedDelivery{
									Event:   ordering.SequencedEvent{Consumer: consumer, Entity: "e", Position: ordering.Position{Seq: seq}},
									Message: msg,
									Handle:  func(msg *message.Message) error { _, err := k.handle(msg); return err },
								})
								return nil, err
							})
							if err != nil {
								t.Error(err)
							}
						}
					})
				}
				wg.Wait()
				k.applied("e", series(1, events)...)
				k.parked("e")
			})
		}
	}
}

// What a released message returns is published like everything else: by the
// Router with the message that closed the gap, or by the releaser.
func TestOutputsOfReleasedMessages(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		broker := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, watermill.NopLogger{})
		handler := func(msg *message.Message) ([]*message.Message, error) {
			_, err := k.handle(msg)
			out := message.NewMessage("out-"+msg.UUID, msg.Payload)
			out.Metadata.Set("seq", msg.Metadata.Get("seq"))
			return []*message.Message{out}, err
		}
		chain, err := middleware.Chain(
			middleware.WithObserver(k.observe),
			middleware.Deduplicate(k.store, middleware.WithKey(deduplicator.FromMetadata("id"))),
			middleware.Sequence(k.sequence, middleware.WithEntity(ordering.KeyFromMetadata("entity")), middleware.WithSequence(ordering.VersionFromMetadata("seq"))),
		)
		require.NoError(t, err)
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		require.NoError(t, err)
		router.AddMiddleware(chain...)
		router.AddHandler(consumer, "orders", broker, "reserved", broker, handler)
		done := make(chan error, 1)
		go func() { done <- router.Run(context.WithoutCancel(t.Context())) }()
		<-router.Running()
		reserved, err := broker.Subscribe(t.Context(), "reserved")
		require.NoError(t, err)
		expect := func(seqs ...string) {
			t.Helper()
			got := map[string]bool{}
			for range seqs {
				select {
				case msg := <-reserved:
					msg.Ack()
					require.Equal(t, "out-", msg.UUID[:4])
					got[msg.Metadata.Get("seq")] = true
				case <-time.After(30 * time.Second):
					require.FailNow(t, "no output")
				}
			}
			for _, seq := range seqs {
				require.True(t, got[seq], seq)
			}
		}
		publish := func(seq int64) { require.NoError(t, broker.Publish("orders", k.event("e", 0, seq))) }
		waitFor := func(outcome middleware.Outcome) {
			t.Helper()
			require.Eventually(t, func() bool {
				for _, o := range k.outcomes() {
					if o == outcome {
						return true
					}
				}
				return false
			}, 30*time.Second, time.Millisecond)
		}
		publish(3)
		waitFor(deferred)
		publish(2)
		waitFor(deferred)
		publish(1)
		expect("1", "2", "3")

		publish(5)
		waitFor(deferred)
		_, err = k.operator.Skip(t.Context(), consumer, "e")
		require.NoError(t, err)
		failures := 1
		releaser, err := middleware.NewReleaser(k.store, k.sequence, middleware.ReleaserConfig{
			Consumer: consumer, Handler: handler, Topic: "reserved", Publisher: flaky{broker, &failures},
		})
		require.NoError(t, err)
		require.NoError(t, releaser.Release(t.Context()))
		expect("5")
		require.Zero(t, failures)
		require.Eventually(t, func() bool {
			var stored int
			return k.db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM produced_messages").Scan(&stored) == nil && stored == 0
		}, 30*time.Second, time.Millisecond, "outputs are forgotten")
		require.NoError(t, errors.Join(router.Close(), <-done, broker.Close()))
	})
}

// newBacklog returns a kit with two entities, a and b, whose events 3 and 4 are left to
// a releaser.
func newBacklog(t *testing.T) *kit {
	t.Helper()
	k := newKit(t, testdb.SQLite, ordering.WithReleaseBatch(1))
	for _, entity := range []string{"a", "b"} {
		k.sendAs(entity, 0, 2, deferred)
		k.sendAs(entity, 0, 3, deferred)
		k.sendAs(entity, 0, 4, deferred)
		k.sendAs(entity, 0, 1, processed, released)
	}
	return k
}

// A pass ends with a transaction that finds nothing, whose claim is never made again. A
// count of its attempts would stay for ever.
func TestReleaserLeavesNoAttempts(t *testing.T) {
	t.Parallel()
	k := newBacklog(t)
	store, err := deduplicator.NewSQLStore(t.Context(), k.db, deduplicator.SQLite, deduplicator.WithMaxAttempts(9))
	require.NoError(t, err)
	releaser, err := middleware.NewReleaser(store, k.sequence, middleware.ReleaserConfig{Consumer: consumer, Handler: k.handle})
	require.NoError(t, err)
	require.NoError(t, releaser.Release(t.Context()))
	var parked, attempts int
	require.NoError(t, k.db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM parked_messages").Scan(&parked))
	require.NoError(t, k.db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM message_attempts").Scan(&attempts))
	require.Zero(t, parked)
	require.Zero(t, attempts)
}

// What the publisher refuses for good holds up its entity, and only that.
func TestRefusedOutputsOfReleasedMessages(t *testing.T) {
	t.Parallel()
	k := newBacklog(t)
	var refuse atomic.Bool
	refuse.Store(true)
	broker := publishFunc(func(messages []*message.Message) error {
		if refuse.Load() && messages[0].Metadata.Get("entity") == "a" {
			return errPlanned
		}
		return nil
	})
	releaser, err := middleware.NewReleaser(k.store, k.sequence, middleware.ReleaserConfig{
		Consumer: consumer, Topic: "reserved", Publisher: broker,
		Handler: func(msg *message.Message) ([]*message.Message, error) {
			if _, err := k.handle(msg); err != nil {
				return nil, err
			}
			out := message.NewMessage("out-"+msg.UUID, nil)
			out.Metadata.Set("entity", msg.Metadata.Get("entity"))
			return []*message.Message{out}, nil
		},
	})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 2 {
		require.ErrorIs(t, releaser.Release(ctx), errPlanned)
		k.applied("a", series(1, 3)...)
		k.applied("b", series(1, 4)...)
	}
	refuse.Store(false)
	require.NoError(t, releaser.Release(ctx))
	k.applied("a", series(1, 4)...)
	var stored int
	require.NoError(t, k.db.QueryRowContext(ctx, "SELECT COUNT(*) FROM produced_messages").Scan(&stored))
	require.Zero(t, stored)
}

// publishFunc is a publisher.
type publishFunc func(messages []*message.Message) error

func (f publishFunc) Publish(_ string, messages ...*message.Message) error { return f(messages) }
func (publishFunc) Close() error                                           { return nil }

// flaky fails as often as failures says.
type flaky struct {
	message.Publisher
	failures *int
}

func (f flaky) Publish(topic string, messages ...*message.Message) error {
	if *f.failures > 0 {
		*f.failures--
		return errPlanned
	}
	return f.Publisher.Publish(topic, messages...)
}

// Two transactions find that an entity has no row: one of them makes it, the
// other one must not believe that it did.
func TestFirstEventsAtOnce(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.PGX, testdb.PQ, testdb.MySQL, testdb.MySQLFoundRows}, func(t *testing.T, d testdb.Driver) {
		var both sync.WaitGroup
		var calls atomic.Int64
		both.Add(2)
		k := newKit(t, d, ordering.WithStart(ordering.Baseline(func(context.Context, *sql.Tx, string) (ordering.Position, error) {
			if calls.Add(1) <= 2 {
				both.Done()
				both.Wait()
			}
			return ordering.Position{Seq: 4}, nil
		})))
		errs := make(chan error, 2)
		for range 2 {
			go func() { errs <- k.process(k.event("e", 0, 5)) }()
		}
		require.NoError(t, errors.Join(<-errs, <-errs))
		require.ElementsMatch(t, []middleware.Outcome{processed, stale}, k.outcomes())
		k.applied("e", "0/5")
	})
}

// recorder is a publisher that remembers.
type recorder struct{ published []*message.Message }

func (r *recorder) Publish(_ string, messages ...*message.Message) error {
	r.published = append(r.published, messages...)
	return nil
}

func (r *recorder) Close() error { return nil }

// B80, B83: what has no place in a sequence goes to the poison queue with the
// reason; what fails in its place stays there, in the database.
func TestPoisonQueue(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		poison := &recorder{}
		chain, err := middleware.Chain(
			middleware.WithObserver(k.observe),
			middleware.WithPoisonQueue(poison, "poison"),
			middleware.WithRetry(middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond}),
			middleware.Deduplicate(k.store, middleware.WithKey(deduplicator.FromMetadata("id")), middleware.WithConsumer(consumer)),
			middleware.Sequence(k.sequence, middleware.WithEntity(ordering.KeyFromMetadata("entity")), middleware.WithSequence(ordering.VersionFromMetadata("seq"))),
		)
		require.NoError(t, err)
		k.handler = k.handle
		for i := len(chain) - 1; i >= 0; i-- {
			k.handler = chain[i](k.handler)
		}
		k.send(1, processed)
		for reason, change := range map[string]func(*message.Message){
			`ordering: invalid version: metadata field "seq" is missing or empty`: func(msg *message.Message) { msg.Metadata["seq"] = "" },
			"ordering: invalid sequence number":                                   func(msg *message.Message) { msg.Metadata["seq"] = "0" },
			"ordering: same sequence number, other content":                       func(msg *message.Message) { msg.Payload = []byte("other") },
			`for topic "": no entity id`:                                          func(msg *message.Message) { msg.Metadata["entity"] = "" },
		} {
			poison.published = nil
			msg := k.event("e", 0, 1)
			change(msg)
			require.NoError(t, k.process(msg))
			require.Len(t, poison.published, 1)
			require.Contains(t, poison.published[0].Metadata["reason_poisoned"], reason)
		}
		k.outcomes()
		poison.published = nil
		k.failAt(2, errPlanned)
		k.send(2, retried, deferred, blocked)
		require.Empty(t, poison.published)
		k.parked("e", "0/2 failed")
	})
}

// B34: a read before Sequence, in a transaction at repeatable read, makes a
// snapshot that is older than the message which was parked meanwhile. MySQL shows
// it only to locking reads.
func TestOlderSnapshotB34(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.MySQL, testdb.MySQLFoundRows}, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		k.send(1, processed)
		process := func(seq int64, between func()) (handled int) {
			tx, err := k.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			require.NoError(t, err)
			defer tx.Rollback()
			var n int
			require.NoError(t, tx.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM applied").Scan(&n))
			between()
			_, err = k.sequence.ProcessTx(t.Context(), tx, ordering.SequencedDelivery{
				Event:   ordering.SequencedEvent{Consumer: consumer, Entity: "e", Position: ordering.Position{Seq: seq}},
				Message: k.event("e", 0, seq),
				Handle:  func(*message.Message) error { handled++; return nil },
			})
			require.NoError(t, err)
			require.NoError(t, tx.Commit())
			return handled
		}
		require.Equal(t, 2, process(2, func() { k.send(3, deferred) }), "2, and 3 that was parked meanwhile")
		require.Equal(t, 0, process(5, func() { k.send(5, deferred) }), "5 is parked already")
	})
}
