// Package command starts, stops and lists workers by an operator's own programs.
//
// # Commands
//
// No shell reads the commands. Each gets the autoscaler's environment without its own settings, and with what a worker needs to join the platform; so a program that starts a worker may hand its environment on, in which MILLRACE_NAME gives the worker its name. It is killed, with all of its
// process group, after the pool's timeout; a stop gets the pool's drain in addition. Start and stop may be called again for what is done already, after a crash or a time-out: they are idempotent by the worker's name.
//
// Exit codes: 0 is done, 75 that there is no room now, 78 that it cannot work whenever it is tried; others are tried again. The last line that a failed program wrote is shown to people.
package command

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// Exit codes that mean something, as sysexits.h names them.
const (
	exitNoRoom  = 75 // EX_TEMPFAIL
	exitInvalid = 78 // EX_CONFIG
)

// Config of a Provider. Zero works.
type Config struct {
	// Join is what workers need to join the platform.
	Join provider.Join
}

// Provider runs the commands that pools name.
type Provider struct {
	join provider.Join
	log  *slog.Logger
}

var _ provider.Provider = (*Provider)(nil)

// New starts nothing.
func New(cfg Config, log *slog.Logger) *Provider { return &Provider{cfg.Join, log} }

// Close does nothing.
func (p *Provider) Close() error { return nil }

// Start runs the pool's start command.
func (p *Provider) Start(ctx context.Context, pool *scale.Pool, name string, _ int) error {
	_, err := p.run(ctx, pool, "start", name, 0)
	return err
}

// Stop runs the pool's stop command, which has the pool's drain in addition to its time-out.
func (p *Provider) Stop(ctx context.Context, pool *scale.Pool, name string) error {
	_, err := p.run(ctx, pool, "stop", name, time.Duration(pool.Drain))
	return err
}

// List runs the pool's list command and reads what it prints.
func (p *Provider) List(ctx context.Context, pool *scale.Pool) ([]provider.Instance, error) {
	out, err := p.run(ctx, pool, "list", "", 0)
	if err != nil {
		return nil, err
	}
	all, err := p.parse(out, pool)
	if err != nil {
		return nil, fmt.Errorf("reading what command.list of pool %s prints: %w", pool.Name, err)
	}
	return all, nil
}

// parse reads a line per worker: its name, its state, and why, if it likes.
func (p *Provider) parse(out []byte, pool *scale.Pool) ([]provider.Instance, error) {
	var all []provider.Instance
	n := 0
	for line := range strings.Lines(string(out)) {
		n++
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		shown := provider.Clean(line, pool, p.join)
		if len(words) == 1 {
			return nil, fmt.Errorf("line %d is %q: it must be a worker's name and its state", n, shown)
		}
		i := provider.Instance{Name: words[0], State: provider.State(words[1]), Reason: provider.Clean(strings.Join(words[2:], " "), pool, p.join)}
		switch i.State {
		case provider.Pending, provider.Running, provider.Stopping, provider.Failed:
		default:
			return nil, fmt.Errorf("line %d is %q: the state must be pending, running, stopping or failed", n, shown)
		}
		if i.State == provider.Failed && i.Reason == "" {
			i.Reason = "command.list calls it failed"
		}
		all = append(all, i)
	}
	slices.SortFunc(all, func(a, b provider.Instance) int { return cmp.Compare(a.Name, b.Name) })
	for k := 1; k < len(all); k++ {
		if all[k].Name == all[k-1].Name {
			return nil, fmt.Errorf("worker %q is listed twice", all[k].Name)
		}
	}
	return all, nil
}

// Bounds.
const (
	defaultTimeout = 2 * time.Minute
	maxOutput      = 1 << 20
	tailBytes      = 4 << 10
	// waitDelay is how long the output of a program that has ended is read on, while something that it left behind holds it.
	waitDelay = time.Second
)

