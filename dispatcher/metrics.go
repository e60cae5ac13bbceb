package dispatcher

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// metrics of the leader. Model names come from the engines that are served, which is a closed set.
type metrics struct {
	failures      *prometheus.CounterVec // turns of a duty that failed
	deaths        prometheus.Counter
	ended         *prometheus.CounterVec // jobs ended here, by state
	repaired      *prometheus.CounterVec // by what was wrong
	fed           *prometheus.CounterVec // jobs moved out of waiting lines
	unlaned       *prometheus.CounterVec // jobs moved out of workers' lanes
	waiting       *prometheus.GaugeVec
	backlog       *prometheus.GaugeVec // what is accepted and has not ended, by model and unit
	oldestRunning prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		failures:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_failures_total", Help: "Turns of a duty that failed and are repeated."}, []string{"duty"}),
		deaths:        prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_dispatcher_worker_deaths_total", Help: "Workers whose leases were ended because they fell silent."}),
		ended:         prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_ended_total", Help: "Jobs ended by the dispatcher, by state."}, []string{"state"}),
		repaired:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_repaired_total", Help: "Jobs repaired by the reconciler, by what was wrong."}, []string{"fault"}),
		fed:           prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_fed_total", Help: "Jobs moved out of waiting lines."}, []string{"model"}),
		unlaned:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_unlaned_total", Help: "Jobs moved out of the lanes of workers that did not take them in time, or are gone."}, []string{"model"}),
		waiting:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_queue_waiting_jobs", Help: "Jobs that wait, by model and class; class \"line\" is the waiting lines."}, []string{"model", "class"}),
		backlog:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_queue_backlog", Help: "Durable work that is accepted and has not ended, by model and unit: jobs, bytes, or the tokens that it is expected to need."}, []string{"model", "unit"}),
		oldestRunning: prometheus.NewGauge(prometheus.GaugeOpts{Name: "millrace_oldest_running_job_seconds", Help: "Age of the attempt that has run longest."}),
	}
	for _, c := range []prometheus.Collector{m.failures, m.deaths, m.ended, m.repaired, m.fed, m.unlaned, m.waiting, m.backlog, m.oldestRunning} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("registering the dispatcher's metrics: %w", err)
		}
	}
	return m, nil
}

// count shows a model's queue.
func (m *metrics) count(info cluster.QueueInfo) {
	for _, c := range job.Classes() {
		m.waiting.WithLabelValues(string(info.Model), string(c)).Set(float64(info.Waiting[c]))
	}
	lines := 0
	for _, n := range info.WaitingLines {
		lines += n
	}
	m.waiting.WithLabelValues(string(info.Model), "line").Set(float64(lines))
	m.backlog.WithLabelValues(string(info.Model), "jobs").Set(float64(info.Total.Jobs))
	m.backlog.WithLabelValues(string(info.Model), "bytes").Set(float64(info.Total.Bytes))
	m.backlog.WithLabelValues(string(info.Model), "tokens").Set(float64(info.Total.Tokens))
}
