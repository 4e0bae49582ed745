package services

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

const kafkaPOM = `<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>services</groupId><artifactId>kafka</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>` + kafkaVersion + `</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
`

// installer brings the software of several servers with one apt-get call.
type installer struct {
	cache string
	apt   func() error // runs once, whoever calls first
}

func newInstaller(ctx context.Context, cache string, log func(string, ...any), defs []*definition) *installer {
	var packages []string
	for _, def := range defs {
		if len(def.missing()) > 0 {
			packages = append(packages, def.packages...)
		}
	}
	slices.Sort(packages)
	packages = slices.Compact(packages)
	return &installer{cache, sync.OnceValue(func() error {
		log("installing %s", strings.Join(packages, " "))
		return aptInstall(ctx, packages)
	})}
}

func (def *definition) missing() []string {
	var programs []string
	for _, program := range def.programs {
		if find(program) == "" {
			programs = append(programs, program)
		}
	}
	return programs
}

func (i *installer) install(ctx context.Context, def *definition) error {
	if missing := def.missing(); len(missing) > 0 {
		if err := i.apt(); err != nil {
			return fmt.Errorf("install %s (no %s here): %w", strings.Join(def.packages, " "), strings.Join(missing, ", "), err)
		}
		if missing := def.missing(); len(missing) > 0 {
			return fmt.Errorf("the packages %s hold no %s", strings.Join(def.packages, " "), strings.Join(missing, ", "))
		}
	}
	if def.fetch == nil {
		return nil
	}
	return def.fetch(ctx, i.cache)
}

func aptInstall(ctx context.Context, packages []string) (err error) {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return errors.New("there is no apt-get: installing works on Debian only")
	}
	if os.Geteuid() != 0 {
		return errors.New("apt-get needs root and this is not root")
	}
	restore, err := forbidDaemons()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()

	install := append([]string{"install", "-y", "--no-install-recommends"}, packages...)
	if lists, _ := filepath.Glob("/var/lib/apt/lists/*_Packages*"); len(lists) > 0 {
		if apt(ctx, install...) == nil {
			return nil
		} // else the lists may be too old
	}
	if err := apt(ctx, "update"); err != nil {
		return err
	}
	return apt(ctx, install...)
}

func apt(ctx context.Context, args ...string) error {
	return run(ctx, "", append([]string{"apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"}, args...)...)
}

// forbidDaemons keeps packages from starting a daemon while they are installed.
// The function that it returns restores what was there before.
func forbidDaemons() (restore func() error, err error) {
	const policy, aside = "/usr/sbin/policy-rc.d", "/usr/sbin/policy-rc.d.before-services"
	if _, err := os.Lstat(aside); err != nil { // else one that was killed has put it aside
		if err := os.Rename(policy, aside); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
	}
	restore = func() error {
		if _, err := os.Lstat(aside); err == nil {
			return os.Rename(aside, policy)
		}
		return os.Remove(policy)
	}
	if err := os.WriteFile(policy, []byte("#!/bin/sh\nexit 101\n"), 0o755); err != nil {
		return nil, errors.Join(err, restore())
	}
	return restore, nil
}

func fetchKafka(ctx context.Context, cache string) error {
	return once(filepath.Join(cache, kafkaFolder), func(dir string) error {
		pom := filepath.Join(dir, "pom.xml")
		if err := os.WriteFile(pom, []byte(kafkaPOM), 0o644); err != nil {
			return err
		}
		return run(ctx, dir, "mvn", "-q", "-B", "-f", pom,
			"org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies",
			"-DoutputDirectory="+dir, "-DincludeScope=runtime")
	})
}

// debootstrap returns a function that unpacks another Debian release with one
// more package into a folder of the cache.
func debootstrap(release, pkg, folder string) func(context.Context, string) error {
	return func(ctx context.Context, cache string) error {
		if os.Geteuid() != 0 {
			return errors.New("debootstrap and chroot need root and this is not root")
		}
		return once(filepath.Join(cache, folder), func(dir string) error {
			uri, err := debianURI(ctx)
			if err != nil {
				return err
			}
			if err := os.Chmod(dir, 0o755); err != nil {
				return err
			}
			return run(ctx, "", "debootstrap", "--variant=minbase", "--include="+pkg, release, dir, uri)
		})
	}
}

// debianURI returns the archive that apt itself uses.
func debianURI(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("apt-get indextargets: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		if uri, ok := strings.CutPrefix(strings.TrimSpace(line), "Debian|Debian|"); ok {
			return uri, nil
		}
	}
	return "", errors.New("apt's sources name no Debian archive (apt-get update?)")
}

// once lets fill write a folder that appears under its name only when complete.
func once(dir string, fill func(dir string) error) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	unfinished, err := os.MkdirTemp(filepath.Dir(dir), filepath.Base(dir)+".")
	if err != nil {
		return err
	}
	if err = fill(unfinished); err == nil {
		err = os.Rename(unfinished, dir)
	}
	if err == nil {
		return nil
	}
	err = errors.Join(err, os.RemoveAll(unfinished))
	if _, statErr := os.Stat(dir); statErr == nil {
		return nil // another clone was faster
	}
	return err
}

// run runs a command and puts the end of its output into the error.
func run(ctx context.Context, dir string, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	// A killed apt-get leaves half-configured packages behind.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv[:min(2, len(argv))], " "), err,
			strings.Join(lines[max(0, len(lines)-tailLines):], "\n"))
	}
	return nil
}
