package dispatcher

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

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
	"github.com/millrace/millrace/internal/settle"
)

// Config of a Dispatcher. Zero fields get the defaults named.
type Config struct {
	// Sweep is the period of looking at lanes, holders and queues. Default 1 s.
	Sweep time.Duration
	// LanePatience is how long a job waits in the lane of a worker that does not take it, before any worker may have it. Default 2 s.
	LanePatience time.Duration
	// Deadlines is the period of looking for late jobs. Default 250 ms.
	Deadlines time.Duration
	// Reconcile is the period of comparing Redis with the streams. Default 10 s.
	Reconcile time.Duration
	// AcceptingAfter is how long a job may be in the middle of its acceptance before it is decided for its client. Default 30 s.
	AcceptingAfter time.Duration
	// FeedAhead is how much work is kept in the lane that workers pull, as a time at a model's measured throughput. What waits beyond that waits in tenants' lines and batches' files, where whose turn it is can still be decided: a tenant that comes behind a large backlog waits for so long at least. Default 3 s.
	FeedAhead time.Duration
	// FeedLeast is how many jobs are kept there at least, for a model whose throughput is not known. Default 16.
	FeedLeast int
	// BatchFloor is the share of FeedAhead that work of the batch class may always fill, 0 to below 1. Default 0.1; negative is none.
	BatchFloor float64
	// MaxDeaths is how many deaths of its worker end a job. Default 3.
	MaxDeaths int
	// FileSweep is the period of removing files whose time is over. Default 1 min.
	FileSweep time.Duration
	// BlobSweep is the period of looking for objects that belong to no job, file or batch. Default 1 h. BlobAge is how old such an object must be: longer than a call waits on its connection, whose
	// job cannot be looked up. Default 25 h.
	BlobSweep, BlobAge time.Duration
	// BatchMaxLine bounds a line of a batch's file in bytes, as the API bounds a request's body. Default 32 MiB. BatchMaxLines bounds a file's requests. Default 50,000.
	BatchMaxLine, BatchMaxLines int64
	// BatchRunTimeout bounds each attempt at a line. Default 1 h; at most 12 h.
	BatchRunTimeout time.Duration
	// BatchKeep is how long after a batch's end its lines' outcomes are kept beside its files. Default 24 h; more than BatchRunTimeout. BatchPurge is the period of looking for those that are over. Default 10 min.
	BatchKeep, BatchPurge time.Duration
}

func (c *Config) complete() error {
	for _, f := range []struct {
		name  string
		value *time.Duration
		def   time.Duration
	}{
		{"Sweep", &c.Sweep, time.Second},
		{"LanePatience", &c.LanePatience, 2 * time.Second},
		{"Deadlines", &c.Deadlines, 250 * time.Millisecond},
		{"Reconcile", &c.Reconcile, 10 * time.Second},
		{"AcceptingAfter", &c.AcceptingAfter, 30 * time.Second},
		{"FeedAhead", &c.FeedAhead, 3 * time.Second},
		{"FileSweep", &c.FileSweep, time.Minute},
		{"BlobSweep", &c.BlobSweep, time.Hour},
		{"BlobAge", &c.BlobAge, 25 * time.Hour},
		{"BatchRunTimeout", &c.BatchRunTimeout, time.Hour},
		{"BatchKeep", &c.BatchKeep, 24 * time.Hour},
		{"BatchPurge", &c.BatchPurge, 10 * time.Minute},
	} {
		if *f.value < 0 {
			return fmt.Errorf("dispatcher: %s is %s, which must not be negative", f.name, *f.value)
		}
		if *f.value == 0 {
			*f.value = f.def
		}
	}
	for _, f := range []struct {
		name  string
		value *int
		def   int
	}{{"FeedLeast", &c.FeedLeast, 16}, {"MaxDeaths", &c.MaxDeaths, 3}} {
		if *f.value < 0 {
			return fmt.Errorf("dispatcher: %s is %d, which must not be negative", f.name, *f.value)
		}
		if *f.value == 0 {
			*f.value = f.def
		}
	}
	for _, f := range []struct {
		name  string
		value *int64
		def   int64
	}{{"BatchMaxLine", &c.BatchMaxLine, 32 << 20}, {"BatchMaxLines", &c.BatchMaxLines, 50_000}} {
		if *f.value < 0 {
			return fmt.Errorf("dispatcher: %s is %d, which must not be negative", f.name, *f.value)
		}
		if *f.value == 0 {
			*f.value = f.def
		}
	}
	if c.BatchRunTimeout > 12*time.Hour || c.BatchKeep <= c.BatchRunTimeout {
		return fmt.Errorf("dispatcher: BatchRunTimeout is %s: it must be at most 12h, and less than BatchKeep, %s", c.BatchRunTimeout, c.BatchKeep)
	}
	if !(c.BatchFloor < 1) {
		return fmt.Errorf("dispatcher: BatchFloor is %v, which must be less than 1", c.BatchFloor)
	}
	return nil
}

// Deps are what a Dispatcher works with. All fields are required.
type Deps struct {
	Queue      *queue.Queue
	Blobs      blob.Store
	Results    *results.Store
	Cluster    *cluster.Cluster
	Relay      *relay.Relay
	Ledger     *ledger.Store
	Registerer prometheus.Registerer
	Log        *slog.Logger
	// Version and Process go into heartbeats: roles of one process share Process.
	Version, Process string
}

// Dispatcher keeps waiting work moving.
type Dispatcher struct {
	cfg     Config
	deps    Deps
	id      string
	log     *slog.Logger
	begun   time.Time
	settler *settle.Settler
	metrics *metrics
	ledger  batchLedger
	// driver is the one of the time of leading that lasts, nil before and after.
	driver atomic.Pointer[driver]

	mu        sync.Mutex // guards what follows
	leading   bool
	queues    []cluster.QueueInfo
	looked    time.Time       // when queues were seen
	following map[string]bool // members whose death is followed up now
}

