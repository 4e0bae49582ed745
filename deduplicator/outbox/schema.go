package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"

	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Schema returns the SQL statements that create the outbox's tables, for a
// migration tool of your own. They change nothing that exists.
func (o *Outbox) Schema() string {
	var b strings.Builder
	for _, q := range o.adapter().SchemaInitializingQueries(o.table) {
		b.WriteString(strings.TrimRight(strings.TrimSpace(q.Query), ";") + ";\n")
	}
	lock := o.dialect.Quote(o.lockTable())
	b.WriteString("CREATE TABLE IF NOT EXISTS " + lock + " (id INT NOT NULL PRIMARY KEY);\n")
	b.WriteString("INSERT INTO " + lock + " (id) VALUES (1) ")
	if o.dialect == deduplicator.PostgreSQL {
		b.WriteString("ON CONFLICT DO NOTHING;\n")
	} else {
		b.WriteString("ON DUPLICATE KEY UPDATE id = 1;\n")
	}
	return b.String()
}

// Migrate creates the outbox's tables where they are missing. Run it at start, on
// a database and not in a handler, whose transaction MySQL would commit. It can
// be run by many instances at once. It returns [deduplicator.ErrInvalidOption] or
// the database's error.
func (o *Outbox) Migrate(ctx context.Context, db *sql.DB) error {
	if db == nil {
		return fmt.Errorf("%w: outbox: db is nil", deduplicator.ErrInvalidOption)
	}
	if err := sqldb.Apply(ctx, db, o.dialect, o.Schema()); err != nil {
		return fmt.Errorf("outbox: migrate: %w", err)
	}
	return nil
}

// lockTable has one row, which the forwarder at work holds.
func (o *Outbox) lockTable() string { return o.table + "_lock" }

// adapter returns watermill-sql's tables with a payload of bytes, and queries
// that treat them as a queue: rows are deleted when they are acknowledged.
//
// watermill-sql's own queries read on from the last offset instead. For that they
// need an isolation that makes the forwarder wait for every transaction that was
// open when it looked, and on MySQL handlers wait for the broker.
func (o *Outbox) adapter() watermillsql.SchemaAdapter {
	table := func(string) string { return o.dialect.Quote(o.table) }
	lock := o.dialect.Quote(o.lockTable())
	if o.dialect == deduplicator.PostgreSQL {
		return postgres{lock: lock, DefaultPostgreSQLSchema: watermillsql.DefaultPostgreSQLSchema{
			GenerateMessagesTableName: table,
			GeneratePayloadType:       func(string) string { return "BYTEA" },
		}}
	}
	return mysql{lock: lock, DefaultMySQLSchema: watermillsql.DefaultMySQLSchema{
		GenerateMessagesTableName: table,
		GeneratePayloadType:       func(string) string { return "LONGBLOB" },
	}}
}

// The queries below take the lock first and then one row, so that of several
// forwarders one is at work. Reading the row for update makes it the newest
// version: a plain read could return what another forwarder has just deleted.
// Rows that handlers have not committed yet are skipped; they come later.

type postgres struct {
	watermillsql.DefaultPostgreSQLSchema
	lock string
}

func (s postgres) SelectQuery(topic, _ string, _ watermillsql.OffsetsAdapter) watermillsql.Query {
	return watermillsql.Query{Query: `WITH alone AS MATERIALIZED (SELECT 1 FROM ` + s.lock + ` WHERE id = 1 FOR UPDATE SKIP LOCKED)
		SELECT m."offset", m.transaction_id::text AS id, m.uuid, m.payload, m.metadata FROM ` + s.MessagesTable(topic) + ` m
		WHERE EXISTS (SELECT 1 FROM alone)
		ORDER BY m.transaction_id, m."offset" LIMIT 1 FOR UPDATE OF m SKIP LOCKED`}
}

func (s postgres) InsertQuery(topic string, msgs message.Messages) (watermillsql.Query, error) {
	q, err := s.DefaultPostgreSQLSchema.InsertQuery(topic, msgs)
	return metadataAsText(q), err
}

// metadataAsText is for drivers that prepare no statement. pgx then sends bytes as
// bytea, and go-sql-driver (interpolateParams) as binary, which is no JSON to
// PostgreSQL or MySQL.
func metadataAsText(q watermillsql.Query) watermillsql.Query {
	for i := 2; i < len(q.Args); i += 3 {
		if metadata, ok := q.Args[i].([]byte); ok {
			q.Args[i] = string(metadata)
		}
	}
	return q
}

func (s postgres) SubscribeIsolationLevel() sql.IsolationLevel { return sql.LevelReadCommitted }

type mysql struct {
	watermillsql.DefaultMySQLSchema
	lock string
}

func (s mysql) SelectQuery(topic, _ string, _ watermillsql.OffsetsAdapter) watermillsql.Query {
	return watermillsql.Query{Query: "SELECT m.`offset`, m.uuid, m.payload, m.metadata FROM " + s.lock + " alone STRAIGHT_JOIN " +
		s.MessagesTable(topic) + " m WHERE alone.id = 1 ORDER BY m.`offset` LIMIT 1 FOR UPDATE SKIP LOCKED"}
}

func (s mysql) InsertQuery(topic string, msgs message.Messages) (watermillsql.Query, error) {
	q, err := s.DefaultMySQLSchema.InsertQuery(topic, msgs)
	return metadataAsText(q), err
}

func (s mysql) SubscribeIsolationLevel() sql.IsolationLevel { return sql.LevelReadCommitted }

// offsets deletes what is acknowledged.
type offsets struct{ *Outbox }

func (o offsets) AckMessageQuery(_ string, row watermillsql.Row, _ string) watermillsql.Query {
	table := o.dialect.Quote(o.table)
	if o.dialect == deduplicator.PostgreSQL {
		id, _ := row.ExtraData["transaction_id"].(int64)
		return watermillsql.Query{
			Query: `DELETE FROM ` + table + ` WHERE transaction_id = $1::text::xid8 AND "offset" = $2`,
			Args:  []any{strconv.FormatInt(id, 10), row.Offset},
		}
	}
	return watermillsql.Query{Query: "DELETE FROM " + table + " WHERE `offset` = ?", Args: []any{row.Offset}}
}

// What watermill-sql asks for besides is not needed: there are no offsets.

func (o offsets) NextOffsetQuery(string, string) watermillsql.Query            { return watermillsql.Query{} }
func (o offsets) SchemaInitializingQueries(string) []watermillsql.Query        { return nil }
func (o offsets) BeforeSubscribingQueries(string, string) []watermillsql.Query { return nil }
func (o offsets) ConsumedMessageQuery(string, watermillsql.Row, string, []byte) watermillsql.Query {
	return watermillsql.Query{}
}
