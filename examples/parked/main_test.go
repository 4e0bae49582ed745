package main

import (
	"context"
	"database/sql"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// setup parks the events 2 and 4 of the entity "order 7".
func setup(t *testing.T) (dsn string) {
	t.Helper()
	dsn = "file:" + filepath.Join(t.TempDir(), "parked.db") + "?_txlock=immediate"
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := ordering.Migrate(t.Context(), db, ordering.SQLite); err != nil {
		t.Fatal(err)
	}
	sequence, err := ordering.NewSequence(t.Context(), db, ordering.SQLite)
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range []int64{2, 4} {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sequence.ProcessTx(t.Context(), tx, ordering.SequencedDelivery{
			Event:   ordering.SequencedEvent{Consumer: "stock", Entity: "order 7", Position: ordering.Position{Seq: seq}},
			Message: message.NewMessage("uuid", message.Payload("{}\n")),
		}); err != nil {
			t.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	return dsn
}

func TestCommands(t *testing.T) {
	t.Parallel()
	dsn := setup(t)
	for _, step := range []struct {
		args string
		code int
		want []string // parts of what it prints
	}{
		{"list", 0, []string{"CONSUMER", "stock", "order 7", "0/2", "0/4", "gap", "open"}},
		{"list -entity other", 0, []string{"CONSUMER"}},
		{"list -payload -limit 1", 0, []string{`"{}\n"`}},
		{"retry -consumer stock -entity order_7", 1, []string{"retry", "entity is not blocked"}},
		{"skip -consumer stock -entity order_7", 0, []string{"last event 0/1, was 0/0"}},
		{"skip -consumer stock -entity nobody", 1, []string{`"nobody"`, "no such entity"}},
		{"drop -consumer stock -entity order_7 -seq 4", 0, []string{"deleted: {", `"Seq":4`}},
		{"drop -consumer stock -entity order_7 -seq 4", 1, []string{"no such parked message"}},
		{"list -reason odd", 1, []string{`"odd"`}},
		{"-h", 0, []string{"-dsn", "list ", "retry ", "skip ", "drop ", "-entity order-7"}},
		{"list -h", 0, []string{"-consumer", "-limit"}},
		{"", 2, []string{"no command"}},
		{"sip", 2, []string{`unknown command "sip"`}},
		{"list extra", 2, []string{`"extra"`}},
		{"list -bad", 2, []string{"-bad"}},
		{"skip -consumer stock", 2, []string{"needs -consumer and -entity"}},
		{"drop -consumer stock -entity e", 2, []string{"needs -seq"}},
	} {
		args := append([]string{"-db", "sqlite"}, strings.Fields(step.args)...)
		for i, arg := range args {
			args[i] = strings.ReplaceAll(arg, "order_7", "order 7")
		}
		var stdout, stderr strings.Builder
		code := run(t.Context(), args, func(string) string { return dsn }, &stdout, &stderr)
		if code != step.code {
			t.Errorf("%q exits with %d: %s%s", step.args, code, &stdout, &stderr)
		}
		if lines := strings.Count(stderr.String(), "\n"); (code == 0) != (lines == 0) || lines > 1 {
			t.Errorf("%q prints %d lines of error: %s", step.args, lines, &stderr)
		}
		for _, part := range step.want {
			if printed := stdout.String() + stderr.String(); !strings.Contains(printed, part) {
				t.Errorf("%q does not print %q but %s", step.args, part, printed)
			}
		}
	}
}

// What is wrong with the database is said in one line that holds no password.
func TestConnectionErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ db, dsn, want string }{
		{"oracle", "x", `"oracle"`},
		{"sqlite", "", "PARKED_DSN"},
		{"sqlite", "file:" + filepath.Join(t.TempDir(), "empty.db"), "ordering.Migrate"},
		{"postgres", "postgres://u:topsecret@127.0.0.1:1/x", "does not answer"},
		{"postgres", "postgres://u:topsecret@127.0.0.1:port/x", ""},
		{"mysql", "u:topsecret@tcp(127.0.0.1:1)/x", "does not answer"},
		{"mysql", "u:topsecret@nonsense", "not a data source name"},
	} {
		var stdout, stderr strings.Builder
		code := run(context.WithoutCancel(t.Context()), []string{"-db", tt.db, "-dsn", tt.dsn, "list"}, func(string) string { return "" }, &stdout, &stderr)
		got := stderr.String()
		if code == 0 || strings.Count(got, "\n") != 1 || !strings.Contains(got, tt.want) || strings.Contains(got, "topsecret") {
			t.Errorf("%s: exit code %d, %s", tt.db, code, got)
		}
	}
}
