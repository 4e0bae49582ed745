package ledger

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

const (
	// cleanMargin is that of deduplicator.Cleaner, for the same reason: an effect is
	// recorded after its message was accepted.
	cleanMargin = time.Hour
	cleanBatch  = 1000
	cleanPause  = 50 * time.Millisecond
)

// setRetention finds out how long effects must be kept.
func (l *Ledger) setRetention(store deduplicator.Store) error {
	s, ok := store.(interface{ Retention() (time.Duration, bool) })
	if ok {
		l.keep, ok = s.Retention()
	}
	keep := l.config.keep
	switch {
	case keep == nil:
	case !ok:
		return fmt.Errorf("WithRetention: %v, but the store has no retention: it accepts messages of any age", *keep)
	case *keep < l.keep:
		return fmt.Errorf("WithRetention: %v is under the store's retention, %v: a message that it accepts would repeat its effects", *keep, l.keep)
	default:
		l.keep = *keep
	}
	return nil
}

// Clean deletes effects whose messages the store would refuse as too old: those that
// were first tried longer ago than its retention and an hour, in small batches with
// pauses between them. Unknown effects are never deleted. It returns how many rows are
// gone; with an error, until then. It returns [ErrNoRetention] for a store without
// [deduplicator.WithRetention].
//
// Several may work on one table at a time. The process that cleans must have the
// longest retention of all that use the table.
func (l *Ledger) Clean(ctx context.Context) (total int64, err error) {
	if l.keep == 0 {
		return 0, ErrNoRetention
	}
	d := l.config.dialect
	statement := d.DeleteOldest(d.Quote(l.config.table), "first_tried_at", d.FromNow(-l.keep-cleanMargin),
		" AND NOT ("+unsettled+")", cleanBatch, "idempotency_key")
	for {
		var n int64
		if err := sqldb.Retry(ctx, statementLimit, func() (err error) {
			n, err = sqldb.DeleteBatch(ctx, l.db, d, statement)
			return err
		}); err != nil {
			return total, fmt.Errorf("ledger: clean: %w", err)
		}
		if total += n; n == 0 {
			return total, nil
		}
		if !sqldb.Pause(ctx, cleanPause) {
			return total, ctx.Err()
		}
	}
}
