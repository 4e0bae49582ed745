package ordering

import (
	"strconv"
	"time"
)

// sequenceQueries are the statements, named for what they do. What they cost:
//
//	event in order, nothing parked   1  advance
//	first event of an entity         3  advance, lock, insert
//	stale event                      2  advance, lock
//	parked event                     7  advance, lock, total, park, batch, nextEpoch, save
//	the same while others are        9  also known, expired
//	n released events           6 + 2n  advance, lock, known, batch, unparkRange, save; a savepoint each
type sequenceQueries struct {
	advance, lock, touch, insert, save         string
	known, total, expired, park                string
	batch, lowest, nextEpoch                   string
	unparkRange, unparkOlder, failed, parkedAt string
	due, dueOrExpired                          string
	list                                       string
}

// Values of state and reason.
const (
	stateOpen    = "open"
	stateBlocked = "blocked"

	reasonGap     = "gap"
	reasonBlocked = "blocked"
	reasonFailed  = "failed"
)

func newSequenceQueries(c *sequenceConfig) sequenceQueries {
	sequences, parked := c.dialect.Quote(c.sequences), c.dialect.Quote(c.parked)
	now, expiry := c.dialect.Now(), c.dialect.FromNow(-c.bounds.Age)
	var unixMicro string
	switch c.dialect {
	case PostgreSQL:
		unixMicro = "CAST(EXTRACT(EPOCH FROM p.parked_at) * 1000000 AS bigint)"
	case MySQL:
		unixMicro = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', p.parked_at)"
	case SQLite:
		unixMicro = "CAST(ROUND((julianday(p.parked_at) - 2440587.5) * 86400000) AS INTEGER) * 1000"
	}
	// Reads must see what the lock on the entity's row waited for. SQLite has one
	// writer, and PostgreSQL refuses writes on a row that its snapshot misses; on
	// MySQL at repeatable read only a locking read is newer than the snapshot.
	forUpdate, latest := " FOR UPDATE", ""
	switch c.dialect {
	case SQLite:
		forUpdate = ""
	case MySQL:
		latest = forUpdate
	}
	const ofEntity = " WHERE consumer_name = ? AND entity = ?"
	const ofMessage = ofEntity + " AND epoch = ? AND seq = ?"

	q := sequenceQueries{
		advance: "UPDATE " + sequences + " SET last_seq = ?, fingerprint = ?, updated_at = " + now + ofEntity +
			" AND epoch = ? AND last_seq = ? AND state = '" + stateOpen + "' AND parked = 0",
		lock: "SELECT epoch, last_seq, fingerprint, state, blocked_reason, parked FROM " + sequences + ofEntity + forUpdate,
		// The first statement of a transaction that has written nothing yet: SQLite
		// refuses to turn a reader into a writer.
		touch: "UPDATE " + sequences + " SET updated_at = " + now + ofEntity,
		insert: "INSERT INTO " + sequences + " (consumer_name, entity, epoch, last_seq, fingerprint, state, parked, updated_at)" +
			" VALUES (?, ?, ?, ?, ?, '" + stateOpen + "', 0, " + now + ")",
		save: "UPDATE " + sequences + " SET epoch = ?, last_seq = ?, fingerprint = ?, state = ?, blocked_reason = ?, parked = ?, updated_at = " + now + ofEntity,

		known:   "SELECT fingerprint FROM " + parked + ofMessage + latest,
		total:   "SELECT COUNT(*) FROM (SELECT 1 AS one FROM " + parked + " WHERE consumer_name = ? LIMIT " + strconv.Itoa(c.bounds.Total) + ") t",
		expired: "SELECT COUNT(*) FROM (SELECT 1 AS one FROM " + parked + ofEntity + " AND parked_at < " + expiry + " LIMIT 1) t",
		park: "INSERT INTO " + parked + " (consumer_name, entity, epoch, seq, uuid, metadata, payload, fingerprint, reason, error, attempts, parked_at)" +
			" VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, " + now + ")",

		batch: "SELECT seq, uuid, metadata, payload, fingerprint, attempts FROM " + parked + ofEntity +
			" AND epoch = ? AND seq > ? AND seq <= ? ORDER BY seq" + latest,
		lowest:    "SELECT epoch, seq FROM " + parked + ofEntity + " AND (epoch = ? AND seq > ? OR epoch > ?) ORDER BY epoch, seq LIMIT 1" + latest,
		nextEpoch: "SELECT epoch FROM " + parked + ofEntity + " AND epoch > ? AND seq = 1 ORDER BY epoch LIMIT 1" + latest,

		unparkRange: "DELETE FROM " + parked + ofEntity + " AND epoch = ? AND seq >= ? AND seq <= ?",
		unparkOlder: "DELETE FROM " + parked + ofEntity + " AND epoch < ?",
		failed:      "UPDATE " + parked + " SET reason = ?, error = ?, attempts = ?" + ofMessage,
		parkedAt:    "UPDATE " + parked + " SET reason = '" + reasonGap + "', error = NULL, attempts = 0, parked_at = " + now + ofEntity,
	}
	switch c.dialect {
	case MySQL: // see versionsConfig.queries
		q.insert += " ON DUPLICATE KEY UPDATE parked = parked + 0 * LAST_INSERT_ID(1)"
	default:
		q.insert += " ON CONFLICT (consumer_name, entity) DO NOTHING"
	}
	joined := " FROM " + parked + " p JOIN " + sequences + " s ON s.consumer_name = p.consumer_name AND s.entity = p.entity "
	const next = "p.epoch = s.epoch AND p.seq - 1 = s.last_seq OR p.epoch > s.epoch AND p.seq = 1"
	due := func(condition string) string {
		return "SELECT DISTINCT p.entity" + joined + "WHERE p.consumer_name = ? AND p.entity > ? AND s.state = '" + stateOpen +
			"' AND (" + condition + ") ORDER BY p.entity LIMIT " + strconv.Itoa(dueEntities)
	}
	q.due = due(next)
	q.dueOrExpired = due(next + " OR p.parked_at < " + expiry)
	q.list = "SELECT p.consumer_name, p.entity, p.epoch, p.seq, p.uuid, p.metadata, p.payload, p.reason, p.error, p.attempts, " + unixMicro +
		", s.epoch, s.last_seq, s.state, s.blocked_reason" + joined

	for _, query := range []*string{
		&q.advance, &q.lock, &q.touch, &q.insert, &q.save, &q.known, &q.total, &q.expired, &q.park, &q.batch, &q.lowest,
		&q.nextEpoch, &q.unparkRange, &q.unparkOlder, &q.failed, &q.parkedAt, &q.due, &q.dueOrExpired,
	} {
		*query = c.dialect.Rebind(*query)
	}
	return q
}

// dueEntities bounds the answer of Due.
const dueEntities = 100

func fromUnixMicro(micros int64) time.Time { return time.UnixMicro(micros).UTC() }
