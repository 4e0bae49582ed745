// Package testdb gives tests a database of their own on the real servers, per
// driver: a schema on PostgreSQL, a database on MariaDB or MySQL, a file for SQLite.
package testdb

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"       // driver "pgx"
	_ "github.com/lib/pq"                    // driver "postgres"
	_ "github.com/ncruces/go-sqlite3/driver" // driver "sqlite3"
	_ "modernc.org/sqlite"                   // driver "sqlite"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

// MatrixVariable names another server for the MySQL drivers than MariaDB: "mysql".
const MatrixVariable = "TEST_MATRIX"

// PoolSize is how many connections a pool of [Database.Open] has.
const PoolSize = 5

// Driver is a database driver with the settings that matter to this module.
type Driver struct {
	Name    string // for subtests
	Dialect deduplicator.Dialect

	driver               string // as in sql.Open
	foundRows, parseTime bool   // of MySQL
}

// The drivers. The MySQL ones reach [MySQLServer].
var (
	PGX                     = Driver{Name: "pgx", Dialect: deduplicator.PostgreSQL, driver: "pgx"}
	PQ                      = Driver{Name: "pq", Dialect: deduplicator.PostgreSQL, driver: "postgres"}
	MySQL                   = Driver{Name: "mysql", Dialect: deduplicator.MySQL, driver: "mysql"}
	MySQLParseTime          = Driver{Name: "mysql parseTime", Dialect: deduplicator.MySQL, driver: "mysql", parseTime: true}
	MySQLFoundRows          = Driver{Name: "mysql clientFoundRows", Dialect: deduplicator.MySQL, driver: "mysql", foundRows: true}
	MySQLFoundRowsParseTime = Driver{Name: "mysql clientFoundRows parseTime", Dialect: deduplicator.MySQL, driver: "mysql", foundRows: true, parseTime: true}
	SQLite                  = Driver{Name: "sqlite", Dialect: deduplicator.SQLite, driver: "sqlite"}
	SQLite3                 = Driver{Name: "sqlite3", Dialect: deduplicator.SQLite, driver: "sqlite3"} // it begins immediate
)

// All is every driver.
var All = []Driver{PGX, PQ, MySQL, MySQLParseTime, MySQLFoundRows, MySQLFoundRowsParseTime, SQLite, SQLite3}

// Servers is one driver for each kind of database.
var Servers = []Driver{PGX, MySQL, SQLite}

// Database is an empty database (on PostgreSQL, a schema) that ends with the
// test that created it.
type Database struct {
	Driver Driver
	Name   string // of the database or schema; of SQLite's file, its path
	DSN    string // for a driver's own connections and for other processes
}

// MySQLServer is the server that the MySQL drivers reach: MariaDB, or what
// [MatrixVariable] says.
func MySQLServer(t testing.TB) services.Name {
	t.Helper()
	switch name := os.Getenv(MatrixVariable); name {
	case "":
		return services.MariaDB
	case string(services.MySQL):
		return services.MySQL
	default:
		t.Fatalf("testdb: %s is %q, must be %q or not set", MatrixVariable, name, services.MySQL)
		return ""
	}
}

// IsMariaDB reports whether d reaches MariaDB.
func IsMariaDB(t testing.TB, d Driver) bool {
	t.Helper()
	return d.Dialect == deduplicator.MySQL && MySQLServer(t) == services.MariaDB
}

// Open creates a database and returns a pool for it.
func Open(t testing.TB, d Driver) *sql.DB {
	t.Helper()
	return Create(t, d).Open(t)
}

// Create creates a database and drops it at the end of t. It fails t when the
// server is not there.
func Create(t testing.TB, d Driver) *Database {
	t.Helper()
	database := &Database{Driver: d, Name: "test_" + strings.ToLower(rand.Text()[:16])}
	switch d.Dialect {
	case deduplicator.PostgreSQL:
		server := services.Value(t, services.Postgres)
		database.DSN = withSetting(server, "search_path", database.Name)
		admin(t, d.driver, server, "CREATE SCHEMA "+database.Name, "DROP SCHEMA "+database.Name+" CASCADE")
	case deduplicator.MySQL:
		config, err := mysql.ParseDSN(services.Value(t, MySQLServer(t)))
		if err != nil {
			t.Fatalf("testdb: the value for %s is not a DSN of go-sql-driver/mysql", MySQLServer(t))
		}
		config.ParseTime, config.ClientFoundRows = d.parseTime, d.foundRows
		server := config.FormatDSN()
		config.DBName = database.Name
		database.DSN = config.FormatDSN()
		admin(t, d.driver, server, "CREATE DATABASE "+database.Name, "DROP DATABASE "+database.Name)
	case deduplicator.SQLite:
		database.Name = filepath.Join(t.TempDir(), "test.db")
		database.DSN = SQLiteDSN(database.Name, 200*time.Millisecond)
	}
	return database
}