// run runs one of the pool's commands and returns what it printed. more is added to its time-out.
func (p *Provider) run(ctx context.Context, pool *scale.Pool, which, name string, more time.Duration) ([]byte, error) {
	if pool.Command == nil {
		return nil, fmt.Errorf("%w: pool %s names no command", provider.ErrInvalid, pool.Name)
	}
	template := map[string][]string{"start": pool.Command.Start, "stop": pool.Command.Stop, "list": pool.Command.List}[which]
	if len(template) == 0 {
		return nil, fmt.Errorf("%w: command.%s of pool %s is missing", provider.ErrInvalid, which, pool.Name)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("running command.%s of pool %s: %w", which, pool.Name, err)
	}
	fill := strings.NewReplacer("{pool}", pool.Name, "{worker}", name)
	args := make([]string, len(template))
	for i, arg := range template {
		args[i] = fill.Replace(arg)
	}
	timeout := cmp.Or(time.Duration(pool.Command.Timeout), defaultTimeout) + more
	timed, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(timed, args[0], args[1:]...)
	cmd.Env = p.environment(pool, name)
	cmd.WaitDelay = waitDelay
	ownGroup(cmd)
	out, tail := &head{limit: maxOutput}, &tail{limit: tailBytes}
	cmd.Stdout, cmd.Stderr = io.MultiWriter(out, tail), tail
	err := cmd.Run()
	what := fmt.Sprintf("running command.%s of pool %s", which, pool.Name)
	var exit *exec.ExitError
	switch {
	case errors.Is(err, exec.ErrWaitDelay):
		// What it started still writes to it, and will find that nobody reads.
		p.log.Warn("a command's output is held by what it left running: have it write elsewhere", "pool", pool.Name, "command", which)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s: %w", what, ctx.Err())
	case timed.Err() != nil:
		return nil, fmt.Errorf("%s: it has not ended after %v: make it faster, or command.timeout longer%s", what, timeout, p.said(tail, pool))
	case errors.As(err, &exit):
		switch code := exit.ExitCode(); code {
		case exitNoRoom:
			return nil, fmt.Errorf("%w: %s: exit code %d%s", provider.ErrCapacity, what, code, p.said(tail, pool))
		case exitInvalid:
			return nil, fmt.Errorf("%w: %s: exit code %d%s", provider.ErrInvalid, what, code, p.said(tail, pool))
		}
		return nil, fmt.Errorf("%s: %w%s", what, exit, p.said(tail, pool))
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("%w: %s: %w: name a program that can be run here", provider.ErrInvalid, what, err)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if out.more {
		return nil, fmt.Errorf("%s: it prints more than %d bytes", what, maxOutput)
	}
	return out.text, nil
}

// said is the last line that a program wrote, to be put behind an error.
func (p *Provider) said(t *tail, pool *scale.Pool) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := bytes.TrimSpace(t.text)
	text = text[bytes.LastIndexByte(text, '\n')+1:]
	if len(text) == 0 {
		return ", and it says nothing"
	}
	return ": " + provider.Clean(string(text), pool, p.join)
}

// environment of a command: ours without our settings, some of which are secrets that no worker needs.
func (p *Provider) environment(pool *scale.Pool, name string) []string {
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "MILLRACE_") {
			env = append(env, v)
		}
	}
	// Of several of one name the last counts.
	for _, more := range []map[string]string{pool.Engine.Env, p.join, {"MILLRACE_POOL": pool.Name, "MILLRACE_WORKER": name, "MILLRACE_NAME": name, "MILLRACE_DRAIN": time.Duration(pool.Drain).String()}} {
		for _, key := range slices.Sorted(maps.Keys(more)) {
			env = append(env, key+"="+more[key])
		}
	}
	return env
}

// head keeps the beginning of what is written to it.
type head struct {
	limit int
	text  []byte
	more  bool
}

func (h *head) Write(b []byte) (int, error) {
	n := min(len(b), h.limit-len(h.text))
	h.text = append(h.text, b[:n]...)
	h.more = h.more || n < len(b)
	return len(b), nil
}

// tail keeps the end of what is written to it, by several at a time.
type tail struct {
	limit int
	mu    sync.Mutex // guards text
	text  []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, b...)
	if n := len(t.text) - t.limit; n > 0 {
		t.text = append(t.text[:0], t.text[n:]...)
	}
	return len(b), nil
}
