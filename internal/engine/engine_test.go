package engine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

const genericModels = `{"object":"list","data":[{"id":"a","object":"model","owned_by":"me","max_model_len":4096},{"id":"b","object":"model","context_length":9007199254740993}]}`

const vllmModels = `{"object":"list","data":[{"id":"llama","object":"model","owned_by":"vllm","max_model_len":8192}]}`

func vllmRoutes(t *testing.T, metrics string) routes {
	return routes{
		"GET /version":   page([]byte(`{"version":"0.11.0"}`)),
		"GET /metrics":   page(testdata(t, "vllm/"+metrics)),
		"GET /v1/models": page([]byte(vllmModels)),
		"GET /health":    page(nil),
		chatRoute:        page([]byte(oneToken)),
		completionsRoute: page([]byte(oneToken)),
	}
}

func ollamaRoutes(t *testing.T, ps string) routes {
	return routes{
		"GET /{$}":         page([]byte("Ollama is running")),
		"GET /api/version": page(testdata(t, "ollama/version.json")),
		"GET /api/ps":      page(testdata(t, "ollama/"+ps)),
		"GET /v1/models":   page(testdata(t, "ollama/models.json")),
		chatRoute:          page([]byte(oneToken)),
	}
}

func TestAnEngineThatStartsIsNotTakenForAnother(t *testing.T) {
	t.Parallel()
	var ready atomic.Bool
	rs := vllmRoutes(t, "one-rank.txt")
	metrics := rs["GET /metrics"]
	rs["GET /metrics"] = func(w http.ResponseWriter, r *http.Request) {
		if !ready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		metrics(w, r)
	}
	e := start(t, engine.Config{}, rs)
	if kind, err := e.Detect(t.Context()); err == nil {
		t.Fatalf("detected %s while it answered 503", kind)
	}
	if _, err := e.Load(t.Context()); err == nil {
		t.Fatal("told a load before it was detected")
	}
	ready.Store(true)
	if kind, err := e.Detect(t.Context()); err != nil || kind != engine.VLLM {
		t.Fatalf("kind %q, %v", kind, err)
	}
}

func TestNobodyThereIsUnreachable(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.NotFoundHandler())
	e := client(t, engine.Config{URL: server.URL})
	if _, err := e.Detect(t.Context()); err == nil || errors.Is(err, engine.ErrUnreachable) {
		t.Errorf("an engine without any route: %v; want an error, and not unreachable", err)
	}
	server.Close()
	for name, ask := range map[string]func() error{
		"Detect":  func() error { _, err := e.Detect(t.Context()); return err },
		"Models":  func() error { _, err := e.Models(t.Context()); return err },
		"Load":    func() error { _, err := e.Load(t.Context()); return err },
		"Healthy": func() error { return e.Healthy(t.Context()) },
		"Probe":   func() error { return e.Probe(t.Context(), "m") },
		"Call": func() error {
			_, err := e.Call(t.Context(), engine.Request{Endpoint: job.ChatCompletions, Body: strings.NewReader("{}"), Size: 2})
			return err
		},
	} {
		if err := ask(); !errors.Is(err, engine.ErrUnreachable) {
			t.Errorf("%s: %v; want ErrUnreachable", name, err)
		}
	}
}

