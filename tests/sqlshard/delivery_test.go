package sqlshard_test

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/sqlshard"
)

// Each group gets everything from the oldest message on, also while another group
// has the same message in work.
func TestEachGroupGetsEachMessage(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		first, second := k.open(k.config("first")), k.open(k.config("second"))
		require.NoError(k, first.Publisher().Publish(topic, series("key", 1, 5)...))
		messages := k.subscribe(first)
		held := k.receive(messages)
		require.Equal(k, []string{"1", "2", "3", "4", "5"}, k.take(k.subscribe(second), 5))
		held.Ack()
		require.Equal(k, []string{"2", "3", "4", "5"}, k.take(messages, 4))
	})
}

// Of two members of a group one has a shard, for as long as its message is in work:
// nothing else of that shard is delivered to either, while other shards go on, and
// neither publishers nor starting members wait.
func TestOneConsumerPerShard(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		keys := keys()
		one, two := k.open(k.config("group")), k.open(k.config("group"))
		require.NoError(k, one.Publisher().Publish(topic, series(keys[0], 1, 2)...))
		fromOne := k.subscribe(one)
		held := k.receive(fromOne)
		require.Equal(k, "1", string(held.Payload))
		fromTwo := k.subscribe(two)

		require.NoError(k, one.Publisher().Publish(topic, series(keys[0], 3, 3)...))
		var others []*message.Message
		for shard, key := range keys[1:] {
			others = append(others, series(key, 100*shard, 100*shard+20)...)
		}
		require.NoError(k, one.Publisher().Publish(topic, others...))
		next := func() *message.Message {
			select {
			case msg := <-fromOne:
				return msg
			case msg := <-fromTwo:
				return msg
			case <-time.After(patience):
				require.FailNow(k, "nothing came")
				return nil
			}
		}
		for range others {
			msg := next()
			require.NotEqual(k, keys[0], msg.Metadata.Get(ordering.PartitionKeyMetadata))
			msg.Ack()
		}
		held.Ack()
		for _, want := range []string{"2", "3"} {
			msg := next()
			require.Equal(k, want, string(msg.Payload))
			msg.Ack()
		}
	})
}

// Members of a group compete for a shard, message by message: none is skipped or
// handled out of order. A query that tries the lock again for each message that it
// looks at, and gets it in between, has passed over those before.
func TestMembersTakeTurns(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		const members, messages = 3, 60
		handled := make(chan *message.Message)
		for range members {
			from := k.subscribe(k.open(k.config("group")))
			go func() {
				for msg := range from {
					select {
					case handled <- msg:
					case <-k.Context().Done():
						msg.Nack()
					}
				}
			}()
		}
		publisher := k.open(k.config("publisher"))
		require.NoError(k, publisher.Publisher().Publish(topic, series("key", 1, messages)...))
		for i := 1; i <= messages; i++ {
			msg := k.receive(handled)
			require.Equal(k, strconv.Itoa(i), string(msg.Payload))
			msg.Ack()
		}
	})
}

func TestNackedMessageComesBackBeforeTheNext(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 3)...))
		messages := k.subscribe(broker)
		var seen []string
		for nacks := 0; len(seen) < 5; {
			msg := k.receive(messages)
			seen = append(seen, string(msg.Payload))
			if string(msg.Payload) == "2" && nacks < 2 {
				nacks++
				msg.Nack()
				continue
			}
			msg.Ack()
		}
		require.Equal(k, []string{"1", "2", "2", "2", "3"}, seen)
	})
}

// B94, M5, M6: what a failed attempt wrote is gone, and an attempt after an error of
// the database works, although watermill-sql delivers again in its own transaction.
func TestFailedAttemptsLeaveNothingB94(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		record, effects := k.effects()
		broker := k.open(k.config("group"))
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 3)...))
		var attempts atomic.Int32
		stop := k.handle(broker, k.db, func(msg *message.Message) error {
			if err := record(msg); err != nil || string(msg.Payload) != "2" {
				return err
			}
			switch attempts.Add(1) {
			case 1:
				return errors.New("after the write")
			case 2:
				tx, _ := middleware.Tx(msg.Context())
				_, err := tx.ExecContext(msg.Context(), "INSERT INTO nowhere VALUES (1)")
				return err
			}
			return nil
		})
		defer stop()
		k.eventually(func() bool { return len(effects()) == 3 }, "three effects")
		require.Equal(k, []string{"1", "2", "3"}, effects())
	})
}

