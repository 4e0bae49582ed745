package ledger_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
)

// A provider that is overloaded at first gets the same key again.
func ExampleTransport() {
	requests := 0
	provider := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		fmt.Println("provider gets", r.Header.Get("Idempotency-Key"))
		if requests == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	defer provider.Close()

	// One for each provider.
	transport, err := ledger.NewTransport(nil, ledger.TransportConfig{InitialInterval: time.Millisecond})
	if err != nil {
		panic(err)
	}
	client := &http.Client{Transport: transport}

	// The context that ledger.Do gives its function carries the key of the effect.
	ctx := ledger.ContextWithKey(context.Background(), "f9d66ba3-af6f-8a63-af72-cfc4d3cd0cbd")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, provider.URL, strings.NewReader("amount=1000"))
	if err != nil {
		panic(err)
	}
	res, err := client.Do(req)
	switch {
	case ledger.IsNotDone(err): // certainly not sent
	case err != nil: // nobody knows
	default:
		defer res.Body.Close() //nolint:errcheck // an example
		fmt.Println(res.Status)
	}
	// Output:
	// provider gets f9d66ba3-af6f-8a63-af72-cfc4d3cd0cbd
	// provider gets f9d66ba3-af6f-8a63-af72-cfc4d3cd0cbd
	// 200 OK
}
