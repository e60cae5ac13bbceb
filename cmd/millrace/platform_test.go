package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/embedded"
	"github.com/millrace/millrace/internal/testenv"
)

// background is a command that runs until it is stopped.
type background struct {
	out, err *screen
	cancel   context.CancelFunc
	ended    chan int
}

// start starts a command line. It is stopped, at the latest, when the test ends.
func start(t *testing.T, args ...string) *background {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	b := &background{out: newScreen(), err: newScreen(), cancel: cancel, ended: make(chan int, 1)}
	p := &program{in: strings.NewReader(""), out: b.out, err: b.err, lookup: lookup(nil)}
	go func() { b.ended <- run(ctx, p, args) }()
	t.Cleanup(func() { cancel(); b.ended <- <-b.ended })
	return b
}

// stop asks the command to end, as a signal does, and returns its exit code.
func (b *background) stop(t *testing.T) int {
	t.Helper()
	b.cancel()
	select {
	case code := <-b.ended:
		b.ended <- code
		return code
	case <-time.After(40 * time.Second):
		t.Fatalf("it does not end; its log:\n%s", b.err)
		return 0
	}
}

// soon bounds what a test waits for, within a test's own time.
func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	t.Cleanup(cancel)
	return ctx
}

var address = regexp.MustCompile(`is up at (http://\S+)`)

