package store_test

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// each runs test once per driver, each in parallel.
func each(t *testing.T, drivers []testdb.Driver, test func(t *testing.T, d testdb.Driver)) {
	t.Helper()
	for _, d := range drivers {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			test(t, d)
		})
	}
}

// works checks that a claim of store is processed once and its output kept.
func works(t *testing.T, store deduplicator.Store) {
	t.Helper()
	claim := deduplicator.Claim{Consumer: "c", Key: "k", Fingerprint: []byte("f")}
	for _, want := range []deduplicator.Outcome{deduplicator.Processed, deduplicator.Duplicate, deduplicator.Duplicate} {
		result, err := store.Process(t.Context(), claim, func(context.Context) ([]deduplicator.Output, error) {
			return []deduplicator.Output{{Topic: "t", UUID: "u"}}, nil
		})
		require.NoError(t, err)
		require.Equal(t, want, result.Outcome)
		require.Equal(t, want == deduplicator.Duplicate, len(result.Outputs) == 1)
	}
}

func exec(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	_, err := db.ExecContext(t.Context(), query, args...)
	require.NoError(t, err, query)
}

func TestSchemaThatIsNotReadySaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		refused := func(missing ...string) {
			t.Helper()
			_, err := deduplicator.NewSQLStore(t.Context(), db, d.Dialect)
			require.ErrorIs(t, err, deduplicator.ErrSchema)
			for _, part := range append(missing, "deduplicator.Migrate", "deduplicator.Schema") {
				require.ErrorContains(t, err, part)
			}
		}
		refused("table processed_messages:", "table produced_messages:")
		migrate(t, db, d)
		exec(t, db, "ALTER TABLE processed_messages RENAME COLUMN fingerprint TO other")
		exec(t, db, "ALTER TABLE produced_messages RENAME COLUMN uuid TO other")
		refused("table processed_messages, column fingerprint:", "table produced_messages, column uuid:")
		exec(t, db, "ALTER TABLE processed_messages RENAME COLUMN other TO fingerprint")
		exec(t, db, "ALTER TABLE produced_messages RENAME COLUMN other TO uuid")
		works(t, newStore(t, db, d))
		exec(t, db, "DROP TABLE produced_messages")
		exec(t, db, "DROP TABLE message_leases")
		exec(t, db, "ALTER TABLE message_attempts RENAME COLUMN attempts TO other")
		refused("table produced_messages:", "table message_leases:", "table message_attempts, column attempts:")

		_, err := ordering.NewVersions(t.Context(), db, d.Dialect)
		require.ErrorIs(t, err, ordering.ErrSchema)
		require.ErrorContains(t, err, "table entity_versions:")
		require.ErrorContains(t, err, "ordering.Migrate")
		require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect))
		exec(t, db, "ALTER TABLE entity_versions RENAME COLUMN fingerprint TO other")
		_, err = ordering.NewVersions(t.Context(), db, d.Dialect)
		require.ErrorIs(t, err, ordering.ErrSchema)
		require.ErrorContains(t, err, "column fingerprint:")
	})
}

// An error that Migrate would not mend does not ask for it.
func TestWrongDialectIsNamed(t *testing.T) {
	t.Parallel()
	for _, d := range testdb.Servers {
		for _, dialect := range []deduplicator.Dialect{deduplicator.PostgreSQL, deduplicator.MySQL, deduplicator.SQLite} {
			if dialect == d.Dialect {
				continue
			}
			t.Run(fmt.Sprintf("%s as %s", d.Name, dialect), func(t *testing.T) {
				t.Parallel()
				db := testdb.Open(t, d)
				named := func(err error) {
					t.Helper()
					require.ErrorContains(t, err, fmt.Sprintf("this is an error of %s, but the dialect is %q", d.Dialect, dialect))
					require.NotContains(t, err.Error(), "Migrate")
				}
				_, err := deduplicator.NewSQLStore(t.Context(), db, dialect)
				named(err)
				_, err = ordering.NewVersions(t.Context(), db, dialect)
				named(err)
				named(deduplicator.Migrate(t.Context(), db, dialect))
				named(ordering.Migrate(t.Context(), db, dialect))

				migrate(t, db, d)
				_, err = deduplicator.NewSQLStore(t.Context(), db, dialect)
				named(err)
			})
		}
	}
}

