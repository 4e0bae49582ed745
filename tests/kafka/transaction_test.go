package kafka_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

// K5: with a transactional id a Publish is seen as a whole or not at all, and the
// next one works.
func TestTransactionalPublish(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.TransactionalID = unique("id")
		broker := open(t, cfg)
		require.NoError(t, broker.Publisher().Publish(topic, series("key", 3)...))

		failing := append(series("key", 2), newMessage("other", strings.Repeat("x", 2<<20)), newMessage("key", "after"))
		err := broker.Publisher().Publish(topic, failing...)
		var failed *kafkashard.PublishError
		require.ErrorAs(t, err, &failed)
		require.NotErrorIs(t, err, kafkashard.ErrOutcomeUnknown)
		require.Equal(t, uuids(failing...), failed.Unsent)

		var wg sync.WaitGroup
		errs := make([]error, 3)
		for i := range errs {
			wg.Go(func() { errs[i] = broker.Publisher().Publish(topic, newMessage("key", "4"), newMessage("key", "5")) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		got := payloads(take(t, subscribe(t, broker, topic), 9))
		require.Equal(t, []string{"1", "2", "3", "4", "5", "4", "5", "4", "5"}, got, "nothing of the aborted one, and no two mixed")
	})
}

// K3: of two with one id, the later one goes on, whatever the other one tries.
func TestTransactionalIDFencesTheOther(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg, topic := config(brokers), unique("topic")
		cfg.TransactionalID = unique("id")
		first := open(t, cfg)
		require.NoError(t, first.Publisher().Publish(topic, newMessage("key", "first")))
		second := open(t, cfg)
		require.NoError(t, second.Publisher().Publish(topic, newMessage("key", "second")))
		for range 3 {
			err := first.Publisher().Publish(topic, newMessage("key", "zombie"))
			require.ErrorIs(t, err, kafkashard.ErrFenced)
			require.NotErrorIs(t, err, kafkashard.ErrOutcomeUnknown)
		}
		require.NoError(t, second.Publisher().Publish(topic, newMessage("key", "goes on")))
		require.Equal(t, []string{"first", "second", "goes on"}, payloads(take(t, subscribe(t, second, topic), 3)))
	})
}

// B84: a Publish that ended while it waited for the one before it sends nothing
// afterwards.
func TestTransactionAfterItsTimeout(t *testing.T) {
	t.Parallel()
	cluster := fake(t)
	cfg, topic := config(cluster.ListenAddrs()), unique("topic")
	cfg.TransactionalID, cfg.PublishTimeout = unique("id"), 500*time.Millisecond
	broker := open(t, cfg)
	require.NoError(t, broker.Declare(t.Context(), topic))
	held := make(chan struct{})
	cluster.ControlKey(int16(kmsg.EndTxn), func(kmsg.Request) (kmsg.Response, error, bool) {
		cluster.SleepControl(func() { <-held })
		return nil, nil, false
	})
	for _, payload := range []string{"held", "waiting", "waiting"} {
		err := broker.Publisher().Publish(topic, newMessage("key", payload))
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	close(held)
	publish := func() bool { return broker.Publisher().Publish(topic, newMessage("key", "later")) == nil }
	require.Eventually(t, publish, patience, 10*time.Millisecond)
	require.Equal(t, []string{"held", "later"}, payloads(take(t, subscribe(t, broker, topic), 2)))
}
