package engine

import (
	"context"
	"errors"
	"math"
)

// trtllm-serve shows its metrics at a path of their own; what stands at /metrics is something else.
var trtllm = &driver{
	kind:       TRTLLM,
	signs:      trtllmSigns,
	recognize:  recognizeTRTLLM,
	owner:      "tensorrt_llm",
	health:     []string{"/health"},
	metrics:    trtllmMetrics,
	hint:       "trtllm-serve with return_perf_metrics: true and enable_iter_perf_stats: true",
	load:       fromMetrics(trtllmLoad),
	shape:      trtllmShape,
	rawPrompts: true,
}

const trtllmMetrics = "/prometheus/metrics"

var trtllmSigns = []string{"trtllm_"}

func recognizeTRTLLM(ctx context.Context, e *Engine) (facts, bool, error) {
	m, err := e.readMetrics(ctx, trtllmMetrics, 0)
	if errors.Is(err, errNotMetrics) {
		return facts{}, false, nil
	}
	return facts{}, m.has(trtllmSigns), err
}

func trtllmLoad(m metrics, _ facts, _ Config) (l Load, missing string) {
	l = unknownLoad() // it counts tokens when a request ends
	missing = l.queue(m, "trtllm_num_requests_running", "trtllm_num_requests_waiting")
	if limit, ok := total(m.samples("trtllm_max_num_active_requests")); ok {
		l.MaxRunning = int(limit)
	}
	blocks := by(m.samples("trtllm_kv_cache_max_blocks"), math.Min, "model_name")
	per := by(m.samples("trtllm_kv_cache_tokens_per_block"), math.Min, "model_name")
	capacity := map[string]float64{}
	for rank, n := range blocks {
		if tokens := n * at(per, rank); tokens >= 1 && tokens <= maxCount {
			capacity[rank] = tokens
		}
	}
	if len(capacity) == 0 || len(capacity) < len(blocks) {
		return l, "trtllm_kv_cache_max_blocks"
	}
	var complete bool
	l.Ranks, complete = sharesOf(capacity, by(m.samples("trtllm_kv_cache_utilization"), math.Max, "model_name"))
	if !complete {
		missing = "trtllm_kv_cache_utilization"
	}
	return l, missing
}

func trtllmShape(m metrics) (shape Shape) {
	for _, s := range m.samples("trtllm_parallel_config_info") {
		shape.TensorParallel = int(labelNumber(s, "tensor_parallel_size"))
		shape.PipelineParallel = int(labelNumber(s, "pipeline_parallel_size"))
	}
	return shape
}
