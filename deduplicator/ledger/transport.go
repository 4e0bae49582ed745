package ledger

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/seed-2f56a981/watermill-idempotent/internal/sqldb"
)

// Defaults of [TransportConfig].
const (
	DefaultKeyHeader            = "Idempotency-Key"
	DefaultMaxAttempts          = 4
	DefaultRetryInitialInterval = 200 * time.Millisecond
	DefaultRetryMaxInterval     = 10 * time.Second
	DefaultMaxRetryAfter        = 30 * time.Second
	DefaultMaxBodyBytes         = 1 << 20
	DefaultRetryRatio           = 0.2
	DefaultRetryBurst           = 10
)

// MaxKeyBytes is the longest idempotency key that a [Transport] sends.
const MaxKeyBytes = 255

// TransportConfig configures a [Transport]. Each field that is 0 has its default.
type TransportConfig struct {
	// Header carries the key.
	Header string

	// Quoted sends the key in quotes, as a String of RFC 8941, for a provider that
	// implements draft-ietf-httpapi-idempotency-key-header. A provider may take the two
	// forms for two keys: to change it between two attempts can repeat an effect.
	Quoted bool

	// MaxAttempts is how often a request is sent, 1 or more; 1 is never again.
	MaxAttempts int

	// InitialInterval bounds the pause before the second attempt; the bound doubles with
	// each one, up to MaxInterval. A pause is anything from 0 to its bound.
	InitialInterval, MaxInterval time.Duration

	// MaxRetryAfter is the longest Retry-After that is waited for, at most 24 hours. With
	// a longer one the response is returned.
	MaxRetryAfter time.Duration

	// MaxBodyBytes is the longest body without GetBody that is kept to be sent again. A
	// request with a longer one is sent once.
	MaxBodyBytes int64

	// RetryRatio and RetryBurst bound the attempts after the first ones, over all
	// requests of the Transport: n requests are followed by n × RetryRatio + RetryBurst
	// at most. So a provider that is down gets little more than what is asked of it.
	RetryRatio float64
	RetryBurst int
}

func (c *TransportConfig) complete() error {
	var errs []error
	check := func(field string, value, least float64) {
		if value < least {
			errs = append(errs, fmt.Errorf("%s: %v is under the least, %v", field, value, least))
		}
	}
	check("MaxAttempts", float64(c.MaxAttempts), 0)
	check("MaxBodyBytes", float64(c.MaxBodyBytes), 0)
	check("RetryRatio", c.RetryRatio, 0)
	check("RetryBurst", float64(c.RetryBurst), 0)
	for _, d := range []struct {
		field string
		value time.Duration
	}{{"InitialInterval", c.InitialInterval}, {"MaxInterval", c.MaxInterval}, {"MaxRetryAfter", c.MaxRetryAfter}} {
		if d.value < 0 {
			errs = append(errs, fmt.Errorf("%s: %v is negative", d.field, d.value))
		}
	}
	if c.MaxRetryAfter > 24*time.Hour {
		errs = append(errs, fmt.Errorf("MaxRetryAfter: %v is over the most, 24h", c.MaxRetryAfter))
	}
	if math.IsNaN(c.RetryRatio) {
		errs = append(errs, errors.New("RetryRatio: it is not a number"))
	}
	if strings.ContainsFunc(c.Header, func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r) }) {
		errs = append(errs, fmt.Errorf("header %q is not a field name", c.Header))
	}
	c.Header = def(c.Header, DefaultKeyHeader)
	c.MaxAttempts = def(c.MaxAttempts, DefaultMaxAttempts)
	c.InitialInterval = def(c.InitialInterval, DefaultRetryInitialInterval)
	c.MaxInterval = def(c.MaxInterval, max(DefaultRetryMaxInterval, c.InitialInterval))
	c.MaxRetryAfter = def(c.MaxRetryAfter, DefaultMaxRetryAfter)
	c.MaxBodyBytes = def(c.MaxBodyBytes, DefaultMaxBodyBytes)
	c.RetryRatio = def(c.RetryRatio, DefaultRetryRatio)
	c.RetryBurst = def(c.RetryBurst, DefaultRetryBurst)
	if c.MaxInterval < c.InitialInterval {
		errs = append(errs, fmt.Errorf("MaxInterval: %v is under InitialInterval, %v", c.MaxInterval, c.InitialInterval))
	}
	return errors.Join(errs...)
}

