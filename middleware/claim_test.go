package middleware_test

import (
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// The store gets the time of the first publish, from where it is by default and
// from where WithTime says.
func TestTimeOfTheClaim(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	for name, tt := range map[string]struct {
		opts   []middleware.DeduplicateOption
		fields map[string]string
		want   time.Time
		parked string // part of the reason
	}{
		"default": {
			fields: map[string]string{ordering.PublishedAtMetadata: "2026-03-01T11:00:00+01:00"}, want: at,
		},
		"default, missing": {want: time.Time{}},
		"default, malformed": {
			fields: map[string]string{ordering.PublishedAtMetadata: "yesterday"}, parked: "RFC 3339",
		},
		"other field": {
			opts:   []middleware.DeduplicateOption{middleware.WithTime(deduplicator.TimeFromMetadata("born"))},
			fields: map[string]string{ordering.PublishedAtMetadata: "yesterday", "born": "2026-03-01T10:00:00Z"}, want: at,
		},
		"key that has none": {
			opts:   []middleware.DeduplicateOption{middleware.WithTime(deduplicator.TimeFromUUIDv7(deduplicator.FromMetadata("event_id")))},
			parked: "UUID of version 7",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			links := func(b *bench) []middleware.Link {
				return []middleware.Link{
					middleware.WithPoisonQueue(b.poison, "poison"),
					middleware.WithRetry(middleware.Retry{MaxRetries: 3}),
					middleware.Deduplicate(b.store, append(tt.opts, byEventID())...),
				}
			}
			run(t, links, func(*message.Message) ([]*message.Message, error) { return nil, nil }, func(b *bench) {
				msg := newMessage("a", "1")
				for field, value := range tt.fields {
					msg.Metadata.Set(field, value)
				}
				b.deliver(t, msg)
				claims, parked := b.store.saw(), b.poison.sent("poison")
				if tt.parked != "" {
					if len(claims) != 0 || len(parked) != 1 || !strings.Contains(parked[0].Metadata.Get("reason_poisoned"), tt.parked) {
						t.Fatalf("claims %v, parked %v", claims, parked)
					}
					return
				}
				if len(claims) != 1 || !claims[0].Time.Equal(tt.want) || len(parked) != 0 {
					t.Fatalf("claims %v, parked %v; want time %v", claims, parked, tt.want)
				}
			})
		})
	}
	_, err := middleware.Chain(middleware.Deduplicate(newMemoryStore(), byEventID(), middleware.WithTime(nil)))
	if err == nil || !strings.Contains(err.Error(), "WithTime: function is nil") {
		t.Errorf("error %v", err)
	}
}

// The store is told that the message may be known: by RabbitMQ's mark, and after
// an attempt of which it is not known whether it was committed.
func TestRedeliveredClaims(t *testing.T) {
	t.Parallel()
	redelivered := func(claims []deduplicator.Claim) (flags []bool) {
		for _, claim := range claims {
			flags = append(flags, claim.Redelivered)
		}
		return flags
	}
	nothing := func(*message.Message) ([]*message.Message, error) { return nil, nil }
	run(t, full, nothing, func(b *bench) {
		b.deliver(t, newMessage("a", "1"))
		marked := newMessage("b", "1")
		marked.Metadata.Set("amqpshard_redelivered", "true")
		b.deliver(t, marked)
		want(t, "redelivered", redelivered(b.store.saw()), []bool{false, true})
	})
	for err, expected := range map[error]bool{deduplicator.ErrOutcomeUnknown: true, deduplicator.ErrUnavailable: false} {
		run(t, full, nothing, func(b *bench) {
			b.store.fail(err)
			b.deliver(t, newMessage("a", "1"))
			b.until(func() bool { return len(b.store.saw()) >= 2 })
			b.store.fail(nil)
			b.until(func() bool {
				return len(b.events.outcomes()) > 0 && b.events.outcomes()[len(b.events.outcomes())-1] == middleware.Processed
			})
			want(t, err.Error(), redelivered(b.store.saw()[:2]), []bool{false, expected})
			b.deliver(t, newMessage("b", "1")) // another delivery knows nothing of it
			claims := b.store.saw()
			want(t, "next delivery", redelivered(claims[len(claims)-1:]), []bool{false})
		})
	}
}

func TestWithFingerprint(t *testing.T) {
	t.Parallel()
	first := func(msg *message.Message) []byte { return msg.Payload[:1] }
	for name, tt := range map[string]struct {
		fingerprint deduplicator.FingerprintFunc
		outcomes    []middleware.Outcome // of payloads that begin alike, and of one that does not
	}{
		"none":        {nil, []middleware.Outcome{"processed", "duplicate", "duplicate"}},
		"of its own":  {first, []middleware.Outcome{"processed", "duplicate", "conflict"}},
		"the payload": {deduplicator.PayloadFingerprint, []middleware.Outcome{"processed", "conflict", "conflict"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			links := func(b *bench) []middleware.Link {
				return []middleware.Link{
					middleware.WithPoisonQueue(b.poison, "poison"),
					middleware.Deduplicate(b.store, byEventID(), middleware.WithFingerprint(tt.fingerprint)),
				}
			}
			run(t, links, func(*message.Message) ([]*message.Message, error) { return nil, nil }, func(b *bench) {
				for _, payload := range []string{"a1", "a2", "b1"} {
					b.deliver(t, newMessage("k", payload))
				}
				want(t, "outcomes", b.events.outcomes(), tt.outcomes)
			})
		})
	}
}
