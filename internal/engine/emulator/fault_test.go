package emulator_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

// long is a chat whose answer has 100 tokens, with the markers given.
func long(markers string, fields ...string) string {
	return say("Hi "+markers, append(fields, `"ignore_eos":true,"max_tokens":100`)...)
}

const streaming = `"stream":true`

// cutStream reads a stream that is expected to break, and returns the data that came.
func cutStream(t *testing.T, s *emulatortest.Server, body string) ([]string, error) {
	t.Helper()
	resp, err := post(t.Context(), t, s, chat, body)
	if err != nil {
		return nil, err
	}
	return events(resp.Body)
}

func TestAMarkerAnswersWithAStatus(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	resp, err := post(t.Context(), t, s, chat, say("x [[emulator:status=429,retry-after=2]]"))
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") != "2" {
		t.Errorf("status %d, Retry-After %q", resp.StatusCode, resp.Header.Get("Retry-After"))
	}
	resp, err = post(t.Context(), t, s, chat, say("x [[emulator:status=503,retry-date=30]]"))
	if err != nil {
		t.Fatal(err)
	}
	at, err := http.ParseTime(resp.Header.Get("Retry-After"))
	if ahead := time.Until(at); err != nil || ahead < 20*time.Second || ahead > 31*time.Second {
		t.Errorf("Retry-After %q (%v)", resp.Header.Get("Retry-After"), err)
	}
	if status, b := ask(t, s, completion, `{"model":"emulator-test","prompt":"[[emulator:status=500]]"}`); status != 500 || !strings.Contains(b, `"InternalServerError"`) {
		t.Errorf("status %d: %s", status, b)
	}
}

func TestAMarkerCountsOnlySoOften(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	var got []int
	for range 3 {
		status, _ := ask(t, s, chat, say("a [[emulator:times=2,status=500]]"))
		got = append(got, status)
	}
	other, _ := ask(t, s, chat, say("b [[emulator:times=2,status=500]]"))
	if got = append(got, other); got[0] != 500 || got[1] != 500 || got[2] != 200 || got[3] != 500 {
		t.Errorf("statuses %v, want 500, 500, 200, and 500 for another body", got)
	}
}

func TestResetsBreakTheConnectionAfterTheirTokens(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	data, err := cutStream(t, s, long("[[emulator:reset-after=5]]", streaming))
	if len(data) != 6 || !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%d events and %v, want the opening, 5 tokens and a reset", len(data), err)
	}
	if _, err := cutStream(t, s, long("[[emulator:reset-after=0]]", streaming)); err == nil {
		t.Error("no reset before the answer's head")
	}
	if _, err := post(t.Context(), t, s, chat, long("[[emulator:reset-after=5]]")); err == nil {
		t.Error("no reset of an answer in one piece")
	}
	waitFor(t, "the engine to drop what was reset", func() bool { return s.Stats().Running == 0 && s.Stats().UsedBlocks == 0 })
}

func TestAHangRunsUntilTheClientLeaves(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	for _, row := range []struct {
		marker string
		events int
	}{{"[[emulator:hang]]", 0}, {"[[emulator:hang-after=5]]", 6}} {
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := post(ctx, t, s, chat, long(row.marker, streaming))
		if err != nil {
			t.Fatal(err)
		}
		for range row.events {
			var event [2]byte // "\n\n" ends each
			for event != [2]byte{'\n', '\n'} {
				event[0] = event[1]
				if _, err := io.ReadFull(resp.Body, event[1:]); err != nil {
					t.Fatal(err)
				}
			}
		}
		before := s.Counts().Disconnects
		waitFor(t, "the hanging call to run", func() bool { return s.Stats().Running == 1 })
		cancel()
		waitFor(t, "the running count to drop", func() bool { return s.Stats().Running == 0 && s.Stats().UsedBlocks == 0 })
		waitFor(t, "the disconnect to be counted", func() bool { return s.Counts().Disconnects == before+1 })
	}
}

func TestADisconnectDropsTheRunningCount(t *testing.T) {
	t.Parallel()
	for _, body := range []string{say("x", `"ignore_eos":true,"n":2`), say("x", `"ignore_eos":true,"n":2`, streaming)} {
		s := emulatortest.Start(t, emulator.Config{Profile: "a10-7b", Models: []string{"emulator-test"}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			if resp, err := post(ctx, t, s, chat, body); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body) // it is cut
			}
		}()
		waitFor(t, "both choices to run", func() bool { return s.Stats().Running == 2 })
		cancel()
		<-done
		waitFor(t, "the running count to drop", func() bool { return s.Stats().Running == 0 && s.Stats().UsedBlocks == 0 })
		if got := s.Stats().Cancelled; got != 2 {
			t.Errorf("%d sequences cancelled, want 2", got)
		}
	}
}

