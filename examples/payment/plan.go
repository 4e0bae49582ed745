package main

import (
	"fmt"
	"math/rand/v2"
)

// fault is what goes wrong with the first delivery of an order.
type fault string

const (
	none           fault = ""
	busy           fault = "provider refuses for now"
	responseLost   fault = "response lost"
	tooSlow        fault = "provider too slow for the client"
	diesBefore     fault = "worker killed before the call"
	diesInCall     fault = "worker killed during the call"
	diesAfter      fault = "worker killed after the call"
	rollsBack      fault = "handler fails after both calls"
	diesUncommited fault = "worker killed before the commit"
	deliveredTwice fault = "delivered twice"
)

var faults = []fault{busy, responseLost, tooSlow, diesBefore, diesInCall, diesAfter, rollsBack, diesUncommited, deliveredTwice}

// The services of the provider.
const (
	charges = "charges"
	labels  = "labels"
)

// order is a message of the shop.
type order struct {
	ID     string
	Amount int // in cents
}

// delivery is an order on its way, with what will go wrong.
type delivery struct {
	Order order
	Fault fault
	At    string // the service that the fault strikes at
}

// newPlan depends on the seed alone. Two of three orders have a fault.
func newPlan(seed uint64, n int) []delivery {
	rng := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // it is to be repeatable
	plan := make([]delivery, n)
	for i := range plan {
		plan[i] = delivery{Order: order{fmt.Sprintf("%04d", i+1), 100 * (1 + rng.IntN(500))}, At: []string{charges, labels}[rng.IntN(2)]}
		if i%3 != 2 {
			plan[i].Fault = faults[(i-i/3)%len(faults)] // each as often
		}
	}
	return plan
}
