package kafkashard_test

import (
	"context"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

// When a subscription ends, the context of a message can end before that of its
// session. An ack in between would mark the offset of a message that nobody has
// handled. When the session ends, an ack lets the rebalance go on.
func TestUnhandledMessageIsAckedOnlyAfterItsSession(t *testing.T) {
	t.Parallel()
	for name, sessionEnds := range map[string]bool{"subscription": false, "session": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			subscription, end := context.WithCancel(t.Context())
			session, endSession := context.WithCancel(t.Context())
			defer endSession()
			msg := message.NewMessage("", nil)
			msg.SetContext(subscription)
			forwarded := make(chan struct{})
			go func() {
				defer close(forwarded)
				kafkashard.Forward(session, msg, make(chan *message.Message))
			}()
			if sessionEnds {
				endSession()
			} else {
				end()
			}
			<-forwarded
			end()
			select {
			case <-msg.Acked():
				if !sessionEnds {
					t.Error("acked while its session goes on")
				}
			default:
				if sessionEnds {
					t.Error("the rebalance waits for it")
				}
			}
		})
	}
}
