package ledger_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
)

// quick has pauses that take no time, and a budget that is never used up.
var quick = ledger.TransportConfig{InitialInterval: 1, MaxInterval: 1, RetryBurst: 1 << 20}

func newTransport(t *testing.T, base http.RoundTripper, config ledger.TransportConfig) *ledger.Transport {
	t.Helper()
	transport, err := ledger.NewTransport(base, config)
	if err != nil {
		t.Fatal(err)
	}
	return transport
}

// answer is a step of a provider's script: a status, or one of these.
const (
	lost = -1 // processed, but the connection is cut before the answer
)

// scripted is a provider that answers by a script; its last step is repeated.
type scripted struct {
	*httptest.Server
	mu       sync.Mutex
	script   []int
	keys     []string // of each request
	bodies   []string
	conns    int
	requests int
}

func newScripted(t *testing.T, script ...int) *scripted {
	t.Helper()
	p := &scripted{script: script}
	p.Server = httptest.NewUnstartedServer(p)
	p.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.conns++
		}
	}
	p.Start()
	t.Cleanup(p.Close)
	return p
}

func (p *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	p.mu.Lock()
	defer p.mu.Unlock()
	step := p.script[min(p.requests, len(p.script)-1)]
	p.requests++
	p.keys, p.bodies = append(p.keys, r.Header.Get("Idempotency-Key")), append(p.bodies, string(body))
	if err != nil {
		p.bodies[len(p.bodies)-1] += " error"
	}
	if step == lost {
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(step)
	fmt.Fprintf(w, "answer %d", p.requests)
}

// seen is how many requests came, after checking that all are the same.
func (p *scripted) seen(t *testing.T, key, body string) int {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.requests {
		if p.keys[i] != key || p.bodies[i] != body {
			t.Errorf("request %d has key %s and body %q, want %s and %q", i+1, p.keys[i], p.bodies[i], key, body)
		}
	}
	return p.requests
}

func newRequest(ctx context.Context, t *testing.T, method, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// Each rule of what is sent again.
func TestTransportRules(t *testing.T) {
	t.Parallel()
	const key = "order-1"
	for name, tt := range map[string]struct {
		method string
		key    string // of the context
		header string // that the request has already
		script []int
		want   int // status; lost for an error
		seen   int
		sent   string // key
	}{
		"success":                   {"POST", "order-1", "", []int{200}, 200, 1, key},
		"429":                       {"POST", "order-1", "", []int{429, 429, 201}, 201, 3, key},
		"409 in progress":           {"POST", "order-1", "", []int{409, 200}, 200, 2, key},
		"409 without a key":         {"PUT", "", "", []int{409, 200}, 409, 1, ""},
		"500":                       {"POST", "order-1", "", []int{500, 200}, 200, 2, key},
		"502, 503, 504":             {"POST", "order-1", "", []int{502, 503, 504, 200}, 200, 4, key},
		"501":                       {"POST", "order-1", "", []int{501, 200}, 501, 1, key},
		"400":                       {"POST", "order-1", "", []int{400, 200}, 400, 1, key},
		"422 key with other body":   {"POST", "order-1", "", []int{422, 200}, 422, 1, key},
		"302 is for the client":     {"POST", "order-1", "", []int{302, 200}, 302, 1, key},
		"attempts run out":          {"POST", "order-1", "", []int{503}, 503, 4, key},
		"lost answer B102":          {"POST", "order-1", "", []int{lost, 200}, 200, 2, key},
		"all answers are lost":      {"POST", "order-1", "", []int{lost}, lost, 4, key},
		"POST without a key":        {"POST", "", "", []int{503, 200}, 503, 1, ""},
		"PATCH without a key":       {"PATCH", "", "", []int{503, 200}, 503, 1, ""},
		"POST without a key, lost":  {"POST", "", "", []int{lost, 200}, lost, 1, ""},
		"PATCH with a key":          {"PATCH", "order-1", "", []int{503, 200}, 200, 2, key},
		"PUT without a key":         {"PUT", "", "", []int{503, 200}, 200, 2, ""},
		"DELETE without a key":      {"DELETE", "", "", []int{503, lost, 200}, 200, 3, ""},
		"GET gets no key":           {"GET", "order-1", "", []int{503, 200}, 200, 2, ""},
		"a key of the request's":    {"POST", "", "mine", []int{503, 200}, 200, 2, "mine"},
		"the request's goes before": {"POST", "order-1", "mine", []int{503, 200}, 200, 2, "mine"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newScripted(t, tt.script...)
			ctx := t.Context()
			if tt.key != "" {
				ctx = ledger.ContextWithKey(ctx, tt.key)
			}
			req := newRequest(ctx, t, tt.method, p.URL, "10 EUR")
			if tt.header != "" {
				req.Header.Set("Idempotency-Key", tt.header)
			}
			before := req.Header.Clone()
			// net/http itself repeats a request whose kept connection was closed.
			res, err := newTransport(t, &http.Transport{DisableKeepAlives: true}, quick).RoundTrip(req)
			if seen := p.seen(t, tt.sent, "10 EUR"); seen != tt.seen {
				t.Errorf("%d requests, want %d", seen, tt.seen)
			}
			if fmt.Sprint(before) != fmt.Sprint(req.Header) {
				t.Errorf("the request was changed: %v, before %v", req.Header, before)
			}
			if tt.want == lost {
				var failed *ledger.TransportError
				if !errors.As(err, &failed) || !failed.Sent || failed.Attempts != tt.seen || ledger.IsNotDone(err) {
					t.Errorf("error %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close() //nolint:errcheck // it was read
			body, err := io.ReadAll(res.Body)
			if want := fmt.Sprint("answer ", tt.seen); res.StatusCode != tt.want || string(body) != want || err != nil {
				t.Errorf("status %d, body %q, error %v; want %d and %q", res.StatusCode, body, err, tt.want, want)
			}
		})
	}
}

func TestTransportKeyForms(t *testing.T) {
	t.Parallel()
	base := roundTrip(func(req *http.Request) (*http.Response, error) {
		return respond(200, "X-Sent", req.Header.Get("X-Key")), nil
	})
	for key, quoted := range map[string]bool{"a": false, strings.Repeat("k", 255): true, "a b~!": true} {
		config := quick
		config.Header, config.Quoted = "X-Key", quoted
		want := key
		if quoted {
			want = `"` + key + `"`
		}
		res, err := newTransport(t, base, config).RoundTrip(newRequest(ledger.ContextWithKey(t.Context(), key), t, "POST", "http://a/", ""))
		if err != nil || res.Header.Get("X-Sent") != want {
			t.Errorf("key %.20q: error %v, want %.20q", key, err, want)
		}
	}
	for _, key := range []string{"", strings.Repeat("k", 256), "a\nb", `a"b`, `a\b`, "ü", "\x7f"} {
		body := &closeable{Reader: strings.NewReader("10 EUR")}
		req := newRequest(ledger.ContextWithKey(t.Context(), key), t, "POST", "http://a/", "")
		req.Body = body
		_, err := newTransport(t, base, quick).RoundTrip(req)
		var failed *ledger.TransportError
		if !errors.Is(err, ledger.ErrInvalidEffect) || !errors.As(err, &failed) || failed.Sent || failed.Attempts != 0 || !body.isClosed() {
			t.Errorf("key %.20q: error %v, body closed: %v", key, err, body.closed.Load())
		}
	}
}

// roundTrip is a base in memory.
type roundTrip func(req *http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func respond(status int, header ...string) *http.Response {
	res := &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("body"))}
	for i := 0; i < len(header); i += 2 {
		res.Header.Set(header[i], header[i+1])
	}
	return res
}

type closeable struct {
	io.Reader
	closed atomic.Bool
}

func (c *closeable) Close() error {
	c.closed.Store(true)
	return nil
}

// isClosed waits for it: net/http may close a body after RoundTrip has returned.
func (c *closeable) isClosed() bool {
	for deadline := time.Now().Add(10 * time.Second); !c.closed.Load(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// What was certainly not sent is told from what may have been.
func TestTransportTellsNotSentFromUnknown(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := "http://" + listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	waiting, giveUp := context.WithCancel(t.Context())
	silent := newScripted(t, 200)
	silent.Config.Handler = http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		giveUp()
		<-r.Context().Done()
	})
	dropped := newScripted(t, lost)
	network := &http.Transport{DisableKeepAlives: true}
	broken := errors.New("broken")
	calls := func(urls ...string) http.RoundTripper { // one after the other
		var n atomic.Int32
		return roundTrip(func(req *http.Request) (*http.Response, error) {
			to := newRequest(req.Context(), t, req.Method, urls[min(int(n.Add(1)), len(urls))-1], "")
			return network.RoundTrip(to)
		})
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tt := range map[string]struct {
		ctx      context.Context
		base     http.RoundTripper
		sent     bool
		attempts int
		want     error // nil: any
	}{
		"refused":                       {t.Context(), calls(refused), false, 4, nil},
		"lost":                          {t.Context(), calls(dropped.URL), true, 4, nil},
		"lost, then refused":            {t.Context(), calls(dropped.URL, refused), true, 4, nil},
		"refused, then lost":            {t.Context(), calls(refused, refused, refused, dropped.URL), true, 4, nil},
		"503, then refused":             {t.Context(), calls(newScripted(t, 503).URL, refused), true, 4, nil},
		"a base that does not tell":     {t.Context(), roundTrip(func(*http.Request) (*http.Response, error) { return nil, broken }), true, 4, broken},
		"no answer before the ctx ends": {waiting, calls(silent.URL), true, 1, context.Canceled},
		"a ctx that has ended":          {ended, calls(dropped.URL), false, 0, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := &http.Client{Transport: newTransport(t, tt.base, quick)}
			_, err := client.Do(newRequest(ledger.ContextWithKey(tt.ctx, "order-1"), t, "POST", "http://a/", "")) //nolint:bodyclose // there is none
			var failed *ledger.TransportError
			if !errors.As(err, &failed) || failed.Sent != tt.sent || failed.Attempts != tt.attempts || ledger.IsNotDone(err) == tt.sent {
				t.Errorf("error %v, not done: %v; want sent %v after %d attempts", err, ledger.IsNotDone(err), tt.sent, tt.attempts)
			}
			if tt.want != nil && !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
		})
	}
}

func TestTransportBodies(t *testing.T) {
	t.Parallel()
	const text = "0123456789"
	config := quick
	config.MaxBodyBytes = int64(len(text))
	send := func(t *testing.T, script []int, edit func(req *http.Request)) (*scripted, *http.Response, error) {
		t.Helper()
		p := newScripted(t, script...)
		req := newRequest(ledger.ContextWithKey(t.Context(), "k"), t, "POST", p.URL, text)
		edit(req)
		res, err := newTransport(t, &http.Transport{DisableKeepAlives: true}, config).RoundTrip(req)
		if err == nil {
			t.Cleanup(func() { _ = res.Body.Close() })
		}
		return p, res, err
	}
	stream := func(body string, length int64) (*closeable, func(req *http.Request)) {
		c := &closeable{Reader: strings.NewReader(body)}
		return c, func(req *http.Request) { req.Body, req.GetBody, req.ContentLength = c, nil, length }
	}
	t.Run("GetBody", func(t *testing.T) {
		t.Parallel()
		p, res, err := send(t, []int{503, lost, 200}, func(*http.Request) {})
		if err != nil || res.StatusCode != 200 || p.seen(t, "k", text) != 3 {
			t.Errorf("error %v, %d requests", err, p.requests)
		}
	})
	t.Run("GetBody that fails", func(t *testing.T) {
		t.Parallel()
		gone := errors.New("file is gone")
		_, _, err := send(t, []int{503, 200}, func(req *http.Request) { //nolint:bodyclose // there is none
			req.GetBody = func() (io.ReadCloser, error) { return nil, gone }
		})
		var failed *ledger.TransportError
		if !errors.Is(err, gone) || !errors.As(err, &failed) || !failed.Sent || failed.Attempts != 1 {
			t.Errorf("error %v", err)
		}
	})
	for name, length := range map[string]int64{"known length": int64(len(text)), "unknown length": -1, "length not said": 0} {
		t.Run("a stream is kept, "+name, func(t *testing.T) {
			t.Parallel()
			body, edit := stream(text, length)
			p, res, err := send(t, []int{503, lost, 200}, edit)
			if err != nil || res.StatusCode != 200 || p.seen(t, "k", text) != 3 || !body.isClosed() {
				t.Errorf("error %v, %d requests, closed %v", err, p.requests, body.closed.Load())
			}
		})
		t.Run("a long stream is sent once, "+name, func(t *testing.T) {
			t.Parallel()
			long := strings.Repeat("long", 10_000)
			said := length
			if said > 0 {
				said = int64(len(long))
			}
			body, edit := stream(long, said)
			p, res, err := send(t, []int{503, 200}, edit)
			if err != nil || res.StatusCode != 503 || p.seen(t, "k", long) != 1 || !body.isClosed() {
				t.Errorf("error %v, %d requests, closed %v", err, p.requests, body.closed.Load())
			}
		})
	}
	t.Run("a body that can't be read", func(t *testing.T) {
		t.Parallel()
		body := &closeable{Reader: io.MultiReader(strings.NewReader("01"), errReader{})}
		p, _, err := send(t, []int{200}, func(req *http.Request) { req.Body, req.GetBody = body, nil }) //nolint:bodyclose // there is none
		if !errors.Is(err, errRead) || !ledger.IsNotDone(err) || p.requests != 0 || !body.isClosed() {
			t.Errorf("error %v, %d requests, closed %v", err, p.requests, body.closed.Load())
		}
	})
	t.Run("a body that never comes", func(t *testing.T) {
		t.Parallel()
		reader, writer := io.Pipe()
		defer writer.Close() //nolint:errcheck // it never fails
		ctx, cancel := context.WithTimeout(ledger.ContextWithKey(t.Context(), "k"), 20*time.Millisecond)
		defer cancel()
		_, _, err := send(t, []int{200}, func(req *http.Request) { //nolint:bodyclose // there is none
			*req = *req.WithContext(ctx)
			req.Body, req.GetBody = reader, nil
		})
		if !errors.Is(err, context.DeadlineExceeded) || !ledger.IsNotDone(err) {
			t.Errorf("error %v", err)
		}
	})
}

var errRead = errors.New("disk is gone")

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errRead }

// Answers that are not returned are read and closed, so that one connection serves all
// attempts; a connection that the provider closes in between is replaced.
func TestTransportConnections(t *testing.T) {
	t.Parallel()
	network := &http.Transport{}
	t.Cleanup(network.CloseIdleConnections)
	p := newScripted(t, 503, 429, 409, 200)
	client := &http.Client{Transport: newTransport(t, network, quick)}
	post := func() {
		t.Helper()
		req := newRequest(ledger.ContextWithKey(t.Context(), "k"), t, "POST", p.URL, "10 EUR")
		req.Body, req.GetBody, req.ContentLength = io.NopCloser(strings.NewReader("10 EUR")), nil, -1
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 200 || res.Body.Close() != nil {
			t.Fatalf("status %d, error %v", res.StatusCode, err)
		}
	}
	post()
	if p.conns != 1 || p.seen(t, "k", "10 EUR") != 4 {
		t.Errorf("%d connections for %d requests", p.conns, p.requests)
	}
	for range 20 {
		p.CloseClientConnections()
		post()
	}
	if seen := p.seen(t, "k", "10 EUR"); seen != 24 {
		t.Errorf("%d requests, want 24", seen)
	}
}

// exchange is what happened in a bubble, where time is free.
type exchange struct {
	mu    sync.Mutex
	start time.Time
	times []time.Duration // of the requests
}

func (e *exchange) base(answer func(n int) (*http.Response, error)) roundTrip {
	e.start = time.Now()
	return func(*http.Request) (*http.Response, error) {
		e.mu.Lock()
		e.times = append(e.times, time.Since(e.start))
		n := len(e.times)
		e.mu.Unlock()
		return answer(n)
	}
}

// A pause is anything from 0 to a bound that doubles.
func TestTransportPauses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const samples = 500
		config := ledger.TransportConfig{
			MaxAttempts: 6, InitialInterval: 100 * time.Millisecond, MaxInterval: 500 * time.Millisecond, RetryBurst: samples * 6,
		}
		pauses := make([][]time.Duration, config.MaxAttempts-1)
		for range samples {
			var e exchange
			transport := newTransport(t, e.base(func(int) (*http.Response, error) { return respond(503), nil }), config)
			res, err := transport.RoundTrip(newRequest(t.Context(), t, "GET", "http://a/", ""))
			if err != nil || res.StatusCode != 503 || len(e.times) != config.MaxAttempts {
				t.Fatalf("error %v after %d attempts", err, len(e.times))
			}
			for i := range pauses {
				pauses[i] = append(pauses[i], e.times[i+1]-e.times[i])
			}
		}
		for i, bound := range []time.Duration{100, 200, 400, 500, 500} {
			bound *= time.Millisecond
			least, most := slices.Min(pauses[i]), slices.Max(pauses[i])
			if most > bound+1 || most < bound*9/10 || least > bound/10 {
				t.Errorf("pause %d is from %v to %v, want from 0 to %v", i+1, least, most, bound)
			}
		}
	})
}

