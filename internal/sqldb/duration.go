package sqldb

import (
	"fmt"
	"time"
)

// MaxDuration is the longest duration that is configured: sums of a few of them do
// not overflow, which would turn "before the year 1734" into "before the year 2318".
const MaxDuration = 50 * 365 * 24 * time.Hour

// CheckDuration returns an error that names option if d is not from least to
// [MaxDuration].
func CheckDuration(option string, d, least time.Duration) error {
	switch {
	case d < least:
		return fmt.Errorf("%s: %v is under the least, %v", option, d, least)
	case d > MaxDuration:
		return fmt.Errorf("%s: %v is over the most, %v", option, d, MaxDuration)
	}
	return nil
}
