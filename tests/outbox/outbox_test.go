package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/outbox"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// What a handler published is forwarded as it was, whatever it holds.
func TestCommittedIsForwarded(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		binary := make([]byte, 256)
		for i := range binary {
			binary[i] = byte(i)
		}
		want := []sent{
			{"reserved", message.NewMessage("1c2b7d6e-0e7b-4a62-a2a5-3f9f2a1f2f10", []byte(`{"a": 1.0 }`))},
			{"billed", message.NewMessage(strings.Repeat("long", 75), binary)},
			{"reserved", message.NewMessage("ä 😀 \x00 ' \\", nil)},
		}
		for _, w := range want {
			w.msg.Metadata.Set("order_id", "P-1")
			w.msg.Metadata.Set("text", "ä 😀 \x00 ' \" \\ <&>")
		}
		pub := ordering.NewPublisher(f.box, ordering.KeyFromMetadata("order_id"))
		broker := f.router(t, (&outcomes{}).observe, func(router *message.Router, broker *gochannel.GoChannel) {
			router.AddConsumerHandler("stock", "orders", broker, func(msg *message.Message) error {
				for _, w := range want {
					out := w.msg.Copy()
					out.SetContext(msg.Context())
					if err := pub.Publish(w.topic, out); err != nil {
						return err
					}
				}
				return effect(msg.Context(), "stock")
			})
		})
		destination := &recorder{}
		f.forward(t, destination)
		require.NoError(t, broker.Publish("orders", message.NewMessage("order", nil)))

		eventually(t, func() bool { return len(destination.all()) == len(want) }, "not forwarded")
		for i, got := range destination.all() {
			want[i].msg.Metadata.Set(ordering.PartitionKeyMetadata, "P-1")
			require.Equal(t, want[i].topic, got.topic)
			require.Equal(t, want[i].msg.UUID, got.msg.UUID)
			require.Equal(t, want[i].msg.Metadata, got.msg.Metadata)
			require.True(t, bytes.Equal(want[i].msg.Payload, got.msg.Payload), "payload of %q: %q", got.msg.UUID, got.msg.Payload)
		}
		eventually(t, func() bool { return f.stored(t) == 0 }, "forwarded messages are deleted")
		require.Equal(t, 1, f.count(t, "effects"))
	})
}

// Whatever undoes the handler's transaction undoes what it published.
func TestNothingWithoutCommit(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(f *fixture, msg *message.Message) error{
		"error":     func(*fixture, *message.Message) error { return errors.New("handler failed") },
		"panic":     func(*fixture, *message.Message) error { panic("handler panicked") },
		"goexit":    func(*fixture, *message.Message) error { runtime.Goexit(); return nil },
		"statement": func(_ *fixture, msg *message.Message) error { return effect(msg.Context(), "it's no SQL") },
		"own rollback": func(_ *fixture, msg *message.Message) error {
			tx, _ := middleware.Tx(msg.Context())
			return tx.Rollback()
		},
		"publish": func(f *fixture, msg *message.Message) error {
			return f.box.Publish("", newMessage(msg.Context(), "no topic"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, f *fixture) { testFailure(t, f, fail) })
		})
	}
}

func testFailure(t *testing.T, f *fixture, fail func(f *fixture, msg *message.Message) error) {
	t.Helper()
	attempts := 0 // deliveries follow each other
	seen := &outcomes{}
	broker := f.router(t, seen.observe, func(router *message.Router, broker *gochannel.GoChannel) {
		router.AddConsumerHandler("stock", "orders", broker, func(msg *message.Message) error {
			attempts++
			name := fmt.Sprint("attempt ", attempts)
			if err := errors.Join(effect(msg.Context(), name), f.box.Publish("reserved", newMessage(msg.Context(), name))); err != nil {
				return err
			}
			if attempts <= 2 {
				return fail(f, msg)
			}
			return nil
		})
	})
	destination := &recorder{}
	f.forward(t, destination)
	require.NoError(t, broker.Publish("orders", message.NewMessage("order", nil)))

	eventually(t, func() bool { return len(destination.all()) == 1 }, "the attempt that committed is forwarded")
	require.Equal(t, []string{"attempt 3"}, destination.uuids())
	eventually(t, func() bool { return f.stored(t) == 0 }, "nothing else is stored")
	require.Equal(t, []string{"attempt 3"}, destination.uuids())
	require.Equal(t, 1, f.count(t, "effects"))
	eventually(t, func() bool { return len(seen.seen()) == 3 }, "not delivered three times")
	require.Equal(t, []middleware.Outcome{middleware.Failed, middleware.Failed, middleware.Processed}, seen.seen())
}

