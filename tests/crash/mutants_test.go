package crash_test

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// mutant is a worker that is broken on purpose.
type mutant struct {
	store         func(deduplicator.Store) deduplicator.Store
	outside       message.HandlerMiddleware
	effectOutside bool

	killedAt step
	before   func(*trial) // waits for what must happen before the kill
	found    string       // what the comparison has to say
}

// mutants show that the comparison sees what it is there for.
var mutants = map[string]mutant{
	"acknowledges first": {
		outside: func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				msg.SetContext(context.WithoutCancel(msg.Context())) // which Ack would end
				msg.Ack()
				return h(msg)
			}
		},
		killedAt: committing,
		before:   (*trial).awaitAck,
		found:    "missing: it took no effect",
	},
	"claims in a transaction of its own": {
		store:    func(s deduplicator.Store) deduplicator.Store { return claimAlone{s} },
		killedAt: written,
		found:    "missing: it took no effect",
	},
	"writes outside of the transaction": {
		effectOutside: true,
		killedAt:      written,
		found:         "took effect twice",
	},
	"forgets outputs": {
		store:    func(s deduplicator.Store) deduplicator.Store { return outputsLost{s} },
		killedAt: publishing,
		found:    "was never emitted",
	},
	"gives outputs new ids": {
		store:    func(s deduplicator.Store) deduplicator.Store { return outputsRenamed{s} },
		killedAt: published,
		found:    "did not return in the attempt that took effect",
	},
}

type claimAlone struct{ deduplicator.Store }

func (s claimAlone) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	result, err := s.Store.Process(ctx, claim, func(context.Context) ([]deduplicator.Output, error) { return nil, nil })
	if err != nil || result.Outcome == deduplicator.Duplicate {
		return result, err
	}
	return s.Store.Process(ctx, deduplicator.Claim{Consumer: "work", Key: rand.Text()}, work)
}

type outputsLost struct{ deduplicator.Store }

func (s outputsLost) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	result, err := s.Store.Process(ctx, claim, work)
	result.Outputs = nil
	return result, err
}

type outputsRenamed struct{ deduplicator.Store }

func (s outputsRenamed) Process(ctx context.Context, claim deduplicator.Claim, work deduplicator.Work) (deduplicator.Result, error) {
	result, err := s.Store.Process(ctx, claim, work)
	for i := range result.Outputs {
		result.Outputs[i].UUID = watermill.NewUUID()
	}
	return result, err
}

// awaitAck waits until Kafka has noted that an order was acknowledged.
func (tr *trial) awaitAck() {
	tr.t.Helper()
	admin, err := sarama.NewClusterAdmin(tr.Kafka, nil)
	require.NoError(tr.t, err)
	defer admin.Close() //nolint:errcheck // it only reads
	tr.eventually("the ack of an order", func(context.Context) (bool, error) {
		offsets, err := admin.ListConsumerGroupOffsets(stock+"-"+tr.Run, nil)
		if err != nil {
			return false, err
		}
		for _, block := range offsets.Blocks[tr.orders()] {
			if block.Offset > 0 {
				return true, nil
			}
		}
		return false, nil
	})
}

func TestTheComparisonFindsMutants(t *testing.T) {
	t.Parallel()
	for name, m := range mutants {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			driver := testdb.SQLite
			if m.effectOutside {
				driver = testdb.PGX // on SQLite it could not write at all
			}
			tr := onDatabase(t, driver, kafka)
			tr.publish(tr.newEvent("only", "entity"))
			s := tr.settings
			s.Mutant, s.Relay, s.Stop, s.StopIn = name, false, m.killedAt, delivery{stock, "only"} // the relay would mend some
			c := spawn(t, s)
			c.awaitStop(m.killedAt)
			if m.before != nil {
				m.before(tr)
			}
			c.Kill()

			s.Stop = ""
			c = spawn(t, s)
			defer c.Kill()
			faults := tr.finish()
			require.Contains(t, strings.Join(faults, "\n"), m.found)
		})
	}
}
