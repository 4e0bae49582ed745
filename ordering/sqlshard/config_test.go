package sqlshard_test

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/sqlshard"
)

var _ ordering.Broker = (*sqlshard.Broker)(nil)

type noConnector struct{ driver.Connector }

func TestOpenRefusesConfig(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(noConnector{})
	for name, test := range map[string]struct {
		change func(*sqlshard.Config)
		want   []string // field, value and bound
	}{
		"no database":     {func(c *sqlshard.Config) { c.DB = nil }, []string{"DB is nil"}},
		"no dialect":      {func(c *sqlshard.Config) { c.Dialect = "" }, []string{"Dialect", "postgresql", "mysql"}},
		"sqlite":          {func(c *sqlshard.Config) { c.Dialect = ordering.SQLite }, []string{"Dialect is sqlite", "watermill-sql"}},
		"no group":        {func(c *sqlshard.Config) { c.Group = "" }, []string{`Group is ""`, "1 to 255"}},
		"long group":      {func(c *sqlshard.Config) { c.Group = strings.Repeat("g", 256) }, []string{"Group is", "1 to 255"}},
		"binary group":    {func(c *sqlshard.Config) { c.Group = "\xff" }, []string{"Group is", "UTF-8"}},
		"negative shards": {func(c *sqlshard.Config) { c.Shards = -1 }, []string{"Shards is -1", "1 to 1000"}},
		"many shards":     {func(c *sqlshard.Config) { c.Shards = 1001 }, []string{"Shards is 1001", "1 to 1000"}},
		"poll interval":   {func(c *sqlshard.Config) { c.PollInterval = time.Millisecond }, []string{"PollInterval is 1ms", "10ms or more"}},
		"ack deadline":    {func(c *sqlshard.Config) { c.AckDeadline = -1 }, []string{"AckDeadline is -1ns", "positive"}},
		"publish timeout": {func(c *sqlshard.Config) { c.PublishTimeout = -1 }, []string{"PublishTimeout is -1ns", "positive"}},
		"drain timeout":   {func(c *sqlshard.Config) { c.DrainTimeout = -1 }, []string{"DrainTimeout is -1ns", "positive"}},
		"all at once": {func(c *sqlshard.Config) { *c = sqlshard.Config{Shards: -1} },
			[]string{"DB", "Dialect", "Group", "Shards"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := sqlshard.Config{DB: db, Dialect: ordering.PostgreSQL, Group: "group"}
			test.change(&cfg)
			_, err := sqlshard.Open(t.Context(), cfg, nil)
			if !errors.Is(err, sqlshard.ErrInvalidConfig) {
				t.Fatalf("Open = %v, want ErrInvalidConfig", err)
			}
			for _, part := range test.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
		})
	}
}

func TestMigrateRefuses(t *testing.T) {
	t.Parallel()
	for _, dialect := range []ordering.Dialect{"", ordering.SQLite} {
		if _, err := sqlshard.Schema(dialect); !errors.Is(err, sqlshard.ErrInvalidConfig) {
			t.Errorf("Schema(%q) = %v", dialect, err)
		}
	}
	if err := sqlshard.Migrate(t.Context(), nil, ordering.MySQL); !errors.Is(err, sqlshard.ErrInvalidConfig) {
		t.Errorf("Migrate without a database = %v", err)
	}
}

func TestShardCountError(t *testing.T) {
	t.Parallel()
	err := &sqlshard.ShardCountError{Topic: "orders", Have: 8, Want: 12}
	if !errors.Is(errors.Join(err), sqlshard.ErrShardCount) || errors.Is(err, sqlshard.ErrClosed) {
		t.Errorf("errors.Is of %v", err)
	}
	for _, want := range []string{"orders", "8", "12"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
}
