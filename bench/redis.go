package bench

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// redisServer is a real redis-server of the benchmark's own.
type redisServer struct {
	cmd     *exec.Cmd
	url     string
	version string
}

// startRedis starts program in dir and returns once it answers. It stops with close.
func startRedis(ctx context.Context, program, dir string) (*redisServer, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("finding a port for redis-server: %w", err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	_, port, _ := net.SplitHostPort(addr) // it came from a listener
	r := &redisServer{
		cmd: exec.Command(program, "--bind", "127.0.0.1", "--port", port, "--dir", dir, "--save", "", "--appendonly", "no", "--logfile", filepath.Join(dir, "log")),
		url: "redis://" + addr,
	}
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting redis-server: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		info, err := r.info(ctx)
		if err == nil && info["redis_version"] != "" {
			r.version = info["redis_version"]
			return r, nil
		}
		select {
		case <-time.After(20 * time.Millisecond): // a process tells nobody when it is ready
		case <-ctx.Done():
			r.close()
			return nil, fmt.Errorf("redis-server does not answer: %w", err)
		}
	}
}

func (r *redisServer) close() {
	_ = r.cmd.Process.Signal(os.Interrupt)
	_ = r.cmd.Wait()
}

// memory is what the server holds, in bytes.
func (r *redisServer) memory(ctx context.Context) (int64, error) {
	info, err := r.info(ctx)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(info["used_memory"], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("reading Redis's memory: %w", err)
	}
	return n, nil
}

// info asks the server about itself.
func (r *redisServer) info(ctx context.Context) (map[string]string, error) {
	u, err := url.Parse(r.url)
	if err != nil {
		return nil, fmt.Errorf("reading Redis's URL: %w", err)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", u.Host)
	if err != nil {
		return nil, fmt.Errorf("asking Redis: %w", err)
	}
	defer c.Close() //nolint:errcheck // nothing was written that could be lost
	_ = c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := c.Write([]byte("INFO\r\nQUIT\r\n")); err != nil {
		return nil, fmt.Errorf("asking Redis: %w", err)
	}
	info := make(map[string]string)
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		if name, value, ok := strings.Cut(strings.TrimSpace(lines.Text()), ":"); ok {
			info[name] = value
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("asking Redis: %w", err)
	}
	return info, nil
}
