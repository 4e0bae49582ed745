// Package routers runs Watermill routers in tests.
package routers

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

// patience is for what must happen.
const patience = 30 * time.Second

// Run runs router, returns when it does, and closes it at the end of t.
func Run(t testing.TB, router *message.Router) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- router.Run(context.WithoutCancel(t.Context())) }()
	t.Cleanup(func() { require.NoError(t, errors.Join(router.Close(), <-done)) })
	select {
	case <-router.Running():
	case <-time.After(patience):
		require.FailNow(t, "the router does not start")
	}
}
