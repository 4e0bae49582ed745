package services

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	stopLimit = 20 * time.Second // an orderly shutdown, before SIGKILL
	killLimit = 10 * time.Second // until the kernel has removed killed processes
	portLimit = 2 * time.Second  // until it has closed their sockets
	initLimit = 90 * time.Second
	pollEvery = 50 * time.Millisecond
	tailLines = 20
)

// Instance is a server of our own. Its address stays the same over Kill, Stop
// and Start, and so does its data. Its methods are not safe for concurrent use,
// except that Ready may wait while another goroutine calls the others.
type Instance struct {
	def   *definition
	dir   string
	cache string
	ports []int
}

// record is what instance.json keeps.
type record struct {
	Ports []int `json:"ports"`
	Owner int   `json:"owner,omitempty"` // test process that a throw-away instance belongs to
}

// Name returns which server it is.
func (in *Instance) Name() Name { return in.def.name }

// Addr returns the host and port that clients connect to.
func (in *Instance) Addr() string { return "127.0.0.1:" + in.port(0) }

// Value returns its DSN, URL or broker list: what its environment variable
// would hold.
func (in *Instance) Value() string { return in.def.value(in.ports) }

// Variables returns the environment variables that lead to it.
func (in *Instance) Variables() []Variable {
	vars := []Variable{{in.def.variable, in.Value()}}
	for _, e := range in.def.extras {
		vars = append(vars, Variable{e.variable, e.value(in.ports)})
	}
	return vars
}

// Running reports whether its process exists, also when that is paused.
func (in *Instance) Running() bool { return in.Pid() != 0 }

// Pid returns its main process, or 0 if there is none.
func (in *Instance) Pid() int {
	all := in.processes()
	for _, p := range all {
		if p.name != in.def.process {
			continue
		}
		// The one whose parent is not of the same kind: PostgreSQL forks.
		if !slices.ContainsFunc(all, func(q process) bool { return q.pid == p.parent && q.name == p.name }) {
			return p.pid
		}
	}
	return 0
}

// Start starts it and waits until it answers. It does nothing more than the
// waiting if it runs. The error holds the end of the server's log.
func (in *Instance) Start(ctx context.Context) error {
	if in.Running() {
		return in.Ready(ctx)
	}
	// What a killed server left behind holds its ports and shared memory.
	if err := in.Kill(); err != nil {
		return err
	}
	if taken := in.takenPort(); taken != 0 {
		return fmt.Errorf("services: start %s: another program listens on its port %d", in.def.name, taken)
	}
	if err := in.initialize(ctx); err != nil {
		return fmt.Errorf("services: initialize %s: %w%s", in.def.name, err, in.logExcerpt())
	}
	exited, err := in.launch()
	if err != nil {
		return fmt.Errorf("services: start %s: %w", in.def.name, err)
	}
	if err := in.await(ctx, exited); err != nil {
		return errors.Join(err, in.Kill())
	}
	return nil
}

// Ready waits until it answers a request of its protocol, for at most the time
// that a start may take. The error names the address and holds the end of the
// server's log.
func (in *Instance) Ready(ctx context.Context) error { return in.await(ctx, nil) }

// Stop shuts it down in order, and kills it if that takes more than 20s or
// until ctx is done. Stopping what does not run is fine.
func (in *Instance) Stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	if pid := in.Pid(); pid != 0 {
		_ = in.Resume() // a paused process would not see the signal
		if err := syscall.Kill(pid, in.def.stop); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("services: stop %s: %w", in.def.name, err)
		}
		_ = poll(ctx, func() bool { return !in.Running() })
	}
	return in.Kill() // helpers that stay, such as epmd
}

// Restart is Stop and Start.
func (in *Instance) Restart(ctx context.Context) error {
	if err := in.Stop(ctx); err != nil {
		return err
	}
	return in.Start(ctx)
}

