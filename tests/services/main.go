// Command services brings up the servers that the tests need.
//
//	go run ./tests/services up [NAME…]                start what is missing, print the variables
//	go run ./tests/services down [NAME…]              stop what up started, keep the data
//	go run ./tests/services env [NAME…]               print the variables of what runs
//	go run ./tests/services status [NAME…]            tell what runs where
//	go run ./tests/services run [NAME…] -- COMMAND…   up, COMMAND with the variables, down
//
// NAME is postgres, mariadb, amqp, kafka, redis (those five if none is given; down
// and status take all), amqp4 or mysql. Run stops only what it started itself
// and exits with the status of COMMAND; note that go run turns every status but
// 0 into 1.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/seed-2f56a981/watermill-idempotent/tests/internal/services"
)

const (
	usage     = "usage: go run ./tests/services up|down|env|status [NAME…] | run [NAME…] -- COMMAND [ARG…]"
	downLimit = 2 * time.Minute
)

func main() {
	code, err := command(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func command(args []string) (int, error) {
	if len(args) == 0 {
		return 2, errors.New(usage)
	}
	m, err := services.Open("")
	if err != nil {
		return 1, err
	}
	m.Log(func(format string, args ...any) { fmt.Fprintf(os.Stderr, "services: "+format+"\n", args...) })

	verb, args := args[0], args[1:]
	var argv []string
	if verb == "run" {
		i := slices.Index(args, "--")
		if i < 0 || i == len(args)-1 {
			return 2, errors.New(usage)
		}
		args, argv = args[:i], args[i+1:]
	}
	names, err := services.Parse(args)
	if err != nil {
		return 2, err
	}
	if len(args) == 0 && (verb == "down" || verb == "status") {
		names = services.All()
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	switch verb {
	case "up":
		return 0, up(ctx, m, names)
	case "down":
		return 0, down(ctx, m, names)
	case "env", "status":
		return 0, show(ctx, m, names, verb == "env")
	case "run":
		return run(ctx, m, names, argv)
	default:
		return 2, errors.New(usage)
	}
}

func up(ctx context.Context, m *services.Manager, names []services.Name) error {
	servers, err := m.Up(ctx, names...)
	for _, v := range variables(servers) {
		fmt.Println(v.Export())
	}
	if err == nil {
		fmt.Println(`# eval "$(go run ./tests/services env)" sets these; go run ./tests/services down stops what was started`)
	}
	return err
}

func down(ctx context.Context, m *services.Manager, names []services.Name) error {
	stopped, err := m.Down(ctx, names...)
	if len(stopped) > 0 {
		fmt.Fprintln(os.Stderr, "services: stopped", stopped)
	}
	return err
}

func show(ctx context.Context, m *services.Manager, names []services.Name, export bool) error {
	all, err := m.Status(ctx, names...)
	if err != nil {
		return err
	}
	for _, s := range all {
		var address string
		if s.Server != nil {
			for _, v := range s.Server.Variables {
				if export {
					fmt.Println(v.Export())
				}
			}
			address = s.Server.Variables[0].Name
		}
		if export {
			continue
		}
		source := string(s.Source)
		switch {
		case s.Source == services.OwnInstance:
			address = fmt.Sprintf("%s at %s, pid %d", address, s.Address, s.Pid)
		case s.Server == nil && s.Pid != 0:
			source, address = "no answer", fmt.Sprintf("%s, pid %d", s.Address, s.Pid)
		case s.Server == nil:
			source = "down"
		}
		fmt.Println(strings.TrimSpace(fmt.Sprintf("%-9s %-15s %s", s.Name, source, address)))
	}
	return nil
}

func run(ctx context.Context, m *services.Manager, names []services.Name, argv []string) (code int, err error) {
	servers, err := m.Up(ctx, names...)
	var started []services.Name
	for _, s := range servers {
		if s.Started {
			started = append(started, s.Name)
		}
	}
	defer func() {
		// Also after a signal, which has ended ctx.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downLimit)
		defer cancel()
		if len(started) > 0 {
			err = errors.Join(err, down(ctx, m, started))
		}
	}()
	if err != nil {
		return 1, err
	}

	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	// Not CommandContext: the command gets the signal itself and time to react.
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = os.Environ()
	for _, v := range variables(servers) {
		cmd.Env = append(cmd.Env, v.Name+"="+v.Value)
	}
	if err := cmd.Start(); err != nil {
		return 127, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for {
		select {
		case s := <-signals:
			_ = cmd.Process.Signal(s)
		case err := <-done:
			return status(err)
		}
	}
}

// status is the shell's: 128 plus the signal that ended the command.
func status(err error) (int, error) {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return 0, err
	}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return 128 + int(ws.Signal()), nil
	}
	return exit.ExitCode(), nil
}

func variables(servers []services.Server) []services.Variable {
	var all []services.Variable
	for _, s := range servers {
		all = append(all, s.Variables...)
	}
	return all
}
