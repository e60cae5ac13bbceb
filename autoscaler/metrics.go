package autoscaler

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/scale"
)

// metrics of the leader; one that stands by has only the first two. Pools are a closed set, which operators write.
type metrics struct {
	leading     prometheus.Gauge
	fileInvalid prometheus.Gauge
	failures    *prometheus.CounterVec // turns of a duty that failed

	workers      *prometheus.GaugeVec // by state
	wanted       *prometheus.GaugeVec
	needed       *prometheus.GaugeVec
	most         *prometheus.GaugeVec
	demand       *prometheus.GaugeVec // in tokens, by kind
	forecast     *prometheus.GaugeVec
	throughput   *prometheus.GaugeVec
	unknown      *prometheus.GaugeVec
	unavailable  *prometheus.GaugeVec
	listStale    *prometheus.GaugeVec
	listFailures *prometheus.CounterVec
	decisions    *prometheus.CounterVec // that were written down, by action
	starts       *prometheus.CounterVec
	failedStarts *prometheus.CounterVec
	refused      *prometheus.CounterVec
	stops        *prometheus.CounterVec
	failedStops  *prometheus.CounterVec
	coldStart    *prometheus.HistogramVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_autoscaler_" + name, Help: help}, append([]string{"pool"}, labels...))
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_autoscaler_" + name, Help: help}, append([]string{"pool"}, labels...))
	}
	m := &metrics{
		leading:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "millrace_autoscaler_leading", Help: "1 while this process leads the autoscalers."}),
		fileInvalid:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "millrace_autoscaler_pools_file_invalid", Help: "1 while the pools file cannot be used, and its pools stay as they were."}),
		failures:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_autoscaler_failures_total", Help: "Turns of a duty that failed and are repeated."}, []string{"duty"}),
		workers:      gauge("workers", "Workers of a pool, by state.", "state"),
		wanted:       gauge("wanted_workers", "Workers that there are to be."),
		needed:       gauge("needed_workers", "Workers that would do at this moment."),
		most:         gauge("max_workers", "The pool's max."),
		demand:       gauge("demand_tokens", "Work that is there, in expected tokens: waiting, in flight, or lines of batches that are not queued yet.", "kind"),
		forecast:     gauge("forecast_tokens_per_second", "The rate of arrivals that is reckoned with, in expected tokens per second."),
		throughput:   gauge("throughput_tokens_per_second", "What one full worker gets done, in expected tokens per second; 0 is unknown."),
		unknown:      gauge("demand_unknown", "1 while the demand cannot be told and the last plan stands."),
		unavailable:  gauge("unavailable", "1 while the pool's starts fail again and again."),
		listStale:    gauge("list_stale", "1 while the provider has not said for long which workers there are, and nothing is started or stopped."),
		listFailures: counter("list_failures_total", "Times that the provider did not say which workers there are."),
		decisions:    counter("decisions_total", "Decisions that were written down, by action.", "action"),
		starts:       counter("starts_total", "Workers that the provider has taken on."),
		failedStarts: counter("failed_starts_total", "Starts that failed."),
		refused:      counter("refused_starts_total", "Starts for which the provider had no room."),
		stops:        counter("stops_total", "Workers that were stopped or tidied away."),
		failedStops:  counter("failed_stops_total", "Times that the provider could not stop a worker."),
		coldStart: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "millrace_autoscaler_cold_start_seconds", Help: "Time from asking for a worker until it was ready.", Buckets: []float64{1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200},
		}, []string{"pool"}),
	}
	for _, c := range []prometheus.Collector{m.leading, m.fileInvalid, m.failures, m.coldStart} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("registering the autoscaler's metrics: %w", err)
		}
	}
	for _, c := range m.byPool() {
		if c == prometheus.Collector(m.coldStart) {
			continue
		}
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("registering the autoscaler's metrics: %w", err)
		}
	}
	return m, nil
}

// pooled is a metric with a label "pool".
type pooled interface {
	prometheus.Collector
	DeletePartialMatch(prometheus.Labels) int
}

func (m *metrics) byPool() []pooled {
	return []pooled{
		m.workers, m.wanted, m.needed, m.most, m.demand, m.forecast, m.throughput, m.unknown, m.unavailable, m.listStale, m.listFailures, m.decisions, m.starts, m.failedStarts, m.refused, m.stops, m.failedStops, m.coldStart,
	}
}

func (m *metrics) lead(leading bool) { m.leading.Set(number(leading)) }

// forget drops what is known of a pool that is kept here no more. Counters stay, for they tell what this process did.
func (m *metrics) forget(pool string) {
	for _, c := range []pooled{m.workers, m.wanted, m.needed, m.most, m.demand, m.forecast, m.throughput, m.unknown, m.unavailable, m.listStale} {
		c.DeletePartialMatch(prometheus.Labels{"pool": pool})
	}
}

// show shows what a decision was made of.
func (m *metrics) show(pool string, most int, d *scale.Decision) {
	counts := countStates(d.Sample.Workers)
	for _, s := range []scale.WorkerState{scale.Ready, scale.Starting, scale.Away, scale.Draining} {
		m.workers.WithLabelValues(pool, string(s)).Set(float64(counts[s]))
	}
	m.wanted.WithLabelValues(pool).Set(float64(d.Want))
	m.needed.WithLabelValues(pool).Set(float64(d.Needed))
	m.most.WithLabelValues(pool).Set(float64(most))
	m.unknown.WithLabelValues(pool).Set(number(d.Sample.Unknown != ""))
	m.throughput.WithLabelValues(pool).Set(d.Sample.Throughput)
	if d.Sample.Unknown != "" {
		return // what was known last stands
	}
	waiting, unfed := 0.0, 0.0
	for _, a := range d.Sample.Waiting {
		waiting += float64(a.Tokens)
	}
	for _, a := range d.Sample.Unfed {
		unfed += float64(a.Tokens)
	}
	m.demand.WithLabelValues(pool, "waiting").Set(waiting)
	m.demand.WithLabelValues(pool, "in_flight").Set(float64(d.Sample.InFlight.Tokens))
	m.demand.WithLabelValues(pool, "unfed").Set(unfed)
	m.forecast.WithLabelValues(pool).Set(d.Forecast.Used)
}
