package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
)

// process is this program again, in another role.
type process struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines *bufio.Scanner
}

// start starts a process that is killed when ctx ends.
func start(ctx context.Context, settings roleSettings, stderr io.Writer) (*process, error) {
	encoded, err := json.Marshal(settings)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.CommandContext(ctx, self)} //nolint:gosec // it is this program
	p.cmd.Env = append(os.Environ(), roleVariable+"="+string(encoded))
	p.cmd.Stderr = stderr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewScanner(stdout)
	return p, p.cmd.Start()
}

// next is the next line; false if the process has ended.
func (p *process) next() (string, bool) {
	ok := p.lines.Scan()
	return p.lines.Text(), ok
}

// stop kills the process: what it has not finished is not lost.
func (p *process) stop() {
	_ = p.stdin.Close()
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// half is one run of the shop. It is the broker too: it delivers each order to one of
// two workers until it is acknowledged.
type half struct {
	result
	settings roleSettings
	provider client
	stderr   io.Writer

	mu      sync.Mutex // guards what follows and result
	queue   []delivery
	open    int        // deliveries that are not acknowledged
	waiting []delivery // parked
	failure error
	changed *sync.Cond
}

// result is a half that ran to its end.
type result struct {
	name       string
	deliveries int
	killed     int
	parked     int
	reconciled int                       // unknown effects that the operator has looked up
	made       map[string]map[string]int // by service and order
	mismatches int                       // orders whose row is missing, doubled or not what the provider says
	took       time.Duration
}

const workers = 2

func runHalf(ctx context.Context, o options, plan []delivery, protected bool, stderr io.Writer) (result, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	began := time.Now()
	h := &half{result: result{name: "unprotected"}, stderr: stderr, queue: append([]delivery{}, plan...), open: len(plan)}
	if protected {
		h.name = "protected"
	}
	h.changed = sync.NewCond(&h.mu)
	database, cleanUp, err := o.settings()
	if err != nil {
		return h.result, err
	}
	defer cleanUp()
	provider, err := start(ctx, roleSettings{}, stderr)
	if err != nil {
		return h.result, err
	}
	defer provider.stop()
	url, _ := provider.next()
	h.provider = client{url}
	h.settings = roleSettings{Worker: true, Database: database, Provider: url, Protected: protected, Verbose: o.verbose}
	shop, err := openShop(ctx, database)
	if err == nil {
		err = shop.createShipments(ctx)
	}
	if err != nil {
		return h.result, err
	}
	defer shop.close()
	defer func() { // after the workers
		if err := shop.drop(context.WithoutCancel(ctx)); err != nil {
			say(stderr, "payment: drop tables: %v", err)
		}
	}()

	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() { h.fail(h.runWorker(ctx)) })
	}
	defer context.AfterFunc(ctx, func() { h.fail(ctx.Err()) })()
	err = h.wait()
	if err == nil && protected {
		err = h.operate(ctx, shop.ledger)
	}
	if err == nil {
		err = h.compare(ctx, shop, plan)
	}
	h.fail(errEnd)
	wg.Wait()
	h.took = time.Since(began)
	return h.result, err
}

// errEnd ends the workers.
var errEnd = fmt.Errorf("the end")

func (h *half) fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failure == nil {
		h.failure = err
	}
	h.changed.Broadcast()
}

// wait waits until everything is acknowledged.
func (h *half) wait() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.open > 0 && h.failure == nil {
		h.changed.Wait()
	}
	if h.failure != nil {
		return fmt.Errorf("%d orders are open: %w", h.open, h.failure)
	}
	return nil
}

func (h *half) take() (delivery, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for len(h.queue) == 0 && h.failure == nil {
		h.changed.Wait()
	}
	if h.failure != nil {
		return delivery{}, false
	}
	d := h.queue[0]
	h.queue = h.queue[1:]
	h.deliveries++
	return d, true
}

// add delivers an order again.
func (h *half) add(d delivery) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.queue = append(h.queue, d)
	h.changed.Broadcast()
}

// runWorker gives orders to a worker process, and starts another one when it dies.
func (h *half) runWorker(ctx context.Context) error {
	p, err := start(ctx, h.settings, h.stderr)
	if err != nil {
		return err
	}
	defer func() { p.stop() }()
	for {
		d, ok := h.take()
		if !ok {
			return nil
		}
		encoded, err := json.Marshal(d)
		if err != nil {
			return err
		}
		_, _ = p.stdin.Write(append(encoded, '\n')) // if it has died, there is no line
		struck := d.Fault
		d.Fault = none
		parked, answered := false, false
		for line, ok := p.next(); ok && !answered; {
			switch line {
			case saysParked:
				parked = true
				line, ok = p.next()
			case saysAck:
				answered = true
				h.acked(d, parked, struck)
			default:
				answered = true
				h.add(d)
			}
		}
		if answered {
			continue
		}
		p.stop()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		h.mu.Lock()
		h.killed++
		h.mu.Unlock()
		h.add(d)
		if p, err = start(ctx, h.settings, h.stderr); err != nil {
			return err
		}
	}
}

func (h *half) acked(d delivery, parked bool, struck fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case parked:
		h.parked++
		h.waiting = append(h.waiting, d)
		h.open--
	case struck == deliveredTwice:
		h.queue = append(h.queue, d)
	default:
		h.open--
	}
	h.changed.Broadcast()
}

// operate does what an operator does: looks up each unknown label at the carrier, tells
// the ledger, and publishes the parked orders again.
func (h *half) operate(ctx context.Context, l *ledger.Ledger) error {
	listed, err := l.Unknown(ctx, maxOrders)
	if err != nil {
		return err
	}
	for _, unknown := range listed {
		result, err := h.provider.lookUp(ctx, unknown.Effect+"s", unknown.Key)
		if err != nil {
			return err
		}
		answer := ledger.AnswerDone(result)
		if result == "" {
			answer = ledger.AnswerNotDone()
		}
		if err := l.Resolve(ctx, unknown, answer); err != nil {
			return err
		}
		h.reconciled++
	}
	h.mu.Lock()
	h.queue, h.open = h.waiting, len(h.waiting)
	h.changed.Broadcast()
	h.mu.Unlock()
	return h.wait()
}

// compare finds out what really happened.
func (h *half) compare(ctx context.Context, s *shop, plan []delivery) (err error) {
	if h.made, err = h.provider.report(ctx); err != nil {
		return err
	}
	for _, d := range plan {
		var rows int
		if err := s.db.QueryRowContext(ctx, s.query("SELECT COUNT(*) FROM shipments WHERE order_id = ? AND charge = ? AND label = ?"),
			d.Order.ID, "charge-"+d.Order.ID+"-1", "label-"+d.Order.ID+"-1").Scan(&rows); err != nil {
			return err
		}
		if rows != 1 {
			h.mismatches++
		}
	}
	return nil
}
