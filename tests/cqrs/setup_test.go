// Package cqrs_test runs the chain with plain handlers and with those of
// Watermill's cqrs component. What it shows about keys:
//
// The scope of a key is the name of the Watermill handler. Event and command
// handlers of cqrs have one each. An event group has one for all of its handlers:
// they share the key and the transaction, so they take effect together or not at
// all, and a handler that is added to a group later does not see what the group
// has processed.
//
// An event of another type than a handler's is an error, which is retried and
// parked. With AckOnUnknownEvent it counts as processed, and its key is recorded.
//
// CommandProcessorConfig.AckCommandHandlingErrors hides the error of the handler
// from the chain, which commits what the handler wrote before it.
package cqrs_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/routers"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	flag.Parse()
	goleak.VerifyTestMain(m)
}

// patience is for what must happen.
const patience = time.Minute

const (
	events = 5
	copies = 3 // of each event
)

// shop is one database, one broker, and routers on both.
type shop struct {
	t       *testing.T
	db      *sql.DB
	dialect deduplicator.Dialect
	broker  *gochannel.GoChannel
	poison  *gochannel.GoChannel

	mu       sync.Mutex
	outcomes map[string]int // by handler/outcome
}

func setup(t *testing.T, driver testdb.Driver) *shop {
	t.Helper()
	s := &shop{
		t: t, db: testdb.Open(t, driver), dialect: driver.Dialect, outcomes: map[string]int{},
		broker: gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{}),
		poison: gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{}),
	}
	require.NoError(t, deduplicator.Migrate(t.Context(), s.db, s.dialect))
	_, err := s.db.ExecContext(t.Context(), "CREATE TABLE effects (handler varchar(64) NOT NULL, event varchar(64) NOT NULL)")
	require.NoError(t, err)
	return s
}

// router runs what add adds to a Router with the chain until the test ends. Keys
// are UUIDs. Routers of one shop are the instances of a service.
func (s *shop) router(add func(router *message.Router)) {
	s.t.Helper()
	store, err := deduplicator.NewSQLStore(s.t.Context(), s.db, s.dialect)
	require.NoError(s.t, err)
	chain, err := middleware.Chain(
		middleware.WithObserver(func(_ context.Context, event middleware.Event) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.outcomes[event.Handler+"/"+string(event.Outcome)]++
		}),
		middleware.WithPoisonQueue(s.poison, "poison"),
		middleware.WithRetry(middleware.Retry{MaxRetries: 2, InitialInterval: 5 * time.Millisecond}),
		middleware.Deduplicate(store, middleware.WithKey(deduplicator.FromUUID())),
	)
	require.NoError(s.t, err)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(s.t, err)
	router.AddMiddleware(chain...)
	add(router)
	routers.Run(s.t, router)
}

func (s *shop) seen(handler string, outcome middleware.Outcome) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.outcomes[handler+"/"+string(outcome)]
}

// ended waits until each of handlers has seen n deliveries to their end.
func (s *shop) ended(n int, handlers ...string) {
	s.t.Helper()
	for _, handler := range handlers {
		require.Eventually(s.t, func() bool {
			return s.seen(handler, middleware.Processed)+s.seen(handler, middleware.Duplicate)+s.seen(handler, middleware.Parked) >= n
		}, patience, 5*time.Millisecond, "%s did not see %d deliveries to their end", handler, n)
	}
}

// effect is what every handler does.
func (s *shop) effect(ctx context.Context, handler, event string) error {
	tx, ok := middleware.Tx(ctx)
	if !ok {
		return errors.New("no transaction")
	}
	_, err := tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO effects (handler, event) VALUES ('%s', '%s')", handler, event))
	return err
}

// pairs reads two columns, sorted.
func (s *shop) pairs(query string) []string {
	s.t.Helper()
	rows, err := s.db.QueryContext(s.t.Context(), query)
	require.NoError(s.t, err)
	var pairs []string
	for rows.Next() {
		var a, b string
		require.NoError(s.t, rows.Scan(&a, &b))
		pairs = append(pairs, a+" "+b)
	}
	require.NoError(s.t, errors.Join(rows.Err(), rows.Close()))
	slices.Sort(pairs)
	return pairs
}

func (s *shop) effects() []string { s.t.Helper(); return s.pairs("SELECT handler, event FROM effects") }

// keys are the recorded ones, with their scopes.
func (s *shop) keys() []string {
	s.t.Helper()
	return s.pairs("SELECT consumer_name, message_key FROM " + deduplicator.DefaultProcessedTable)
}

// each is what is there when each of names has seen each event once.
func each(names ...string) []string {
	var pairs []string
	for _, name := range names {
		for i := range events {
			pairs = append(pairs, fmt.Sprint(name, " ", i))
		}
	}
	slices.Sort(pairs)
	return pairs
}

// publish sends each message as many times as copies says.
func (s *shop) publish(topic string, messages ...*message.Message) {
	s.t.Helper()
	for range copies {
		for _, msg := range messages {
			require.NoError(s.t, s.broker.Publish(topic, msg.Copy()))
		}
	}
}

type orderPlaced struct{ ID string }

type orderCancelled struct{ ID string }

type placeOrder struct{ ID string }

var marshaler = cqrs.JSONMarshaler{GenerateName: cqrs.StructName}

// orders returns one message for each event, with its number as UUID.
func orders[T any](t *testing.T, event func(id string) *T) []*message.Message {
	t.Helper()
	messages := make([]*message.Message, events)
	for i := range messages {
		id := fmt.Sprint(i)
		msg, err := marshaler.Marshal(event(id))
		require.NoError(t, err)
		msg.UUID = id
		messages[i] = msg
	}
	return messages
}