func TestPagesOfVLLM(t *testing.T) {
	t.Parallel()
	told := func(change func(*engine.Load)) *engine.Load {
		l := engine.Load{
			Running: 3, Waiting: 2, Ranks: []engine.Rank{{Capacity: 16_000, Used: 4000}}, Preemptions: 4, GeneratedTokens: 1234, PromptTokens: -1, Source: engine.SourceEngine,
		}
		change(&l)
		return &l
	}
	estimated := func(ranks ...engine.Rank) *engine.Load {
		return told(func(l *engine.Load) { l.Ranks, l.MaxRunning, l.Source = ranks, 5, engine.SourceEstimated })
	}
	nothing := &engine.Load{Ranks: []engine.Rank{{Capacity: 1000}}, MaxRunning: 5, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated}
	for _, tc := range []struct {
		page string
		want *engine.Load // nil: an error
	}{
		{"one-rank.txt", told(func(*engine.Load) {})},
		{"underscore-names.txt", told(func(*engine.Load) {})},
		{"old-name.txt", told(func(*engine.Load) {})},
		{"size-label.txt", told(func(l *engine.Load) { l.Ranks = []engine.Rank{{Capacity: 15_872, Used: 3968}} })},
		{"two-ranks.txt", told(func(l *engine.Load) {
			l.Running, l.Preemptions, l.GeneratedTokens = 8, 8, 2468
			l.Ranks = []engine.Rank{{Capacity: 16_000, Used: 4000}, {Capacity: 32_000, Used: 16_000}}
		})},
		{"config-without-rank.txt", told(func(l *engine.Load) {
			l.Running, l.Preemptions, l.GeneratedTokens = 8, 8, 2468
			l.Ranks = []engine.Rank{{Capacity: 16_000, Used: 4000}, {Capacity: 16_000, Used: 8000}}
		})},
		{"two-models.txt", told(func(l *engine.Load) { l.Running, l.Ranks[0].Used = 4, 12_000 })},
		{"recorded.txt", told(func(l *engine.Load) {
			*l = engine.Load{Ranks: []engine.Rank{{Capacity: 16_368}}, Preemptions: -1, GeneratedTokens: 167, PromptTokens: 102, Source: engine.SourceEngine}
		})},
		{"nan.txt", estimated(engine.Rank{Capacity: 16_000})},
		{"percentage.txt", estimated(engine.Rank{Capacity: 16_000})},
		{"no-usage.txt", estimated(engine.Rank{Capacity: 16_000})},
		{"before-the-cache.txt", estimated(engine.Rank{Capacity: 1000})},
		{"empty.txt", nothing},
		{"other-names.txt", nothing},
		{"garbage.txt", nil},
		{"cut.txt", nil},
	} {
		t.Run(tc.page, func(t *testing.T) {
			t.Parallel()
			e := start(t, engine.Config{Kind: engine.VLLM, KVTokens: 1000, MaxConcurrency: 5}, vllmRoutes(t, tc.page))
			load, err := e.Load(t.Context())
			if tc.want == nil {
				if err == nil {
					t.Fatalf("no error, but %+v", load)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(*tc.want, load); diff != "" {
				t.Errorf("load (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAMetricsPageThatIsCutOrEndlessIsAnError(t *testing.T) {
	t.Parallel()
	for name, handler := range map[string]http.HandlerFunc{
		"endless": func(w http.ResponseWriter, _ *http.Request) {
			line := bytes.Repeat([]byte("# nothing\n"), 6<<10)
			for {
				if _, err := w.Write(line); err != nil {
					return
				}
			}
		},
		"cut": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(w, "# nothing\n")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := start(t, engine.Config{Kind: engine.VLLM}, routes{"GET /metrics": handler})
			if load, err := e.Load(t.Context()); err == nil {
				t.Fatalf("no error, but %+v", load)
			}
		})
	}
}

func TestAnEstimateIsLoggedOnce(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(page(testdata(t, "vllm/nan.txt")))
	t.Cleanup(server.Close)
	var out bytes.Buffer
	e, err := engine.New(engine.Config{URL: server.URL, Kind: engine.VLLM}, slog.New(slog.NewTextHandler(&out, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	for range 3 {
		if _, err := e.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got := strings.Count(out.String(), "missing=vllm:kv_cache_usage_perc"); got != 1 {
		t.Errorf("%d lines name what is missing, want 1:\n%s", got, out.String())
	}
}

func TestOllamaKeepsItsSlotsWhenItUnloadsTheModel(t *testing.T) {
	t.Parallel()
	var unloaded atomic.Bool
	rs := ollamaRoutes(t, "ps.json")
	loaded, idle := rs["GET /api/ps"], page(testdata(t, "ollama/ps-idle.json"))
	rs["GET /api/ps"] = func(w http.ResponseWriter, r *http.Request) {
		if unloaded.Load() {
			idle(w, r)
		} else {
			loaded(w, r)
		}
	}
	e := start(t, engine.Config{MaxConcurrency: 2}, rs)
	before, err := e.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unloaded.Store(true)
	after, err := e.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, after); diff != "" || after.LargestRank() != 2048 || after.Capacity() != 4096 {
		t.Errorf("after unloading (-before +after):\n%s", diff)
	}
}

func TestUnhealthyEngines(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		kind   engine.Kind
		routes routes
	}{
		"SGLang's model hangs":            {engine.SGLang, routes{"GET /health_generate": status(503, ""), "GET /health": page(nil)}},
		"llama.cpp loads":                 {engine.LlamaCPP, routes{"GET /health": status(503, `{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}`)}},
		"TGI says 503":                    {engine.TGI, routes{"GET /health": status(503, `{"error":"unhealthy","error_type":"healthcheck"}`)}},
		"Triton is not ready":             {engine.Triton, routes{"GET /v2/health/ready": status(400, "")}},
		"vLLM says 500":                   {engine.VLLM, routes{"GET /health": status(500, "")}},
		"vLLM has no such route":          {engine.VLLM, routes{}},
		"Ollama says 503":                 {engine.Ollama, routes{"GET /": status(503, "")}},
		"another loads its model":         {engine.Generic, routes{"GET /health": status(503, `{"error":{"message":"Loading model"}}`), "GET /v1/models": page([]byte(genericModels))}},
		"another has neither":             {engine.Generic, routes{}},
		"another's models are not served": {engine.Generic, routes{"GET /v1/models": status(502, "")}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := start(t, engine.Config{Kind: tc.kind}, tc.routes).Healthy(t.Context()); err == nil {
				t.Error("healthy")
			}
		})
	}
}

func TestProbeWantsARealCompletion(t *testing.T) {
	t.Parallel()
	const chat, completions, embeddings = "POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings"
	refused := status(400, `{"error":{"message":"no chat template","type":"BadRequestError","param":null,"code":400}}`)
	for name, tc := range map[string]struct {
		routes routes
		ready  bool
		says   string
	}{
		"chats":                    {routes{chat: page([]byte(`{"choices":[{"message":{"content":"a"}}]}`))}, true, ""},
		"completes only":           {routes{chat: refused, completions: page([]byte(`{"choices":[{"text":"a"}]}`))}, true, ""},
		"embeds only":              {routes{embeddings: page([]byte(`{"data":[{"embedding":[1]}]}`))}, true, ""},
		"loads":                    {routes{chat: status(503, "loading"), completions: page([]byte(`{"choices":[{"text":"a"}]}`))}, false, "status 503"},
		"refuses all":              {routes{chat: refused, completions: refused, embeddings: refused}, false, "no chat template"},
		"answers with nothing":     {routes{chat: page([]byte(`{"choices":[]}`))}, false, "completes nothing"},
		"answers with a page":      {routes{chat: page([]byte(`<html>`))}, false, "not the JSON"},
		"crashes on the way":       {routes{chat: func(w http.ResponseWriter, _ *http.Request) { abort(t, w) }}, false, engine.ErrUnreachable.Error()},
		"lies about its own state": {routes{"GET /health": page(nil), chat: status(500, "CUDA error")}, false, "CUDA error"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := start(t, engine.Config{Kind: engine.Generic}, tc.routes).Probe(t.Context(), "m\"1")
			if tc.ready != (err == nil) || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%v; want ready %t, an error that says %q", err, tc.ready, tc.says)
			}
		})
	}
}

func TestProbeAsksForOneTokenOfTheModel(t *testing.T) {
	t.Parallel()
	got := make(chan string, 1)
	e := start(t, engine.Config{Kind: engine.Generic, APIKey: "secret"}, routes{"POST /v1/chat/completions": func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- r.Header.Get("Authorization") + " " + string(body)
		_, _ = io.WriteString(w, `{"choices":[{}]}`)
	}})
	if err := e.Probe(t.Context(), `a"b`); err != nil {
		t.Fatal(err)
	}
	want := `Bearer secret {"model":"a\"b","messages":[{"role":"user","content":"Hi"}],"max_tokens":1}`
	if diff := cmp.Diff(want, <-got); diff != "" {
		t.Errorf("probe (-want +got):\n%s", diff)
	}
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		cfg  engine.Config
		says string
	}{
		"no URL":               {engine.Config{}, `URL ""`},
		"no scheme":            {engine.Config{URL: "127.0.0.1:8000"}, "reading the engine's URL"},
		"another scheme":       {engine.Config{URL: "grpc://h"}, "grpc://h"},
		"a query":              {engine.Config{URL: "http://h?a=b"}, "query"},
		"a password unspoiled": {engine.Config{URL: "ftp://u:pw@h"}, "u:xxxxx@h"},
		"unknown kind":         {engine.Config{URL: "http://h", Kind: "exo"}, `kind "exo": want one of [triton trtllm sglang`},
		"metrics nowhere":      {engine.Config{URL: "http://h", MetricsURL: "h:8002"}, "engine MetricsURL"},
		"metrics with a query": {engine.Config{URL: "http://h", MetricsURL: "http://h?a=b"}, "MetricsURL"},
		"negative capacity":    {engine.Config{URL: "http://h", KVTokens: -1}, "KVTokens is -1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := engine.New(tc.cfg, discard()); err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%v; want an error that says %q", err, tc.says)
			}
		})
	}
}

func TestTheURLMayEndInV1(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(page([]byte(genericModels)))
	t.Cleanup(server.Close)
	for _, suffix := range []string{"", "/", "/v1", "/v1/"} {
		e := client(t, engine.Config{URL: server.URL + suffix, Kind: engine.Generic})
		if models, err := e.Models(t.Context()); err != nil || len(models) != 2 {
			t.Errorf("%q: %v, %v", suffix, models, err)
		}
	}
}

func ExampleEngine_Load() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `vllm:num_requests_running{engine="0"} 2
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="801"} 1
`)
	}))
	defer server.Close()
	e, err := engine.New(engine.Config{URL: server.URL}, discard())
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		return
	}
	defer e.Close()
	ctx := context.Background()
	kind, err := e.Detect(ctx)
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		return
	}
	load, err := e.Load(ctx)
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		return
	}
	fmt.Fprintln(os.Stdout, kind, load.Running, load.Used(), "of", load.Capacity(), "tokens by the", load.Source)
	// Output: vllm 2 6400 of 12800 tokens by the engine
}
