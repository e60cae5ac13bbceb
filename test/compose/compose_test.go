//go:build compose

// Package compose_test runs the platform as compose.yaml describes it, in containers of its own, and takes its parts away while jobs run.
package compose_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

const (
	model = "emulator-a10-7b"
	key   = "sk-compose-test"

	adminKey = "sk-compose-admin"
)

// stack is a compose project of the test's own: its names, volumes and port are no other's.
type stack struct {
	project string
	env     []string
}

// start builds and starts the project with a profile, and takes it down with its volumes when the test ends.
func start(t *testing.T, profile string) (*stack, *client.Client) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	s := &stack{
		project: "millrace-test-" + port,
		env:     append(os.Environ(), "MILLRACE_PORT="+port, "MILLRACE_API_KEY="+key, "MILLRACE_ADMIN_KEY="+adminKey, "MILLRACE_PROFILE=a10-7b", "COMPOSE_PROFILES="+profile),
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*time.Minute) // the test's own context has ended
		defer cancel()
		if t.Failed() {
			if out, err := s.command(ctx, "logs", "--no-color", "--tail=60").CombinedOutput(); err == nil {
				t.Logf("the last lines of each container:\n%s", out)
			}
		}
		if out, err := s.command(ctx, "down", "--volumes", "--remove-orphans", "--timeout=20").CombinedOutput(); err != nil {
			t.Errorf("taking the containers down: %v\n%s", err, out)
		}
	})
	s.compose(t, "build", "--quiet", "api")
	s.compose(t, "up", "--wait", "--wait-timeout=120", "--no-build")
	c, err := client.New(client.Config{URL: "http://127.0.0.1:" + port, APIKey: key, Patience: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdleConnections)
	return s, c
}

func (s *stack) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "docker", append([]string{"compose", "--ansi=never", "--progress=plain", "--project-name=" + s.project}, args...)...)
	cmd.Dir, cmd.Env = "../..", s.env
	return cmd
}

// compose runs a command of docker compose and returns what it wrote.
func (s *stack) compose(t *testing.T, args ...string) []byte {
	t.Helper()
	begun := time.Now()
	cmd := s.command(t.Context(), args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Fatalf("docker compose %s: %v\n%s", strings.Join(args, " "), err, errs.Bytes())
	}
	t.Logf("docker compose %s (%.1f s)", strings.Join(args, " "), time.Since(begun).Seconds())
	return out.Bytes()
}

// streams counts the messages of each JetStream stream, as the server's own monitoring says.
func (s *stack) streams(t *testing.T) map[string]int {
	t.Helper()
	var page struct {
		Accounts []struct {
			Streams []struct {
				Name  string `json:"name"`
				State struct {
					Messages int `json:"messages"`
				} `json:"state"`
			} `json:"stream_detail"`
		} `json:"account_details"`
	}
	out := s.compose(t, "exec", "-T", "nats", "wget", "-q", "-O", "-", "http://127.0.0.1:8222/jsz?streams=true")
	if err := json.Unmarshal(out, &page); err != nil {
		t.Fatalf("reading NATS's monitoring page: %v\n%s", err, out)
	}
	counts := make(map[string]int)
	for _, account := range page.Accounts {
		for _, stream := range account.Streams {
			counts[stream.Name] = stream.State.Messages
		}
	}
	return counts
}

// submit stores n jobs of about tokens tokens each, and returns their ids.
func submit(t *testing.T, c *client.Client, n, tokens int, name string) []job.ID {
	t.Helper()
	return submitTo(t, c, model, n, tokens, name)
}

