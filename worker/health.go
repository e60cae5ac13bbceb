package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

const (
	// fallWindow is the time in which fall-backs count as one after another: from the calmFalls-th on the engine must pass two probes, firstPause apart, doubling with each
	// fall-back up to mostPause.
	fallWindow = 5 * time.Minute
	calmFalls  = 3
	firstPause = time.Second
	mostPause  = 15 * time.Second
)

// health is what is known of how well the engine does.
type health struct {
	mu     sync.Mutex // guards what follows
	falls  []time.Time
	total  int64
	probe  time.Duration       // what the last probe that was passed took
	passed time.Time           // when that was
	failed map[job.ID]struct{} // jobs whose calls the engine has failed since the last good one
}

// fall notes a fall-back.
func (h *health) fall(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.total++
	recent := h.falls[:0]
	for _, t := range h.falls {
		if now.Sub(t) < fallWindow {
			recent = append(recent, t)
		}
	}
	if len(recent) < 32 {
		recent = append(recent, now)
	}
	h.falls = recent
	clear(h.failed)
}

// proofs are how many probes in a row the engine must pass after its fall-backs so far, and the pause between them.
func (h *health) proofs(now time.Time) (n int, pause time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	recent := 0
	for _, t := range h.falls {
		if now.Sub(t) < fallWindow {
			recent++
		}
	}
	if recent < calmFalls {
		return 1, 0
	}
	return 2, min(firstPause<<min(recent-calmFalls, 10), mostPause)
}

// badCall counts a job whose call failed through the engine's fault, and tells whether that makes limit of them with no good call between. A job that comes back counts once: the one that
// cannot be answered anywhere condemns no engine.
func (h *health) badCall(id job.ID, limit int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failed == nil {
		h.failed = map[job.ID]struct{}{}
	}
	h.failed[id] = struct{}{}
	return len(h.failed) >= limit
}

func (h *health) goodCall() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.failed)
}

// doubt is why the engine should be looked at now. With a state it is no question any more.
type doubt struct {
	state cluster.WorkerState
	why   string
}

// doubt asks for a look at the engine now. Of several doubts at a time the first counts, but that one that is no question is always told.
func (w *Worker) doubt(d doubt) {
	for {
		select {
		case w.doubts <- d:
			return
		default:
		}
		if d.state == "" {
			return
		}
		select {
		case <-w.doubts:
		default:
		}
	}
}

// badCall counts a call of a job that failed through the engine's fault: jobs in a row end the worker's trust.
func (w *Worker) badCall(id job.ID, why string) {
	if w.health.badCall(id, w.cfg.FailuresInRow) {
		w.doubt(doubt{state: cluster.Unready, why: fmt.Sprintf("the calls of %d jobs in a row failed; the last: %s", w.cfg.FailuresInRow, why)})
	}
}

// goodCall notes a call that the engine has answered well.
func (w *Worker) goodCall() { w.health.goodCall() }

// errNotFit is why the attempts end of a worker that must not run anything.
var errNotFit = errors.New("the worker's hardware has failed")

// probe has the engine complete one token.
func (w *Worker) probe(ctx context.Context) error {
	w.mu.Lock()
	var model job.Model
	for m := range w.models {
		if model == "" || m < model {
			model = m
		}
	}
	w.mu.Unlock()
	return w.probeModel(ctx, model)
}

func (w *Worker) probeModel(ctx context.Context, m job.Model) error {
	began := time.Now()
	if err := w.deps.Engine.Probe(ctx, m); err != nil {
		return err
	}
	took := time.Since(began)
	w.metrics.probe.Observe(took.Seconds())
	w.health.mu.Lock()
	defer w.health.mu.Unlock()
	w.health.probe, w.health.passed = took, time.Now()
	return nil
}

// notReady probes the engine once, shortly: whether it is the engine that is at fault, and not a job. Those who ask at the same time share the answer.
func (w *Worker) notReady(ctx context.Context) bool {
	_, err, _ := w.probes.Do("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), scrapeTimeout) // others may wait for it
		defer cancel()
		return nil, w.probe(ctx)
	})
	return err != nil
}
