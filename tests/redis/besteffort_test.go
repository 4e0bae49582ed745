package redis_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/redisstore"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

// The key is marked after the work and only if it succeeded (B01): one that fails, in
// any way, runs again at once.
func TestBestEffortMarksOnlyAfterSuccessB01(t *testing.T) {
	t.Parallel()
	store := newBestEffort(t, connect(t, services.Value(t, services.Redis)), redisstore.WithClaimTimeout(claimTimeout))
	planned := errors.New("planned")
	_, err := store.Process(t.Context(), claim("a", "one"), func(context.Context) ([]deduplicator.Output, error) { return nil, planned })
	require.Equal(t, planned, err)
	require.PanicsWithValue(t, planned, func() {
		_, _ = store.Process(t.Context(), claim("a", "one"), func(context.Context) ([]deduplicator.Output, error) { panic(planned) })
	})
	_, err = store.Process(t.Context(), claim("a", "one"), work(deduplicator.Output{Topic: "t"}))
	require.ErrorIs(t, err, deduplicator.ErrNoTransaction)
	ctx, cancel := context.WithCancel(t.Context())
	_, err = store.Process(ctx, claim("a", "one"), func(ctx context.Context) ([]deduplicator.Output, error) {
		cancel()
		return nil, ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	process(t, store, claim("a", "one"), work(), deduplicator.Processed)
	process(t, store, claim("a", "one"), never(t), deduplicator.Duplicate)
}

// Work that outlives its lease is told so, and its end does not touch the lease of the
// one who came after it.
func TestBestEffortReleasesOnlyItsOwnLease(t *testing.T) {
	t.Parallel()
	// Long enough for the second one to be in it on a busy machine.
	store := newBestEffort(t, connect(t, services.Value(t, services.Redis)), redisstore.WithLease(5*time.Second), redisstore.WithClaimTimeout(time.Minute))
	planned := errors.New("planned")
	type answer struct {
		result deduplicator.Result
		err    error
	}
	late, second, third := make(chan answer, 1), make(chan answer, 1), make(chan answer, 1)
	start := func(done chan<- answer, work deduplicator.Work) {
		go func() {
			result, err := store.Process(context.WithoutCancel(t.Context()), claim("a", "one"), work)
			done <- answer{result, err}
		}()
	}
	lateEnds, secondRuns, secondEnds := make(chan struct{}), make(chan struct{}), make(chan struct{})
	lateRuns := make(chan struct{})
	start(late, func(ctx context.Context) ([]deduplicator.Output, error) {
		close(lateRuns)
		<-ctx.Done() // the lease has ended
		<-lateEnds
		return nil, planned
	})
	<-lateRuns
	runs := 0
	start(second, func(context.Context) ([]deduplicator.Output, error) {
		runs++
		close(secondRuns)
		<-secondEnds // within its lease
		return nil, nil
	})
	<-secondRuns
	close(lateEnds)
	a := <-late
	require.Equal(t, planned, a.err)
	// Were the second one's lease gone, the third would run beside it.
	start(third, never(t))
	select {
	case a := <-third:
		t.Fatalf("outcome %d, error %v while the second was at work", a.result.Outcome, a.err)
	case <-time.After(200 * time.Millisecond): // a moment to be wrong
	}
	close(secondEnds)
	a = <-second
	require.NoError(t, a.err)
	a = <-third
	require.NoError(t, a.err)
	require.Equal(t, deduplicator.Duplicate, a.result.Outcome)
	require.Equal(t, 1, runs)
}

// A process that dies at work leaves a lease, which ends.
func TestBestEffortLeaseOfTheDead(t *testing.T) {
	t.Parallel()
	client, name := connect(t, services.Value(t, services.Redis)), namespace()
	store, err := redisstore.NewBestEffort(t.Context(), client, name, redisstore.WithLease(redisstore.MinLease), redisstore.WithClaimTimeout(30*time.Second))
	require.NoError(t, err)
	key := name + "\x00stock\x00a"
	value := make(chan string, 1)
	process(t, store, claim("a", ""), func(ctx context.Context) ([]deduplicator.Output, error) {
		value <- client.Get(ctx, key).Val() // what a dead process leaves
		return nil, nil
	}, deduplicator.Processed)
	require.NoError(t, client.Set(t.Context(), key, <-value, redisstore.MinLease).Err())
	process(t, store, claim("a", ""), work(), deduplicator.Processed)
}

// sentTwice sends each SET NX a second time, as go-redis does when an answer is lost.
type sentTwice struct{}

func (sentTwice) DialHook(next redis.DialHook) redis.DialHook { return next }
func (sentTwice) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if err := next(ctx, cmd); err != nil || cmd.Name() != "set" && cmd.Name() != "setnx" {
			return err
		}
		return next(ctx, cmd)
	}
}
func (sentTwice) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// A claim that is sent again finds its own lease, and not that of a twin.
func TestBestEffortClaimIsSentTwice(t *testing.T) {
	t.Parallel()
	client := connect(t, services.Value(t, services.Redis))
	client.AddHook(sentTwice{})
	store := newBestEffort(t, client, redisstore.WithClaimTimeout(claimTimeout))
	process(t, store, claim("a", "one"), work(), deduplicator.Processed)
	process(t, store, claim("a", "one"), never(t), deduplicator.Duplicate)
}

