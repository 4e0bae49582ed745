package ledger_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// carrier prints a label for each POST and never answers it with success. It knows no
// keys.
type carrier struct {
	*httptest.Server
	status int // 0: the connection is dropped

	mu     sync.Mutex // guards what follows
	labels []string   // by key
}

func newCarrier(t *testing.T, status int, http2 bool) *carrier {
	t.Helper()
	c := &carrier{status: status}
	c.Server = httptest.NewUnstartedServer(c)
	c.EnableHTTP2 = http2
	if http2 {
		c.StartTLS()
	} else {
		c.Start()
	}
	t.Cleanup(c.Close)
	return c
}

func (c *carrier) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet {
		return
	}
	_, _ = io.Copy(io.Discard, r.Body)
	c.mu.Lock()
	c.labels = append(c.labels, r.Header.Get("Idempotency-Key"))
	c.mu.Unlock()
	if c.status == 0 {
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(c.status)
}

func (c *carrier) printed() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.labels...)
}

// B102: under rules that do not call again, neither the Transport nor net/http sends a
// request again when its answer is lost, whatever names its key and however it gets to
// the carrier.
func TestTransportSendsOnceB102(t *testing.T) {
	t.Parallel()
	k := newKit(t, testdb.SQLite)
	config := ledger.TransportConfig{InitialInterval: 1, MaxInterval: 1}
	ask := func(context.Context, ledger.UnknownEffect) (ledger.Answer, error) { return ledger.AnswerUnknown(), nil }
	type way struct {
		status  int
		reused  bool // a connection that has served a request
		http2   bool
		body    string
		key     string // of the request's context, instead of the effect's
		headers []string
	}
	ways := map[string]way{
		"new connection":                {body: "parcel"},
		"reused connection":             {reused: true, body: "parcel"},
		"reused connection, no body":    {reused: true},
		"HTTP/2":                        {reused: true, http2: true, body: "parcel"},
		"503":                           {status: 503, body: "parcel"},
		"a key of the call's":           {reused: true, body: "parcel", key: "parcel-1"},
		"a header of the call's":        {reused: true, headers: []string{"Idempotency-Key"}},
		"another header of the call's":  {reused: true, headers: []string{"X-Idempotency-Key"}},
		"headers of the call's, a body": {reused: true, body: "parcel", headers: []string{"Idempotency-Key", "X-Idempotency-Key"}},
	}
	for rule, tt := range map[string]struct {
		rule ledger.Rule
		once bool
	}{
		"AskOperator":  {ledger.AskOperator(), true},
		"AskProvider":  {ledger.AskProvider(ask), true},
		"RetryWithKey": {ledger.RetryWithKey(24 * time.Hour), false}, // each way can carry a repetition
		"CallAgain":    {ledger.CallAgain(), false},
	} {
		for name, w := range ways {
			t.Run(rule+"/"+name, func(t *testing.T) {
				t.Parallel()
				c := newCarrier(t, w.status, w.http2)
				client := c.Client()
				transport, err := ledger.NewTransport(client.Transport, config)
				require.NoError(t, err)
				client = &http.Client{Transport: transport}
				var failed *ledger.TransportError
				label := newEffect(t, "label", tt.rule)
				sent := ""
				_, err = ledger.Do(k.of(t.Name()), k.ledger, label, nil, func(ctx context.Context, key string) (string, error) {
					sent = key
					if w.key != "" {
						sent, ctx = w.key, ledger.ContextWithKey(ctx, w.key)
					}
					if w.reused {
						request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL, http.NoBody)
						require.NoError(t, err)
						_, err = do(client, request)
						require.NoError(t, err)
					}
					request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.URL, strings.NewReader(w.body))
					require.NoError(t, err)
					for _, header := range w.headers {
						request.Header.Set(header, key)
					}
					response, err := client.Do(request)
					if err != nil {
						return "", err
					}
					require.NoError(t, response.Body.Close())
					return "", errors.New(response.Status)
				})
				require.ErrorIs(t, err, ledger.ErrUnknown)
				require.Equal(t, w.status == 0, errors.As(err, &failed), "%v", err)
				if w.status == 0 {
					require.True(t, failed.Sent, "%v", err)
				}
				c.Close() // and wait for what is under way
				printed := c.printed()
				for _, key := range printed {
					require.Equal(t, sent, key)
				}
				if !tt.once {
					require.Greater(t, len(printed), 1)
					return
				}
				require.Len(t, printed, 1)
				if w.status == 0 {
					require.Equal(t, 1, failed.Attempts)
				}
			})
		}
	}
}

