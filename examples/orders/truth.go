package main

import (
	"context"
	"database/sql"
	"fmt"
)

// findings is what is wrong in the database, compared with what happened.
type findings struct {
	lost           int // effects that are missing: an order's newest state, goods not taken
	doubled        int // effects that happened again
	staleApplied   int // orders whose state was set back by an older event
	outputsLost    int // reservations that shipping never counted
	outputsDoubled int // reservations that shipping counted again
	inversions     int // effects that came after a newer one of their order

	// overtaken counts events of the orders handler that took effect in another
	// order than they were published in, or none for that reason: the broker's
	// part of the order. It is no fault of the state, which is the newest.
	overtaken int
}

func (f findings) clean() bool {
	f.overtaken = 0
	return f == findings{}
}

// effect is one row of the audit.
type effect struct {
	handler string
	order   string
	version int64
}

// compare reads what the handlers did from the audit, and checks that the tables
// they wrote agree with it and with the traffic.
func compare(ctx context.Context, db *sql.DB, t *traffic) (findings, error) {
	var f findings
	times := map[effect]int{}
	newest := map[string]int64{} // of each order, the highest version so far
	setBack := map[string]bool{}
	last := map[string]int64{}

	rows, err := db.QueryContext(ctx, `SELECT handler, order_id, version FROM audit ORDER BY id`)
	if err != nil {
		return f, err
	}
	defer func() { _ = rows.Close() }() // rows.Err has the error of reading
	for rows.Next() {
		var e effect
		if err := rows.Scan(&e.handler, &e.order, &e.version); err != nil {
			return f, err
		}
		times[e]++
		if e.handler != ordersHandler {
			continue
		}
		if e.version < last[e.order] {
			f.inversions++
			setBack[e.order] = true
		}
		last[e.order] = e.version
		newest[e.order] = max(newest[e.order], e.version)
	}
	if err := rows.Err(); err != nil {
		return f, err
	}

	states, err := readStates(ctx, db)
	if err != nil {
		return f, err
	}
	taken, counted := map[string]int{}, map[string]int{} // by SKU, according to the audit
	for id, events := range t.orders {
		final := events[len(events)-1]
		switch got := states[id]; {
		case newest[id] < final.Version:
			f.lost++
		case got.version != final.Version || got.status != final.Status || setBack[id]:
			f.staleApplied++
		}
		for _, e := range events {
			n := times[effect{ordersHandler, id, e.Version}]
			f.doubled += max(n-1, 0)
			if (n > 0) == e.late {
				f.overtaken++
			}
		}

		n := times[effect{stockHandler, id, 1}]
		f.lost += max(1-n, 0)
		f.doubled += max(n-1, 0)
		m := times[effect{shippingHandler, id, 1}]
		f.outputsLost += max(1-m, 0)
		f.outputsDoubled += max(m-1, 0)
		for _, l := range events[0].Lines {
			taken[l.SKU] += n * l.Qty
			counted[l.SKU] += m * l.Qty
		}
	}

	// What an effect wrote and its row in the audit are one transaction.
	for sku, initial := range t.stock {
		var qty, reserved int
		query := fmt.Sprintf(`SELECT s.qty, r.reserved FROM stock s, shipping r WHERE s.sku = '%s' AND r.sku = s.sku`, sku)
		if err := db.QueryRowContext(ctx, query).Scan(&qty, &reserved); err != nil {
			return f, err
		}
		add(initial-qty-taken[sku], &f.lost, &f.doubled)
		add(reserved-counted[sku], &f.outputsLost, &f.outputsDoubled)
	}
	return f, nil
}

// add adds a difference in pieces to what is missing or to what is too much.
func add(difference int, missing, tooMuch *int) {
	*missing += max(-difference, 0)
	*tooMuch += max(difference, 0)
}

type state struct {
	version int64
	status  string
}

func readStates(ctx context.Context, db *sql.DB) (map[string]state, error) {
	rows, err := db.QueryContext(ctx, `SELECT id, version, status FROM orders`)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }() // rows.Err has the error of reading
	states := map[string]state{}
	for rows.Next() {
		var id string
		var s state
		if err := rows.Scan(&id, &s.version, &s.status); err != nil {
			return nil, err
		}
		states[id] = s
	}
	return states, rows.Err()
}
