//go:build unix

package process

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	rando "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// Provider runs workers as processes.
type Provider struct {
	cfg Config
	log *slog.Logger

	starting sync.Once
	forks    chan func() // for the thread that attached instances hang on; made when the first one starts
	ended    chan struct{}
	close    sync.Once
}

var _ provider.Provider = (*Provider)(nil)

// New validates cfg, makes the folder, and starts nothing.
func New(cfg Config, log *slog.Logger) (*Provider, error) {
	if cfg.Dir == "" {
		return nil, errors.New("no folder for the state of worker processes is given")
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("finding the folder of worker processes: %w", err)
	}
	cfg.Dir = dir
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of worker processes: %w", err)
	}
	if cfg.Binary == "" {
		if cfg.Binary, err = os.Executable(); err != nil {
			return nil, fmt.Errorf("finding the path of this program: %w", err)
		}
	}
	cfg.Grace = cmp.Or(cfg.Grace, defaultGrace)
	return &Provider{cfg: cfg, log: log, forks: make(chan func()), ended: make(chan struct{})}, nil
}

// Close lets instances run on, unless they are attached.
func (p *Provider) Close() error {
	p.close.Do(func() {
		p.starting.Do(func() { close(p.ended) }) // nothing was started
		close(p.forks)
		<-p.ended
	})
	return nil
}

// record is an instance's file.
type record struct {
	Pool  string `json:"pool"`
	Name  string `json:"name"`
	Token string `json:"token"`
	// PID is 0 until the process was started.
	PID  int   `json:"pid"`
	Port int   `json:"port,omitempty"`
	GPUs []int `json:"gpus,omitempty"`
	// Created and Stopping are when it was asked for and told to end.
	Created  time.Time `json:"created"`
	Stopping time.Time `json:"stopping,omitzero"`
	// Drain is what its pool had when it was started, which is the time that the worker takes.
	Drain time.Duration `json:"drain,omitempty"`
	// Exit is how its process ended, if that is known.
	Exit string `json:"exit,omitempty"`
}

// tokenVariable holds an instance's token in the environment of its processes.
const tokenVariable = "MILLRACE_INSTANCE"

func (p *Provider) path(pool, name, ext string) string {
	return filepath.Join(p.cfg.Dir, pool, name+ext)
}

// checkName refuses what is no single name of a file.
func checkName(what, name string) error {
	if name == "" || strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\\\x00") {
		return fmt.Errorf("%w: %s %q cannot be the name of a file", provider.ErrInvalid, what, name)
	}
	return nil
}

// lock takes the folder's lock, for a moment.
func (p *Provider) lock(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(p.cfg.Dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the folder of worker processes: %w", err)
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		if err = ctx.Err(); err != nil {
			break
		}
		if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			break
		}
		pause(ctx, wait)
	}
	_ = f.Close()
	return nil, fmt.Errorf("locking the folder of worker processes: %w", err)
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// load reads one instance's file; nil if there is none.
func (p *Provider) load(pool, name string) (*record, error) {
	raw, err := os.ReadFile(p.path(pool, name, ".json"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil //nolint:nilnil // none is an answer
	case err != nil:
		return nil, fmt.Errorf("reading the state of worker %s: %w", name, err)
	}
	r := &record{}
	if err := json.Unmarshal(raw, r); err != nil {
		return nil, fmt.Errorf("reading the state of worker %s in %s: %w: stop its process and remove the file", name, p.path(pool, name, ".json"), err)
	}
	return r, nil
}

// loadPool reads a pool's files, by name.
func (p *Provider) loadPool(pool string) ([]*record, error) {
	files, err := os.ReadDir(filepath.Join(p.cfg.Dir, pool))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading the workers of pool %s: %w", pool, err)
	}
	var all []*record
	for _, f := range files {
		name, ok := strings.CutSuffix(f.Name(), ".json")
		if !ok {
			continue
		}
		r, err := p.load(pool, name)
		if err != nil {
			return nil, err
		}
		if r != nil {
			all = append(all, r)
		}
	}
	return all, nil
}

