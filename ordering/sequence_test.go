package ordering_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

func TestSequenceError(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	for _, kind := range []error{
		ordering.ErrInvalidSequence, ordering.ErrGap, ordering.ErrSequenceConflict, ordering.ErrParkedFull, ordering.ErrConsumerStopped,
	} {
		for _, inner := range []error{nil, cause} {
			err := error(&ordering.SequenceError{Kind: kind, Consumer: "c", Entity: "e", At: ordering.Position{Seq: 3}, Last: ordering.Position{Seq: 1}, Err: inner})
			for _, err := range []error{err, fmt.Errorf("wrapped: %w", err)} {
				var as *ordering.SequenceError
				if !errors.Is(err, kind) || !errors.As(err, &as) || errors.Is(err, cause) != (inner != nil) || errors.Is(err, ordering.ErrStale) {
					t.Errorf("%v", err)
				}
			}
		}
	}
	got := (&ordering.SequenceError{Kind: ordering.ErrGap, Consumer: "c", Entity: "e", At: ordering.Position{Epoch: 1, Seq: 3}, Err: cause}).Error()
	if want := `ordering: predecessors are missing: consumer "c", entity "e", event 1/3 after 0/0: cause`; got != want {
		t.Errorf("got %s", got)
	}
}
