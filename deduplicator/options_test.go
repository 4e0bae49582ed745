package deduplicator_test

import (
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

func TestOptions(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("t", 63)
	for _, tt := range []struct {
		name    string
		dialect deduplicator.Dialect // PostgreSQL if empty
		opts    []deduplicator.Option
		want    []string // in the message; none: accepted
	}{
		{name: "none"},
		{name: "each at its bound", opts: []deduplicator.Option{
			deduplicator.WithTables("app."+long, "_"), deduplicator.WithClaimTimeout(10 * time.Millisecond),
			deduplicator.WithTxRetries(0), deduplicator.WithIsolation(sql.LevelSerializable), deduplicator.WithKnownKeys(0),
			deduplicator.WithRetention(50 * 365 * 24 * time.Hour), deduplicator.WithMaxAttempts(1),
			deduplicator.WithLeasesTable("a.b"), deduplicator.WithAttemptsTable(long),
		}},
		{name: "the last one wins", opts: []deduplicator.Option{deduplicator.WithTxRetries(-1), deduplicator.WithTxRetries(1)}},
		{name: "dialect", dialect: "oracle", want: []string{"dialect", `"oracle"`, `"postgresql"`}},
		{
			name: "empty table", opts: []deduplicator.Option{deduplicator.WithTables("", "b")},
			want: []string{"WithTables", `""`, "1 to 63"},
		},
		{
			name: "long table", opts: []deduplicator.Option{deduplicator.WithTables("a", long+"t")},
			want: []string{"WithTables", long, "1 to 63"},
		},
		{
			name: "table with SQL in it", opts: []deduplicator.Option{deduplicator.WithTables(`a"; DROP TABLE b; --`, "b")},
			want: []string{"WithTables", "DROP TABLE", "letters, digits and underscores"},
		},
		{
			name: "one table twice", opts: []deduplicator.Option{deduplicator.WithTables("a", "a")},
			want: []string{"WithTables", `"a"`, "both"},
		},
		{
			name: "claim timeout", opts: []deduplicator.Option{deduplicator.WithClaimTimeout(10*time.Millisecond - 1)},
			want: []string{"WithClaimTimeout", "9.999999ms", "10ms"},
		},
		{
			name: "retention", opts: []deduplicator.Option{deduplicator.WithRetention(time.Hour - 1)},
			want: []string{"WithRetention", "59m59.999999999s", "1h0m0s"},
		},
		{
			// A cutoff before the year 1734 would become one in the future, and the cleaner delete all.
			name: "durations that overflow", opts: []deduplicator.Option{
				deduplicator.WithRetention(math.MaxInt64), deduplicator.WithClaimTimeout(math.MaxInt64),
			},
			want: []string{"WithRetention: 2562047h47m16.854775807s is over the most, 438000h0m0s", "WithClaimTimeout: 2562047h"},
		},
		{
			name: "no retention is not a retention of 0", opts: []deduplicator.Option{deduplicator.WithRetention(0)},
			want: []string{"WithRetention", "0s", "1h0m0s"},
		},
		{
			name: "known keys", opts: []deduplicator.Option{deduplicator.WithKnownKeys(-1)},
			want: []string{"WithKnownKeys", "-1", "negative"},
		},
		{
			name: "attempts", opts: []deduplicator.Option{deduplicator.WithMaxAttempts(0)},
			want: []string{"WithMaxAttempts", "0", "least, 1"},
		},
		{
			name: "tables of the relay and of attempts", opts: []deduplicator.Option{deduplicator.WithLeasesTable("a b"), deduplicator.WithAttemptsTable("c-d")},
			want: []string{"WithLeasesTable", `"a b"`, "WithAttemptsTable", `"c-d"`},
		},
		{
			name: "a table of two", opts: []deduplicator.Option{
				deduplicator.WithLeasesTable(deduplicator.DefaultProducedTable), deduplicator.WithAttemptsTable(deduplicator.DefaultProcessedTable),
			},
			want: []string{"WithLeasesTable", "WithAttemptsTable", "another table"},
		},
		{
			name: "retries", opts: []deduplicator.Option{deduplicator.WithTxRetries(-2)},
			want: []string{"WithTxRetries", "-2", "negative"},
		},
		{
			name: "isolation", opts: []deduplicator.Option{deduplicator.WithIsolation(sql.LevelReadUncommitted)},
			want: []string{"WithIsolation", "Read Uncommitted", "Read Committed", "Repeatable Read", "Serializable"},
		},
		{
			name: "isolation that is left to the driver", opts: []deduplicator.Option{deduplicator.WithIsolation(sql.LevelDefault)},
			want: []string{"WithIsolation", "Default"},
		},
		{
			name: "isolation of SQLite", dialect: deduplicator.SQLite, opts: []deduplicator.Option{deduplicator.WithIsolation(sql.LevelReadCommitted)},
			want: []string{"WithIsolation", "Read Committed", "Serializable"},
		},
		{
			name: "all at once", dialect: "x", opts: []deduplicator.Option{
				deduplicator.WithTables("a b", "c-d"), deduplicator.WithClaimTimeout(0), deduplicator.WithTxRetries(-1), deduplicator.WithIsolation(99),
			},
			want: []string{`"x"`, `"a b"`, `"c-d"`, "0s", "-1", "99"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if tt.dialect == "" {
				tt.dialect = deduplicator.PostgreSQL
			}
			_, err := deduplicator.Schema(tt.dialect, tt.opts...)
			rejects(t, err, tt.want)
			if len(tt.want) > 0 {
				// The database is not asked, and its absence is one more problem.
				_, err = deduplicator.NewSQLStore(t.Context(), nil, tt.dialect, tt.opts...)
				rejects(t, err, append(tt.want, "db is nil"))
				rejects(t, deduplicator.Migrate(t.Context(), nil, tt.dialect, tt.opts...), tt.want)
			}
		})
	}
	t.Run("no database", func(t *testing.T) {
		t.Parallel()
		_, err := deduplicator.NewSQLStore(t.Context(), nil, deduplicator.SQLite)
		rejects(t, err, []string{"db is nil"})
		rejects(t, deduplicator.Migrate(t.Context(), nil, deduplicator.SQLite), []string{"db is nil"})
	})
}

func rejects(t *testing.T, err error, want []string) {
	t.Helper()
	if len(want) == 0 {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	if !errors.Is(err, deduplicator.ErrInvalidOption) {
		t.Fatalf("error %v is no ErrInvalidOption", err)
	}
	for _, part := range want {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in: %v", part, err)
		}
	}
}

func TestSchemaNames(t *testing.T) {
	t.Parallel()
	for dialect, want := range map[deduplicator.Dialect][]string{
		deduplicator.PostgreSQL: {`TABLE IF NOT EXISTS "app"."seen" (`, `INDEX IF NOT EXISTS "seen_processed_at" ON "app"."seen" (`},
		deduplicator.MySQL:      {"TABLE IF NOT EXISTS `app`.`seen` (", "INDEX `seen_processed_at` (processed_at)"},
		deduplicator.SQLite:     {`TABLE IF NOT EXISTS "app"."seen" (`, `INDEX IF NOT EXISTS "app"."seen_processed_at" ON "seen" (`},
	} {
		schema, err := deduplicator.Schema(dialect, deduplicator.WithTables("app.seen", "app.out"))
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range want {
			if !strings.Contains(schema, part) {
				t.Errorf("%s: %s is not in:\n%s", dialect, part, schema)
			}
		}
		if strings.ContainsAny(schema, "{}") {
			t.Errorf("%s: a placeholder is left in:\n%s", dialect, schema)
		}
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	sentinels := []error{
		deduplicator.ErrInvalidOption, deduplicator.ErrSchema, deduplicator.ErrNoKey, deduplicator.ErrInvalidClaim,
		deduplicator.ErrConflict, deduplicator.ErrInFlight, deduplicator.ErrUnavailable, deduplicator.ErrNotCommitted,
		deduplicator.ErrOutcomeUnknown, deduplicator.ErrTxEnded, deduplicator.ErrNoTime, deduplicator.ErrTooOld,
		deduplicator.ErrTooManyAttempts, deduplicator.ErrPublishTimeout, deduplicator.ErrClaimKept,
	}
	for i, a := range sentinels {
		for j, b := range sentinels {
			if errors.Is(a, b) != (i == j) {
				t.Errorf("errors.Is(%v, %v) = %v", a, b, i != j)
			}
		}
		if !strings.HasPrefix(a.Error(), "deduplicator: ") {
			t.Errorf("%q does not say whose it is", a)
		}
	}
	conflict := &deduplicator.ConflictError{Consumer: "stock", Key: "k\x00", Stored: []byte{0xab}, Got: []byte{0xcd}}
	for _, err := range []error{conflict, fmt.Errorf("outer: %w", conflict), errors.Join(errors.New("first"), conflict)} {
		var got *deduplicator.ConflictError
		if !errors.Is(err, deduplicator.ErrConflict) || errors.Is(err, deduplicator.ErrInFlight) || !errors.As(err, &got) || got != conflict {
			t.Errorf("%v is not found", err)
		}
	}
	for _, part := range []string{`"stock"`, `"k\x00"`, "ab", "cd"} {
		if !strings.Contains(conflict.Error(), part) {
			t.Errorf("%s is not in: %v", part, conflict)
		}
	}
}