// The ack is lost after the commit: the broker delivers again.
func TestLostAck(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		seen := &outcomes{}
		broker := f.router(t, seen.observe, func(router *message.Router, broker *gochannel.GoChannel) {
			router.AddConsumerHandler("stock", "orders", broker, func(msg *message.Message) error {
				return f.box.Publish("reserved", newMessage(msg.Context(), fmt.Sprint("attempt ", len(seen.seen()))))
			})
		})
		for range 3 {
			require.NoError(t, broker.Publish("orders", message.NewMessage("order", nil)))
		}
		eventually(t, func() bool { return len(seen.seen()) == 3 }, "not delivered")
		require.Equal(t, 1, f.stored(t))
		destination := &recorder{}
		f.forward(t, destination)
		eventually(t, func() bool { return f.stored(t) == 0 }, "not forwarded")
		require.Len(t, destination.all(), 1)
	})
}

// B13: the forwarder's connection is cut after the broker has the message and
// before the row is deleted. The message is sent again as it was; where it is
// consumed, it has one effect.
func TestCutBeforeDeletionB13(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		seen := &outcomes{}
		downstream := f.router(t, seen.observe, func(router *message.Router, broker *gochannel.GoChannel) {
			router.AddConsumerHandler("ledger", "reserved", broker, func(msg *message.Message) error {
				return effect(msg.Context(), msg.UUID)
			})
		})
		pool := f.database.Open(t)
		destination := &recorder{}
		destination.after = func(attempt int) error {
			all := destination.all()
			if err := downstream.Publish("reserved", all[len(all)-1].msg.Copy()); err != nil {
				return err
			}
			if attempt == 1 {
				f.cut(t)
			}
			return nil
		}
		forwarder, err := f.box.Forwarder(pool, destination, nil)
		require.NoError(t, err)
		f.inTx(t, func(ctx context.Context) {
			msg := newMessage(ctx, "first")
			msg.Metadata.Set("field", "value")
			require.NoError(t, f.box.Publish("reserved", msg, newMessage(ctx, "second")))
		})
		run(t, forwarder)

		eventually(t, func() bool { return len(seen.seen()) == 3 }, "not sent again")
		require.Equal(t, []string{"first", "first", "second"}, destination.uuids())
		all := destination.all()
		require.True(t, all[0].msg.Equals(all[1].msg), "%v is sent again as %v", all[0].msg, all[1].msg)
		require.Equal(t, 2, f.count(t, "effects"))
		require.Contains(t, seen.seen(), middleware.Duplicate)
		eventually(t, func() bool { return f.stored(t) == 0 }, "not deleted")
	})
}

// cut ends the connections that are in a transaction.
func (f *fixture) cut(t *testing.T) {
	kill, find := "SELECT pg_terminate_backend(%d)", `SELECT pid FROM pg_stat_activity a JOIN pg_locks l USING (pid)
		WHERE l.relation = 'outbox_messages_lock'::regclass AND l.mode = 'RowShareLock'`
	if f.database.Driver.Dialect == deduplicator.MySQL {
		kill, find = "KILL %d", `SELECT t.trx_mysql_thread_id FROM information_schema.innodb_trx t JOIN information_schema.processlist p
			ON p.id = t.trx_mysql_thread_id WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID() AND t.trx_rows_locked > 0`
	}
	rows, err := f.db.QueryContext(t.Context(), find)
	require.NoError(t, err)
	var ids []int64
	for rows.Next() {
		var id int64
		require.NoError(t, rows.Scan(&id))
		ids = append(ids, id)
	}
	require.NoError(t, errors.Join(rows.Err(), rows.Close()))
	require.NotEmpty(t, ids, "the forwarder has no transaction")
	for _, id := range ids {
		_, err := f.db.ExecContext(t.Context(), fmt.Sprintf(kill, id))
		require.NoError(t, err)
	}
}

