// Package testenv gives tests real servers: NATS inside the process, and Redis both real and embedded. An absent server fails the test.
package testenv

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/embedded"
)

// Ample is above the sum of all streams' limits, which a server reserves but does not take: by itself it would refuse streams on a disk that is short.
const Ample = 1 << 40

// NATS starts a server of the test's own, its store in the test's folder, and stops it when the test ends.
func NATS(t testing.TB, change ...func(*embedded.NATSConfig)) *embedded.NATS {
	t.Helper()
	cfg := embedded.NATSConfig{Dir: t.TempDir(), StoreLimit: Ample, MemoryLimit: Ample, Log: Log(t)}
	for _, f := range change {
		f(&cfg)
	}
	n, err := embedded.StartNATS(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Shutdown)
	return n
}

// Connect returns a connection to n like those that Millrace's processes make, closed when the test ends.
func Connect(t testing.TB, n *embedded.NATS, opts ...nats.Option) *nats.Conn {
	t.Helper()
	opts = append([]nats.Option{nats.InProcessServer(n), nats.ReconnectBufSize(-1), nats.MaxReconnects(-1), nats.ReconnectWait(50 * time.Millisecond)}, opts...)
	nc, err := nats.Connect("", opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// MiniRedis starts an embedded store and returns its URL.
func MiniRedis(t testing.TB) *embedded.Redis {
	t.Helper()
	r, err := embedded.StartRedis()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// RedisServer is a real redis-server process of the test's own, on a free loopback port.
type RedisServer struct {
	Addr string
	cmd  *exec.Cmd
	out  bytes.Buffer
	args []string
}

// Redis starts a real redis-server (MILLRACE_TEST_REDIS_SERVER, or the one on the PATH) and stops it when the test ends.
func Redis(t testing.TB, args ...string) *RedisServer {
	t.Helper()
	addr, dir := FreeAddr(t), t.TempDir()
	_, port, _ := net.SplitHostPort(addr)
	r := &RedisServer{Addr: addr, args: append([]string{
		"--bind", "127.0.0.1", "--port", port, "--dir", dir, "--save", "", "--appendonly", "no",
		"--unixsocket", filepath.Join(dir, "s"),
	}, args...)}
	r.Start(t)
	t.Cleanup(func() { r.Kill() })
	return r
}

// URL to connect to.
func (r *RedisServer) URL() string { return "redis://" + r.Addr }

// Start starts the process (again, after Kill) and returns once it answers.
func (r *RedisServer) Start(t testing.TB) {
	t.Helper()
	program := os.Getenv("MILLRACE_TEST_REDIS_SERVER")
	if program == "" {
		program = "redis-server"
	}
	r.cmd = exec.Command(program, r.args...)
	r.cmd.Stdout, r.cmd.Stderr = &r.out, &r.out
	if err := r.cmd.Start(); err != nil {
		t.Fatalf("starting redis-server: %v: `make test` installs it", err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; {
		err := ping(r.Addr)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("redis-server does not answer: %v\n%s", err, r.out.String())
		}
		time.Sleep(10 * time.Millisecond) // a process tells nobody when it is ready
	}
}

// Kill ends the process at once and waits for it.
func (r *RedisServer) Kill() {
	if r.cmd != nil && r.cmd.Process != nil {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
		r.cmd = nil
	}
}

// Process is the running server, to pause or kill.
func (r *RedisServer) Process() *os.Process { return r.cmd.Process }

func ping(addr string) error {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // nothing was written that could be lost
	_ = c.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	var b [7]byte
	if _, err := c.Read(b[:]); err != nil {
		return err
	}
	if string(b[:5]) != "+PONG" {
		return fmt.Errorf("answered %q", b)
	}
	return nil
}

// Log writes to the test's log at level Warn and above.
func Log(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
}
