package sqlshard_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqlhook"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/sqlshard"
)

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		sent := newMessage("Käse", "\x00\xff")
		sent.Metadata.Set("event_id", "e1'\"\\\x00")
		sent.Metadata.Set(sqlshard.OffsetMetadata, "7") // as a message that was read elsewhere
		empty := newMessage("Käse", "")
		empty.UUID, empty.Payload = "", nil
		before := time.Now().Add(-time.Millisecond)
		require.NoError(k, broker.Publisher().Publish(topic, sent, empty))

		messages := k.subscribe(broker)
		got := k.receive(messages)
		got.Ack()
		require.Equal(k, sent.UUID, got.UUID)
		require.Equal(k, sent.Payload, got.Payload)
		written, err := time.Parse(time.RFC3339Nano, got.Metadata.Get(ordering.PublishedAtMetadata))
		require.NoError(k, err)
		require.WithinRange(k, written, before, time.Now())
		delete(got.Metadata, ordering.PublishedAtMetadata)
		require.Equal(k, message.Metadata{
			"event_id":                    "e1'\"\\\x00",
			ordering.PartitionKeyMetadata: "Käse",
			sqlshard.ShardMetadata:        strconv.Itoa(ordering.Shard("Käse", shards)),
			sqlshard.OffsetMetadata:       "1",
		}, got.Metadata)
		got = k.receive(messages)
		got.Ack()
		require.Equal(k, "", got.UUID)
		require.Empty(k, got.Payload)
	})
}

// A Publish that is slow to commit holds up later ones to its shard, so no reader
// passes over its messages.
func TestLateCommitIsNotSkipped(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		ctx, keys := k.Context(), keys()
		slow, fast := k.open(k.config("publisher")), k.open(k.config("publisher"))
		messages := k.subscribe(k.open(k.config("group")))

		// The slow one has stored in the first shard and waits for the last.
		lock, err := k.db.BeginTx(ctx, nil)
		require.NoError(k, err)
		_, err = lock.ExecContext(ctx, "UPDATE sqlshard_shards SET last_offset = last_offset WHERE topic = '"+topic+"' AND shard = "+strconv.Itoa(shards-1))
		require.NoError(k, err)
		published := make(chan error, 2)
		go func() {
			published <- slow.Publisher().Publish(topic, newMessage(keys[0], "1"), newMessage(keys[shards-1], "other"))
		}()
		k.eventually(func() bool {
			tx, err := k.db.BeginTx(ctx, nil)
			require.NoError(k, err)
			defer tx.Rollback()
			var last int
			err = tx.QueryRowContext(ctx, "SELECT last_offset FROM sqlshard_shards WHERE topic = '"+topic+"' AND shard = 0 FOR UPDATE NOWAIT").Scan(&last)
			return err != nil || last > 0 // locked by the slow one, or advanced already
		}, "the first shard")

		go func() { published <- fast.Publisher().Publish(topic, newMessage(keys[0], "2")) }()
		select {
		case msg := <-messages:
			require.FailNow(k, "delivered before the one that was published earlier", "%s", msg.Payload)
		case err := <-published:
			require.FailNow(k, "stored behind an offset that is not committed", "%v", err)
		case <-time.After(300 * time.Millisecond):
		}
		require.NoError(k, lock.Rollback())
		require.NoError(k, receive(k.T, published))
		require.NoError(k, receive(k.T, published))
		got := k.take(messages, 3)
		require.Less(k, slices.Index(got, "1"), slices.Index(got, "2"))
	})
}

// Many publish to one shard at the same time while it is read: each message comes
// once, those of one publisher in their order, and the offsets have no gap.
func TestPublishedAtOnce(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		const publishers, each = 4, 15
		messages := k.subscribe(k.open(k.config("group")))
		var all sync.WaitGroup
		for p := range publishers {
			broker := k.open(k.config("publisher"))
			all.Go(func() {
				for i := range each {
					if err := broker.Publisher().Publish(topic, newMessage("key", strconv.Itoa(p*each+i))); err != nil {
						k.Error(err)
					}
				}
			})
		}
		next := map[int]int{} // of each publisher
		for offset := 1; offset <= publishers*each; offset++ {
			msg := k.receive(messages)
			require.Equal(k, strconv.Itoa(offset), msg.Metadata.Get(sqlshard.OffsetMetadata))
			n, err := strconv.Atoi(string(msg.Payload))
			require.NoError(k, err)
			require.Equal(k, next[n/each], n%each, "of publisher %d", n/each)
			next[n/each]++
			msg.Ack()
		}
		all.Wait()
	})
}