func TestMissingRightIsNotAMissingTable(t *testing.T) {
	t.Parallel()
	database := testdb.Create(t, testdb.PGX)
	db := database.Open(t)
	db.SetMaxOpenConns(1) // the role is the connection's
	migrate(t, db, testdb.PGX)
	exec(t, db, "GRANT USAGE ON SCHEMA "+database.Name+" TO pg_monitor")
	exec(t, db, "SET ROLE pg_monitor")
	_, err := deduplicator.NewSQLStore(t.Context(), db, deduplicator.PostgreSQL)
	require.ErrorIs(t, err, deduplicator.ErrSchema)
	require.ErrorContains(t, err, "permission denied")
	require.NotContains(t, err.Error(), "Migrate")
}

// With SQLite in memory each connection has a database of its own, unless it is told
// otherwise: keys would be known to some of the handlers.
func TestSQLiteInMemory(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		driver, dsn string
		connections int
		refused     bool
	}{
		{"sqlite", ":memory:", 0, true},
		{"sqlite", "file::memory:", 5, true},
		{"sqlite", ":memory:", 1, false},
		{"sqlite", "file:shared-cache?mode=memory&cache=shared", 5, false},
		{"sqlite3", ":memory:", 0, true},
		{"sqlite3", ":memory:", 1, false},
	} {
		t.Run(fmt.Sprint(tt.driver, " ", tt.dsn, " ", tt.connections), func(t *testing.T) {
			t.Parallel()
			db, err := sql.Open(tt.driver, tt.dsn)
			require.NoError(t, err)
			t.Cleanup(func() { _ = db.Close() })
			db.SetMaxOpenConns(tt.connections)
			require.NoError(t, deduplicator.Migrate(t.Context(), db, deduplicator.SQLite))
			store, err := deduplicator.NewSQLStore(t.Context(), db, deduplicator.SQLite)
			if tt.refused {
				require.ErrorIs(t, err, deduplicator.ErrInvalidOption)
				require.ErrorContains(t, err, "SetMaxOpenConns(1)")
				return
			}
			require.NoError(t, err)
			works(t, store)
		})
	}
}

func TestSchemaRunsStatementByStatement(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		script, err := deduplicator.Schema(d.Dialect)
		require.NoError(t, err)
		versions, err := ordering.Schema(d.Dialect)
		require.NoError(t, err)
		for range 2 { // what exists stays
			for _, statement := range strings.Split(script+versions, ";") {
				if strings.TrimSpace(statement) != "" {
					exec(t, db, statement)
				}
			}
		}
		works(t, newStore(t, db, d))
		_, err = ordering.NewVersions(t.Context(), db, d.Dialect)
		require.NoError(t, err)
	})
}

func TestTablesMayHaveOtherNamesAndSchemas(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		schema := "main"
		if d.Dialect != deduplicator.SQLite {
			schema = testdb.Create(t, d).Name // not the one that unqualified names mean
		}
		db := testdb.Open(t, d)
		long := strings.Repeat("t", 61)
		for _, names := range [][2]string{
			{"Handled", "Made"},
			{"select", "table"},
			{schema + ".seen", schema + ".sent"},
			{schema + "." + long + "a", schema + "." + long + "b"},
			{long + "a", long + "b"},
			{long + "c", long + "d"},
		} {
			if d.Dialect == deduplicator.SQLite && names[0] == long+"a" {
				continue // main is where it made them just now
			}
			opts := []deduplicator.Option{
				deduplicator.WithTables(names[0], names[1]),
				deduplicator.WithLeasesTable(names[0] + "l"), deduplicator.WithAttemptsTable(names[0] + "a"), deduplicator.WithMaxAttempts(3),
			}
			for range 2 {
				migrate(t, db, d, opts...)
			}
			works(t, newStore(t, db, d, opts...))
		}
		_, err := deduplicator.NewSQLStore(t.Context(), db, d.Dialect)
		require.ErrorIs(t, err, deduplicator.ErrSchema, "the default tables were created too")

		for _, name := range []string{"Entities", schema + ".versions"} {
			opt := ordering.WithVersionsTable(name)
			require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect, opt))
			versions, err := ordering.NewVersions(t.Context(), db, d.Dialect, opt)
			require.NoError(t, err)
			require.Equal(t, ordering.Applied, apply(t, db, versions, ordering.Event{Consumer: "c", Entity: "e", Version: 2}))
			require.Equal(t, ordering.Applied, apply(t, db, versions, ordering.Event{Consumer: "c", Entity: "e", Version: 3}))
			require.Equal(t, ordering.Stale, apply(t, db, versions, ordering.Event{Consumer: "c", Entity: "e", Version: 2}))
		}
	})
}

