package batch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/ledger"
)

// child is a process of the run.
type child struct {
	role string
	cmd  *exec.Cmd
	// ended is closed when it has ended, with err.
	ended chan struct{}
	err   error
	out   *output
	idle  int64
}

// grace is how long a child may take to end.
const grace = 10 * time.Second

// spawn starts a child and returns. env is added to its environment.
func spawn(role string, command []string, env ...string) (*child, error) {
	c := &child{role: role, cmd: exec.Command(command[0], command[1:]...), ended: make(chan struct{}), out: &output{found: make(chan string, 1)}}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stderr, c.cmd.Stdout = c.out, c.out
	c.cmd.SysProcAttr = dieWithParent()
	started := make(chan error, 1)
	go func() {
		defer close(c.ended)
		runtime.LockOSThread() // the child lives as long as the thread that made it
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		started <- err
		if err == nil {
			c.err = c.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting the %s: %w", role, err)
	}
	return c, nil
}

// await waits until the child has said where it listens.
func (c *child) await(ctx context.Context) (string, error) {
	select {
	case addr := <-c.out.found:
		return addr, nil
	case <-c.ended:
		return "", fmt.Errorf("the %s ended: %w: %s", c.role, c.err, c.out.last())
	case <-ctx.Done():
		return "", fmt.Errorf("waiting for the %s: %w: %s", c.role, ctx.Err(), c.out.last())
	}
}

// stop ends it and waits for that.
func (c *child) stop() {
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.ended:
	case <-time.After(grace):
		_ = c.cmd.Process.Kill()
		<-c.ended
	}
}

// memory reads what the child holds now and the most that it has held, in bytes; 0 where that cannot be known.
func (c *child) memory() (now, peak int64) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		return 0, 0
	}
	for line := range bytes.Lines(raw) {
		name, value, _ := strings.Cut(string(line), ":")
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		switch {
		case err != nil:
		case name == "VmRSS":
			now = kib << 10
		case name == "VmHWM":
			peak = kib << 10
		}
	}
	return now, peak
}

// output finds in a child's log where it listens, and keeps the end of it.
type output struct {
	found chan string

	mu   sync.Mutex // guards what follows
	text []byte
	seen int // up to here its lines were looked at
	done bool
}

// keptOutput bounds what is kept of a log, in bytes.
const keptOutput = 64 << 10

// Write takes a part of the log.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, p...)
	for !o.done {
		line, _, whole := bytes.Cut(o.text[o.seen:], []byte("\n"))
		if !whole {
			break
		}
		o.seen += len(line) + 1
		var entry struct{ Msg, Addr string }
		if json.Unmarshal(line, &entry) == nil && entry.Msg == "listening" {
			o.found <- entry.Addr
			o.done = true
		}
	}
	if over := len(o.text) - keptOutput; over > 0 {
		o.text = append([]byte(nil), o.text[over:]...)
		o.seen = max(0, o.seen-over)
	}
	return len(p), nil
}

func (o *output) last() []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	return lastLine(o.text)
}

// platform is all the processes.
type platform struct {
	children        []*child // in the order in which they were started
	engines         []string // URLs
	url             string
	redis, database string
}

// startTakes bounds the start.
const startTakes = time.Minute

func start(ctx context.Context, cfg Config) (_ *platform, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTakes)
	defer cancel()
	p := &platform{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	env, err := p.stores(ctx, &cfg)
	if err != nil {
		return nil, err
	}
	run := func(role string, args ...string) (*child, error) {
		c, err := spawn(role, append(append([]string(nil), cfg.Program...), args...), env...)
		if err == nil {
			p.children = append(p.children, c)
		}
		return c, err
	}
	quiet := []string{"--metrics-listen", "off", "--log-format", "json"}
	for i := range cfg.Workers {
		// One processor is more than an engine needs, and the less often it collects the better.
		e, err := spawn("engines", append(append([]string(nil), cfg.Program...), "emulator", "--listen", "127.0.0.1:0", "--model", string(model), "--profile", cfg.Profile,
			"--speed", strconv.FormatFloat(cfg.Speed, 'g', -1, 64), "--log-format", "json"), "GOMAXPROCS=1", "GOGC=400")
		if err != nil {
			return nil, err
		}
		p.children = append(p.children, e)
		addr, err := e.await(ctx)
		if err != nil {
			return nil, err
		}
		p.engines = append(p.engines, "http://"+addr)
		if _, err := run("workers", append([]string{"worker", "--engine", p.engines[i], "--name", fmt.Sprintf("w%d", i+1), "--log-level", "warn"}, quiet...)...); err != nil {
			return nil, err
		}
	}
	if _, err := run("dispatcher", append([]string{"dispatcher", "--log-level", "warn"}, append(quiet, cfg.dispatcherFlags()...)...)...); err != nil {
		return nil, err
	}
	api, err := run("api", append([]string{"api", "--listen", "127.0.0.1:0", "--log-level", "info"}, append(quiet, cfg.apiFlags()...)...)...)
	if err != nil {
		return nil, err
	}
	addr, err := api.await(ctx)
	if err != nil {
		return nil, err
	}
	p.url = "http://" + addr
	return p, p.ready(ctx, cfg.Workers)
}

// The limits of an API and a dispatcher without flags.
const (
	usualLines = 50_000
	usualFile  = 200_000_000
)

func (c *Config) dispatcherFlags() []string {
	if c.Lines <= usualLines {
		return nil
	}
	return []string{"--max-batch-lines", strconv.Itoa(c.Lines)}
}

func (c *Config) apiFlags() []string {
	if n := newInput(*c).Size(); n > usualFile {
		return []string{"--max-file", strconv.FormatInt(n, 10)}
	}
	return nil
}

