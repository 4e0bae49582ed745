package sequence_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

const (
	modelEvents   = 8
	modelBatch    = 2
	modelAttempts = 2
)

// model is what an entity's sequence must do, in memory.
type model struct {
	exists, blocked bool
	last            int64
	parked          map[int64]waiting
	applied         []string
	touched         map[int64]bool // what the handler was called with
}

type waiting struct {
	reason   string
	attempts int
}

func (m *model) clone() *model {
	c := *m
	c.parked, c.applied, c.touched = maps.Clone(m.parked), slices.Clone(m.applied), map[int64]bool{}
	return &c
}

func (m *model) apply(seq int64) {
	m.last = seq
	m.applied = append(m.applied, fmt.Sprint("0/", seq))
}

func (m *model) deliver(seq int64, failing map[int64]bool) {
	m.exists = true
	_, known := m.parked[seq]
	switch {
	case seq <= m.last || known:
	case m.blocked:
		m.parked[seq] = waiting{reason: "blocked"}
	case seq > m.last+1:
		m.parked[seq] = waiting{reason: "gap"}
	default:
		m.touched[seq] = true
		if failing[seq] {
			m.parked[seq] = waiting{"failed", modelAttempts}
			m.blocked = true
			return
		}
		m.apply(seq)
	}
	m.release(failing)
}

// release is one transaction; it reports whether another one may do more.
func (m *model) release(failing map[int64]bool) bool {
	for n := 0; n < modelBatch; n++ {
		next, ok := m.parked[m.last+1]
		if m.blocked || !ok {
			return false
		}
		m.touched[m.last+1] = true
		if failing[m.last+1] {
			next.attempts++
			next.reason = "gap"
			if next.attempts >= modelAttempts {
				next.reason, m.blocked = "failed", true
			}
			m.parked[m.last+1] = next
			return false
		}
		delete(m.parked, m.last+1)
		m.apply(m.last + 1)
	}
	return true
}

func (m *model) renew() {
	m.blocked = false
	for seq := range m.parked {
		m.parked[seq] = waiting{reason: "gap"}
	}
}

func (m *model) retry() error {
	switch {
	case !m.exists:
		return ordering.ErrNoEntity
	case !m.blocked:
		return ordering.ErrNotBlocked
	}
	m.renew()
	return nil
}

func (m *model) skip() error {
	if !m.exists {
		return ordering.ErrNoEntity
	}
	if len(m.parked) == 0 {
		return ordering.ErrNotParked
	}
	lowest := slices.Min(slices.Collect(maps.Keys(m.parked)))
	switch {
	case lowest > m.last+1:
		m.last = lowest - 1
	case !m.blocked:
		return ordering.ErrNotBlocked
	case m.parked[lowest].reason == "failed":
		delete(m.parked, lowest)
		m.last = lowest
	}
	m.renew()
	return nil
}

func (m *model) drop(seq int64) error {
	dropped, known := m.parked[seq]
	switch {
	case !m.exists:
		return ordering.ErrNoEntity
	case !known:
		return ordering.ErrNotParked
	}
	delete(m.parked, seq)
	if m.blocked && dropped.reason == "failed" {
		m.renew()
	}
	return nil
}

func (m *model) list() []string {
	list := []string{}
	for _, seq := range slices.Sorted(maps.Keys(m.parked)) {
		list = append(list, fmt.Sprintf("0/%d %s", seq, m.parked[seq].reason))
	}
	return list
}

// Whatever comes, whenever it fails and whoever intervenes: two instances do what
// the model does. Without skips and drops that is 1, 2, 3, …
func TestModel(t *testing.T) {
	t.Parallel()
	each(t, testdb.Servers, func(t *testing.T, d testdb.Driver) {
		database := migrate(t, d)
		opts := []ordering.SequenceOption{ordering.WithReleaseBatch(modelBatch), ordering.WithReleaseAttempts(modelAttempts)}
		instances := []*kit{instance(t, database, opts...), instance(t, database, opts...)}
		runs := 0
		rapid.Check(t, func(rt *rapid.T) {
			runs++
			checkModel(rt, instances, fmt.Sprint("run ", runs))
		})
	})
}

