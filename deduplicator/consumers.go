package deduplicator

import (
	"errors"
	"fmt"
)

// ErrConsumerTaken says that two handlers of this process claim keys under one
// consumer name, so that each would take the other's messages for copies. Nothing is
// durable; package middleware returns the message to the broker.
var ErrConsumerTaken = errors.New("deduplicator: consumer name is taken")

// Reserve gives the consumer name to owner, who may ask again, for as long as s is
// used. It returns [ErrConsumerTaken] if another owner has it. The Deduplicate
// middleware calls it with the handler's name, topic and subscriber. It knows only
// this store: give the handlers of all services that share its tables different names.
func (s *SQLStore) Reserve(consumer, owner string) error {
	if first, taken := s.consumers.LoadOrStore(consumer, owner); taken && first != owner {
		return fmt.Errorf("%w: %q is used by %s, so not by %s", ErrConsumerTaken, consumer, first, owner)
	}
	return nil
}