func TestASlowEngineNoticesTheDisconnectLate(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := post(ctx, t, s, chat, long("[[emulator:hang,slow-disconnect=300ms]]", streaming)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the call to run", func() bool { return s.Stats().Running == 1 })
	cancel()
	left := time.Now()
	waitFor(t, "the running count to drop", func() bool { return s.Stats().Running == 0 })
	if took := time.Since(left); took < 250*time.Millisecond {
		t.Errorf("noticed after %v, want 300 ms", took)
	}
}

func TestBrokenAndFailedStreams(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	data, err := cutStream(t, s, long("[[emulator:broken-chunk-after=3]]", streaming))
	if err != nil || len(data) != 1+100+1+1 {
		t.Fatalf("%d events, %v; want the opening, 100 tokens, a broken one, and the end", len(data), err)
	}
	for i, d := range data[:len(data)-1] {
		if json.Valid([]byte(d)) == (i == 4) {
			t.Errorf("event %d: %s", i, d)
		}
	}
	data, err = cutStream(t, s, long("[[emulator:error-after=3]]", streaming))
	if err != nil || len(data) != 6 || !strings.HasPrefix(data[4], `{"error":{"message":`) || data[5] != "[DONE]" {
		t.Errorf("%v: %q", err, data)
	}
	if status, _ := ask(t, s, chat, long("[[emulator:error-after=3]]")); status != http.StatusInternalServerError {
		t.Errorf("a failed answer in one piece has status %d", status)
	}
	if _, b := ask(t, s, chat, long("[[emulator:broken-chunk-after=3]]")); json.Valid([]byte(b)) {
		t.Errorf("a broken answer in one piece is valid: %s", b)
	}
	data, err = cutStream(t, s, long("[[emulator:pad=3000000]]", streaming))
	if err != nil || len(data) != 102 || len(data[1]) < 3_000_000 || !json.Valid([]byte(data[1])) {
		t.Errorf("%d events, %v", len(data), err)
	}
	start := time.Now()
	if status, _ := ask(t, s, chat, say("x [[emulator:tokens=3,delay=20ms,token-delay=10ms]]")); status != http.StatusOK || time.Since(start) < 50*time.Millisecond {
		t.Errorf("status %d after %v, want 50 ms of delays", status, time.Since(start))
	}
}

func TestCrashesCallCrash(t *testing.T) {
	t.Parallel()
	var crashes atomic.Int32
	s := emulatortest.Start(t, emulator.Config{Speed: 100, Crash: func() { crashes.Add(1) }})
	if _, err := post(t.Context(), t, s, chat, say("x [[emulator:crash]]")); err == nil {
		t.Error("a crashed engine answers")
	}
	if data, err := cutStream(t, s, long("[[emulator:crash-after=4]]", streaming)); err == nil || len(data) != 5 {
		t.Errorf("%d events, %v; want 4 tokens and a broken connection", len(data), err)
	}
	if crashes.Load() != 2 {
		t.Errorf("crashed %d times, want 2", crashes.Load())
	}
}

func TestRatesAreSharesOfCalls(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 1000, Faults: emulator.Faults{ErrorRate: 0.3}})
	failed := 0
	for range 100 {
		if status, _ := ask(t, s, chat, say("x", `"max_tokens":2`)); status == http.StatusInternalServerError {
			failed++
		}
	}
	if failed < 15 || failed > 45 {
		t.Errorf("%d of 100 calls failed, want about 30", failed)
	}
	if err := s.SetFaults(emulator.Faults{ResetRate: 1}); err != nil {
		t.Fatal(err)
	}
	if data, err := cutStream(t, s, long("", streaming)); err == nil || len(data) < 2 || len(data) > 17 {
		t.Errorf("%d events, %v; want a reset after 1 to 16 tokens", len(data), err)
	}
	if err := s.SetFaults(emulator.Faults{HangRate: 1}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := post(ctx, t, s, chat, say("x")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a hanging call ended with %v", err)
	}
}

