package middleware_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

func deduplicateOnly(b *bench) []middleware.Link {
	return []middleware.Link{middleware.Deduplicate(b.store, byEventID())}
}

func full(b *bench) []middleware.Link {
	return []middleware.Link{
		middleware.WithPoisonQueue(b.poison, "poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 3}),
		middleware.Deduplicate(b.store, byEventID()),
	}
}

func want[T comparable](t *testing.T, what string, got, want []T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// B01: the handler fails at the first delivery; the second one runs, a third is a
// duplicate.
func TestFailedDeliveryRunsAgainB01(t *testing.T) {
	t.Parallel()
	calls := 0
	run(t, deduplicateOnly, func(*message.Message) ([]*message.Message, error) {
		if calls++; calls == 1 {
			return nil, errors.New("first try")
		}
		return nil, nil
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return len(b.events.outcomes()) == 2 }) // the broker delivers again after the nack pause
		b.deliver(t, newMessage("a", "1"))
		want(t, "outcomes", b.events.outcomes(), []middleware.Outcome{middleware.Failed, middleware.Processed, middleware.Duplicate})
		if calls != 2 {
			t.Errorf("%d calls", calls)
		}
	})
}

// Everything that can end an attempt, in a chain with retry and poison queue.
func TestOutcomes(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, tt := range map[string]struct {
		handler  func(call int) error
		store    error // the store fails
		noKey    bool
		outcomes []middleware.Outcome
		calls    int
		parked   string // part of the reason
	}{
		"success":     {outcomes: []middleware.Outcome{middleware.Processed}, calls: 1},
		"second try":  {handler: failUntil(2, boom), outcomes: []middleware.Outcome{middleware.Retried, middleware.Processed}, calls: 2},
		"panic":       {handler: func(int) error { panic("lost") }, outcomes: []middleware.Outcome{"retried", "retried", "retried", "parked"}, calls: 4, parked: "panic: lost"},
		"panic (nil)": {handler: func(int) error { panic(nil) }, outcomes: []middleware.Outcome{"retried", "retried", "retried", "parked"}, calls: 4, parked: "panic called with nil argument"}, //nolint:govet // on purpose
		"always":      {handler: failUntil(100, boom), outcomes: []middleware.Outcome{"retried", "retried", "retried", "parked"}, calls: 4, parked: "boom"},
		"permanent":   {handler: failUntil(100, middleware.Permanent(boom)), outcomes: []middleware.Outcome{"parked"}, calls: 1, parked: "boom"},
		"stale":       {handler: failUntil(100, fmt.Errorf("order 7: %w", ordering.ErrStale)), outcomes: []middleware.Outcome{"stale"}, calls: 1},
		"R1 no key":   {noKey: true, outcomes: []middleware.Outcome{"parked"}, parked: `metadata field "event_id" is missing`},
		"own cancel":  {handler: failUntil(100, context.Canceled), outcomes: []middleware.Outcome{"retried", "retried", "retried", "parked"}, calls: 4, parked: "context canceled"},
		"conflict":    {store: &deduplicator.ConflictError{Consumer: "stock", Key: "a"}, outcomes: []middleware.Outcome{"conflict"}, parked: "other content"},
		"bad commit":  {store: deduplicator.ErrNotCommitted, outcomes: []middleware.Outcome{"retried", "retried", "retried", "parked"}, parked: "not committed"},
		"too old":     {store: deduplicator.ErrTooOld, outcomes: []middleware.Outcome{"parked"}, parked: "too old to prove"},
		"no time":     {store: deduplicator.ErrNoTime, outcomes: []middleware.Outcome{"parked"}, parked: "time of the message"},
		"too often":   {store: deduplicator.ErrTooManyAttempts, outcomes: []middleware.Outcome{"parked"}, parked: "too many attempts"},
		"in flight":   {store: deduplicator.ErrInFlight, outcomes: []middleware.Outcome{"retried", "retried", "retried", "in_flight"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			run(t, full, func(*message.Message) ([]*message.Message, error) {
				calls++
				if tt.handler == nil {
					return nil, nil
				}
				return nil, tt.handler(calls)
			}, func(b *bench) {
				b.store.fail(tt.store)
				msg := newMessage("a", "1")
				if tt.noKey {
					msg = newMessage("", "1")
				}
				b.deliver(t, msg)
				b.until(func() bool { return len(b.events.outcomes()) >= len(tt.outcomes) })
				b.store.fail(nil) // let what was returned to the broker end
				want(t, "outcomes", b.events.outcomes()[:len(tt.outcomes)], tt.outcomes)
				if tt.store == nil && calls != tt.calls {
					t.Errorf("%d calls, want %d", calls, tt.calls)
				}
				parked := b.poison.sent("poison")
				if (len(parked) > 0) != (tt.parked != "") {
					t.Fatalf("%d messages parked", len(parked))
				}
				if tt.parked == "" {
					return
				}
				got := parked[0]
				if r := got.Metadata.Get("reason_poisoned"); !strings.Contains(r, tt.parked) {
					t.Errorf("reason %q", r)
				}
				if got.UUID != msg.UUID || string(got.Payload) != "1" || got.Metadata.Get("topic_poisoned") != topic ||
					got.Metadata.Get("handler_poisoned") != "stock" || got.Metadata.Get(ordering.PartitionKeyMetadata) == "" {
					t.Errorf("parked %v %v", got.UUID, got.Metadata)
				}
				if msg.Metadata.Get("reason_poisoned") != "" {
					t.Error("the original message was changed")
				}
			})
		})
	}
}