func startUp(t *testing.T, args ...string) (*background, string) {
	t.Helper()
	b := start(t, append([]string{"up", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--profile", "test"}, args...)...)
	text := b.out.wait(soon(t), t, "Ctrl-C stops it")
	found := address.FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("it does not say where it listens:\n%s", text)
	}
	return b, found[1]
}

func TestUpStartsAnswersAndStops(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	b, url := startUp(t, "--data", dir, "--workers", "2")
	text := b.out.String()
	for _, want := range []string{"2 built-in emulators", "made up", dir, "/metrics", "curl " + url, `"model":"emulator-test"`, "millrace submit --url " + url} {
		if !strings.Contains(text, want) {
			t.Errorf("the start-up text has no %q:\n%s", want, text)
		}
	}
	env := map[string]string{"MILLRACE_URL": url}
	whole := millrace(t, env, "", "submit", "--max-tokens", "8", "Why?")
	if whole.code != 0 || strings.TrimSpace(whole.out) == "" {
		t.Errorf("submit: %+v", whole)
	}
	streamed := millrace(t, env, "", "submit", "--max-tokens", "8", "--stream", "Why?")
	if streamed.code != 0 || strings.TrimSpace(streamed.out) != strings.TrimSpace(whole.out) {
		t.Errorf("the same prompt gave %q, and streamed %+v", whole.out, streamed)
	}
	id := strings.TrimSpace(millrace(t, env, "", "submit", "--async", "Why?").out)
	if r := millrace(t, env, "", "jobs", "get", id, "--wait"); r.code != 0 || !strings.Contains(r.out, "completed") {
		t.Errorf("jobs get: %+v", r)
	}
	if r := millrace(t, env, "", "jobs", "list"); strings.Count(r.out, "completed") != 3 {
		t.Errorf("jobs list: %+v", r)
	}
	if r := millrace(t, env, "", "status"); r.code != 0 || strings.Count(r.out, "ready") < 2 || !strings.Contains(r.out, "emulator-test") {
		t.Errorf("status: %+v", r)
	}

	// A second process on the same data is refused, by name.
	other := millrace(t, nil, "", "up", "--data", dir, "--listen", "127.0.0.1:0", "--metrics-listen", "off")
	if other.code != exitFailed || !strings.Contains(other.err, fmt.Sprintf("process %d uses the data folder", os.Getpid())) || !strings.Contains(other.err, "--data") {
		t.Errorf("a second one on the same data: %+v", other)
	}

	if code := b.stop(t); code != 0 {
		t.Errorf("it ended with code %d:\n%s", code, b.err)
	}
	if text := b.out.String(); !strings.Contains(text, "stopping") {
		t.Errorf("it does not say that it stops:\n%s", text)
	}
}

func TestJobsOutliveARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	b, url := startUp(t, "--data", dir)
	done := strings.TrimSpace(millrace(t, map[string]string{"MILLRACE_URL": url}, "", "submit", "--async", "--max-tokens", "4", "before").out)
	if r := millrace(t, map[string]string{"MILLRACE_URL": url}, "", "jobs", "get", "--wait", done); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if code := b.stop(t); code != 0 {
		t.Fatalf("it ended with code %d:\n%s", code, b.err)
	}
	_, url = startUp(t, "--data", dir)
	r := millrace(t, map[string]string{"MILLRACE_URL": url}, "", "jobs", "get", "--wait", done)
	if r.code != 0 || !strings.Contains(r.out, "completed") {
		t.Errorf("after the restart: %+v", r)
	}
}

// TestAForeignSchemaIsToldWithoutNATS: an operator has to do something about it, which waiting for another server only delays.
func TestAForeignSchemaIsToldWithoutNATS(t *testing.T) {
	t.Parallel()
	database := "sqlite:" + filepath.Join(t.TempDir(), "millrace.db")
	for _, args := range []string{"migrate", "migrate down --to 2"} {
		if r := millrace(t, map[string]string{"MILLRACE_DATABASE_URL": database}, "", strings.Fields(args)...); r.code != 0 {
			t.Fatalf("%s: %+v", args, r)
		}
	}
	nowhere := testenv.FreeAddr(t)
	for _, role := range []string{"api", "dispatcher", "autoscaler"} {
		b := start(t, role, "--nats-url", "nats://"+nowhere, "--redis-url", "redis://"+nowhere, "--database-url", database, "--metrics-listen", "off")
		select {
		case code := <-b.ended:
			b.ended <- code
			if code != exitFailed || !strings.Contains(b.err.String(), "at version 2") || !strings.Contains(b.err.String(), "run `millrace migrate`") {
				t.Errorf("%s ended with code %d:\n%s", role, code, b.err)
			}
		case <-soon(t).Done():
			t.Errorf("%s goes on waiting:\n%s", role, b.err)
		}
	}
}

// TestRolesWaitForTheirServers starts everything in the reverse order of what it needs.
func TestRolesWaitForTheirServers(t *testing.T) {
	t.Parallel()
	natsAddr, engineAddr, apiAddr := testenv.FreeAddr(t), testenv.FreeAddr(t), testenv.FreeAddr(t)
	health := map[string]string{"api": testenv.FreeAddr(t), "dispatcher": testenv.FreeAddr(t), "worker": testenv.FreeAddr(t)}
	redis := testenv.MiniRedis(t)
	common := func(role string) []string {
		return []string{"--nats-url", "nats://" + natsAddr, "--redis-url", redis.URL(), "--metrics-listen", health[role]}
	}
	database := "sqlite:" + filepath.Join(t.TempDir(), "millrace.db")
	for _, role := range []string{"api", "dispatcher"} {
		if r := millrace(t, map[string]string{"MILLRACE_DATABASE_URL": ""}, "", role); r.code != exitUsage || !strings.Contains(r.err, "--database-url") {
			t.Errorf("%s without a database: %+v", role, r)
		}
	}
	if r := millrace(t, map[string]string{"MILLRACE_DATABASE_URL": database}, "", "migrate"); r.code != 0 || !strings.Contains(r.out, "from version 0 to ") {
		t.Fatalf("migrate: %+v", r)
	}
	roles := map[string]*background{
		"worker":     start(t, append([]string{"worker", "--engine", "http://" + engineAddr, "--name", "w1"}, common("worker")...)...),
		"dispatcher": start(t, append([]string{"dispatcher", "--database-url", database}, common("dispatcher")...)...),
		"api":        start(t, append([]string{"api", "--listen", apiAddr, "--database-url", database}, common("api")...)...),
	}
	for role, b := range roles {
		b.err.wait(soon(t), t, "waiting for a server")
		url := map[string]string{"MILLRACE_HEALTH_URL": "http://" + health[role] + "/readyz"}
		if r := millrace(t, url, "", "health"); r.code != exitFailed || !strings.Contains(r.err, "waits for NATS") {
			t.Errorf("%s while it waits: %+v", role, r)
		}
		if strings.Contains(b.err.String(), "secret") {
			t.Error("a password is in the log")
		}
	}
	testenv.NATS(t, func(c *embedded.NATSConfig) { c.Listen = natsAddr })
	start(t, "emulator", "--listen", engineAddr, "--profile", "test")
	ctx := soon(t)
	for role := range roles {
		for {
			r := millrace(t, map[string]string{"MILLRACE_HEALTH_URL": "http://" + health[role] + "/readyz"}, "", "health")
			if r.code == 0 {
				break
			}
			if ctx.Err() != nil {
				t.Fatalf("the %s does not become ready: %s\n%s", role, r.err, roles[role].err)
			}
		}
		resp, err := http.Get("http://" + health[role] + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		page, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || !bytes.Contains(page, []byte("millrace_build_info")) {
			t.Errorf("the %s's metrics: %v: %.200s", role, err, page)
		}
	}
	if r := millrace(t, map[string]string{"MILLRACE_URL": "http://" + apiAddr}, "", "submit", "--max-tokens", "4", "Hello"); r.code != 0 || r.out == "" {
		t.Errorf("submit: %+v", r)
	}
	for _, role := range []string{"api", "worker", "dispatcher"} {
		if code := roles[role].stop(t); code != 0 {
			t.Errorf("the %s ended with code %d:\n%s", role, code, roles[role].err)
		}
	}
}

func TestDemo(t *testing.T) {
	t.Parallel()
	prompts := filepath.Join(t.TempDir(), "prompts.jsonl")
	var lines []string
	for i := range 12 {
		lines = append(lines, fmt.Sprintf(`{"messages":[{"role":"user","content":"Question %d?"}],"max_tokens":6}`, i))
	}
	if err := os.WriteFile(prompts, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := millrace(t, nil, "", "demo", "--prompts", prompts, "--profile", "test")
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	for _, want := range []string{"12 jobs accepted", "12 of 12 jobs", "completed  12", "failed     0", "p50", "p99", "a second"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("it does not print %q:\n%s", want, r.out)
		}
	}
}
