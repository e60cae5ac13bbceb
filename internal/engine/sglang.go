package engine

import (
	"context"
	"maps"
	"math"
	"slices"

	dto "github.com/prometheus/client_model/go"

	"github.com/millrace/millrace/internal/job"
)

// SGLang tells its size at /server_info (before: /get_server_info), and its load in metrics only if it was started with --enable-metrics.
var sglang = &driver{
	kind:        SGLang,
	signs:       []string{"sglang:", "sglang_num_running_reqs"},
	recognize:   recognizeSGLang,
	owner:       "sglang",
	health:      []string{"/health_generate", "/health"}, // the first one runs the model
	hint:        "sglang serve --enable-metrics",
	load:        fromMetrics(sglangLoad),
	rawPrompts:  true,
	mayContinue: true,
}

func recognizeSGLang(ctx context.Context, e *Engine) (facts, bool, error) {
	for _, path := range []string{"/server_info", "/get_server_info"} {
		var info struct {
			ModelPath   string     `json:"model_path"`
			Tokens      job.Tokens `json:"max_total_num_tokens"` // of one rank
			MaxRunning  int        `json:"max_running_requests"` // of all ranks
			TP          int        `json:"tp_size"`
			PP          int        `json:"pp_size"`
			DP          int        `json:"dp_size"`
			DPAttention bool       `json:"enable_dp_attention"`
			States      []struct {
				MaxRunning int `json:"effective_max_running_requests_per_dp"`
				Memory     struct {
					Tokens job.Tokens `json:"token_capacity"`
				} `json:"memory_usage"`
			} `json:"internal_states"`
		}
		ok, err := e.hasJSON(ctx, path, &info)
		if err != nil {
			return facts{}, false, err
		}
		if !ok || info.ModelPath == "" || info.TP < 1 { // vLLM has such a route for its developers, of another shape
			continue
		}
		f := facts{
			shape:      Shape{TensorParallel: info.TP, PipelineParallel: max(info.PP, 0), DataParallel: max(info.DP, 0)},
			capacity:   believed(info.Tokens),
			ranks:      min(max(info.DP, 1), maxRanks),
			maxRunning: int(believed(job.Tokens(info.MaxRunning))),
			model:      job.Model(info.ModelPath),
		}
		if info.DPAttention && info.DP > 1 && info.TP%info.DP == 0 { // its ranks share the GPUs of one tensor-parallel group
			f.shape.TensorParallel = info.TP / info.DP
		}
		for _, s := range info.States {
			if f.capacity == 0 {
				f.capacity = believed(s.Memory.Tokens)
			}
			if n := int(believed(job.Tokens(s.MaxRunning))); n > 0 {
				f.maxRunning = n * f.ranks
			}
		}
		return f, true, nil
	}
	return facts{}, false, nil
}

// believed is a number of tokens or requests, 0 if it can be none.
func believed(n job.Tokens) job.Tokens {
	if n < 0 || n > maxCount {
		return 0
	}
	return n
}

