package worker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
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
	errElsewhere   = errors.New("another worker has room")
)

// Worker runs one engine's work.
type Worker struct {
	cfg   Config
	deps  Deps
	id    job.Worker
	log   *slog.Logger
	gate  *gate
	begun time.Time

	progress  atomic.Int64 // unix nanoseconds of the engine's last sign of life
	completed atomic.Int64
	failed    atomic.Int64
	rate      rate
	suspect   chan string // why the engine should be probed now
	badCalls  atomic.Int32
	metrics   *metrics

	mu       sync.Mutex // guards what follows
	state    cluster.WorkerState
	reason   string
	kind     engine.Kind
	models   map[job.Model]job.Tokens // served, with their context lengths
	source   string
	largest  job.Tokens
	attempts map[job.ID]context.CancelCauseFunc
}

// New validates cfg and starts nothing.
func New(cfg Config, deps Deps) (*Worker, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if err := deps.check(); err != nil {
		return nil, err
	}
	id := job.Worker(cfg.Name + "-" + strings.ToLower(rand.Text()[:8]))
	w := &Worker{
		cfg: cfg, deps: deps, id: id, log: deps.Log.With("worker", id), gate: newGate(), begun: time.Now(),
		suspect: make(chan string, 1), state: cluster.Starting, reason: "the engine has not answered yet",
		models: map[job.Model]job.Tokens{}, attempts: map[job.ID]context.CancelCauseFunc{},
	}
	var err error
	if w.metrics, err = newMetrics(deps.Registerer, w); err != nil {
		return nil, err
	}
	return w, nil
}

// ID is this run's name in leases and heartbeats.
func (w *Worker) ID() job.Worker { return w.id }

// Ready returns nil while the worker takes work, else why it does not.
func (w *Worker) Ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state == cluster.Ready {
		return nil
	}
	return fmt.Errorf("worker %s is %s: %s", w.id, w.state, w.reason)
}

// Run works until ctx ends, then drains: it pulls no more, hands back what has not started, lets what runs finish for Config.Drain, and hands back the rest.
func (w *Worker) Run(ctx context.Context) error {
	// Work in flight outlives ctx by the drain: it has a context of its own.
	run, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	var g errgroup.Group
	g.Go(func() error { return w.deps.Cluster.Announce(run, w.beat) })
	g.Go(func() error { return w.deps.Relay.OnCancel(run, w.cancelJob) })

	var pulls, deliveries sync.WaitGroup
	g.Go(func() error {
		w.watch(run, func(m job.Model) {
			for _, c := range w.consumers(m) {
				pulls.Go(func() { w.pull(ctx, run, c, &deliveries) })
			}
		}, ctx)
		return nil
	})
	<-ctx.Done()
	w.setState(cluster.Draining, "it was told to stop")
	w.deps.Cluster.Nudge()
	w.gate.close()
	pulls.Wait()

	drained := make(chan struct{})
	go func() { // ends with the deliveries, which end at the latest after stop
		deliveries.Wait()
		close(drained)
	}()
	limit := time.NewTimer(w.cfg.Drain)
	defer limit.Stop()
	select {
	case <-drained:
	case <-limit.C:
		w.log.Warn("drain limit reached: handing back what runs", "running", w.gate.status().running)
		w.stopAttempts(errDrained)
		<-drained
	}
	stop(nil)
	err := g.Wait()
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	return err
}

// consumers are those that serve m: one per stream and class, and the worker's own lane of each stream.
func (w *Worker) consumers(m job.Model) []queue.PullerConfig {
	var all []queue.PullerConfig
	for _, k := range []queue.Kind{queue.Live, queue.Work} {
		for _, c := range job.Classes() {
			all = append(all, queue.PullerConfig{Kind: k, Model: m, Class: c})
		}
		all = append(all, queue.PullerConfig{Kind: k, Model: m, Worker: w.id})
	}
	return all
}

// beat is the worker's heartbeat.
func (w *Worker) beat() cluster.Heartbeat {
	s := w.gate.status()
	w.mu.Lock()
	defer w.mu.Unlock()
	models := make([]job.Model, 0, len(w.models))
	for m := range w.models {
		models = append(models, m)
	}
	slices.Sort(models)
	host, _ := os.Hostname() //nolint:errcheck // shown to people only; "" is fine
	return cluster.Heartbeat{
		ID: string(w.id), Role: cluster.RoleWorker, Version: w.deps.Version, Host: host, Started: w.begun.UnixMilli(), Epoch: w.deps.Process,
		Worker: &cluster.WorkerInfo{
			Name: w.cfg.Name, State: w.state, Reason: w.reason, Models: models, Engine: string(w.kind),
			Capacity: s.capacity, Free: s.free, Source: w.source, Largest: w.largest, Level: s.level, Running: s.running, InHand: s.inHand,
			TokensPerSecond: w.rate.perSecond(time.Now()), Completed: w.completed.Load(), Failed: w.failed.Load(),
		},
	}
}

func (w *Worker) setState(s cluster.WorkerState, reason string) {
	w.mu.Lock()
	if w.state == cluster.Draining { // for good
		w.mu.Unlock()
		return
	}
	changed := w.state != s
	w.state, w.reason = s, reason
	w.mu.Unlock()
	if changed {
		w.log.Info("worker state", "state", s, "reason", reason)
		w.deps.Cluster.Nudge()
	}
}

// enlist makes an attempt known to cancels and drains; the returned function ends that.
func (w *Worker) enlist(id job.ID, cancel context.CancelCauseFunc) func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.attempts[id] = cancel
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.attempts, id)
	}
}

func (w *Worker) cancelJob(id job.ID) {
	w.mu.Lock()
	cancel := w.attempts[id]
	w.mu.Unlock()
	if cancel != nil {
		cancel(errCancelAsked)
	}
}

// stopAttempts stops all that runs, for one cause.
func (w *Worker) stopAttempts(cause error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, cancel := range w.attempts {
		cancel(cause)
	}
}

// alive notes that the engine has shown a sign of progress.
func (w *Worker) alive() { w.progress.Store(time.Now().UnixNano()) }

// rate measures tokens per second over the last seconds.
type rate struct {
	mu    sync.Mutex
	slots [8]int64 // tokens in each of the last seconds
	at    int64    // the second that slots[at%8] counts
}

func (r *rate) add(now time.Time, n job.Tokens) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.turnLocked(now.Unix())
	r.slots[r.at%int64(len(r.slots))] += int64(n)
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
