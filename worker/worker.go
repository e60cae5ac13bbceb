package worker

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/settle"
)

// handBack is how long what still runs at the end of a drain has to be handed back, before the stores are given up too.
const handBack = 5 * time.Second

// Worker runs one engine's work.
type Worker struct {
	cfg     Config
	deps    Deps
	id      job.Worker
	host    string
	log     *slog.Logger
	begun   time.Time
	gate    *gate
	settler *settle.Settler
	metrics *metrics

	progress  progress
	rate      rate
	completed atomic.Int64
	failed    atomic.Int64
	// servedTokens are those that the jobs were expected to need that ended here.
	servedTokens atomic.Int64
	// yields is until when what others have room for is theirs, in unix nanoseconds.
	yields      atomic.Int64
	doubts      chan doubt    // the engine should be looked at now
	suspects    chan struct{} // holds one element while a suspect starts
	alone       time.Duration // suspectAlone, but in tests
	health      health
	shape       shape
	probes      singleflight.Group
	ended       endedJobs
	binds       chan []binding
	consumerSeq atomic.Int64

	mu       sync.Mutex // guards what follows
	state    cluster.WorkerState
	reason   string
	since    time.Time // of state
	halted   error     // why no attempt may run now, nil if they may
	kind     engine.Kind
	models   map[job.Model]*served
	named    []job.Model // those that it will serve, as far as it is known before they are served
	others   bool        // the engine serves models, and none of those that are wanted
	source   string
	rank     job.Tokens                         // the capacity of the largest
	attempts map[job.ID]context.CancelCauseFunc // one for each job that runs, or is about to be claimed
	pulls    sync.WaitGroup                     // grows under mu, until the worker drains
}

// served is a model that is pulled for.
type served struct {
	length job.Tokens // the context length, 0 if unknown
	stop   context.CancelFunc
}

// New validates cfg and starts nothing.
func New(cfg Config, deps Deps) (*Worker, error) {
	if err := deps.check(); err != nil {
		return nil, err
	}
	host, _ := os.Hostname() // only to be shown; a worker without a name of its own is refused below
	if err := cfg.complete(host); err != nil {
		return nil, err
	}
	id := job.Worker(cfg.Name + "-" + strings.ToLower(rand.Text()[:8]))
	log := deps.Log.With("worker", id)
	w := &Worker{
		cfg: cfg, deps: deps, id: id, host: host, log: log, begun: time.Now(), since: time.Now(),
		settler: &settle.Settler{Queue: deps.Queue, Results: deps.Results, Relay: deps.Relay, Blobs: deps.Blobs, Log: log},
		doubts:  make(chan doubt, 1), suspects: make(chan struct{}, 1), alone: suspectAlone, binds: make(chan []binding, maxBinds), state: cluster.Starting, reason: "the engine has not answered yet",
		models: map[job.Model]*served{}, named: cfg.Models, attempts: map[job.ID]context.CancelCauseFunc{},
	}
	var err error
	if w.gate, err = newGate(cfg.Schedule, w.stop); err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
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

// yieldFor is how long an order to yield counts: who gave it may be gone, and gives it again while it should.
const yieldFor = 5 * time.Minute

func (w *Worker) yield(yield bool) {
	until := int64(0)
	if yield {
		until = time.Now().Add(yieldFor).UnixNano()
	}
	w.yields.Store(until)
}

func (w *Worker) yielding() bool { return time.Now().UnixNano() < w.yields.Load() }

// Run works until ctx ends, then drains: it pulls no more, hands back what has not started, lets what runs finish for Config.Drain, and hands back the rest. A worker that is ordered to drain
// does so at once, without a limit for what runs, and then stays, with nothing to do, until ctx ends. An order that has a limit makes the time after the end of ctx no longer than what is left of that.
func (w *Worker) Run(ctx context.Context) error {
	// What runs outlives ctx by the drain: it has a context of its own.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	if err := w.deps.Relay.OnCancel(run, w.cancelJob); err != nil {
		return fmt.Errorf("worker %s: %w", w.id, err)
	}
	pulling, stopPulling := context.WithCancel(ctx)
	defer stopPulling()
	var once sync.Once
	// The state is told last, so that a worker which says that it drains and that nothing runs will run nothing any more.
	drain := func(why string) {
		once.Do(func() {
			stopPulling()
			w.gate.close()
			w.setState(cluster.Draining, why)
		})
	}
	var deliveries sync.WaitGroup
	var g errgroup.Group
	if w.watchesGPUs() {
		g.Go(func() error { return w.deps.GPUs.Run(run) })
	}
	if err := w.awaitGPUs(ctx); err != nil {
		stop()
		return errors.Join(err, g.Wait())
	}
	var ordered atomic.Pointer[time.Time] // until when what runs may go on
	if err := w.deps.Cluster.OnDrain(run, string(w.id), func(limit time.Duration) {
		if limit > 0 {
			by := time.Now().Add(limit)
			ordered.CompareAndSwap(nil, &by)
		}
		drain("it was told to")
	}); err != nil {
		stop()
		return errors.Join(fmt.Errorf("worker %s: %w", w.id, err), g.Wait())
	}
	if err := w.deps.Cluster.OnYield(run, string(w.id), w.yield); err != nil {
		stop()
		return errors.Join(fmt.Errorf("worker %s: %w", w.id, err), g.Wait())
	}
	g.Go(func() error { return w.deps.Cluster.Announce(run, w.beat) })
	g.Go(func() error { w.dropEnded(run); return nil })
	g.Go(func() error { w.writeBinds(run); return nil })
	g.Go(func() error { w.watchProgress(run); return nil })
	g.Go(func() error { w.probeQuiet(run); return nil })
	g.Go(func() error { w.learnResponses(run); return nil })
	g.Go(func() error {
		w.watch(run, func(m job.Model) context.CancelFunc { return w.serve(pulling, run, m, &deliveries) })
		return nil
	})
	<-ctx.Done()
	drain("it was told to stop")
	w.pulls.Wait() // no more begin: serve looks at the state

	drained := make(chan struct{})
	go func() { // ends with the deliveries, which are waited for below
		deliveries.Wait()
		close(drained)
	}()
	limit := w.cfg.Drain
	if by := ordered.Load(); by != nil {
		limit = min(limit, max(time.Until(*by), time.Second)) // what has ended is told by then
	}
	if !within(limit, drained) {
		w.log.Warn("drain limit reached: handing back what runs", "running", w.gate.status().Running)
		w.halt(errDrained)
		if !within(handBack, drained) { // a store does not answer: what it cannot be told is found out by the next delivery
			w.log.Warn("handing back is given up: what runs is delivered again after its ack wait")
			stop()
			<-drained
		}
	}
	stop()
	if err := g.Wait(); err != nil {
		return fmt.Errorf("worker %s: %w", w.id, err)
	}
	return nil
}

// serve begins to pull for m, until ctx or the returned function ends it. Deliveries run under run.
func (w *Worker) serve(ctx, run context.Context, m job.Model, deliveries *sync.WaitGroup) context.CancelFunc {
	ctx, stop := context.WithCancel(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state == cluster.Draining {
		return stop
	}
	for _, c := range w.consumers(m) {
		w.pulls.Go(func() { w.pull(ctx, run, c, deliveries) })
	}
	return stop
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

// within tells whether done was closed in time.
func within(limit time.Duration, done <-chan struct{}) bool {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-done:
		return true
	case <-t.C:
		return false
	}
}
