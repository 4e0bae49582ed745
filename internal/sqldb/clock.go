package sqldb

import (
	"fmt"
	"time"
)

// Now is the database's clock at the time of the statement, in the form of the
// time columns: timestamptz, datetime(6) in UTC, or SQLite's text in UTC.
func (d Dialect) Now() string {
	return map[Dialect]string{
		PostgreSQL: "clock_timestamp()",
		MySQL:      "UTC_TIMESTAMP(6)",
		SQLite:     "strftime('%Y-%m-%d %H:%M:%f', 'now')",
	}[d]
}

// FromNow is Now and duration, which may be negative. An index can be searched for
// it: that is why it is not clock_timestamp, which PostgreSQL would ask for each
// row.
func (d Dialect) FromNow(duration time.Duration) string {
	switch d {
	case PostgreSQL:
		return fmt.Sprintf("(statement_timestamp() + interval '%d microseconds')", duration.Microseconds())
	case MySQL:
		return fmt.Sprintf("(UTC_TIMESTAMP(6) + INTERVAL %d MICROSECOND)", duration.Microseconds())
	default:
		return fmt.Sprintf("strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '%+.3f seconds')", duration.Seconds())
	}
}

// Age is the microseconds from a time column's value to now.
func (d Dialect) Age(column string) string {
	switch d {
	case PostgreSQL:
		return "CAST(EXTRACT(EPOCH FROM statement_timestamp() - " + column + ") * 1000000 AS bigint)"
	case MySQL:
		return "TIMESTAMPDIFF(MICROSECOND, " + column + ", UTC_TIMESTAMP(6))"
	default:
		return "CAST((julianday('now') - julianday(" + column + ")) * 86400000000 AS INTEGER)"
	}
}
