// Package ledger_test tests package ledger on the real databases, against a
// provider that keeps count and with workers in processes of their own, which are
// killed and paused.
package ledger_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/seed-2f56a981/watermill-idempotent/deduplicator"
	"github.com/seed-2f56a981/watermill-idempotent/deduplicator/ledger"
	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/testdb"
)

// patience is for what must happen.
const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	if encoded := os.Getenv(childVariable); encoded != "" {
		runChild(encoded) // does not return
	}
	flag.Parse()
	parallel := flag.Lookup("test.parallel")
	if parallel.Value.String() == parallel.DefValue {
		_ = parallel.Value.Set("8") // the tests wait for databases, not for the CPU
	}
	if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
		_ = checks.Value.Set("8") // each is a hundred statements
	}
	_ = flag.Set("rapid.nofailfile", "true") // what it prints is enough
	goleak.VerifyTestMain(m)
}

// each runs test on each kind of database, in parallel.
func each(t *testing.T, test func(t *testing.T, d testdb.Driver)) {
	t.Helper()
	with(t, testdb.Servers, test)
}

// with runs test with each driver, in parallel.
func with(t *testing.T, drivers []testdb.Driver, test func(t *testing.T, d testdb.Driver)) {
	t.Helper()
	for _, d := range drivers {
		t.Run(d.Name, func(t *testing.T) {
			t.Parallel()
			test(t, d)
		})
	}
}

// kit is a store and a ledger with a pool of its own; on SQLite, a file.
type kit struct {
	t         testing.TB
	driver    testdb.Driver
	databases [2]*testdb.Database // of the store and of the ledger
	storeDB   *sql.DB
	db        *sql.DB // of the ledger
	store     *deduplicator.SQLStore
	ledger    *ledger.Ledger
	provider  *provider
}

func newKit(t testing.TB, d testdb.Driver, opts ...ledger.Option) *kit {
	t.Helper()
	k := &kit{t: t, driver: d, provider: newProvider(t)}
	k.databases[0] = testdb.Create(t, d)
	k.databases[1] = k.databases[0]
	if d.Dialect == deduplicator.SQLite {
		k.databases[1] = testdb.Create(t, d)
	}
	k.storeDB, k.db = k.databases[0].Open(t), k.databases[1].Open(t)
	require.NoError(t, deduplicator.Migrate(t.Context(), k.storeDB, d.Dialect))
	require.NoError(t, ledger.Migrate(t.Context(), k.db, d.Dialect))
	var err error
	k.store, err = deduplicator.NewSQLStore(t.Context(), k.storeDB, d.Dialect)
	require.NoError(t, err)
	k.ledger = k.newLedger(k.db, opts...)
	return k
}

func (k *kit) newLedger(db *sql.DB, opts ...ledger.Option) *ledger.Ledger {
	k.t.Helper()
	l, err := ledger.New(k.t.Context(), k.store, db, k.driver.Dialect, opts...)
	require.NoError(k.t, err)
	return l
}

// consumer is that of all claims here.
const consumer = "billing"

// of returns the context of a message, without a transaction.
func (k *kit) of(message string) context.Context {
	return deduplicator.ContextWithClaim(k.t.Context(), deduplicator.Claim{Consumer: consumer, Key: message})
}

// handle runs the handler of a message as middleware.Deduplicate does.
func (k *kit) handle(message string, handler func(ctx context.Context) error) error {
	claim := deduplicator.Claim{Consumer: consumer, Key: message}
	_, err := k.store.Process(k.t.Context(), claim, func(ctx context.Context) ([]deduplicator.Output, error) {
		return nil, handler(deduplicator.ContextWithClaim(ctx, claim))
	})
	return err
}

// charge runs the effect of a message against the provider.
func (k *kit) charge(message string, effect ledger.Effect) (string, error) {
	return ledger.Do(k.of(message), k.ledger, effect, 100, k.provider.charge)
}

// later lets time pass for all effects: it moves what is stored instead of the clock.
func (k *kit) later(d time.Duration) {
	k.t.Helper()
	var shift string
	switch k.driver.Dialect {
	case deduplicator.PostgreSQL:
		shift = fmt.Sprintf("%%[1]s = %%[1]s - interval '%d microseconds'", d.Microseconds())
	case deduplicator.MySQL:
		shift = fmt.Sprintf("%%[1]s = %%[1]s - INTERVAL %d MICROSECOND", d.Microseconds())
	default:
		shift = fmt.Sprintf("%%[1]s = strftime('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f', %%[1]s, '-%.3f seconds')", d.Seconds())
	}
	_, err := k.db.ExecContext(k.t.Context(), "UPDATE external_effects SET "+fmt.Sprintf(shift, "lease_until")+", "+
		fmt.Sprintf(shift, "first_tried_at"))
	require.NoError(k.t, err)
}