// Kill sends SIGKILL to all of its processes, paused ones included, and returns
// when they are gone and their sockets closed. Data that was handed to the
// operating system is kept.
func (in *Instance) Kill() error {
	if len(in.processes()) > 0 {
		if err := in.signal(syscall.SIGKILL); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), killLimit)
		defer cancel()
		if err := poll(ctx, func() bool { return len(in.processes()) == 0 }); err != nil {
			return fmt.Errorf("services: %s survives SIGKILL: %v", in.def.name, in.processes())
		}
	}
	// A process counts as gone while its last threads still hold its sockets.
	// If a stranger has a port, starting says so.
	ctx, cancel := context.WithTimeout(context.Background(), portLimit)
	defer cancel()
	_ = poll(ctx, func() bool { return in.takenPort() == 0 })
	return nil
}

// Pause sends SIGSTOP to all of its processes: connections stay open and are
// accepted, and nothing answers.
func (in *Instance) Pause() error { return in.signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (in *Instance) Resume() error { return in.signal(syscall.SIGCONT) }

// Tool runs a program of the server's package, such as rabbitmqctl, as part of
// in and returns what it printed.
func (in *Instance) Tool(ctx context.Context, program string, args ...string) (string, error) {
	if in.def.root == "" {
		program = find(program)
	} else {
		program = "/usr/lib/rabbitmq/bin/" + program
	}
	cmd, closeLog, err := in.prepared(ctx, append([]string{program}, args...))
	if err != nil {
		return "", fmt.Errorf("services: %s: %w", program, err)
	}
	defer closeLog()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("services: %s %v: %w\n%s", program, args, err, out.String())
	}
	return out.String(), nil
}