// A database that is down for an hour: the message waits, is not parked and does
// not go back to the broker, which would count it towards its delivery limit.
func TestDatabaseDown(t *testing.T) {
	t.Parallel()
	for _, down := range []error{deduplicator.ErrUnavailable, deduplicator.ErrOutcomeUnknown} {
		run(t, full, func(*message.Message) ([]*message.Message, error) { return nil, nil }, func(b *bench) {
			b.store.fail(fmt.Errorf("connect: %w", down))
			b.deliver(t, newMessage("a", "1"))
			time.Sleep(time.Hour) // of the bubble
			b.store.fail(nil)
			b.until(func() bool { return slices.Contains(b.events.outcomes(), middleware.Processed) })
			outcomes := b.events.outcomes()
			if n := len(outcomes); n < 300 || n > 1000 { // the pause grows to 10 s, give or take half
				t.Errorf("%d attempts in an hour", n)
			}
			for _, outcome := range outcomes[:len(outcomes)-1] {
				if outcome != middleware.Retried {
					t.Fatalf("outcome %s", outcome)
				}
			}
		})
	}
}

func failUntil(call int, err error) func(int) error {
	return func(n int) error {
		if n < call {
			return err
		}
		return nil
	}
}

// B52: the poison queue is down. The message is not acknowledged, and parked once
// it is up again.
func TestPoisonQueueDownB52(t *testing.T) {
	t.Parallel()
	run(t, full, func(*message.Message) ([]*message.Message, error) {
		return nil, middleware.Permanent(errors.New("bad order"))
	}, func(b *bench) {
		b.poison.fail = func(_ string, n int) error {
			if n < 3 {
				return errors.New("poison queue is down")
			}
			return nil
		}
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return len(b.poison.sent("poison")) > 0 })
		synctest.Wait()
		want(t, "outcomes", b.events.outcomes(), []middleware.Outcome{"failed", "failed", "parked"})
	})
}

// B54: a reason that would not fit into a frame is cut between characters.
func TestLongReasonB54(t *testing.T) {
	t.Parallel()
	run(t, full, func(*message.Message) ([]*message.Message, error) {
		return nil, middleware.Permanent(errors.New(strings.Repeat("é", 100_000)))
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		r := b.poison.sent("poison")[0].Metadata.Get("reason_poisoned")
		if len(r) > 1024 || len(r) < 1000 || !utf8.ValidString(r) {
			t.Errorf("%d bytes, valid %v", len(r), utf8.ValidString(r))
		}
	})
}

// An error may quote bytes of a payload. A poison queue on a database takes only text,
// and would refuse the message for ever.
func TestReasonIsText(t *testing.T) {
	t.Parallel()
	run(t, full, func(*message.Message) ([]*message.Message, error) {
		return nil, middleware.Permanent(errors.New("unknown type \xff\x00"))
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		if r := b.poison.sent("poison")[0].Metadata.Get("reason_poisoned"); r != "unknown type \ufffd\ufffd" {
			t.Errorf("reason %q", r)
		}
	})
}

// A handler that leaves by Goexit would stay without an answer in the Router. Its
// message comes back after a pause, as after an error.
func TestGoexitIsReturnedToTheBroker(t *testing.T) {
	t.Parallel()
	var calls []time.Time
	run(t, full, func(*message.Message) ([]*message.Message, error) {
		if calls = append(calls, time.Now()); len(calls) == 1 {
			runtime.Goexit()
		}
		return nil, nil
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return len(b.events.outcomes()) == 2 })
		want(t, "outcomes", b.events.outcomes(), []middleware.Outcome{"failed", "processed"})
		if pause := calls[1].Sub(calls[0]); pause < 50*time.Millisecond {
			t.Errorf("delivered again after %v", pause)
		}
	})
}

