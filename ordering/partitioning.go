package ordering

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// PartitioningError reports a topic that was partitioned in another way before:
// keys would move to other shards, and overtake their own messages there.
type PartitioningError struct {
	Topic                      string
	Recorded, Wanted           Partitioner
	RecordedShards, WantShards int
}

func (e *PartitioningError) Error() string {
	return fmt.Sprintf("ordering: topic %q is partitioned by %s over %d shards, not by %s over %d",
		e.Topic, e.Recorded.name(), e.RecordedShards, e.Wanted.name(), e.WantShards)
}

// Is reports whether target is ErrPartitioning.
func (e *PartitioningError) Is(target error) bool { return target == ErrPartitioning }

// RecordPartitioning records in db how the keys of topic are placed on shards,
// the first time that it is called for topic, and compares it later on. Call it
// at start, before the first publish and subscribe. To change a topic's
// partitioning, process what is in it, and delete its row.
//
// The tables must be there: see [Migrate] and [Schema]. It returns a
// [PartitioningError], [ErrInvalidOption], [ErrSchema], or the database's error.
func RecordPartitioning(ctx context.Context, db *sql.DB, dialect Dialect, topic string, partitioner Partitioner, shards int, opts ...ProducerTablesOption) error {
	tables := defaultProducerTables
	for _, opt := range opts {
		tables = opt.tables
	}
	errs := []error{dialect.Validate(), tables.validate(), partitioner.Validate()}
	if db == nil {
		errs = append(errs, errors.New("db is nil"))
	}
	if topic == "" {
		errs = append(errs, errors.New("topic is empty"))
	}
	if shards < 1 {
		errs = append(errs, fmt.Errorf("shards: %d is under the least, 1", shards))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if err := checkTable(ctx, db, dialect, tables.partitioning, "topic", "partitioner", "shards", "recorded_at"); err != nil {
		return err
	}
	table := dialect.Quote(tables.partitioning)
	record := "INSERT INTO " + table + " (topic, partitioner, shards, recorded_at) VALUES (?, ?, ?, " + dialect.Now() + ") "
	if dialect == MySQL {
		record += "ON DUPLICATE KEY UPDATE topic = topic"
	} else {
		record += "ON CONFLICT (topic) DO NOTHING"
	}
	recorded := PartitioningError{Topic: topic, Wanted: partitioner, WantShards: shards}
	err := sqldb.Retry(ctx, conflictLimit, func() error {
		if _, err := db.ExecContext(ctx, dialect.Rebind(record), sqldb.EncodeKey(topic), partitioner.name(), shards); err != nil {
			return err
		}
		return db.QueryRowContext(ctx, dialect.Rebind("SELECT partitioner, shards FROM "+table+" WHERE topic = ?"), sqldb.EncodeKey(topic)).
			Scan(&recorded.Recorded, &recorded.RecordedShards)
	})
	if err != nil {
		return fmt.Errorf("ordering: record the partitioning of topic %q: %w", topic, err)
	}
	if recorded.Recorded.name() != partitioner.name() || recorded.RecordedShards != shards {
		return &recorded
	}
	return nil
}
