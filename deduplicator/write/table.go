package write

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

var (
	// ErrInvalid is wrapped by every error about an argument. The database was not
	// asked.
	ErrInvalid = errors.New("write: invalid argument")

	// ErrOtherRow says that MySQL or MariaDB found another row than the one with the
	// key, by another unique index of the table. Nothing was written; the transaction
	// goes on. PostgreSQL and SQLite return their unique violation instead.
	ErrOtherRow = errors.New("write: another row has the value of another unique index")
)

// Tx is what the writes need of a transaction: *sql.Tx has it.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// Row is values by column. Column names are letters, digits and underscores and are
// quoted, so upper and lower case matter on PostgreSQL; values are what the driver
// takes, and are always passed as parameters.
type Row map[string]any

// Table is a table of yours with the columns that identify a row. It is safe for
// concurrent use. Its methods neither commit nor roll back, and return the
// database's error as it was.
type Table struct {
	dialect deduplicator.Dialect
	name    string
	key     []string
}

// NewTable returns the table with that name, optionally after a schema and a dot,
// whose primary key or other unique index consists of the columns key. It returns
// [ErrInvalid], naming every wrong argument; whether the table is there is seen when
// it is written to.
func NewTable(dialect deduplicator.Dialect, name string, key ...string) (*Table, error) {
	errs := []error{dialect.Validate(), sqldb.CheckTable("NewTable", name)}
	if len(key) == 0 {
		errs = append(errs, errors.New("NewTable: no key columns"))
	}
	for i, column := range key {
		errs = append(errs, sqldb.CheckColumn(column))
		if slices.Contains(key[:i], column) {
			errs = append(errs, fmt.Errorf("NewTable: key column %q is there twice", column))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return &Table{dialect, name, slices.Clone(key)}, nil
}

// Insert inserts row unless its key is there, and reports whether it was not. A row
// that is there stays as it is.
func (t *Table) Insert(ctx context.Context, tx Tx, row Row) (isNew bool, err error) {
	return t.insert(ctx, tx, row, never, "")
}

// Upsert inserts row, or gives the row with its key the values of the other columns.
// Columns that row does not have keep their values.
func (t *Table) Upsert(ctx context.Context, tx Tx, row Row) error {
	_, err := t.insert(ctx, tx, row, always, "")
	return err
}

// UpsertNewer is [Table.Upsert] if there is no row with the key or its value of the
// column version, an integer that is not NULL, is lower than row's, an int or int64.
// RowsAffected of the result is 1 then and otherwise 0, whatever the driver is
// configured to count, so that ordering.RequireApplied can turn it into
// ordering.ErrStale:
//
//	return ordering.RequireApplied(stock.UpsertNewer(ctx, tx, row, "version"))
func (t *Table) UpsertNewer(ctx context.Context, tx Tx, row Row, version string) (sql.Result, error) {
	switch value := row[version].(type) {
	case int, int64:
	default:
		return nil, fmt.Errorf("%w: column %q of a row has the version and must be an int or int64, not %T", ErrInvalid, version, value)
	}
	if slices.Contains(t.key, version) {
		return nil, fmt.Errorf("%w: version column %q is a key column", ErrInvalid, version)
	}
	applied, err := t.insert(ctx, tx, row, newer, version)
	if err != nil {
		return nil, err
	}
	return result(applied), nil
}

type result bool

func (result) LastInsertId() (int64, error) {
	return 0, errors.New("write: LastInsertId is not supported")
}

func (r result) RowsAffected() (int64, error) {
	if r {
		return 1, nil
	}
	return 0, nil
}

// When a row that is there is updated.
const (
	never = iota
	always
	newer
)

// insert reports whether the row was inserted or updated.
func (t *Table) insert(ctx context.Context, tx Tx, row Row, when int, version string) (bool, error) {
	columns := slices.Sorted(maps.Keys(row)) // one text for one set of columns
	if err := t.check(row, columns); err != nil {
		return false, err
	}
	var names, set []string // quoted; set are those that are not part of the key
	args := make([]any, 0, len(columns))
	for _, column := range columns {
		names, args = append(names, t.dialect.Quote(column)), append(args, row[column])
		if !slices.Contains(t.key, column) && column != version {
			set = append(set, t.dialect.Quote(column))
		}
	}
	if version != "" {
		version = t.dialect.Quote(version)
		set = append(set, version) // last: MySQL assigns from left to right, and it is compared
	}
	query := "INSERT INTO " + t.dialect.Quote(t.name) + " (" + strings.Join(names, ", ") +
		") VALUES (?" + strings.Repeat(", ?", len(names)-1) + ")"
	if t.dialect == deduplicator.MySQL {
		query += t.onDuplicateKey(set, when, version)
	} else {
		query += t.onConflict(set, when, version)
	}
	res, err := tx.ExecContext(ctx, t.dialect.Rebind(query), args...)
	if err != nil {
		return false, err
	}
	if t.dialect != deduplicator.MySQL {
		rows, err := res.RowsAffected()
		return rows > 0, err
	}
	mark, err := res.LastInsertId()
	if mark == markOther {
		err = ErrOtherRow
	}
	return mark != markKept && err == nil, err
}

func (t *Table) onConflict(set []string, when int, version string) string {
	clause := " ON CONFLICT (" + strings.Join(t.quotedKey(), ", ") + ") DO "
	if when == never || len(set) == 0 {
		return clause + "NOTHING"
	}
	assignments := make([]string, len(set))
	for i, column := range set {
		assignments[i] = column + " = excluded." + column
	}
	clause += "UPDATE SET " + strings.Join(assignments, ", ")
	if when == newer {
		clause += " WHERE " + t.dialect.Quote(sqldb.Base(t.name)) + "." + version + " < excluded." + version
	}
	return clause
}

// What MySQL reports as insert id. The number of rows can't tell: for a row that
// stays as it is, it depends on clientFoundRows. LAST_INSERT_ID(expr) can (MySQL
// manual, "Information Functions").
const (
	markKept  = 1<<62 + 1 // the row with the key stays as it is
	markOther = 1<<62 + 2 // a row with another key was found
)

func (t *Table) onDuplicateKey(set []string, when int, version string) string {
	key := t.quotedKey()
	same := make([]string, len(key)) // MySQL looks at every unique index
	for i, column := range key {
		same[i] = column + " <=> VALUES(" + column + ")"
	}
	found := strings.Join(same, " AND ")
	update := map[int]string{never: "FALSE", always: found, newer: found + " AND " + version + " < VALUES(" + version + ")"}[when]
	clause := fmt.Sprintf(" ON DUPLICATE KEY UPDATE %[1]s = IF(%[2]s, %[1]s, IF(LAST_INSERT_ID(IF(%[3]s, %[4]d, %[5]d)), %[1]s, %[1]s))",
		key[0], update, found, int64(markKept), int64(markOther))
	if when == never {
		return clause
	}
	for _, column := range set {
		clause += fmt.Sprintf(", %[1]s = IF(%[2]s, VALUES(%[1]s), %[1]s)", column, update)
	}
	return clause
}

// TransitionResult says what [Table.Transition] found.
type TransitionResult uint8

const (
	// Applied: the row was in the first state and is in the second one now.
	Applied TransitionResult = iota + 1
	// AlreadyThere: the row was in the second state. Nothing was written.
	AlreadyThere
	// OtherState: the row was in a third state, or there is none with the key. Nothing
	// was written.
	OtherState
)

// String returns the name of the constant.
func (r TransitionResult) String() string {
	return [...]string{"TransitionResult(0)", "Applied", "AlreadyThere", "OtherState"}[min(r, OtherState)]
}

// Transition gives the row with that key, which has the key columns and no others,
// the state to in column if it is in the state from, and says whether it did. Of
// several at once, one applies. States must not be NULL.
//
// AlreadyThere does not tell a copy from another event with the same effect; where
// that matters, deduplicate. OtherState is for the handler to judge: an error
// returns the message, so that it is tried again once its predecessor has come.
func (t *Table) Transition(ctx context.Context, tx Tx, key Row, column string, from, to any) (TransitionResult, error) {
	if err := t.check(key, slices.Sorted(maps.Keys(key))); err != nil {
		return 0, err
	}
	if err := sqldb.CheckColumn(column); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	switch {
	case len(key) != len(t.key):
		return 0, fmt.Errorf("%w: the key has %d columns and the table's %d", ErrInvalid, len(key), len(t.key))
	case slices.Contains(t.key, column):
		return 0, fmt.Errorf("%w: state column %q is a key column", ErrInvalid, column)
	case null(from) || null(to):
		return 0, fmt.Errorf("%w: a state of column %q is NULL", ErrInvalid, column)
	}
	values := make([]any, len(t.key))
	for i, name := range t.key {
		values[i] = key[name]
	}
	table, state := t.dialect.Quote(t.name), t.dialect.Quote(column)
	where := " WHERE " + strings.Join(t.quotedKey(), " = ? AND ") + " = ?"

	// The second condition makes every row that matches one that changes, so that
	// MySQL counts the same with clientFoundRows and without.
	res, err := tx.ExecContext(ctx, t.dialect.Rebind("UPDATE "+table+" SET "+state+" = ?"+where+
		" AND "+state+" = ? AND "+state+" <> ?"), slices.Concat([]any{to}, values, []any{from, to})...)
	if err != nil {
		return 0, err
	}
	if rows, err := res.RowsAffected(); err != nil || rows > 0 {
		return Applied, err
	}
	query := "SELECT COUNT(*) FROM " + table + where + " AND " + state + " = ?"
	if t.dialect == deduplicator.MySQL {
		// The snapshot of a transaction at repeatable read may be older than the row
		// that the update met.
		query += " FOR UPDATE"
	}
	var there int
	if err := tx.QueryRowContext(ctx, t.dialect.Rebind(query), append(values, to)...).Scan(&there); err != nil {
		return 0, err
	}
	if there > 0 {
		return AlreadyThere, nil
	}
	return OtherState, nil
}

func (t *Table) quotedKey() []string {
	quoted := make([]string, len(t.key))
	for i, column := range t.key {
		quoted[i] = t.dialect.Quote(column)
	}
	return quoted
}

func (t *Table) check(row Row, columns []string) error {
	var errs []error
	for _, column := range columns {
		errs = append(errs, sqldb.CheckColumn(column))
	}
	for _, column := range t.key {
		value, ok := row[column]
		if !ok {
			errs = append(errs, fmt.Errorf("key column %q is missing", column))
		} else if null(value) { // no unique index finds it again
			errs = append(errs, fmt.Errorf("key column %q is NULL", column))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: table %s: %w", ErrInvalid, t.name, err)
	}
	return nil
}

// null reports whether a driver would take value for NULL.
func null(value any) bool {
	converted, err := driver.DefaultParameterConverter.ConvertValue(value)
	return err == nil && converted == nil
}
