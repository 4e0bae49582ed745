package ordering_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// B80: versions are numbers in one form; everything else is refused, since it
// can't be told which is newer.
func TestParseVersionB80(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{
		"0": 0, "1": 1, "9": 9, "10": 10, "999": 999, "1000": 1000, "9223372036854775807": math.MaxInt64,
	} {
		if got, err := ordering.ParseVersion(text); got != want || err != nil {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{
		"", "010", "00", "-1", "-0", "+1", "1e3", "1.0", "0x10", "0b1", "1_000", " 1", "1 ", "1\n", "1\x00", "ten", "١", "１",
		"9223372036854775808", "18446744073709551616", strings.Repeat("9", 100_000),
	} {
		got, err := ordering.ParseVersion(text)
		if got != 0 || !errors.Is(err, ordering.ErrInvalidVersion) {
			t.Errorf("%.40q: %d, %v", text, got, err)
		}
		if len(fmt.Sprint(err)) > 200 {
			t.Errorf("%.40q: the error has %d bytes", text, len(err.Error()))
		}
	}
}

func TestVersionFromMetadata(t *testing.T) {
	t.Parallel()
	msg := message.NewMessage("u", nil)
	msg.Metadata.Set("version", "12")
	if got, err := ordering.VersionFromMetadata("version")(msg); got != 12 || err != nil {
		t.Errorf("%d, %v", got, err)
	}
	_, err := ordering.VersionFromMetadata("revision")(msg)
	if !errors.Is(err, ordering.ErrInvalidVersion) || !strings.Contains(err.Error(), `"revision"`) {
		t.Errorf("error %v does not name the field", err)
	}
}

func FuzzParseVersion(f *testing.F) {
	f.Add("0")
	f.Add("9223372036854775807")
	f.Add("010")
	f.Fuzz(func(t *testing.T, text string) {
		version, err := ordering.ParseVersion(text)
		if err == nil && (version < 0 || fmt.Sprint(version) != text) {
			t.Errorf("%q is %d", text, version)
		}
	})
}

func TestVersionsOptions(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "a b", "a.b.c", strings.Repeat("v", 64), `v"; --`} {
		_, err := ordering.Schema(ordering.PostgreSQL, ordering.WithVersionsTable(name))
		if !errors.Is(err, ordering.ErrInvalidOption) || !strings.Contains(err.Error(), "WithVersionsTable") || !strings.Contains(err.Error(), "1 to 63") {
			t.Errorf("%q: %v", name, err)
		}
	}
	_, err := ordering.NewVersions(t.Context(), nil, "oracle", ordering.WithVersionsTable("a b"))
	for _, part := range []string{`"oracle"`, `"a b"`, "db is nil"} {
		if !errors.Is(err, ordering.ErrInvalidOption) || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not in: %v", part, err)
		}
	}
	if err := ordering.Migrate(t.Context(), nil, ordering.MySQL); !errors.Is(err, ordering.ErrInvalidOption) {
		t.Error(err)
	}
	for _, dialect := range []ordering.Dialect{ordering.PostgreSQL, ordering.MySQL, ordering.SQLite} {
		schema, err := ordering.Schema(dialect, ordering.WithVersionsTable("app.v"))
		if err != nil || strings.ContainsAny(schema, "{}") || !strings.Contains(schema, dialect.Quote("app.v")) {
			t.Errorf("%s: %v\n%s", dialect, err, schema)
		}
	}
}
