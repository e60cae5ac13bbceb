package engine_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
)

func TestPagesOfSGLang(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		page   string
		ranks  []engine.Rank
		source string
	}{
		"what is free and what can be evicted":   {"two-ranks.txt", []engine.Rank{{20_000, 5000}, {20_000, 10_000}}, engine.SourceEngine},
		"underscores for colons":                 {"underscore-names.txt", []engine.Rank{{20_000, 5000}, {20_000, 10_000}}, engine.SourceEngine},
		"one sample for all priorities":          {"priorities.txt", []engine.Rank{{20_000, 5000}}, engine.SourceEngine},
		"what is used, of a size told elsewhere": {"old.txt", []engine.Rank{{20_000, 5000}}, engine.SourceEngine},
		"the share that is used":                 {"usage-only.txt", []engine.Rank{{20_000, 5000}}, engine.SourceEngine},
		"full and empty at once":                 {"never-filled.txt", []engine.Rank{{20_000, 0}}, engine.SourceEstimated},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			load, err := start(t, engine.Config{}, sglangFiles(t, "sglang/"+tc.page)).Load(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.ranks, load.Ranks); diff != "" || load.Source != tc.source {
				t.Errorf("source %s, ranks (-want +got):\n%s", load.Source, diff)
			}
		})
	}
}

func TestMoreRanksThanCanBeAreRefused(t *testing.T) {
	t.Parallel()
	var many strings.Builder
	many.WriteString("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.5\n")
	for i := range 5000 {
		fmt.Fprintf(&many, "vllm:cache_config_info{engine=\"%d\",block_size=\"16\",num_gpu_blocks=\"100\"} 1\n", i)
	}
	for name, tc := range map[string]struct {
		kind   engine.Kind
		routes routes
	}{
		"vLLM":      {engine.VLLM, routes{"GET /metrics": page([]byte(many.String()))}},
		"llama.cpp": {engine.LlamaCPP, routes{"GET /props": page([]byte(`{"total_slots":1000000000,"default_generation_settings":{"n_ctx":4096}}`))}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if load, err := start(t, engine.Config{Kind: tc.kind}, tc.routes).Load(t.Context()); err == nil {
				t.Errorf("no error, but %d ranks", len(load.Ranks))
			}
		})
	}
}

func TestMetricsMayBeElsewhere(t *testing.T) {
	t.Parallel()
	t.Run("at Triton's own port", func(t *testing.T) {
		t.Parallel()
		e := client(t, engine.Config{URL: "https://gpu-1:9000/triton/v1"})
		want := []string{"https://gpu-1:9000/triton/metrics", "https://gpu-1:8002/metrics"}
		if diff := cmp.Diff(want, e.MetricsURLs(engine.Triton)); diff != "" {
			t.Errorf("places (-want +got):\n%s", diff)
		}
	})
	t.Run("where the configuration says, which gets no key of the engine's", func(t *testing.T) {
		t.Parallel()
		var key atomic.Value
		metrics := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			key.Store(r.Header.Get("Authorization"))
			_, _ = w.Write(testdata(t, "triton/metrics.txt"))
		}))
		t.Cleanup(metrics.Close)
		elsewhere := strings.Replace(metrics.URL, "127.0.0.1", "localhost", 1)
		e := start(t, engine.Config{MetricsURL: elsewhere, APIKey: "secret"}, without(tritonFiles(t), "/metrics"))
		load, err := e.Load(t.Context())
		if err != nil || load.Capacity() != 64_000 || load.Source != engine.SourceEngine {
			t.Errorf("%+v, %v", load, err)
		}
		if got := key.Load(); got != "" {
			t.Errorf("another host was sent %q", got)
		}
	})
	t.Run("nowhere: a closed port is no reason to give up", func(t *testing.T) {
		t.Parallel()
		e := start(t, engine.Config{}, without(tritonFiles(t), "/metrics"))
		if kind, err := e.Detect(t.Context()); err != nil || kind != engine.Triton {
			t.Fatalf("kind %q, %v", kind, err)
		}
		load, err := e.Load(t.Context())
		if err != nil || load.Source != engine.SourceEstimated {
			t.Errorf("%+v, %v", load, err)
		}
	})
}

