package services

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	upLimit      = 15 * time.Minute // slow downloads included
	composeLimit = 5 * time.Minute
)

// Source tells where a server came from.
type Source string

// The sources, in the order in which they are tried.
const (
	Environment  Source = "environment"
	OwnInstance  Source = "own instance"
	StandardPort Source = "standard port"
	Compose      Source = "docker compose"
)

// Server is a server that answers.
type Server struct {
	Name      Name
	Source    Source
	Variables []Variable
	Started   bool // by this call
}

// Manager finds, starts and stops servers. It is safe for concurrent use, also
// by several processes.
type Manager struct {
	root, state, cache string
	ways               ways
	logf               func(format string, args ...any)
}

// ways are the means of Up; tests put others in their place.
type ways struct {
	getenv  func(string) string
	probe   func(ctx context.Context, def *definition, value string) error
	suits   func(ctx context.Context, def *definition, value string) error
	running func(*Instance) bool
	start   func(context.Context, *Instance) error
	install func(context.Context, []*definition) func(context.Context, *definition) error
	compose func(context.Context, Name) error
}

// Open returns a manager for the repository around the working folder. The
// state folder is state, else what [StateVariable] says, else .services in the
// repository.
func Open(state string) (*Manager, error) {
	root, err := repositoryRoot()
	if err != nil {
		return nil, err
	}
	if state == "" {
		state = os.Getenv(StateVariable)
	}
	if state == "" {
		state = filepath.Join(root, ".services")
	}
	if state, err = filepath.Abs(state); err != nil {
		return nil, fmt.Errorf("services: state folder: %w", err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, fmt.Errorf("services: %w", err)
	}
	m := &Manager{
		root: root, state: state, cache: filepath.Join(cache, "watermill-idempotent-services"),
		logf: func(string, ...any) {},
	}
	m.ways = ways{
		getenv:  os.Getenv,
		probe:   func(ctx context.Context, def *definition, value string) error { return ask(ctx, def.probe, value) },
		running: (*Instance).Running,
		start:   func(ctx context.Context, in *Instance) error { return in.Start(ctx) },
		compose: m.composeUp,
	}
	m.ways.suits = func(ctx context.Context, def *definition, value string) error {
		if def.suits == nil {
			return nil
		}
		return ask(ctx, def.suits, value)
	}
	m.ways.install = func(ctx context.Context, defs []*definition) func(context.Context, *definition) error {
		return newInstaller(ctx, m.cache, m.logf, defs).install
	}
	return m, nil
}

// Log makes m report to logf what it does. It must be called before anything else.
func (m *Manager) Log(logf func(format string, args ...any)) { m.logf = logf }

// Up returns the servers in the order of names, and starts those that are not
// there. What it started stays up when it fails for another server. The error
// matches [ErrUnavailable] and tells for each server why each way failed.
func (m *Manager) Up(ctx context.Context, names ...Name) ([]Server, error) {
	ctx, cancel := context.WithTimeout(ctx, upLimit)
	defer cancel()
	unlock, err := m.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	m.sweep()

	servers := make([]*Server, len(names))
	failures := make([]error, len(names)) // why a server is not there yet
	errs := make([]error, len(names))     // why it will not be
	defs := make([]*definition, len(names))
	for i, name := range names {
		if defs[i], err = define(name); err != nil {
			return nil, err
		}
	}
	each(names, func(i int) { servers[i], failures[i], errs[i] = m.locate(ctx, defs[i]) })

	var absent []*definition
	for i, def := range defs {
		if servers[i] == nil && errs[i] == nil {
			absent = append(absent, def)
		}
	}
	install := m.ways.install(ctx, absent)
	each(names, func(i int) {
		if slices.Contains(absent, defs[i]) {
			servers[i], errs[i] = m.create(ctx, defs[i], failures[i], install)
		}
	})

	var up []Server
	for _, server := range servers {
		if server != nil {
			up = append(up, *server)
		}
	}
	return up, errors.Join(errs...)
}

// locate looks for a server that runs. Without one it returns why in reasons;
// err is final.
func (m *Manager) locate(ctx context.Context, def *definition) (_ *Server, reasons, err error) {
	if value := m.ways.getenv(def.variable); value != "" {
		if err := m.ways.probe(ctx, def, value); err != nil {
			return nil, nil, fmt.Errorf("%w: %s: the server that %s names does not answer: %w\nStart it, or unset %[3]s",
				ErrUnavailable, def.name, def.variable, err)
		}
		server := &Server{Name: def.name, Source: Environment, Variables: []Variable{{def.variable, value}}}
		for _, e := range def.extras {
			if value := m.ways.getenv(e.variable); value != "" {
				server.Variables = append(server.Variables, Variable{e.variable, value})
			}
		}
		return server, nil, nil
	}
	why := []error{fmt.Errorf("environment: %s is not set", def.variable)}

	in := m.instance(def)
	if m.ways.running(in) {
		_ = in.Resume() // a test that died may have left it paused
		err := m.ways.probe(ctx, def, in.Value())
		if err == nil {
			return &Server{Name: def.name, Source: OwnInstance, Variables: in.Variables()}, nil, nil
		}
		m.logf("%s at %s does not answer (%v): restarting it", def.name, in.Addr(), err)
		why = append(why, fmt.Errorf("own instance: %w", err), in.Kill())
	} else {
		why = append(why, errors.New("own instance: none runs"))
	}

	if def.standard == "" {
		return nil, errors.Join(why...), nil
	}
	if err = m.ways.probe(ctx, def, def.standard); err == nil {
		err = m.ways.suits(ctx, def, def.standard)
	}
	if err == nil {
		return standard(def, StandardPort), nil, nil
	}
	why = append(why, fmt.Errorf("standard port: %w", err))
	return nil, errors.Join(why...), nil
}

// create brings up a server that is not there.
func (m *Manager) create(ctx context.Context, def *definition, reasons error, install func(context.Context, *definition) error) (*Server, error) {
	begin := time.Now()
	in := m.instance(def)
	err := install(ctx, def)
	if err != nil {
		reasons = errors.Join(reasons, fmt.Errorf("install: %w", err))
	} else {
		// Before its ports are looked at: leftovers may hold them.
		err = in.Kill()
		if err == nil && (in.ports == nil || in.takenPort() != 0) {
			err = m.assignPorts(in, 0)
		}
		if err == nil {
			m.logf("starting %s", def.name)
			err = m.ways.start(ctx, in)
		}
		if err == nil {
			m.logf("%s runs at %s after %s", def.name, in.Addr(), time.Since(begin).Round(100*time.Millisecond))
			return &Server{Name: def.name, Source: OwnInstance, Variables: in.Variables(), Started: true}, nil
		}
		reasons = errors.Join(reasons, fmt.Errorf("start: %w", err))
	}
	if err := m.ways.compose(ctx, def.name); err != nil {
		reasons = errors.Join(reasons, fmt.Errorf("docker compose: %w", err))
		return nil, fmt.Errorf("%w: %s:\n%w\nSet %s to a running server, or run as root on Debian, or start Docker",
			ErrUnavailable, def.name, indented{reasons}, def.variable)
	}
	return standard(def, Compose), nil
}

// standard describes the server on the standard port.
func standard(def *definition, source Source) *Server {
	server := &Server{
		Name: def.name, Source: source, Started: source == Compose,
		Variables: []Variable{{def.variable, def.standard}},
	}
	for _, e := range def.extras {
		u, err := url.Parse(e.standard)
		if err != nil {
			continue
		}
		if conn, err := net.DialTimeout("tcp", u.Host, time.Second); err == nil {
			_ = conn.Close()
			server.Variables = append(server.Variables, Variable{e.variable, e.standard})
		}
	}
	return server
}

// Status describes one server, running or not.
type Status struct {
	Name    Name
	Source  Source // "" if it was not found
	Address string // of our own instance, if it has one
	Pid     int    // of our own instance
	Server  *Server
}

// Status looks for servers and starts nothing.
func (m *Manager) Status(ctx context.Context, names ...Name) ([]Status, error) {
	all := make([]Status, len(names))
	errs := make([]error, len(names))
	each(names, func(i int) {
		def, err := define(names[i])
		if err != nil {
			errs[i] = err
			return
		}
		all[i] = m.status(ctx, def)
	})
	return all, errors.Join(errs...)
}

func (m *Manager) status(ctx context.Context, def *definition) Status {
	in := m.instance(def)
	s := Status{Name: def.name, Pid: in.Pid()}
	if in.ports != nil {
		s.Address = in.Addr()
	}
	// As locate, which may restart what does not answer.
	switch {
	case m.ways.getenv(def.variable) != "":
		s.Server, _, _ = m.locate(ctx, def)
	case s.Pid != 0:
		if m.ways.probe(ctx, def, in.Value()) == nil {
			s.Server = &Server{Name: def.name, Source: OwnInstance, Variables: in.Variables()}
		}
	default:
		s.Server, _, _ = m.locate(ctx, def)
	}
	if s.Server != nil {
		s.Source = s.Server.Source
	}
	return s
}

// Down stops our own instances of the named servers and what Compose started
// here, keeps their data, and returns what it stopped. Throw-away instances
// whose test is gone are removed.
func (m *Manager) Down(ctx context.Context, names ...Name) ([]Name, error) {
	unlock, err := m.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	m.sweep()
	stopped := make([]bool, len(names))
	errs := make([]error, len(names))
	each(names, func(i int) {
		def, err := define(names[i])
		if err != nil {
			errs[i] = err
			return
		}
		in := m.instance(def)
		if len(in.processes()) > 0 {
			errs[i], stopped[i] = in.Stop(ctx), true
		}
		if _, err := os.Stat(m.composeMark(def.name)); err == nil {
			errs[i] = errors.Join(errs[i], m.composeStop(ctx, def.name))
			stopped[i] = true
		}
	})
	var list []Name
	for i, name := range names {
		if stopped[i] {
			list = append(list, name)
		}
	}
	return list, errors.Join(errs...)
}

// instance returns the shared own instance, which may never have run.
func (m *Manager) instance(def *definition) *Instance {
	in := &Instance{def: def, dir: filepath.Join(m.state, string(def.name)), cache: m.cache}
	if r, err := readRecord(in.dir); err == nil && len(r.Ports) == def.ports {
		in.ports = r.Ports
	}
	return in
}

// throwAway creates an instance that belongs to this process.
func (m *Manager) throwAway(ctx context.Context, name Name) (*Instance, error) {
	def, err := define(name)
	if err != nil {
		return nil, err
	}
	unlock, err := m.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := m.ways.install(ctx, []*definition{def})(ctx, def); err != nil {
		return nil, fmt.Errorf("%w: throw-away %s: %w", ErrUnavailable, name, err)
	}
	in := &Instance{def: def, dir: filepath.Join(m.state, "throwaway", string(name)+"-"+randomName()), cache: m.cache}
	return in, m.assignPorts(in, os.Getpid())
}

var assigning sync.Mutex // the file lock does not tell goroutines of one Up apart

func (m *Manager) assignPorts(in *Instance, owner int) error {
	assigning.Lock()
	defer assigning.Unlock()
	var used []int
	for _, dir := range m.instanceFolders() {
		if r, err := readRecord(dir); err == nil {
			used = append(used, r.Ports...)
		}
	}
	return in.assignPorts(used, owner)
}

func (m *Manager) instanceFolders() []string {
	shared, _ := filepath.Glob(filepath.Join(m.state, "*"))
	extra, _ := filepath.Glob(filepath.Join(m.state, "throwaway", "*"))
	return append(shared, extra...)
}

// sweep removes throw-away instances whose test process is gone: a test that
// was killed runs no cleanup.
func (m *Manager) sweep() {
	for _, dir := range m.instanceFolders() {
		r, err := readRecord(dir)
		if err != nil || r.Owner == 0 || !errors.Is(syscall.Kill(r.Owner, 0), syscall.ESRCH) {
			continue
		}
		name, _, _ := strings.Cut(filepath.Base(dir), "-")
		def, err := define(Name(name))
		if err != nil {
			continue
		}
		m.logf("removing %s, whose test is gone", dir)
		if err := (&Instance{def: def, dir: dir, cache: m.cache, ports: r.Ports}).destroy(); err != nil {
			m.logf("%v", err)
		}
	}
}

// lock keeps other processes from bringing up the same servers meanwhile.
func (m *Manager) lock(ctx context.Context) (unlock func(), err error) {
	if err := os.MkdirAll(m.state, 0o755); err != nil {
		return nil, fmt.Errorf("services: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(m.state, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("services: %w", err)
	}
	err = poll(ctx, func() bool { return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil })
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("services: waiting for the process that holds %s: %w", f.Name(), err)
	}
	return func() { _ = f.Close() }, nil
}

func (m *Manager) composeMark(name Name) string {
	return filepath.Join(m.state, "compose-"+string(name))
}

func (m *Manager) composeUp(ctx context.Context, name Name) error {
	ctx, cancel := context.WithTimeout(ctx, composeLimit)
	defer cancel()
	if _, err := exec.LookPath("docker"); err != nil {
		return errors.New("there is no docker")
	}
	if err := run(ctx, m.root, "docker", "info"); err != nil {
		return errors.New("no Docker engine answers docker info")
	}
	if def, err := define(name); err != nil || def.standard == "" {
		return fmt.Errorf("compose.yaml holds no %s", name)
	}
	if err := os.WriteFile(m.composeMark(name), nil, 0o644); err != nil {
		return err
	}
	return run(ctx, m.root, "docker", "compose", "up", "-d", "--wait", string(name))
}

func (m *Manager) composeStop(ctx context.Context, name Name) error {
	if err := run(ctx, m.root, "docker", "compose", "rm", "--stop", "--force", string(name)); err != nil {
		return err
	}
	return os.Remove(m.composeMark(name))
}

// each calls f for every index of names at the same time.
func each(names []Name, f func(i int)) {
	var wg sync.WaitGroup
	for i := range names {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// indented prints an error with each line set in.
type indented struct{ error }

func (e indented) Error() string {
	return "  " + strings.ReplaceAll(e.error.Error(), "\n", "\n  ")
}

func (e indented) Unwrap() error { return e.error }
