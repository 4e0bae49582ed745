package kafkashard

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Forward is exported because what it must not do shows only if it runs between two
// steps of the end of a context.
func Forward(ctx context.Context, msg *message.Message, out chan<- *message.Message) {
	var s sessions
	s.current.Store(&session{ctx})
	s.forward(msg, out)
}