// A panic outside of the handler, as of the poison queue's publisher, is an error too:
// reported as what it is, and followed by a pause.
func TestPanicOfThePoisonQueue(t *testing.T) {
	t.Parallel()
	var calls []time.Time
	run(t, full, func(*message.Message) ([]*message.Message, error) {
		calls = append(calls, time.Now())
		return nil, middleware.Permanent(errors.New("no"))
	}, func(b *bench) {
		b.poison.fail = func(_ string, n int) error {
			if n == 1 {
				panic("publisher is broken")
			}
			return nil
		}
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return len(b.poison.sent("poison")) == 1 })
		events := b.events.seen()
		want(t, "outcomes", b.events.outcomes(), []middleware.Outcome{"failed", "parked"})
		if panicked := (*middleware.PanicError)(nil); !errors.As(events[0].Err, &panicked) || panicked.Value != "publisher is broken" {
			t.Errorf("reported: %v", events[0].Err)
		}
		if pause := calls[1].Sub(calls[0]); pause < 50*time.Millisecond {
			t.Errorf("delivered again after %v", pause)
		}
	})
}

// A panic of an observer is the Router's to report; its message comes back after a pause.
func TestPanicOfAnObserver(t *testing.T) {
	t.Parallel()
	var events []time.Time
	observer := func(context.Context, middleware.Event) {
		if events = append(events, time.Now()); len(events) == 1 {
			panic("observer is broken")
		}
	}
	chain, err := middleware.Chain(middleware.WithObserver(observer))
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		router.AddMiddleware(chain...)
		router.AddConsumerHandler("stock", topic, broker, func(*message.Message) error { return nil })
		done := make(chan error, 1)
		go func() { done <- router.Run(t.Context()) }()
		<-router.Running()
		if err := broker.Publish(topic, newMessage("a", "1")); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
		if err := errors.Join(router.Close(), <-done); err != nil {
			t.Error(err)
		}
	})
	if len(events) != 2 || events[1].Sub(events[0]) < 50*time.Millisecond {
		t.Errorf("events at %v", events)
	}
}

// B85: an attempt's context, transaction included, does not reach the next one.
func TestContextIsGivenBackB85(t *testing.T) {
	t.Parallel()
	type mark struct{}
	var seen []any
	run(t, full, func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		seen = append(seen, ctx.Value(mark{}), ctx.Err())
		ctx, cancel := context.WithCancel(context.WithValue(ctx, mark{}, "attempt"))
		msg.SetContext(ctx)
		cancel()
		if len(seen) < 6 {
			return nil, errors.New("again")
		}
		return nil, nil
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return slices.Contains(b.events.outcomes(), middleware.Processed) })
		for _, value := range seen {
			if value != nil {
				t.Errorf("saw %v", seen)
			}
		}
	})
}

// B09: the broker refuses what the handler returned. The redelivery does not run
// the handler, but returns the same messages.
func TestOutputsSurviveAFailedPublishB09(t *testing.T) {
	t.Parallel()
	calls := 0
	run(t, full, func(*message.Message) ([]*message.Message, error) {
		calls++
		out := message.NewMessage(fmt.Sprint("output-", calls), []byte("reserved"))
		out.Metadata.Set("call", fmt.Sprint(calls))
		return []*message.Message{out, message.NewMessage("second", nil)}, nil
	}, func(b *bench) {
		b.outputs.fail = func(_ string, n int) error {
			if n < 3 {
				return errors.New("broker is down")
			}
			return nil
		}
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return len(b.outputs.sent("reserved")) > 0 })
		synctest.Wait()
		sent := b.outputs.sent("reserved")
		if calls != 1 || len(sent) != 2 || sent[0].UUID != "output-1" || sent[0].Metadata.Get("call") != "1" || sent[1].UUID != "second" {
			t.Fatalf("%d calls, sent %v", calls, sent)
		}
		b.deliver(t, newMessage("a", "1"))
		if n := len(b.outputs.sent("reserved")); n != 2 {
			t.Errorf("outputs of an acknowledged message were sent again: %d", n)
		}
		if len(b.store.forgot) != 1 {
			t.Errorf("forgot %v", b.store.forgot)
		}
	})
}

