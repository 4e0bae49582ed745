package amqpshard_test

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/ordering/amqpshard"
)

func TestOpenRejectsConfig(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		change func(*amqpshard.Config)
		want   []string
	}{
		"no URL":               {func(c *amqpshard.Config) { c.URL = "" }, []string{"URL is required"}},
		"wrong scheme":         {func(c *amqpshard.Config) { c.URL = "http://u:secret@h" }, []string{"URL is not"}},
		"password not encoded": {func(c *amqpshard.Config) { c.URL = "amqp://u:secret%zz@h" }, []string{"URL is not"}},
		"TLS without amqps":    {func(c *amqpshard.Config) { c.TLS = &tls.Config{MinVersion: tls.VersionTLS12} }, []string{"TLS is set"}},
		"no group":             {func(c *amqpshard.Config) { c.Group = "" }, []string{"Group is required"}},
		"dot in group":         {func(c *amqpshard.Config) { c.Group = "a.b" }, []string{`Group is "a.b"`, `"."`}},
		"group not UTF-8":      {func(c *amqpshard.Config) { c.Group = "\xff" }, []string{"UTF-8"}},
		"long group":           {func(c *amqpshard.Config) { c.Group = strings.Repeat("g", 128) }, []string{"Group has 128 bytes", "127"}},
		"negative shards":      {func(c *amqpshard.Config) { c.Shards = -1 }, []string{"Shards is -1", "1 to 1000"}},
		"too many shards":      {func(c *amqpshard.Config) { c.Shards = 1001 }, []string{"Shards is 1001", "1 to 1000"}},
		"unknown routing":      {func(c *amqpshard.Config) { c.Routing = 2 }, []string{"Routing is 2", "Slots"}},
		"more than slots":      {func(c *amqpshard.Config) { c.Routing, c.Shards = amqpshard.Slots, 257 }, []string{"Shards is 257", "256"}},
		"negative limit":       {func(c *amqpshard.Config) { c.DeliveryLimit = -1 }, []string{"DeliveryLimit is -1", "1 to 1000000"}},
		"dial timeout":         {func(c *amqpshard.Config) { c.DialTimeout = -1 }, []string{"DialTimeout is -1ns", "positive"}},
		"publish timeout":      {func(c *amqpshard.Config) { c.PublishTimeout = -1 }, []string{"PublishTimeout is -1ns", "positive"}},
		"drain timeout":        {func(c *amqpshard.Config) { c.DrainTimeout = -1 }, []string{"DrainTimeout is -1ns", "positive"}},
		"several": {
			func(c *amqpshard.Config) { c.Group, c.Shards, c.DrainTimeout = "", 5000, -1 },
			[]string{"Group is required", "Shards is 5000", "DrainTimeout is -1ns"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := amqpshard.Config{URL: "amqp://user:secret@localhost:1", Group: "stock"}
			test.change(&cfg)
			_, err := amqpshard.Open(t.Context(), cfg, nil)
			if !errors.Is(err, amqpshard.ErrInvalidConfig) {
				t.Fatalf("Open returned %v, want ErrInvalidConfig", err)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("%q shows the password", err)
			}
		})
	}
}

// A broker that refuses, one that accepts and never answers, and a context that
// ends: Open returns in bounded time and names the address, not the password.
func TestOpenUnreachable(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	refusing, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refusing.Close()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()

	for name, test := range map[string]struct {
		ctx     context.Context
		address string
		timeout time.Duration
		want    error
	}{
		"refused":   {t.Context(), refusing.Addr().String(), time.Minute, nil},
		"silent":    {t.Context(), silent.Addr().String(), 50 * time.Millisecond, context.DeadlineExceeded},
		"cancelled": {cancelled, silent.Addr().String(), time.Minute, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			_, err := amqpshard.Open(test.ctx, amqpshard.Config{
				URL: "amqp://user:secret@" + test.address, Group: "stock", DialTimeout: test.timeout,
			}, nil)
			if err == nil || (test.want != nil && !errors.Is(err, test.want)) {
				t.Fatalf("Open returned %v, want %v", err, test.want)
			}
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("Open took %s", took)
			}
			if !strings.Contains(err.Error(), test.address) || strings.Contains(err.Error(), "secret") {
				t.Errorf("%q does not name %s, or shows the password", err, test.address)
			}
		})
	}
}