// loadAll reads the files of all pools.
func (p *Provider) loadAll() ([]*record, error) {
	pools, err := os.ReadDir(p.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("reading the folder of worker processes: %w", err)
	}
	var all []*record
	for _, pool := range pools {
		if !pool.IsDir() {
			continue
		}
		some, err := p.loadPool(pool.Name())
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

// save writes an instance's file, whole or not at all.
func (p *Provider) save(r *record) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("writing the state of worker %s: %w", r.Name, err)
	}
	path := p.path(r.Pool, r.Name, ".json")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("writing the state of worker %s: %w", r.Name, err)
	}
	// Whoever reads holds the lock, so that one name for what is being written is enough.
	if err := write(path+".new", raw); err != nil {
		return fmt.Errorf("writing the state of worker %s: %w", r.Name, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("writing the state of worker %s: %w", r.Name, err)
	}
	return nil
}

// write writes a file, and returns once the disk has it: what is renamed after that is whole even if the machine fails.
func write(path string, raw []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(raw); err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// heal finds the process of a record whose writer ended before it wrote its id. The lock is held: nobody is about to write it.
func (p *Provider) heal(r *record) error {
	if r.PID != 0 {
		return nil
	}
	pid, err := find(r.Token, r.Name)
	if err != nil || pid == 0 {
		return err
	}
	r.PID = pid
	return p.save(r)
}

// alive tells whether the instance's process runs; an error is that it cannot be told. It takes leave of one that has ended, if it was ours.
func (p *Provider) alive(r *record) (bool, error) {
	if r.PID == 0 {
		return false, nil
	}
	var status syscall.WaitStatus
	switch pid, err := syscall.Wait4(r.PID, &status, syscall.WNOHANG, nil); {
	case err != nil: // no child of ours
		return has(r.PID, r.Token, r.Name)
	case pid == 0:
		if ending(r.PID) {
			return true, nil
		}
		return has(r.PID, r.Token, r.Name)
	}
	r.Exit = exitText(status)
	return false, nil
}

// exitText says how a process ended.
func exitText(s syscall.WaitStatus) string {
	if s.Signaled() {
		return "killed by signal " + s.Signal().String()
	}
	return "ended with code " + strconv.Itoa(s.ExitStatus())
}

// List says of each instance of the pool whether its process runs.
func (p *Provider) List(ctx context.Context, pool *scale.Pool) ([]provider.Instance, error) {
	if err := checkName("the pool", pool.Name); err != nil {
		return nil, err
	}
	unlock, err := p.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	records, err := p.loadPool(pool.Name)
	if err != nil {
		return nil, err
	}
	all := make([]provider.Instance, 0, len(records))
	for _, r := range records {
		if err := p.heal(r); err != nil {
			return nil, err
		}
		known := r.Exit
		i := provider.Instance{Name: r.Name, State: provider.Running, Created: r.Created}
		alive, err := p.alive(r)
		if err != nil {
			return nil, err
		}
		if r.Exit != known {
			if err := p.save(r); err != nil { // what our parent's wait told is told once
				return nil, err
			}
		}
		switch {
		case !r.Stopping.IsZero():
			i.State = provider.Stopping
		case r.PID == 0: // nothing is wrong with it: the next Start makes it
			i.State, i.Reason = provider.Pending, "the autoscaler ended while it started this worker"
		case !alive:
			i.State, i.Reason = provider.Failed, p.reason(r, pool)
		}
		if err := bound(p.path(r.Pool, r.Name, ".log")); err != nil {
			p.log.Warn("a worker's log is not kept short", "worker", r.Name, "err", err) // its disk is full, or worse: the worker is worth more
		}
		all = append(all, i)
	}
	return all, nil
}

// reason says why an instance does not run any more: how it ended, and the last that it said.
func (p *Provider) reason(r *record, pool *scale.Pool) string {
	said := provider.Clean(lastLines(p.path(r.Pool, r.Name, ".log")), pool, p.cfg.Join)
	exit := cmp.Or(r.Exit, "its process has ended")
	if said == "" {
		return exit + ", and said nothing"
	}
	return exit + ": " + said
}

// logTail is how much of a log is kept once it has grown beyond logBytes.
const (
	logBytes = 16 << 20
	logTail  = 1 << 20
)

// bound cuts a log that has grown too long down to its end. Its writers append, so that they go on behind that.
func bound(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.Size() <= logBytes {
		return nil //nolint:nilerr // no log is a short one
	}
	tail, err := tailOf(path, logTail)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(tail)
	return errors.Join(err, f.Close())
}

// tailOf reads the last n bytes of a file.
func tailOf(path string, n int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // it was read
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-n), n))
}