// B16: a message is committed later than one that was stored after it. It is
// still sent, and its open transaction holds up nothing.
func TestLateCommitB16(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		destination := &recorder{}
		f.forward(t, destination)
		late, ctx := f.begin(t)
		require.NoError(t, f.box.Publish("reserved", newMessage(ctx, "late")))
		for i := range 3 {
			f.inTx(t, func(ctx context.Context) {
				require.NoError(t, f.box.Publish("reserved", newMessage(ctx, fmt.Sprint(i))))
			})
		}
		eventually(t, func() bool { return len(destination.all()) == 3 }, "an open transaction holds up the others")
		require.NoError(t, late.Commit())
		eventually(t, func() bool { return len(destination.all()) == 4 }, "the late one is lost")
		require.Equal(t, []string{"0", "1", "2", "late"}, destination.uuids())
		eventually(t, func() bool { return f.stored(t) == 0 }, "not deleted")
	})
}

// B12: of several forwarders one is at work, so each message is sent once and
// the order is kept.
func TestSeveralForwardersB12(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		destination := &recorder{}
		for range 3 {
			f.forward(t, destination)
		}
		const messages, writers = 200, 4
		want := make(chan string, messages)
		for i := range messages {
			want <- fmt.Sprintf("%03d", i)
		}
		close(want)
		done := make(chan error, writers)
		for writer := range writers {
			go func() {
				for uuid := range want {
					tx, err := f.db.BeginTx(t.Context(), nil)
					if err == nil {
						msg := newMessage(deduplicator.ContextWithTx(t.Context(), tx), uuid)
						msg.Metadata.Set("writer", fmt.Sprint(writer))
						err = errors.Join(f.box.Publish("reserved", msg), tx.Commit())
					}
					if err != nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
		}
		for range writers {
			require.NoError(t, <-done)
		}
		eventually(t, func() bool { return f.stored(t) == 0 }, "not forwarded")
		last := map[string]string{}
		for _, s := range destination.all() {
			writer := s.msg.Metadata.Get("writer")
			require.Less(t, last[writer], s.msg.UUID, "order of writer %s", writer)
			last[writer] = s.msg.UUID
		}
		require.Len(t, destination.all(), messages)
	})
}

// PostgreSQL's transaction ids are numbers: 100 comes after 99.
func TestTransactionOrder(t *testing.T) {
	t.Parallel()
	f := setup(t, testdb.PGX)
	for _, id := range []string{"100", "99", "1000"} {
		f.inTx(t, func(ctx context.Context) {
			require.NoError(t, f.box.Publish("reserved", newMessage(ctx, id+"a"), newMessage(ctx, id+"b")))
			tx, _ := middleware.Tx(ctx)
			_, err := tx.ExecContext(ctx, "UPDATE outbox_messages SET transaction_id = $1::text::xid8 WHERE transaction_id = pg_current_xact_id()", id)
			require.NoError(t, err)
		})
	}
	destination := &recorder{}
	f.forward(t, destination)
	eventually(t, func() bool { return f.stored(t) == 0 }, "not forwarded")
	require.Equal(t, []string{"99a", "99b", "100a", "100b", "1000a", "1000b"}, destination.uuids())
}

