package services

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// marker is set in the environment of every process of an instance. What an
// instance consists of is read from /proc by it: unlike a pid in a file it is
// never stale, and it covers daemons that left the process tree (epmd).
const marker = "SERVICES_INSTANCE="

const capDACOverride = 1 // CAP_DAC_OVERRIDE of <linux/capability.h>

type process struct {
	pid, parent int
	name        string
	member      bool
}

// processes returns the running processes of in.
func (in *Instance) processes() []process {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var all []process
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "stat"))
		if err != nil {
			continue // ended meanwhile
		}
		// The name may hold blanks and brackets: pid (name) state parent …
		open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
		fields := strings.Fields(string(stat[end+1:]))
		if open < 0 || len(fields) < 2 || fields[0] == "Z" || fields[0] == "X" {
			continue
		}
		p := process{pid: pid, name: string(stat[open+1 : end])}
		p.parent, _ = strconv.Atoi(fields[1])
		environ, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), "environ"))
		p.member = slices.Contains(strings.Split(string(environ), "\x00"), marker+in.dir)
		if !p.member && p.name == in.def.process {
			// The backends of PostgreSQL overwrite their environment with their
			// title, and those of a killed postmaster are nobody's children.
			cwd, _ := os.Readlink(filepath.Join("/proc", entry.Name(), "cwd"))
			p.member = cwd == in.data()
		}
		all = append(all, p)
	}
	return slices.DeleteFunc(all, func(p process) bool { return !p.member })
}

// signal sends s to every process of in until no new one turns up: one that
// forks meanwhile could leave a child behind.
func (in *Instance) signal(s syscall.Signal) error {
	sent := map[int]bool{}
	for {
		var fresh bool
		for _, p := range in.processes() {
			if sent[p.pid] {
				continue
			}
			fresh, sent[p.pid] = true, true
			if err := syscall.Kill(p.pid, s); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("services: signal %s, process %d: %w", in.def.name, p.pid, err)
			}
		}
		if !fresh {
			return nil
		}
	}
}

// confine prepares cmd to run as part of in.
func (in *Instance) confine(cmd *exec.Cmd) error {
	cmd.Env = append([]string{
		"PATH=" + os.Getenv("PATH") + ":/usr/sbin:/usr/bin:/sbin:/bin",
		"LANG=C.UTF-8", "HOME=" + in.dir, marker + in.dir,
	}, in.environment()...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // outlive the terminal and go run
	if in.def.user == "" || os.Geteuid() != 0 {
		return nil
	}
	account, err := user.Lookup(in.def.user)
	if err != nil {
		return err
	}
	uid, _ := strconv.Atoi(account.Uid)
	gid, _ := strconv.Atoi(account.Gid)
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	for dir := filepath.Dir(in.dir); dir != "/"; dir = filepath.Dir(dir) {
		if info, err := os.Stat(dir); err == nil && info.Mode()&0o001 == 0 {
			// A clone below /root: the account could not reach its own data.
			cmd.SysProcAttr.AmbientCaps = []uintptr{capDACOverride}
		}
	}
	return filepath.WalkDir(in.data(), func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, uid, gid)
	})
}