// lastLines are the last ones that a person would read: the engine's, and how the worker ended, without the worker's log.
func lastLines(path string) string {
	raw, err := tailOf(path, 8<<10)
	if err != nil {
		return ""
	}
	var lines []string
	for line := range strings.Lines(string(raw)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, `{"time":`) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// Start starts a process under the name, unless there is one. What a start that was cut off has left of it is made anew.
func (p *Provider) Start(ctx context.Context, pool *scale.Pool, name string, _ int) error {
	if err := p.check(pool, name); err != nil {
		return err
	}
	unlock, err := p.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	r, err := p.load(pool.Name, name)
	if err != nil {
		return err
	}
	if r != nil {
		if err := p.heal(r); err != nil || r.PID != 0 {
			return err
		}
		if err := os.Remove(p.path(pool.Name, name, ".json")); err != nil { // with its port and its GPUs
			return fmt.Errorf("starting worker %s anew: %w", name, err)
		}
	}
	r = &record{Pool: pool.Name, Name: name, Token: rand.Text(), Created: time.Now().UTC().Truncate(time.Millisecond), Drain: time.Duration(pool.Drain)}
	if err := p.reserve(r, pool); err != nil {
		return err
	}
	if err := p.save(r); err != nil {
		return err
	}
	// If we crash from here on, whoever looks next finds the process by its token, or that there is none.
	if r.PID, err = p.fork(r, pool); err != nil {
		_ = os.Remove(p.path(pool.Name, name, ".log")) // it is empty, if it is there at all
		return errors.Join(fmt.Errorf("starting worker %s: %w", name, err), os.Remove(p.path(pool.Name, name, ".json")))
	}
	return p.save(r)
}

// check refuses what cannot work.
func (p *Provider) check(pool *scale.Pool, name string) error {
	if err := errors.Join(checkName("the pool", pool.Name), checkName("the worker", name)); err != nil {
		return err
	}
	if n := p.cfg.GPUs; n > 0 && pool.Shape.GPUs > n {
		return fmt.Errorf("%w: shape.gpus of pool %s is %d, and this machine has %d", provider.ErrInvalid, pool.Name, pool.Shape.GPUs, n)
	}
	if len(pool.Engine.Command) == 0 {
		if provider.NeedsPort(pool) {
			return fmt.Errorf("%w: pool %s has no engine.command, which starts the engine, and no engine.url of one that runs", provider.ErrInvalid, pool.Name)
		}
		return nil
	}
	program := (provider.Place{Millrace: p.cfg.Binary}).Fill(pool, pool.Engine.Command[0])
	if _, ok := pool.Engine.Env["PATH"]; ok {
		return nil // it is found on another one
	}
	if _, err := exec.LookPath(program); err != nil {
		return fmt.Errorf("%w: engine.command of pool %s names no program of this machine: %w", provider.ErrInvalid, pool.Name, err)
	}
	return nil
}

// reserve gives the instance a port and GPUs that no other one of this machine has.
func (p *Provider) reserve(r *record, pool *scale.Pool) error {
	all, err := p.loadAll()
	if err != nil {
		return err
	}
	ports, gpus := map[int]bool{}, map[int]bool{}
	for _, other := range all {
		if err := p.heal(other); err != nil {
			return err
		}
		if gone, err := ended(other); err != nil {
			return err
		} else if gone {
			continue
		}
		ports[other.Port] = true
		for _, g := range other.GPUs {
			gpus[g] = true
		}
	}
	if provider.NeedsPort(pool) {
		if r.Port, err = freePort(ports); err != nil {
			return err
		}
	}
	for g := 0; len(r.GPUs) < pool.Shape.GPUs; g++ {
		if p.cfg.GPUs > 0 && g >= p.cfg.GPUs {
			return fmt.Errorf("%w: %d of this machine's %d GPUs are free, and a worker of pool %s takes %d", provider.ErrCapacity, len(r.GPUs), p.cfg.GPUs, pool.Name, pool.Shape.GPUs)
		}
		if !gpus[g] {
			r.GPUs = append(r.GPUs, g)
		}
	}
	return nil
}

// ended tells whether nothing is left of an instance: its engine may outlive its worker, on the port and the GPUs that it has.
func ended(r *record) (bool, error) {
	if r.PID == 0 {
		return false, nil // it is tidied away before long
	}
	if alive, err := has(r.PID, r.Token, r.Name); err != nil || alive {
		return false, err
	}
	left, err := leftovers(r.Token)
	return len(left) == 0, err
}

// Ports of engines lie below those that systems give to outgoing connections: none of these takes one before its engine listens.
const (
	firstPort = 30_000
	lastPort  = 32_700
)

// freePort finds a port that nobody listens on.
func freePort(taken map[int]bool) (int, error) {
	for range 1000 {
		port := firstPort + rando.IntN(lastPort-firstPort)
		if taken[port] {
			continue
		}
		if l, err := net.Listen("tcp", ":"+strconv.Itoa(port)); err == nil {
			return port, l.Close()
		}
	}
	return 0, fmt.Errorf("%w: no port between %d and %d is free", provider.ErrCapacity, firstPort, lastPort)
}

// passed are the variables of our own environment that workers and engines get. What else an engine needs stands in its pool.
var passed = []string{
	"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH", "CUDA_HOME", "HF_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR",
	"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
}

// environment of an instance.
func (p *Provider) environment(r *record, pool *scale.Pool) []string {
	env := map[string]string{}
	for _, name := range passed {
		if v, ok := os.LookupEnv(name); ok {
			env[name] = v
		}
	}
	for name, v := range pool.Engine.Env {
		env[name] = v
	}
	if len(r.GPUs) > 0 {
		env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"] = joined(r.GPUs), "PCI_BUS_ID"
	}
	for name, v := range p.cfg.Join {
		env[name] = v
	}
	env[tokenVariable] = r.Token
	var list []string
	for name, v := range env {
		list = append(list, name+"="+v)
	}
	slices.Sort(list)
	return list
}

func joined(gpus []int) string {
	var all []string
	for _, g := range gpus {
		all = append(all, strconv.Itoa(g))
	}
	return strings.Join(all, ",")
}

// fork starts the instance's process and returns its id.
func (p *Provider) fork(r *record, pool *scale.Pool) (int, error) {
	place := provider.Place{GPUs: joined(r.GPUs), Millrace: p.cfg.Binary}
	if r.Port != 0 {
		place.Port = strconv.Itoa(r.Port)
	}
	args := append(place.WorkerArgs(pool, r.Name), p.cfg.Args...)
	if command := place.EngineCommand(pool); len(command) > 0 {
		args = append(append(args, "--"), command...)
	}
	out, err := os.OpenFile(p.path(r.Pool, r.Name, ".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return 0, fmt.Errorf("making its log: %w", err)
	}
	defer out.Close() //nolint:errcheck // the process has its own
	cmd := exec.Command(p.cfg.Binary, args...)
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = p.environment(r, pool), out, out, detached(p.cfg.Attached)
	if !p.cfg.Attached {
		return start(cmd)
	}
	p.starting.Do(func() { go p.thread() })
	type started struct {
		pid int
		err error
	}
	done := make(chan started, 1)
	p.forks <- func() {
		pid, err := start(cmd)
		done <- started{pid, err}
	}
	s := <-done
	return s.pid, s.err
}

// thread starts attached instances until Close. The kernel tells them to end when the thread that started them does.
func (p *Provider) thread() {
	defer close(p.ended)
	runtime.LockOSThread() // and never unlocked: the thread ends with this
	for f := range p.forks {
		f()
	}
}

// start starts a command for which nobody waits: List and Stop take leave of it.
func start(cmd *exec.Cmd) (int, error) {
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	pid := cmd.Process.Pid
	return pid, cmd.Process.Release()
}

// Stop tells the worker to end, once, and waits until all of the instance's processes are gone. They are killed after the pool's Drain, or the longer one that the worker was started with, and the grace in which a worker gives back what has not ended.
func (p *Provider) Stop(ctx context.Context, pool *scale.Pool, name string) error {
	return p.stop(ctx, pool, name, func(r *record) time.Duration { return max(r.Drain, time.Duration(pool.Drain)) })
}

func (p *Provider) stop(ctx context.Context, pool *scale.Pool, name string, patience func(*record) time.Duration) error {
	if err := errors.Join(checkName("the pool", pool.Name), checkName("the worker", name)); err != nil {
		return err
	}
	r, err := p.tell(ctx, pool.Name, name)
	if err != nil || r == nil {
		return err
	}
	drain := patience(r)
	deadline := r.Stopping.Add(drain + p.cfg.Grace)
	killed := false
	for {
		alive, err := p.alive(r)
		if err != nil {
			return err
		}
		if !alive {
			break
		}
		if time.Now().After(deadline) {
			if !killed {
				p.log.Warn("worker did not end in time: killing it", "pool", pool.Name, "worker", name, "drain", drain.String())
			}
			killed = true
			_ = syscall.Kill(r.PID, syscall.SIGKILL) // one that is gone needs none
		}
		if pause(ctx, 20*time.Millisecond); ctx.Err() != nil {
			return fmt.Errorf("waiting for worker %s to end: %w", name, ctx.Err())
		}
	}
	// What an engine leaves behind would keep its port and its GPU memory.
	for {
		left, err := leftovers(r.Token)
		if err != nil {
			return err
		}
		if len(left) == 0 {
			break
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil) // process 1 inherits them
		}
		if pause(ctx, 10*time.Millisecond); ctx.Err() != nil {
			return fmt.Errorf("waiting for what worker %s has left to end: %w", name, ctx.Err())
		}
	}
	return p.forget(ctx, r)
}

// tell tells an instance to end, if nobody has, and returns its record; nil if there is none. A second signal would end it at once.
func (p *Provider) tell(ctx context.Context, pool, name string) (*record, error) {
	unlock, err := p.lock(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()
	r, err := p.load(pool, name)
	if err != nil || r == nil {
		return nil, err
	}
	if err := p.heal(r); err != nil {
		return nil, err
	}
	if !r.Stopping.IsZero() {
		return r, nil
	}
	if alive, err := p.alive(r); err != nil {
		return nil, err
	} else if !alive {
		return r, nil
	}
	r.Stopping = time.Now().UTC()
	if err := p.save(r); err != nil {
		return nil, err
	}
	// If we crash here, it is not told, and is killed when its drain is over: its jobs run again.
	if err := syscall.Kill(r.PID, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return nil, fmt.Errorf("telling worker %s to end: %w", name, err)
	}
	return r, nil
}

// forget removes an instance's file. The log of one that failed stays until the next of its pool fails.
func (p *Provider) forget(ctx context.Context, r *record) error {
	unlock, err := p.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if now, err := p.load(r.Pool, r.Name); err != nil || now == nil || now.Token != r.Token {
		return err // another one was faster
	}
	log := p.path(r.Pool, r.Name, ".log")
	if r.Stopping.IsZero() {
		err = os.Rename(log, filepath.Join(p.cfg.Dir, r.Pool, "failed.log"))
	} else {
		err = os.Remove(log)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("putting the log of worker %s away: %w", r.Name, err)
	}
	if err := os.Remove(p.path(r.Pool, r.Name, ".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the state of worker %s: %w", r.Name, err)
	}
	return nil
}

// StopAll stops the instances of all pools at the same time, with drain in place of their pools'.
func (p *Provider) StopAll(ctx context.Context, drain time.Duration) error {
	unlock, err := p.lock(ctx)
	if err != nil {
		return err
	}
	all, err := p.loadAll()
	unlock()
	if err != nil {
		return err
	}
	errs := make([]error, len(all))
	var stopping sync.WaitGroup
	for i, r := range all {
		stopping.Go(func() {
			errs[i] = p.stop(ctx, &scale.Pool{Name: r.Pool}, r.Name, func(*record) time.Duration { return drain })
		})
	}
	stopping.Wait()
	return errors.Join(errs...)
}