// state is what is durable of the effects of a message: "" if nothing is.
func (k *kit) state(message string) string {
	k.t.Helper()
	query := "SELECT state FROM external_effects WHERE message_key = ?"
	if k.driver.Dialect == deduplicator.PostgreSQL {
		query = "SELECT state FROM external_effects WHERE message_key = $1"
	}
	var state string
	if err := k.db.QueryRowContext(k.t.Context(), query, message).Scan(&state); !errors.Is(err, sql.ErrNoRows) {
		require.NoError(k.t, err)
	}
	return state
}

// unknown are the messages whose effects are listed for reconciliation.
func (k *kit) unknown() (messages []string) {
	k.t.Helper()
	listed, err := k.ledger.Unknown(k.t.Context(), 1000)
	require.NoError(k.t, err)
	for _, u := range listed {
		messages = append(messages, u.MessageKey)
	}
	return messages
}

func newEffect(t testing.TB, name string, rule ledger.Rule, opts ...ledger.EffectOption) ledger.Effect {
	t.Helper()
	effect, err := ledger.NewEffect(name, rule, opts...)
	require.NoError(t, err)
	return effect
}

// provider takes payments. It knows requests by their keys if it has any.
type provider struct {
	url    string
	client *http.Client

	mu        sync.Mutex // guards what follows
	keys      bool
	calls     int            // requests that arrived
	charged   map[string]int // payments by key
	onArrival func()         // of a request, before anything is done
	onDone    func()         // before the response
	lose      bool           // responses
}

func newProvider(t testing.TB) *provider {
	t.Helper()
	p := &provider{charged: make(map[string]int), client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	server := httptest.NewServer(p)
	t.Cleanup(server.Close)
	p.url = server.URL
	return p
}

func (p *provider) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("Idempotency-Key")
	if r.Method == http.MethodGet {
		p.mu.Lock()
		defer p.mu.Unlock()
		_, _ = fmt.Fprint(w, p.charged[key])
		return
	}
	p.mu.Lock()
	p.calls++
	onArrival, onDone, lose := p.onArrival, p.onDone, p.lose
	p.mu.Unlock()
	if onArrival != nil {
		onArrival()
	}
	p.mu.Lock()
	if !p.keys || p.charged[key] == 0 {
		p.charged[key]++
	}
	p.mu.Unlock()
	if onDone != nil {
		onDone()
	}
	if lose {
		panic(http.ErrAbortHandler)
	}
	_, _ = fmt.Fprint(w, "receipt of "+key)
}

// count returns how many requests arrived and how many payments there are, the most
// for one key and in total.
func (p *provider) count() (calls, most, total int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range p.charged {
		most, total = max(most, n), total+n
	}
	return p.calls, most, total
}

func (p *provider) charge(ctx context.Context, key string) (string, error) {
	return post(ctx, p.client, p.url, key)
}

func post(ctx context.Context, client *http.Client, url, key string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, http.NoBody)
	if err != nil {
		return "", ledger.NotDone(err)
	}
	if carried, _ := ledger.KeyFromContext(ctx); carried != key {
		return "", fmt.Errorf("the context carries the key %q, not %q", carried, key)
	}
	request.Header.Set("Idempotency-Key", key)
	return do(client, request)
}

func do(client *http.Client, request *http.Request) (string, error) {
	response, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close() //nolint:errcheck // all of it was read
	var buffer [100]byte
	n := 0
	for n < len(buffer) {
		read, err := response.Body.Read(buffer[n:])
		n += read
		if err != nil {
			break
		}
	}
	return string(buffer[:n]), nil
}

// ask is a rule's question.
func (p *provider) ask(ctx context.Context, u ledger.UnknownEffect) (ledger.Answer, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url, http.NoBody)
	if err != nil {
		return ledger.Answer{}, err
	}
	request.Header.Set("Idempotency-Key", u.Key)
	switch n, err := do(p.client, request); {
	case err != nil:
		return ledger.Answer{}, err
	case n == "0":
		return ledger.AnswerNotDone(), nil
	default:
		return ledger.AnswerDone("receipt of " + u.Key), nil
	}
}
