package kafka_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

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
