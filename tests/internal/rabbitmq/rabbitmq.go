// Package rabbitmq deletes what tests leave on RabbitMQ: a server that collects
// quorum queues refuses new ones at some 1,400.
package rabbitmq

import (
	"fmt"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Drop deletes what amqpshard has for topic and for its groups. Nobody may use
// them any more. What is not there is no error.
func Drop(t testing.TB, url, topic string, shards int, groups ...string) {
	t.Helper()
	conn, err := amqp.Dial(url)
	if err != nil {
		t.Errorf("rabbitmq: delete topic %s: %v", topic, err)
		return
	}
	defer conn.Close() //nolint:errcheck // nothing is left to do
	ch, err := conn.Channel()
	exchange := func(name string) {
		if err == nil {
			err = ch.ExchangeDelete(name, false, false)
		}
	}
	queue := func(name string) {
		if err == nil {
			_, err = ch.QueueDelete(name, false, false, false)
		}
	}
	for _, group := range groups {
		name := topic + "." + group
		exchange(name)
		exchange(name + ".unrouted")
		for _, suffix := range []string{"dead", "unrouted", "refused"} {
			queue(name + "." + suffix)
		}
		for i := range shards {
			shard := fmt.Sprintf("%s.%03d", name, i)
			exchange(shard)
			exchange(shard + ".queue")
			queue(shard)
		}
	}
	exchange(topic)
	if err != nil {
		t.Errorf("rabbitmq: delete topic %s: %v", topic, err)
	}
}
