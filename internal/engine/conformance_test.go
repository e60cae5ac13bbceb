package engine_test

import (
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
)

// conformance is one kind of engine in one version or state, as its routes show it.
type conformance struct {
	cfg    engine.Config
	routes func(*testing.T) routes
	kind   engine.Kind
	models []engine.ModelInfo
	load   engine.Load
	shape  engine.Shape
	// abilities of the model that is probed.
	abilities engine.Abilities
}

const (
	chatRoute, completionsRoute = "POST /v1/chat/completions", "POST /v1/completions"
	oneToken                    = `{"choices":[{"index":0,"finish_reason":"length"}]}`
)

// files serves each route's file of testdata, health as told, and completes a token for whoever asks.
func files(t *testing.T, byRoute map[string]string) routes {
	rs := routes{chatRoute: page([]byte(oneToken)), completionsRoute: page([]byte(oneToken))}
	for route, file := range byRoute {
		if file == "" {
			rs["GET "+route] = page(nil)
		} else {
			rs["GET "+route] = page(testdata(t, file))
		}
	}
	return rs
}

// refusing answers 400 to bodies that have text.
func refusing(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), text) {
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"error":{"message":"Got priority 1 but Priority scheduling is not enabled.","type":"BadRequestError","param":null,"code":400}}`)
			return
		}
		_, _ = io.WriteString(w, oneToken)
	}
}

// without takes routes away.
func without(rs routes, paths ...string) routes {
	rs = maps.Clone(rs)
	for _, p := range paths {
		delete(rs, "GET "+p)
	}
	return rs
}

// also adds routes.
func also(rs routes, more routes) routes {
	rs = maps.Clone(rs)
	maps.Copy(rs, more)
	return rs
}

func sglangFiles(t *testing.T, metrics string) routes {
	return files(t, map[string]string{
		"/server_info": "sglang/server-info.json", "/metrics": metrics, "/v1/models": "sglang/models.json", "/health_generate": "", "/health": "",
	})
}

func llamaCPPFiles(t *testing.T) routes {
	return files(t, map[string]string{
		"/props": "llamacpp/props.json", "/slots": "llamacpp/slots.json", "/metrics": "llamacpp/metrics.txt", "/v1/models": "llamacpp/models.json", "/health": "",
	})
}

func tgiFiles(t *testing.T) routes {
	return files(t, map[string]string{"/info": "tgi/info.json", "/metrics": "tgi/metrics.txt", "/v1/models": "tgi/models.json", "/health": ""})
}

func tritonFiles(t *testing.T) routes {
	return files(t, map[string]string{
		"/v2": "triton/server.json", "/metrics": "triton/metrics.txt", "/v1/models": "triton/models.json", "/v2/health/ready": "",
	})
}

func trtllmFiles(t *testing.T) routes {
	return files(t, map[string]string{
		"/metrics": "trtllm/stats.json", "/prometheus/metrics": "trtllm/metrics.txt", "/v1/models": "trtllm/models.json", "/health": "",
	})
}

func lmdeployFiles(t *testing.T) routes {
	return files(t, map[string]string{"/metrics": "lmdeploy/two-ranks.txt", "/v1/models": "lmdeploy/models.json", "/health": ""})
}

const notSupported = `{"error":{"code":501,"message":"This server does not support it.","type":"not_supported_error"}}`

var (
	llamaModel  = []engine.ModelInfo{{Model: "llama", ContextLength: 8192}}
	everything  = engine.Abilities{ContinueChat: true, ContinueCompletion: true, Priority: true, CacheSalt: true}
	completions = engine.Abilities{ContinueCompletion: true}
	unprobed    = engine.Abilities{ContinueCompletion: true, CacheSalt: true} // of vLLM
)

func slots(n int, used ...int) []engine.Rank {
	ranks := make([]engine.Rank, n)
	for i := range ranks {
		ranks[i].Capacity = 4096
	}
	for _, i := range used {
		ranks[i].Used = 4096
	}
	return ranks
}

var kinds = map[string]conformance{
	"vLLM": {
		routes:    func(t *testing.T) routes { return vllmRoutes(t, "one-rank.txt") },
		kind:      engine.VLLM,
		models:    llamaModel,
		load:      engine.Load{Running: 3, Waiting: 2, Ranks: []engine.Rank{{16_000, 4000}}, Preemptions: 4, GeneratedTokens: 1234, PromptTokens: -1, Source: engine.SourceEngine},
		shape:     engine.Shape{DataParallel: 1},
		abilities: everything,
	},
	"vLLM with two ranks, first come first served": {
		routes: func(t *testing.T) routes {
			return also(vllmRoutes(t, "two-ranks.txt"), routes{completionsRoute: refusing(`"priority":1`)})
		},
		kind:   engine.VLLM,
		models: llamaModel,
		load: engine.Load{
			Running: 8, Waiting: 2, Ranks: []engine.Rank{{16_000, 4000}, {32_000, 16_000}}, Preemptions: 8, GeneratedTokens: 2468, PromptTokens: -1, Source: engine.SourceEngine,
		},
		shape:     engine.Shape{DataParallel: 2},
		abilities: engine.Abilities{ContinueChat: true, ContinueCompletion: true, CacheSalt: true},
	},
	"vLLM before v1": {
		routes: func(t *testing.T) routes {
			return also(vllmRoutes(t, "before-v1.txt"), routes{chatRoute: refusing("continue_final_message"), completionsRoute: refusing("priority")})
		},
		kind:      engine.VLLM,
		models:    llamaModel,
		load:      engine.Load{Running: 3, Waiting: 3, Ranks: []engine.Rank{{16_000, 4000}}, Preemptions: 4, GeneratedTokens: 1234, PromptTokens: 5678, Source: engine.SourceEngine},
		shape:     engine.Shape{DataParallel: 1},
		abilities: unprobed,
	},
	"an emulator of vLLM without /version": {
		routes:    func(t *testing.T) routes { return without(vllmRoutes(t, "recorded.txt"), "/version") },
		kind:      engine.VLLM,
		models:    llamaModel,
		load:      engine.Load{Ranks: []engine.Rank{{16_368, 0}}, Preemptions: -1, GeneratedTokens: 167, PromptTokens: 102, Source: engine.SourceEngine},
		shape:     engine.Shape{DataParallel: 1},
		abilities: everything,
	},
	"vLLM that keeps no statistics, with its developers' routes": {
		routes: func(t *testing.T) routes {
			return also(vllmRoutes(t, "other-names.txt"), routes{"GET /server_info": page([]byte(`{"vllm_config":"model='llama', tensor_parallel_size=1"}`))})
		},
		kind:      engine.VLLM,
		models:    llamaModel,
		load:      engine.Load{Ranks: []engine.Rank{{32_768, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
		abilities: everything,
	},
	"SGLang": {
		routes: func(t *testing.T) routes { return sglangFiles(t, "sglang/two-ranks.txt") },
		kind:   engine.SGLang,
		models: llamaModel,
		load: engine.Load{
			Running: 8, Waiting: 2, Ranks: []engine.Rank{{20_000, 5000}, {20_000, 10_000}}, MaxRunning: 48, Preemptions: 7, GeneratedTokens: 1234, PromptTokens: 1000,
			Source: engine.SourceEngine,
		},
		shape:     engine.Shape{TensorParallel: 2, PipelineParallel: 1, DataParallel: 2},
		abilities: engine.Abilities{ContinueChat: true, ContinueCompletion: true},
	},
	"SGLang with priorities, behind a page that speaks of vLLM too": {
		routes: func(t *testing.T) routes {
			both := append(testdata(t, "vllm/one-rank.txt"), testdata(t, "sglang/priorities.txt")...)
			return also(sglangFiles(t, "sglang/priorities.txt"), routes{"GET /metrics": page(both)})
		},
		kind:   engine.SGLang,
		models: llamaModel,
		load: engine.Load{
			Running: 3, Waiting: 2, Ranks: []engine.Rank{{20_000, 5000}}, MaxRunning: 48, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEngine,
		},
		shape:     engine.Shape{TensorParallel: 2, PipelineParallel: 1, DataParallel: 2},
		abilities: engine.Abilities{ContinueChat: true, ContinueCompletion: true},
	},
	"SGLang before /server_info": {
		routes: func(t *testing.T) routes {
			rs := files(t, map[string]string{
				"/get_server_info": "sglang/server-info-old.json", "/metrics": "sglang/old.txt", "/v1/models": "sglang/models.json", "/health": "",
			})
			rs[chatRoute] = refusing("continue_final_message")
			return rs
		},
		kind:   engine.SGLang,
		models: llamaModel,
		load: engine.Load{
			Running: 3, Waiting: 2, Ranks: []engine.Rank{{20_000, 5000}}, MaxRunning: 48, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEngine,
		},
		shape:     engine.Shape{TensorParallel: 2, DataParallel: 1},
		abilities: completions,
	},
	"SGLang without --enable-metrics": {
		routes: func(t *testing.T) routes { return without(sglangFiles(t, "sglang/two-ranks.txt"), "/metrics") },
		kind:   engine.SGLang,
		models: llamaModel,
		load: engine.Load{
			Ranks: []engine.Rank{{20_000, 0}, {20_000, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated,
		},
		shape:     engine.Shape{TensorParallel: 2, PipelineParallel: 1, DataParallel: 2},
		abilities: engine.Abilities{ContinueChat: true, ContinueCompletion: true},
	},
	"llama.cpp": {
		routes:    llamaCPPFiles,
		kind:      engine.LlamaCPP,
		models:    []engine.ModelInfo{{Model: "llama-3.1-8b", ContextLength: 4096}},
		load:      engine.Load{Running: 2, Waiting: 1, Ranks: slots(4, 0, 2), MaxRunning: 4, Preemptions: -1, GeneratedTokens: -1, PromptTokens: 5678, Source: engine.SourceEngine},
		abilities: completions,
	},
	"llama.cpp without --metrics, which answers as Ollama too": {
		routes: func(t *testing.T) routes {
			return also(llamaCPPFiles(t), routes{"GET /metrics": status(501, notSupported), "GET /api/version": page(testdata(t, "ollama/version.json"))})
		},
		kind:      engine.LlamaCPP,
		models:    []engine.ModelInfo{{Model: "llama-3.1-8b", ContextLength: 4096}},
		load:      engine.Load{Running: 2, Ranks: slots(4, 0, 2), MaxRunning: 4, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEngine},
		abilities: completions,
	},
	"llama.cpp with slots as they were": {
		routes: func(t *testing.T) routes {
			return also(llamaCPPFiles(t), routes{"GET /slots": page(testdata(t, "llamacpp/slots-old.json"))})
		},
		kind:      engine.LlamaCPP,
		models:    []engine.ModelInfo{{Model: "llama-3.1-8b", ContextLength: 4096}},
		load:      engine.Load{Running: 1, Waiting: 1, Ranks: slots(4, 0), MaxRunning: 4, Preemptions: -1, GeneratedTokens: -1, PromptTokens: 5678, Source: engine.SourceEngine},
		abilities: completions,
	},
	"llama.cpp with --no-slots": {
		routes: func(t *testing.T) routes {
			return also(llamaCPPFiles(t), routes{"GET /slots": status(501, notSupported)})
		},
		kind:      engine.LlamaCPP,
		models:    []engine.ModelInfo{{Model: "llama-3.1-8b", ContextLength: 4096}},
		load:      engine.Load{Running: 2, Waiting: 1, Ranks: slots(4, 0, 1), MaxRunning: 4, Preemptions: -1, GeneratedTokens: -1, PromptTokens: 5678, Source: engine.SourceEngine},
		abilities: completions,
	},
	"llama.cpp that hides both": {
		cfg: engine.Config{MaxConcurrency: 3},
		routes: func(t *testing.T) routes {
			return also(llamaCPPFiles(t), routes{"GET /metrics": status(501, notSupported), "GET /slots": status(501, notSupported)})
		},
		kind:      engine.LlamaCPP,
		models:    []engine.ModelInfo{{Model: "llama-3.1-8b", ContextLength: 4096}},
		load:      engine.Load{Ranks: slots(4), MaxRunning: 3, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
		abilities: completions,
	},
	"TGI": {
		routes: tgiFiles,
		kind:   engine.TGI,
		models: []engine.ModelInfo{{Model: "meta-llama/Llama-3.1-8B-Instruct", ContextLength: 8192}},
		load: engine.Load{
			Running: 3, Waiting: 2, Ranks: []engine.Rank{{61_440, 9216}}, MaxRunning: 128, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEngine,
		},
		abilities: completions,
	},
	"TGI before its first request": {
		routes: func(t *testing.T) routes {
			return also(tgiFiles(t), routes{"GET /metrics": page(testdata(t, "tgi/metrics-before-the-first-request.txt"))})
		},
		kind:   engine.TGI,
		models: []engine.ModelInfo{{Model: "meta-llama/Llama-3.1-8B-Instruct", ContextLength: 8192}},
		load: engine.Load{
			Ranks: []engine.Rank{{61_440, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated,
		},
		abilities: completions,
	},
	"TGI without a list of models": {
		routes: func(t *testing.T) routes {
			return also(without(tgiFiles(t), "/v1/models", "/metrics"), routes{"GET /info": page(testdata(t, "tgi/info-old.json"))})
		},
		kind:   engine.TGI,
		models: []engine.ModelInfo{{Model: "meta-llama/Llama-3.1-8B-Instruct", ContextLength: 8192}},
		load: engine.Load{
			Ranks: []engine.Rank{{61_440, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated,
		},
		shape:     engine.Shape{TensorParallel: 2},
		abilities: completions,
	},
	"Triton": {
		routes:    tritonFiles,
		kind:      engine.Triton,
		models:    []engine.ModelInfo{{Model: "ensemble"}},
		load:      engine.Load{Running: 3, Waiting: 2, Ranks: []engine.Rank{{64_000, 16_000}}, MaxRunning: 512, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEngine},
		abilities: completions,
	},
	"Triton's OpenAI frontend with vLLM in it": {
		routes: func(t *testing.T) routes {
			both := append(testdata(t, "triton/metrics.txt"), testdata(t, "vllm/one-rank.txt")...)
			return also(without(tritonFiles(t), "/v2", "/v2/health/ready"), routes{"GET /metrics": page(both), "GET /health/ready": page(nil)})
		},
		kind:      engine.Triton,
		models:    []engine.ModelInfo{{Model: "ensemble"}},
		load:      engine.Load{Running: 3, Waiting: 2, Ranks: []engine.Rank{{16_000, 4000}}, Preemptions: 4, GeneratedTokens: 1234, PromptTokens: -1, Source: engine.SourceEngine},
		abilities: completions,
	},
	"trtllm-serve": {
		routes:    trtllmFiles,
		kind:      engine.TRTLLM,
		models:    []engine.ModelInfo{{Model: "llama"}},
		load:      engine.Load{Running: 3, Waiting: 2, Ranks: []engine.Rank{{32_000, 8000}}, MaxRunning: 256, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEngine},
		shape:     engine.Shape{TensorParallel: 4, PipelineParallel: 2},
		abilities: completions,
	},
	"trtllm-serve without metrics": {
		routes:    func(t *testing.T) routes { return without(trtllmFiles(t), "/prometheus/metrics") },
		kind:      engine.TRTLLM,
		models:    []engine.ModelInfo{{Model: "llama"}},
		load:      engine.Load{Ranks: []engine.Rank{{32_768, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
		abilities: completions,
	},
	"LMDeploy": {
		cfg:    engine.Config{KVTokens: 40_000, MaxConcurrency: 5},
		routes: lmdeployFiles,
		kind:   engine.LMDeploy,
		models: []engine.ModelInfo{{Model: "llama"}},
		load: engine.Load{
			Running: 8, Waiting: 2, Ranks: []engine.Rank{{20_000, 5000}, {20_000, 10_000}}, MaxRunning: 5, Preemptions: -1, GeneratedTokens: 1234, PromptTokens: 5678,
			Source: engine.SourceEstimated,
		},
		shape:     engine.Shape{DataParallel: 2},
		abilities: completions,
	},
	"LMDeploy without metrics": {
		routes:    func(t *testing.T) routes { return without(lmdeployFiles(t), "/metrics") },
		kind:      engine.LMDeploy,
		models:    []engine.ModelInfo{{Model: "llama"}},
		load:      engine.Load{Ranks: []engine.Rank{{32_768, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
		abilities: completions,
	},
	"Ollama": {
		cfg:    engine.Config{MaxConcurrency: 4},
		routes: func(t *testing.T) routes { return ollamaRoutes(t, "ps.json") },
		kind:   engine.Ollama,
		models: []engine.ModelInfo{{Model: "tiny", ContextLength: 2048}, {Model: "tiny:latest", ContextLength: 2048}},
		load: engine.Load{
			Ranks: []engine.Rank{{2048, 0}, {2048, 0}, {2048, 0}, {2048, 0}}, MaxRunning: 4, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated,
		},
	},
	"Ollama with no model loaded": {
		cfg:    engine.Config{MaxConcurrency: 4, KVTokens: 1000},
		routes: func(t *testing.T) routes { return ollamaRoutes(t, "ps-idle.json") },
		kind:   engine.Ollama,
		models: []engine.ModelInfo{{Model: "tiny"}, {Model: "tiny:latest"}},
		load:   engine.Load{Ranks: []engine.Rank{{1000, 0}}, MaxRunning: 4, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
	},
	"anything else with a health route": {
		cfg: engine.Config{KVTokens: 5000, MaxConcurrency: 2},
		routes: func(t *testing.T) routes {
			return also(files(t, map[string]string{"/health": ""}), routes{"GET /v1/models": page([]byte(genericModels)), "GET /metrics": status(501, "no metrics")})
		},
		kind:   engine.Generic,
		models: []engine.ModelInfo{{Model: "a", ContextLength: 4096}, {Model: "b", ContextLength: 9007199254740993}},
		load:   engine.Load{Ranks: []engine.Rank{{5000, 0}}, MaxRunning: 2, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
	},
	"anything else whose unknown routes are a page for people": {
		routes: func(t *testing.T) routes {
			return also(files(t, nil), routes{"GET /v1/models": page([]byte(genericModels)), "GET /": page([]byte("<html>"))})
		},
		kind:   engine.Generic,
		models: []engine.ModelInfo{{Model: "a", ContextLength: 4096}, {Model: "b", ContextLength: 9007199254740993}},
		load:   engine.Load{Ranks: []engine.Rank{{32_768, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
	},
	"anything else whose unknown routes are a JSON error with 200": {
		routes: func(t *testing.T) routes {
			return also(files(t, nil), routes{"GET /v1/models": page([]byte(genericModels)), "GET /": page([]byte(`{"error":"Unexpected endpoint or method."}`))})
		},
		kind:   engine.Generic,
		models: []engine.ModelInfo{{Model: "a", ContextLength: 4096}, {Model: "b", ContextLength: 9007199254740993}},
		load:   engine.Load{Ranks: []engine.Rank{{32_768, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
	},
	"TGI's sister for embeddings": {
		routes: func(t *testing.T) routes {
			return also(files(t, map[string]string{"/health": ""}), routes{
				"GET /v1/models": page([]byte(genericModels)),
				"GET /info":      page([]byte(`{"model_id":"bge","max_concurrent_requests":512,"max_input_length":512,"max_batch_tokens":16384,"version":"1.8.0"}`)),
			})
		},
		kind:   engine.Generic,
		models: []engine.ModelInfo{{Model: "a", ContextLength: 4096}, {Model: "b", ContextLength: 9007199254740993}},
		load:   engine.Load{Ranks: []engine.Rank{{32_768, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
	},
	"one that is told what it is": {
		cfg:    engine.Config{Kind: engine.Generic},
		routes: func(t *testing.T) routes { return vllmRoutes(t, "one-rank.txt") },
		kind:   engine.Generic,
		models: llamaModel,
		load:   engine.Load{Ranks: []engine.Rank{{32_768, 0}}, MaxRunning: 8, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1, Source: engine.SourceEstimated},
	},
}

func TestEachKindConforms(t *testing.T) {
	t.Parallel()
	seen := map[engine.Kind]bool{}
	for name, tc := range kinds {
		seen[tc.kind] = true
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := start(t, tc.cfg, tc.routes(t))
			kind, err := e.Detect(t.Context())
			if err != nil || kind != tc.kind {
				t.Fatalf("kind %q, %v; want %q", kind, err, tc.kind)
			}
			if err := e.Healthy(t.Context()); err != nil {
				t.Errorf("health: %v", err)
			}
			models, err := e.Models(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.models, models); diff != "" {
				t.Errorf("models (-want +got):\n%s", diff)
			}
			load, err := e.Load(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.load, load); diff != "" {
				t.Errorf("load (-want +got):\n%s", diff)
			}
			shape, err := e.Shape(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.shape, shape); diff != "" {
				t.Errorf("shape (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.abilities, e.Abilities(t.Context(), models[0].Model)); diff != "" {
				t.Errorf("abilities (-want +got):\n%s", diff)
			}
			if err := e.Probe(t.Context(), models[0].Model); err != nil {
				t.Errorf("probe: %v", err)
			}
		})
	}
	for _, k := range engine.Kinds() {
		if !seen[k] {
			t.Errorf("no row for kind %s", k)
		}
	}
}

// told is a kind's page of metrics and the samples in it that say what is used, as the beginnings of their lines.
var told = map[engine.Kind]struct {
	routes func(*testing.T) routes
	path   string
	usage  []string
	// share: the usage is a ratio, so that a percentage is garbage.
	share bool
}{
	engine.VLLM: {func(t *testing.T) routes { return vllmRoutes(t, "two-ranks.txt") }, "/metrics", []string{"vllm:kv_cache_usage_perc"}, true},
	engine.SGLang: {
		func(t *testing.T) routes { return sglangFiles(t, "sglang/two-ranks.txt") }, "/metrics",
		[]string{"sglang:kv_available_tokens", "sglang:num_used_tokens", "sglang:token_usage"},
		false,
	},
	engine.LlamaCPP: {func(t *testing.T) routes { return without(llamaCPPFiles(t), "/slots") }, "/metrics", []string{"llamacpp:requests_processing"}, false},
	engine.TGI:      {tgiFiles, "/metrics", []string{"tgi_batch_current_max_tokens"}, false},
	engine.Triton:   {tritonFiles, "/metrics", []string{`nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free"`}, false},
	engine.TRTLLM:   {trtllmFiles, "/prometheus/metrics", []string{"trtllm_kv_cache_utilization"}, true},
	engine.LMDeploy: {lmdeployFiles, "/metrics", []string{"lmdeploy:gpu_cache_usage_perc"}, true},
}

