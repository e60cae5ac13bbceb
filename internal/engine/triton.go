package engine

import (
	"context"
	"maps"
	"math"
	"slices"

	"github.com/millrace/millrace/internal/job"
)

// Triton with the TensorRT-LLM backend. Its OpenAI frontend shows the metrics beside its API, the server itself on a port of their own. Each model has a KV cache.
var triton = &driver{
	kind:       Triton,
	signs:      []string{"nv_trt_llm_", "nv_inference_"},
	recognize:  recognizeTriton,
	owner:      "Triton Inference Server",
	health:     []string{"/v2/health/ready", "/health/ready"},
	port:       8002,
	hint:       "open its metrics (port 8002), or say where they are with --engine-metrics",
	load:       fromMetrics(tritonLoad),
	rawPrompts: true,
}

func recognizeTriton(ctx context.Context, e *Engine) (facts, bool, error) {
	var server struct {
		Name string `json:"name"`
	}
	ok, err := e.hasJSON(ctx, "/v2", &server)
	return facts{}, ok && server.Name == "triton", err
}

func tritonLoad(m metrics, f facts, cfg Config) (l Load, missing string) {
	if m.has(vllm.signs) { // its vLLM backend shows vLLM's own
		return vllmLoad(m, f, cfg)
	}
	l = unknownLoad()
	const requests, blocks = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
	running, ok := total(with(m.samples(requests), "request_type", "active"))
	if !ok {
		missing = requests
	}
	waiting, _ := total(with(m.samples(requests), "request_type", "waiting")) // old versions do not tell
	limit, _ := total(with(m.samples(requests), "request_type", "max"))
	l.Running, l.Waiting, l.MaxRunning = int(running), int(waiting), int(limit)

	of := func(kind string, pick func(a, b float64) float64) map[string]float64 {
		return by(with(m.samples(blocks), "kv_cache_block_type", kind), pick, "model", "version")
	}
	most, free, per := of("max", math.Min), of("free", math.Min), of("tokens_per", math.Min)
	for _, rank := range slices.Sorted(maps.Keys(most)) {
		tokens, left := most[rank]*at(per, rank), at(free, rank)*at(per, rank)
		if !(tokens >= 1 && tokens <= maxCount) { // NaN
			missing = blocks
			continue
		}
		r := Rank{Capacity: job.Tokens(tokens)}
		if left <= tokens {
			r.Used = job.Tokens(tokens - left)
		} else { // NaN, or more than there is
			missing = blocks
		}
		l.Ranks = append(l.Ranks, r)
	}
	if len(l.Ranks) == 0 {
		missing = blocks
	}
	return l, missing
}
