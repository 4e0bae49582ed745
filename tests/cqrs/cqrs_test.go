package cqrs_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// B43: several handlers of all kinds on one topic, in two routers on one
// database, none of which takes another's key.
func TestHandlersOnOneTopicB43(t *testing.T) {
	t.Parallel()
	for _, driver := range []testdb.Driver{testdb.SQLite, testdb.PGX} {
		t.Run(driver.Name, func(t *testing.T) {
			t.Parallel()
			s := setup(t, driver)
			consume := func(name string) message.NoPublishHandlerFunc {
				return func(msg *message.Message) error { return s.effect(msg.Context(), name, msg.UUID) }
			}
			for range 2 {
				s.router(func(router *message.Router) {
					router.AddHandler("stock", "orders", s.broker, "reserved", s.broker, func(msg *message.Message) ([]*message.Message, error) {
						return []*message.Message{message.NewMessage(msg.UUID, nil)}, s.effect(msg.Context(), "stock", msg.UUID)
					})
					router.AddConsumerHandler("mail", "orders", s.broker, consume("mail"))
					router.AddConsumerHandler("bill", "orders", s.broker, consume("bill"))
					// The same UUIDs come here on another topic.
					router.AddConsumerHandler("ledger", "reserved", s.broker, consume("ledger"))
				})
			}
			s.publish("orders", orders(t, func(id string) *orderPlaced { return &orderPlaced{id} })...)
			names := []string{"stock", "mail", "bill"}
			s.ended(2*copies*events, names...)
			require.Eventually(t, func() bool { return s.seen("ledger", middleware.Processed) == events }, patience, 5*time.Millisecond)
			require.Equal(t, each(append(names, "ledger")...), s.effects())
			require.Equal(t, each(append(names, "ledger")...), s.keys())
		})
	}
}

func (s *shop) eventProcessor(router *message.Router, topic string, ackUnknown bool) *cqrs.EventProcessor {
	processor, err := cqrs.NewEventProcessorWithConfig(router, cqrs.EventProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventProcessorGenerateSubscribeTopicParams) (string, error) { return topic, nil },
		SubscriberConstructor: func(cqrs.EventProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return s.broker, nil
		},
		Marshaler:         marshaler,
		AckOnUnknownEvent: ackUnknown,
	})
	require.NoError(s.t, err)
	return processor
}

// Event handlers on one topic see each event of their type once, and take note
// of the others.
func TestEventProcessor(t *testing.T) {
	t.Parallel()
	s := setup(t, testdb.SQLite)
	for range 2 {
		s.router(func(router *message.Router) {
			require.NoError(t, s.eventProcessor(router, "orders", true).AddHandlers(
				cqrs.NewEventHandler("stock", func(ctx context.Context, event *orderPlaced) error { return s.effect(ctx, "stock", event.ID) }),
				cqrs.NewEventHandler("mail", func(ctx context.Context, event *orderPlaced) error { return s.effect(ctx, "mail", event.ID) }),
				cqrs.NewEventHandler("refund", func(ctx context.Context, event *orderCancelled) error { return s.effect(ctx, "refund", event.ID) }),
			))
		})
	}
	s.publish("orders", orders(t, func(id string) *orderPlaced { return &orderPlaced{id} })...)
	s.ended(2*copies*events, "stock", "mail", "refund")
	require.Equal(t, each("stock", "mail"), s.effects())
	require.Equal(t, each("stock", "mail", "refund"), s.keys())
}

// Watermill refuses two handlers with one name on one router, which would share
// their keys.
func TestNamesAreUnique(t *testing.T) {
	t.Parallel()
	s := setup(t, testdb.SQLite)
	s.router(func(router *message.Router) {
		handler := cqrs.NewEventHandler("stock", func(context.Context, *orderPlaced) error { return nil })
		require.NoError(t, s.eventProcessor(router, "orders", true).AddHandlers(handler))
		require.PanicsWithError(t, message.DuplicateHandlerNameError{HandlerName: "stock"}.Error(), func() {
			_ = s.eventProcessor(router, "other", true).AddHandlers(handler)
		})
	})
}

func (s *shop) commandProcessor(router *message.Router, ackErrors bool) *cqrs.CommandProcessor {
	processor, err := cqrs.NewCommandProcessorWithConfig(router, cqrs.CommandProcessorConfig{
		GenerateSubscribeTopic: func(params cqrs.CommandProcessorGenerateSubscribeTopicParams) (string, error) {
			return params.CommandName, nil
		},
		SubscriberConstructor: func(cqrs.CommandProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return s.broker, nil
		},
		Marshaler:                marshaler,
		AckCommandHandlingErrors: ackErrors,
	})
	require.NoError(s.t, err)
	return processor
}