func TestAnEngineMayComeBackAsAnother(t *testing.T) {
	t.Parallel()
	var now atomic.Pointer[http.ServeMux]
	serve := func(rs routes) {
		mux := http.NewServeMux()
		for pattern, h := range rs {
			mux.HandleFunc(pattern, h)
		}
		now.Store(mux)
	}
	serve(vllmRoutes(t, "one-rank.txt"))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { now.Load().ServeHTTP(w, r) }))
	t.Cleanup(server.Close)
	e := client(t, engine.Config{URL: server.URL})
	want := func(kind engine.Kind, abilities engine.Abilities) {
		t.Helper()
		if k, err := e.Detect(t.Context()); err != nil || k != kind {
			t.Errorf("kind %q, %v; want %q", k, err, kind)
		}
		if got := e.Abilities(t.Context(), "llama"); got != abilities {
			t.Errorf("abilities %+v, want %+v", got, abilities)
		}
	}
	want(engine.VLLM, everything)
	serve(llamaCPPFiles(t))
	want(engine.VLLM, everything) // nobody has said that it was away
	e.Reset()
	want(engine.LlamaCPP, completions)
	serve(also(vllmRoutes(t, "one-rank.txt"), routes{completionsRoute: refusing("priority")}))
	e.Reset()
	want(engine.VLLM, engine.Abilities{ContinueChat: true, ContinueCompletion: true, CacheSalt: true})
}

func TestAbilitiesAreProbedOnce(t *testing.T) {
	t.Parallel()
	var probes atomic.Int64
	count := func(h http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			probes.Add(1)
			h(w, r)
		}
	}
	e := start(t, engine.Config{Kind: engine.VLLM}, routes{
		chatRoute:        count(page([]byte(oneToken))),
		completionsRoute: count(refusing(`"priority":1`)),
	})
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if got := e.Abilities(t.Context(), "m"); got != (engine.Abilities{ContinueChat: true, ContinueCompletion: true, CacheSalt: true}) {
				t.Errorf("abilities %+v", got)
			}
		})
	}
	wg.Wait()
	if n := probes.Load(); n != 2 {
		t.Errorf("%d probes of one model, want 2", n)
	}
	e.Abilities(t.Context(), "another")
	if n := probes.Load(); n != 4 {
		t.Errorf("%d probes of two models, want 4", n)
	}
}

// What cannot be found out counts as missing, and is not asked again for every job.
func TestAnEngineThatFailsHasNoAbilitiesForNow(t *testing.T) {
	t.Parallel()
	var probes atomic.Int64
	e := start(t, engine.Config{Kind: engine.VLLM}, routes{"POST /": func(w http.ResponseWriter, _ *http.Request) {
		probes.Add(1)
		w.WriteHeader(http.StatusServiceUnavailable)
	}})
	for range 3 {
		if got := e.Abilities(t.Context(), "m"); got != unprobed {
			t.Errorf("abilities %+v", got)
		}
	}
	if n := probes.Load(); n != 2 {
		t.Errorf("%d probes, want 2", n)
	}
}

func TestACallerThatLeavesDecidesNothing(t *testing.T) {
	t.Parallel()
	var block atomic.Bool
	block.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	e := start(t, engine.Config{Kind: engine.VLLM}, routes{"POST /": func(w http.ResponseWriter, r *http.Request) {
		if block.Load() {
			cancel()
			_, _ = io.Copy(io.Discard, r.Body) // so that the server sees who leaves
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, oneToken)
	}})
	if got := e.Abilities(ctx, "m"); got != unprobed {
		t.Errorf("abilities %+v", got)
	}
	block.Store(false)
	if got := e.Abilities(t.Context(), "m"); got != everything {
		t.Errorf("abilities %+v", got)
	}
	if got := client(t, engine.Config{URL: "http://127.0.0.1:1"}).Abilities(ctx, "m"); got != (engine.Abilities{}) {
		t.Errorf("an engine that is not there has %+v", got)
	}
}

