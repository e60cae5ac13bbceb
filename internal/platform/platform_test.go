package platform_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/platform"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/testenv"
	"github.com/millrace/millrace/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

func config(t *testing.T) platform.Config {
	t.Helper()
	return platform.Config{
		Dir: t.TempDir(), Emulator: emulator.Config{Profile: "test"}, API: api.Config{Listen: "127.0.0.1:0", DrainTimeout: time.Second},
		Worker: worker.Config{Drain: time.Second},
	}
}

// run runs a platform until the test ends.
func run(t *testing.T, cfg platform.Config) *platform.Platform {
	t.Helper()
	p, err := platform.New(t.Context(), cfg, prometheus.NewRegistry(), testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return p
}

func TestEveryPartBecomesReadyAndEnds(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	cfg.Workers = 2
	p := run(t, cfg)
	for name, ready := range p.Ready() {
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			err := ready()
			if err == nil {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the %s does not become ready: %v", name, err)
			}
		}
	}
}

// TestCallsAreHeldWhileTheFirstEngineLoads: the folder is new, so that nobody has ever served the model, and the client asks at once.
func TestCallsAreHeldWhileTheFirstEngineLoads(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	cfg.Emulator = emulator.Config{Profile: "test", Models: []string{"m1"}, ColdStart: 4 * time.Second}
	p := run(t, cfg)
	ask := func(body string) (int, string) {
		resp, err := http.Post(p.URL()+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		defer http.DefaultClient.CloseIdleConnections()
		answer, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(answer)
	}
	if status, answer := ask(`{"model":"m1","max_tokens":2,"messages":[{"role":"user","content":"x"}]}`); status != http.StatusOK {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := ask(`{"model":"m2","messages":[{"role":"user","content":"x"}]}`); status != http.StatusNotFound {
		t.Errorf("another model: %d %s", status, answer)
	}
}

// TestNothingIsLeftOfAPlatformThatCannotStart: after the refusal the folder is free again, and no goroutine lives on.
func TestNothingIsLeftOfAPlatformThatCannotStart(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // nothing was taken from it
	cfg := config(t)
	cfg.API.Listen = l.Addr().String()
	if _, err := platform.New(t.Context(), cfg, prometheus.NewRegistry(), testenv.Log(t)); err == nil {
		t.Fatal("it started on a port that is in use")
	}
	cfg.API.Listen = "127.0.0.1:0"
	p, err := platform.New(t.Context(), cfg, prometheus.NewRegistry(), testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
}

func TestOneFolderIsForOneProcess(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	p, err := platform.New(t.Context(), cfg, prometheus.NewRegistry(), testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	_, err = platform.New(t.Context(), cfg, prometheus.NewRegistry(), testenv.Log(t))
	if err == nil || !strings.Contains(err.Error(), cfg.Dir) || !strings.Contains(err.Error(), "--data") {
		t.Errorf("got %v, want a refusal that names the folder and what to do", err)
	}
	p.Close()
}

// TestSettingsThatCannotWorkAreNotWaitedFor: only what passes by itself is.
func TestSettingsThatCannotWorkAreNotWaitedFor(t *testing.T) {
	t.Parallel()
	nats := testenv.NATS(t)
	redis := testenv.Redis(t, "--maxmemory-policy", "allkeys-lru")
	_, err := platform.OpenBackbone(t.Context(), platform.BackboneConfig{Name: "test", InProcess: nats, RedisURL: redis.URL()}, testenv.Log(t))
	if err == nil || !strings.Contains(err.Error(), "noeviction") {
		t.Errorf("a Redis that evicts: %v", err)
	}
	_, err = platform.OpenBackbone(t.Context(), platform.BackboneConfig{Name: "test", InProcess: nats, RedisURL: "no url", Queue: queue.Config{}}, testenv.Log(t))
	if err == nil {
		t.Error("a Redis URL that is none was taken")
	}
}

func TestWaitingForServersEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := platform.OpenBackbone(ctx, platform.BackboneConfig{Name: "test", NATSURL: "nats://user:secret@127.0.0.1:1", RedisURL: "redis://127.0.0.1:1"}, testenv.Log(t))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if err != nil && strings.Contains(err.Error(), "secret") {
		t.Errorf("the password is in the error: %v", err)
	}
}
