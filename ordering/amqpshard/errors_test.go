package amqpshard_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

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

// A node of RabbitMQ 3.10 that can't make quorum queues any more says only
// INTERNAL_ERROR.
func TestInternalErrorSaysWhatToDo(t *testing.T) {
	t.Parallel()
	refused := &amqp.Error{Code: amqp.InternalError, Reason: "INTERNAL_ERROR"}
	err := amqpshard.ErrorOfDeclare("queue", "orders.stock.000", refused)
	if !errors.Is(err, refused) || !strings.Contains(err.Error(), "see its log") || !strings.Contains(err.Error(), "restart of the node") {
		t.Errorf("the error is %v", err)
	}
}

// What comes again is logged after 5 s, 10 s, … 5 min, and what comes after a quiet
// time is new.
func TestRepeatsAreLoggedAtGrowingPauses(t *testing.T) {
	t.Parallel()
	began := time.Now()
	logged := func(from, to time.Duration) (n int) {
		var times []time.Time
		for d := time.Duration(0); d < to; d += time.Second {
			times = append(times, began.Add(d))
		}
		for _, news := range amqpshard.News(times...)[from/time.Second:] {
			if news {
				n++
			}
		}
		return n
	}
	for _, tt := range []struct {
		from, to time.Duration
		want     int
	}{
		{0, time.Second, 1},
		{0, 5 * time.Second, 1},
		{0, 16 * time.Second, 3},
		{time.Hour, 2 * time.Hour, 12},
	} {
		if n := logged(tt.from, tt.to); n != tt.want {
			t.Errorf("from %s to %s: %d times, want %d", tt.from, tt.to, n, tt.want)
		}
	}
	again := amqpshard.News(began, began.Add(time.Second), began.Add(time.Hour), began.Add(time.Hour+6*time.Second))
	if !slices.Equal(again, []bool{true, false, true, true}) {
		t.Errorf("after an hour: %v", again)
	}
}
