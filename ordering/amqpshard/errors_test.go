package amqpshard_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

func TestErrorsMatch(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	for name, test := range map[string]struct {
		err      error
		matches  []error
		excludes []error
	}{
		"topology":    {&amqpshard.TopologyError{Kind: "queue", Name: "q", Err: cause}, []error{amqpshard.ErrTopology, cause}, nil},
		"message":     {&amqpshard.MessageError{Reason: "too long"}, []error{amqpshard.ErrInvalidMessage}, nil},
		"unroutable":  {&amqpshard.PublishError{Unroutable: []string{"u"}, Err: cause}, []error{amqpshard.ErrUnroutable, cause}, nil},
		"unconfirmed": {&amqpshard.PublishError{Unconfirmed: []string{"u"}, Err: cause}, []error{cause}, []error{amqpshard.ErrUnroutable}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, err := range []error{test.err, fmt.Errorf("wrapped: %w", test.err)} {
				for _, target := range test.matches {
					if !errors.Is(err, target) {
						t.Errorf("%q does not match %q", err, target)
					}
				}
				for _, target := range test.excludes {
					if errors.Is(err, target) {
						t.Errorf("%q matches %q", err, target)
					}
				}
			}
		})
	}
}

func TestPublishErrorText(t *testing.T) {
	t.Parallel()
	text := (&amqpshard.PublishError{
		Topic: "orders", Unroutable: []string{"a"}, Unconfirmed: []string{"b", "c", "d", "e"}, Unsent: []string{"f"}, Err: errors.New("cause"),
	}).Error()
	for _, want := range []string{`"orders"`, "1 unroutable", `["a"]`, "4 unconfirmed, may or may not be stored", `["b" "c" "d"] and others`, "1 not sent", "cause"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not say %q", text, want)
		}
	}
}

// The text is that of RabbitMQ 3.10 and 4 for an exchange type without plugin,
// tests/amqp compares it with the broker's.
func TestMissingPluginSaysHowToEnableIt(t *testing.T) {
	t.Parallel()
	err := amqpshard.ErrorOfDeclare("exchange", "orders.stock", &amqp.Error{
		Code: amqp.CommandInvalid, Reason: "COMMAND_INVALID - unknown exchange type 'x-consistent-hash'",
	})
	if !errors.Is(err, amqpshard.ErrPluginMissing) || !strings.Contains(err.Error(), "rabbitmq-plugins enable rabbitmq_consistent_hash_exchange") {
		t.Errorf("the error is %v", err)
	}
}
