package engine

import "math"

// LMDeploy's metrics are vLLM's under its own name, but for the size of the cache, which it does not tell: it is taken from the configuration, and what is used is
// counted by the caller too.
var lmdeploy = &driver{
	kind:       LMDeploy,
	signs:      []string{"lmdeploy:", "lmdeploy_num_requests_running"},
	owner:      "lmdeploy",
	health:     []string{"/health"},
	hint:       "lmdeploy serve api_server --enable-metrics, and --kv-tokens for what its cache holds",
	load:       fromMetrics(lmdeployLoad),
	shape:      func(m metrics) Shape { return Shape{DataParallel: engines(m, "lmdeploy:num_requests_running")} },
	rawPrompts: true,
}

func lmdeployLoad(m metrics, _ facts, cfg Config) (l Load, missing string) {
	l = Load{
		Preemptions:     -1,
		GeneratedTokens: counter(m.samples("lmdeploy:generation_tokens_total")),
		PromptTokens:    counter(m.samples("lmdeploy:prompt_tokens_total")),
	}
	l.queue(m, "lmdeploy:num_requests_running", "lmdeploy:num_requests_waiting")
	used := by(m.samples("lmdeploy:gpu_cache_usage_perc"), math.Max, "engine")
	if len(used) == 0 {
		return l, "lmdeploy:gpu_cache_usage_perc"
	}
	l.Ranks, _ = sharesOf(map[string]float64{"": float64(cfg.KVTokens) / float64(len(used))}, used)
	return l, "the size of the KV cache"
}
