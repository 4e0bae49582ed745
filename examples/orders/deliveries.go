package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// metaSending numbers the messages that were published, so that it is known
// when each has been dealt with. Nothing but the end of the run depends on it.
const metaSending = "demo_sending"

// deliveries knows which messages each handler still has to acknowledge.
type deliveries struct {
	mu       sync.Mutex // guards what follows
	sent     int
	open     map[string]map[string]struct{} // by handler: numbers of sendings
	complete bool                           // the producer has sent all
	finished chan struct{}                  // closed when complete and nothing is open
}

func newDeliveries() *deliveries {
	return &deliveries{open: map[string]map[string]struct{}{}, finished: make(chan struct{})}
}

// publish returns a function that publishes messages which all of handlers are
// to acknowledge.
func (d *deliveries) publish(pub message.Publisher, topic string, handlers ...string) func(...*message.Message) error {
	return func(messages ...*message.Message) error {
		for _, msg := range messages {
			msg.Metadata.Set(metaSending, d.number())
			for _, h := range handlers {
				d.expect(h, msg.Metadata.Get(metaSending))
			}
		}
		err := pub.Publish(topic, messages...)
		if err != nil { // what was stored all the same comes unexpected, which does no harm
			for _, msg := range messages {
				for _, h := range handlers {
					d.done(h, msg.Metadata.Get(metaSending))
				}
			}
		}
		return err
	}
}

func (d *deliveries) number() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sent++
	return strconv.Itoa(d.sent)
}

func (d *deliveries) expect(handler, sending string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open[handler] == nil {
		d.open[handler] = map[string]struct{}{}
	}
	d.open[handler][sending] = struct{}{}
}

func (d *deliveries) done(handler, sending string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open[handler], sending)
	d.check()
}

// allSent says that no sending is to come but outputs.
func (d *deliveries) allSent() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.complete = true
	d.check()
}

func (d *deliveries) check() {
	if !d.complete || d.count() > 0 {
		return
	}
	select {
	case <-d.finished:
	default:
		close(d.finished)
	}
}

func (d *deliveries) count() int {
	n := 0
	for _, open := range d.open {
		n += len(open)
	}
	return n
}

// progress returns how many messages were published and how many
// acknowledgements are missing.
func (d *deliveries) progress() (sent, open int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sent, d.count()
}

// missing says in words what has not been acknowledged.
func (d *deliveries) missing() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var parts []string
	if !d.complete {
		parts = append(parts, "the producer has not published everything")
	}
	for _, handler := range slices.Sorted(maps.Keys(d.open)) {
		if n := len(d.open[handler]); n > 0 {
			open := slices.Sorted(maps.Keys(d.open[handler]))
			parts = append(parts, fmt.Sprintf("handler %s has not acknowledged %d messages (sending %s)",
				handler, n, strings.Join(open[:min(n, 5)], ", ")))
		}
	}
	return strings.Join(parts, "; ")
}