// Through returns the database as it is reached through a TCP proxy, which proxy
// starts before an address. SQLite has none, so it stays as it is.
func (database *Database) Through(t testing.TB, proxy func(upstream string) (address string)) *Database {
	t.Helper()
	proxied := *database
	switch database.Driver.Dialect {
	case deduplicator.PostgreSQL:
		u, err := url.Parse(database.DSN)
		if err != nil || u.Host == "" {
			t.Fatalf("testdb: the DSN of PostgreSQL is not a URL with a host")
		}
		u.Host = proxy(u.Host)
		proxied.DSN = u.String()
	case deduplicator.MySQL:
		config, err := mysql.ParseDSN(database.DSN)
		if err != nil {
			t.Fatalf("testdb: the DSN is not one of go-sql-driver/mysql")
		}
		config.Addr = proxy(config.Addr)
		proxied.DSN = config.FormatDSN()
	}
	return &proxied
}

// With returns the database as connections see it for which a server's setting has
// another value. SQLite has no such settings.
func (database *Database) With(t testing.TB, setting, value string) *Database {
	t.Helper()
	changed := *database
	switch database.Driver.Dialect {
	case deduplicator.PostgreSQL:
		changed.DSN = withSetting(database.DSN, setting, value)
	case deduplicator.MySQL:
		config, err := mysql.ParseDSN(database.DSN)
		if err != nil {
			t.Fatalf("testdb: the DSN is not one of go-sql-driver/mysql")
		}
		config.Params = map[string]string{setting: value}
		changed.DSN = config.FormatDSN()
	}
	return &changed
}

// Open returns a pool of [PoolSize] connections and closes it at the end of t.
func (database *Database) Open(t testing.TB) *sql.DB {
	t.Helper()
	db, err := sql.Open(database.Driver.driver, database.DSN)
	if err != nil {
		t.Fatalf("testdb: open %s: %v", database.Driver.Name, err)
	}
	db.SetMaxOpenConns(PoolSize)
	db.SetMaxIdleConns(PoolSize)
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("testdb: close %s: %v", database.Driver.Name, err)
		}
	})
	return db
}

// SQLiteDSN is a DSN of both SQLite drivers for a file with a write-ahead log.
func SQLiteDSN(path string, busyTimeout time.Duration) string {
	return fmt.Sprintf("file:%s?_pragma=busy_timeout(%d)&_pragma=journal_mode(WAL)&_pragma=synchronous(NORMAL)",
		path, busyTimeout.Milliseconds())
}

// withSetting adds a setting of PostgreSQL to a DSN that is a URL as to one of
// keywords and values.
func withSetting(dsn, setting, value string) string {
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " " + setting + "=" + value
	}
	query := u.Query()
	query.Set(setting, value)
	u.RawQuery = query.Encode()
	return u.String()
}

// admin runs create at once and drop at the end of t, after the pools are closed.
func admin(t testing.TB, driver, dsn, create, drop string) {
	t.Helper()
	exec := func(ctx context.Context, query string) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		db, err := sql.Open(driver, dsn)
		if err != nil {
			t.Fatalf("testdb: open %s: %v", driver, err)
		}
		defer db.Close() //nolint:errcheck // nothing was left open
		if _, err := db.ExecContext(ctx, query); err != nil {
			t.Errorf("testdb: %s: %v", query, err)
		}
	}
	t.Cleanup(func() { exec(context.WithoutCancel(t.Context()), drop) })
	exec(t.Context(), create)
	if t.Failed() {
		t.FailNow()
	}
}

// Numbers is a derived table of one column i with the numbers from 1 to n, at most
// 10 million, for any dialect. It is fast enough to fill large tables with.
func Numbers(n int) string {
	digits := "SELECT 0 AS d"
	for d := 1; d < 10; d++ {
		digits += fmt.Sprintf(" UNION ALL SELECT %d", d)
	}
	sum, from := "1", ""
	for place, factor := 0, 1; place == 0 || factor < n; place, factor = place+1, factor*10 {
		if place > 0 {
			from += " CROSS JOIN "
		}
		sum += fmt.Sprintf(" + %d * t%d.d", factor, place)
		from += fmt.Sprintf("(%s) t%d", digits, place)
	}
	return fmt.Sprintf("(SELECT i FROM (SELECT %s AS i FROM %s) s WHERE i <= %d) numbers", sum, from, n)
}
