package services

import "context"

// Fakes stand for the means that Up has, so that the order in which it looks
// for a server can be tested without servers.
type Fakes struct {
	Env     map[string]string
	Answers map[string]bool // values that a probe reaches
	Unfit   map[string]bool // those of the wrong kind
	Running bool            // our own instance has a process
	Install error
	Start   error
	Compose error
	Tried   []string
}

// Replace puts f in the place of m's means.
func (f *Fakes) Replace(m *Manager) {
	m.ways = ways{
		getenv: func(name string) string { return f.Env[name] },
		probe: func(_ context.Context, def *definition, value string) error {
			f.Tried = append(f.Tried, "probe")
			if f.Answers[value] || f.Running && value == m.instance(def).Value() {
				return nil
			}
			return errRefused
		},
		suits: func(_ context.Context, _ *definition, value string) error {
			if f.Unfit[value] {
				return errUnfit
			}
			return nil
		},
		running: func(in *Instance) bool { return f.Running },
		install: func(context.Context, []*definition) func(context.Context, *definition) error {
			return func(context.Context, *definition) error {
				f.Tried = append(f.Tried, "install")
				return f.Install
			}
		},
		start: func(context.Context, *Instance) error {
			f.Tried = append(f.Tried, "start")
			return f.Start
		},
		compose: func(context.Context, Name) error {
			f.Tried = append(f.Tried, "compose")
			return f.Compose
		},
	}
}

// AssignPorts gives the shared instance an address without starting it.
func (m *Manager) AssignPorts(name Name) (value string, err error) {
	def, err := define(name)
	if err != nil {
		return "", err
	}
	in := m.instance(def)
	if err := m.assignPorts(in, 0); err != nil {
		return "", err
	}
	return in.Value(), nil
}

const (
	errRefused = constError("connection refused")
	errUnfit   = constError("not MariaDB")
)

type constError string

func (e constError) Error() string { return string(e) }