func submitTo(t *testing.T, c *client.Client, model string, n, tokens int, name string) []job.ID {
	t.Helper()
	ids := make([]job.ID, n)
	g, ctx := errgroup.WithContext(t.Context())
	g.SetLimit(8)
	for i := range ids {
		g.Go(func() error {
			body := fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"%s %d: count to a hundred"}],"max_tokens":%d,"ignore_eos":true}`, model, name, i, tokens)
			j, err := c.Submit(ctx, client.Submission{Body: json.RawMessage(body), Key: name + "-" + strconv.Itoa(i)})
			if err != nil {
				return fmt.Errorf("submitting job %d: %w", i, err)
			}
			ids[i] = j.ID
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return ids
}

// awaitRetry waits until one of the jobs is in its second attempt.
func awaitRetry(t *testing.T, c *client.Client, ids []job.ID) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		for _, id := range ids {
			j, err := c.Job(t.Context(), id, 0)
			if err != nil {
				t.Fatal(err)
			}
			if len(j.Attempts) > 1 {
				return
			}
		}
	}
	t.Fatal("no job is in its second attempt 20 s after a worker was killed")
}

// finish waits until every job has ended, and fails the test for each that did not complete with an answer.
func finish(t *testing.T, c *client.Client, ids []job.ID) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	var g errgroup.Group
	g.SetLimit(16)
	for _, id := range ids {
		g.Go(func() error {
			j, err := c.Wait(ctx, id)
			switch {
			case errors.Is(err, context.DeadlineExceeded):
				t.Errorf("job %s has not ended after three minutes", id)
			case err != nil:
				t.Errorf("job %s: %v", id, err)
			case j.Status != job.Completed || j.Result == nil || j.Result.StatusCode != 200:
				t.Errorf("job %s ended %s, error %v, attempts %+v", id, j.Status, j.Error, j.Attempts)
			}
			return nil
		})
	}
	_ = g.Wait() // each failure was reported where it was found
	if t.Failed() {
		t.FailNow()
	}
}

func TestComposeKeepsEveryJobThroughRestarts(t *testing.T) {
	s, c := start(t, "emulator")
	var accepted int

	t.Run("a killed worker and restarts of NATS and Redis lose and repeat nothing", func(t *testing.T) {
		ids := submit(t, c, 60, 400, "restart")
		accepted += len(ids)
		s.compose(t, "kill", "worker-1")
		s.compose(t, "start", "worker-1")
		awaitRetry(t, c, ids)
		s.compose(t, "restart", "--no-deps", "--timeout=5", "nats")
		s.compose(t, "restart", "--no-deps", "--timeout=5", "redis") // it comes back empty
		finish(t, c, ids)
		settled(t, s, accepted)
	})

	t.Run("a batch goes on over restarts of the database and the dispatcher", func(t *testing.T) {
		const lines = 400
		accepted += lines
		b := batch(t, c, lines)
		s.compose(t, "restart", "--no-deps", "--timeout=5", "postgres")
		s.compose(t, "kill", "dispatcher")
		s.compose(t, "start", "dispatcher")
		ended(t, c, b, lines)
		settled(t, s, accepted)
	})

	t.Run("what is queued survives the containers", func(t *testing.T) {
		ids := submit(t, c, 20, 400, "down")
		accepted += len(ids)
		s.compose(t, "down", "--timeout=5")
		s.compose(t, "up", "--wait", "--wait-timeout=120", "--no-build")
		finish(t, c, ids)
		settled(t, s, accepted)
	})
}

// batch starts a batch of n lines.
func batch(t *testing.T, c *client.Client, n int) *client.Batch {
	t.Helper()
	var lines bytes.Buffer
	for i := range n {
		fmt.Fprintf(&lines, `{"custom_id":"line-%d","method":"POST","url":"/v1/chat/completions","body":{"model":%q,"messages":[{"role":"user","content":"line %d"}],"max_tokens":30,"ignore_eos":true}}`+"\n", i, model, i)
	}
	f, err := c.Upload(t.Context(), client.Upload{Name: "in.jsonl", Content: bytes.NewReader(lines.Bytes()), Size: int64(lines.Len())})
	if err != nil {
		t.Fatal(err)
	}
	b, err := c.CreateBatch(t.Context(), client.NewBatch{InputFileID: f.ID, Endpoint: job.ChatCompletions, CompletionWindow: "24h"})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// ended waits until a batch has ended, and fails the test unless it has an answer for each of its n lines.
func ended(t *testing.T, c *client.Client, b *client.Batch, n int) {
	t.Helper()
	for deadline := time.Now().Add(3 * time.Minute); !b.Ended(); time.Sleep(500 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("batch %s has not ended after three minutes: %+v", b.ID, b)
		}
		now, err := c.Batch(t.Context(), b.ID)
		if err != nil {
			t.Fatal(err)
		}
		b = now
	}
	if b.Status != "completed" || b.OutputFileID == "" || b.RequestCounts.Completed != int64(n) {
		t.Fatalf("batch %s ended as %+v", b.ID, b)
	}
	var out bytes.Buffer
	if _, err := c.Download(t.Context(), b.OutputFileID, &out, nil); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range bytes.Lines(out.Bytes()) {
		var l struct {
			CustomID string `json:"custom_id"`
		}
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatal(err)
		}
		if seen[l.CustomID] {
			t.Errorf("%s has two answers", l.CustomID)
		}
		seen[l.CustomID] = true
	}
	if len(seen) != n {
		t.Errorf("%d of %d lines have an answer", len(seen), n)
	}
}

// settled fails the test unless JetStream holds one outcome for each accepted job and no waiting work.
func settled(t *testing.T, s *stack, accepted int) {
	t.Helper()
	var counts map[string]int
	waiting := func() (n int) {
		for name, messages := range counts {
			if strings.HasPrefix(name, "WORK") {
				n += messages
			}
		}
		return n
	}
	// A message is acknowledged a moment after its outcome is known, and that of a killed worker when its lease is over.
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Second) {
		if counts = s.streams(t); waiting() == 0 || time.Now().After(deadline) {
			break
		}
	}
	if n := waiting(); n != 0 {
		t.Errorf("%d messages are still in WORK streams: %v", n, counts)
	}
	if counts["DONE"] != accepted {
		t.Errorf("DONE holds %d outcomes of %d accepted jobs: %v", counts["DONE"], accepted, counts)
	}
}