func TestTransportRetryAfter(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		status int
		value  func(now time.Time) string
		date   func(now time.Time) string // the provider's clock; nil for none
		want   time.Duration              // -1: not waited for
	}{
		"seconds":                        {503, text("7"), nil, 7 * time.Second},
		"429":                            {429, text("7"), nil, 7 * time.Second},
		"0":                              {503, text("0"), nil, 0},
		"the longest":                    {503, text("30"), nil, 30 * time.Second},
		"too long":                       {503, text("31"), nil, -1},
		"huge":                           {503, text("99999999999"), nil, -1},
		"beyond all numbers":             {503, text(strings.Repeat("9", 50)), nil, -1},
		"date":                           {503, in(8 * time.Second), nil, 8 * time.Second},
		"date of a clock that is behind": {503, in(8*time.Second - time.Hour), in(-time.Hour), 8 * time.Second},
		"date of a clock that is ahead":  {503, in(8*time.Second + time.Hour), in(time.Hour), 8 * time.Second},
		"date in the past":               {503, in(-time.Hour), nil, 0},
		"date too far":                   {503, in(time.Hour), nil, -1},
		"nonsense":                       {503, text("soon"), nil, 0},
		"negative":                       {503, text("-5"), nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var e exchange
				transport := newTransport(t, e.base(func(n int) (*http.Response, error) {
					if n > 1 {
						return respond(200), nil
					}
					now := time.Now()
					res := respond(tt.status, "Retry-After", tt.value(now))
					if tt.date != nil {
						res.Header.Set("Date", tt.date(now))
					}
					return res, nil
				}), ledger.TransportConfig{InitialInterval: 1})
				res, err := transport.RoundTrip(newRequest(t.Context(), t, "GET", "http://a/", ""))
				if err != nil {
					t.Fatal(err)
				}
				if tt.want < 0 {
					if res.StatusCode != tt.status || len(e.times) != 1 || time.Since(e.start) != 0 {
						t.Errorf("status %d after %d attempts in %v", res.StatusCode, len(e.times), time.Since(e.start))
					}
					return
				}
				if res.StatusCode != 200 || len(e.times) != 2 || e.times[1] < tt.want || e.times[1] > tt.want*3/2+2 {
					t.Errorf("status %d, attempts at %v; want the second from %v on", res.StatusCode, e.times, tt.want)
				}
			})
		})
	}
}

