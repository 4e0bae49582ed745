package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
)

// The fake provider is two: charges are recognised by their idempotency key, labels
// carry it as a reference that is only noted down. Both tell what they have done under
// it, as a portal does.
type fakeProvider struct {
	mu   sync.Mutex                   // guards what follows
	done map[string]map[string]string // results by service and reference
	made map[string]map[string]int    // how often something was done, by service and order
}

// keyHeaders are where a service finds the key. A header named Idempotency-Key makes
// net/http send a request again by itself when a connection breaks: right for a service
// that knows keys, a second label from one that does not.
var keyHeaders = map[string]string{charges: "Idempotency-Key", labels: "Reference"}

// faultHeader makes the provider misbehave, after its work or instead of it.
const faultHeader = "X-Fault"

func (p *fakeProvider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	service := strings.Trim(r.URL.Path, "/")
	reference := r.Header.Get(keyHeaders[service])
	switch {
	case service == "report":
		p.mu.Lock()
		defer p.mu.Unlock()
		_ = json.NewEncoder(w).Encode(p.made)
	case r.Method == http.MethodGet:
		p.mu.Lock()
		defer p.mu.Unlock()
		_, _ = io.WriteString(w, p.done[service][reference])
	case fault(r.Header.Get(faultHeader)) == busy:
		http.Error(w, "try again later", http.StatusServiceUnavailable)
	default:
		result := p.do(service, r.URL.Query().Get("order"), reference)
		switch fault(r.Header.Get(faultHeader)) {
		case responseLost:
			panic(http.ErrAbortHandler)
		case tooSlow:
			<-r.Context().Done() // the client gives up
		default:
			_, _ = io.WriteString(w, result)
		}
	}
}

func (p *fakeProvider) do(service, order, reference string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if result := p.done[service][reference]; result != "" && service == charges {
		return result // the first one, as Stripe does
	}
	p.made[service][order]++
	result := fmt.Sprintf("%s-%s-%d", strings.TrimSuffix(service, "s"), order, p.made[service][order])
	p.done[service][reference] = result
	return result
}

// serveProvider is a process of its own. It says where it listens, and ends with its
// standard input.
func serveProvider() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // there is nothing to cancel
	if err != nil {
		return err
	}
	p := &fakeProvider{
		done: map[string]map[string]string{charges: {}, labels: {}},
		made: map[string]map[string]int{charges: {}, labels: {}},
	}
	server := &http.Server{Handler: p, ReadHeaderTimeout: time.Second}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = server.Close()
	}()
	say(os.Stdout, "http://%s", listener.Addr())
	return server.Serve(listener)
}

// client calls the provider.
type client struct{ url string }

// patience is how long a call may take.
const patience = 500 * time.Millisecond

// post makes a charge or a label. The error says, where that is certain, that nothing
// was done.
func (c client) post(ctx context.Context, service, order, key string, f fault) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/"+service+"?order="+order, http.NoBody)
	if err != nil {
		return "", ledger.NotDone(err)
	}
	request.Header.Set(keyHeaders[service], key)
	request.Header.Set(faultHeader, string(f))
	return c.send(request)
}

// lookUp returns what became of a reference: "" if nothing was done.
func (c client) lookUp(ctx context.Context, service, reference string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+"/"+service, http.NoBody)
	if err != nil {
		return "", err
	}
	request.Header.Set(keyHeaders[service], reference)
	return c.send(request)
}

func (c client) send(request *http.Request) (string, error) {
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close() //nolint:errcheck // all of it was read
	body, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return "", err
	case response.StatusCode == http.StatusServiceUnavailable:
		return "", ledger.NotDone(fmt.Errorf("provider: %s", response.Status))
	}
	return string(body), nil
}

// report returns how often something was done, by service and order.
func (c client) report(ctx context.Context) (made map[string]map[string]int, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+"/report", http.NoBody)
	if err != nil {
		return nil, err
	}
	body, err := c.send(request)
	if err != nil {
		return nil, err
	}
	return made, json.Unmarshal([]byte(body), &made)
}