func TestMigrateRunsInManyInstancesAtOnce(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		database := testdb.Create(t, d)
		const instances = 16
		errs := make(chan error, instances)
		start := make(chan struct{})
		for range instances {
			db := database.Open(t)
			go func() {
				<-start
				err := deduplicator.Migrate(t.Context(), db, d.Dialect)
				if err == nil {
					err = ordering.Migrate(t.Context(), db, d.Dialect)
				}
				if err == nil {
					_, err = deduplicator.NewSQLStore(t.Context(), db, d.Dialect)
				}
				errs <- err
			}()
		}
		close(start)
		for range instances {
			require.NoError(t, <-errs)
		}
		db := database.Open(t)
		works(t, newStore(t, db, d))
		if d.Dialect == deduplicator.PostgreSQL {
			for _, index := range []string{"processed_messages_processed_at", "produced_messages_created_at"} {
				var found sql.NullString
				require.NoError(t, db.QueryRowContext(t.Context(), "SELECT to_regclass($1)::text", index).Scan(&found))
				require.True(t, found.Valid, index)
			}
		}
	})
}

// An instance that starts calls Migrate while others work. CREATE INDEX IF NOT
// EXISTS waited for the handlers that were running, and meanwhile every new
// claim waited for it.
func TestMigrateDoesNotWaitForHandlers(t *testing.T) {
	t.Parallel()
	each(t, testdb.All, func(t *testing.T, d testdb.Driver) {
		db := testdb.Open(t, d)
		migrate(t, db, d)
		require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect))
		store := newStore(t, db, d)
		_, err := store.Process(t.Context(), deduplicator.Claim{Consumer: "c", Key: "k"}, func(context.Context) ([]deduplicator.Output, error) {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			if err := deduplicator.Migrate(ctx, db, d.Dialect); err != nil {
				return nil, err
			}
			return nil, ordering.Migrate(ctx, db, d.Dialect)
		})
		require.NoError(t, err)
	})
}

func TestServerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, closed.Close())

	for name, addr := range map[string]net.Addr{"refuses": closed.Addr(), "is silent": silent.Addr()} {
		for _, tt := range []struct {
			driver  string
			dialect deduplicator.Dialect
			dsn     string
		}{
			{"pgx", deduplicator.PostgreSQL, "postgres://u:topsecret@%s/x?sslmode=disable"},
			{"postgres", deduplicator.PostgreSQL, "postgres://u:topsecret@%s/x?sslmode=disable"},
			{"mysql", deduplicator.MySQL, "u:topsecret@tcp(%s)/x"},
		} {
			t.Run(tt.driver+" "+name, func(t *testing.T) {
				t.Parallel()
				db, err := sql.Open(tt.driver, fmt.Sprintf(tt.dsn, addr))
				require.NoError(t, err)
				t.Cleanup(func() { _ = db.Close() })
				ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
				defer cancel()
				started := time.Now()
				_, err = deduplicator.NewSQLStore(ctx, db, tt.dialect)
				require.ErrorIs(t, err, deduplicator.ErrUnavailable)
				require.NotErrorIs(t, err, deduplicator.ErrSchema)
				require.NotContains(t, err.Error(), "topsecret")
				_, err = ordering.NewVersions(ctx, db, tt.dialect)
				require.Error(t, err)
				require.NotErrorIs(t, err, ordering.ErrSchema)
				require.Less(t, time.Since(started), 5*time.Second)
			})
		}
	}
	t.Run("closed pool", func(t *testing.T) {
		t.Parallel()
		db := testdb.Open(t, testdb.SQLite)
		migrate(t, db, testdb.SQLite)
		store := newStore(t, db, testdb.SQLite)
		require.NoError(t, db.Close())
		_, err := store.Process(t.Context(), deduplicator.Claim{Consumer: "c", Key: "k"}, func(context.Context) ([]deduplicator.Output, error) {
			t.Error("the work was called")
			return nil, nil
		})
		require.ErrorIs(t, err, deduplicator.ErrUnavailable)
		_, err = deduplicator.NewSQLStore(t.Context(), db, testdb.SQLite.Dialect)
		require.ErrorIs(t, err, deduplicator.ErrUnavailable)
	})
}