// stores starts the servers that are not given, and returns the environment in which the roles find them: a URL may hold a password, which ps would show.
func (p *platform) stores(ctx context.Context, cfg *Config) (env []string, err error) {
	p.redis, p.database = "given", "given"
	if cfg.RedisURL == "" && cfg.RedisServer != "" {
		if cfg.RedisURL, err = p.redisServer(ctx, cfg); err != nil {
			return nil, err
		}
		p.redis = filepath.Base(cfg.RedisServer)
	}
	if cfg.NATSURL == "" || cfg.RedisURL == "" {
		role := "stores (embedded NATS)"
		if cfg.RedisURL == "" {
			role, p.redis = "stores (embedded NATS and Redis)", "embedded"
		}
		c, err := spawn(role, append(append([]string(nil), cfg.Program...), "bench", "stores", "--dir", filepath.Join(cfg.Dir, "nats"), fmt.Sprintf("--redis=%t", cfg.RedisURL == "")))
		if err != nil {
			return nil, err
		}
		p.children = append(p.children, c)
		addr, err := c.await(ctx)
		if err != nil {
			return nil, err
		}
		nats, redis, _ := strings.Cut(addr, " ")
		if cfg.NATSURL == "" {
			cfg.NATSURL = nats
		}
		if cfg.RedisURL == "" {
			cfg.RedisURL = redis
		}
	}
	if cfg.DatabaseURL == "" {
		cfg.DatabaseURL, p.database = "sqlite:"+filepath.Join(cfg.Dir, "millrace.db"), "SQLite"
	}
	if _, _, err := ledger.Migrate(ctx, ledger.Config{URL: cfg.DatabaseURL}, cfg.Log); err != nil {
		return nil, fmt.Errorf("preparing the database: %w", err)
	}
	return []string{"MILLRACE_NATS_URL=" + cfg.NATSURL, "MILLRACE_REDIS_URL=" + cfg.RedisURL, "MILLRACE_DATABASE_URL=" + cfg.DatabaseURL}, nil
}

// redisServer starts a real one and returns its URL once it answers.
func (p *platform) redisServer(ctx context.Context, cfg *Config) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("finding a port for redis-server: %w", err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	_, port, _ := net.SplitHostPort(addr) // it came from a listener
	c, err := spawn("redis-server", []string{cfg.RedisServer, "--bind", "127.0.0.1", "--port", port, "--dir", cfg.Dir, "--save", "", "--appendonly", "no"})
	if err != nil {
		return "", err
	}
	p.children = append(p.children, c)
	for {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "tcp", addr)
		if err == nil {
			return "redis://" + addr, conn.Close()
		}
		select {
		case <-time.After(20 * time.Millisecond): // a process tells nobody when it is ready
		case <-c.ended:
			return "", fmt.Errorf("redis-server ended: %w: %s", c.err, c.out.last())
		case <-ctx.Done():
			return "", fmt.Errorf("redis-server does not answer: %w", err)
		}
	}
}

// ready waits until all workers are.
func (p *platform) ready(ctx context.Context, workers int) error {
	c, err := client.New(client.Config{URL: p.url})
	if err != nil {
		return err
	}
	defer c.CloseIdleConnections()
	for {
		all, err := c.Workers(ctx)
		n := 0
		for _, w := range all {
			if w.State == "ready" {
				n++
			}
		}
		if n == workers {
			return nil
		}
		if err := p.check(); err != nil {
			return err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("waiting for the workers: %d of %d are ready: %w", n, workers, errors.Join(err, ctx.Err()))
		}
	}
}

// check returns an error if a process has ended by itself.
func (p *platform) check() error {
	for _, c := range p.children {
		select {
		case <-c.ended:
			return fmt.Errorf("the process of the %s ended: %w: %s", c.role, c.err, c.out.last())
		default:
		}
	}
	return nil
}

// idle notes what all hold now.
func (p *platform) idle() {
	for _, c := range p.children {
		c.idle, _ = c.memory()
	}
}

// roles is the memory of all processes, by what they are.
func (p *platform) roles() []Role {
	var all []Role
	at := make(map[string]int)
	for _, c := range p.children {
		i, known := at[c.role]
		if !known {
			i = len(all)
			at[c.role] = i
			all = append(all, Role{Name: c.role})
		}
		_, peak := c.memory()
		all[i].Processes++
		all[i].Idle, all[i].Peak = max(all[i].Idle, c.idle), max(all[i].Peak, peak)
	}
	return all
}

// close ends all, those first that need the others.
func (p *platform) close() error {
	err := p.check()
	for i := len(p.children) - 1; i >= 0; i-- {
		p.children[i].stop()
	}
	return err
}

// Stores runs an embedded NATS and, with redis, an embedded Redis-compatible store on free ports until ctx ends. It writes a line of JSON to w that says where they listen. It is what a run has as a child.
func Stores(ctx context.Context, dir string, redis bool, w io.Writer) error {
	n, err := embedded.StartNATS(embedded.NATSConfig{Dir: dir, Listen: "127.0.0.1:0", StoreLimit: 1 << 40, MemoryLimit: 1 << 40, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return fmt.Errorf("starting NATS: %w", err)
	}
	defer n.Shutdown()
	addr := n.URL()
	if redis {
		r, err := embedded.StartRedis()
		if err != nil {
			return fmt.Errorf("starting the store: %w", err)
		}
		defer r.Close()
		addr += " " + r.URL()
	}
	if err := json.NewEncoder(w).Encode(struct {
		Msg  string `json:"msg"`
		Addr string `json:"addr"`
	}{"listening", addr}); err != nil {
		return fmt.Errorf("saying where they listen: %w", err)
	}
	<-ctx.Done()
	return nil
}
