package kafkashard

import (
	"context"
	"errors"
	"fmt"

	"github.com/IBM/sarama"
)

// errAborted marks a transaction that is certainly not committed.
var errAborted = errors.New("transaction aborted")

// publishTransaction sends records in one transaction. Its [PublishError] has all
// of them in Unsent if the transaction was aborted or not begun, and in Unknown
// otherwise.
func (b *Broker) publishTransaction(ctx context.Context, topic string, records []*sarama.ProducerMessage) error {
	select { // a producer has one transaction at a time
	case b.transaction <- struct{}{}:
	case <-ctx.Done():
		return &PublishError{Topic: topic, Unsent: uuids(records), Err: context.Cause(ctx)}
	}
	err := bounded(ctx, func() error {
		defer func() { <-b.transaction }()
		return b.transact(records)
	})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errAborted), errors.Is(err, ErrClosed):
		return &PublishError{Topic: topic, Unsent: uuids(records), Err: err}
	}
	return &PublishError{Topic: topic, Unknown: uuids(records), Err: err}
}

// transact is one transaction.
func (b *Broker) transact(records []*sarama.ProducerMessage) error {
	b.sending.RLock()
	defer b.sending.RUnlock()
	if b.isClosed() {
		return ErrClosed
	}
	if b.fatal != nil {
		return fmt.Errorf("%w: %w", errAborted, b.fatal)
	}
	err := b.commit(b.conn.producer, records)
	if errors.Is(err, sarama.ErrProducerFenced) || errors.Is(err, sarama.ErrInvalidProducerEpoch) {
		err = fmt.Errorf("%w: %w", ErrFenced, err)
	}
	if b.conn.producer.TxnStatus()&sarama.ProducerTxnFlagFatalError != 0 {
		b.fatal = err
	}
	return err
}

func (b *Broker) commit(producer sarama.SyncProducer, records []*sarama.ProducerMessage) error {
	if err := producer.BeginTxn(); err != nil {
		return fmt.Errorf("%w: %w", errAborted, err) // not even begun
	}
	for len(records) > 0 {
		batch := distinctKeys(records)
		records = records[len(batch):]
		if err := producer.SendMessages(batch); err != nil {
			var failed sarama.ProducerErrors
			if errors.As(err, &failed) && len(failed) > 0 {
				err = failed[0].Err
			}
			// Nobody but this function commits, so an abort that fails leaves the
			// end to Kafka's transaction timeout or to a successor: never a commit.
			return fmt.Errorf("%w: %w", errAborted, errors.Join(err, producer.AbortTxn()))
		}
	}
	if err := producer.CommitTxn(); err != nil {
		return errors.Join(err, producer.AbortTxn()) // it may be committed; the abort makes the producer usable
	}
	return nil
}
