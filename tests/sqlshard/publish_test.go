package sqlshard_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/sqlshard"
)

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		sent := newMessage("Käse", "\x00\xff")
		sent.Metadata.Set("event_id", "e1'\"\\")
		sent.Metadata.Set(sqlshard.OffsetMetadata, "7") // as a message that was read elsewhere
		empty := newMessage("Käse", "")
		empty.UUID, empty.Payload = "", nil
		before := time.Now().Add(-time.Millisecond)
		require.NoError(t, broker.Publisher().Publish(topic, sent, empty))

		messages := k.subscribe(broker)
		got := k.receive(messages)
		got.Ack()
		require.Equal(t, sent.UUID, got.UUID)
		require.Equal(t, sent.Payload, got.Payload)
		written, err := time.Parse(time.RFC3339Nano, got.Metadata.Get(ordering.PublishedAtMetadata))
		require.NoError(t, err)
		require.WithinRange(t, written, before, time.Now())
		delete(got.Metadata, ordering.PublishedAtMetadata)
		require.Equal(t, message.Metadata{
			"event_id":                    "e1'\"\\",
			ordering.PartitionKeyMetadata: "Käse",
			sqlshard.ShardMetadata:        strconv.Itoa(ordering.Shard("Käse", shards)),
			sqlshard.OffsetMetadata:       "1",
		}, got.Metadata)
		got = k.receive(messages)
		got.Ack()
		require.Equal(t, "", got.UUID)
		require.Empty(t, got.Payload)
	})
}

// Many publish to one shard at the same time while it is read: the offsets have no
// gap, and none is read past. With offsets that are taken before the transaction
// that stores them, a message that is committed late is never delivered.
func TestPublishedAtOnceAndReadInOrder(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		const publishers, each = 8, 40
		reader := k.open(k.config("group"))
		messages := k.subscribe(reader)
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
		last := map[int]int{} // of each publisher
		for offset := 1; offset <= publishers*each; offset++ {
			msg := k.receive(messages)
			require.Equal(k, strconv.Itoa(offset), msg.Metadata.Get(sqlshard.OffsetMetadata))
			n, err := strconv.Atoi(string(msg.Payload))
			require.NoError(k, err)
			require.Equal(k, last[n/each], n%each, "of publisher %d", n/each)
			last[n/each]++
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
		require.NoError(t, broker.Publisher().Publish(topic, series("key", 1, 250)...))
		require.Equal(t, 250, k.count("SELECT COUNT(*) FROM sqlshard_messages"))

		// The row of one shard is gone, so a call that needs it fails in the middle.
		keys := keys()
		k.exec("DELETE FROM sqlshard_shards WHERE shard = ?", shards-1)
		err := broker.Publisher().Publish(topic, newMessage(keys[0], "a"), newMessage(keys[shards-1], "b"))
		require.ErrorContains(t, err, "shard 3 is missing")
		require.NotErrorIs(t, err, sqlshard.ErrOutcomeUnknown)
		require.Equal(t, 250, k.count("SELECT COUNT(*) FROM sqlshard_messages"))
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
			require.ErrorIs(t, broker.Publisher().Publish(test.topic, ok, test.msg), test.want, name)
		}
		require.ErrorIs(t, broker.Declare(t.Context(), "two words"), sqlshard.ErrInvalidTopic)
		require.Zero(t, k.count("SELECT COUNT(*) FROM sqlshard_messages"))
		require.NoError(t, broker.Publisher().Publish(topic))
	})
}

// A topic with another number of shards is refused on every way to it; without an
// explicit number any is taken, and a new topic gets the default.
func TestShardCount(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		ctx := k.Context()
		require.NoError(t, k.open(k.config("group")).Declare(ctx, topic))
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
			require.ErrorAs(t, err, &count)
			require.ErrorIs(t, err, sqlshard.ErrShardCount)
			require.Equal(t, sqlshard.ShardCountError{Topic: topic, Have: shards, Want: shards + 1}, *count)
		}
		cfg = k.config("group")
		cfg.Shards = 0
		any := k.open(cfg)
		require.NoError(t, any.Publisher().Publish(topic, newMessage("key", "")))
		require.NoError(t, any.Declare(ctx, "new"))
		require.Equal(t, sqlshard.DefaultShards, k.count("SELECT COUNT(*) FROM sqlshard_shards WHERE topic = ?", "new"))
		require.Equal(t, shards, k.count("SELECT COUNT(*) FROM sqlshard_shards WHERE topic = ?", topic))
	})
}

// Many processes may start at the same time, some of them with another number.
func TestConcurrentDeclare(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		errs := make(chan error)
		const each = 5
		for _, n := range []int{shards, 2 * shards} {
			for range each {
				cfg := k.config("group")
				cfg.Shards = n
				broker := k.open(cfg)
				go func() { errs <- broker.Declare(k.Context(), topic) }()
			}
		}
		var refused int
		for range 2 * each {
			if err := <-errs; err != nil {
				require.ErrorIs(k, err, sqlshard.ErrShardCount)
				refused++
			}
		}
		require.Equal(t, each, refused)
		n := k.count("SELECT COUNT(*) FROM sqlshard_shards")
		require.Contains(t, []int{shards, 2 * shards}, n)
		require.Equal(t, n, k.count("SELECT COUNT(*) FROM sqlshard_groups"))
	})
}

// A Publish that waits for a lock ends in time, and says that nothing is stored.
func TestPublishIsBounded(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		cfg := k.config("group")
		cfg.PublishTimeout = 200 * time.Millisecond
		broker := k.open(cfg)
		require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "1")))
		tx, err := k.db.BeginTx(k.Context(), nil)
		require.NoError(t, err)
		_, err = tx.ExecContext(k.Context(), "UPDATE sqlshard_shards SET last_offset = last_offset")
		require.NoError(t, err)
		err = broker.Publisher().Publish(topic, newMessage("key", "2"))
		require.Error(t, err)
		require.False(t, errors.Is(err, sqlshard.ErrOutcomeUnknown), err)
		require.NoError(t, tx.Rollback())
		require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "3")))
		require.Equal(t, []string{"1", "3"}, k.take(k.subscribe(broker), 2))
	})
}

func TestClosedBroker(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		broker := k.open(k.config("group"))
		messages := k.subscribe(broker)
		require.NoError(t, broker.Close())
		_, open := <-messages
		require.False(t, open)
		require.ErrorIs(t, broker.Publisher().Publish(topic, newMessage("key", "")), sqlshard.ErrClosed)
		require.ErrorIs(t, broker.Declare(t.Context(), topic), sqlshard.ErrClosed)
		_, err := broker.Subscriber().Subscribe(t.Context(), topic)
		require.Error(t, err)
	})
}

func TestTablesThatAreMissing(t *testing.T) {
	t.Parallel()
	onEach(t, func(k *kit) {
		k.exec("ALTER TABLE sqlshard_groups DROP COLUMN acked_offset")
		k.exec("DROP TABLE sqlshard_messages")
		_, err := sqlshard.Open(t.Context(), k.config("group"), nil)
		require.ErrorIs(t, err, sqlshard.ErrSchema)
		for _, part := range []string{"sqlshard_messages", "sqlshard_groups, column acked_offset", "sqlshard.Migrate"} {
			require.ErrorContains(t, err, part)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = sqlshard.Open(ctx, k.config("group"), nil)
		require.ErrorIs(t, err, context.Canceled)
	})
}
