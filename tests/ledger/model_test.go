package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/middleware"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// TestModel interleaves deliveries of one message whose calls end in every way,
// workers that are paused in their call and wake at any time, leases that end, days
// that pass and operators whose answers may be late, and compares what is durable,
// what is returned and what the provider has done with a small model.
func TestModel(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d testdb.Driver) {
		k := newKit(t, d)
		rapid.Check(t, func(t *rapid.T) { runModel(t, k) })
	})
}

const modelWindow = 24 * time.Hour

// model is what is expected of one effect, and the world around it.
type model struct {
	*rapid.T
	k      *kit
	rule   string
	effect ledger.Effect

	state  string // "" before the first delivery
	result string // recorded
	leased bool
	owner  *worker // whose call may still be recorded
	age    time.Duration

	effects    int // at the provider
	calls      int // so far, which number the receipts
	generation int // at the provider, who refuses older calls since it said "not done"

	paused []*worker
	listed []ledger.UnknownEffect // by an operator, some time ago
	fresh  bool                   // nothing has changed since
}

// worker is a delivery that is paused in its call.
type worker struct {
	goOn chan struct{}
	done chan error
	ends func() (string, error) // what its call does when it goes on
}

var (
	errLost    = errors.New("lost")
	errRefused = errors.New("the provider has cancelled this call")
)

func runModel(t *rapid.T, k *kit) {
	rule := rapid.SampledFrom([]string{"call again", "retry with key", "ask provider", "ask operator"}).Draw(t, "rule")
	_, err := k.db.ExecContext(k.t.Context(), "DELETE FROM external_effects")
	require.NoError(t, err)
	m := &model{T: t, k: k, rule: rule}
	rules := map[string]ledger.Rule{
		"call again": ledger.CallAgain(), "retry with key": ledger.RetryWithKey(modelWindow),
		"ask provider": ledger.AskProvider(m.ask), "ask operator": ledger.AskOperator(),
	}
	m.effect, err = ledger.NewEffect("charge", rules[rule])
	require.NoError(t, err)
	defer func() { // whatever happened: no goroutine stays
		for _, w := range m.paused {
			w.ends = func() (string, error) { return "", errLost }
			close(w.goOn)
			<-w.done
		}
	}()
	t.Repeat(map[string]func(*rapid.T){
		"deliver":  func(*rapid.T) { m.deliver() },
		"wake":     func(*rapid.T) { m.wake() },
		"pass":     func(*rapid.T) { m.pass() },
		"list":     func(*rapid.T) { m.list() },
		"resolve":  func(*rapid.T) { m.resolve() },
		"":         func(*rapid.T) { m.check() },
		"deliver2": func(*rapid.T) { m.deliver() }, // more often than the rest
	})
}

// perform is the provider, at the request of a call.
func (m *model) perform(call, generation int) (string, error) {
	if generation < m.generation {
		return "", errRefused
	}
	if m.rule != "retry with key" || m.effects == 0 {
		m.effects++
	}
	return fmt.Sprint("receipt ", call), nil
}

// truth is an answer after which the provider takes nothing that is still on its way.
func (m *model) truth() ledger.Answer {
	if m.effects > 0 {
		return ledger.AnswerDone("looked up")
	}
	m.generation++
	return ledger.AnswerNotDone()
}

func (m *model) ask(context.Context, ledger.UnknownEffect) (ledger.Answer, error) {
	if rapid.Bool().Draw(m.T, "the provider does not know yet") {
		return ledger.AnswerUnknown(), nil
	}
	return m.truth(), nil
}

// unsettled reports whether nobody knows and nobody is at it.
func (m *model) unsettled() bool {
	return (m.state == "started" || m.state == "unknown") && !m.leased
}