// A page that is not whole never means that nothing is used: it is an error, or the load is said to be estimated.
func TestPagesGoneWrong(t *testing.T) {
	t.Parallel()
	for kind, k := range told {
		good := string(func() []byte { return answerOf(t, k.routes(t)["GET "+k.path]) }())
		usage := func(value string) http.HandlerFunc {
			text := good
			for _, sample := range k.usage {
				text = regexp.MustCompile(`(?m)^(`+regexp.QuoteMeta(sample)+`.*) \S+$`).ReplaceAllString(text, "${1} "+value)
			}
			if text == good {
				t.Fatalf("%s: nothing to spoil", kind)
			}
			return page([]byte(text))
		}
		drop := regexp.MustCompile(`(?m)^(` + strings.Join(quoted(k.usage), "|") + `).*\n`)
		const wrong, estimated = "an error", "estimated"
		cases := map[string]struct {
			page http.HandlerFunc
			want string
		}{
			"missing":        {http.NotFound, estimated},
			"switched off":   {status(501, notSupported), estimated},
			"empty":          {page(nil), estimated},
			"other names":    {page(testdata(t, "vllm/other-names.txt")), estimated},
			"HTML":           {page(testdata(t, "vllm/garbage.txt")), wrong},
			"JSON":           {page([]byte(`{"a":1}`)), wrong},
			"half":           {page([]byte(good[:strings.LastIndex(good, "{")+3])), wrong},
			"failing":        {status(500, ""), wrong},
			"NaN":            {usage("NaN"), estimated},
			"infinite":       {usage("+Inf"), estimated},
			"negative":       {usage("-1"), estimated},
			"huge":           {usage("1e300"), estimated},
			"without usage":  {page(drop.ReplaceAll([]byte(good), nil)), estimated},
			"one rank wrong": {page(spoilOne(good, k.usage)), estimated},
		}
		if kind == engine.LlamaCPP { // no labels
			cases["half"] = struct {
				page http.HandlerFunc
				want string
			}{page([]byte(good[:len(good)-3])), wrong}
		}
		if k.share {
			cases["percentage"] = cases["NaN"]
			cases["percentage"] = struct {
				page http.HandlerFunc
				want string
			}{usage("37"), estimated}
		}
		for name, tc := range cases {
			t.Run(string(kind)+" "+name, func(t *testing.T) {
				t.Parallel()
				e := start(t, engine.Config{Kind: kind, KVTokens: 1000, MaxConcurrency: 5}, also(k.routes(t), routes{"GET " + k.path: tc.page}))
				load, err := e.Load(t.Context())
				switch {
				case tc.want == wrong:
					if err == nil {
						t.Errorf("no error, but %+v", load)
					}
				case err != nil:
					t.Error(err)
				case load.Source != engine.SourceEstimated || load.MaxRunning < 1 || load.MaxRunning > 5 || load.Capacity() == 0:
					t.Errorf("%+v; want an estimate that is bounded", load)
				}
			})
		}
	}
}

func quoted(texts []string) []string {
	out := make([]string, len(texts))
	for i, s := range texts {
		out[i] = regexp.QuoteMeta(s)
	}
	return out
}

// spoilOne makes the first sample of each name a number that cannot be.
func spoilOne(text string, samples []string) []byte {
	for _, s := range samples {
		line := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(s) + `.*$`).FindString(text)
		text = strings.Replace(text, line, line[:strings.LastIndex(line, " ")]+" NaN", 1)
	}
	return []byte(text)
}

func answerOf(t *testing.T, h http.HandlerFunc) []byte {
	t.Helper()
	w := httptest.NewRecorder()
	h(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	return w.Body.Bytes()
}