// M7: a handler that is slower than the ack deadline is told by its context, its
// transaction is rolled back, and the message comes again before the next one.
func TestHandlerSlowerThanTheAckDeadline(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		record, effects := k.effects()
		cfg := k.config("group")
		cfg.AckDeadline = time.Second
		broker := k.open(cfg)
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 3)...))
		var slow atomic.Int32
		stop := k.handle(broker, k.db, func(msg *message.Message) error {
			if err := record(msg); err != nil {
				return err
			}
			if string(msg.Payload) == "2" && slow.Add(1) <= 2 {
				<-msg.Context().Done()
				return nil // as if it had not noticed
			}
			return nil
		})
		defer stop()
		k.eventually(func() bool { return len(effects()) == 3 }, "three effects")
		require.Equal(k, []string{"1", "2", "3"}, effects())
		require.GreaterOrEqual(k, slow.Load(), int32(3)) // more on a machine that is slower than the deadline
	})
}

// The connection that holds the shard is killed while a handler runs. Its offset
// can't be written, the message comes again, and its key is known.
func TestConnectionOfAShardIsKilled(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		record, effects := k.effects()
		broker := k.open(k.config("group"))
		running, release := make(chan struct{}), make(chan struct{})
		var once sync.Once
		var duplicates atomic.Int32
		stop := k.handle(broker, k.db, func(msg *message.Message) error {
			if string(msg.Payload) == "1" {
				once.Do(func() { close(running) })
				<-release
			}
			return record(msg)
		}, middleware.WithObserver(func(_ context.Context, event middleware.Event) {
			if event.Outcome == middleware.Duplicate {
				duplicates.Add(1)
			}
		}))
		defer stop()
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 3)...))
		receiveClosed(k.T, running)
		k.killHolder()
		close(release)
		k.eventually(func() bool { return len(effects()) == 3 }, "three effects")
		require.Equal(k, []string{"1", "2", "3"}, effects())
		require.NotZero(k, duplicates.Load())
	})
}

// killHolder ends the connection that has the lock of a shard.
func (k *kit) killHolder() {
	k.Helper()
	if k.driver.Dialect == ordering.PostgreSQL {
		k.exec(`SELECT pg_terminate_backend(pid) FROM pg_locks WHERE relation = 'sqlshard_groups'::regclass
			AND mode = 'RowShareLock' AND pid <> pg_backend_pid()`)
		return
	}
	// Transactions of other shards, which find nothing, are seen only for a moment.
	var ids []int
	k.eventually(func() bool {
		rows, err := k.db.QueryContext(k.Context(), `SELECT t.trx_mysql_thread_id FROM information_schema.innodb_trx t
			JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
			WHERE p.db = DATABASE() AND p.command = 'Sleep' AND t.trx_rows_modified = 0 AND t.trx_tables_locked > 0`)
		require.NoError(k, err)
		ids = ids[:0]
		for rows.Next() {
			var id int
			require.NoError(k, rows.Scan(&id))
			ids = append(ids, id)
		}
		require.NoError(k, errors.Join(rows.Err(), rows.Close()))
		return len(ids) == 1
	}, "the holder of the lock")
	k.exec("KILL " + strconv.Itoa(ids[0]))
}

func receiveClosed(t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		require.FailNow(t, "it did not happen")
	}
}

// B86: a running handler is waited for, its ack is written although the subscription
// ends meanwhile, and the next process of the group goes on behind it.
func TestGracefulClose(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 2)...))
		ctx, cancel := context.WithCancel(k.Context())
		defer cancel()
		messages, err := broker.Subscriber().Subscribe(ctx, topic)
		require.NoError(k, err)
		running := k.receive(messages)
		cancel()
		closed := make(chan error, 1)
		go func() { closed <- broker.Close() }()
		select {
		case <-running.Context().Done():
			require.FailNow(k, "the close ended the context of a running handler")
		case err := <-closed:
			require.FailNow(k, "the broker was closed under a running handler", "%v", err)
		case <-time.After(200 * time.Millisecond):
		}
		running.Ack()
		require.NoError(k, receive(k.T, closed))
		require.Equal(k, []string{"2"}, k.take(k.subscribe(k.open(k.config("group"))), 1))
	})
}