func TestWhatIsMissingIsSaidOnceWithAHint(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	for pattern, h := range without(sglangFiles(t, "sglang/two-ranks.txt"), "/metrics") {
		mux.HandleFunc(pattern, h)
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	var out bytes.Buffer
	e, err := engine.New(engine.Config{URL: server.URL}, slog.New(slog.NewTextHandler(&out, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	for range 3 {
		if _, err := e.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		e.Reset()
	}
	if got := strings.Count(out.String(), "--enable-metrics"); got != 1 {
		t.Errorf("%d lines, want 1:\n%s", got, out.String())
	}
}

// always is an engine that answers everything by the same page.
type always []byte

func (a always) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(a)), Request: r}, nil
}

// FuzzPages serves whatever to every question about the load: an engine may lie, but never so that more is taken for free than there is.
func FuzzPages(f *testing.F) {
	for _, file := range []string{
		"vllm/one-rank.txt", "vllm/two-ranks.txt", "vllm/nan.txt", "vllm/cut.txt", "vllm/garbage.txt", "vllm/before-the-cache.txt", "vllm/before-v1.txt",
		"sglang/two-ranks.txt", "sglang/priorities.txt", "sglang/never-filled.txt", "sglang/server-info.json", "llamacpp/metrics.txt", "llamacpp/props.json", "llamacpp/slots.json",
		"llamacpp/slots-old.json", "tgi/metrics.txt", "tgi/info.json", "tgi/info-old.json", "triton/metrics.txt", "trtllm/metrics.txt", "lmdeploy/two-ranks.txt", "ollama/ps.json",
	} {
		f.Add(testdata(f, file))
	}
	f.Add([]byte("vllm:num_requests_running 1e19\nvllm:num_requests_waiting -3\nvllm:cache_config_info{block_size=\"9223372036854775807\",num_gpu_blocks=\"3\"} 1\n"))
	f.Add([]byte(`{"model_path":"m","tp_size":1,"dp_size":2147483648,"max_total_num_tokens":-5,"max_running_requests":9223372036854775807}`))
	f.Add([]byte(`[{"n_ctx":-1,"is_processing":null},{"n_ctx":9007199254740993,"state":7}]`))
	f.Add([]byte("tgi_batch_max_total_tokens 0.5\ntgi_batch_current_max_tokens 0.25\ntgi_batch_current_size 1\ntgi_queue_size 1\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, k := range engine.Kinds() {
			e := client(t, engine.Config{URL: "http://engine", Kind: k, KVTokens: 1000, MaxConcurrency: 3})
			e.SetTransport(always(data))
			l, err := e.Load(t.Context())
			if err != nil {
				continue
			}
			bad := l.Running < 0 || l.Waiting < 0 || l.MaxRunning < 0 || l.Preemptions < -1 || l.GeneratedTokens < -1 || l.PromptTokens < -1 || len(l.Ranks) == 0
			for _, r := range l.Ranks {
				bad = bad || r.Capacity < 1 || r.Capacity > 1<<50 || r.Used < 0 || r.Used > r.Capacity
			}
			if l.Source == engine.SourceEstimated {
				bad = bad || l.MaxRunning < 1 || l.MaxRunning > 3
			} else {
				bad = bad || l.Source != engine.SourceEngine
			}
			if bad {
				t.Errorf("%s: %+v", k, l)
			}
			if s, err := e.Shape(t.Context()); err == nil && (s.TensorParallel < 0 || s.PipelineParallel < 0 || s.DataParallel < 0) {
				t.Errorf("%s: shape %+v", k, s)
			}
		}
	})
}