// While the broker refuses messages handlers go on storing them, and when it is
// back all are sent in their order.
func TestBrokerDown(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		down := make(chan struct{})
		destination := &recorder{before: func(int) error {
			select {
			case <-down:
				return nil
			default:
				return errors.New("broker is down")
			}
		}}
		f.forward(t, destination)
		var want []string
		for i := range 20 {
			uuid := fmt.Sprintf("%02d", i)
			want = append(want, uuid)
			started := time.Now()
			f.inTx(t, func(ctx context.Context) {
				require.NoError(t, f.box.Publish("reserved", newMessage(ctx, uuid)))
			})
			require.Less(t, time.Since(started), 2*time.Second, "a handler waits for the broker")
			if i == 2 { // the others are stored while a refused one is in work
				eventually(t, func() bool {
					destination.mu.Lock()
					defer destination.mu.Unlock()
					return destination.attempts >= 2
				}, "not tried")
			}
		}
		close(down)
		eventually(t, func() bool { return f.stored(t) == 0 }, "not forwarded")
		require.Equal(t, want, destination.uuids())
	})
}

func TestPublishErrors(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		tx, ctx := f.begin(t)
		_, other := f.begin(t)
		with := func(field, value string) *message.Message {
			msg := newMessage(ctx, "uuid")
			msg.Metadata.Set(field, value)
			return msg
		}
		require.NoError(t, f.box.Publish("topic"))
		require.ErrorIs(t, f.box.Publish("topic", newMessage(t.Context(), "uuid")), outbox.ErrNoTx)
		require.ErrorIs(t, f.box.Publish("topic", newMessage(ctx, "uuid"), newMessage(other, "uuid")), outbox.ErrNoTx)
		require.ErrorIs(t, f.box.Publish("", newMessage(ctx, "uuid")), outbox.ErrInvalidMessage)
		require.ErrorIs(t, f.box.Publish("\xff", newMessage(ctx, "uuid")), outbox.ErrInvalidMessage)
		require.ErrorIs(t, f.box.Publish("topic", newMessage(ctx, "uuid"), newMessage(ctx, "")), outbox.ErrInvalidMessage)
		require.ErrorIs(t, f.box.Publish("topic", newMessage(ctx, "\xff")), outbox.ErrInvalidMessage)
		require.ErrorIs(t, f.box.Publish("topic", with("field", "\xff")), outbox.ErrInvalidMessage)
		require.ErrorIs(t, f.box.Publish("topic", with("\xff", "value")), outbox.ErrInvalidMessage)
		require.NoError(t, tx.Commit(), "refused messages leave the transaction as it was")
		require.Zero(t, f.stored(t))
		require.ErrorIs(t, f.box.Publish("topic", newMessage(ctx, "uuid")), sql.ErrTxDone, "after the handler has returned")
	})
}

// watermill-sql's publisher runs its statement without a context: a Publish that
// waits for a lock would outlive the message's.
func TestContextEndsPublish(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		locker, _ := f.begin(t)
		lock := "LOCK TABLE outbox_messages IN EXCLUSIVE MODE"
		if f.database.Driver.Dialect == deduplicator.MySQL {
			lock = "SELECT * FROM outbox_messages LOCK IN SHARE MODE"
			require.NoError(t, locker.Rollback())
			var err error
			locker, err = f.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
			require.NoError(t, err)
			t.Cleanup(func() { _ = locker.Rollback() })
		}
		_, err := locker.ExecContext(t.Context(), lock)
		require.NoError(t, err)

		_, ctx := f.begin(t)
		ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- f.box.Publish("topic", newMessage(ctx, "uuid")) }()
		select {
		case err := <-done:
			require.Error(t, err)
		case <-time.After(10 * time.Second):
			require.NoError(t, locker.Rollback())
			require.Fail(t, "Publish outlives its context", "%v", <-done)
		}
	})
}

// More messages, and larger ones, than fit one statement.
func TestManyAndLargeMessages(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		var want []string
		f.inTx(t, func(ctx context.Context) {
			var messages []*message.Message
			for i := range 210 {
				messages = append(messages, newMessage(ctx, fmt.Sprintf("%04d", i)))
			}
			for i := range 3 {
				messages = append(messages, message.NewMessageWithContext(ctx, fmt.Sprint("large ", i), bytes.Repeat([]byte{0}, 1<<20)))
			}
			for _, msg := range messages {
				want = append(want, msg.UUID)
			}
			require.NoError(t, f.box.Publish("reserved", messages...))
		})
		destination := &recorder{}
		f.forward(t, destination)
		eventually(t, func() bool { return f.stored(t) == 0 }, "not forwarded")
		require.Equal(t, want, destination.uuids())
		require.Len(t, destination.all()[212].msg.Payload, 1<<20)
	})
}

