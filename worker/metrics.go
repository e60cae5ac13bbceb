package worker

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/schedule"
)

// metrics of a worker. Labels are from closed sets; the worker itself is told by the scrape's target.
type metrics struct {
	attempts     *prometheus.CounterVec // by how they ended
	tokens       *prometheus.CounterVec // prompt, completion
	unready      *prometheus.CounterVec // by state entered
	scrapeErrors prometheus.Counter
	panics       prometheus.Counter
	probe        prometheus.Histogram
	ttft         prometheus.Histogram
	wait         *prometheus.HistogramVec // by class
}

func newMetrics(reg prometheus.Registerer, w *Worker) (*metrics, error) {
	reg = prometheus.WrapRegistererWith(prometheus.Labels{"worker": w.cfg.Name}, reg)
	m := &metrics{
		attempts:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_worker_attempts_total", Help: "Attempts at jobs by how they ended."}, []string{"outcome"}),
		tokens:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_worker_tokens_total", Help: "Tokens of completed jobs as the engine counted them."}, []string{"kind"}),
		unready:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_worker_unready_total", Help: "How often the engine stopped being ready, by the state entered."}, []string{"state"}),
		scrapeErrors: prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_worker_engine_scrape_errors_total", Help: "Readings of the engine's metrics that failed."}),
		panics:       prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_worker_panics_total", Help: "Panics while running a job."}),
		probe:        prometheus.NewHistogram(prometheus.HistogramOpts{Name: "millrace_worker_probe_seconds", Help: "One-token completions that prove an engine ready.", Buckets: prometheus.ExponentialBuckets(0.005, 2, 14)}),
		ttft:         prometheus.NewHistogram(prometheus.HistogramOpts{Name: "millrace_worker_time_to_first_token_seconds", Help: "From the call of the engine to its first token, of streamed calls.", Buckets: prometheus.ExponentialBuckets(0.005, 2, 14)}),
		wait:         prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "millrace_job_wait_seconds", Help: "From acceptance to the first start.", Buckets: prometheus.ExponentialBuckets(0.005, 3, 14)}, []string{"class"}),
	}
	gauge := func(name, help string, f func(schedule.Status) float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 { return f(w.gate.status()) })
	}
	for _, c := range []prometheus.Collector{
		m.attempts, m.tokens, m.unready, m.scrapeErrors, m.panics, m.probe, m.ttft, m.wait, newGPUMetrics(w),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "millrace_worker_ready", Help: "1 while the worker takes work."}, func() float64 {
			if w.Ready() == nil {
				return 1
			}
			return 0
		}),
		gauge("millrace_worker_running", "Jobs that run now.", func(s schedule.Status) float64 { return float64(s.Running) }),
		gauge("millrace_worker_in_hand", "Jobs pulled and not started.", func(s schedule.Status) float64 { return float64(s.InHand) }),
		gauge("millrace_worker_kv_capacity_tokens", "The engine's KV cache.", func(s schedule.Status) float64 { return float64(s.Capacity) }),
		gauge("millrace_worker_kv_free_tokens", "What of it may still be granted.", func(s schedule.Status) float64 { return float64(s.Free) }),
		gauge("millrace_worker_load_ratio", "The share in use of what may be used, of the KV cache or of the sequences.", func(s schedule.Status) float64 { return s.Load }),
		gauge("millrace_worker_expected_ttft_seconds", "The expected time to the first token of a typical job.", func(s schedule.Status) float64 { return s.TTFT.Seconds() }),
		gauge("millrace_worker_concurrency_limit", "How many sequences may run at once; 0 is no limit.", func(s schedule.Status) float64 { return float64(s.Limit) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "millrace_worker_capacity_estimated", Help: "1 if the engine does not tell its KV capacity and the configured one is used."}, func() float64 {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.source == "estimated" {
				return 1
			}
			return 0
		}),
	} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("registering the worker's metrics: %w", err)
		}
	}
	return m, nil
}
