package amqpshard

import (
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	amqp "github.com/rabbitmq/amqp091-go"
)

// An interruption that goes on is logged again after these pauses. What comes in
// between, such as the other shards of a connection, is for level debug.
const (
	minLogPause = 5 * time.Second
	maxLogPause = 5 * time.Minute
)

// connectionError is the end of a connection, which all shards share.
type connectionError struct{ error }

func (e *connectionError) Unwrap() error { return e.error }

// blame returns err as a connectionError if the connection has ended.
func (c *connection) blame(err error) error {
	if err != nil && c.IsClosed() {
		return &connectionError{err}
	}
	return err
}

// interruption is what makes two of them the same: the queue, none if it is the
// connection, and the kind of error.
type interruption struct{ queue, kind string }

// repeats is how often an interruption was logged of late.
type repeats struct {
	last, next time.Time // it came, it is to be logged again
	pause      time.Duration
}

// logInterruption logs that a shard is not consumed until pause is over, as an
// error when that is news and then at growing pauses.
func (s *subscription) logInterruption(queue string, err error, pause time.Duration) {
	text, key := "Consumer of a shard interrupted", interruption{queue, kindOf(err)}
	fields := watermill.LogFields{"queue": queue, "retry_in": pause.String()}
	if lost := (*connectionError)(nil); errors.As(err, &lost) {
		text, key.queue = "Consumers of all shards interrupted", ""
		delete(fields, "queue")
	}
	if s.isNews(key, time.Now()) {
		s.logger.Error(text, err, fields)
		return
	}
	s.logger.Debug(text, fields.Add(watermill.LogFields{"err": err.Error()}))
}

// isNews reports whether key is to be logged as an error, and notes that it was.
func (s *subscription) isNews(key interruption, now time.Time) bool {
	s.logging.Lock()
	defer s.logging.Unlock()
	maps.DeleteFunc(s.interruptions, func(_ interruption, r *repeats) bool { return now.Sub(r.last) > maxLogPause })
	seen := s.interruptions[key]
	if seen == nil {
		seen = &repeats{pause: minLogPause}
		s.interruptions[key] = seen
	}
	seen.last = now
	if now.Before(seen.next) {
		return false
	}
	seen.next = now.Add(seen.pause)
	seen.pause = min(2*seen.pause, maxLogPause)
	return true
}

// kindOf is the code of the broker's error, else the text of the innermost one:
// those around it may have a port in theirs that is another one each time.
func kindOf(err error) string {
	var refused *amqp.Error
	if errors.As(err, &refused) {
		return fmt.Sprint(refused.Code)
	}
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return err.Error()
}
