package ordering

import (
	"errors"
	"fmt"
)

var (
	// ErrInvalidOption is wrapped by every error about an argument or option of
	// a constructor.
	ErrInvalidOption = errors.New("ordering: invalid option")

	// ErrSchema says that a table or column is missing or can't be read.
	ErrSchema = errors.New("ordering: schema is not ready")

	// ErrInvalidVersion says that a message carries no version or one that is not
	// a plain decimal integer from 0 to 2^63-1.
	ErrInvalidVersion = errors.New("ordering: invalid version")

	// ErrStale is for handlers that keep the version in their own table, with
	// UPDATE … SET …, version = $3 WHERE id = $1 AND version < $3: they return it (see
	// [RequireApplied]) when no row changed. The transaction is rolled back, the
	// message acknowledged and counted as stale.
	ErrStale = errors.New("ordering: event is older than what the entity has seen")

	// ErrVersionConflict is matched by every [VersionConflictError].
	ErrVersionConflict = errors.New("ordering: same version, other content")

	// ErrInvalidSequence says that an event has a negative epoch or a sequence
	// number under 1, the first.
	ErrInvalidSequence = errors.New("ordering: invalid sequence number")

	// ErrGap says that an event came before its predecessors. [Reject] returns it.
	ErrGap = errors.New("ordering: predecessors are missing")

	// ErrSequenceConflict says that an event has the sequence number of another
	// event, the last one or a parked one, but other content.
	ErrSequenceConflict = errors.New("ordering: same sequence number, other content")

	// ErrParkedFull says that an event had to be parked while as many messages as
	// [Bounds] allow were parked already.
	ErrParkedFull = errors.New("ordering: too many messages are parked")

	// ErrConsumerStopped is ErrParkedFull, or a gap that is too old, under
	// [StopConsumer].
	ErrConsumerStopped = errors.New("ordering: consumer stopped at a gap")

	// ErrNotBlocked, ErrNotParked and ErrNoEntity are what [Operator] returns when
	// there is nothing to do. Nothing has changed then.
	ErrNotBlocked = errors.New("ordering: entity is not blocked")
	ErrNotParked  = errors.New("ordering: no such parked message")
	ErrNoEntity   = errors.New("ordering: consumer has no such entity")

	// ErrPermanent is wrapped by what a handler of released messages returns when
	// another attempt can't help: the entity is blocked at once.
	ErrPermanent = errors.New("ordering: permanent failure")

	// ErrReplaced is what a [Producer] returns when another one has taken a later
	// epoch of its name. Nothing was sent or numbered: this process is to stop
	// publishing.
	ErrReplaced = errors.New("ordering: producer was replaced by a later epoch of its name")

	// ErrFenced is matched by every [FencedError].
	ErrFenced = errors.New("ordering: producer is fenced by a later epoch")

	// ErrProducerGap is matched by every [ProducerGapError].
	ErrProducerGap = errors.New("ordering: earlier messages of the producer are missing")

	// ErrPartitioning is matched by every [PartitioningError].
	ErrPartitioning = errors.New("ordering: partitioning of the topic differs")
)

// VersionConflictError reports an event with the version that its entity has, but
// with other content than the event that set it. It changes nothing.
type VersionConflictError struct {
	Consumer string
	Entity   string
	Version  int64
}

func (e *VersionConflictError) Error() string {
	return fmt.Sprintf("ordering: consumer %q has seen version %d of entity %q with other content", e.Consumer, e.Version, e.Entity)
}

// Is reports whether target is ErrVersionConflict.
func (e *VersionConflictError) Is(target error) bool { return target == ErrVersionConflict }