// More metadata than fits one packet.
func TestLongMetadata(t *testing.T) {
	t.Parallel()
	f := setup(t, testdb.MySQL)
	f.database.DSN += "?interpolateParams=true" // parameters are part of the packet
	tx, err := f.database.Open(t).BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback()) }()
	messages := make([]*message.Message, 100) // 20 MB
	for i := range messages {
		messages[i] = message.NewMessageWithContext(deduplicator.ContextWithTx(t.Context(), tx), fmt.Sprint(i), nil)
		messages[i].Metadata.Set("long", strings.Repeat("x", 200_000))
	}
	require.NoError(t, f.box.Publish("t", messages...))
}

// A connection pooler may not allow prepared statements.
func TestSimpleProtocol(t *testing.T) {
	t.Parallel()
	f := setup(t, drivers[0])
	separator := " "
	if strings.Contains(f.database.DSN, "://") {
		separator = "&"
	}
	db, err := sql.Open("pgx", f.database.DSN+separator+"default_query_exec_mode=simple_protocol")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	f.db = db
	f.inTx(t, func(ctx context.Context) {
		require.NoError(t, f.box.Publish("reserved", message.NewMessageWithContext(ctx, "uuid", []byte{0, 0xff})))
	})
	destination := &recorder{}
	forwarder, err := f.box.Forwarder(db, destination, nil)
	require.NoError(t, err)
	run(t, forwarder)
	eventually(t, func() bool { return f.stored(t) == 0 }, "not forwarded")
	require.Equal(t, []byte{0, 0xff}, []byte(destination.all()[0].msg.Payload))
}

type orderPlaced struct{ ID string }

type stockReserved struct{ ID string }

// A cqrs bus is built once, on the Outbox: its messages have the transaction of
// the context that Publish is given.
func TestEventBus(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, f *fixture) {
		marshaler := cqrs.JSONMarshaler{GenerateName: cqrs.StructName}
		bus, err := cqrs.NewEventBusWithConfig(f.box, cqrs.EventBusConfig{
			GeneratePublishTopic: func(params cqrs.GenerateEventPublishTopicParams) (string, error) { return params.EventName, nil },
			Marshaler:            marshaler,
		})
		require.NoError(t, err)
		seen := &outcomes{}
		broker := f.router(t, seen.observe, func(router *message.Router, broker *gochannel.GoChannel) {
			processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
				GenerateSubscribeTopic: func(params cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) {
					return params.EventName, nil
				},
				SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
					return broker, nil
				},
				Marshaler: marshaler,
			})
			require.NoError(t, err)
			require.NoError(t, processor.AddHandlers(cqrs.NewEventHandler("stock", func(ctx context.Context, event *orderPlaced) error {
				if err := bus.Publish(ctx, &stockReserved{event.ID}); err != nil {
					return err
				}
				if len(seen.seen()) == 0 {
					return errors.New("first attempt fails after its publish")
				}
				return nil
			})))
		})
		require.ErrorIs(t, bus.Publish(t.Context(), &stockReserved{"X"}), outbox.ErrNoTx)
		destination := &recorder{}
		f.forward(t, destination)
		msg, err := marshaler.Marshal(&orderPlaced{"P-1"})
		require.NoError(t, err)
		require.NoError(t, broker.Publish("orderPlaced", msg))
		eventually(t, func() bool { return len(seen.seen()) == 2 && f.stored(t) == 0 }, "not forwarded")
		require.Len(t, destination.all(), 1)
		require.Equal(t, "stockReserved", destination.all()[0].topic)
		require.JSONEq(t, `{"ID":"P-1"}`, string(destination.all()[0].msg.Payload))
	})
}
