package kafka_test

import (
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
)

// B66: while members come and go, every message is seen, and none before all
// earlier ones of its key.
func TestRebalanceKeepsOrder(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		const keys, each = 20, 30
		cfg, topic := config(brokers), unique("topic")
		staying := open(t, cfg)
		var messages []*message.Message
		for seq := 1; seq <= each; seq++ {
			for k := range keys {
				messages = append(messages, newMessage("key-"+strconv.Itoa(k), strconv.Itoa(seq)))
			}
		}
		require.NoError(t, staying.Publisher().Publish(topic, messages...))

		log := &orderLog{highest: map[string]int{}, per: map[string]int{}}
		var members sync.WaitGroup
		joined := make(chan struct{})
		stayingMessages := subscribe(t, staying, topic)
		members.Go(func() {
			for msg := range stayingMessages {
				if log.count() >= keys*each/10 { // enough: the rest is for two
					select {
					case <-joined:
					case <-msg.Context().Done():
						msg.Nack()
						continue
					}
				}
				log.add("staying", msg)
				msg.Ack()
			}
		})
		log.await(t, keys*each/10)
		joining := open(t, cfg)
		joiningMessages := subscribe(t, joining, topic)
		members.Go(func() {
			first := sync.OnceFunc(func() { close(joined) })
			for msg := range joiningMessages {
				log.add("joining", msg)
				msg.Ack()
				first()
			}
		})
		log.await(t, keys*each/2)
		require.NoError(t, joining.Close())
		log.await(t, keys*each)
		require.NoError(t, staying.Close())
		members.Wait()

		log.mu.Lock()
		defer log.mu.Unlock()
		require.Empty(t, log.violations)
		require.Positive(t, log.per["joining"], "the second member got nothing: no rebalance")
		t.Logf("deliveries per member: %v, %d distinct", log.per, log.distinct)
		require.Less(t, log.per["staying"]+log.per["joining"]-log.distinct, 100, "repeats")
	})
}

// A handler whose partition moves is told by its context, and its message is
// delivered again: also when it acks too late.
func TestRebalanceEndsHandlerContext(t *testing.T) {
	t.Parallel()
	for name, settle := range map[string]func(*message.Message) bool{
		"nacked": (*message.Message).Nack,
		"acked":  (*message.Message).Ack,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, brokers []string) {
				cfg, topic := config(brokers), unique("topic")
				first, second := open(t, cfg), open(t, cfg)
				require.NoError(t, first.Publisher().Publish(topic, series("key", 2)...))
				old := subscribe(t, first, topic)
				running := receive(t, old)
				require.NoError(t, running.Context().Err())

				joined := subscribe(t, second, topic)
				awaitDone(t, running.Context(), "the context of the running handler")
				settle(running)
				var seen []*message.Message
				for len(seen) < 2 {
					select {
					case msg := <-old:
						seen = append(seen, msg)
						msg.Ack()
					case msg := <-joined:
						seen = append(seen, msg)
						msg.Ack()
					case <-time.After(patience):
						require.FailNow(t, "the message did not come back")
					}
				}
				require.Equal(t, []string{"1", "2"}, payloads(seen))
			})
		})
	}
}

// Static membership (KIP-345): a Broker has a group member for each topic, and they
// must not fence each other.
func TestStaticMembership(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, brokers []string) {
		cfg := config(brokers)
		adjust := cfg.Sarama
		cfg.Sarama = func(c *sarama.Config) {
			adjust(c)
			c.Consumer.Group.InstanceId = "instance"
			c.Consumer.Group.Session.Timeout = 6 * time.Second
		}
		broker, topics := open(t, cfg), []string{unique("topic"), unique("topic")}
		subscriptions := []<-chan *message.Message{subscribe(t, broker, topics[0]), subscribe(t, broker, topics[1])}
		for range 3 {
			for i, topic := range topics {
				require.NoError(t, broker.Publisher().Publish(topic, series("key", 3)...))
				require.Equal(t, []string{"1", "2", "3"}, payloads(take(t, subscriptions[i], 3)))
			}
		}
	})
}

// A group that the client may not join is tried again with growing pauses, not at once,
// and works as soon as it may.
func TestRefusedJoin(t *testing.T) {
	t.Parallel()
	const attempts = 5
	cluster := fake(t)
	broker, topic := open(t, config(cluster.ListenAddrs())), unique("topic")
	var refused []time.Time
	done := make(chan struct{})
	cluster.ControlKey(int16(kmsg.JoinGroup), func(request kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if len(refused) == attempts {
			return nil, nil, false
		}
		if refused = append(refused, time.Now()); len(refused) == attempts {
			close(done)
		}
		response := request.ResponseKind()
		response.(*kmsg.JoinGroupResponse).ErrorCode = int16(sarama.ErrGroupAuthorizationFailed)
		return response, nil, true
	})
	messages := subscribe(t, broker, topic)
	select {
	case <-done:
	case <-time.After(patience):
		require.FailNow(t, "no further attempt")
	}
	require.Greater(t, refused[attempts-1].Sub(refused[0]), time.Second) // at least (0.2 + 0.4 + 0.8 + 1.6)/2
	require.NoError(t, broker.Publisher().Publish(topic, newMessage("key", "1")))
	take(t, messages, 1)
}

// orderLog checks deliveries of all members together.
type orderLog struct {
	mu         sync.Mutex
	highest    map[string]int // per key
	per        map[string]int // deliveries per member
	distinct   int
	violations []string
	waiting    []waiter
}

type waiter struct {
	distinct int
	reached  chan struct{}
}

func (l *orderLog) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.distinct
}

func (l *orderLog) add(member string, msg *message.Message) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.per[member]++
	key := msg.Metadata.Get(ordering.PartitionKeyMetadata)
	seq, err := strconv.Atoi(string(msg.Payload))
	switch highest := l.highest[key]; {
	case err != nil || seq > highest+1:
		l.violations = append(l.violations, member+" "+key+": "+string(msg.Payload)+" after "+strconv.Itoa(highest))
	case seq == highest+1:
		l.highest[key] = seq
		l.distinct++
	}
	for i, w := range l.waiting {
		if w.reached != nil && w.distinct <= l.distinct {
			close(w.reached)
			l.waiting[i].reached = nil
		}
	}
}

func (l *orderLog) await(t *testing.T, distinct int) {
	t.Helper()
	w := waiter{distinct, make(chan struct{})}
	l.mu.Lock()
	if l.distinct >= distinct {
		l.mu.Unlock()
		return
	}
	l.waiting = append(l.waiting, w)
	l.mu.Unlock()
	select {
	case <-w.reached:
	case <-time.After(patience):
		l.mu.Lock()
		defer l.mu.Unlock()
		require.FailNow(t, "messages are missing", "%d of %d, violations %v", l.distinct, distinct, l.violations)
	}
}
