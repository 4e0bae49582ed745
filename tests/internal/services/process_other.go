//go:build !linux

package services

import (
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
)

type process struct {
	pid, parent int
	name        string
}

func (in *Instance) processes() []process { return nil }

func (in *Instance) signal(syscall.Signal) error { return in.confine(nil) }

func (in *Instance) confine(*exec.Cmd) error {
	return fmt.Errorf("own instances need Linux, this is %s", runtime.GOOS)
}
