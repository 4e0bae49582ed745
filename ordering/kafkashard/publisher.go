package kafkashard

import (
	"context"
	"errors"
	"fmt"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

type publisher struct{ broker *Broker }

// Publish stores messages in topic, which it declares first. See [Broker.Publisher].
func (p publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	b := p.broker
	for _, msg := range messages {
		if err := ordering.StampKey(topic, msg, b.cfg.Key); err != nil {
			return err
		}
	}
	records := make([]*sarama.ProducerMessage, len(messages))
	for i, msg := range messages {
		record, err := Marshaler{}.Marshal(topic, msg)
		if err != nil {
			return err
		}
		record.Metadata = msg.UUID // for the error
		records[i] = record
	}

	// A handler's outputs and a parked message are published with a context
	// that may have ended already.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(messages[0].Context()), b.cfg.PublishTimeout)
	defer cancel()
	if err := b.Declare(ctx, topic); err != nil {
		return &PublishError{Topic: topic, Unsent: uuids(records), Err: err}
	}
	if b.cfg.TransactionalID != "" {
		return b.publishTransaction(ctx, topic, records)
	}
	for len(records) > 0 {
		batch := distinctKeys(records)
		records = records[len(batch):]
		err := bounded(ctx, func() error { return b.send(batch) })
		if err != nil {
			return publishError(topic, batch, records, err)
		}
	}
	return nil
}

// recordVersion is the version of Kafka's record format whose size sarama compares
// with Producer.MaxMessageBytes, since Kafka 0.11.
const recordVersion = 2

// checkSize refuses a message that a handler returns and sarama would never send.
func (b *Broker) checkSize(topic string, msg *message.Message) error {
	record, err := Marshaler{}.Marshal(topic, msg)
	if err != nil {
		return err
	}
	if size, most := record.ByteSize(recordVersion), b.config.Producer.MaxMessageBytes; size > most {
		return fmt.Errorf("%w: %q for topic %q has %d bytes, Producer.MaxMessageBytes is %d", ErrTooLarge, msg.UUID, topic, size, most)
	}
	return nil
}

// String is the name that the Router knows the publisher by. It has the group,
// because Brokers of several groups can have different Keys.
func (p publisher) String() string { return p.broker.cfg.publisherName() }

// Close does nothing: the Router closes a publisher that other handlers share.
func (publisher) Close() error { return nil }

// send returns when all records are confirmed or failed. It holds off the
// producer's close, which sarama does not allow during a send.
func (b *Broker) send(records []*sarama.ProducerMessage) error {
	b.sending.RLock()
	defer b.sending.RUnlock()
	if b.isClosed() {
		return ErrClosed
	}
	return b.conn.producer.SendMessages(records)
}

// distinctKeys returns the longest prefix in which no key occurs twice. The
// records of a batch succeed or fail one by one, so a second record of a key
// may be sent only when the first one is confirmed.
func distinctKeys(records []*sarama.ProducerMessage) []*sarama.ProducerMessage {
	seen := make(map[sarama.Encoder]struct{}, len(records))
	for i, r := range records {
		if _, twice := seen[r.Key]; twice {
			return records[:i]
		}
		seen[r.Key] = struct{}{}
	}
	return records
}

func publishError(topic string, batch, unsent []*sarama.ProducerMessage, err error) error {
	result := &PublishError{Topic: topic, Unsent: uuids(unsent), Err: err}
	var failed sarama.ProducerErrors
	switch {
	case errors.Is(err, ErrClosed):
		result.Unsent = append(uuids(batch), result.Unsent...)
	case errors.As(err, &failed) && len(failed) > 0:
		result.Err = failed[0].Err
		for _, f := range failed {
			result.Unknown = append(result.Unknown, uuids([]*sarama.ProducerMessage{f.Msg})...)
		}
	default:
		result.Unknown = uuids(batch)
	}
	return result
}

func uuids(records []*sarama.ProducerMessage) []string {
	ids := make([]string, len(records))
	for i, r := range records {
		ids[i], _ = r.Metadata.(string)
	}
	return ids
}
