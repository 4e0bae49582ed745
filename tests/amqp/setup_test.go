// Package amqp_test runs amqpshard against a real RabbitMQ.
package amqp_test

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	stock "github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

var _ stock.Marshaler = amqpshard.Marshaler{}

// timeout is how long a test waits for what must happen.
const timeout = time.Minute

// minPoll is how often an eventual state is looked at.
const minPoll = 10 * time.Millisecond

// TestMain runs more tests at a time than there are processors: they wait most of
// the time.
func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = f.Value.Set("8")
	}
	goleak.VerifyTestMain(m)
}

// server is a broker that the suite runs on, and the routing of its groups.
type server struct {
	name    services.Name
	routing amqpshard.Routing
}

func (on server) url(t *testing.T) string {
	t.Helper()
	return services.Value(t, on.name)
}

// onEach runs test on RabbitMQ 3 and 4, each with one kind of routing.
func onEach(t *testing.T, test func(t *testing.T, on server)) {
	t.Helper()
	t.Parallel()
	onServers(t, []server{{services.AMQP, amqpshard.ConsistentHash}, {services.AMQP4, amqpshard.Slots}}, test)
}

// onAll is onEach with all pairs, for tests of the routing.
func onAll(t *testing.T, test func(t *testing.T, on server)) {
	t.Helper()
	onEach(t, test)
	onServers(t, []server{{services.AMQP, amqpshard.Slots}, {services.AMQP4, amqpshard.ConsistentHash}}, test)
}

func onServers(t *testing.T, servers []server, test func(t *testing.T, on server)) {
	t.Helper()
	for _, on := range servers {
		t.Run(fmt.Sprint(on.name, "/", on.routing), func(t *testing.T) { test(t, on) })
	}
}

// fixture is one topic with a raw connection to look behind the broker's back.
type fixture struct {
	*testing.T
	server
	url   string
	topic string
	raw   *amqp.Connection
}

func setup(t *testing.T, on server) *fixture {
	t.Parallel()
	return connect(t, on, on.url(t))
}

func connect(t *testing.T, on server, url string) *fixture {
	f := &fixture{T: t, server: on, url: url, topic: "test." + watermill.NewShortUUID()}
	var err error
	f.raw, err = amqp.Dial(f.url)
	require.NoError(t, err)
	t.Cleanup(func() {
		f.with(func(ch *amqp.Channel) { _ = ch.ExchangeDelete(f.topic, false, false) })
		_ = f.raw.Close()
	})
	return f
}

// redial connects again after the broker was away.
func (f *fixture) redial() {
	f.Helper()
	_ = f.raw.Close()
	var err error
	f.raw, err = amqp.Dial(f.url)
	require.NoError(f, err)
}

// with runs do on a channel of its own, because a refusal closes it.
func (f *fixture) with(do func(*amqp.Channel)) {
	f.Helper()
	ch, err := f.raw.Channel()
	require.NoError(f, err)
	defer ch.Close()
	do(ch)
}

// open returns a broker with two shards. What it declares for the topic is
// deleted at the end.
func (f *fixture) open(group string, changes ...func(*amqpshard.Config)) *amqpshard.Broker {
	f.Helper()
	cfg := amqpshard.Config{URL: f.url, Group: group, Shards: 2, Routing: f.routing, Key: ordering.KeyFromMetadata("entity")}
	for _, change := range changes {
		change(&cfg)
	}
	broker, err := amqpshard.Open(f.Context(), cfg, nil)
	require.NoError(f, err)
	f.Cleanup(func() {
		require.NoError(f, broker.Close())
		f.drop(f.topic, group, cfg.Shards)
	})
	return broker
}

// drop deletes what a group has on a topic.
func (f *fixture) drop(topic, group string, shards int) {
	f.Helper()
	f.with(func(ch *amqp.Channel) {
		name := topic + "." + group
		_ = ch.ExchangeDelete(name, false, false)
		_ = ch.ExchangeDelete(name+".unrouted", false, false)
		for _, suffix := range []string{"dead", "unrouted", "refused"} {
			_, _ = ch.QueueDelete(name+"."+suffix, false, false, false)
		}
		for i := range shards {
			shard := fmt.Sprintf("%s.%03d", name, i)
			_ = ch.ExchangeDelete(shard, false, false)
			_ = ch.ExchangeDelete(shard+".queue", false, false)
			_, _ = ch.QueueDelete(shard, false, false, false)
		}
	})
}

func (f *fixture) queues(group string, shards int) []string {
	queues := make([]string, shards)
	for i := range queues {
		queues[i] = fmt.Sprintf("%s.%s.%03d", f.topic, group, i)
	}
	return queues
}

// depth returns the number of ready messages in the queues.
func (f *fixture) depth(queues ...string) int {
	f.Helper()
	sum := 0
	f.with(func(ch *amqp.Channel) {
		for _, queue := range queues {
			state, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
			require.NoError(f, err)
			sum += state.Messages
		}
	})
	return sum
}

// eventuallyDepth waits until the queues hold n ready messages.
func (f *fixture) eventuallyDepth(n int, queues ...string) {
	f.Helper()
	require.Eventually(f, func() bool { return f.depth(queues...) == n }, timeout, minPoll, "%v", queues)
}

