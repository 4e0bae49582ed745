package ledger

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// The states of an effect. Without a row an effect is planned. A row that is started
// while its lease is over is unknown too: its owner has died, or is fenced.
const (
	statePlanned   = "planned"   // it certainly did not take place
	stateStarted   = "started"   // its call may be under way
	stateSucceeded = "succeeded" // it took place
	stateFailed    = "failed"    // it did not and never will
	stateUnknown   = "unknown"
)

// Every change after the insert is conditional on the token of the row, which
// changes hands with the lease: whoever is late changes nothing.
type queries struct {
	insert, finish                      sqldb.Statement
	read, take, renew, unknown, resolve string
}

const byKey = " WHERE idempotency_key = ?"

const unsettled = "state IN ('" + stateStarted + "', '" + stateUnknown + "')"

// insertMark is what the MySQL statement reports as insert id for a row that is
// there already; see ordering.Versions.
const insertMark = 1

func newQueries(c *config) queries {
	d, table := c.dialect, c.dialect.Quote(c.table)
	now, lease := d.FromNow(0), d.FromNow(c.lease)
	const columns = "idempotency_key, consumer_name, message_key, effect, epoch, state, token, attempts, arguments, lease_until, first_tried_at"
	insert := "INSERT INTO " + table + " (" + columns + ") VALUES (?, ?, ?, ?, ?, '" + stateStarted + "', ?, 1, ?, " +
		lease + ", " + now + ")"
	if d == deduplicator.MySQL {
		insert += fmt.Sprintf(" ON DUPLICATE KEY UPDATE attempts = attempts + 0 * LAST_INSERT_ID(%d)", insertMark)
	} else {
		insert += " ON CONFLICT (idempotency_key) DO NOTHING"
	}
	// MySQL assigns from left to right, so state comes after what looks at it.
	q := queries{
		insert: sqldb.Statement{Text: insert},
		read: "SELECT state, token, CASE WHEN lease_until > " + now + " THEN 1 ELSE 0 END, attempts, arguments, result, error, " +
			d.Age("first_tried_at") + " FROM " + table + byKey,
		take: "UPDATE " + table + " SET first_tried_at = CASE WHEN state = '" + statePlanned + "' THEN " + now + " ELSE first_tried_at END," +
			" state = ?, token = ?, attempts = attempts + ?, lease_until = " + lease +
			byKey + " AND token = ? AND state = ? AND lease_until <= " + now,
		finish: sqldb.Statement{Text: "UPDATE " + table + " SET state = ?, result = ?, error = ?, lease_until = first_tried_at" +
			byKey + " AND token = ? AND " + unsettled},
		renew: "UPDATE " + table + " SET lease_until = " + lease + byKey + " AND token = ? AND " + unsettled,
		unknown: "SELECT idempotency_key, consumer_name, message_key, effect, epoch, token, attempts, error, " + d.Age("first_tried_at") +
			" FROM " + table + " WHERE " + unsettled + " AND lease_until <= " + now + " ORDER BY first_tried_at, idempotency_key LIMIT ?",
		resolve: "UPDATE " + table + " SET state = ?, result = ?, error = ?, token = ?" +
			byKey + " AND token = ? AND " + unsettled + " AND lease_until <= " + now,
	}
	for _, query := range []*string{&q.insert.Text, &q.read, &q.take, &q.finish.Text, &q.renew, &q.unknown, &q.resolve} {
		*query = d.Rebind(*query)
	}
	return q
}

// row is what is stored of an effect.
type row struct {
	state     string
	token     string
	leased    bool
	attempts  int
	arguments []byte
	result    []byte
	reason    sql.NullString // of a success: why its result is lost
	age       time.Duration  // since the first attempt that may have had an effect
}

// insert makes the effect started and this execution's own, if nothing is known of
// it yet.
func (e *execution) insert(ctx context.Context) (isNew bool, err error) {
	result, err := e.exec(ctx, &e.queries.insert,
		e.key, sqldb.EncodeKey(e.id.consumer), sqldb.EncodeKey(e.id.message), e.id.name, e.id.epoch, e.token, e.arguments)
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	if err != nil || rows != 1 || e.config.dialect != deduplicator.MySQL {
		return rows == 1, err
	}
	mark, err := result.LastInsertId() // with clientFoundRows the count is 1 for a row that stays as it is
	return mark != insertMark, err
}

func (e *execution) read(ctx context.Context) (r row, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementLimit)
	defer cancel()
	err = sqldb.Retry(ctx, statementLimit, func() error {
		var age int64
		err := e.db.QueryRowContext(ctx, e.queries.read, e.key).
			Scan(&r.state, &r.token, &r.leased, &r.attempts, &r.arguments, &r.result, &r.reason, &age)
		r.age = time.Duration(age) * time.Microsecond
		return err
	})
	return r, err
}

// take makes the effect, still as it was read, this execution's own.
func (e *execution) take(ctx context.Context, r row, state string) (bool, error) {
	attempt := 0
	if state == stateStarted {
		attempt = 1
	}
	return e.changed(e.exec(ctx, &sqldb.Statement{Text: e.queries.take}, state, e.token, attempt, e.key, r.token, r.state))
}

func (e *execution) renew(ctx context.Context) (bool, error) {
	return e.changed(e.exec(ctx, &sqldb.Statement{Text: e.queries.renew}, e.key, e.token))
}

func (l *Ledger) changed(result sql.Result, err error) (bool, error) {
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	return rows == 1, err
}

// exec runs one statement in a transaction of its own, again while other
// transactions make the database refuse it.
func (l *Ledger) exec(ctx context.Context, statement *sqldb.Statement, args ...any) (result sql.Result, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementLimit)
	defer cancel()
	once := func() (err error) {
		result, err = statement.Exec(ctx, l.db, args...)
		return err
	}
	if err := once(); err == nil || !sqldb.Transient(err) {
		return result, err
	}
	err = sqldb.Retry(ctx, statementLimit, once)
	return result, err
}
