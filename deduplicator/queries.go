package deduplicator

import (
	"context"
	"database/sql"
	"strconv"
	"strings"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/internal/metadata"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// maxRows bounds a statement: 8 parameters a row stay under the 999 that old
// SQLite versions accept.
const maxRows = 100

// maxBytes bounds the payloads and metadata of one statement well under MySQL's least default
// of max_allowed_packet (16 MiB on MariaDB 10.11). A larger message goes alone.
const maxBytes = 1 << 20

type queries struct {
	claim sqldb.Statement
	// unboundedClaim: the server does not bound the claim's wait for a twin.
	unboundedClaim bool

	stored    sqldb.Statement
	insertOne sqldb.Statement // one output
	forgetOne sqldb.Statement // the outputs of one claim
	output    string          // up to VALUES
	row       string          // one row of it
	forgetSQL string
	rebind    func(string) string

	countAttempt   string
	uncountAttempt string
	forgetAttempts string
}

func newQueries(c *config, s server) queries {
	processed, produced := c.dialect.Quote(c.processed), c.dialect.Quote(c.produced)
	now := c.dialect.Now()
	insert := "INSERT INTO " + processed + " (consumer_name, message_key, fingerprint, processed_at) "

	q := queries{rebind: c.dialect.Rebind}
	switch c.dialect {
	case MySQL:
		// The update changes the row, so that the count is 1 for a new key and 2
		// for a known one, with clientFoundRows and without (MySQL manual,
		// "INSERT ... ON DUPLICATE KEY UPDATE"). The caller rolls it back.
		q.claim.Text = insert + "VALUES (?, ?, ?, " + now + ") ON DUPLICATE KEY UPDATE processed_at = processed_at + INTERVAL 1 SECOND"
		if s.mariaDB {
			seconds := strconv.Itoa(int((c.claimTimeout + time.Second - 1) / time.Second))
			q.claim.Text = "SET STATEMENT innodb_lock_wait_timeout = " + seconds + " FOR " + q.claim.Text
		}
	case PostgreSQL, SQLite:
		q.claim.Text = insert + "VALUES (?, ?, ?, " + now + ") ON CONFLICT (consumer_name, message_key) DO NOTHING"
	}
	q.claim.Text = c.dialect.Rebind(q.claim.Text)
	// MySQL's SET_VAR hint does not apply to that variable ("Server System Variables"),
	// and setting it for the session costs two round trips; a lock_timeout around this
	// statement alone costs PostgreSQL 20 µs.
	q.unboundedClaim = c.dialect != SQLite && !s.mariaDB && (s.lockWait == 0 || s.lockWait > c.claimTimeout)
	// Sorting is left to the reader: MariaDB would make a temporary table for it.
	q.stored.Text = c.dialect.Rebind("SELECT c.fingerprint, o.ordinal, o.topic, o.uuid, o.metadata, o.payload FROM " + processed + " c LEFT JOIN " + produced +
		" o ON o.consumer_name = c.consumer_name AND o.message_key = c.message_key" +
		" WHERE c.consumer_name = ? AND c.message_key = ?")
	q.output = "INSERT INTO " + produced + " (consumer_name, message_key, ordinal, topic, uuid, metadata, payload, created_at) VALUES "
	q.row = "(?, ?, ?, ?, ?, ?, ?, " + now + ")"
	q.forgetSQL = "DELETE FROM " + produced + " WHERE "
	q.insertOne.Text, q.forgetOne.Text = q.insertOutputs(1), q.forget(1)
	q.setAttempts(c)
	return q
}

func (q *queries) forget(claims int) string {
	const one = "(consumer_name = ? AND message_key = ?)"
	return q.rebind(q.forgetSQL + one + strings.Repeat(" OR "+one, claims-1))
}

func (q *queries) insertOutputs(rows int) string {
	return q.rebind(q.output + q.row + strings.Repeat(", "+q.row, rows-1))
}

// insertOutputs stores outputs in as few statements as the bounds allow.
func (s *SQLStore) insertOutputs(ctx context.Context, tx *sql.Tx, claim Claim, outputs []Output) error {
	consumerAndKey := key(claim)
	for next := 0; next < len(outputs); {
		args := make([]any, 0, 7*min(len(outputs)-next, maxRows))
		rows, size := 0, 0
		for next < len(outputs) && rows < maxRows {
			o := outputs[next]
			payload, encoded := o.Payload, metadata.Encode(o.Metadata)
			if size += len(payload) + len(encoded); rows > 0 && size > maxBytes {
				break
			}
			if payload == nil {
				payload = []byte{} // nil would be NULL
			}
			args = append(args, consumerAndKey[0], consumerAndKey[1], next, o.Topic, o.UUID, encoded, payload)
			rows++
			next++
		}
		insert := &s.queries.insertOne
		if rows > 1 {
			insert = &sqldb.Statement{Text: s.queries.insertOutputs(rows)}
		}
		if _, err := insert.ExecTx(ctx, tx, args...); err != nil {
			return err
		}
	}
	return nil
}
