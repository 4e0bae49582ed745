// Package env reads the variables that say how long tests run.
package env

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// Number returns what variable says, or unset.
func Number(t testing.TB, variable string, unset uint64) uint64 {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return unset
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", variable, err)
	}
	return n
}

// Seed returns what variable says, or a random number, and logs it.
func Seed(t *testing.T, variable string) uint64 {
	t.Helper()
	seed := Number(t, variable, rand.Uint64N(1<<32))
	t.Logf("%s=%d", variable, seed)
	return seed
}
