package sqlshard

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// Metadata fields of received messages. They say where a message was read, so they
// are not stored when it is published again, such as to a poison queue.
const (
	// ShardMetadata is the shard, a decimal number from 0.
	ShardMetadata = metadataPrefix + "shard"
	// OffsetMetadata is the offset in the shard, a decimal number from 1.
	OffsetMetadata = metadataPrefix + "offset"

	metadataPrefix = "sqlshard_"
)

// Bounds of one INSERT: parameters are limited, and so are MySQL's packets.
const (
	maxRows  = 100
	maxBytes = 1 << 20
)

type publisher struct{ broker *Broker }

// row is a message as it is stored.
type row struct {
	uuid, metadata string
	payload        []byte
}

// Publish is described at [Broker.Publisher].
func (p publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	b := p.broker
	rows := make([]row, len(messages))
	for i, msg := range messages {
		if err := ordering.StampKey(topic, msg, b.cfg.Key); err != nil {
			return err
		}
		var err error
		if rows[i], err = newRow(msg); err != nil {
			return err
		}
	}
	// A handler's outputs and a parked message are published with a context that may
	// have ended already.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(messages[0].Context()), b.cfg.PublishTimeout)
	defer cancel()
	shards, err := b.create(ctx, topic)
	if err == nil {
		byShard := map[int][]row{}
		for i, msg := range messages {
			shard := ordering.Shard(msg.Metadata.Get(ordering.PartitionKeyMetadata), shards)
			byShard[shard] = append(byShard[shard], rows[i])
		}
		err = sqldb.Retry(ctx, b.cfg.PublishTimeout, func() error { return b.store(ctx, topic, byShard) })
	}
	if err != nil {
		return fmt.Errorf("sqlshard: publish to topic %q: %w", topic, err)
	}
	return nil
}

// String is the name that the Router knows the publisher by. It has the group,
// because Brokers of several groups can have different Keys.
func (p publisher) String() string { return p.broker.cfg.publisherName() }

// Close does nothing: the Router closes a publisher that other handlers share.
func (publisher) Close() error { return nil }

func newRow(msg *message.Message) (row, error) {
	refuse := func(problem string) (row, error) {
		return row{}, fmt.Errorf("%w: message %q: %s", ErrInvalidMessage, msg.UUID, problem)
	}
	if len(msg.UUID) > sqldb.MaxKeyBytes || !storable(msg.UUID) {
		return refuse("its UUID has more than 255 bytes, a NUL, or is not UTF-8")
	}
	metadata := message.Metadata{ordering.PublishedAtMetadata: time.Now().UTC().Format(time.RFC3339Nano)}
	for field, value := range msg.Metadata {
		if !utf8.ValidString(field) || !utf8.ValidString(value) { // JSON would replace what is not
			return refuse(fmt.Sprintf("metadata field %q is not UTF-8", field))
		}
		if !strings.HasPrefix(field, metadataPrefix) {
			metadata[field] = value
		}
	}
	text, err := json.Marshal(metadata)
	if err != nil {
		return refuse(err.Error())
	}
	return row{msg.UUID, string(text), append([]byte{}, msg.Payload...)}, nil
}

// store appends rows to their shards in one transaction. Shards are locked in the
// order of their numbers, so that two publishes can't wait for each other.
func (b *Broker) store(ctx context.Context, topic string, byShard map[int][]row) error {
	tx, err := b.cfg.DB.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // after Commit it does nothing
	for _, shard := range slices.Sorted(maps.Keys(byShard)) {
		rows := byShard[shard]
		last, err := b.advance(ctx, tx, topic, shard, len(rows))
		if err != nil {
			return err
		}
		if err := b.insert(ctx, tx, topic, shard, last-int64(len(rows))+1, rows); err != nil {
			return err
		}
	}
	if err := tx.Commit(); err != nil {
		if sqldb.Transient(err) {
			return err
		}
		return fmt.Errorf("%w: %w", ErrOutcomeUnknown, err)
	}
	return nil
}

// advance takes the shard's next n offsets and returns the last of them. The row
// stays locked until the transaction ends.
func (b *Broker) advance(ctx context.Context, tx *sql.Tx, topic string, shard, n int) (last int64, err error) {
	if b.cfg.Dialect == ordering.PostgreSQL {
		err = tx.QueryRowContext(ctx, "UPDATE sqlshard_shards SET last_offset = last_offset + $1 WHERE topic = $2 AND shard = $3 RETURNING last_offset",
			n, topic, shard).Scan(&last)
	} else {
		var result sql.Result
		// LAST_INSERT_ID(expr) is what the client gets back (MySQL manual,
		// "Information Functions").
		result, err = tx.ExecContext(ctx, "UPDATE sqlshard_shards SET last_offset = LAST_INSERT_ID(last_offset + ?) WHERE topic = ? AND shard = ?",
			n, topic, shard)
		if err != nil {
			return 0, err
		}
		last, err = result.LastInsertId()
		if err == nil && last == 0 {
			err = sql.ErrNoRows
		}
	}
	if errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("shard %d is missing in sqlshard_shards: %w", shard, err)
	}
	return last, err
}

func (b *Broker) insert(ctx context.Context, tx *sql.Tx, topic string, shard int, offset int64, rows []row) error {
	for len(rows) > 0 {
		n := batch(rows)
		args := make([]any, 0, 6*n)
		for _, r := range rows[:n] {
			args = append(args, topic, shard, offset, r.uuid, r.metadata, r.payload)
			offset++
		}
		query := "INSERT INTO sqlshard_messages (topic, shard, message_offset, uuid, metadata, payload) VALUES " +
			strings.Repeat("(?, ?, ?, ?, ?, ?), ", n-1) + "(?, ?, ?, ?, ?, ?)"
		if _, err := tx.ExecContext(ctx, b.cfg.Dialect.Rebind(query), args...); err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

// batch returns how many of rows go into one INSERT.
func batch(rows []row) int {
	size := 0
	for i, r := range rows {
		size += len(r.payload) + len(r.metadata)
		if i == maxRows || i > 0 && size > maxBytes {
			return i
		}
	}
	return len(rows)
}
