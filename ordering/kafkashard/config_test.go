package kafkashard_test

import (
	"context"
	"errors"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"

	"github.com/seed-2f56a981/watermill-idempotent/ordering"
	"github.com/seed-2f56a981/watermill-idempotent/ordering/kafkashard"
)

var _ ordering.Broker = (*kafkashard.Broker)(nil)

func TestOpenRefusesConfig(t *testing.T) {
	t.Parallel()
	override := func(f func(*sarama.Config)) func(*kafkashard.Config) {
		return func(c *kafkashard.Config) { c.Sarama = f }
	}
	for name, test := range map[string]struct {
		change func(*kafkashard.Config)
		want   []string // field, value and bound
	}{
		"no brokers":       {func(c *kafkashard.Config) { c.Brokers = nil }, []string{"Brokers is empty", "one address"}},
		"no port":          {func(c *kafkashard.Config) { c.Brokers = []string{"a:1", "kafka"} }, []string{`Brokers[1] is "kafka"`, "host:port"}},
		"no host":          {func(c *kafkashard.Config) { c.Brokers = []string{":9092"} }, []string{`Brokers[0] is ":9092"`, "host:port"}},
		"port not number":  {func(c *kafkashard.Config) { c.Brokers = []string{"a:kafka"} }, []string{`Brokers[0] is "a:kafka"`, "host:port"}},
		"no group":         {func(c *kafkashard.Config) { c.Group = "" }, []string{"Group is empty"}},
		"partitioner":      {func(c *kafkashard.Config) { c.Partitioner = "md5" }, []string{`Partitioner is "md5"`, "crc32"}},
		"negative shards":  {func(c *kafkashard.Config) { c.Shards = -1 }, []string{"Shards is -1", "1 or more"}},
		"replication":      {func(c *kafkashard.Config) { c.ReplicationFactor = -2 }, []string{"ReplicationFactor is -2", "32767"}},
		"replication high": {func(c *kafkashard.Config) { c.ReplicationFactor = 1 << 15 }, []string{"ReplicationFactor is 32768", "32767"}},
		"dial timeout":     {func(c *kafkashard.Config) { c.DialTimeout = -time.Second }, []string{"DialTimeout is -1s", "positive"}},
		"publish timeout":  {func(c *kafkashard.Config) { c.PublishTimeout = -1 }, []string{"PublishTimeout is -1ns", "positive"}},
		"drain timeout":    {func(c *kafkashard.Config) { c.DrainTimeout = -1 }, []string{"DrainTimeout is -1ns", "positive"}},
		"drain for ever":   {func(c *kafkashard.Config) { c.DrainTimeout = math.MaxInt64 }, []string{"DrainTimeout is 2562047h", "at most 8760h0m0s"}},
		"version": {
			override(func(c *sarama.Config) { c.Version = sarama.V2_7_0_0 }),
			[]string{"Version to 2.7.0", "2.8.0"},
		},
		"auto creation": {
			override(func(c *sarama.Config) { c.Metadata.AllowAutoTopicCreation = true }),
			[]string{"Metadata.AllowAutoTopicCreation to true", "false"},
		},
		"idempotent": {
			override(func(c *sarama.Config) { c.Producer.Idempotent = false }),
			[]string{"Producer.Idempotent to false", "true"},
		},
		"acks": {
			override(func(c *sarama.Config) { c.Producer.RequiredAcks = sarama.WaitForLocal }),
			[]string{"Producer.RequiredAcks to 1", "-1 (WaitForAll)"},
		},
		"in flight": {
			override(func(c *sarama.Config) { c.Net.MaxOpenRequests = 5 }),
			[]string{"Net.MaxOpenRequests to 5", "must be 1"},
		},
		"retries": {
			override(func(c *sarama.Config) { c.Producer.Retry.Max = 0 }),
			[]string{"Producer.Retry.Max to 0", "1 or more"},
		},
		"successes": {
			override(func(c *sarama.Config) { c.Producer.Return.Successes = false }),
			[]string{"Producer.Return.Successes to false", "true"},
		},
		"errors": {
			override(func(c *sarama.Config) { c.Producer.Return.Errors = false }),
			[]string{"Producer.Return.Errors to false", "true"},
		},
		"fnv": {
			override(func(c *sarama.Config) { c.Producer.Partitioner = sarama.NewHashPartitioner }),
			[]string{"Producer.Partitioner to another hash", "murmur2"},
		},
		"not the chosen one": {
			func(c *kafkashard.Config) {
				c.Partitioner = ordering.FNV1aPartitioner
				c.Sarama = func(c *sarama.Config) { c.Producer.Partitioner = sarama.NewMurmur2Partitioner }
			},
			[]string{"Producer.Partitioner to another hash", "Config.Partitioner"},
		},
		"transactional id": {
			override(func(c *sarama.Config) { c.Producer.Transaction.ID = "x" }),
			[]string{`Producer.Transaction.ID to "x"`, "Config.TransactionalID"},
		},
		"transaction timeout": {
			override(func(c *sarama.Config) { c.Producer.Transaction.Timeout = time.Second }),
			[]string{"Producer.Transaction.Timeout to 1s", "Config.PublishTimeout"},
		},
		"no partitioner": {
			override(func(c *sarama.Config) { c.Producer.Partitioner = nil }),
			[]string{"Producer.Partitioner", "murmur2"},
		},
		"newest": {
			override(func(c *sarama.Config) { c.Consumer.Offsets.Initial = sarama.OffsetNewest }),
			[]string{"Consumer.Offsets.Initial to -1", "-2 (OffsetOldest)"},
		},
		"cooperative": {
			override(func(c *sarama.Config) {
				c.Consumer.Group.Rebalance.GroupStrategies = []sarama.BalanceStrategy{sarama.NewBalanceStrategyCooperativeSticky()}
			}),
			[]string{"GroupStrategies to cooperative", "eager"},
		},
		"sarama's own check": {
			override(func(c *sarama.Config) { c.Consumer.Group.Heartbeat.Interval = time.Hour }),
			[]string{"Sarama", "Heartbeat.Interval"},
		},
		"all at once": {
			func(c *kafkashard.Config) {
				c.Group, c.Shards = "", -1
				c.Sarama = func(c *sarama.Config) { *c = *sarama.NewConfig() }
			},
			[]string{"Group", "Shards", "Idempotent", "RequiredAcks", "MaxOpenRequests", "Successes", "Partitioner", "Initial"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := kafkashard.Config{Brokers: []string{"127.0.0.1:1"}, Group: "group"}
			test.change(&cfg)
			_, err := kafkashard.Open(t.Context(), cfg, nil)
			if !errors.Is(err, kafkashard.ErrInvalidConfig) {
				t.Fatalf("Open = %v, want ErrInvalidConfig", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error does not say %q:\n%v", want, err)
				}
			}
		})
	}
}

