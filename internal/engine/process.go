package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// ProcessConfig says which engine to run, and how. Zero fields get the defaults named.
type ProcessConfig struct {
	// Command is the program and its arguments. It is not read by a shell.
	Command []string
	// Dir is where it runs; "" is here. Env is added to our own environment, of which an engine does not get what is the platform's: the variables MILLRACE_…, and AWS_… where MILLRACE_BLOB_URL is a bucket's.
	Dir string
	Env []string
	// Stdout and Stderr get its output as it comes; nil drops it. A writer that is no *os.File is written from one goroutine each.
	Stdout, Stderr io.Writer
	// Grace is the time between SIGTERM and SIGKILL on stop. Default 30 s.
	Grace time.Duration
	// MinRestart and MaxRestart bound the wait before a restart, which doubles from one to the other and begins anew once the engine ran for Steady.
	// Default 1 s, 60 s, 1 min.
	MinRestart, MaxRestart, Steady time.Duration
	// MaxExits is how many times in a row the engine may end before it ran for Steady: then Run gives up. 0 is any number.
	MaxExits int
}

// Process runs an engine as a child in a process group of its own, and starts it again whenever it ends.
type Process struct {
	cfg ProcessConfig
	log *slog.Logger

	mu    sync.Mutex // guards what follows
	exits int
	last  error
}

// NewProcess validates cfg, finds the program, and starts nothing.
func NewProcess(cfg ProcessConfig, log *slog.Logger) (*Process, error) {
	if len(cfg.Command) == 0 || cfg.Command[0] == "" {
		return nil, errors.New("the engine's command is empty")
	}
	if _, err := exec.LookPath(cfg.Command[0]); err != nil {
		return nil, fmt.Errorf("finding the engine's command: %w", err)
	}
	for _, f := range []struct {
		name     string
		value    *time.Duration
		fallback time.Duration
	}{
		{"Grace", &cfg.Grace, 30 * time.Second},
		{"MinRestart", &cfg.MinRestart, time.Second},
		{"MaxRestart", &cfg.MaxRestart, time.Minute},
		{"Steady", &cfg.Steady, time.Minute},
	} {
		switch {
		case *f.value < 0:
			return nil, fmt.Errorf("engine process %s is %s: want 0 for the default, or more", f.name, *f.value)
		case *f.value == 0:
			*f.value = f.fallback
		}
	}
	if cfg.MaxExits < 0 {
		return nil, fmt.Errorf("engine process MaxExits is %d: want 0 for any number, or more", cfg.MaxExits)
	}
	if cfg.MinRestart > cfg.MaxRestart {
		return nil, fmt.Errorf("engine process MinRestart %s is over MaxRestart %s", cfg.MinRestart, cfg.MaxRestart)
	}
	return &Process{cfg: cfg, log: log}, nil
}

// Exits counts how often the engine ended, or could not be started, without being told to stop.
func (p *Process) Exits() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exits
}

// LastExit says how the engine ended the last time, nil if it has not. An exit with status 0 is an error too: an engine is not to end.
func (p *Process) LastExit() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.last
}

// Run starts the engine and keeps it running until ctx ends; then it stops it and returns nil once the engine and all of its group are gone. An error says that it has given up.
func (p *Process) Run(ctx context.Context) error {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval, wait.Multiplier = p.cfg.MinRestart, p.cfg.MaxRestart, 2
	wait.Reset()
	inRow := 0
	for ctx.Err() == nil {
		started := time.Now()
		err := p.runOnce(ctx)
		if ctx.Err() != nil {
			break
		}
		ran := time.Since(started)
		if err == nil {
			err = errors.New("exit status 0")
		}
		p.mu.Lock()
		p.exits++
		p.last = err
		p.mu.Unlock()
		inRow++
		if ran >= p.cfg.Steady {
			wait.Reset()
			inRow = 0
		}
		if p.cfg.MaxExits > 0 && inRow >= p.cfg.MaxExits {
			return fmt.Errorf("the engine has ended %d times in a row: %w", inRow, err)
		}
		pause := wait.NextBackOff()
		p.log.Error("engine process ended", "err", err, "ran", ran, "restart_in", pause)
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
	}
	return nil //nolint:nilerr // to be told to stop is no error
}