func sglangLoad(m metrics, f facts, _ Config) (l Load, missing string) {
	l = Load{
		MaxRunning: f.maxRunning,
		// The second name is a gauge of the last step: it shows that something was retracted, and may miss some.
		Preemptions: sglangTotal(m, "sglang:num_retracted_requests_total", "sglang:num_retracted_reqs"),
		// Its plainly named counters move only when a request ends.
		GeneratedTokens: sglangRealtime(m, "decode"),
		PromptTokens:    sglangRealtime(m, "prefill_compute"),
	}
	running, waiting := sglangTotal(m, "sglang:num_running_reqs"), sglangTotal(m, "sglang:num_queue_reqs")
	l.Running, l.Waiting = int(max(running, 0)), int(max(waiting, 0))
	switch {
	case running < 0:
		missing = "sglang:num_running_reqs"
	case waiting < 0:
		missing = "sglang:num_queue_reqs"
	}

	value := func(name string, pick func(a, b float64) float64) map[string]float64 {
		return sglangRanks(m.samples(name), pick)
	}
	capacity := value("sglang:max_total_num_tokens", math.Min)
	available, evictable := value("sglang:kv_available_tokens", math.Min), value("sglang:kv_evictable_tokens", math.Min)
	used, share := value("sglang:num_used_tokens", math.Max), value("sglang:token_usage", math.Max)
	ranks := maps.Clone(share)
	for _, other := range []map[string]float64{capacity, available, used} {
		maps.Copy(ranks, other)
	}
	for _, rank := range slices.Sorted(maps.Keys(ranks)) {
		tokens, ok := capacity[rank]
		if !ok {
			tokens = float64(f.capacity)
		}
		if !(tokens >= 1) { // NaN
			return l, "sglang:max_total_num_tokens"
		}
		inUse, ok := sglangUsed(tokens, at(available, rank)+at(evictable, rank), at(used, rank), at(share, rank))
		if !ok {
			missing = "sglang:kv_available_tokens"
		}
		l.Ranks = append(l.Ranks, Rank{Capacity: job.Tokens(tokens), Used: job.Tokens(inUse)})
	}
	if len(ranks) == 0 {
		if f.capacity > 0 {
			l.Ranks = slices.Repeat([]Rank{{Capacity: f.capacity}}, max(f.ranks, 1))
		}
		missing = "sglang:max_total_num_tokens"
	}
	return l, missing
}

// sglangUsed is what is used of a rank's tokens, by the best that its page tells; NaN is what it does not. It tells false if it tells nothing that can be.
func sglangUsed(tokens, free, used, share float64) (float64, bool) {
	switch {
	case free == 0 && used == 0: // the zeros of a page that was never filled
		return 0, false
	case free <= tokens:
		return tokens - free, true
	case used <= tokens:
		return used, true
	case share <= 1:
		return math.Ceil(tokens * share), true
	}
	return 0, false
}

// at is a rank's value, NaN if it has none.
func at(ranks map[string]float64, rank string) float64 {
	if v, ok := ranks[rank]; ok {
		return v
	}
	return math.NaN()
}

// sglangRanks returns each data-parallel rank's value. The GPUs of a rank say the same each: its first pipeline stage's first one counts. With priorities there is a
// sample for each and one for all, whose label is empty. What is left of one rank are its models, of which pick takes one.
func sglangRanks(samples []*dto.Metric, pick func(a, b float64) float64) map[string]float64 {
	if all := with(samples, "priority", ""); len(all) > 0 {
		samples = all
	}
	type first struct {
		pp, tp int64
		value  float64
	}
	firsts := map[string]first{}
	for _, s := range samples {
		rank := label(s, "dp_rank")
		this := first{labelNumber(s, "pp_rank"), labelNumber(s, "tp_rank"), value(s)}
		best, ok := firsts[rank]
		switch {
		case !ok, this.pp < best.pp, this.pp == best.pp && this.tp < best.tp:
			firsts[rank] = this
		case this.pp == best.pp && this.tp == best.tp:
			best.value = pick(best.value, this.value)
			firsts[rank] = best
		}
	}
	ranks := make(map[string]float64, len(firsts))
	for rank, f := range firsts {
		ranks[rank] = f.value
	}
	return ranks
}

// sglangTotal sums a count over the ranks, -1 if it is unknown.
func sglangTotal(m metrics, names ...string) int64 { return sglangSum(m.samples(names...)) }

// sglangRealtime is the counter of the tokens of one mode of work, as they come.
func sglangRealtime(m metrics, mode string) int64 {
	return sglangSum(with(m.samples("sglang:realtime_tokens_total"), "mode", mode))
}

func sglangSum(samples []*dto.Metric) int64 {
	var sum float64
	ranks := sglangRanks(samples, func(a, b float64) float64 { return a + b })
	for _, v := range ranks {
		sum += v
	}
	if n, ok := whole(sum, len(ranks) > 0); ok {
		return n
	}
	return -1
}
