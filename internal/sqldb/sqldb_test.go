package sqldb_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb/testdata/sqlite3"
)

type stateError string

func (stateError) Error() string      { return "konnte Zugriff nicht serialisieren" }
func (s stateError) SQLState() string { return string(s) }

type MySQLError struct{ Number uint16 }

func (*MySQLError) Error() string { return "verrou" }

// The shapes of SQLite drivers' errors; tests/store has the drivers' own.
type (
	sqliteError int
	sqlitePlain uint16
	sqliteNil   struct{ Code int }
	otherError  int
)

func (sqliteError) Error() string { return "occupé" }
func (e sqliteError) Code() int   { return int(e) }
func (sqlitePlain) Error() string { return "occupé" }
func (*sqliteNil) Error() string  { return "occupé" }
func (otherError) Error() string  { return "not found" }
func (e otherError) Code() int    { return int(e) }

// appError is an application's own error, with methods that drivers' have too.
type appError struct{ error }

func (e appError) Unwrap() error  { return e.error }
func (appError) Code() int        { return 404 }
func (appError) SQLState() string { return "" }

// B28: a conflict is recognised by its code through wraps and joins, whatever
// language the server speaks.
func TestTransientB28(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err               error
		transient, locked bool
	}{
		{nil, false, false},
		{errors.New("40001 deadlock detected, database is locked"), false, false},
		{stateError("40001"), true, false},
		{stateError("40P01"), true, false},
		{stateError("55P03"), true, true},
		{stateError("23505"), false, false},
		{&MySQLError{1213}, true, false},
		{&MySQLError{1205}, true, true},
		{&MySQLError{1062}, false, false},
		{sqliteError(5), true, true},
		{sqliteError(517), true, true}, // SQLITE_BUSY_SNAPSHOT
		{sqliteError(262), true, true}, // SQLITE_LOCKED_SHAREDCACHE
		{sqliteError(19), false, false},
		{sqlitePlain(517), true, true},
		{sqlitePlain(19), false, false},
		{(*sqliteNil)(nil), false, false},
		{otherError(5), false, false},
		{sqlite3.Error{Code: 5}, true, true},
		{sqlite3.Error{Code: 19}, false, false},
	} {
		for _, err := range []error{tt.err, wrap(tt.err), join(tt.err), appError{tt.err}, wrap(appError{join(tt.err)})} {
			if got := sqldb.Transient(err); got != tt.transient {
				t.Errorf("Transient(%#v) = %v", err, got)
			}
			if got := sqldb.LockTimeout(err); got != tt.locked {
				t.Errorf("LockTimeout(%#v) = %v", err, got)
			}
		}
	}
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("outer: %w", err)
}

func join(err error) error {
	if err == nil {
		return nil
	}
	return errors.Join(errors.New("first"), wrap(err))
}

func TestTableNames(t *testing.T) {
	t.Parallel()
	for name, ok := range map[string]bool{
		"processed_messages":     true,
		"app.processed_messages": true,
		"":                       false,
		`a"b`:                    false,
		"a`b":                    false,
		"a.b.c":                  false,
		"1a":                     false,
		"a b":                    false,
		"a;drop table x":         false,
		strings.Repeat("a", 64):  false,
	} {
		if err := sqldb.CheckTable("WithTable", name); (err == nil) != ok {
			t.Errorf("CheckTable(%q) = %v", name, err)
		}
	}
	if got := sqldb.MySQL.Quote("app.t"); got != "`app`.`t`" {
		t.Error(got)
	}
}

// Cut to the same name, the second table's index would be taken for the first's
// and never be created.
func TestIndexNamesDifferWhereTheyAreCut(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("t", 62)
	a, b := sqldb.IndexName(long+"a", "_processed_at"), sqldb.IndexName(long+"b", "_processed_at")
	if a == b || len(a) != 63 || !strings.HasSuffix(a, "_processed_at") {
		t.Errorf("indexes %q and %q", a, b)
	}
	if name := sqldb.IndexName(strings.Repeat("t", 50), "_processed_at"); name != strings.Repeat("t", 50)+"_processed_at" {
		t.Errorf("index %q", name)
	}
}

// Two keys are stored alike only if they are alike, and what is stored fits.
func FuzzEncodeKey(f *testing.F) {
	long := strings.Repeat("k", 300)
	f.Add("a", "A")
	f.Add("a\x00b", "ab")
	f.Add("\xff", "\ufffd")
	f.Add(long, sqldb.EncodeKey(long))
	f.Add("a ", "a")
	f.Fuzz(func(t *testing.T, a, b string) {
		ea, eb := sqldb.EncodeKey(a), sqldb.EncodeKey(b)
		if (a == b) != (ea == eb) {
			t.Errorf("%q and %q are stored as %q and %q", a, b, ea, eb)
		}
		if len(ea) > sqldb.MaxKeyBytes || strings.ContainsRune(ea, 0) {
			t.Errorf("%q does not fit its column", ea)
		}
	})
}