func text(s string) func(time.Time) string { return func(time.Time) string { return s } }

func in(d time.Duration) func(time.Time) string {
	return func(now time.Time) string { return now.Add(d).UTC().Format(http.TimeFormat) }
}

// A context ends the attempts: at once when it would end in the pause, else in it.
func TestTransportContextEnds(t *testing.T) {
	t.Parallel()
	failing := func(int) (*http.Response, error) { return respond(503, "Retry-After", "5"), nil }
	t.Run("before the pause would", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var e exchange
			ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
			defer cancel()
			res, err := newTransport(t, e.base(failing), ledger.TransportConfig{}).RoundTrip(newRequest(ctx, t, "GET", "http://a/", ""))
			if err != nil || res.StatusCode != 503 || time.Since(e.start) != 0 || len(e.times) != 1 {
				t.Fatalf("error %v after %d attempts in %v", err, len(e.times), time.Since(e.start))
			}
			if body, err := io.ReadAll(res.Body); err != nil || string(body) != "body" {
				t.Errorf("body %q, error %v", body, err)
			}
		})
	})
	t.Run("in the pause", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var e exchange
			ctx, cancel := context.WithCancel(ledger.ContextWithKey(t.Context(), "k"))
			time.AfterFunc(2*time.Second, cancel)
			_, err := newTransport(t, e.base(failing), ledger.TransportConfig{}).RoundTrip(newRequest(ctx, t, "POST", "http://a/", "")) //nolint:bodyclose // there is none
			var failed *ledger.TransportError
			if !errors.Is(err, context.Canceled) || !errors.As(err, &failed) || !failed.Sent || !strings.Contains(err.Error(), "status 503") {
				t.Errorf("error %v", err)
			}
			time.Sleep(time.Hour)
			if len(e.times) != 1 {
				t.Errorf("attempts at %v", e.times)
			}
		})
	})
	t.Run("in an attempt", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var e exchange
			ctx, cancel := context.WithCancel(ledger.ContextWithKey(t.Context(), "k"))
			_, err := newTransport(t, e.base(func(int) (*http.Response, error) { //nolint:bodyclose // there is none
				cancel()
				return nil, io.ErrUnexpectedEOF
			}), quick).RoundTrip(newRequest(ctx, t, "POST", "http://a/", ""))
			if !errors.Is(err, io.ErrUnexpectedEOF) || len(e.times) != 1 {
				t.Errorf("error %v after %d attempts", err, len(e.times))
			}
		})
	})
}