// B43: two handlers of one router and one store each process a message once.
func TestScopeIsTheHandlerB43(t *testing.T) {
	t.Parallel()
	calls := map[string]int{}
	run(t, full, func(*message.Message) ([]*message.Message, error) {
		calls["stock"]++
		return nil, nil
	}, func(b *bench) {
		b.router.AddConsumerHandler("email", topic, b.broker, func(*message.Message) error {
			calls["email"]++
			return nil
		})
		if err := b.router.RunHandlers(b.ctx); err != nil {
			t.Fatal(err)
		}
		b.deliver(t, newMessage("a", "1"))
		b.deliver(t, newMessage("a", "1"))
		if calls["stock"] != 1 || calls["email"] != 1 {
			t.Errorf("calls %v", calls)
		}
	})
}

func TestWithConsumerServesOneHandler(t *testing.T) {
	t.Parallel()
	run(t, func(b *bench) []middleware.Link {
		return []middleware.Link{middleware.Deduplicate(b.store, byEventID(), middleware.WithConsumer("old name"))}
	}, func(*message.Message) ([]*message.Message, error) { return nil, nil }, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		if b.store.claims["old name/a"] == nil {
			t.Errorf("claims: %v", b.store.claims)
		}
		b.router.AddConsumerHandler("email", topic, b.broker, func(*message.Message) error { return nil })
		if err := b.router.RunHandlers(b.ctx); err != nil {
			t.Fatal(err)
		}
		b.deliver(t, newMessage("b", "1"))
		b.until(func() bool { return slices.Contains(b.events.outcomes(), middleware.Failed) })
		for _, event := range b.events.seen() {
			if event.Outcome == middleware.Failed && !errors.Is(event.Err, deduplicator.ErrConsumerTaken) {
				t.Errorf("a second handler shares the name: %v", event.Err)
			}
		}
	})
}

// member is a subscriber whose name says its consumer group, as those of amqpshard,
// kafkashard and sqlshard do.
type member struct {
	*gochannel.GoChannel
	group string
}

func (m member) String() string { return "test.subscriber(" + m.group + ")" }

// B43: two routers of one process share a store and a handler's name. Of two groups,
// each would take the other's messages for copies; one group's are instances of one
// handler, also when they come one after another.
func TestNameServesOneGroupB43(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store, calls, seen, poison := newMemoryStore(), map[string]int{}, &events{}, &publisher{}
		start := func(group string) (broker *gochannel.GoChannel, stop func()) {
			broker = gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
			chain, err := middleware.Chain(middleware.WithObserver(seen.observe), middleware.WithPoisonQueue(poison, "poison"),
				middleware.Deduplicate(store, byEventID()))
			if err != nil {
				t.Fatal(err)
			}
			router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
			if err != nil {
				t.Fatal(err)
			}
			router.AddMiddleware(chain...)
			router.AddConsumerHandler("status", topic, member{broker, group}, func(*message.Message) error {
				calls[group]++
				return nil
			})
			done := make(chan error, 1)
			go func() { done <- router.Run(t.Context()) }()
			<-router.Running()
			return broker, func() {
				if err := errors.Join(router.Close(), <-done); err != nil {
					t.Error(err)
				}
			}
		}
		shop, stopShop := start("shop")
		publish := func(broker *gochannel.GoChannel, key string) {
			if err := broker.Publish(topic, newMessage(key, "1")); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		publish(shop, "a")
		again, stopAgain := start("shop")
		publish(again, "b")
		stopAgain()
		mail, stopMail := start("mail")
		publish(mail, "a")
		stopShop()
		stopMail()
		if calls["shop"] != 2 || calls["mail"] != 0 || len(poison.sent("poison")) != 0 {
			t.Errorf("calls %v, parked %v", calls, poison.sent("poison"))
		}
		all := seen.seen()
		err := all[len(all)-1].Err
		if !errors.Is(err, deduplicator.ErrConsumerTaken) || errors.Is(err, middleware.ErrNoConsumer) || !strings.Contains(err.Error(), "give each handler its own name") {
			t.Errorf("got %v", err)
		}
	})
}