// LogTail returns the last lines that the server wrote.
func (in *Instance) LogTail() string {
	f, err := os.Open(in.path("log"))
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	const most = 16 << 10
	if info, err := f.Stat(); err == nil && info.Size() > most {
		_, _ = f.Seek(-most, 2)
	}
	text := make([]byte, most)
	n, _ := f.Read(text)
	lines := strings.Split(strings.TrimSpace(string(text[:n])), "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}

func (in *Instance) logExcerpt() string {
	tail := in.LogTail()
	if tail == "" {
		return ""
	}
	return "\nend of " + in.path("log") + ":\n" + tail
}

// destroy kills it and deletes its data.
func (in *Instance) destroy() error {
	if err := in.Kill(); err != nil {
		return err
	}
	return os.RemoveAll(in.dir)
}

func (in *Instance) path(name string) string { return filepath.Join(in.dir, name) }
func (in *Instance) data() string            { return in.path("data") }
func (in *Instance) port(i int) string       { return strconv.Itoa(in.ports[i]) }

func (in *Instance) environment() []string {
	if in.def.env == nil {
		return nil
	}
	return in.def.env(in)
}

// initialize fills the data folder once and writes the settings each time.
func (in *Instance) initialize(ctx context.Context) error {
	done := in.path("initialized")
	_, err := os.Stat(done)
	first := err != nil
	if first {
		if err := os.RemoveAll(in.data()); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(in.data(), 0o750); err != nil {
		return err
	}
	if in.def.files != nil {
		for name, text := range in.def.files(in) {
			if err := os.WriteFile(in.path(name), []byte(text), 0o644); err != nil {
				return err
			}
		}
	}
	if in.def.pidFile != "" {
		// Nothing of in runs here. PostgreSQL would take its killed predecessor
		// for alive as long as init has not reaped it.
		if err := os.Remove(filepath.Join(in.data(), in.def.pidFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if !first {
		return nil
	}
	if in.def.init != nil {
		ctx, cancel := context.WithTimeout(ctx, initLimit)
		defer cancel()
		cmd, closeLog, err := in.prepared(ctx, in.def.init(in))
		if err != nil {
			return err
		}
		defer closeLog()
		if err := cmd.Run(); err != nil {
			return err
		}
	}
	return os.WriteFile(done, nil, 0o644)
}

// launch starts the server. The channel is closed when it has exited.
func (in *Instance) launch() (<-chan struct{}, error) {
	// Not bound to a context: it outlives the caller.
	cmd, closeLog, err := in.prepared(context.Background(), in.def.command(in))
	if err != nil {
		return nil, err
	}
	defer closeLog()
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	exited := make(chan struct{})
	go func() { // ends with the server; without it a killed one stays a zombie
		_ = cmd.Wait()
		close(exited)
	}()
	return exited, nil
}

// prepared returns the command that runs argv as part of in, in its root folder
// if it has one.
func (in *Instance) prepared(ctx context.Context, argv []string) (*exec.Cmd, func(), error) {
	// 1,024 files, a common default, leave RabbitMQ 832 sockets. The folder is
	// changed here, as capabilities take effect with the exec of the shell.
	script := `cd "$1" && shift && { ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -H -n)"; } && exec "$@"`
	argv = append([]string{"sh", "-c", script, "sh", in.data()}, argv...)
	if in.def.root != "" {
		// The mounts are in a namespace of their own and vanish with the server;
		// the instance's folder has the same path inside.
		mounts := `root=$1 dir=$2; shift 2
mkdir -p "$root$dir" && mount --rbind /proc "$root/proc" && mount --rbind /dev "$root/dev" &&
mount --bind "$dir" "$root$dir" && exec chroot "$root" "$@"`
		argv = append([]string{"unshare", "--mount", "sh", "-c", mounts, "sh", filepath.Join(in.cache, in.def.root), in.dir}, argv...)
	}
	log, err := os.OpenFile(in.path("log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := in.confine(cmd); err != nil {
		_ = log.Close()
		return nil, nil, err
	}
	return cmd, func() { _ = log.Close() }, nil
}

// await polls until the server answers or exited is closed.
func (in *Instance) await(ctx context.Context, exited <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, in.def.limit)
	defer cancel()
	begin := time.Now()
	for {
		err := ask(ctx, in.def.probe, in.Value())
		if err == nil {
			return nil
		}
		timer := time.NewTimer(pollEvery)
		select {
		case <-timer.C:
			continue
		case <-exited:
			err = fmt.Errorf("its process exited")
		case <-ctx.Done():
			err = fmt.Errorf("no answer in %s: %w", time.Since(begin).Round(100*time.Millisecond), err)
		}
		timer.Stop()
		return fmt.Errorf("services: %s at %s: %w%s", in.def.name, in.Addr(), err, in.logExcerpt())
	}
}

// takenPort returns a port of in that somebody listens on, or 0.
func (in *Instance) takenPort() int {
	for _, port := range in.ports {
		if !portFree(port) {
			return port
		}
	}
	return 0
}

// assignPorts gives in free ports that no other instance has, not even one that
// is down at the moment. The caller holds the lock.
func (in *Instance) assignPorts(used []int, owner int) error {
	// Below the range from which Linux takes the ports of outgoing connections:
	// a client that redials a killed server would sooner or later be given that
	// port, and be connected to itself.
	const low, high = 20000, 32000
	in.ports = nil
	for tries := 0; len(in.ports) < in.def.ports; tries++ {
		if tries == 1000 {
			return fmt.Errorf("services: no free port between %d and %d", low, high)
		}
		n, err := rand.Int(rand.Reader, big.NewInt(high-low))
		if err != nil {
			return err
		}
		port := low + int(n.Int64())
		if !slices.Contains(used, port) && !slices.Contains(in.ports, port) && portFree(port) {
			in.ports = append(in.ports, port)
		}
	}
	if err := os.MkdirAll(in.dir, 0o755); err != nil {
		return err
	}
	text, err := json.Marshal(record{in.ports, owner})
	if err != nil {
		return err
	}
	return os.WriteFile(in.path("instance.json"), text, 0o644)
}

func portFree(port int) bool {
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return false
	}
	return l.Close() == nil
}

func readRecord(dir string) (record, error) {
	var r record
	text, err := os.ReadFile(filepath.Join(dir, "instance.json"))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(text, &r)
}

// poll calls done until it reports true or ctx ends.
func poll(ctx context.Context, done func() bool) error {
	ticker := time.NewTicker(pollEvery)
	defer ticker.Stop()
	for !done() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func randomName() string { return strings.ToLower(rand.Text()[:8]) }
