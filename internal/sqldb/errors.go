package sqldb

import (
	"fmt"
	"reflect"
	"strings"
)

// SQLite's result codes, without the extended part (https://sqlite.org/rescode.html).
const (
	sqliteBusy   = 5
	sqliteLocked = 6
)

// MySQL's error numbers, the same on MariaDB.
const (
	mysqlLockWaitTimeout = 1205
	mysqlDeadlock        = 1213
	mariadbSnapshot      = 1020 // ER_CHECKREAD: innodb_snapshot_isolation, a write conflict at repeatable read
)

// Transient reports whether err, or an error in its chain, says that the
// database undid or refused work because of other transactions, so that running
// the whole transaction again may succeed. Only codes decide, never texts.
func Transient(err error) bool {
	return walk(err, func(e error) bool {
		state, number, code := codes(e)
		switch state {
		case "40001", "40P01", "55P03": // serialization_failure, deadlock_detected, lock_not_available
			return true
		}
		switch number {
		case mysqlLockWaitTimeout, mysqlDeadlock, mariadbSnapshot:
			return true
		}
		return code == sqliteBusy || code == sqliteLocked
	})
}

// LockTimeout reports whether err says that a row was locked by somebody else
// for longer than the statement wanted to wait.
func LockTimeout(err error) bool {
	return walk(err, func(e error) bool {
		state, number, code := codes(e)
		return state == "55P03" || number == mysqlLockWaitTimeout || code == sqliteBusy || code == sqliteLocked
	})
}

// Explain adds to err what is to be done: hint if a table or column is missing, and
// nothing about that if it is another failure, or comes from another database than d.
func (d Dialect) Explain(err error, hint string) error {
	from, missing := Dialect(""), false
	walk(err, func(e error) bool {
		switch state, number, code := codes(e); {
		case state != "": // undefined_table, undefined_column, invalid_schema_name
			from, missing = PostgreSQL, state == "42P01" || state == "42703" || state == "3F000"
		case number != 0: // ER_NO_SUCH_TABLE, ER_BAD_FIELD_ERROR, ER_BAD_DB_ERROR
			from, missing = MySQL, number == 1146 || number == 1054 || number == 1049
		case code != 0: // SQLITE_ERROR, which is also a syntax error
			from, missing = SQLite, code == 1
		}
		return from != ""
	})
	switch {
	case from != "" && from != d:
		return fmt.Errorf("%w; this is an error of %s, but the dialect is %q", err, from, d)
	case missing && hint != "":
		return fmt.Errorf("%w; %s", err, hint)
	}
	return err
}

// codes returns the SQLSTATE of a PostgreSQL driver's error, the error number of
// go-sql-driver/mysql's, or the primary result code of a SQLite driver's, but not
// those of what e wraps: an application's own errors around them may have methods
// of the same names. The latter two have no method that an interface could name,
// so they are read by reflection.
func codes(e error) (state string, number uint16, code int) {
	if e, ok := e.(interface{ SQLState() string }); ok { //nolint:errorlint // walk does it
		return e.SQLState(), 0, 0
	}
	v := reflect.Indirect(reflect.ValueOf(e))
	if !v.IsValid() {
		return "", 0, 0
	}
	if v.Kind() == reflect.Struct && v.Type().Name() == "MySQLError" {
		if f := v.FieldByName("Number"); f.IsValid() && f.CanUint() {
			number = uint16(f.Uint())
		}
	} else if name := v.Type().PkgPath() + "." + v.Type().Name(); strings.Contains(strings.ToLower(name), "sqlite") {
		code = sqliteCode(v, reflect.ValueOf(e))
	}
	return "", number, code
}

// sqliteCode reads the result code of v, an error of a SQLite driver, which e may
// be a pointer to. The caller has looked at its name: other libraries' errors have
// a Code too, and 5 is "not found" in gRPC's.
func sqliteCode(v, e reflect.Value) int {
	if method := e.MethodByName("Code"); method.IsValid() && method.Type().NumIn() == 0 && method.Type().NumOut() == 1 {
		v = method.Call(nil)[0] // modernc.org/sqlite: int; ncruces/go-sqlite3: ErrorCode
	} else if v.Kind() == reflect.Struct {
		v = v.FieldByName("Code") // mattn/go-sqlite3: ErrNo
	}
	switch { // or the error is a code itself
	case v.IsValid() && v.CanInt():
		return int(v.Int()) & 0xff
	case v.IsValid() && v.CanUint():
		return int(v.Uint()) & 0xff
	}
	return 0
}

// walk calls visit for err and what it wraps until visit returns true.
func walk(err error, visit func(error) bool) bool {
	if err == nil {
		return false
	}
	if visit(err) {
		return true
	}
	switch e := err.(type) { //nolint:errorlint // this is the walk itself
	case interface{ Unwrap() error }:
		return walk(e.Unwrap(), visit)
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			if walk(inner, visit) {
				return true
			}
		}
	}
	return false
}
