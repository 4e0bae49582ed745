package middleware

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// ErrInvalidOption is wrapped by every error of [Chain].
var ErrInvalidOption = errors.New("middleware: invalid option")

// Link is one part of a [Chain]. The functions of this package that return a
// Link make them.
type Link struct {
	name       string
	rank       int
	middleware message.HandlerMiddleware
	outer      message.HandlerMiddleware // of Sequence only: outside the retries
	observers  []Observer                // of WithObserver only
	noTx       bool                      // of Deduplicate only: its store has no transaction
	maximum    int                       // of Deduplicate only: the attempts that its store allows; 0 for any number
	retries    int                       // of WithRetry only
	err        error
}

// The order of links, outermost first.
const (
	rankObserver = iota + 1
	rankPoisonQueue
	rankRetry
	rankDeduplicate
	rankRejectReplayed
	rankRejectStale
	rankStamp
	rankPartition

	rankSequence = rankRejectStale // one excludes the other
)

// reasons say why a link must come before the one with its rank.
var reasons = map[int]string{
	rankPoisonQueue:    "an observer outside sees what was parked",
	rankRetry:          "a poison queue inside the retry would leave nothing to retry",
	rankDeduplicate:    "a retry or poison queue inside the transaction would commit a failed attempt",
	rankRejectReplayed: "an old copy of a message is a duplicate, not a stale event, and its number is written in the transaction that Deduplicate opens",
	rankRejectStale:    "the entity's version or sequence is written in the transaction that Deduplicate opens",
	rankStamp:          "a message is numbered with the partition key that Partition gives it",
	rankPartition:      "messages are stored with the partition key that Partition gives them",
}

// Chain returns the middlewares of links for Router.AddMiddleware or
// Handler.AddMiddleware. Give it the links in the order in which messages pass
// them, outermost first: WithObserver, WithPoisonQueue, WithRetry, Deduplicate,
// RejectReplayed, RejectStale or Sequence, Stamp, Partition. Each can be left out,
// except that RejectReplayed, RejectStale and Sequence need Deduplicate. None from
// RejectReplayed on goes with a store that is [deduplicator.Untransactional]. A store
// with [deduplicator.WithMaxAttempts] must allow more attempts than one delivery makes:
// MaxRetries and 1, with Sequence 1 more, which blocks the entity.
//
// The result also turns a panic of the handler into a [PanicError], gives the
// message's context back as it came, returns a message to the broker (nack) when
// its handler leaves by Goexit, and waits a moment before it returns any message
// to the broker, so that nothing loops hot.
//
// It returns an error that wraps [ErrInvalidOption] and names every wrong
// argument and link.
func Chain(links ...Link) ([]message.HandlerMiddleware, error) {
	var errs []error
	var observers []Observer
	if len(links) == 0 {
		errs = append(errs, errors.New("Chain: no links"))
	}
	ranks := make(map[int]string) // to the link's name
	for i, link := range links {
		if link.name == "" {
			errs = append(errs, fmt.Errorf("Chain: link %d is the zero Link", i))
			continue
		}
		if link.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", link.name, link.err))
		}
		switch ranks[link.rank] {
		case "":
		case link.name:
			errs = append(errs, fmt.Errorf("Chain: %s is there twice", link.name))
		default:
			errs = append(errs, fmt.Errorf("Chain: %s and %s exclude each other: one drops what comes too late, the other waits for what is missing",
				ranks[link.rank], link.name))
		}
		for _, inner := range links[:i] {
			if inner.rank > link.rank {
				errs = append(errs, fmt.Errorf("Chain: %s must come before %s: %s", link.name, inner.name, reasons[inner.rank]))
			}
		}
		for _, outer := range links[:i] {
			if outer.noTx && link.rank > rankDeduplicate {
				errs = append(errs, fmt.Errorf("Chain: %s: %w: leave it out or give Deduplicate a store on a database", link.name, deduplicator.ErrNoTransaction))
			}
		}
		ranks[link.rank] = link.name
		observers = append(observers, link.observers...)
	}
	if name := ranks[rankRejectStale]; name != "" && ranks[rankDeduplicate] == "" {
		errs = append(errs, fmt.Errorf("Chain: %s without Deduplicate: %s", name, reasons[rankRejectStale]))
	}
	if ranks[rankRejectReplayed] != "" && ranks[rankDeduplicate] == "" {
		errs = append(errs, fmt.Errorf("Chain: RejectReplayed without Deduplicate: %s", reasons[rankRejectReplayed]))
	}
	if err := errors.Join(append(errs, checkAttempts(links))...); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}

	chain := []message.HandlerMiddleware{guard(observers)}
	var outer message.HandlerMiddleware
	for _, link := range links {
		if link.outer != nil {
			outer = link.outer
		}
	}
	recovered := false
	for _, link := range links {
		if link.rank >= rankRetry && outer != nil {
			chain = append(chain, outer)
			outer = nil
		}
		if link.rank >= rankDeduplicate && !recovered {
			chain = append(chain, recoverer)
			recovered = true
		}
		if link.middleware != nil {
			chain = append(chain, link.middleware)
		}
	}
	if !recovered {
		chain = append(chain, recoverer)
	}
	return chain, nil
}

// checkAttempts refuses a store that would end the attempts of a delivery before the
// other links do: a retry would be cut short, and what Sequence should block on would
// go to the poison queue.
func checkAttempts(links []Link) error {
	attempts, maximum := 1, 0
	for _, link := range links {
		attempts += link.retries
		maximum = max(maximum, link.maximum)
		if link.outer != nil {
			attempts++
		}
	}
	if attempts == 1 || maximum == 0 || maximum > attempts {
		return nil
	}
	return fmt.Errorf("Chain: the store's WithMaxAttempts, %d, is not above the attempts of one delivery, %d (the first, the retries, and the one with which Sequence blocks an entity): set %d or more",
		maximum, attempts, attempts+1)
}

// isNil also finds the nil pointer that a constructor returned with its error.
func isNil(v any) bool {
	value := reflect.ValueOf(v)
	return !value.IsValid() || value.Kind() == reflect.Pointer && value.IsNil()
}

// Tx returns the transaction in which the message's key is claimed. It is
// committed after the handler returns nil and rolled back otherwise: do not
// commit or roll it back, and do not use it after the handler has returned. It
// reports false outside of Deduplicate and for a store that is not on
// database/sql.
//
// It panics with [deduplicator.ErrNoTransaction] in a handler of a store that is
// [deduplicator.Untransactional]: what would be written as if it were in a
// transaction would stay when the handler fails. Chain turns the panic into an error.
func Tx(ctx context.Context) (*sql.Tx, bool) {
	tx, ok := sqldb.TxFromContext(ctx)
	if !ok && sqldb.WithoutTx(ctx) {
		panic(fmt.Errorf("middleware: Tx: %w", deduplicator.ErrNoTransaction))
	}
	return tx, ok
}