func def[T comparable](value, instead T) T {
	var zero T
	if value == zero {
		return instead
	}
	return value
}

// Transport is an http.RoundTripper that sends requests with the idempotency key of
// their effect, and sends them again where that is safe. The key is the one of the
// request's context, which [Do] and [ContextWithKey] set, or a header that the request
// has already; requests with a safe method (GET, HEAD, OPTIONS, TRACE) get none. One
// key is one request: give an effect that needs several of them a [Effect.Part] each.
//
// The key is sent as [Do] hands it out and as [Ledger.Unknown] lists it.
//
// In a call of Do under [AskOperator] or [AskProvider], which nobody may repeat, a
// request is sent once, unless its method is safe: the first response or error is
// returned, and net/http is kept from sending again what it has begun to send. For
// that a base sees the key's header in lower case.
//
// Otherwise the Transport is for providers that recognise the key: one that does not
// would do twice what is sent twice.
//
// A request may be sent again if it has a key or an idempotent method (the safe ones,
// PUT and DELETE: RFC 9110, section 9.2.2). A POST or PATCH without a key is sent once.
// It is sent again after
//
//   - a network error, whether it was sent or not;
//   - 429 (Too Many Requests) and 5xx, but not 501 (Not Implemented);
//   - 409 (Conflict), if it has a key: the first copy is in work
//     (draft-ietf-httpapi-idempotency-key-header).
//
// Before that comes a pause that is drawn from 0 to a bound that doubles ("full
// jitter"), after what Retry-After says, in seconds or as a date. There is no next
// attempt once the context has ended or would end in the pause, when Retry-After is
// too long, when the attempts are used up, and when too many other requests were sent
// again, see [TransportConfig]. Then the last response is returned, with its body,
// or else a [TransportError].
//
// net/http by itself sends a request with a key once more when the provider has closed
// the connection that it was to use.
//
// It is safe for concurrent use. Use one for each provider: it is what the bound of
// the attempts is about.
type Transport struct {
	base   http.RoundTripper
	config TransportConfig
	budget budget
}

