package dispatcher

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// metrics of the leader. Model names come from the engines that are served, which is a closed set.
type metrics struct {
	failures      *prometheus.CounterVec // turns of a duty that failed
	deaths        prometheus.Counter
	ended         *prometheus.CounterVec // jobs ended here, by state
	repaired      *prometheus.CounterVec // by what was wrong
	fed           *prometheus.CounterVec // jobs moved into the lane that workers pull, by model and class
	fedTokens     *prometheus.CounterVec // and what they are expected to need
	throughput    *prometheus.GaugeVec   // expected tokens per second, by model
	mark          *prometheus.GaugeVec   // tokens that are kept before the workers, by model
	limited       *prometheus.GaugeVec   // tenants that wait for their limit, by model
	unlaned       *prometheus.CounterVec // jobs moved out of workers' lanes
	waiting       *prometheus.GaugeVec
	backlog       *prometheus.GaugeVec // what is accepted and has not ended, by model and unit
	oldestRunning prometheus.Gauge
	lines         *prometheus.CounterVec // lines of batches that were queued, by model
	batches       *prometheus.GaugeVec   // live ones, by status
	batchesEnded  *prometheus.CounterVec // by status
	tallyLag      prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		failures:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_failures_total", Help: "Turns of a duty that failed and are repeated."}, []string{"duty"}),
		deaths:        prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_dispatcher_worker_deaths_total", Help: "Workers whose leases were ended because they fell silent."}),
		ended:         prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_ended_total", Help: "Jobs ended by the dispatcher, by state."}, []string{"state"}),
		repaired:      prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_repaired_total", Help: "Jobs repaired by the reconciler, by what was wrong."}, []string{"fault"}),
		fed:           prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_fed_total", Help: "Jobs moved from waiting lines and batches to the lane that workers pull, by the class as which they were."}, []string{"model", "class"}),
		fedTokens:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_fed_tokens_total", Help: "Tokens that the jobs moved from waiting lines and batches are expected to need."}, []string{"model", "class"}),
		throughput:    prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_dispatcher_throughput_tokens", Help: "Expected tokens per second that a model's jobs end with while its workers are full."}, []string{"model"}),
		mark:          prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_dispatcher_mark_tokens", Help: "Tokens that the dispatcher keeps waiting in the lane that workers pull."}, []string{"model"}),
		limited:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_dispatcher_limited_tenants", Help: "Tenants whose work waits for their own limit on running work."}, []string{"model"}),
		unlaned:       prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_dispatcher_unlaned_total", Help: "Jobs moved out of the lanes of workers that did not take them in time, or are gone."}, []string{"model"}),
		waiting:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_queue_waiting_jobs", Help: "Jobs that wait, by model and class; class \"line\" is the waiting lines."}, []string{"model", "class"}),
		backlog:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_queue_backlog", Help: "Durable work that is accepted and has not ended, by model and unit: jobs, bytes, or the tokens that it is expected to need."}, []string{"model", "unit"}),
		oldestRunning: prometheus.NewGauge(prometheus.GaugeOpts{Name: "millrace_oldest_running_job_seconds", Help: "Age of the attempt that has run longest."}),
		lines:         prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_batch_lines_fed_total", Help: "Lines of batches that were queued."}, []string{"model"}),
		batches:       prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "millrace_batches", Help: "Batches that have not ended, by status."}, []string{"status"}),
		batchesEnded:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "millrace_batches_ended_total", Help: "Batches that ended, by status."}, []string{"status"}),
		tallyLag:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "millrace_tally_lag_outcomes", Help: "Outcomes that are stored and not yet counted for usage and batches."}),
	}
	for _, c := range []prometheus.Collector{m.failures, m.deaths, m.ended, m.repaired, m.fed, m.fedTokens, m.throughput, m.mark, m.limited, m.unlaned, m.waiting, m.backlog, m.oldestRunning, m.lines, m.batches, m.batchesEnded, m.tallyLag} {
		if err := reg.Register(c); err != nil {
			return nil, fmt.Errorf("registering the dispatcher's metrics: %w", err)
		}
	}
	return m, nil
}

// countBatches shows how many batches live.
func (m *metrics) countBatches(n map[ledger.Status]int) {
	for _, s := range []ledger.Status{ledger.Validating, ledger.InProgress, ledger.Finalizing, ledger.Cancelling} {
		m.batches.WithLabelValues(string(s)).Set(float64(n[s]))
	}
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