func (m *model) deliver() {
	m.fresh = false
	ending := rapid.SampledFrom([]string{"done", "permanent", "not done", "lost before", "lost after", "panic", "paused before", "paused after"}).Draw(m.T, "ending")
	before, beforeEffects := m.state, m.effects
	pausing := &worker{goOn: make(chan struct{}), done: make(chan error, 1)}
	entered := make(chan struct{}, 1)
	called := false
	run := func() (result string, err error) {
		defer func() {
			if value := recover(); value != nil {
				err = fmt.Errorf("panicked: %v", value)
			}
		}()
		return ledger.Do(m.k.of("m"), m.k.ledger, m.effect, nil, func(context.Context, string) (string, error) {
			called = true
			m.calls++
			call, generation := m.calls, m.generation
			switch ending {
			case "done":
				return m.perform(call, generation)
			case "permanent":
				return "", middleware.Permanent(errors.New("declined"))
			case "not done":
				return "", ledger.NotDone(errLost)
			case "lost before":
				return "", errLost
			case "lost after":
				_, _ = m.perform(call, generation)
				return "", errLost
			case "panic":
				_, _ = m.perform(call, generation)
				panic("boom")
			case "paused before":
				pausing.ends = func() (string, error) { return m.perform(call, generation) }
			case "paused after":
				receipt, err := m.perform(call, generation)
				pausing.ends = func() (string, error) { return receipt, err }
			}
			entered <- struct{}{}
			<-pausing.goOn
			return pausing.ends()
		})
	}
	var result string
	var err error
	if ending == "paused before" || ending == "paused after" {
		go func() {
			result, err := run()
			select {
			case <-pausing.goOn: // it has been away
				pausing.done <- err
			default: // there was no call
				pausing.done <- errors.Join(err, resultError(result))
				close(entered)
			}
		}()
		if _, inCall := <-entered; inCall {
			m.paused = append(m.paused, pausing)
		} else {
			err = <-pausing.done
			var r resultError
			if errors.As(err, &r) && r != "" {
				result, err = string(r), nil
			}
		}
	} else {
		result, err = run()
	}

	mayCall := before == "" || before == "planned" || m.unsettled() && (m.rule == "call again" ||
		m.rule == "retry with key" && m.age+ledger.DefaultLease <= modelWindow)
	switch {
	case before == "succeeded":
		require.NoError(m, err)
		require.Equal(m, m.result, result)
	case before == "failed":
		require.ErrorIs(m, err, ledger.ErrFailed)
	case !mayCall && !m.unsettled():
		require.ErrorIs(m, err, ledger.ErrInProgress)
	case !mayCall && m.rule == "retry with key":
		require.ErrorIs(m, err, ledger.ErrKeyExpired)
	case !mayCall && m.rule == "ask operator":
		require.ErrorIs(m, err, ledger.ErrUnknown)
		require.True(m, middleware.IsPermanent(err))
	case !mayCall && !called: // the provider was asked
		m.owner = nil
		if beforeEffects > 0 && err == nil {
			require.Equal(m, "looked up", result)
			m.state, m.result = "succeeded", result
		} else {
			require.ErrorIs(m, err, ledger.ErrUnknown)
			m.state = "unknown"
		}
	default:
		require.True(m, called)
		if before != "started" && before != "unknown" || m.rule == "ask provider" {
			m.age = 0
		}
		m.called(ending, pausing, result, err)
	}
	if !slices.Contains([]string{"", "planned"}, before) && !mayCall && m.rule != "ask provider" {
		require.False(m, called)
	}
}

// resultError carries a result through a channel of errors.
type resultError string

func (e resultError) Error() string { return string(e) }

// called is what follows a call.
func (m *model) called(ending string, w *worker, result string, err error) {
	m.leased, m.owner = false, nil
	switch ending {
	case "done":
		require.NoError(m, err)
		m.state, m.result = "succeeded", fmt.Sprint("receipt ", m.calls)
		require.Equal(m, m.result, result)
	case "permanent":
		require.ErrorIs(m, err, ledger.ErrFailed)
		m.state = "failed"
	case "not done":
		require.ErrorIs(m, err, errLost)
		require.NotErrorIs(m, err, ledger.ErrUnknown)
		m.state = "planned"
	case "lost before", "lost after":
		require.ErrorIs(m, err, ledger.ErrUnknown)
		require.ErrorIs(m, err, errLost)
		m.state = "unknown"
	case "panic":
		require.ErrorContains(m, err, "panicked: boom")
		m.state = "unknown"
	default:
		m.state, m.leased, m.owner = "started", true, w
	}
}

// wake lets a paused worker go on. What it brings counts only if nobody else has
// acted on the effect since, lease or not.
func (m *model) wake() {
	if len(m.paused) == 0 {
		m.Skip()
	}
	m.fresh = false
	i := rapid.IntRange(0, len(m.paused)-1).Draw(m.T, "worker")
	w := m.paused[i]
	m.paused = slices.Delete(m.paused, i, i+1)
	var result string
	var failure error
	ends := w.ends
	w.ends = func() (string, error) {
		result, failure = ends()
		return result, failure
	}
	close(w.goOn)
	err := <-w.done
	switch {
	case w != m.owner:
		require.ErrorIs(m, err, ledger.ErrFenced)
		return
	case failure != nil:
		require.ErrorIs(m, err, ledger.ErrUnknown)
		m.state = "unknown"
	default:
		require.NoError(m, err)
		m.state, m.result = "succeeded", result
	}
	m.leased, m.owner = false, nil
}

func (m *model) pass() {
	d := rapid.SampledFrom([]time.Duration{ledger.DefaultLease, 9 * time.Hour}).Draw(m.T, "time")
	m.k.later(d)
	m.age += d
	m.leased = false
}

func (m *model) list() {
	var err error
	m.listed, err = m.k.ledger.Unknown(m.k.t.Context(), 10)
	require.NoError(m, err)
	m.fresh = true
}

// resolve answers what was listed, now or some time ago.
func (m *model) resolve() {
	if len(m.listed) == 0 {
		m.Skip()
	}
	answer := ledger.AnswerFailed("given up") // an answer that must not count if it is late
	if m.fresh {
		answer = m.truth()
	}
	err := m.k.ledger.Resolve(m.k.t.Context(), m.listed[0], answer)
	if !m.fresh {
		if err == nil { // nobody has touched it since: deliveries that were refused don't
			require.True(m, m.unsettled())
			m.state, m.owner = "failed", nil
			return
		}
		require.ErrorIs(m, err, ledger.ErrNotUnknown)
		return
	}
	require.NoError(m, err)
	m.owner = nil
	m.state, m.result = "planned", ""
	if m.effects > 0 {
		m.state, m.result = "succeeded", "looked up"
	}
	m.fresh = false
}

// check compares what is durable and what is promised.
func (m *model) check() {
	require.Equal(m, m.state, m.k.state("m"))
	require.Equal(m, m.unsettled(), len(m.k.unknown()) == 1, "listed for reconciliation")
	if m.rule != "call again" {
		require.LessOrEqual(m, m.effects, 1, "payments")
	}
	if m.state == "succeeded" {
		require.Positive(m, m.effects)
	}
}
