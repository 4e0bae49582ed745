package deduplicator

import (
	"fmt"
	"time"
)

// A claim must never be deleted while a copy of its message would still be
// accepted. Three clocks take part: the broker's or producer's (Claim.Time), those
// of the processes (which accept), and the database's (which deletes).
//
// Process A accepts the message at t1 only if Time <= A(t1) + maxAhead. The row's
// processed_at is DB(t1) or later, so it is deleted at t2 only if
// DB(t2) - DB(t1) > retention + cleanMargin: how far that clock is off does not
// matter. Process B accepts a copy at t2 only if B(t2) - Time <= retention, which
// gives B(t2) - A(t1) <= retention + maxAhead. Both can be true only where A is
// ahead of B by more than cleanMargin - maxAhead, or where the database's clock
// was set forward by that much: 30 minutes. The producer's clock, whatever it
// says, opens no gap.
const (
	cleanMargin = time.Hour
	maxAhead    = 30 * time.Minute
)

// checkTime refuses a claim that is too old to be proven new.
func (c *config) checkTime(claim Claim) error {
	if c.retention == nil {
		return nil
	}
	if claim.Time.IsZero() {
		return fmt.Errorf("%w, and the store keeps claims for %v only", ErrNoTime, *c.retention)
	}
	age := time.Since(claim.Time)
	if age > *c.retention {
		return fmt.Errorf("%w: published %v ago, and the store keeps claims for %v", ErrTooOld, age.Round(time.Second), *c.retention)
	}
	if age < -maxAhead {
		return fmt.Errorf("%w: it claims to be published %v from now", ErrNoTime, -age.Round(time.Second))
	}
	return nil
}