// A command is carried out once, although its first attempts fail after they have
// written.
func TestCommandProcessor(t *testing.T) {
	t.Parallel()
	s := setup(t, testdb.SQLite)
	var attempts atomic.Int32
	for range 2 {
		s.router(func(router *message.Router) {
			require.NoError(t, s.commandProcessor(router, false).AddHandlers(
				cqrs.NewCommandHandler("place", func(ctx context.Context, command *placeOrder) error {
					if err := s.effect(ctx, "place", command.ID); err != nil {
						return err
					}
					if attempts.Add(1) <= 2 {
						return errors.New("fails after its write")
					}
					return nil
				}),
			))
		})
	}
	s.publish("placeOrder", orders(t, func(id string) *placeOrder { return &placeOrder{id} })...)
	s.ended(2*copies*events, "place")
	require.Equal(t, each("place"), s.effects())
	require.Equal(t, each("place"), s.keys())
	require.Equal(t, events, s.seen("place", middleware.Processed))
	require.Zero(t, s.seen("place", middleware.Parked))
}

// The chain never sees the errors that AckCommandHandlingErrors acknowledges.
func TestAckCommandHandlingErrorsCommits(t *testing.T) {
	t.Parallel()
	s := setup(t, testdb.SQLite)
	s.router(func(router *message.Router) {
		require.NoError(t, s.commandProcessor(router, true).AddHandlers(
			cqrs.NewCommandHandler("place", func(ctx context.Context, command *placeOrder) error {
				return errors.Join(s.effect(ctx, "place", command.ID), errors.New("fails after its write"))
			}),
		))
	})
	s.publish("placeOrder", orders(t, func(id string) *placeOrder { return &placeOrder{id} })...)
	s.ended(copies*events, "place")
	require.Equal(t, each("place"), s.effects())
	require.Equal(t, each("place"), s.keys())
}

func (s *shop) groupProcessor(router *message.Router, ackUnknown bool) *cqrs.EventGroupProcessor {
	processor, err := cqrs.NewEventGroupProcessorWithConfig(router, cqrs.EventGroupProcessorConfig{
		GenerateSubscribeTopic: func(cqrs.EventGroupProcessorGenerateSubscribeTopicParams) (string, error) { return "orders", nil },
		SubscriberConstructor: func(cqrs.EventGroupProcessorSubscriberConstructorParams) (message.Subscriber, error) {
			return s.broker, nil
		},
		Marshaler:         marshaler,
		AckOnUnknownEvent: ackUnknown,
	})
	require.NoError(s.t, err)
	return processor
}

// The handlers of a group share a key and a transaction: when the second one
// fails, the first one's writes are undone too, and both run again. Two groups
// share nothing.
func TestEventGroupProcessor(t *testing.T) {
	t.Parallel()
	s := setup(t, testdb.SQLite)
	var attempts atomic.Int32
	on := func(name string) cqrs.GroupEventHandler {
		return cqrs.NewGroupEventHandler(func(ctx context.Context, event *orderPlaced) error { return s.effect(ctx, name, event.ID) })
	}
	for range 2 {
		s.router(func(router *message.Router) {
			processor := s.groupProcessor(router, false)
			require.NoError(t, processor.AddHandlersGroup("shop",
				on("stock"),
				cqrs.NewGroupEventHandler(func(ctx context.Context, event *orderPlaced) error {
					if attempts.Add(1) <= 2 {
						return errors.New("the second handler fails after the first one's write")
					}
					return s.effect(ctx, "mail", event.ID)
				}),
				cqrs.NewGroupEventHandler(func(ctx context.Context, event *orderCancelled) error { return s.effect(ctx, "refund", event.ID) }),
			))
			require.NoError(t, processor.AddHandlersGroup("audit", on("audit log")))
		})
	}
	s.publish("orders", orders(t, func(id string) *orderPlaced { return &orderPlaced{id} })...)
	s.ended(2*copies*events, "shop", "audit")
	require.Equal(t, each("stock", "mail", "audit log"), s.effects())
	require.Equal(t, each("shop", "audit"), s.keys())
	require.GreaterOrEqual(t, s.seen("shop", middleware.Retried), 2)
}

// An event that no handler of a group, or not the handler, is for is an error, so
// it is parked, unless AckOnUnknownEvent says otherwise.
func TestUnknownEvent(t *testing.T) {
	t.Parallel()
	s := setup(t, testdb.SQLite)
	handle := func(context.Context, *orderCancelled) error { return nil }
	s.router(func(router *message.Router) {
		require.NoError(t, s.eventProcessor(router, "orders", false).AddHandlers(cqrs.NewEventHandler("strict", handle)))
		require.NoError(t, s.groupProcessor(router, false).AddHandlersGroup("strict group", cqrs.NewGroupEventHandler(handle)))
		require.NoError(t, s.groupProcessor(router, true).AddHandlersGroup("lenient group", cqrs.NewGroupEventHandler(handle)))
	})
	s.publish("orders", orders(t, func(id string) *orderPlaced { return &orderPlaced{id} })...)
	s.ended(copies*events, "strict", "strict group", "lenient group")
	require.Equal(t, copies*events, s.seen("strict", middleware.Parked))
	require.Equal(t, copies*events, s.seen("strict group", middleware.Parked))
	require.Equal(t, events, s.seen("lenient group", middleware.Processed))
	require.Equal(t, each("lenient group"), s.keys())
}
