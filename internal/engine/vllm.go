package engine

import (
	"math"

	dto "github.com/prometheus/client_model/go"
)

// vLLM, its forks and emulators. Each data-parallel rank has its own value of the label "engine" (old versions: no label, one rank).
var vllm = &driver{
	kind:          VLLM,
	signs:         []string{"vllm:", "vllm_num_requests_running"},
	owner:         "vllm",
	health:        []string{"/health"},
	hint:          "vllm serve without --disable-log-stats",
	load:          fromMetrics(vllmLoad),
	shape:         func(m metrics) Shape { return Shape{DataParallel: engines(m, "vllm:num_requests_running")} },
	rawPrompts:    true,
	mayContinue:   true,
	mayPrioritize: true,
	cacheSalts:    true,
}

func vllmLoad(m metrics, _ facts, _ Config) (l Load, missing string) {
	l = Load{
		Preemptions:     counter(m.samples("vllm:num_preemptions_total", "vllm:num_preemptions")),
		GeneratedTokens: counter(m.samples("vllm:generation_tokens_total", "vllm:generation_tokens")),
		PromptTokens:    counter(m.samples("vllm:prompt_tokens_total", "vllm:prompt_tokens")),
	}
	missing = l.queue(m, "vllm:num_requests_running", "vllm:num_requests_waiting")
	if swapped, ok := total(m.samples("vllm:num_requests_swapped")); ok { // before v1: they wait for room, too
		l.Waiting += int(swapped)
	}
	capacity := map[string]float64{}
	for _, s := range m.samples("vllm:cache_config_info") {
		l.MaxRunning += int(labelNumber(s, "max_num_seqs"))
		if tokens := vllmCapacity(s); tokens > 0 {
			capacity[label(s, "engine")] = tokens
		}
	}
	if len(capacity) == 0 {
		return l, "vllm:cache_config_info"
	}
	var complete bool
	l.Ranks, complete = sharesOf(capacity, by(m.samples("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), math.Max, "engine"))
	if !complete {
		missing = "vllm:kv_cache_usage_perc"
	}
	return l, missing
}

// vllmCapacity is one rank's KV cache in tokens by the labels of its cache_config_info, 0 if they do not tell (they say "None" before the cache is made).
func vllmCapacity(s *dto.Metric) float64 {
	if n := labelNumber(s, "kv_cache_size_tokens"); n > 0 {
		return float64(n)
	}
	tokens := float64(labelNumber(s, "block_size")) * float64(labelNumber(s, "num_gpu_blocks")-1) // one block is vLLM's own placeholder
	if tokens > maxCount {
		return 0
	}
	return max(0, tokens)
}

// engines counts the data-parallel ranks that a metric of vLLM's style tells of, 0 if there is none.
func engines(m metrics, name string) int { return len(by(m.samples(name), math.Max, "engine")) }