// runOnce starts the engine and returns how it ended: by itself, or stopped because ctx ended. Nothing of its group lives on.
func (p *Process) runOnce(ctx context.Context) error {
	cmd := exec.Command(p.cfg.Command[0], p.cfg.Command[1:]...)
	cmd.Dir = p.cfg.Dir
	cmd.Env = append(withoutPlatform(os.Environ()), p.cfg.Env...)
	cmd.SysProcAttr = ownGroup()

	var pipes []*pipe
	defer func() {
		for _, w := range pipes {
			w.close()
		}
	}()
	for _, out := range []struct {
		to   io.Writer
		file *io.Writer
	}{{p.cfg.Stdout, &cmd.Stdout}, {p.cfg.Stderr, &cmd.Stderr}} {
		if _, isFile := out.to.(*os.File); isFile || out.to == nil {
			*out.file = out.to
			continue
		}
		w, err := newPipe(out.to)
		if err != nil {
			return err
		}
		pipes = append(pipes, w)
		*out.file = w.in
	}

	exited := make(chan error, 1)
	startErr := make(chan error, 1)
	go func() { // ends with the process
		// The kernel kills the child when the thread that started it ends, not the process: this one must stay.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		startErr <- err
		if err == nil {
			exited <- cmd.Wait()
		}
	}()
	if err := <-startErr; err != nil {
		return fmt.Errorf("starting the engine: %w", err)
	}
	for _, w := range pipes {
		w.started()
	}
	group := cmd.Process.Pid
	defer killGroup(group) // what the engine leaves behind would keep its port and its GPU memory
	select {
	case err := <-exited:
		return err
	case <-ctx.Done():
	}
	terminateGroup(group)
	timer := time.NewTimer(p.cfg.Grace)
	defer timer.Stop()
	select {
	case err := <-exited:
		return err
	case <-timer.C:
		p.log.Warn("engine process did not stop in time: killing it", "grace", p.cfg.Grace)
		killGroup(group)
		return <-exited
	}
}

// withoutPlatform is an environment without the platform's settings and secrets: an engine runs code that came with a model. It keeps the mark by which the provider of processes knows what belongs to a worker.
func withoutPlatform(env []string) []string {
	const prefix, mark, blobs = "MILLRACE_", "MILLRACE_INSTANCE=", "MILLRACE_BLOB_URL=s3:"
	bucket := slices.ContainsFunc(env, func(v string) bool { return strings.HasPrefix(v, blobs) })
	return slices.DeleteFunc(slices.Clone(env), func(v string) bool {
		return strings.HasPrefix(v, prefix) && !strings.HasPrefix(v, mark) || bucket && strings.HasPrefix(v, "AWS_")
	})
}

// pipe carries a child's output to a writer. Unlike the one of os/exec it does not hold up the wait for the child while a grandchild has it open.
type pipe struct {
	in, out *os.File
	copied  chan struct{} // closed when all is copied; nil before started
	to      io.Writer
}

func newPipe(to io.Writer) (*pipe, error) {
	out, in, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making a pipe for the engine's output: %w", err)
	}
	return &pipe{in: in, out: out, to: to}, nil
}

// started leaves the writing end to the child alone.
func (w *pipe) started() {
	_ = w.in.Close()
	w.copied = make(chan struct{})
	go func() { // ends by close
		defer close(w.copied)
		if _, err := io.Copy(w.to, w.out); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			_, _ = io.Copy(io.Discard, w.out) // the writer is broken: the engine must not block on it
		}
	}()
}

// close waits until what is in the pipe is copied. One who left the group may hold the other end: it gets a second.
func (w *pipe) close() {
	if w.copied == nil {
		_ = w.in.Close()
	} else {
		_ = w.out.SetReadDeadline(time.Now().Add(time.Second))
		<-w.copied
	}
	_ = w.out.Close()
}
