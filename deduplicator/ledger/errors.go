package ledger

import "errors"

// permanentError is a sentinel of an error that another attempt can't mend:
// package middleware parks the message at once.
type permanentError struct{ text string }

func (e *permanentError) Error() string   { return e.text }
func (e *permanentError) Permanent() bool { return true }

var (
	// ErrNoClaim says that the context is not the one of a message inside
	// Deduplicate, so that nothing says whose effect it is. Nothing is durable.
	ErrNoClaim = errors.New("ledger: used outside of Deduplicate")

	// ErrInvalidEffect says that the name or the epoch of an effect is out of
	// range. Nothing is durable, and trying again can't help.
	ErrInvalidEffect error = &permanentError{"ledger: invalid effect"}
)
