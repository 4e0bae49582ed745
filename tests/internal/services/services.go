// Package services brings up the real servers that the tests run against:
// PostgreSQL, MariaDB, RabbitMQ, Apache Kafka and Redis, and on request RabbitMQ 4
// and MySQL.
//
// [Manager.Up] looks for each server in this order and takes the first that is
// there: the one that its environment variable names, our own running instance,
// a server on the standard port that accepts the standard test login, our own
// instance (installed if missing, then started), Docker Compose. Servers that
// were not started here are never stopped, killed or reconfigured.
//
// Own instances listen on 127.0.0.1 alone, keep their data in the state folder
// and outlive the process that started them. Fault tests take one of their own
// from [NewInstance], so that killing it disturbs nobody.
//
// Own instances need Linux; installing needs Debian's apt-get and root.
package services

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// StateVariable names the environment variable that moves the state folder,
// which is .services beside go.work when it is unset.
const StateVariable = "TEST_SERVICES_DIR"

// Name is the name of a server, on the command line and in compose.yaml.
type Name string

// The servers. AMQP is RabbitMQ 3 and AMQP4 RabbitMQ 4.
const (
	Postgres Name = "postgres"
	MariaDB  Name = "mariadb"
	AMQP     Name = "amqp"
	Kafka    Name = "kafka"
	AMQP4    Name = "amqp4"
	MySQL    Name = "mysql"
	Redis    Name = "redis"
)

// ErrUnavailable is matched by the error for a server that no way could bring up.
var ErrUnavailable = errors.New("services: server unavailable")

// Default returns the servers that are meant when none is named.
func Default() []Name { return []Name{Postgres, MariaDB, AMQP, Kafka, Redis} }

// All returns every known server, the default ones first.
func All() []Name {
	names := make([]Name, len(definitions))
	for i, def := range definitions {
		names[i] = def.name
	}
	return names
}

// Parse turns command line arguments into names. No argument means [Default];
// a name given twice counts once.
func Parse(args []string) ([]Name, error) {
	if len(args) == 0 {
		return Default(), nil
	}
	var names []Name
	for _, arg := range args {
		if _, err := define(Name(arg)); err != nil {
			return nil, err
		}
		if !slices.Contains(names, Name(arg)) {
			names = append(names, Name(arg))
		}
	}
	return names, nil
}

// Variable is one environment variable that leads a test to a server.
type Variable struct{ Name, Value string }

// Export formats v as a POSIX shell statement.
func (v Variable) Export() string {
	return "export " + v.Name + "='" + strings.ReplaceAll(v.Value, "'", `'\''`) + "'"
}

// TB is the part of testing.TB that this package needs. It keeps package
// testing out of the command.
type TB interface {
	Helper()
	Cleanup(f func())
	Failed() bool
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// Value returns where the tests find a server: the value of its environment
// variable, or of our own instance if that runs. It starts nothing; without a
// server the test fails with the command that brings one up.
func Value(t TB, name Name) string {
	t.Helper()
	def, err := define(name)
	if err != nil {
		t.Fatalf("%v", err)
	}
	if value := os.Getenv(def.variable); value != "" {
		return value
	}
	m, err := Open("")
	if err != nil {
		t.Fatalf("%v", err)
	}
	if in := m.instance(def); in.Running() {
		return in.Value()
	}
	t.Fatalf("services: %s is not set and no own %s runs: go run ./tests/services run %s -- go test ./tests/...",
		def.variable, name, name)
	return ""
}

// NewInstance starts a throw-away server on ports and data of its own, which
// the end of the test stops and deletes. A test that failed logs the end of the
// server's log. The server is always an own instance: environment variables and
// Docker are not looked at.
func NewInstance(t TB, name Name) *Instance {
	t.Helper()
	m, err := Open("")
	if err != nil {
		t.Fatalf("%v", err)
	}
	// The test's own context is cancelled before cleanup and says nothing about
	// how long an installation may take.
	ctx, cancel := context.WithTimeout(context.Background(), upLimit)
	defer cancel()
	in, err := m.throwAway(ctx, name)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s at %s, end of its log:\n%s", name, in.Addr(), in.LogTail())
		}
		if err := in.destroy(); err != nil {
			t.Logf("%v", err)
		}
	})
	if err := in.Start(ctx); err != nil {
		t.Fatalf("%v", err)
	}
	return in
}

// repositoryRoot walks up from the working folder to the one that holds go.work.
func repositoryRoot() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("services: %w", err)
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("services: no go.work in %s or above: run inside the repository", start)
		}
	}
}