// A Publish has all of its messages stored, or none, in as many statements as they
// need.
func TestPublishIsOneTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		require.NoError(k, broker.Publisher().Publish(topic, series("key", 1, 250)...))
		require.Equal(k, 250, k.count("SELECT COUNT(*) FROM sqlshard_messages"))

		// The row of one shard is gone, so a call that needs it fails in the middle.
		keys := keys()
		k.exec("DELETE FROM sqlshard_shards WHERE shard = ?", shards-1)
		err := broker.Publisher().Publish(topic, newMessage(keys[0], "a"), newMessage(keys[shards-1], "b"))
		require.ErrorContains(k, err, "shard 3 is missing")
		require.NotErrorIs(k, err, sqlshard.ErrOutcomeUnknown)
		require.Equal(k, 250, k.count("SELECT COUNT(*) FROM sqlshard_messages"))
	})
}

// The answer to the commit is lost, before the database has it or after: Publish says
// that it does not know.
func TestLostCommitOfPublish(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		for step, stored := range map[sqlhook.Step]int{sqlhook.Commit: 0, sqlhook.CommitDone: 1} {
			var armed atomic.Bool
			cfg := k.config("group")
			pool := cfg.DB
			cfg.DB = sql.OpenDB(sqlhook.Wrap(sqlhook.Borrow(pool), func(_ context.Context, e sqlhook.Event) error {
				if e.Step == step && armed.CompareAndSwap(true, false) {
					return sqlhook.ErrCut
				}
				return nil
			}))
			k.Cleanup(func() { require.NoError(k, cfg.DB.Close()) })
			broker, topic := k.open(cfg), "topic-"+strconv.Itoa(stored)
			require.NoError(k, broker.Declare(k.Context(), topic))
			armed.Store(true)
			msg := newMessage("key", "")
			require.ErrorIs(k, broker.Publisher().Publish(topic, msg), sqlshard.ErrOutcomeUnknown)
			require.Equal(k, stored, k.count("SELECT COUNT(*) FROM sqlshard_messages WHERE topic = ?", topic))
			require.NoError(k, broker.Publisher().Publish(topic, msg))
			require.Equal(k, stored+1, k.count("SELECT COUNT(*) FROM sqlshard_messages WHERE topic = ?", topic))
		}
	})
}

// B75 and what the columns can't keep: a typed error, and nothing is stored.
func TestPublishChecksAllBeforeSending(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		ok := newMessage("key", "fine")
		with := func(change func(*message.Message)) *message.Message {
			msg := newMessage("key", "")
			change(msg)
			return msg
		}
		for name, test := range map[string]struct {
			topic string
			msg   *message.Message
			want  error
		}{
			"no key":         {topic, newMessage("", ""), ordering.ErrInvalidKey},
			"long key":       {topic, newMessage(strings.Repeat("k", 256), ""), ordering.ErrInvalidKey},
			"long UUID":      {topic, with(func(m *message.Message) { m.UUID = strings.Repeat("u", 256) }), sqlshard.ErrInvalidMessage},
			"UUID with NUL":  {topic, with(func(m *message.Message) { m.UUID = "\x00" }), sqlshard.ErrInvalidMessage},
			"binary value":   {topic, with(func(m *message.Message) { m.Metadata.Set("a", "\xff") }), sqlshard.ErrInvalidMessage},
			"binary field":   {topic, with(func(m *message.Message) { m.Metadata.Set("\xff", "a") }), sqlshard.ErrInvalidMessage},
			"no topic":       {"", newMessage("key", ""), sqlshard.ErrInvalidTopic},
			"topic of words": {"two words", newMessage("key", ""), sqlshard.ErrInvalidTopic},
			"long topic":     {strings.Repeat("t", 256), newMessage("key", ""), sqlshard.ErrInvalidTopic},
		} {
			require.ErrorIs(k, broker.Publisher().Publish(test.topic, ok, test.msg), test.want, name)
		}
		require.ErrorIs(k, broker.Declare(k.Context(), "two words"), sqlshard.ErrInvalidTopic)
		require.Zero(k, k.count("SELECT COUNT(*) FROM sqlshard_messages"))
		require.NoError(k, broker.Publisher().Publish(topic))
	})
}