// Handlers without a publisher can't return messages: the Router refuses them
// after the commit, so the transaction must refuse them before.
func TestOutputsWithoutPublisher(t *testing.T) {
	t.Parallel()
	store := newMemoryStore()
	chain, err := middleware.Chain(middleware.Deduplicate(store, byEventID(), middleware.WithConsumer("stock")))
	if err != nil {
		t.Fatal(err)
	}
	handler := func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("x", nil)}, nil
	}
	for _, mw := range slices.Backward(chain) {
		handler = mw(handler)
	}
	if _, err := handler(newMessage("a", "1")); !errors.Is(err, message.ErrOutputInNoPublisherHandler) || len(store.claims) > 0 {
		t.Errorf("got %v, claims %v", err, store.claims)
	}
}

// A handler that returned messages before it was deployed without a publisher: what
// is still stored must not make its messages come back for ever.
func TestStoredOutputsWithoutPublisher(t *testing.T) {
	t.Parallel()
	store := newMemoryStore()
	chain, err := middleware.Chain(middleware.Deduplicate(store, byEventID(), middleware.WithConsumer("stock")))
	if err != nil {
		t.Fatal(err)
	}
	handler := message.HandlerFunc(func(*message.Message) ([]*message.Message, error) { return nil, nil })
	for _, mw := range slices.Backward(chain) {
		handler = mw(handler)
	}
	msg := newMessage("a", "1")
	defer msg.Ack()
	store.claims["stock/a"] = &record{deduplicator.PayloadFingerprint(msg), []deduplicator.Output{{Topic: "reserved", UUID: "x"}}}
	if produced, err := handler(msg); err != nil || len(produced) > 0 {
		t.Errorf("got %v and %v, which the Router can't publish", produced, err)
	}
}

// A handler that replaces the payload must not make its own message look like
// another one when it is delivered again.
func TestPayloadIsGivenBack(t *testing.T) {
	t.Parallel()
	run(t, full, func(msg *message.Message) ([]*message.Message, error) {
		msg.Payload = []byte("changed")
		return []*message.Message{message.NewMessage("x", nil)}, nil
	}, func(b *bench) {
		b.outputs.fail = func(_ string, n int) error {
			if n == 1 {
				return errors.New("broker is down")
			}
			return nil
		}
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return len(b.outputs.sent("reserved")) > 0 })
		want(t, "outcomes", b.events.outcomes(), []middleware.Outcome{"processed", "duplicate"})
	})
}

// A handler that changes its message and fails must not run under another key when
// it is tried again: the copy with the true key would run too.
func TestMessageIsGivenBack(t *testing.T) {
	t.Parallel()
	calls := 0
	run(t, full, func(msg *message.Message) ([]*message.Message, error) {
		calls++
		if got := msg.Metadata.Get("event_id") + " " + msg.UUID + " " + string(msg.Payload); got != "a uuid-a 1" {
			t.Errorf("call %d got %q", calls, got)
		}
		msg.Metadata.Set("event_id", "changed")
		msg.UUID, msg.Payload = "changed", []byte("changed")
		switch calls {
		case 1:
			return nil, errors.New("again")
		case 2:
			panic("again")
		}
		return nil, nil
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return slices.Contains(b.events.outcomes(), middleware.Processed) })
		b.deliver(t, newMessage("a", "1"))
		want(t, "outcomes", b.events.outcomes(), []middleware.Outcome{"retried", "retried", "processed", "duplicate"})
	})
}

// The bytes of the payload are not given back, so their fingerprint is taken once.
func TestPayloadIsChangedInPlace(t *testing.T) {
	t.Parallel()
	calls := 0
	run(t, full, func(msg *message.Message) ([]*message.Message, error) {
		msg.Payload[0] = 'x'
		if calls++; calls == 1 {
			return nil, errors.New("again")
		}
		return nil, nil
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		b.until(func() bool { return slices.Contains(b.events.outcomes(), middleware.Processed) })
		b.deliver(t, newMessage("a", "1"))
		want(t, "outcomes", b.events.outcomes(), []middleware.Outcome{"retried", "processed", "duplicate"})
	})
}

// A handler that returns its own message, changed: what is published is what is
// stored, at the first time and after a publish that failed.
func TestHandlerReturnsItsMessage(t *testing.T) {
	t.Parallel()
	for _, failures := range []int{0, 1} {
		run(t, full, func(msg *message.Message) ([]*message.Message, error) {
			msg.Payload = []byte("changed")
			msg.UUID = "changed"
			msg.Metadata.Set("event_id", "changed")
			return []*message.Message{msg, message.NewMessage("x", nil), msg}, nil
		}, func(b *bench) {
			b.outputs.fail = func(_ string, n int) error {
				if n <= failures {
					return errors.New("broker is down")
				}
				return nil
			}
			b.deliver(t, newMessage("a", "1"))
			b.until(func() bool { return len(b.outputs.sent("reserved")) > 0 })
			for i, msg := range b.outputs.sent("reserved") {
				if got := msg.Metadata.Get("event_id") + " " + msg.UUID + " " + string(msg.Payload); i != 1 && got != "changed changed changed" {
					t.Errorf("after %d failures, published %q", failures, got)
				}
			}
		})
	}
}