// NewTransport returns a Transport that sends with base; nil is
// http.DefaultTransport. It returns [ErrInvalidOption].
func NewTransport(base http.RoundTripper, config TransportConfig) (*Transport, error) {
	if err := config.complete(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if base == nil {
		base = http.DefaultTransport
	}
	return &Transport{
		base: base, config: config,
		budget: budget{tokens: float64(config.RetryBurst), ratio: config.RetryRatio, most: float64(config.RetryBurst)},
	}, nil
}

// TransportError is a request without a response.
type TransportError struct {
	// Sent is false if the provider has certainly not got the request, in no attempt:
	// there was no connection to it. Then the error is also marked by [NotDone].
	// Otherwise nobody knows.
	Sent     bool
	Attempts int // that were begun
	Err      error
}

func (e *TransportError) Error() string {
	what := "the request may have been received"
	if !e.Sent {
		what = "the request was not sent"
	}
	return fmt.Sprintf("ledger: %s, attempts: %d: %v", what, e.Attempts, e.Err)
}

// Unwrap returns Err, marked by NotDone if nothing was sent.
func (e *TransportError) Unwrap() error {
	if !e.Sent {
		return NotDone(e.Err)
	}
	return e.Err
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx := req.Context()
	out := req.Clone(ctx)
	keyed, err := t.setKey(out)
	once := !safe(req.Method) && sendOnce(ctx)
	repeatable := err == nil && !once && (keyed || idempotent(req.Method))
	switch {
	case once:
		unrepeatable(out)
	case repeatable:
		repeatable, err = t.keepBody(out)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		closeBody(out)
		return nil, &TransportError{Err: err}
	}
	t.budget.deposit()
	pauses := t.pauses()
	sent := false
	for attempt := 1; ; attempt++ {
		res, maybe, err := t.send(out, once)
		sent = sent || maybe
		again := repeatable && attempt < t.config.MaxAttempts
		pause := pauses.NextBackOff()
		if err == nil {
			again = again && repeatStatus(res.StatusCode, keyed)
			if after := retryAfter(res.Header); after <= t.config.MaxRetryAfter {
				// Others were told the same time.
				pause += after + rand.N(after/2+1) //nolint:gosec // jitter is no secret
			} else {
				again = false
			}
		}
		deadline, ok := ctx.Deadline()
		if ok && time.Until(deadline) <= pause || ctx.Err() != nil {
			again = false
		}
		again = again && t.budget.withdraw()
		switch {
		case !again && err == nil:
			return res, nil
		case !again:
			return nil, &TransportError{Sent: sent, Attempts: attempt, Err: err}
		case err == nil:
			err = fmt.Errorf("status %d", res.StatusCode)
			drain(res.Body)
		}
		if !sqldb.Pause(ctx, pause) || ctx.Err() != nil {
			return nil, &TransportError{Sent: sent, Attempts: attempt, Err: fmt.Errorf("%w in the pause after: %w", ctx.Err(), err)}
		}
		if out.GetBody != nil {
			next := *out
			if next.Body, err = out.GetBody(); err != nil {
				return nil, &TransportError{Sent: sent, Attempts: attempt, Err: fmt.Errorf("body of the next attempt: %w", err)}
			}
			out = &next
		}
	}
}

// CloseIdleConnections is for http.Client.
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.base.(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}

// setKey reports whether req has a key.
func (t *Transport) setKey(req *http.Request) (bool, error) {
	if req.Header.Get(t.config.Header) != "" {
		return true, nil
	}
	key, ok := KeyFromContext(req.Context())
	if !ok || safe(req.Method) {
		return false, nil
	}
	// What is left of a String of RFC 8941 when nothing has to be escaped.
	if key == "" || len(key) > MaxKeyBytes || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) {
		return false, fmt.Errorf("%w: an idempotency key has 1 to %d bytes of ASCII without control characters, quotes and backslashes; this has %d bytes",
			ErrInvalidEffect, MaxKeyBytes, len(key))
	}
	if t.config.Quoted {
		key = `"` + key + `"`
	}
	req.Header.Set(t.config.Header, key)
	return true, nil
}

func safe(method string) bool {
	switch method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

func idempotent(method string) bool {
	return safe(method) || method == http.MethodPut || method == http.MethodDelete
}

// unrepeatable keeps net/http from sending req again over HTTP/1, where it repeats what has
// one of these headers in its canonical form (Request.isReplayable). To stop it as send
// does could be too late there.
func unrepeatable(req *http.Request) {
	for _, name := range []string{"Idempotency-Key", "X-Idempotency-Key"} {
		if values, ok := req.Header[name]; ok {
			delete(req.Header, name)
			req.Header[strings.ToLower(name)] = values
		}
	}
}

// keepBody gives req a GetBody if it needs one, and reports whether it can be sent
// again.
func (t *Transport) keepBody(req *http.Request) (bool, error) {
	if req.Body == nil || req.Body == http.NoBody || req.GetBody != nil {
		return true, nil
	}
	if req.ContentLength > t.config.MaxBodyBytes {
		return false, nil
	}
	original := req.Body
	stop := context.AfterFunc(req.Context(), func() { _ = original.Close() }) // ends a read that waits
	defer stop()
	start, err := io.ReadAll(io.LimitReader(original, t.config.MaxBodyBytes+1))
	if err != nil {
		return false, fmt.Errorf("read the body: %w", errors.Join(req.Context().Err(), err))
	}
	if int64(len(start)) > t.config.MaxBodyBytes {
		req.Body = &joined{io.MultiReader(bytes.NewReader(start), original), original}
		return false, nil
	}
	if err := original.Close(); err != nil {
		return false, fmt.Errorf("close the body: %w", err)
	}
	if req.ContentLength <= 0 {
		req.ContentLength, req.TransferEncoding = int64(len(start)), nil
	}
	req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(start)), nil }
	req.Body, err = req.GetBody()
	return true, err
}

