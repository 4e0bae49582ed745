// Package producer_test runs the numbers of producers (ordering.Producer,
// ordering.Windows) on real databases and brokers.
package producer_test

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

const patience = 30 * time.Second // for what must happen

// TestMain checks that no goroutine is left. It has patience, because a Kafka
// client that was cut off ends by its timeouts.
func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("rapid.nofailfile", "true") // what it prints is enough
	code := m.Run()
	// sarama's metrics share one ticker per process, which never ends.
	ticker := goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")
	for deadline := time.Now().Add(patience); code == 0; {
		err := goleak.Find(ticker)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// each runs test on each of the drivers.
func each(t *testing.T, drivers []testdb.Driver, test func(t *testing.T, d testdb.Driver)) {
	t.Helper()
	for _, d := range drivers {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			test(t, d)
		})
	}
}

func open(t *testing.T, d testdb.Driver) *sql.DB {
	t.Helper()
	db := testdb.Open(t, d)
	require.NoError(t, ordering.Migrate(t.Context(), db, d.Dialect))
	return db
}

func newProducer(t *testing.T, db *sql.DB, d testdb.Driver, name string, opts ...ordering.ProducerOption) *ordering.Producer {
	t.Helper()
	producer, err := ordering.NewProducer(t.Context(), db, d.Dialect, name, opts...)
	require.NoError(t, err)
	return producer
}

func newWindows(t *testing.T, db *sql.DB, d testdb.Driver, opts ...ordering.WindowsOption) *ordering.Windows {
	t.Helper()
	windows, err := ordering.NewWindows(t.Context(), db, d.Dialect, opts...)
	require.NoError(t, err)
	return windows
}

// inTx commits when work returns nil.
func inTx(ctx context.Context, db *sql.DB, opts *sql.TxOptions, work func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := work(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// apply records stamp for consumer "c" in a transaction of its own.
func apply(ctx context.Context, db *sql.DB, windows *ordering.Windows, stamp ordering.Stamp) (result ordering.WindowResult, err error) {
	err = inTx(ctx, db, nil, func(tx *sql.Tx) (err error) {
		result, err = windows.ApplyTx(ctx, tx, "c", stamp)
		return err
	})
	return result, err
}

func number(epoch uint32, sequence uint64) ordering.Stamp {
	return ordering.Stamp{Producer: "shop", Epoch: epoch, Stream: "orders/0", Sequence: sequence}
}

func newMessage(entity, payload string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	msg.Metadata.Set(ordering.PartitionKeyMetadata, entity)
	return msg
}

func stampOf(t *testing.T, msg *message.Message) ordering.Stamp {
	t.Helper()
	stamp, numbered, err := ordering.ParseStamp(msg)
	require.NoError(t, err)
	require.True(t, numbered)
	return stamp
}

// recorder is a publisher that remembers what it was given, and fails when fail
// says so.
type recorder struct {
	mu   sync.Mutex
	sent []*message.Message
	fail func(msg *message.Message) error
}

func (r *recorder) Publish(_ string, messages ...*message.Message) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, msg := range messages {
		if r.fail != nil {
			if err := r.fail(msg); err != nil {
				return err
			}
		}
		r.sent = append(r.sent, msg.Copy())
	}
	return nil
}

func (r *recorder) Close() error { return nil }

func (r *recorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sent)
}