func checkModel(rt *rapid.T, instances []*kit, entity string) {
	m := &model{parked: map[int64]waiting{}, touched: map[int64]bool{}}
	failing, crashing := map[int64]bool{}, int64(0)
	intervened := false
	var cancel context.CancelFunc
	for _, k := range instances {
		k.failWith(func(msg *message.Message) error {
			seq, _ := strconv.ParseInt(msg.Metadata.Get("seq"), 10, 64)
			if seq == crashing {
				cancel()
			}
			if failing[seq] {
				return errPlanned
			}
			return nil
		})
	}
	pick := func(rt *rapid.T) *kit { return instances[rapid.IntRange(0, len(instances)-1).Draw(rt, "instance")] }
	seqs := rapid.Int64Range(1, modelEvents)
	var sent []*message.Message
	deliver := func(rt *rapid.T, msg *message.Message, crash int64) {
		seq, _ := strconv.ParseInt(msg.Metadata.Get("seq"), 10, 64)
		next := m.clone()
		next.deliver(seq, failing)
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		cancel, crashing = stop, crash
		delivery := msg.Copy()
		delivery.SetContext(ctx)
		_, err := pick(rt).handler(delivery)
		if next.touched[crash] {
			require.Error(rt, err)
			return // nothing has happened
		}
		require.NoError(rt, err)
		m = next
		sent = append(sent, msg)
	}
	act := func(rt *rapid.T, want error, got error) {
		if want == nil {
			require.NoError(rt, got)
			return
		}
		require.ErrorIs(rt, got, want)
	}
	rt.Repeat(map[string]func(*rapid.T){
		"deliver": func(rt *rapid.T) { deliver(rt, pick(rt).event(entity, 0, seqs.Draw(rt, "seq")), 0) },
		"next":    func(rt *rapid.T) { deliver(rt, pick(rt).event(entity, 0, m.last+1), 0) },
		"crash": func(rt *rapid.T) {
			deliver(rt, pick(rt).event(entity, 0, m.last+1), m.last+rapid.Int64Range(1, modelBatch+1).Draw(rt, "crash"))
		},
		"duplicate": func(rt *rapid.T) {
			if len(sent) == 0 {
				rt.Skip()
			}
			delivery := sent[rapid.IntRange(0, len(sent)-1).Draw(rt, "sent")].Copy()
			delivery.SetContext(context.Background())
			crashing = 0
			_, err := pick(rt).handler(delivery)
			require.NoError(rt, err)
		},
		"fail": func(rt *rapid.T) { failing[seqs.Draw(rt, "seq")] = true },
		"heal": func(*rapid.T) { clear(failing) },
		"release": func(rt *rapid.T) {
			crashing = 0
			require.NoError(rt, pick(rt).releaser().Release(context.Background()))
			for m.release(failing) {
			}
		},
		"retry": func(rt *rapid.T) {
			_, err := pick(rt).operator.Retry(context.Background(), consumer, entity)
			act(rt, m.retry(), err)
		},
		"skip": func(rt *rapid.T) {
			_, err := pick(rt).operator.Skip(context.Background(), consumer, entity)
			want := m.skip()
			act(rt, want, err)
			intervened = intervened || want == nil
		},
		"drop": func(rt *rapid.T) {
			seq := seqs.Draw(rt, "seq")
			_, err := pick(rt).operator.Drop(context.Background(), consumer, entity, ordering.Position{Seq: seq})
			want := m.drop(seq)
			act(rt, want, err)
		},
		"": func(rt *rapid.T) {
			k := instances[0]
			require.Equal(rt, append([]string{}, m.applied...), k.effects(entity))
			k.parked(entity, m.list()...)
			listed, err := k.operator.List(context.Background(), ordering.ParkedFilter{Entity: entity})
			require.NoError(rt, err)
			for _, parked := range listed {
				require.Equal(rt, m.blocked, parked.EntityBlocked != "")
				require.Equal(rt, m.last, parked.EntityLast.Seq)
				require.Equal(rt, m.parked[parked.Seq].attempts, parked.Attempts)
			}
			if !intervened {
				require.Equal(rt, series(1, m.last), k.effects(entity))
			}
			for _, k := range instances {
				for _, outcome := range k.outcomes() {
					require.NotEqual(rt, middleware.Conflict, outcome)
				}
			}
		},
	})
	// All goes on from here, whatever has happened.
	clear(failing)
	crashing = 0
	k := instances[1]
	if _, err := k.operator.Retry(context.Background(), consumer, entity); !errors.Is(err, ordering.ErrNotBlocked) && !errors.Is(err, ordering.ErrNoEntity) {
		require.NoError(rt, err)
	}
	for seq := int64(1); seq <= modelEvents+1; seq++ {
		require.NoError(rt, k.process(k.event(entity, 0, seq)))
	}
	require.NoError(rt, k.releaser().Release(context.Background()))
	k.parked(entity)
	if !intervened {
		effects := k.effects(entity)
		require.Equal(rt, series(1, int64(len(effects))), effects)
		require.GreaterOrEqual(rt, len(effects), modelEvents+1)
	}
}