// A topic with another number of shards is refused on every way to it; without an
// explicit number any is taken, and a new topic gets the default.
func TestShardCount(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		ctx := k.Context()
		require.NoError(k, k.open(k.config("group")).Declare(ctx, topic))
		cfg := k.config("group")
		cfg.Shards = shards + 1
		other := k.open(cfg)
		_, subscribed := other.Subscriber().Subscribe(ctx, topic)
		for _, err := range []error{
			other.Declare(ctx, topic),
			other.Publisher().Publish(topic, newMessage("key", "")),
			subscribed,
		} {
			var count *sqlshard.ShardCountError
			require.ErrorAs(k, err, &count)
			require.ErrorIs(k, err, sqlshard.ErrShardCount)
			require.Equal(k, sqlshard.ShardCountError{Topic: topic, Have: shards, Want: shards + 1}, *count)
		}
		cfg = k.config("group")
		cfg.Shards = 0
		any := k.open(cfg)
		require.NoError(k, any.Publisher().Publish(topic, newMessage("key", "")))
		require.NoError(k, any.Declare(ctx, "new"))
		require.Equal(k, sqlshard.DefaultShards, k.count("SELECT COUNT(*) FROM sqlshard_shards WHERE topic = ?", "new"))
		require.Equal(k, shards, k.count("SELECT COUNT(*) FROM sqlshard_shards WHERE topic = ?", topic))
	})
}

// Many processes may start at the same time, some of them with another number.
func TestConcurrentDeclare(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		const each = 2
		var brokers []*sqlshard.Broker
		for _, n := range []int{shards, 2 * shards} {
			for range each {
				cfg := k.config("group")
				cfg.Shards = n
				brokers = append(brokers, k.open(cfg))
			}
		}
		for round := range 3 {
			// All find no shard, and then wait for a row that is taken back.
			topic := "topic-" + strconv.Itoa(round)
			tx, err := k.db.BeginTx(k.Context(), nil)
			require.NoError(k, err)
			_, err = tx.ExecContext(k.Context(), "INSERT INTO sqlshard_shards (topic, shard, last_offset) VALUES ('"+topic+"', 0, 0)")
			require.NoError(k, err)
			errs := make(chan error)
			for _, broker := range brokers {
				go func() { errs <- broker.Declare(k.Context(), topic) }()
				time.Sleep(50 * time.Millisecond) // a chance to come first; the result does not depend on it
			}
			require.NoError(k, tx.Rollback())
			var refused int
			for range brokers {
				if err := receive(k.T, errs); err != nil {
					require.ErrorIs(k, err, sqlshard.ErrShardCount)
					refused++
				}
			}
			require.Equal(k, each, refused)
			n := k.count("SELECT COUNT(*) FROM sqlshard_shards WHERE topic = ?", topic)
			require.Contains(k, []int{shards, 2 * shards}, n)
			require.Equal(k, n, k.count("SELECT COUNT(*) FROM sqlshard_groups WHERE topic = ?", topic))
		}
	})
}

// A Publish that waits for a lock ends in time, and says that nothing is stored.
func TestPublishIsBounded(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		cfg := k.config("group")
		cfg.PublishTimeout = 200 * time.Millisecond
		impatient, broker := k.open(cfg), k.open(k.config("group"))
		require.NoError(k, broker.Publisher().Publish(topic, newMessage("key", "1")))
		tx, err := k.db.BeginTx(k.Context(), nil)
		require.NoError(k, err)
		_, err = tx.ExecContext(k.Context(), "UPDATE sqlshard_shards SET last_offset = last_offset")
		require.NoError(k, err)
		err = impatient.Publisher().Publish(topic, newMessage("key", "2"))
		require.Error(k, err)
		require.False(k, errors.Is(err, sqlshard.ErrOutcomeUnknown), err)
		require.NoError(k, tx.Rollback())
		require.NoError(k, broker.Publisher().Publish(topic, newMessage("key", "3")))
		require.Equal(k, []string{"1", "3"}, k.take(k.subscribe(broker), 2))
	})
}

func TestClosedBroker(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		messages := k.subscribe(broker)
		require.NoError(k, broker.Close())
		_, open := <-messages
		require.False(k, open)
		require.ErrorIs(k, broker.Publisher().Publish(topic, newMessage("key", "")), sqlshard.ErrClosed)
		require.ErrorIs(k, broker.Declare(k.Context(), topic), sqlshard.ErrClosed)
		_, err := broker.Subscriber().Subscribe(k.Context(), topic)
		require.ErrorIs(k, err, sqlshard.ErrClosed)
	})
}

func TestTablesThatAreMissing(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		k.exec("ALTER TABLE sqlshard_groups DROP COLUMN acked_offset")
		k.exec("DROP TABLE sqlshard_messages")
		_, err := sqlshard.Open(k.Context(), k.config("group"), nil)
		require.ErrorIs(k, err, sqlshard.ErrSchema)
		for _, part := range []string{"sqlshard_messages", "sqlshard_groups, column acked_offset", "sqlshard.Migrate"} {
			require.ErrorContains(k, err, part)
		}
		ctx, cancel := context.WithCancel(k.Context())
		cancel()
		_, err = sqlshard.Open(ctx, k.config("group"), nil)
		require.ErrorIs(k, err, context.Canceled)
	})
}