// A right config gets as far as the network, with and without harmless
// overrides; then brokers that refuse the connection, or accept and say
// nothing, are named within the dial timeout.
func TestOpenUnreachable(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	for name, address := range map[string]string{"refused": "127.0.0.1:1", "silent": silent.Addr().String()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const timeout = 300 * time.Millisecond
			begin := time.Now()
			_, err := kafkashard.Open(t.Context(), kafkashard.Config{
				Brokers: []string{address}, Group: "group", DialTimeout: timeout,
				Sarama: func(c *sarama.Config) {
					c.ClientID = "stock"
					c.Producer.Retry.Max = 1
					c.Net.ReadTimeout = time.Second
				},
			}, nil)
			if errors.Is(err, kafkashard.ErrInvalidConfig) || err == nil || !strings.Contains(err.Error(), address) {
				t.Errorf("Open = %v, want an error that names %s", err, address)
			}
			if took := time.Since(begin); took > 10*timeout {
				t.Errorf("Open took %s, the timeout is %s", took, timeout)
			}
		})
	}
}

func TestOpenHonoursContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := kafkashard.Open(ctx, kafkashard.Config{Brokers: []string{"127.0.0.1:1"}, Group: "group"}, nil)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Open = %v, want context.Canceled", err)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	for name, test := range map[string]struct {
		err, target error
		want        bool
	}{
		"shard count":           {&kafkashard.ShardCountError{Topic: "orders", Have: 8, Want: 12}, kafkashard.ErrShardCount, true},
		"unknown outcome":       {&kafkashard.PublishError{Unknown: []string{"1"}, Err: cause}, kafkashard.ErrOutcomeUnknown, true},
		"nothing was sent":      {&kafkashard.PublishError{Unsent: []string{"1"}, Err: cause}, kafkashard.ErrOutcomeUnknown, false},
		"the cause of a failed": {&kafkashard.PublishError{Err: cause}, cause, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := errors.Is(test.err, test.target); got != test.want {
				t.Errorf("errors.Is(%v, %v) = %t", test.err, test.target, got)
			}
			if got := errors.Is(errors.Join(test.err), test.target); got != test.want {
				t.Errorf("errors.Is(wrapped %v, %v) = %t", test.err, test.target, got)
			}
		})
	}
	text := (&kafkashard.ShardCountError{Topic: "orders", Have: 8, Want: 12}).Error()
	for _, want := range []string{"orders", "8", "12"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not name %s", text, want)
		}
	}
}
