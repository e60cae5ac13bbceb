package emulator

import (
	"math"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are one rank's part of the page that vLLM shows: the core's state and counters as they are when somebody looks, and histograms kept on the way.
type metrics struct {
	// Times are wall times, as a scaled engine's clients see them.
	firstToken, interToken, latency prometheus.Observer
	promptTokens, generatedTokens   prometheus.Observer
	iterationTokens                 prometheus.Observer
	success                         map[string]prometheus.Counter
}

// metricLabels of all series of one rank.
func metricLabels(model string, rank int) prometheus.Labels {
	return prometheus.Labels{"model_name": model, "engine": strconv.Itoa(rank)}
}

func newMetrics(registry *prometheus.Registry, model string, rank, maxModelLen int, stats func() (s Stats, nan bool)) *metrics {
	labels := metricLabels(model, rank)
	m := &metrics{success: make(map[string]prometheus.Counter)}
	histogram := func(name, help string, buckets []float64) prometheus.Observer {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: labels, Buckets: buckets})
		registry.MustRegister(h)
		return h
	}
	lengths := oneTwoFive(maxModelLen)
	requestSeconds := []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	m.firstToken = histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.",
		[]float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560})
	m.interToken = histogram("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.",
		[]float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80})
	m.latency = histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", requestSeconds)
	m.promptTokens = histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", lengths)
	m.generatedTokens = histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", lengths)
	m.iterationTokens = histogram("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.",
		[]float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384})
	for _, reason := range []string{"stop", "length", "abort", "error"} {
		l := metricLabels(model, rank)
		l["finished_reason"] = reason
		m.success[reason] = prometheus.NewCounter(prometheus.CounterOpts{
			Name: "vllm:request_success_total", Help: "Count of successfully processed requests.", ConstLabels: l,
		})
		registry.MustRegister(m.success[reason])
	}
	registry.MustRegister(newCoreCollector(labels, stats))
	return m
}

// oneTwoFive are the buckets 1, 2, 5, 10, ... up to most.
func oneTwoFive(most int) []float64 {
	var out []float64
	for decade := 1; ; decade *= 10 {
		for _, m := range []int{1, 2, 5} {
			if m*decade > most {
				return out
			}
			out = append(out, float64(m*decade))
		}
	}
}

// coreCollector shows a Core's stats.
type coreCollector struct {
	stats func() (s Stats, nan bool)
	info  *prometheus.Desc
	rows  []coreRow
}

type coreRow struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(Stats) float64
}

func newCoreCollector(labels prometheus.Labels, stats func() (Stats, bool)) *coreCollector {
	c := &coreCollector{stats: stats}
	row := func(kind prometheus.ValueType, name, help string, value func(Stats) float64) {
		c.rows = append(c.rows, coreRow{prometheus.NewDesc(name, help, nil, labels), kind, value})
	}
	gauge, counter := prometheus.GaugeValue, prometheus.CounterValue
	row(gauge, "vllm:num_requests_running", "Number of requests in model execution batches.", func(s Stats) float64 { return float64(s.Running) })
	row(gauge, "vllm:num_requests_waiting", "Number of requests waiting to be processed.", func(s Stats) float64 { return float64(s.Waiting) })
	row(gauge, "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", Stats.Usage)
	row(counter, "vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", func(s Stats) float64 { return float64(s.Preemptions) })
	row(counter, "vllm:prompt_tokens_total", "Number of prefill tokens processed.", func(s Stats) float64 { return float64(s.PromptTokens) })
	row(counter, "vllm:generation_tokens_total", "Number of generation tokens processed.", func(s Stats) float64 { return float64(s.GeneratedTokens) })
	row(counter, "vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", func(s Stats) float64 { return float64(s.PrefixQueries) })
	row(counter, "vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", func(s Stats) float64 { return float64(s.PrefixHits) })
	s, _ := stats()
	c.info = prometheus.NewDesc("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", nil, prometheus.Labels{
		"block_size": strconv.Itoa(BlockTokens), "cache_dtype": "auto", "enable_prefix_caching": "True", "engine": labels["engine"],
		"gpu_memory_utilization": "0.9", "kv_cache_size_tokens": strconv.Itoa(s.Blocks * BlockTokens),
		// vLLM's own number counts one block that it never hands out.
		"num_gpu_blocks": strconv.Itoa(s.Blocks + 1),
	})
	return c
}

func (c *coreCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.info
	for _, r := range c.rows {
		ch <- r.desc
	}
}

func (c *coreCollector) Collect(ch chan<- prometheus.Metric) {
	s, nan := c.stats()
	ch <- prometheus.MustNewConstMetric(c.info, prometheus.GaugeValue, 1)
	for _, r := range c.rows {
		v := r.value(s)
		if nan && r.kind == prometheus.GaugeValue {
			v = math.NaN()
		}
		ch <- prometheus.MustNewConstMetric(r.desc, r.kind, v)
	}
}

// observe adds an event of s at the time now. The driver alone calls it.
func (m *metrics) observe(s *sink, e Event, now time.Time) {
	if e.First {
		m.firstToken.Observe(now.Sub(s.added).Seconds())
		m.promptTokens.Observe(float64(s.prompt))
	} else {
		m.interToken.Observe(now.Sub(s.lastToken).Seconds())
	}
	s.lastToken = now
	if e.Done {
		m.latency.Observe(now.Sub(s.added).Seconds())
		m.generatedTokens.Observe(float64(s.output))
		m.success[s.finish].Inc()
	}
}
