package routing_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/bench/routing"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

// All of it, small: no request is lost, the report has its fields, and nothing is left running, however it ends.
func TestARealMeasurementIsWholeAndCleansUp(t *testing.T) {
	m := routing.Measurement{
		Params: routing.Params{Variant: routing.Stalls, Rate: 20, Requests: 20, Seed: 3, StallEvery: 3001 * time.Millisecond}, Runs: 2, Within: time.Minute,
	}
	r, err := routing.Measure(t.Context(), m)
	if err != nil {
		t.Fatal(err)
	}
	if r.Simulated || r.Runs != 2 || r.Requests != 20 || r.Workload != routing.SeedLike || r.Variant != routing.Stalls || len(r.Arms) != 4 {
		t.Errorf("the report is of something else: %+v", r)
	}
	for _, a := range r.Arms {
		if a.Errors != 0 || a.TTFTP50 <= 0 || a.TTFTP99 < a.TTFTP50 || a.E2EP50 < a.TTFTP50 || a.E2EP99 < a.TTFTP99 {
			t.Errorf("%+v is not whole", a)
		}
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(text, &fields); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ratio_ttft_p99", "ratio_e2e_p99"} {
		if v, ok := fields[name].(float64); !ok || v <= 0 {
			t.Errorf("%s is %v", name, fields[name])
		}
	}
	first := fields["arms"].([]any)[0].(map[string]any)
	want := []string{"e2e_p50_ms", "e2e_p99_ms", "errors", "load_spread", "name", "preemptions", "ttft_p50_ms", "ttft_p99_ms"}
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(first))); diff != "" {
		t.Error(diff)
	}
	noChildren(t)

	interrupt := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	m.Say = func(step string) {
		if strings.Contains(step, "requests to each arm") {
			cancel(interrupt)
		}
	}
	if _, err := routing.Measure(ctx, m); !errors.Is(err, interrupt) {
		t.Errorf("interrupted, it ends with %v", err)
	}
	noChildren(t)

	m.Say, m.Program = nil, []string{"/bin/false"}
	if _, err := routing.Measure(t.Context(), m); err == nil || !strings.Contains(err.Error(), "emulated engine") {
		t.Errorf("with engines that end at once: %v", err)
	}
	noChildren(t)
}

// noChildren checks, where the system tells, that this process has none.
func noChildren(t *testing.T) {
	t.Helper()
	files, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if children, err := os.ReadFile(f); err == nil && len(children) > 0 {
			t.Errorf("children are left: %s", children)
		}
	}
}

func TestMeasurementsThatCannotBeAreRefused(t *testing.T) {
	t.Parallel()
	for want, m := range map[string]routing.Measurement{
		"runs is -1":              {Runs: -1},
		"requests is 100000":      {Params: routing.Params{Requests: 100_000}},
		"time is 1s":              {Within: time.Second},
		`variant "x" is unknown`:  {Params: routing.Params{Variant: "x"}},
		`workload "x" is unknown`: {Params: routing.Params{Shape: "x"}},
	} {
		if _, err := routing.Measure(t.Context(), m); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want it to say %q", m, err, want)
		}
	}
}

// nodes are servers with one handler each, and a proxy in front of them, whose URL it returns.
func nodes(t *testing.T, p routing.Policy, handlers ...http.HandlerFunc) (*routing.Proxy, string) {
	t.Helper()
	var urls []string
	for _, h := range handlers {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		urls = append(urls, s.URL)
	}
	x, err := routing.NewProxy(p, urls, 5*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(x.Handler())
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { x.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		s.Close()
	})
	return x, s.URL
}

func healthy(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/health" {
			h(w, r)
		}
	}
}

