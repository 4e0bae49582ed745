package main

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	products     = 12
	stockPerItem = 1_000_000
)

var statuses = []string{statusPlaced, "paid", "packed", "shipped", "delivered", "archived"}

// event is one thing that happened in the shop.
type event struct {
	orderEvent
	id   string
	late bool // published after a newer event of its order
}

// sending is one message that the producer publishes.
type sending struct {
	event *event
	fault fault // duplicateLater, producerResend, or none for the first one
}

// traffic is all that happens in the shop, and with it the truth.
type traffic struct {
	orders   map[string][]*event // by id, in the order of versions
	events   []*event
	sendings []sending // in the order of publishing
	stock    map[string]int
}

// newTraffic makes the events of a run and puts them in the order in which they
// are published. It depends on its arguments alone.
func newTraffic(rng *rand.Rand, messages, entities, duplicates int) *traffic {
	t := &traffic{orders: map[string][]*event{}, stock: map[string]int{}}
	for i := range products {
		t.stock[sku(i)] = stockPerItem
	}

	// Each order is placed, the rest of the events falls on orders at random.
	owners := make([]int, messages)
	for i := range owners {
		owners[i] = i
		if i >= entities {
			owners[i] = rng.IntN(entities)
		}
	}
	rng.Shuffle(len(owners), func(i, j int) { owners[i], owners[j] = owners[j], owners[i] })
	lines := make([][]line, entities)
	for i := range lines {
		lines[i] = randomLines(rng)
	}
	for _, owner := range owners {
		id := fmt.Sprintf("order-%05d", owner)
		version := len(t.orders[id]) + 1
		e := &event{
			id: randomID(rng),
			orderEvent: orderEvent{
				Order:   id,
				Version: int64(version),
				Status:  statuses[min(version, len(statuses))-1],
				Lines:   lines[owner],
			},
		}
		t.orders[id] = append(t.orders[id], e)
		t.events = append(t.events, e)
	}

	order := slices.Clone(t.events)
	reorder(rng, order)
	for _, e := range order {
		t.sendings = append(t.sendings, sending{event: e})
	}
	t.duplicate(rng, duplicates)
	return t
}

// reorder lets one event in twelve change places with the next one of its order.
func reorder(rng *rand.Rand, order []*event) {
	last := map[string]int{} // of each order, where its last event is
	for i, e := range order {
		before, ok := last[e.Order]
		if ok && rng.IntN(12) == 0 && !order[before].late {
			order[before], order[i] = order[i], order[before]
			order[i].late = true
		}
		last[e.Order] = i
	}
}

// duplicate sends percent of the events again: a third at once with a new
// message id, as a producer does that got no confirmation; a third later and
// unchanged, as when messages are moved back from a dead letter queue. The last
// third is delivered twice at the same time: see planFaults.
func (t *traffic) duplicate(rng *rand.Rand, percent int) {
	var result, later []sending
	for i, s := range t.sendings {
		for len(later) > 0 && rng.IntN(25) == 0 {
			result = append(result, later[0])
			later = later[1:]
		}
		result = append(result, s)
		if rng.IntN(300) < percent {
			result = append(result, sending{event: t.sendings[i].event, fault: producerResend})
		}
		if rng.IntN(300) < percent {
			later = append(later, sending{event: t.sendings[i].event, fault: duplicateLater})
		}
	}
	result = append(result, later...)
	t.sendings = result
}

// message returns the message of s, with the id that the broker sees.
func (s sending) message(id string) *message.Message {
	payload, err := json.Marshal(s.event.orderEvent)
	if err != nil {
		panic(err) // strings and numbers
	}
	msg := message.NewMessage(id, payload)
	msg.Metadata.Set(metaEventID, s.event.id)
	msg.Metadata.Set(metaOrderID, s.event.Order)
	msg.Metadata.Set(metaVersion, strconv.FormatInt(s.event.Version, 10))
	return msg
}

// messageIDs gives each event's first message an id, which a copy keeps and a
// producer that sends again does not.
type messageIDs map[*event]string

func (ids messageIDs) of(s sending) string {
	id := watermill.NewUUID()
	if s.fault == duplicateLater {
		return ids[s.event]
	}
	if _, sent := ids[s.event]; !sent {
		ids[s.event] = id
	}
	return id
}

func sku(i int) string { return fmt.Sprintf("sku-%02d", i) }

func randomLines(rng *rand.Rand) []line {
	chosen := rng.Perm(products)[:1+rng.IntN(3)]
	slices.Sort(chosen)
	lines := make([]line, len(chosen))
	for i, p := range chosen {
		lines[i] = line{SKU: sku(p), Qty: 1 + rng.IntN(5)}
	}
	return lines
}

func randomID(rng *rand.Rand) string {
	var id [16]byte
	for i := range id {
		id[i] = byte(rng.Uint32())
	}
	return hex.EncodeToString(id[:])
}