type joined struct {
	io.Reader
	io.Closer
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

// send sends req. maybe is false if the provider has certainly not got it: there was no
// connection. A connection that was there may have carried it, even if it was not
// written yet when RoundTrip returned.
//
// With once, net/http is stopped when it takes another connection or stream after it has
// written the headers: over HTTP/2 it repeats what was reset with PROTOCOL_ERROR, too.
func (t *Transport) send(req *http.Request, once bool) (res *http.Response, maybe bool, err error) {
	var asked, connected, wrote, stopped atomic.Bool
	ctx, stop := req.Context(), context.CancelFunc(nil)
	if once {
		ctx, stop = context.WithCancel(ctx) // until the call of Do ends: the response is read with it
	}
	trace := &httptrace.ClientTrace{
		GetConn: func(string) { asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) {
			connected.Store(true)
			if once && wrote.Load() {
				stopped.Store(true)
				stop()
			}
		},
		WroteHeaders: func() { connected.Store(true); wrote.Store(true) },
		WroteRequest: func(httptrace.WroteRequestInfo) { connected.Store(true) },
	}
	res, err = t.base.RoundTrip(req.WithContext(httptrace.WithClientTrace(ctx, trace)))
	if err != nil && stopped.Load() {
		err = fmt.Errorf("net/http was stopped from sending it again: %w", err)
	}
	return res, connected.Load() || !asked.Load(), err // what does not say that it asked for one says nothing
}

func repeatStatus(status int, keyed bool) bool {
	switch status {
	case http.StatusConflict:
		return keyed
	case http.StatusTooManyRequests:
		return true
	case http.StatusNotImplemented:
		return false
	}
	return status >= 500
}

// pauses draw from 0 to twice their interval.
func (t *Transport) pauses() *backoff.ExponentialBackOff {
	return &backoff.ExponentialBackOff{
		InitialInterval:     max(t.config.InitialInterval/2, 1),
		MaxInterval:         max(t.config.MaxInterval/2, 1),
		Multiplier:          2,
		RandomizationFactor: 1,
	}
}

// retryAfter returns how long the provider wants to be left alone (RFC 9110, section
// 10.2.3). A date is compared with the provider's own clock, if it tells.
func retryAfter(header http.Header) time.Duration {
	value := strings.TrimSpace(header.Get("Retry-After"))
	if seconds, err := strconv.ParseUint(value, 10, 64); err == nil || errors.Is(err, strconv.ErrRange) {
		if seconds > uint64(math.MaxInt64/time.Second) {
			return math.MaxInt64
		}
		return time.Duration(seconds) * time.Second //nolint:gosec // it fits
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	now, err := http.ParseTime(header.Get("Date"))
	if err != nil {
		now = time.Now()
	}
	return max(at.Sub(now), 0)
}

const (
	drainBytes = 64 << 10
	drainTime  = time.Second
)

// drain reads what is left of a response, so that its connection can be used again,
// unless that is much or takes long.
func drain(body io.ReadCloser) {
	timer := time.AfterFunc(drainTime, func() { _ = body.Close() })
	defer timer.Stop()
	_, _ = io.CopyN(io.Discard, body, drainBytes)
	_ = body.Close()
}

// budget has a token for each attempt that may follow a first one.
type budget struct {
	mu          sync.Mutex // guards tokens
	tokens      float64
	ratio, most float64
}

func (b *budget) deposit() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tokens = min(b.tokens+b.ratio, b.most)
}

func (b *budget) withdraw() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
