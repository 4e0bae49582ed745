package main

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

func noEnv(string) string { return "" }

// The demonstration runs as it is, only shorter, on the Kafka in this process
// and SQLite.
func TestDemonstration(t *testing.T) {
	t.Parallel()
	for _, seed := range []string{"1", "2"} {
		t.Run("seed "+seed, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			code := run(t.Context(), []string{"-messages", "120", "-entities", "30", "-seed", seed}, noEnv, &stdout, &stderr)
			if code != exitOK {
				t.Errorf("exit code %d, want %d; stderr:\n%s", code, exitOK, stderr.String())
			}
			for _, want := range []string{
				`(?m)^result protected messages=120 duplicates_refused=[1-9]\d* stale_refused=[1-9]\d* ` +
					`lost=0 doubled=0 stale_applied=0 outputs_lost=0 outputs_doubled=0 inversions=0$`,
				`(?m)^result unprotected messages=120 duplicates_refused=0 stale_refused=0 ` +
					`lost=\d+ doubled=[1-9]\d* stale_applied=[1-9]\d* outputs_lost=\d+ outputs_doubled=[1-9]\d* inversions=[1-9]\d*$`,
			} {
				if !regexp.MustCompile(want).MatchString(stdout.String()) {
					t.Errorf("stdout does not match %s:\n%s", want, stdout.String())
				}
			}
		})
	}
}

// Traffic and faults depend on the seed alone.
func TestSeed(t *testing.T) {
	t.Parallel()
	generate := func(seed uint64) (*traffic, []plannedFault) {
		rng := rand.New(rand.NewPCG(seed, 0))
		made := newTraffic(rng, 300, 70, 40)
		return made, planFaults(rng, made, 40)
	}
	t1, p1 := generate(7)
	t2, p2 := generate(7)
	if !reflect.DeepEqual(t1, t2) || !reflect.DeepEqual(p1, p2) {
		t.Error("the same seed makes another run")
	}
	if t3, _ := generate(8); reflect.DeepEqual(t1.sendings, t3.sendings) {
		t.Error("another seed makes the same run")
	}
}

// Every event is published, and an event is late exactly if a newer one of its
// order was published before it.
func TestTraffic(t *testing.T) {
	t.Parallel()
	made := newTraffic(rand.New(rand.NewPCG(3, 0)), 500, 90, 30)
	newest := map[string]int64{}
	first := map[string]bool{}
	for _, s := range made.sendings {
		if first[s.event.id] {
			continue
		}
		if s.fault != "" {
			t.Errorf("event %s: a copy comes before the first message", s.event.id)
		}
		first[s.event.id] = true
		if late := s.event.Version < newest[s.event.Order]; late != s.event.late {
			t.Errorf("version %d of %s: late is %v, want %v", s.event.Version, s.event.Order, s.event.late, late)
		}
		newest[s.event.Order] = max(newest[s.event.Order], s.event.Version)
	}
	if len(first) != 500 || len(made.orders) != 90 {
		t.Errorf("%d events of %d orders, want 500 of 90", len(first), len(made.orders))
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ args, want string }{
		{"-messages 0", "orders: -messages is 0, must be 1 to 1000000"},
		{"-messages 10 -entities 11", "orders: -entities is 11, must be 1 to 10"},
		{"-duplicates 101", "orders: -duplicates is 101, must be 0 to 100"},
		{"-workers 33", "orders: -workers is 33, must be 1 to 32"},
		{"-workers many", `orders: invalid value "many" for flag -workers: parse error`},
		{"-timeout -1s", "orders: -timeout is -1s, must be over 0"},
		{"-backend nats", `orders: -backend is "nats", must be one of embedded, kafka, amqp`},
		{"-db oracle", `orders: -db is "oracle", must be one of sqlite, postgres, mysql`},
		{"-sede 1", "orders: flag provided but not defined: -sede"},
		{"now", `orders: unexpected argument "now"`},
	} {
		t.Run(tt.args, func(t *testing.T) {
			t.Parallel()
			var stderr bytes.Buffer
			if code := run(t.Context(), strings.Fields(tt.args), noEnv, io.Discard, &stderr); code != exitUsage {
				t.Errorf("exit code %d, want %d", code, exitUsage)
			}
			if got := stderr.String(); got != tt.want+"\n" {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// A server that is not there is one line with its address, how to start it, and
// no credentials.
func TestMissingServer(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ args, env string }{
		{"-db postgres", "POSTGRES_DSN=postgres://ann:secret@" + address + "/shop"},
		{"-db mysql", "MYSQL_DSN=ann:secret@tcp(" + address + ")/shop"},
		{"-backend amqp", "AMQP_URL=amqp://ann:secret@" + address + "/"},
		{"-backend kafka", "KAFKA_BROKERS=" + address},
	} {
		t.Run(tt.args, func(t *testing.T) {
			t.Parallel()
			getenv := func(name string) string {
				if key, value, _ := strings.Cut(tt.env, "="); key == name {
					return value
				}
				return ""
			}
			var stderr bytes.Buffer
			if code := run(t.Context(), strings.Fields(tt.args), getenv, io.Discard, &stderr); code != exitUsage {
				t.Errorf("exit code %d, want %d", code, exitUsage)
			}
			got := stderr.String()
			for _, want := range []string{address, "make services"} {
				if !strings.Contains(got, want) {
					t.Errorf("%q does not contain %q", got, want)
				}
			}
			if strings.Count(got, "\n") != 1 || strings.Contains(got, "secret") || strings.Contains(got, "ann") {
				t.Errorf("got %q, want one line without credentials", got)
			}
		})
	}
}

// A run that is interrupted leaves nothing behind.
func TestInterrupt(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir) // so not parallel
	ctx, interrupt := context.WithCancel(t.Context())
	stderr := &interruptOn{text: "deliveries open", interrupt: interrupt}
	code := run(ctx, []string{"-messages", "20000", "-entities", "100"}, noEnv, io.Discard, stderr)
	if code != exitInterrupted {
		t.Errorf("exit code %d, want %d; stderr: %s", code, exitInterrupted, stderr.String())
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// interruptOn calls interrupt when text is written to it.
type interruptOn struct {
	bytes.Buffer
	text      string
	interrupt func()
}

func (w *interruptOn) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(w.text)) {
		w.interrupt()
	}
	return w.Buffer.Write(p)
}