// answerLost loses the answer to the first SET NX.
type answerLost struct {
	sentTwice
	lost bool
}

func (l *answerLost) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if !l.lost && (cmd.Name() == "set" || cmd.Name() == "setnx") {
			l.lost = true
			cmd.SetErr(io.ErrUnexpectedEOF)
			return io.ErrUnexpectedEOF
		}
		return err
	}
}

// A lease that was granted without our knowing does not keep the message waiting.
func TestBestEffortGrantIsLost(t *testing.T) {
	t.Parallel()
	client := connect(t, services.Value(t, services.Redis))
	store := newBestEffort(t, client, redisstore.WithClaimTimeout(claimTimeout))
	client.AddHook(&answerLost{})
	_, err := store.Process(t.Context(), claim("a", "one"), never(t))
	require.ErrorIs(t, err, deduplicator.ErrUnavailable)
	process(t, store, claim("a", "one"), work(), deduplicator.Processed)
}

// Redis stops: before the work nothing runs, after it the work counts as done.
func TestBestEffortWhileRedisIsGone(t *testing.T) {
	t.Parallel()
	server, reported := ownRedis(t), &errorLog{}
	client := connect(t, server.Addr())
	store := newBestEffort(t, client, redisstore.WithClaimTimeout(claimTimeout), redisstore.WithErrorHandler(reported.add))
	process(t, store, claim("during", ""), func(ctx context.Context) ([]deduplicator.Output, error) {
		return nil, server.Stop(ctx)
	}, deduplicator.Processed)
	require.Len(t, reported.all(), 1)

	_, err := store.Process(t.Context(), claim("down", ""), never(t))
	require.ErrorIs(t, err, deduplicator.ErrUnavailable)
	require.NoError(t, server.Start(t.Context()))
	process(t, store, claim("down", ""), work(), deduplicator.Processed)

	require.NoError(t, server.Pause())
	_, err = store.Process(t.Context(), claim("paused", ""), never(t))
	require.ErrorIs(t, err, deduplicator.ErrUnavailable)
	require.NoError(t, server.Resume())
}

// What it knew is lost with its data: a copy is new, as the documentation says.
func TestBestEffortForgets(t *testing.T) {
	t.Parallel()
	client := connect(t, ownRedis(t).Addr())
	store := newBestEffort(t, client)
	process(t, store, claim("a", "one"), work(), deduplicator.Processed)
	require.NoError(t, client.FlushAll(t.Context()).Err())
	process(t, store, claim("a", "one"), work(), deduplicator.Processed)
}