func TestAFullEngineAnswers429ToAll(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Faults: emulator.Faults{Status: 429, RetryAfter: "10"}})
	resp, err := post(t.Context(), t, s, chat, say("x"))
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") != "10" {
		t.Errorf("status %d, Retry-After %q", resp.StatusCode, resp.Header.Get("Retry-After"))
	}
	if s.Counts().Calls != 1 {
		t.Errorf("%d calls counted, want 1", s.Counts().Calls)
	}
}

func TestAStalledEngineSaysThatItIsHealthyAndGoesOnLater(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100, Faults: emulator.Faults{Stall: true}})
	status := make(chan int, 1)
	go func() {
		got, _ := ask(t, s, chat, say("x"))
		status <- got
	}()
	waitFor(t, "the call to wait", func() bool { return s.Stats().Waiting == 1 })
	if got, _ := get(t, s, "/health"); got != http.StatusOK {
		t.Errorf("health: %d", got)
	}
	if err := s.SetFaults(emulator.Faults{}); err != nil {
		t.Fatal(err)
	}
	if got := <-status; got != http.StatusOK {
		t.Errorf("after the stall: %d", got)
	}
}

func TestAPreemptionStormSlowsAndLosesNothing(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100, Faults: emulator.Faults{PreemptionRate: 0.5}})
	if got := whole(t, s, chat, say("x", `"n":4,"ignore_eos":true,"max_tokens":50`)); got.Usage.Completion != 200 {
		t.Errorf("%d tokens, want 200", got.Usage.Completion)
	}
	if s.Stats().Preemptions == 0 {
		t.Error("nothing was preempted")
	}
}

func TestTheSequenceLimitFollowsTheFaults(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Faults: emulator.Faults{MaxNumSeqs: 1}})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := post(ctx, t, s, chat, long("[[emulator:hang]]", streaming)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the first call to run", func() bool { return s.Stats().Running == 1 })
	if _, err := post(ctx, t, s, chat, long("[[emulator:hang]] 2", streaming)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the second call to wait", func() bool { return s.Stats().Running == 1 && s.Stats().Waiting == 1 })
	if err := s.SetFaults(emulator.Faults{MaxNumSeqs: 4}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "both calls to run", func() bool { return s.Stats().Running == 2 })
}

func TestAStoppedEngineBreaksItsCalls(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{})
	resp, err := post(t.Context(), t, s, chat, long("[[emulator:hang]]", streaming))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := events(resp.Body); err == nil {
		t.Error("the stream of a stopped engine ends as if it were whole")
	}
}

