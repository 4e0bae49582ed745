package middleware

import (
	"context"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// forgetTimeout bounds one deletion of outputs.
const forgetTimeout = 10 * time.Second

// forgetter deletes the stored outputs of messages that were acknowledged, off
// the path of the messages and many at a time: while one deletion runs, the next
// ones collect. A deletion that fails leaves rows behind, which is safe: they are
// published once more, with the same UUIDs, if the message is delivered again.
type forgetter struct {
	store deduplicator.Store

	mu      sync.Mutex // guards what follows
	running bool
	pending []deduplicator.Claim
}

// afterAck waits, in a goroutine that ends with the delivery, for msg's ack.
func (f *forgetter) afterAck(msg *message.Message, claim deduplicator.Claim) {
	ctx := context.WithoutCancel(msg.Context())
	acked, nacked := msg.Acked(), msg.Nacked()
	go func() {
		select {
		case <-acked:
			f.add(ctx, claim)
		case <-nacked:
		}
	}()
}

func (f *forgetter) add(ctx context.Context, claim deduplicator.Claim) {
	f.mu.Lock()
	f.pending = append(f.pending, claim)
	if f.running {
		f.mu.Unlock()
		return
	}
	f.running = true
	f.mu.Unlock()
	for {
		f.mu.Lock()
		batch := f.pending
		f.pending = nil
		f.running = len(batch) > 0
		f.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		f.delete(ctx, batch)
	}
}

func (f *forgetter) delete(ctx context.Context, batch []deduplicator.Claim) {
	ctx, cancel := context.WithTimeout(ctx, forgetTimeout)
	defer cancel()
	_ = f.store.Forget(ctx, batch...)
}