// eventuallyConsumed waits until the queues are there and have a consumer. A quorum
// queue that is deleted just after it was declared can take the supervisor of all
// dead letter workers down with it (seen on RabbitMQ 3.10.8).
func (f *fixture) eventuallyConsumed(queues ...string) {
	f.Helper()
	for _, queue := range queues {
		require.Eventually(f, func() (consumed bool) {
			f.with(func(ch *amqp.Channel) {
				state, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil)
				consumed = err == nil && state.Consumers > 0
			})
			return consumed
		}, timeout, minPoll, queue)
	}
}

func (f *fixture) subscribe(broker *amqpshard.Broker) <-chan *message.Message {
	f.Helper()
	messages, err := broker.Subscriber().Subscribe(f.Context(), f.topic)
	require.NoError(f, err)
	return messages
}

// receive returns the next message.
func (f *fixture) receive(messages <-chan *message.Message) *message.Message {
	f.Helper()
	select {
	case msg, ok := <-messages:
		require.True(f, ok, "the subscription ended")
		return msg
	case <-time.After(timeout):
		require.Fail(f, "no message")
	}
	return nil
}

// ends fails the test unless the subscription ends without another message.
func (f *fixture) ends(messages <-chan *message.Message) {
	f.Helper()
	select {
	case _, open := <-messages:
		require.False(f, open, "another message")
	case <-time.After(timeout):
		require.Fail(f, "the subscription goes on")
	}
}

// await fails the test unless done is closed or sent to in time.
func await[T any](t testing.TB, done <-chan T, what string) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(timeout):
		require.Fail(t, "timeout: "+what)
	}
}

// newMessage returns a message of an entity.
func newMessage(entity, payload string) *message.Message {
	msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
	msg.Metadata.Set("entity", entity)
	return msg
}

// proxy is a TCP proxy before the broker that can cut, refuse and stall.
type proxy struct {
	url      string
	upstream string
	listener net.Listener
	wg       sync.WaitGroup

	mu      sync.Mutex // guards the rest
	conns   []net.Conn
	down    bool          // refuse connections
	stalled chan struct{} // open while what clients send is held back; nil: not
}

// newProxy must be called before open, so that it ends after the brokers.
func (f *fixture) newProxy() *proxy {
	f.Helper()
	address, err := url.Parse(f.url)
	require.NoError(f, err)
	p := &proxy{upstream: address.Host}
	p.listener, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(f, err)
	address.Host = p.listener.Addr().String()
	p.url = address.String()
	p.wg.Go(p.accept)
	f.Cleanup(func() {
		_ = p.listener.Close()
		p.release()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) through(c *amqpshard.Config) { c.URL = p.url }

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.upstream)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, server)
		if p.down {
			_, _ = client.Close(), server.Close()
		}
		p.mu.Unlock()
		pipe := func(to, from net.Conn, hold func()) {
			defer to.Close()
			defer from.Close()
			buffer := make([]byte, 4096)
			for {
				n, err := from.Read(buffer)
				hold()
				if n > 0 {
					if _, err := to.Write(buffer[:n]); err != nil {
						return
					}
				}
				if err != nil {
					return
				}
			}
		}
		p.wg.Go(func() { pipe(client, server, func() {}) })
		p.wg.Go(func() { pipe(server, client, p.hold) })
	}
}

func (p *proxy) hold() {
	p.mu.Lock()
	stalled := p.stalled
	p.mu.Unlock()
	if stalled != nil {
		<-stalled
	}
}

// cut closes all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range p.conns {
		_ = conn.Close()
	}
	p.conns = nil
}

// setDown cuts, and refuses connections until it is called with false.
func (p *proxy) setDown(down bool) {
	p.mu.Lock()
	p.down = down
	p.mu.Unlock()
	p.cut()
}

// stall holds back what clients send, until release.
func (p *proxy) stall() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stalled = make(chan struct{})
}

func (p *proxy) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stalled != nil {
		close(p.stalled)
		p.stalled = nil
	}
}

// consumeRaw returns the payloads of n messages of a queue.
func (f *fixture) consumeRaw(queue string, n int) []amqp.Delivery {
	f.Helper()
	var got []amqp.Delivery
	f.with(func(ch *amqp.Channel) {
		deliveries, err := ch.Consume(queue, "", true, false, false, false, nil)
		require.NoError(f, err)
		for len(got) < n {
			select {
			case delivery, ok := <-deliveries:
				require.True(f, ok)
				got = append(got, delivery)
			case <-time.After(timeout):
				require.Failf(f, "missing messages", "%d of %d in %s", len(got), n, queue)
			}
		}
	})
	return got
}

// publish publishes until it works: for tests that break something else.
func (f *fixture) publish(broker *amqpshard.Broker, messages ...*message.Message) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), timeout)
	defer cancel()
	for {
		err := broker.Publisher().Publish(f.topic, messages...)
		if err == nil {
			return
		}
		require.NoErrorf(f, ctx.Err(), "publish: %v", err)
	}
}
