package outbox_test

import (
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/outbox"
)

var _ message.Publisher = (*outbox.Outbox)(nil)

func TestOptions(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		dialect deduplicator.Dialect
		options []outbox.Option
		wrong   string // what the error names, or ""
	}{
		"postgresql":   {deduplicator.PostgreSQL, nil, ""},
		"mysql":        {deduplicator.MySQL, []outbox.Option{outbox.WithTable("shop.outbox"), outbox.WithPollInterval(outbox.MinPollInterval)}, ""},
		"sqlite":       {deduplicator.SQLite, nil, "SQLite"},
		"no dialect":   {"", nil, "dialect"},
		"table":        {deduplicator.MySQL, []outbox.Option{outbox.WithTable("a`b")}, "WithTable"},
		"long table":   {deduplicator.MySQL, []outbox.Option{outbox.WithTable(strings.Repeat("a", 60))}, "WithTable"},
		"interval":     {deduplicator.MySQL, []outbox.Option{outbox.WithPollInterval(time.Millisecond)}, "WithPollInterval"},
		"zero":         {deduplicator.MySQL, []outbox.Option{outbox.WithPollInterval(0)}, "WithPollInterval"},
		"all of these": {deduplicator.SQLite, []outbox.Option{outbox.WithPollInterval(0)}, "SQLite"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			box, err := outbox.New(tt.dialect, tt.options...)
			switch {
			case tt.wrong == "" && (err != nil || box == nil):
				t.Errorf("New: %v", err)
			case tt.wrong != "" && (!errors.Is(err, deduplicator.ErrInvalidOption) || !strings.Contains(err.Error(), tt.wrong)):
				t.Errorf("New: %v, want one that names %s", err, tt.wrong)
			}
		})
	}
}

func TestSchema(t *testing.T) {
	t.Parallel()
	for dialect, parts := range map[deduplicator.Dialect][]string{
		deduplicator.PostgreSQL: {`"shop"."outbox" (`, "BYTEA", `"shop"."outbox_lock" (`},
		deduplicator.MySQL:      {"`shop`.`outbox` (", "LONGBLOB", "`shop`.`outbox_lock` ("},
	} {
		box, err := outbox.New(dialect, outbox.WithTable("shop.outbox"))
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range parts {
			if !strings.Contains(box.Schema(), part) {
				t.Errorf("%s: %q is missing in\n%s", dialect, part, box.Schema())
			}
		}
	}
}

func TestMissingArguments(t *testing.T) {
	t.Parallel()
	box, err := outbox.New(deduplicator.MySQL)
	if err != nil {
		t.Fatal(err)
	}
	_, noDB := box.Forwarder(nil, box, nil)
	_, noPublisher := box.Forwarder(new(sql.DB), nil, nil)
	for _, err := range []error{noDB, noPublisher, box.Migrate(t.Context(), nil)} {
		if !errors.Is(err, deduplicator.ErrInvalidOption) {
			t.Errorf("%v is no ErrInvalidOption", err)
		}
	}
	if err := box.Publish("topic", message.NewMessage("uuid", nil)); !errors.Is(err, outbox.ErrNoTx) {
		t.Errorf("Publish: %v", err)
	}
	if err := box.Close(); err != nil {
		t.Error(err)
	}
}