// A provider that does not end its answer does not hold up the next attempt for long.
func TestTransportAnswerWithoutEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var e exchange
		reader, writer := io.Pipe()
		defer writer.Close() //nolint:errcheck // it never fails
		transport := newTransport(t, e.base(func(n int) (*http.Response, error) {
			res := respond(200)
			if n == 1 {
				res.StatusCode, res.Body = 503, reader
			}
			return res, nil
		}), quick)
		res, err := transport.RoundTrip(newRequest(t.Context(), t, "GET", "http://a/", ""))
		if err != nil || res.StatusCode != 200 || len(e.times) != 2 || e.times[1] < time.Second || e.times[1] > 2*time.Second {
			t.Errorf("error %v, attempts at %v", err, e.times)
		}
	})
}

// A storm: 1,000 handlers call a provider that fails for 10 s, and each call that
// failed comes again as a redelivered message does. What the provider gets beyond the
// calls themselves is bounded, and no moment gets much of it.
func TestTransportStorm(t *testing.T) {
	t.Parallel()
	const callers, outage, slot = 1000, 10 * time.Second, 50 * time.Millisecond
	for name, tt := range map[string]struct {
		retryAfter string
		config     ledger.TransportConfig
		most       int // additional attempts in one slot
	}{
		// Of one wave, evenly spread, a slot has about 50, 8, 25 and 45.
		"default":                      {"", ledger.TransportConfig{}, 100},
		"default, Retry-After":         {"2", ledger.TransportConfig{}, 100},
		"without a bound":              {"", ledger.TransportConfig{RetryBurst: 1 << 20, InitialInterval: 2 * time.Second}, 125},
		"without a bound, Retry-After": {"2", ledger.TransportConfig{RetryBurst: 1 << 20}, 125},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				var mu sync.Mutex
				attempts := map[string]int{} // by key and call
				charges := map[string]int{}
				requests := 0
				histogram := map[time.Duration]int{} // of attempts after the first one
				base := roundTrip(func(req *http.Request) (*http.Response, error) {
					mu.Lock()
					defer mu.Unlock()
					requests++
					call := req.Header.Get("X-Call")
					if attempts[call]++; attempts[call] > 1 {
						histogram[time.Since(start).Truncate(slot)]++
					}
					if time.Since(start) < outage {
						return respond(503, "Retry-After", tt.retryAfter), nil
					}
					charges[req.Header.Get("Idempotency-Key")]++
					return respond(200), nil
				})
				transport := newTransport(t, base, tt.config)
				var calls atomic.Int32
				var wg sync.WaitGroup
				for i := range callers {
					wg.Go(func() {
						ctx := ledger.ContextWithKey(t.Context(), fmt.Sprint("order-", i))
						for delivery := 1; ; delivery++ {
							req := newRequest(ctx, t, "POST", "http://a/", "10 EUR")
							req.Header.Set("X-Call", fmt.Sprint(i, "/", delivery))
							calls.Add(1)
							res, err := transport.RoundTrip(req)
							if err != nil {
								t.Error(err)
								return
							}
							_ = res.Body.Close()
							if res.StatusCode == 200 {
								return
							}
							time.Sleep(5 * time.Second)
						}
					})
				}
				wg.Wait()
				if len(charges) != callers {
					t.Errorf("%d orders are charged, want %d", len(charges), callers)
				}
				n := float64(calls.Load())
				bound := n * float64(cmp.Or(tt.config.MaxAttempts, ledger.DefaultMaxAttempts))
				if tt.config.RetryBurst == 0 {
					bound = n*(1+ledger.DefaultRetryRatio) + ledger.DefaultRetryBurst
				}
				peak := 0
				for _, count := range histogram {
					peak = max(peak, count)
				}
				t.Logf("%d calls, %d requests, %d slots with further attempts, peak %d", calls.Load(), requests, len(histogram), peak)
				if float64(requests) > bound || requests <= int(calls.Load()) {
					t.Errorf("%d requests for %d calls, want more than those and at most %.0f", requests, calls.Load(), bound)
				}
				if peak > tt.most {
					t.Errorf("%d further attempts within %v, want at most %d: %v", peak, slot, tt.most, histogram)
				}
			})
		})
	}
}

