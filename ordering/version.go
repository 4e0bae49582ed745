package ordering

import (
	"database/sql"
	"fmt"
	"strconv"

	"github.com/ThreeDotsLabs/watermill/message"
)

// VersionFunc returns the version of the entity that a message describes: an
// integer from 0 to 2^63-1 that grows with every change of the entity. An error
// is permanent: the message is parked.
type VersionFunc func(msg *message.Message) (int64, error)

// VersionFromMetadata returns a VersionFunc that reads one metadata field with
// [ParseVersion].
func VersionFromMetadata(field string) VersionFunc {
	return func(msg *message.Message) (int64, error) {
		text := msg.Metadata.Get(field)
		if text == "" {
			return 0, fmt.Errorf("%w: metadata field %q is missing or empty", ErrInvalidVersion, field)
		}
		version, err := ParseVersion(text)
		if err != nil {
			return 0, fmt.Errorf("metadata field %q: %w", field, err)
		}
		return version, nil
	}
}

// ParseVersion parses a version: decimal digits without sign, space or leading
// zeros, at most 2^63-1. It returns [ErrInvalidVersion] for anything else.
func ParseVersion(text string) (int64, error) {
	version, err := strconv.ParseInt(text, 10, 64)
	if err != nil || version < 0 || strconv.FormatInt(version, 10) != text {
		if len(text) > 32 {
			text = text[:32] + "…"
		}
		return 0, fmt.Errorf("%w: %q is not a decimal integer from 0 to 2^63-1", ErrInvalidVersion, text)
	}
	return version, nil
}

// RequireApplied turns the result of a conditional update in the handler's own
// table into [ErrStale] when it changed no row:
//
//	return ordering.RequireApplied(tx.ExecContext(ctx,
//		`UPDATE orders SET status = $2, version = $3 WHERE id = $1 AND version < $3`, id, status, version))
//
// An error of the statement comes back as it was. It also says stale for an
// entity that has no row yet: insert it first, for example with version -1.
func RequireApplied(result sql.Result, err error) error {
	if err != nil {
		return err
	}
	rows, err := result.RowsAffected()
	if err != nil {
		return err
	}
	if rows == 0 {
		return ErrStale
	}
	return nil
}
