package engine

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/millrace/millrace/internal/job"
)

type metricFamilies = map[string]*dto.MetricFamily

func parseMetrics(page []byte) (metricFamilies, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		return nil, fmt.Errorf("parsing a metrics page: %w", err)
	}
	return families, nil
}

// vLLM's own names have a colon; some exporters on the way make it an underscore.
var vllmPrefixes = []string{"vllm:", "vllm_"}

func hasVLLM(families metricFamilies) bool {
	for name := range families {
		for _, prefix := range vllmPrefixes {
			if strings.HasPrefix(name, prefix) {
				return true
			}
		}
	}
	return false
}

// vllmMetrics returns the samples of the first of names that the page has.
func vllmMetrics(families metricFamilies, names ...string) []*dto.Metric {
	for _, name := range names {
		for _, prefix := range vllmPrefixes {
			if f := families[prefix+name]; f != nil && len(f.GetMetric()) > 0 {
				return f.GetMetric()
			}
		}
	}
	return nil
}

// vllmLoad reads a page of vLLM's. missing names what a load from the engine lacks, "" if it is whole.
//
// Each data-parallel rank has its own value of the label "engine" (old versions: no label, one rank), and a usage ratio means nothing across ranks.
func vllmLoad(families metricFamilies) (load Load, missing string) {
	load = unknownLoad()
	load.Source = SourceEngine
	running, ok := total(vllmMetrics(families, "num_requests_running"))
	if !ok {
		missing = "num_requests_running"
	}
	waiting, ok := total(vllmMetrics(families, "num_requests_waiting"))
	if !ok {
		missing = "num_requests_waiting"
	}
	load.Running, load.Waiting = int(running), int(waiting)
	if n, ok := total(vllmMetrics(families, "num_preemptions_total", "num_preemptions")); ok {
		load.Preemptions = n
	}
	if n, ok := total(vllmMetrics(families, "generation_tokens_total", "generation_tokens")); ok {
		load.GeneratedTokens = n
	}

	capacity := map[string]job.Tokens{}
	for _, m := range vllmMetrics(families, "cache_config_info") {
		if tokens := vllmCapacity(m); tokens > 0 {
			capacity[label(m, "engine")] = tokens
		}
	}
	used := map[string]float64{} // by rank; NaN where the page is wrong
	for _, m := range vllmMetrics(families, "kv_cache_usage_perc", "gpu_cache_usage_perc") {
		rank, ratio := label(m, "engine"), value(m)
		if !(ratio >= 0 && ratio <= 1) { // NaN, or a percentage
			ratio = math.NaN()
		}
		if before, ok := used[rank]; ok { // several models' labels on one rank: the fullest
			ratio = max(before, ratio) // NaN wins
		}
		used[rank] = ratio
	}
	if len(capacity) == 0 {
		return load, "cache_config_info"
	}
	// One that is told without a rank's label holds for every rank; several ranks that are told as one usage cannot be told apart.
	if all, ok := capacity[""]; ok && len(capacity) == 1 {
		for rank := range used {
			capacity[rank] = all
		}
		if _, ok := used[""]; !ok && len(used) > 0 {
			delete(capacity, "")
		}
	}
	if all, ok := used[""]; ok && len(used) == 1 && len(capacity) == 1 {
		for rank := range capacity {
			used[rank] = all
		}
	}
	for _, rank := range slices.Sorted(maps.Keys(capacity)) {
		ratio, ok := used[rank]
		if !ok || math.IsNaN(ratio) {
			ratio, missing = 0, "kv_cache_usage_perc"
		}
		tokens := capacity[rank]
		load.Ranks = append(load.Ranks, Rank{Capacity: tokens, Used: job.Tokens(math.Ceil(float64(tokens) * ratio))})
	}
	return load, missing
}

// vllmCapacity is one rank's KV cache in tokens by the labels of its cache_config_info, 0 if they do not tell (they say "None" before the cache is made).
func vllmCapacity(m *dto.Metric) job.Tokens {
	if n := labelNumber(m, "kv_cache_size_tokens"); n > 0 {
		return job.Tokens(n)
	}
	block, blocks := labelNumber(m, "block_size"), labelNumber(m, "num_gpu_blocks")
	if block <= 0 || blocks <= 1 || blocks > math.MaxInt64/block {
		return 0
	}
	return job.Tokens(block * (blocks - 1)) // one block is vLLM's own placeholder
}

func labelNumber(m *dto.Metric, name string) int64 {
	n, err := strconv.ParseInt(label(m, name), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// value is a sample's, NaN if it has none.
func value(m *dto.Metric) float64 {
	switch {
	case m.GetGauge() != nil:
		return m.GetGauge().GetValue()
	case m.GetCounter() != nil:
		return m.GetCounter().GetValue()
	case m.GetUntyped() != nil:
		return m.GetUntyped().GetValue()
	}
	return math.NaN()
}

// total sums a count over ranks and models; it is unknown if there is no sample, or one that is no count.
func total(metrics []*dto.Metric) (int64, bool) {
	var sum float64
	for _, m := range metrics {
		v := value(m)
		if !(v >= 0) {
			return 0, false
		}
		sum += v
	}
	if len(metrics) == 0 || sum >= math.MaxInt64 {
		return 0, false
	}
	return int64(sum), true
}