// Without autocommit nothing that is written outside of a transaction would be
// durable: an effect of the ledger would be called again.
func TestAutocommitOffIsRefused(t *testing.T) {
	t.Parallel()
	database := testdb.Create(t, testdb.MySQL)
	db := database.Open(t)
	migrate(t, db, testdb.MySQL)
	require.NoError(t, ledger.Migrate(t.Context(), db, deduplicator.MySQL))
	off := database.With(t, "autocommit", "0").Open(t)
	_, err := deduplicator.NewSQLStore(t.Context(), off, deduplicator.MySQL)
	require.ErrorIs(t, err, deduplicator.ErrInvalidOption)
	require.ErrorContains(t, err, "autocommit")
	_, err = ledger.New(t.Context(), newStore(t, db, testdb.MySQL), off, deduplicator.MySQL)
	require.ErrorIs(t, err, ledger.ErrInvalidOption)
	require.ErrorContains(t, err, "autocommit")
}

// isolated returns the database with connections that are at a level by themselves.
// MariaDB and MySQL 8 have different names for it.
func isolated(t *testing.T, database *testdb.Database, level string) *testdb.Database {
	t.Helper()
	var name, before string
	require.NoError(t, database.Open(t).QueryRowContext(t.Context(),
		"SHOW VARIABLES WHERE Variable_name IN ('tx_isolation', 'transaction_isolation')").Scan(&name, &before))
	return database.With(t, name, "'"+level+"'")
}

// MySQL's connections that are at the level by themselves are not told: a round trip
// less. The level is the same.
func TestIsolationIsNotToldTwice(t *testing.T) {
	t.Parallel()
	database := testdb.Create(t, testdb.MySQL)
	other := database.Open(t)
	migrate(t, other, testdb.MySQL)
	exec(t, other, "CREATE TABLE effects (n int)")
	asked := map[string]int{}
	for name, database := range map[string]*testdb.Database{"told": database, "by itself": isolated(t, database, "READ-COMMITTED")} {
		db := database.Open(t)
		db.SetMaxOpenConns(1)
		store := newStore(t, db, testdb.MySQL)
		questions := func() (n int) {
			var name string
			require.NoError(t, db.QueryRowContext(t.Context(), "SHOW SESSION STATUS LIKE 'Questions'").Scan(&name, &n))
			return n
		}
		before := questions()
		_, err := store.Process(t.Context(), claimOf(name), func(ctx context.Context) ([]deduplicator.Output, error) {
			tx, _ := middleware.Tx(ctx)
			var first, second int
			require.NoError(t, tx.QueryRowContext(ctx, "SELECT COUNT(*) FROM effects").Scan(&first))
			exec(t, other, "INSERT INTO effects (n) VALUES (1)")
			require.NoError(t, tx.QueryRowContext(ctx, "SELECT COUNT(*) FROM effects").Scan(&second))
			require.Equal(t, first+1, second, "read committed")
			return nil, nil
		})
		require.NoError(t, err)
		asked[name] = questions() - before
	}
	require.Equal(t, asked["told"]-1, asked["by itself"])
}

// Where connections read what is not committed, the redelivery of a message that is
// in work would be acknowledged as a duplicate, and the work may fail.
func TestReadUncommittedIsRefused(t *testing.T) {
	t.Parallel()
	each(t, []testdb.Driver{testdb.MySQL, testdb.SQLite}, func(t *testing.T, d testdb.Driver) {
		database := testdb.Create(t, d)
		db := database.Open(t)
		migrate(t, db, d)
		if d.Dialect == deduplicator.SQLite {
			database.DSN += "&cache=shared&_pragma=read_uncommitted(1)"
		} else {
			database = isolated(t, database, "READ-UNCOMMITTED")
		}
		_, err := deduplicator.NewSQLStore(t.Context(), database.Open(t), d.Dialect)
		require.ErrorIs(t, err, deduplicator.ErrInvalidOption)
		require.ErrorContains(t, err, "read uncommitted")
	})
}