func post(t *testing.T, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func TestARouterTriesAnotherNode(t *testing.T) {
	t.Parallel()
	echo := healthy(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body) // a client that left needs no answer
	})
	broken := healthy(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	failing := healthy(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	refusing := healthy(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusBadRequest) })

	x, url := nodes(t, routing.RoundRobin, broken, failing, echo)
	for range 6 {
		if status, text := post(t, url, "a body"); status != http.StatusOK || text != "a body" {
			t.Errorf("%d %q", status, text)
		}
	}
	until(t, "nothing in flight", func() bool { return slices.Max(x.InFlight()) == 0 })

	_, url = nodes(t, routing.LeastLoad, broken, failing, broken)
	if status, _ := post(t, url, "a body"); status != http.StatusBadGateway {
		t.Errorf("where all nodes fail: status %d", status)
	}
	_, url = nodes(t, routing.LeastLoad, refusing, echo)
	if status, text := post(t, url, "a body"); status != http.StatusBadRequest || text != "no\n" {
		t.Errorf("a refusal is no failure: %d %q", status, text)
	}
}

func TestARouterEvictsAndReinstates(t *testing.T) {
	t.Parallel()
	var sick atomic.Bool
	var calls [2]atomic.Int32
	node := func(i int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Path != "/health":
				calls[i].Add(1)
			case i == 0 && sick.Load():
				w.WriteHeader(http.StatusServiceUnavailable)
			}
		}
	}
	x, url := nodes(t, routing.RoundRobin, node(0), node(1))
	sick.Store(true)
	until(t, "eviction", func() bool { return !x.Healthy()[0] })
	for range 4 {
		post(t, url, "")
	}
	if a, b := calls[0].Load(), calls[1].Load(); a != 0 || b != 4 {
		t.Errorf("%d and %d calls, want none to the evicted node", a, b)
	}
	sick.Store(false)
	until(t, "reinstatement", func() bool { return x.Healthy()[0] })
	for range 4 {
		post(t, url, "")
	}
	if a, b := calls[0].Load(), calls[1].Load(); a != 2 || b != 6 {
		t.Errorf("%d and %d calls, want turns again", a, b)
	}
}

func TestARouterPassesTokensOnAsTheyCome(t *testing.T) {
	t.Parallel()
	left := make(chan struct{})
	x, url := nodes(t, routing.LeastLoadRandom, healthy(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: 1\n\n")
		_ = http.NewResponseController(w).Flush() // the client tells whether it came
		<-r.Context().Done()
		close(left)
	}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	buf := make([]byte, 9)
	if _, err := io.ReadFull(resp.Body, buf); err != nil || string(buf) != "data: 1\n\n" {
		t.Errorf("the first token came as %q, %v", buf, err)
	}
	if diff := cmp.Diff([]int{1}, x.InFlight()); diff != "" {
		t.Errorf("in flight: %s", diff)
	}
	cancel()
	<-left
	until(t, "nothing in flight", func() bool { return x.InFlight()[0] == 0 })
}

func TestRequestsHaveTheLengthsThatWereRecorded(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Models: []string{"bench"}})
	var prompts, outputs int64
	for i, lengths := range [][2]int{{7, 1}, {100, 9}, {2000, 64}} {
		sample, err := routing.Ask(t.Context(), http.DefaultClient, s.URL+"/v1/chat/completions", i, lengths[0], lengths[1])
		if err != nil || sample.Failed || sample.E2E < sample.TTFT || sample.TTFT == 0 {
			t.Errorf("%v: %+v, %v", lengths, sample, err)
		}
		prompts += int64(lengths[0])
		outputs += int64(lengths[1])
		if got := s.Stats(); got.PromptTokens != prompts || got.GeneratedTokens != outputs {
			t.Errorf("after %v the engine counts %d and %d tokens, want %d and %d", lengths, got.PromptTokens, got.GeneratedTokens, prompts, outputs)
		}
	}
	if s.Stats().PrefixHits != 0 {
		t.Error("a prompt was in the prefix cache")
	}
	bodies := map[string]bool{}
	for i := range 5000 {
		bodies[string(routing.Body(i, 7, 5, 64))] = true
	}
	if len(bodies) != 5000 {
		t.Errorf("%d of 5,000 bodies are unlike", len(bodies))
	}
}