// New validates cfg and starts nothing.
func New(cfg Config, deps Deps) (*Dispatcher, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if deps.Queue == nil || deps.Blobs == nil || deps.Results == nil || deps.Cluster == nil || deps.Relay == nil || deps.Ledger == nil || deps.Registerer == nil || deps.Log == nil {
		return nil, errors.New("dispatcher: a dependency is missing")
	}
	m, err := newMetrics(deps.Registerer)
	if err != nil {
		return nil, err
	}
	id := "dispatcher-" + strings.ToLower(rand.Text()[:12])
	return &Dispatcher{
		cfg: cfg, deps: deps, id: id, log: deps.Log.With("dispatcher", id), begun: time.Now(), metrics: m, ledger: deps.Ledger, following: map[string]bool{},
		settler: &settle.Settler{Queue: deps.Queue, Results: deps.Results, Relay: deps.Relay, Blobs: deps.Blobs, Log: deps.Log},
	}, nil
}

// Ready returns nil while the dispatcher can do its work, leading or standing by.
func (d *Dispatcher) Ready() error {
	if ok, _ := d.deps.Cluster.Connected(); !ok {
		return errors.New("NATS is not connected")
	}
	return nil
}

// Run stands by for the lease, and acts while it holds it, until ctx ends.
func (d *Dispatcher) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.deps.Cluster.Announce(ctx, d.beat) })
	g.Go(func() error { return d.deps.Cluster.Lead(ctx, "dispatcher", d.lead) })
	if err := g.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (d *Dispatcher) beat() cluster.Heartbeat {
	d.mu.Lock()
	defer d.mu.Unlock()
	host, _ := os.Hostname() // shown to people only; "" is fine
	h := cluster.Heartbeat{ID: d.id, Role: cluster.RoleDispatcher, Version: d.deps.Version, Host: host, Started: d.begun.UnixMilli(), Epoch: d.deps.Process, Leader: d.leading}
	if d.leading {
		h.Queues, h.QueuesAge = d.queues, time.Since(d.looked).Seconds()
	}
	return h
}

// lead does the leader's duties until ctx ends. Each is a loop of its own, so that a slow one holds up no other.
func (d *Dispatcher) lead(ctx context.Context, epoch uint64) {
	d.log.Info("leading", "epoch", epoch)
	d.setLeading(true)
	defer d.setLeading(false)
	drive := newDriver(d, epoch)
	feed := newFeeder(d, drive)
	drive.feed, drive.tally = feed.wake, newTally(d, epoch, drive, feed.ended)
	d.driver.Store(drive)
	defer d.driver.Store(nil)
	purge := &purger{d: d}
	sweep := &sweeper{d: d, feed: feed, elected: time.Now()}
	reconcile := &reconciler{d: d, missing: map[job.ID]bool{}}

	var g sync.WaitGroup
	g.Go(func() { d.watchDeaths(ctx) })
	g.Go(func() { feed.run(ctx) })
	g.Go(func() { drive.run(ctx) })
	g.Go(func() { drive.tally.run(ctx) })
	for _, duty := range []struct {
		name   string
		period time.Duration
		do     func(context.Context) error
	}{
		{"sweep", d.cfg.Sweep, sweep.sweep},
		{"deadlines", d.cfg.Deadlines, d.expire},
		{"rebuild", d.cfg.Sweep, d.rebuild},
		{"reconcile", d.cfg.Reconcile, reconcile.reconcile},
		{"holders", d.cfg.Reconcile, d.lookAtHolders},
		{"files", d.cfg.FileSweep, d.expireFiles},
		{"blobs", d.cfg.BlobSweep, d.sweepBlobs},
		{"purge", d.cfg.BatchPurge, purge.purge},
	} {
		g.Go(func() { d.loop(ctx, duty.name, duty.period, duty.do) })
	}
	g.Wait()
	d.log.Info("leading no more", "epoch", epoch)
}

func (d *Dispatcher) setLeading(leading bool) {
	d.mu.Lock()
	d.leading, d.queues, d.looked = leading, nil, time.Now()
	d.mu.Unlock()
	d.deps.Cluster.Nudge()
}

// loop does one duty again and again until ctx ends. A turn that fails is logged and repeated with the next: every duty begins from what is stored.
func (d *Dispatcher) loop(ctx context.Context, name string, period time.Duration, duty func(context.Context) error) {
	t := time.NewTicker(period)
	defer t.Stop()
	failing := false
	for {
		err := duty(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			d.metrics.failures.WithLabelValues(name).Inc()
			if !failing { // once per outage, not once per turn
				d.log.Warn("a duty failed: repeating it", "duty", name, "err", err)
			}
			failing = true
		case failing:
			d.log.Info("a duty works again", "duty", name)
			failing = false
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// passing tells whether err speaks of a store that is away, so that the rest of a turn would only fail like this. Other errors are of one job, and hold up no other.
func passing(err error) bool {
	return errors.Is(err, queue.ErrUnavailable) || errors.Is(err, results.ErrUnavailable) || errors.Is(err, blob.ErrUnavailable) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// end ends a job that runs or waits, from its record.
func (d *Dispatcher) end(ctx context.Context, rec *results.Record, o job.Outcome) error {
	stored, err := d.settler.End(ctx, &rec.Job, rec, o)
	if stored != nil {
		d.metrics.ended.WithLabelValues(string(stored.Outcome.State)).Inc()
		d.log.Info("job ended by the dispatcher", "job", rec.Job.ID, "model", rec.Job.Model, "tenant", rec.Job.Tenant, "state", stored.Outcome.State)
	}
	return err
}
