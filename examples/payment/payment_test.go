package main

import (
	"bytes"
	"os"
	"reflect"
	"regexp"
	"testing"
)

func TestMain(m *testing.M) {
	if settings := os.Getenv(roleVariable); settings != "" {
		playRole(settings) // does not return
	}
	os.Exit(m.Run())
}

// The demonstration runs as it is, only shorter: each fault strikes at least once.
func TestPaymentDemonstration(t *testing.T) {
	t.Parallel()
	for _, seed := range []string{"1", "2"} {
		t.Run("seed "+seed, func(t *testing.T) {
			t.Parallel()
			var stdout, stderr bytes.Buffer
			code := run(t.Context(), []string{"-orders", "27", "-seed", seed, "-verbose"}, &stdout, &stderr)
			if code != exitOK {
				t.Errorf("exit code %d, want %d; stderr:\n%s", code, exitOK, stderr.String())
			}
			for _, want := range []string{
				`(?m)^result protected orders=27 deliveries=\d+ killed=[1-9]\d* parked=([1-9]\d*) reconciled=[1-9]\d* ` +
					`not_charged=0 charged_twice=0 no_label=0 labels_twice=0 mismatches=0$`,
				`(?m)^result unprotected orders=27 deliveries=\d+ killed=[1-9]\d* parked=\d+ reconciled=0 ` +
					`not_charged=0 charged_twice=[1-9]\d* no_label=0 labels_twice=[1-9]\d* mismatches=[1-9]\d*$`,
				`(?m)^0001 .*  1, 1  `,
			} {
				if !regexp.MustCompile(want).MatchString(stdout.String()) {
					t.Errorf("stdout does not match %s:\n%s", want, stdout.String())
				}
			}
		})
	}
}

// Faults depend on the seed alone, and all of them strike.
func TestPlan(t *testing.T) {
	t.Parallel()
	plan := newPlan(7, 27)
	if !reflect.DeepEqual(plan, newPlan(7, 27)) {
		t.Error("the same seed makes another run")
	}
	if reflect.DeepEqual(plan, newPlan(8, 27)) {
		t.Error("another seed makes the same run")
	}
	seen := map[fault]bool{}
	for _, d := range plan {
		seen[d.Fault] = true
	}
	for _, f := range faults {
		if !seen[f] {
			t.Errorf("%q does not strike", f)
		}
	}
}

func TestFlags(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"-orders", "0"}, {"-orders", "100001"}, {"-timeout", "0"}, {"-nope"}, {"what"}, {"-db", "oracle"}, {"-dsn", "x"}} {
		var stderr bytes.Buffer
		if code := run(t.Context(), args, &bytes.Buffer{}, &stderr); code != exitUsage || stderr.Len() == 0 {
			t.Errorf("%q: exit code %d, %s", args, code, stderr.String())
		}
	}
	if code := run(t.Context(), []string{"-h"}, &bytes.Buffer{}, &bytes.Buffer{}); code != exitOK {
		t.Errorf("-h: exit code %d", code)
	}
}
