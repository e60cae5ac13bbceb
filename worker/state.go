package worker

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// Why an attempt is stopped from outside: the causes of its context.
var (
	errCancelAsked = errors.New("a client asked to cancel the job")
	errFenced      = errors.New("another attempt owns the job")
	errRunTimeout  = errors.New("the attempt is over its run time")
	errExpired     = errors.New("the job's deadline has passed")
	errDrained     = errors.New("the worker stops")
	errStalled     = errors.New("the engine makes no progress")
	errNobodyWaits = errors.New("the client has gone")
	errPreempted   = errors.New("an interactive job needs the room")
	errElsewhere   = errors.New("another worker has room")
)

// setState changes what heartbeats say of the worker. Draining is for good.
func (w *Worker) setState(s cluster.WorkerState, reason string) {
	w.mu.Lock()
	if w.state == cluster.Draining {
		w.mu.Unlock()
		return
	}
	before, now := w.state, time.Now()
	w.state, w.reason = s, reason
	if s != before {
		w.since = now
	}
	w.mu.Unlock()
	if before == cluster.Ready && (s == cluster.Stalled || s == cluster.Unready) {
		w.health.fall(now)
		w.metrics.unready.WithLabelValues(string(s)).Inc()
	}
	if s != before {
		w.log.Info("worker state", "state", s, "reason", reason)
		w.deps.Cluster.Nudge()
	}
}

// enlist makes an attempt known to cancels and halts; delist ends that, once: it goes before the delivery is handed back, which may come again at once. It is false for a job that this worker runs already, or is about to claim: it has two copies, or a server that was killed
// delivers once more what it had delivered, under the very same ack subject, so that the claim would take the second for a repeat of the first.
func (w *Worker) enlist(id job.ID, cancel context.CancelCauseFunc) (delist func(), ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, there := w.attempts[id]; there {
		return nil, false
	}
	w.attempts[id] = cancel
	if w.halted != nil {
		cancel(w.halted)
	}
	return sync.OnceFunc(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.attempts, id)
	}), true
}

// cancelJob stops the attempt at a job.
func (w *Worker) cancelJob(id job.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if cancel := w.attempts[id]; cancel != nil {
		cancel(errCancelAsked)
	}
}

// stop stops the attempt at a job for a reason of the gate's.
func (w *Worker) stop(id job.ID, cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if cancel := w.attempts[id]; cancel != nil {
		cancel(cause)
	}
}

// halt stops all that runs, and what would begin to.
func (w *Worker) halt(cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if errors.Is(w.halted, errDrained) { // for good
		return
	}
	w.halted = cause
	for _, cancel := range w.attempts {
		cancel(cause)
	}
}

// resume ends the halt of an engine that is well again.
func (w *Worker) resume() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if errors.Is(w.halted, errStalled) || errors.Is(w.halted, errNotFit) {
		w.halted = nil
	}
}

// beat is the worker's heartbeat.
func (w *Worker) beat() cluster.Heartbeat {
	// Before the gate, which is closed before the state says so: a worker that drains and has nothing will have nothing any more.
	w.mu.Lock()
	state, reason := w.state, w.reason
	w.mu.Unlock()
	s := w.gate.status()
	shape, gpus := w.ownGPUs()
	w.health.mu.Lock()
	falls, probe := w.health.total, w.health.probe
	w.health.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	models := make([]job.Model, 0, len(w.models))
	for m := range w.models {
		models = append(models, m)
	}
	if state == cluster.Starting && len(models) == 0 {
		models = append(models, w.named...)
	}
	slices.Sort(models)
	return cluster.Heartbeat{
		ID: string(w.id), Role: cluster.RoleWorker, Version: w.deps.Version, Host: w.host, Started: w.begun.UnixMilli(), Epoch: w.deps.Process,
		Worker: &cluster.WorkerInfo{
			Name: w.cfg.Name, State: state, Reason: reason, Models: models, NoneWanted: w.others && len(models) == 0, Engine: string(w.kind),
			Capacity: s.Capacity, Used: s.Used, Free: s.Free, FreeRank: s.FreeRank, Source: w.source, Largest: w.largestLocked(""), Level: s.Level, Running: s.Running, InHand: s.InHand,
			Load: finite(s.Load), TTFT: s.TTFT.Seconds(), EngineWaiting: s.Waiting, Limit: s.Limit, Brake: s.Brake, Yields: w.yielding(),
			Sequences: s.Sequences, PlaceLimit: s.PlaceLimit, BatchLimit: s.BatchLimit, CacheLoad: finite(s.CacheLoad),
			ChatOnly:   w.chatOnly(models),
			StateSince: float64(w.since.UnixMilli()) / 1000, FallBacks: falls, ProbeSeconds: probe.Seconds(), Shape: shape, GPUs: gpuInfo(gpus),
			TokensPerSecond: finite(w.rate.perSecond(time.Now())), Generated: w.rate.ever(), Completed: w.completed.Load(), Failed: w.failed.Load(), Served: w.servedTokens.Load(),
		},
	}
}

// finite is v, or 0 where JSON has no number for it: a heartbeat that cannot be written would be the end of the worker.
func finite(v float64) float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return 0
	}
	return v
}

// rate measures tokens per second over the last seconds.
type rate struct {
	mu    sync.Mutex
	slots [8]int64 // tokens in each of the last seconds
	at    int64    // the second that slots[at%8] counts
	total int64    // tokens ever
}

func (r *rate) add(now time.Time, n job.Tokens) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turnLocked(now.Unix())
	r.slots[r.at%int64(len(r.slots))] += int64(n)
	r.total += int64(n)
}

// ever is how many tokens were counted.
func (r *rate) ever() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.total
}

func (r *rate) perSecond(now time.Time) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turnLocked(now.Unix())
	var sum int64
	for i, n := range r.slots {
		if int64(i) != r.at%int64(len(r.slots)) { // the running second is not over
			sum += n
		}
	}
	return float64(sum) / float64(len(r.slots)-1)
}

func (r *rate) turnLocked(second int64) {
	for i := int64(0); r.at < second && i < int64(len(r.slots)); i++ {
		r.at = max(r.at+1, second-int64(len(r.slots))+1)
		r.slots[r.at%int64(len(r.slots))] = 0
	}
}
