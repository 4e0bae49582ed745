package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [New].
const (
	DefaultTable        = "outbox_messages"
	DefaultPollInterval = 500 * time.Millisecond
)

// MinPollInterval is the shortest poll interval.
const MinPollInterval = 10 * time.Millisecond

var (
	// ErrNoTx says that a message has no transaction in its context, or that the
	// messages of one Publish have different ones. Nothing was stored.
	ErrNoTx = errors.New("outbox: message has no transaction in its context")

	// ErrInvalidMessage says that a message can't be stored as it is: its topic or
	// UUID is empty, or they or its metadata are not UTF-8. Nothing was stored;
	// trying again can't help.
	ErrInvalidMessage = errors.New("outbox: message can't be stored")
)

// Outbox is a message.Publisher that stores messages in the transaction of their
// context. It is safe for concurrent use; one transaction is not, so neither is
// publishing in it.
type Outbox struct {
	dialect      deduplicator.Dialect
	table        string
	pollInterval time.Duration
}

// Option configures an [Outbox].
type Option interface{ apply(*Outbox) }

type optionFunc func(*Outbox)

func (f optionFunc) apply(o *Outbox) { f(o) }

// WithTable sets the name of the table, instead of [DefaultTable]: letters, digits
// and underscores, optionally after a schema and a dot. The table beside it has
// that name with "_lock".
func WithTable(name string) Option {
	return optionFunc(func(o *Outbox) { o.table = name })
}

// WithPollInterval sets how long the forwarder waits when there is nothing to
// forward, when the broker has refused a message, and after an error of the
// database, instead of [DefaultPollInterval]. Values under [MinPollInterval] are
// refused.
func WithPollInterval(d time.Duration) Option {
	return optionFunc(func(o *Outbox) { o.pollInterval = d })
}

// New returns an outbox in a database of dialect: PostgreSQL or MySQL (also
// MariaDB). It returns [deduplicator.ErrInvalidOption], naming every wrong
// argument and option, for SQLite too: watermill-sql does not support it.
func New(dialect deduplicator.Dialect, opts ...Option) (*Outbox, error) {
	o := &Outbox{dialect: dialect, table: DefaultTable, pollInterval: DefaultPollInterval}
	for _, opt := range opts {
		opt.apply(o)
	}
	errs := []error{dialect.Validate(), sqldb.CheckTable("WithTable", o.table), sqldb.CheckTable("WithTable", o.lockTable())}
	if dialect == deduplicator.SQLite {
		errs = append(errs, errors.New("an outbox is not possible on SQLite, which watermill-sql does not support: return the messages from the handler"))
	}
	if o.pollInterval < MinPollInterval {
		errs = append(errs, fmt.Errorf("WithPollInterval: %v is under the least, %v", o.pollInterval, MinPollInterval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("%w: outbox: %w", deduplicator.ErrInvalidOption, err)
	}
	return o, nil
}

// Publish stores messages for topic in the transaction of their context, in their
// order. They are sent after the commit, so Publish returning nil does not mean
// that they will be: the handler may still fail. The context ends a Publish that
// waits for the database.
//
// It returns [ErrNoTx], [ErrInvalidMessage] or the error of the database. The
// handler must return that error: after one of the database the transaction may be
// broken, or hold only some of the messages.
func (o *Outbox) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	tx, err := check(topic, messages)
	if err != nil {
		return err
	}
	for next := 0; next < len(messages); {
		end := batch(messages, next)
		pub, err := watermillsql.NewPublisher(executor{tx, messages[next].Context()},
			watermillsql.PublisherConfig{SchemaAdapter: o.adapter()}, nil)
		if err != nil {
			return fmt.Errorf("outbox: %w", err)
		}
		envelopes := forwarder.NewPublisher(pub, forwarder.PublisherConfig{ForwarderTopic: o.table})
		if err := envelopes.Publish(topic, messages[next:end]...); err != nil {
			return fmt.Errorf("outbox: %w", err)
		}
		next = end
	}
	return nil
}

// Close does nothing: the Router closes a handler's publisher while others may
// still use it.
func (o *Outbox) Close() error { return nil }

// check returns the transaction of messages.
func check(topic string, messages []*message.Message) (*sql.Tx, error) {
	if topic == "" || !utf8.ValidString(topic) {
		return nil, fmt.Errorf("%w: topic %q is empty or not UTF-8", ErrInvalidMessage, topic)
	}
	var common *sql.Tx
	for _, msg := range messages {
		if msg.UUID == "" || !utf8.ValidString(msg.UUID) {
			return nil, fmt.Errorf("%w: UUID %q is empty or not UTF-8", ErrInvalidMessage, msg.UUID)
		}
		for field, value := range msg.Metadata {
			if !utf8.ValidString(field) || !utf8.ValidString(value) {
				return nil, fmt.Errorf("%w: metadata field %q of message %q is not UTF-8", ErrInvalidMessage, field, msg.UUID)
			}
		}
		tx, ok := sqldb.TxFromContext(msg.Context())
		if !ok {
			return nil, fmt.Errorf("%w: message %q: create it with message.NewMessageWithContext and the handler's context", ErrNoTx, msg.UUID)
		}
		if common != nil && tx != common {
			return nil, fmt.Errorf("%w: message %q has another one than those before it", ErrNoTx, msg.UUID)
		}
		common = tx
	}
	return common, nil
}

// Bounds of one INSERT: parameters are limited, and so are MySQL's packets.
const (
	maxRows  = 100
	maxBytes = 1 << 20
)

// batch returns where the INSERT that begins with message first ends.
func batch(messages []*message.Message, first int) int {
	size := 0
	for i, msg := range messages[first:] {
		size += len(msg.Payload)
		for field, value := range msg.Metadata {
			size += len(field) + len(value)
		}
		if i > 0 && (i == maxRows || size > maxBytes) {
			return first + i
		}
	}
	return len(messages)
}

// executor gives the statements of watermill-sql's publisher, which runs them
// without a context, that of the message.
type executor struct {
	watermillsql.ContextExecutor
	ctx context.Context
}

func (e executor) ExecContext(_ context.Context, query string, args ...any) (sql.Result, error) {
	return e.ContextExecutor.ExecContext(e.ctx, query, args...)
}
