package sqlshard

import (
	"database/sql"
	"encoding/json"
	"errors"
	"strconv"

	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// adapter gives watermill-sql's subscriber the queries of one shard. It is its
// SchemaAdapter and its OffsetsAdapter.
type adapter struct {
	dialect      ordering.Dialect
	group, topic string
	shard        int
}

// SelectQuery returns the group's next message and locks the group's offset. It
// finds nothing, and locks nothing, when the shard has nothing new or when another
// consumer of the group holds the lock.
//
// The lock is of the offset alone: other groups read the same message, and
// publishers go on. On PostgreSQL the offset that counts is the one that was locked,
// not the one that the statement's snapshot had.
//
// The lock must be tried once. A plan that joins it, and tries again for each
// message, passes over those that it looked at before it got the lock.
func (a adapter) SelectQuery(string, string, watermillsql.OffsetsAdapter) watermillsql.Query {
	const position = `SELECT g.acked_offset FROM sqlshard_groups g WHERE g.consumer_group = ? AND g.topic = ? AND g.shard = ?
		AND g.acked_offset < (SELECT s.last_offset FROM sqlshard_shards s WHERE s.topic = ? AND s.shard = ?) FOR UPDATE`
	query := `SELECT m.message_offset, m.uuid, m.metadata, m.payload FROM sqlshard_messages m
		WHERE m.message_offset > (` + position + ` SKIP LOCKED) AND m.topic = ? AND m.shard = ? ORDER BY m.message_offset LIMIT 1`
	if a.dialect == ordering.PostgreSQL {
		query = `WITH acked AS MATERIALIZED (` + position + ` OF g SKIP LOCKED)
			SELECT m.message_offset, m.uuid, m.metadata, m.payload FROM sqlshard_messages m
			WHERE m.message_offset > (SELECT acked_offset FROM acked) AND m.topic = ? AND m.shard = ? ORDER BY m.message_offset LIMIT 1`
	}
	return watermillsql.Query{
		Query: a.dialect.Rebind(query),
		Args:  []any{a.group, a.topic, a.shard, a.topic, a.shard, a.topic, a.shard},
	}
}

// UnmarshalMessage never fails for what a row holds, because that would stop the
// shard: a row whose metadata is not a JSON object of strings, which this package
// does not write, becomes a message without metadata.
func (a adapter) UnmarshalMessage(scanner watermillsql.Scanner) (watermillsql.Row, error) {
	var r watermillsql.Row
	if err := scanner.Scan(&r.Offset, &r.UUID, &r.Metadata, &r.Payload); err != nil {
		return watermillsql.Row{}, err
	}
	r.Msg = message.NewMessage(string(r.UUID), r.Payload)
	if err := json.Unmarshal(r.Metadata, &r.Msg.Metadata); err != nil || r.Msg.Metadata == nil {
		r.Msg.Metadata = message.Metadata{}
	}
	r.Msg.Metadata.Set(ShardMetadata, strconv.Itoa(a.shard))
	r.Msg.Metadata.Set(OffsetMetadata, strconv.FormatInt(r.Offset, 10))
	return r, nil
}

// AckMessageQuery writes the offset, which SelectQuery has locked.
func (a adapter) AckMessageQuery(_ string, row watermillsql.Row, _ string) watermillsql.Query {
	return watermillsql.Query{
		Query: a.dialect.Rebind("UPDATE sqlshard_groups SET acked_offset = ? WHERE consumer_group = ? AND topic = ? AND shard = ?"),
		Args:  []any{row.Offset, a.group, a.topic, a.shard},
	}
}

// SubscribeIsolationLevel is enough because a shard's messages become visible in the
// order of their offsets.
func (a adapter) SubscribeIsolationLevel() sql.IsolationLevel { return sql.LevelReadCommitted }

// What watermill-sql asks for besides is not needed: there is one way to publish,
// and Migrate makes the tables.

func (a adapter) InsertQuery(string, message.Messages) (watermillsql.Query, error) {
	return watermillsql.Query{}, errors.New("sqlshard: publish with Broker.Publisher")
}

func (a adapter) ConsumedMessageQuery(string, watermillsql.Row, string, []byte) watermillsql.Query {
	return watermillsql.Query{}
}
func (a adapter) NextOffsetQuery(string, string) watermillsql.Query            { return watermillsql.Query{} }
func (a adapter) SchemaInitializingQueries(string) []watermillsql.Query        { return nil }
func (a adapter) BeforeSubscribingQueries(string, string) []watermillsql.Query { return nil }
