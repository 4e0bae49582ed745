package write_test

import (
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/write"
)

func TestNewTableRefuses(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		dialect deduplicator.Dialect
		table   string
		key     []string
		want    []string
	}{
		"dialect":     {"oracle", "orders", []string{"id"}, []string{`"oracle"`}},
		"table":       {deduplicator.MySQL, "orders; --", []string{"id"}, []string{"orders; --"}},
		"no key":      {deduplicator.MySQL, "orders", nil, []string{"no key columns"}},
		"key twice":   {deduplicator.MySQL, "orders", []string{"id", "id"}, []string{`"id"`, "twice"}},
		"key column":  {deduplicator.MySQL, "orders", []string{`a"b`, "a.b"}, []string{`a\"b`, "a.b"}},
		"all of them": {"", "", []string{""}, []string{"dialect", "table name", "column name"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := write.NewTable(tt.dialect, tt.table, tt.key...)
			refused(t, err, tt.want...)
		})
	}
}

// Arguments are checked before the database is asked: there is none here.
func TestWritesRefuse(t *testing.T) {
	t.Parallel()
	table, err := write.NewTable(deduplicator.PostgreSQL, "shop.orders", "id")
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	transition := func(key write.Row, column string, from, to any) error {
		_, err := table.Transition(ctx, nil, key, column, from, to)
		return err
	}
	newer := func(row write.Row, version string) error {
		_, err := table.UpsertNewer(ctx, nil, row, version)
		return err
	}
	insert := func(row write.Row) error {
		_, err := table.Insert(ctx, nil, row)
		return err
	}
	key := write.Row{"id": 1}
	for name, tt := range map[string]struct {
		err  error
		want []string
	}{
		"no row":            {insert(nil), []string{"shop.orders", `"id"`, "missing"}},
		"no key":            {table.Upsert(ctx, nil, write.Row{"status": "paid"}), []string{`"id"`, "missing"}},
		"NULL key":          {insert(write.Row{"id": nil}), []string{`"id"`, "NULL"}},
		"NULL in a Valuer":  {insert(write.Row{"id": sql.NullString{}}), []string{`"id"`, "NULL"}},
		"NULL in a pointer": {insert(write.Row{"id": (*string)(nil)}), []string{`"id"`, "NULL"}},
		"column":            {insert(write.Row{"id": 1, `status" = 'x`: 1}), []string{`status\" = 'x`}},
		"text version":      {newer(write.Row{"id": 1, "version": "10"}, "version"), []string{`"version"`, "string"}},
		"no version":        {newer(key, "version"), []string{`"version"`, "nil"}},
		"key version":       {newer(key, "id"), []string{`"id"`, "key column"}},
		"state column":      {transition(key, "a b", 1, 2), []string{`"a b"`}},
		"key state":         {transition(key, "id", 1, 2), []string{`"id"`, "key column"}},
		"NULL from":         {transition(key, "status", nil, 2), []string{`"status"`, "NULL"}},
		"NULL to":           {transition(key, "status", 1, nil), []string{`"status"`, "NULL"}},
		"more than a key":   {transition(write.Row{"id": 1, "status": 1}, "status", 1, 2), []string{"2 columns", "1"}},
		"less than a key":   {transition(nil, "status", 1, 2), []string{`"id"`, "missing"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			refused(t, tt.err, tt.want...)
		})
	}
}

func refused(t *testing.T, err error, want ...string) {
	t.Helper()
	if !errors.Is(err, write.ErrInvalid) {
		t.Fatalf("got %v", err)
	}
	for _, part := range want {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q is not in %q", part, err)
		}
	}
}
