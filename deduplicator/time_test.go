package deduplicator_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func TestTimeFuncs(t *testing.T) {
	t.Parallel()
	metadata := deduplicator.TimeFromMetadata("published_at")
	uuid := deduplicator.TimeFromUUIDv7(deduplicator.FromMetadata("published_at"))
	ulid := deduplicator.TimeFromULID(deduplicator.FromMetadata("published_at"))
	for _, tt := range []struct {
		name  string
		time  deduplicator.TimeFunc
		value string
		want  string // RFC 3339; empty: an error
	}{
		{"metadata", metadata, "2026-03-01T10:00:00Z", "2026-03-01T10:00:00Z"},
		{"metadata", metadata, "2026-03-01T10:00:00.123456789+08:00", "2026-03-01T02:00:00.123456789Z"},
		{"metadata", metadata, "2026-03-01 10:00:00", ""},
		{"metadata", metadata, "1772359200", ""},
		{"metadata", metadata, "secret", ""},

		// RFC 9562, appendix A.6.
		{"UUID", uuid, "017F22E2-79B0-7CC3-98C4-DC0C0C07398F", "2022-02-22T19:22:22Z"},
		{"UUID", uuid, "017f22e279b07cc398c4dc0c0c07398f", "2022-02-22T19:22:22Z"},
		{"UUID", uuid, "00000000-0000-7000-8000-000000000000", "1970-01-01T00:00:00Z"},
		{"UUID", uuid, "017F22E2-79B0-4CC3-98C4-DC0C0C07398F", ""}, // version 4
		{"UUID", uuid, "017F22E2-79B0-7CC3-C8C4-DC0C0C07398F", ""}, // another variant
		{"UUID", uuid, "017F22E2-79B0-7CC3-98C4-DC0C0C07398", ""},
		{"UUID", uuid, "secret", ""},
		{"UUID", uuid, "", ""},

		// The ULID specification's example, 1469918176385 ms.
		{"ULID", ulid, "01ARYZ6S41TSV4RRFFQ69G5FAV", "2016-07-30T22:36:16.385Z"},
		{"ULID", ulid, "01aryz6s41tsv4rrffq69g5fav", "2016-07-30T22:36:16.385Z"},
		{"ULID", ulid, "7ZZZZZZZZZZZZZZZZZZZZZZZZZ", "10889-08-02T05:31:50.655Z"},
		{"ULID", ulid, "8ZZZZZZZZZZZZZZZZZZZZZZZZZ", ""}, // over 128 bits
		{"ULID", ulid, "01ARYZ6S41TSV4RRFFQ69G5FAU", ""}, // U is not in the alphabet
		{"ULID", ulid, "01ARYZ6S41TSV4RRFFQ69G5FA", ""},
		{"ULID", ulid, "ééééééééééééé", ""}, // 26 bytes
		{"ULID", ulid, "", ""},
	} {
		t.Run(tt.name+" "+tt.value, func(t *testing.T) {
			t.Parallel()
			msg := message.NewMessage("u", nil)
			msg.Metadata.Set("published_at", tt.value)
			got, err := tt.time(msg)
			if tt.want != "" {
				if err != nil || got.UTC().Format(time.RFC3339Nano) != tt.want {
					t.Errorf("%v, %v; want %s", got.UTC(), err, tt.want)
				}
				return
			}
			if !errors.Is(err, deduplicator.ErrNoTime) && !errors.Is(err, deduplicator.ErrNoKey) || !got.IsZero() {
				t.Errorf("%v, error %v", got, err)
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("the error shows the value: %v", err)
			}
		})
	}
	if got, err := metadata(message.NewMessage("u", nil)); err != nil || !got.IsZero() {
		t.Errorf("without the field: %v, %v; want the zero time", got, err)
	}
}
