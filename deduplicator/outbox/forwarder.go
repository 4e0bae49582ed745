package outbox

import (
	"database/sql"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
)

// Forwarder returns Watermill's forwarder from the outbox to pub, which must
// return nil only for messages that the broker has, as those of amqpshard and
// kafkashard do. Run starts it, Close ends it; neither closes db or pub. Several
// can run on one outbox: one works and the others wait until it ends, so that
// the order is kept.
//
// The forwarder uses one connection of db, in a transaction while it publishes,
// which is why it should not share a pool that handlers use up. A message that
// pub refuses is sent again, after the poll interval, until pub accepts it. One
// that takes pub longer than 30 s is sent again meanwhile.
//
// It returns [deduplicator.ErrInvalidOption]. logger may be nil.
func (o *Outbox) Forwarder(db *sql.DB, pub message.Publisher, logger watermill.LoggerAdapter) (*forwarder.Forwarder, error) {
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	if pub == nil {
		return nil, fmt.Errorf("%w: outbox: publisher is nil", deduplicator.ErrInvalidOption)
	}
	sub, err := o.Subscriber(db, logger)
	if err != nil {
		return nil, err
	}
	f, err := forwarder.NewForwarder(sub, pub, logger, forwarder.Config{ForwarderTopic: o.table})
	if err != nil {
		return nil, fmt.Errorf("outbox: %w", err)
	}
	return f, nil
}

// Subscriber returns what [Outbox.Forwarder] reads from, for a forwarder with
// settings of your own: its ForwarderTopic is the name of the table. Don't give
// it a Router with the middlewares of this module, which would look for a key in
// its envelopes.
//
// An acknowledged message is deleted. It returns [deduplicator.ErrInvalidOption].
func (o *Outbox) Subscriber(db *sql.DB, logger watermill.LoggerAdapter) (message.Subscriber, error) {
	if db == nil {
		return nil, fmt.Errorf("%w: outbox: %w", deduplicator.ErrInvalidOption, errors.New("db is nil"))
	}
	sub, err := watermillsql.NewSubscriber(db, watermillsql.SubscriberConfig{
		PollInterval:   o.pollInterval,
		ResendInterval: o.pollInterval,
		RetryInterval:  o.pollInterval,
		SchemaAdapter:  o.adapter(),
		OffsetsAdapter: offsets{o},
	}, logger)
	if err != nil {
		return nil, fmt.Errorf("outbox: %w", err)
	}
	return sub, nil
}
