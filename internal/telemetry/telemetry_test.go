package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLoggerWritesJSONOffATerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log, err := telemetry.NewLogger(&out, telemetry.LogConfig{Level: "warn"})
	if err != nil {
		t.Fatal(err)
	}
	log.Info("not this")
	log.Warn("this", "job", "job_1")
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("the log is not one line of JSON: %v: %s", err, out.String())
	}
	if line["msg"] != "this" || line["job"] != "job_1" {
		t.Errorf("got %v", line)
	}
}

func TestLoggerRefusesWhatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	for _, cfg := range []telemetry.LogConfig{{Level: "loud"}, {Format: "xml"}} {
		if _, err := telemetry.NewLogger(io.Discard, cfg); err == nil || !strings.Contains(err.Error(), "must be one of") {
			t.Errorf("%+v: got %v, want an error with the choices", cfg, err)
		}
	}
}

// serve runs a listener for the test and returns its base URL.
func serve(t *testing.T, cfg telemetry.ListenerConfig) string {
	t.Helper()
	cfg.Addr, cfg.Log = "127.0.0.1:0", slog.New(slog.DiscardHandler)
	if cfg.Registry == nil {
		cfg.Registry = telemetry.NewRegistry("v1.2.3")
	}
	l, err := telemetry.Listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return "http://" + l.Addr()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	c := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() // read to its end
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func TestListenerShowsMetrics(t *testing.T) {
	t.Parallel()
	r := telemetry.NewRegistry("v1.2.3")
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_test_total", Help: "x"})
	r.MustRegister(c)
	c.Add(3)
	code, page := get(t, serve(t, telemetry.ListenerConfig{Registry: r})+"/metrics")
	if code != http.StatusOK {
		t.Fatalf("status %d", code)
	}
	for _, want := range []string{"millrace_test_total 3", `version="v1.2.3"`, "go_goroutines", "process_open_fds"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q", want)
		}
	}
}

func TestReadinessNamesThePartThatIsNotReady(t *testing.T) {
	t.Parallel()
	base := serve(t, telemetry.ListenerConfig{Ready: map[string]func() error{
		"api":    func() error { return nil },
		"worker": func() error { return errors.New("the engine is loading") },
	}})
	if code, body := get(t, base+"/healthz"); code != http.StatusOK || body != "{\"status\":\"ok\"}\n" {
		t.Errorf("/healthz: %d %s", code, body)
	}
	code, body := get(t, base+"/readyz")
	if code != http.StatusServiceUnavailable {
		t.Errorf("/readyz: status %d", code)
	}
	var got struct{ Parts map[string]string }
	if err := json.Unmarshal([]byte(body), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"api": "ready", "worker": "the engine is loading"}, got.Parts); diff != "" {
		t.Error(diff)
	}
}

func TestPprofIsOffUnlessAskedFor(t *testing.T) {
	t.Parallel()
	if code, _ := get(t, serve(t, telemetry.ListenerConfig{})+"/debug/pprof/"); code != http.StatusNotFound {
		t.Errorf("off: status %d", code)
	}
	if code, _ := get(t, serve(t, telemetry.ListenerConfig{Pprof: true})+"/debug/pprof/"); code != http.StatusOK {
		t.Errorf("on: status %d", code)
	}
}

func TestAPortInUseSaysWhatToDo(t *testing.T) {
	t.Parallel()
	base := serve(t, telemetry.ListenerConfig{})
	_, err := telemetry.Listen(telemetry.ListenerConfig{
		Addr: strings.TrimPrefix(base, "http://"), Registry: telemetry.NewRegistry(""), Log: slog.New(slog.DiscardHandler),
	})
	if err == nil || !strings.Contains(err.Error(), "--metrics-listen") {
		t.Errorf("got %v", err)
	}
}