// B102: net/http repeats what an HTTP/2 server has reset with PROTOCOL_ERROR, which does
// not say that it did nothing.
func TestTransportSendsOnceHTTP2ResetB102(t *testing.T) {
	t.Parallel()
	k := newKit(t, testdb.SQLite)
	for name, tt := range map[string]struct {
		rule   ledger.Rule
		body   string
		labels int32
	}{
		"AskOperator":           {ledger.AskOperator(), "parcel", 1},
		"AskOperator, no body":  {ledger.AskOperator(), "", 1},
		"RetryWithKey":          {ledger.RetryWithKey(24 * time.Hour), "parcel", 2},
		"RetryWithKey, no body": {ledger.RetryWithKey(24 * time.Hour), "", 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var labels atomic.Int32
			server := httptest.NewUnstartedServer(nil)
			server.TLS = &tls.Config{NextProtos: []string{"h2"}}
			server.Config.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){
				"h2": func(_ *http.Server, conn *tls.Conn, _ http.Handler) { resetStreams(conn, &labels) },
			}
			server.StartTLS()
			t.Cleanup(server.Close)
			roots := x509.NewCertPool()
			roots.AddCert(server.Certificate())
			network := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
			t.Cleanup(network.CloseIdleConnections)
			transport, err := ledger.NewTransport(network, ledger.TransportConfig{MaxAttempts: 1})
			require.NoError(t, err)
			client := &http.Client{Transport: transport, Timeout: patience}
			_, err = ledger.Do(k.of(t.Name()), k.ledger, newEffect(t, "label", tt.rule), nil, func(ctx context.Context, _ string) (string, error) {
				request, err := http.NewRequestWithContext(ctx, http.MethodPost, server.URL, strings.NewReader(tt.body))
				require.NoError(t, err)
				return do(client, request)
			})
			require.ErrorIs(t, err, ledger.ErrUnknown)
			require.Equal(t, tt.labels, labels.Load())
		})
	}
}

// resetStreams resets each request on an HTTP/2 connection once it has arrived
// (RFC 9113), and stops after the second one.
func resetStreams(conn *tls.Conn, requests *atomic.Int32) {
	const data, headers, reset, settings, endStream = 0, 1, 3, 4, 1
	_, _ = conn.Write([]byte{0, 0, 0, settings, 0, 0, 0, 0, 0})
	_, _ = io.CopyN(io.Discard, conn, int64(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")))
	for {
		var frame [9]byte
		if _, err := io.ReadFull(conn, frame[:]); err != nil {
			return
		}
		length := int64(frame[0])<<16 | int64(frame[1])<<8 | int64(frame[2])
		if _, err := io.CopyN(io.Discard, conn, length); err != nil {
			return
		}
		if kind := frame[3]; (kind != data && kind != headers) || frame[4]&endStream == 0 {
			continue
		}
		code := byte(1) // PROTOCOL_ERROR
		if requests.Add(1) > 1 {
			code = 8 // CANCEL, which is not repeated
		}
		_, _ = conn.Write(append([]byte{0, 0, 4, reset, 0, frame[5], frame[6], frame[7], frame[8]}, 0, 0, 0, code))
	}
}