func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		cfg := k.config("group")
		cfg.DrainTimeout = 200 * time.Millisecond
		broker, err := sqlshard.Open(k.Context(), cfg, nil)
		require.NoError(k, err)
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 2)...))
		messages := k.subscribe(broker)
		stuck := k.receive(messages)
		require.ErrorContains(k, broker.Close(), "1 messages were still running")
		receiveClosed(k.T, stuck.Context().Done())
		_, open := <-messages
		require.False(k, open)
		require.Equal(k, []string{"1", "2"}, k.take(k.subscribe(k.open(k.config("group"))), 2))
	})
}

// B91: handlers and subscriptions in one pool of the smallest size that is accepted.
func TestPoolOfTheSmallestSize(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		record, effects := k.effects()
		cfg := k.config("group")
		cfg.DB.SetMaxOpenConns(shards + 1)
		broker := k.open(cfg)
		_, err := broker.Subscriber().Subscribe(k.Context(), topic)
		require.ErrorIs(k, err, sqlshard.ErrConnections)
		require.ErrorContains(k, err, "limit of 5")
		require.ErrorContains(k, err, "need 6")

		cfg.DB.SetMaxOpenConns(shards + 2)
		const each = 20
		var messages []*message.Message
		for _, key := range keys() {
			messages = append(messages, series(key, 1, each)...)
		}
		require.NoError(k, broker.Publisher().Publish(topic, messages...))
		stop := k.handle(broker, cfg.DB, record)
		defer stop()
		k.eventually(func() bool { return len(effects()) == len(messages) }, "all effects")
	})
}

func TestSecondSubscribeIsRefused(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		ctx, cancel := context.WithCancel(k.Context())
		defer cancel()
		messages, err := broker.Subscriber().Subscribe(ctx, topic)
		require.NoError(k, err)
		_, err = broker.Subscriber().Subscribe(k.Context(), topic)
		require.ErrorIs(k, err, sqlshard.ErrSubscribed)
		require.ErrorContains(k, err, "two groups")
		cancel()
		for range messages {
		}
		k.subscribe(broker)
	})
}

// Rows that somebody else wrote don't stop their shard.
func TestForeignRows(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		require.NoError(k, broker.Declare(k.Context(), topic))
		shard := ordering.Shard("key", shards)
		foreign := []string{"", "no JSON", `{"a": 1}`, "null", `{"a": "b"}`}
		for i, metadata := range foreign {
			k.exec("INSERT INTO sqlshard_messages (topic, shard, message_offset, uuid, metadata, payload) VALUES (?, ?, ?, '', ?, 'x')",
				topic, shard, i+1, metadata)
		}
		k.exec("UPDATE sqlshard_shards SET last_offset = ? WHERE shard = ?", len(foreign), shard)
		require.NoError(k, broker.Publisher().Publish(topic, newMessage("key", "last")))
		messages := k.subscribe(broker)
		for i := range foreign {
			msg := k.receive(messages)
			require.Equal(k, strconv.Itoa(i+1), msg.Metadata.Get(sqlshard.OffsetMetadata))
			require.NotContains(k, msg.Metadata, ordering.PartitionKeyMetadata)
			msg.Ack()
		}
		require.Equal(k, []string{"last"}, k.take(messages, 1))
	})
}

// Only what all groups have acknowledged is deleted.
func TestDeleteAcknowledged(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker, slow := k.open(k.config("group")), k.open(k.config("slow"))
		remove := func(want int) {
			n, err := broker.DeleteAcknowledged(k.Context(), topic)
			require.NoError(k, err)
			require.EqualValues(k, want, n)
		}
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 1200)...))
		remove(0) // no group is known
		n, err := broker.DeleteAcknowledged(k.Context(), "unknown")
		require.NoError(k, err)
		require.Zero(k, n)
		require.Zero(k, k.count("SELECT COUNT(*) FROM sqlshard_shards WHERE topic = 'unknown'"))
		require.NoError(k, slow.Declare(k.Context(), topic))
		require.NoError(k, broker.Declare(k.Context(), topic))
		acknowledged := func(group string, offset int) {
			k.exec("UPDATE sqlshard_groups SET acked_offset = ? WHERE consumer_group = ? AND shard = ?", offset, group, ordering.Shard("key", shards))
		}
		acknowledged("group", 1200)
		remove(0) // for the group that has not begun
		acknowledged("slow", 1190)
		remove(1190)
		want := make([]string, 0, 10)
		for i := 1191; i <= 1200; i++ {
			want = append(want, strconv.Itoa(i))
		}
		require.Equal(k, want, k.take(k.subscribe(slow), 10))
	})
}