func TestNewTransportRefuses(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		config ledger.TransportConfig
		want   []string
	}{
		"negative": {
			ledger.TransportConfig{MaxAttempts: -1, InitialInterval: -2, MaxInterval: -3, MaxRetryAfter: -4, MaxBodyBytes: -5, RetryRatio: -6, RetryBurst: -7},
			[]string{"MaxAttempts: -1", "InitialInterval: -2ns", "MaxInterval: -3ns", "MaxRetryAfter: -4ns", "MaxBodyBytes: -5", "RetryRatio: -6", "RetryBurst: -7"},
		},
		"intervals":   {ledger.TransportConfig{InitialInterval: 2, MaxInterval: 1}, []string{"MaxInterval: 1ns", "InitialInterval, 2ns"}},
		"not a ratio": {ledger.TransportConfig{RetryRatio: math.NaN()}, []string{"RetryRatio"}},
		"too patient": {ledger.TransportConfig{MaxRetryAfter: 25 * time.Hour}, []string{"MaxRetryAfter: 25h0m0s", "24h"}},
		"header":      {ledger.TransportConfig{Header: "Idempotency Key:"}, []string{"header", "Idempotency Key:"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := ledger.NewTransport(nil, tt.config)
			if !errors.Is(err, ledger.ErrInvalidOption) {
				t.Fatalf("got %v", err)
			}
			for _, part := range tt.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q is not in %q", part, err)
				}
			}
		})
	}
	if _, err := ledger.NewTransport(nil, ledger.TransportConfig{}); err != nil {
		t.Errorf("the zero config: %v", err)
	}
}