func TestPartitionStampsOutputs(t *testing.T) {
	t.Parallel()
	id := "P-1"
	links := func(b *bench) []middleware.Link {
		return append(full(b), middleware.Partition(ordering.KeyFromMetadata("order_id")))
	}
	run(t, links, func(*message.Message) ([]*message.Message, error) {
		out := message.NewMessage("x", nil)
		out.Metadata.Set("order_id", id)
		return []*message.Message{out}, nil
	}, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		if got := b.outputs.sent("reserved")[0].Metadata.Get(ordering.PartitionKeyMetadata); got != "P-1" {
			t.Errorf("key %q", got)
		}
		id = "" // B75
		b.deliver(t, newMessage("b", "1"))
		if len(b.outputs.sent("reserved")) != 1 || len(b.poison.sent("poison")) != 1 {
			t.Error("a message without a partition key was not parked")
		}
	})
}

// Each event says which message it is about, whatever became of it.
func TestEventsNameKeyAndEntity(t *testing.T) {
	t.Parallel()
	fails := true
	run(t, func(b *bench) []middleware.Link {
		return []middleware.Link{
			middleware.WithPoisonQueue(b.poison, "poison"), middleware.WithRetry(middleware.Retry{MaxRetries: 1}),
			middleware.Deduplicate(b.store, byEventID(), middleware.WithTime(deduplicator.TimeFromMetadata("time"))),
		}
	}, func(*message.Message) ([]*message.Message, error) {
		if fails {
			fails = false
			return nil, errors.New("boom")
		}
		return nil, nil
	}, func(b *bench) {
		deliver := func(key, entity, at string) {
			msg := newMessage(key, "1")
			msg.Metadata.Set(ordering.PartitionKeyMetadata, entity)
			msg.Metadata.Set("time", at)
			b.deliver(t, msg)
			b.until(func() bool {
				all := b.events.seen()
				return len(all) > 0 && all[len(all)-1].Outcome != middleware.Retried
			})
		}
		deliver("a", "order 7", "") // retried, processed
		deliver("a", "order 7", "") // a copy
		deliver("b", "order 8", "yesterday")
		deliver("", "order 9", "")
		var got []string
		for _, e := range b.events.seen() {
			got = append(got, fmt.Sprintf("%s %q %q", e.Outcome, e.Key, e.Entity))
		}
		want(t, "events", got, []string{
			`retried "a" "order 7"`, `processed "a" "order 7"`, `duplicate "a" "order 7"`, `parked "b" "order 8"`, `parked "" "order 9"`,
		})
	})
}

func TestLogObserver(t *testing.T) {
	t.Parallel()
	var text strings.Builder
	observe := middleware.LogObserver(slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelInfo})))
	observe(t.Context(), middleware.Event{Outcome: middleware.Processed, MessageUUID: "quiet"})
	observe(t.Context(), middleware.Event{Outcome: middleware.Parked, MessageUUID: "u1", Key: "k1", Entity: strings.Repeat("e", 2000), Handler: "stock", Attempt: 4, Err: errors.New("boom")})
	line := text.String()
	for _, part := range []string{"level=ERROR", "outcome=parked", "message_uuid=u1", "key=k1", "entity=" + strings.Repeat("e", 1021) + "…", "handler=stock", "attempt=4", "reason=boom"} {
		if !strings.Contains(line, part) {
			t.Errorf("%s is not in %s", part, line)
		}
	}
	if strings.Contains(line, "quiet") {
		t.Error("processed messages are logged at info")
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tt := range []struct {
		ctx  context.Context
		err  error
		want string
	}{
		{cancelled, fmt.Errorf("query: %w", context.Canceled), "level=INFO"},
		{cancelled, errors.New("boom"), "level=ERROR"},
		{t.Context(), context.Canceled, "level=ERROR"}, // the handler's own context
	} {
		text.Reset()
		if observe(tt.ctx, middleware.Event{Outcome: middleware.Failed, Err: tt.err}); !strings.Contains(text.String(), tt.want) {
			t.Errorf("%v: %s, want %s", tt.err, text.String(), tt.want)
		}
	}
}
