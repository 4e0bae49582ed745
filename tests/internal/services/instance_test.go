package services_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

func TestInstanceSurvivesFaults(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	in := services.NewInstance(t, services.Postgres)
	address := in.Value()
	db, err := sql.Open("pgx", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := db.ExecContext(ctx, "CREATE TABLE kept AS SELECT 42 AS n"); err != nil {
		t.Fatal(err)
	}

	faults := []struct {
		name       string
		fail, mend func() error
	}{
		{"killed", in.Kill, func() error { return in.Start(ctx) }},
		{"paused", in.Pause, in.Resume},
		{"stopped", func() error { return in.Stop(ctx) }, func() error { return in.Start(ctx) }},
		{"killed while paused", func() error {
			if err := in.Pause(); err != nil {
				return err
			}
			return in.Kill()
		}, func() error { return in.Start(ctx) }},
	}
	for _, fault := range faults { // one after the other: they share the server
		// A backend that is busy does not notice that its postmaster is gone.
		go func() { _, _ = db.ExecContext(ctx, "SELECT pg_sleep(60)") }()
		if err := fault.fail(); err != nil {
			t.Fatalf("%s: %v", fault.name, err)
		}
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		err := in.Ready(short)
		cancel()
		if err == nil {
			t.Fatalf("%s: still ready", fault.name)
		}
		if !strings.Contains(err.Error(), "postgres at "+in.Addr()) || !strings.Contains(err.Error(), "database system") {
			t.Errorf("%s: error without name, address or log: %v", fault.name, err)
		}
		if err := fault.mend(); err != nil {
			t.Fatalf("%s: mend: %v", fault.name, err)
		}
		if err := in.Ready(ctx); err != nil {
			t.Fatalf("%s: %v", fault.name, err)
		}
		var n int
		if err := db.QueryRowContext(ctx, "SELECT n FROM kept").Scan(&n); err != nil || n != 42 {
			// The pool may hand out a connection that died with the server.
			if err = db.QueryRowContext(ctx, "SELECT n FROM kept").Scan(&n); err != nil || n != 42 {
				t.Errorf("%s: read %d, %v", fault.name, n, err)
			}
		}
		if in.Value() != address {
			t.Errorf("%s: moved to %s", fault.name, in.Addr())
		}
	}
}
