package main

import (
	"bytes"
	"testing"
)

// Wrong flags and a database that is not there are told from a failed run.
func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		args []string
		code int
	}{
		{[]string{"-help"}, 0},
		{nil, 2},
		{[]string{"-db", "sqlite", "-dsn", "x"}, 2},
		{[]string{"-unknown"}, 2},
		{[]string{"-db", "mysql", "-dsn", "root@tcp(127.0.0.1:1)/test"}, 2},
	} {
		var out, errOut bytes.Buffer
		if code := run(t.Context(), tt.args, &out, &errOut); code != tt.code || errOut.Len() == 0 {
			t.Errorf("run(%v) = %d, want %d: %s", tt.args, code, tt.code, errOut.String())
		}
	}
}
