package maintenance_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

const often = 10 * time.Millisecond

// start runs a router and returns what it ends with.
func start(t *testing.T, router *message.Router) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- router.Run(t.Context()) }()
	select {
	case <-router.Running():
	case err := <-done:
		require.FailNow(t, "the router did not start", "%v", err)
	}
	return done
}

func newRouter(t *testing.T) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	require.NoError(t, err)
	return router
}

func ignore(*message.Message) error { return nil }

// Two relays and a cleaner are parts of one router, beside its handlers. Close
// waits for the publish that is under way, and its rows are deleted.
func TestPlugins(t *testing.T) {
	t.Parallel()
	opts := []deduplicator.Option{deduplicator.WithRetention(retention)}
	db, store := open(t, testdb.SQLite, opts...)
	_, store2 := open(t, testdb.SQLite)
	process(t, store, claimOf("expired"))
	exec(t, db, "UPDATE processed_messages SET processed_at = "+ago(testdb.SQLite, 24*time.Hour))
	process(t, store, claimOf("a"), outputs("a", 1)...)
	age(t, db, testdb.SQLite)

	publishing, release := make(chan struct{}), make(chan struct{})
	broker := &broker{accept: func(string, *message.Message, int) error {
		close(publishing)
		<-release
		return nil
	}}
	cleaned := make(chan struct{}, 1000)
	router := newRouter(t)
	router.AddPlugin(
		newRelay(t, store, broker, deduplicator.WithInterval(often), deduplicator.WithPublishTimeout(patience)).Plugin,
		newRelay(t, store2, broker, deduplicator.WithInterval(often)).Plugin,
		newCleaner(t, store, deduplicator.WithInterval(often), deduplicator.WithCleanObserver(func(_ context.Context, result deduplicator.CleanResult) {
			if result.Rows > 0 {
				cleaned <- struct{}{}
			}
		})).Plugin,
	)
	channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	handled := make(chan struct{}, 1)
	router.AddConsumerHandler("stock", "orders", channel, func(*message.Message) error {
		handled <- struct{}{}
		return nil
	})
	done := start(t, router)
	<-publishing
	<-cleaned
	require.NoError(t, channel.Publish("orders", message.NewMessage("u", nil)))
	<-handled

	closed := make(chan error, 1)
	go func() { closed <- router.Close() }()
	select {
	case <-closed:
		t.Error("Close did not wait for the relay")
	case <-time.After(200 * time.Millisecond): // that it waits can't be seen
	}
	close(release)
	require.NoError(t, <-closed)
	require.NoError(t, <-done)
	require.Zero(t, left(t, db))
}

// ending is a subscriber whose subscriptions end when told.
type ending struct{ end chan struct{} }

func (s ending) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	messages := make(chan *message.Message)
	go func() {
		defer close(messages)
		select {
		case <-s.end:
		case <-ctx.Done():
		}
	}()
	return messages, nil
}

func (ending) Close() error { return nil }

// A router stops when the subscriptions of all handlers have ended, as without
// plugins, and not before.
func TestRouterStopsWithItsLastHandler(t *testing.T) {
	t.Parallel()
	db, store := open(t, testdb.SQLite, deduplicator.WithRetention(retention))
	for range 5 { // handlers are started in any order
		stopsWithItsLastHandler(t, store)
	}
	require.Zero(t, db.Stats().InUse)
}

func stopsWithItsLastHandler(t *testing.T, store *deduplicator.SQLStore) {
	t.Helper()
	router := newRouter(t)
	var passes atomic.Int32
	router.AddPlugin(
		newRelay(t, store, &broker{}, deduplicator.WithInterval(often), deduplicator.WithRelayObserver(func(context.Context, deduplicator.RelayResult) {
			passes.Add(1)
		})).Plugin,
		newCleaner(t, store).Plugin,
	)
	first, second := ending{make(chan struct{})}, ending{make(chan struct{})}
	close(first.end) // before others are started, which takes its time
	router.AddPlugin(func(router *message.Router) error {
		router.AddPublisherDecorators(func(pub message.Publisher) (message.Publisher, error) {
			time.Sleep(20 * time.Millisecond)
			return pub, nil
		})
		return nil
	})
	for i := range 8 {
		router.AddConsumerHandler(fmt.Sprint("first ", i), "t", first, ignore)
	}
	router.AddHandler("second", "t", second, "out", &broker{}, message.PassthroughHandler)
	done := start(t, router)
	before := passes.Load()
	require.Eventually(t, func() bool { return passes.Load() > before+3 }, patience, often)
	require.False(t, router.IsClosed())
	close(second.end)
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(patience):
		require.FailNow(t, "the router does not stop")
	}
}

// A router that has only plugins runs until it is closed.
func TestRouterOfPluginsOnly(t *testing.T) {
	t.Parallel()
	db, store := open(t, testdb.SQLite)
	process(t, store, claimOf("a"), outputs("a", 1)...)
	age(t, db, testdb.SQLite)
	router := newRouter(t)
	router.AddPlugin(newRelay(t, store, &broker{}, deduplicator.WithInterval(often)).Plugin)
	done := start(t, router)
	require.Eventually(t, func() bool { return left(t, db) == 0 }, patience, often)
	require.NoError(t, router.Close())
	require.NoError(t, <-done)
}

type refusing struct{ ending }

var errSubscribe = errors.New("no such topic")

func (refusing) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	return nil, errSubscribe
}

// A router that can't start leaves nothing running: goleak looks.
func TestRouterThatDoesNotStart(t *testing.T) {
	t.Parallel()
	_, store := open(t, testdb.SQLite)
	for range 5 { // handlers are started in any order
		router := newRouter(t)
		router.AddPlugin(newRelay(t, store, &broker{}, deduplicator.WithInterval(often)).Plugin)
		router.AddConsumerHandler("stock", "t", refusing{}, ignore)
		require.ErrorContains(t, router.Run(t.Context()), "no such topic")
	}
}

// captured is a logger that keeps errors.
type captured struct {
	watermill.NopLogger
	errs chan error
}

func (c captured) Error(_ string, err error, _ watermill.LogFields) {
	select {
	case c.errs <- err:
	default:
	}
}

func (c captured) With(watermill.LogFields) watermill.LoggerAdapter { return c }

// Without an observer the errors of a plugin are in the router's log.
func TestPluginsLogErrors(t *testing.T) {
	t.Parallel()
	db, store := open(t, testdb.SQLite, deduplicator.WithRetention(retention))
	exec(t, db, "DROP TABLE produced_messages")
	exec(t, db, "DROP TABLE processed_messages")
	for table, plugin := range map[string]message.RouterPlugin{
		"produced_messages":  newRelay(t, store, &broker{}, deduplicator.WithInterval(often)).Plugin,
		"processed_messages": newCleaner(t, store, deduplicator.WithInterval(often)).Plugin,
	} {
		logger := captured{errs: make(chan error, 1)}
		router, err := message.NewRouter(message.RouterConfig{}, logger)
		require.NoError(t, err)
		router.AddPlugin(plugin)
		done := start(t, router)
		require.ErrorContains(t, <-logger.errs, table)
		require.NoError(t, router.Close())
		require.NoError(t, <-done)
	}
}