// scrape reads and parses the metrics page.
func scrape(t *testing.T, s *emulatortest.Server) map[string]*dto.MetricFamily {
	t.Helper()
	status, page := get(t, s, "/metrics")
	if status != http.StatusOK {
		t.Fatalf("status %d", status)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(page))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

func TestTheMetricsAreVLLMs(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	prompt := strings.Repeat("word", 100)
	whole(t, s, chat, say(prompt, `"ignore_eos":true,"max_tokens":20`))
	whole(t, s, chat, say(prompt, `"ignore_eos":true,"max_tokens":30`))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := post(ctx, t, s, chat, say("[[emulator:hang]]", streaming)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a call to run", func() bool { return s.Stats().Running == 1 })
	families := scrape(t, s)
	value := func(name string, labels ...string) float64 {
		f := families[name]
		if f == nil {
			t.Fatalf("no %s", name)
		}
	metrics:
		for _, m := range f.GetMetric() {
			for i := 0; i < len(labels); i += 2 {
				found := false
				for _, l := range m.GetLabel() {
					found = found || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
				}
				if !found {
					continue metrics
				}
			}
			return m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
		t.Fatalf("no %s with %v", name, labels)
		return 0
	}
	prompts := float64(2 * 106) // 400 bytes and the template's
	rows := []struct {
		name   string
		want   float64
		labels []string
	}{
		{"vllm:num_requests_running", 1, []string{"model_name", "emulator-test", "engine", "0"}},
		{"vllm:num_requests_waiting", 0, nil},
		{"vllm:num_preemptions_total", 0, nil},
		{"vllm:prompt_tokens_total", prompts, nil},
		{"vllm:generation_tokens_total", 50, nil},
		{"vllm:prefix_cache_hits_total", 96, nil},
		{"vllm:request_success_total", 2, []string{"finished_reason", "length"}},
		{"vllm:request_success_total", 0, []string{"finished_reason", "abort"}},
		{"vllm:time_to_first_token_seconds", 2, nil},
		{"vllm:inter_token_latency_seconds", 48, nil},
		{"vllm:e2e_request_latency_seconds", 2, nil},
		{"vllm:cache_config_info", 1, []string{"block_size", "16", "num_gpu_blocks", "4097", "kv_cache_size_tokens", "65536"}},
	}
	for _, row := range rows {
		if got := value(row.name, row.labels...); got != row.want {
			t.Errorf("%s%v is %v, want %v", row.name, row.labels, got, row.want)
		}
	}
	used := s.Stats().UsedBlocks
	if got := value("vllm:kv_cache_usage_perc"); got != float64(used)/4096 || used == 0 {
		t.Errorf("usage %v with %d blocks", got, used)
	}
	if value("vllm:prefix_cache_queries_total") < prompts {
		t.Error("prefix queries do not count the prompts")
	}
}

func TestTheMetricsPageGoesWrong(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{})
	set := func(f emulator.MetricsFault) {
		if err := s.SetFaults(emulator.Faults{Metrics: f}); err != nil {
			t.Fatal(err)
		}
	}
	set(emulator.MetricsMissing)
	if status, _ := get(t, s, "/metrics"); status != http.StatusNotFound {
		t.Errorf("missing: %d", status)
	}
	set(emulator.MetricsGarbage)
	_, page := get(t, s, "/metrics")
	parser := expfmt.NewTextParser(model.UTF8Validation)
	if _, err := parser.TextToMetricFamilies(strings.NewReader(page)); err == nil {
		t.Error("garbage parses")
	}
	set(emulator.MetricsNaN)
	if got := scrape(t, s)["vllm:kv_cache_usage_perc"].GetMetric()[0].GetGauge().GetValue(); !math.IsNaN(got) {
		t.Errorf("usage %v, want NaN", got)
	}
	set(emulator.MetricsSlow)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	if resp, err := client.Do(req); err == nil {
		_ = resp.Body.Close()
		t.Error("the slow page came at once")
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	t.Parallel()
	rows := []struct {
		cfg  emulator.Config
		want []string
	}{
		{emulator.Config{Profile: "x"}, []string{"Profile", `"x"`, "a10-7b"}},
		{emulator.Config{Workload: "x"}, []string{"Workload", `"x"`, "seed-like"}},
		{emulator.Config{Speed: -1}, []string{"Speed", "-1"}},
		{emulator.Config{Speed: math.NaN()}, []string{"Speed", "NaN"}},
		{emulator.Config{ColdStart: -1}, []string{"ColdStart"}},
		{emulator.Config{KVTokens: 3}, []string{"KVTokens", "3", "16"}},
		{emulator.Config{MaxModelLen: 1 << 20}, []string{"MaxModelLen", "1048576", "12800"}},
		{emulator.Config{Models: []string{""}}, []string{"Models[0]"}},
		{emulator.Config{Faults: emulator.Faults{ErrorRate: 2}}, []string{"ErrorRate", "2"}},
		{emulator.Config{Faults: emulator.Faults{Status: 200}}, []string{"Status", "200"}},
		{emulator.Config{Faults: emulator.Faults{MaxNumSeqs: -1}}, []string{"MaxNumSeqs"}},
		{emulator.Config{Faults: emulator.Faults{Metrics: "x"}}, []string{"Metrics", `"x"`}},
		{emulator.Config{Faults: emulator.Faults{StallEvery: -1}}, []string{"StallEvery", "-1"}},
		{emulator.Config{Faults: emulator.Faults{StallEvery: time.Second, StallFor: time.Second}}, []string{"StallEvery", "1s", "twice"}},
		{emulator.Config{DataParallel: -1}, []string{"DataParallel", "-1"}},
		{emulator.Config{DataParallel: 1000}, []string{"DataParallel", "1000", "64"}},
	}
	for _, row := range rows {
		_, err := emulator.New(row.cfg, slog.New(slog.DiscardHandler))
		if err == nil {
			t.Errorf("%+v is accepted", row.cfg)
			continue
		}
		for _, want := range row.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q does not name %s", err, want)
			}
		}
	}
	if _, err := emulator.New(emulator.Config{}, slog.New(slog.DiscardHandler)); err != nil {
		t.Errorf("the zero config: %v", err)
	}
}
