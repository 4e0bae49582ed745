package services_test

import (
	"errors"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

const standardMariaDB = "root@tcp(127.0.0.1:3306)/test?parseTime=true"

func TestUpTakesTheFirstWayThatWorks(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	for name, test := range map[string]struct {
		fakes   services.Fakes
		source  services.Source
		value   string // "" if it is our own instance's
		tried   string
		started bool
	}{
		"environment goes first": {
			fakes: services.Fakes{
				Env:     map[string]string{"TEST_MARIADB_DSN": "u@tcp(db)/x"},
				Answers: map[string]bool{"u@tcp(db)/x": true, standardMariaDB: true}, Running: true,
			},
			source: services.Environment, value: "u@tcp(db)/x", tried: "probe",
		},
		"running own instance before the standard port": {
			fakes:  services.Fakes{Running: true, Answers: map[string]bool{standardMariaDB: true}},
			source: services.OwnInstance, tried: "probe",
		},
		"standard port before a new instance": {
			fakes:  services.Fakes{Answers: map[string]bool{standardMariaDB: true}},
			source: services.StandardPort, value: standardMariaDB, tried: "probe",
		},
		"a server of the wrong kind on the standard port is left alone": {
			fakes: services.Fakes{
				Answers: map[string]bool{standardMariaDB: true}, Unfit: map[string]bool{standardMariaDB: true},
			},
			source: services.OwnInstance, tried: "probe install start", started: true,
		},
		"new instance": {
			source: services.OwnInstance, tried: "probe install start", started: true,
		},
		"compose when installing fails": {
			fakes:  services.Fakes{Install: refused},
			source: services.Compose, value: standardMariaDB, tried: "probe install compose", started: true,
		},
		"compose when starting fails": {
			fakes:  services.Fakes{Start: refused},
			source: services.Compose, value: standardMariaDB, tried: "probe install start compose", started: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, own := open(t, &test.fakes)
			servers, err := m.Up(t.Context(), services.MariaDB)
			if err != nil {
				t.Fatal(err)
			}
			want := test.value
			if want == "" {
				want = own
			}
			got := servers[0]
			if got.Source != test.source || got.Started != test.started || got.Variables[0].Value != want {
				t.Errorf("got %+v, want %s from %s, started %t", got, want, test.source, test.started)
			}
			if tried := strings.Join(test.fakes.Tried, " "); tried != test.tried {
				t.Errorf("tried %q, want %q", tried, test.tried)
			}
		})
	}
}

func TestUpTellsWhyEachWayFailed(t *testing.T) {
	t.Parallel()
	fakes := &services.Fakes{
		Install: errors.New("apt-get needs root and this is not root"),
		Compose: errors.New("there is no docker"),
	}
	m, _ := open(t, fakes)
	servers, err := m.Up(t.Context(), services.MariaDB)
	if len(servers) != 0 || !errors.Is(err, services.ErrUnavailable) || !errors.Is(err, fakes.Install) {
		t.Fatalf("got %v, %v", servers, err)
	}
	const want = `services: server unavailable: mariadb:
  environment: TEST_MARIADB_DSN is not set
  own instance: none runs
  standard port: connection refused
  install: apt-get needs root and this is not root
  docker compose: there is no docker
Set TEST_MARIADB_DSN to a running server, or run as root on Debian, or start Docker`
	if err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
}

func TestUpNeverReplacesWhatTheEnvironmentNames(t *testing.T) {
	t.Parallel()
	fakes := &services.Fakes{
		Env:     map[string]string{"TEST_MARIADB_DSN": "u:secret@tcp(db)/x"},
		Answers: map[string]bool{standardMariaDB: true},
	}
	m, _ := open(t, fakes)
	_, err := m.Up(t.Context(), services.MariaDB)
	if !errors.Is(err, services.ErrUnavailable) || !strings.Contains(err.Error(), "unset TEST_MARIADB_DSN") {
		t.Fatalf("got %v", err)
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("%v shows the password", err)
	}
	if slices.Contains(fakes.Tried, "start") || slices.Contains(fakes.Tried, "compose") {
		t.Errorf("tried %v", fakes.Tried)
	}
}

func TestUpReturnsTheServersThatAreThere(t *testing.T) {
	t.Parallel()
	fakes := &services.Fakes{
		Env:     map[string]string{"TEST_AMQP_URL": "amqp://a/", "TEST_AMQP_MANAGEMENT_URL": "http://a"},
		Answers: map[string]bool{"amqp://a/": true},
		Install: errors.New("no"), Compose: errors.New("no"),
	}
	m, _ := open(t, fakes)
	servers, err := m.Up(t.Context(), services.AMQP, services.MySQL)
	if !errors.Is(err, services.ErrUnavailable) || len(servers) != 1 || servers[0].Name != services.AMQP {
		t.Fatalf("got %v, %v", servers, err)
	}
	want := []services.Variable{{Name: "TEST_AMQP_URL", Value: "amqp://a/"}, {Name: "TEST_AMQP_MANAGEMENT_URL", Value: "http://a"}}
	if !slices.Equal(servers[0].Variables, want) {
		t.Errorf("got %v, want %v", servers[0].Variables, want)
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	names, err := services.Parse(nil)
	if err != nil || !slices.Equal(names, services.Default()) {
		t.Errorf("nothing: got %v, %v", names, err)
	}
	names, err = services.Parse([]string{"redis", "kafka", "redis"})
	if err != nil || !slices.Equal(names, []services.Name{services.Redis, services.Kafka}) {
		t.Errorf("twice: got %v, %v", names, err)
	}
	if _, err = services.Parse([]string{"oracle"}); err == nil || !strings.Contains(err.Error(), "postgres") {
		t.Errorf("unknown: got %v, want an error that lists the names", err)
	}
}

func TestExportIsReadBackByTheShell(t *testing.T) {
	t.Parallel()
	v := services.Variable{Name: "X", Value: `it's $HOME "a" \ b`}
	out, err := exec.Command("sh", "-c", v.Export()+`; printf %s "$X"`).Output()
	if err != nil || string(out) != v.Value {
		t.Errorf("got %q, %v", out, err)
	}
}

func open(t *testing.T, fakes *services.Fakes) (m *services.Manager, own string) {
	t.Helper()
	m, err := services.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	fakes.Replace(m)
	if own, err = m.AssignPorts(services.MariaDB); err != nil {
		t.Fatal(err)
	}
	return m, own
}
