package api

import (
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/job"
)

// metrics of the role. Labels come from closed sets.
type metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	submits  *prometheus.CounterVec
	refusals *prometheus.CounterVec
	affinity *prometheus.CounterVec
	streams  prometheus.Gauge
	panics   prometheus.Counter
}

func newMetrics(r prometheus.Registerer, h *held) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "millrace_api_requests_total", Help: "Requests answered.",
		}, []string{"route", "method", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "millrace_api_request_seconds", Help: "Time from a request's head to the end of its answer.",
			Buckets: []float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300},
		}, []string{"route", "method"}),
		submits: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "millrace_api_submits_total", Help: "Jobs that wanted to enter, by stream (work, live) and what became of them (stored, repeated, refused, unavailable).",
		}, []string{"stream", "result"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "millrace_api_refused_total", Help: "Jobs and calls refused with 429, by the error code that says which limit.",
		}, []string{"code"}),
		affinity: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "millrace_affinity_total",
			Help: "Jobs let in, by what came of the look for a worker that has their prompt in its KV cache: hit, spill (it is overloaded or gone), miss (none is known), off (no look was taken).",
		}, []string{"result"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{Name: "millrace_api_event_streams", Help: "Open event streams of jobs."}),
		panics:  prometheus.NewCounter(prometheus.CounterOpts{Name: "millrace_api_panics_total", Help: "Handlers that panicked: each is a bug."}),
	}
	if r == nil {
		return m, nil
	}
	calls := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "millrace_api_held_calls", Help: "Calls that are answered on their own connection and are not answered yet.",
	}, func() float64 { return float64(h.len()) })
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.submits, m.refusals, m.affinity, m.streams, m.panics, calls} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("registering the API's metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) request(route, method string, status int, took time.Duration) {
	switch method {
	case http.MethodGet, http.MethodPost, http.MethodDelete, http.MethodPut, http.MethodPatch, http.MethodHead, http.MethodOptions:
	default:
		method = "other" // clients may send any word
	}
	m.requests.WithLabelValues(route, method, strconv.Itoa(status)).Inc()
	m.seconds.WithLabelValues(route, method).Observe(took.Seconds())
}

func (m *metrics) submit(stream, result string) { m.submits.WithLabelValues(stream, result).Inc() }

func (m *metrics) refuse(code job.Code) { m.refusals.WithLabelValues(string(code)).Inc() }
