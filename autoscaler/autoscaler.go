package autoscaler

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// Config of an Autoscaler. Zero fields get the defaults named.
type Config struct {
	// PoolsFile is a YAML file of pools, read again whenever it changes; "" is none: pools come from the API alone.
	PoolsFile string
	// Tick is the period of looking and deciding. Default 1 s.
	Tick time.Duration
	// StopWorkers: the workers that it started end with it. For a process that has the whole platform in it.
	StopWorkers bool
}

func (c *Config) complete() error {
	if c.Tick == 0 {
		c.Tick = time.Second
	}
	if c.Tick < 0 || c.Tick > time.Minute {
		return fmt.Errorf("autoscaler: Tick is %s, which must be more than 0 and at most 1m", c.Tick)
	}
	return nil
}

// Deps are what an Autoscaler works with. All fields are required.
type Deps struct {
	Cluster *cluster.Cluster
	Ledger  *ledger.Store
	// Providers by the names that pools use.
	Providers  map[string]provider.Provider
	Registerer prometheus.Registerer
	Log        *slog.Logger
	// Version and Process go into heartbeats: roles of one process share Process.
	Version, Process string
}

// timing is how long things take. It is a set of its own so that tests can be quick.
type timing struct {
	// stale is after how long without news what was heard is not believed any more.
	stale time.Duration
	// list is how often a provider is asked for its instances, listTimeout how long one answer may take, listStale how old the last one may be until nothing is done any more.
	list, listTimeout, listStale time.Duration
	// sync is how often pools and live batches are read, batchesStale how old the latter may be.
	sync, batchesStale time.Duration
	// firstRetry is the pause after a start that failed, which doubles up to lastRetry. firstRoom and lastRoom are the same for a provider that has no room.
	firstRetry, lastRetry, firstRoom, lastRoom time.Duration
	// startLimit is how long a start may take at least until it counts as failed, steady how long a worker must have been ready for its death not to count as a start that failed.
	startLimit, steady time.Duration
	// absent is for how long delivered work must have been at no worker until it counts as waiting.
	absent time.Duration
	// repeat is how often a decision that declines is written down again, save how often what was learned is.
	repeat, save time.Duration
	// call bounds a call of a provider that starts a worker.
	call time.Duration
	// unnamed is for how long nobody must have said that a pool names a model until it counts as named by none: clocks differ.
	unnamed time.Duration
	// minute is how often the pools' models are remembered, learn how often the season is learned, trim how often what is old is removed.
	minute, learn, trim time.Duration
}

var usual = timing{
	stale: 4 * time.Second, list: 3 * time.Second, listTimeout: 30 * time.Second, listStale: 45 * time.Second, sync: 3 * time.Second, batchesStale: 30 * time.Second,
	firstRetry: 5 * time.Second, lastRetry: 5 * time.Minute, firstRoom: time.Minute, lastRoom: 15 * time.Minute, startLimit: 5 * time.Minute, steady: time.Minute,
	absent: 3 * time.Second, repeat: time.Minute, save: 10 * time.Second, call: 2 * time.Minute, unnamed: 5 * time.Second, minute: time.Minute, learn: 10 * time.Minute, trim: 24 * time.Hour,
}

// Autoscaler keeps pools as large as they need to be.
type Autoscaler struct {
	cfg     Config
	deps    Deps
	id      string
	log     *slog.Logger
	begun   time.Time
	metrics *metrics
	timing  timing
	decide  func(scale.Sample, scale.History, *scale.Pool) scale.Decision
	learn   func([]scale.Arrivals, time.Time, *time.Location) *scale.Season
	file    *poolsFile
	traffic *traffic

	mu      sync.Mutex // guards what follows
	leading bool
	pools   map[string]cluster.PoolInfo
	// ledBy is the dispatcher that leads, as far as was heard, and ledSince since when.
	ledBy    string
	ledSince time.Time
}

// New validates cfg, reads the pools file, and starts nothing.
func New(cfg Config, deps Deps) (*Autoscaler, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	if deps.Cluster == nil || deps.Ledger == nil || deps.Providers == nil || deps.Registerer == nil || deps.Log == nil {
		return nil, errors.New("autoscaler: a dependency is missing")
	}
	id := "autoscaler-" + strings.ToLower(rand.Text()[:12])
	log := deps.Log.With("autoscaler", id)
	file, err := openPoolsFile(cfg.PoolsFile, log)
	if err != nil {
		return nil, fmt.Errorf("autoscaler: %w", err)
	}
	m, err := newMetrics(deps.Registerer)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &Autoscaler{
		cfg: cfg, deps: deps, id: id, log: log, begun: now, metrics: m, timing: usual, decide: scale.Decide, learn: scale.Learn,
		file: file, traffic: newTraffic(now), pools: map[string]cluster.PoolInfo{},
	}, nil
}

// Ready returns nil while the autoscaler can do its work, leading or standing by.
func (a *Autoscaler) Ready() error {
	if ok, _ := a.deps.Cluster.Connected(); !ok {
		return errors.New("NATS is not connected")
	}
	return nil
}

// Run stands by for the lease, and acts while it holds it, until ctx ends.
func (a *Autoscaler) Run(ctx context.Context) error {
	// Its heartbeats, and what it knows of arrivals, go on while the workers are stopped at the end.
	outer := context.WithoutCancel(ctx)
	beating, silence := context.WithCancel(outer)
	defer silence()
	var beats errgroup.Group
	beats.Go(func() error { return a.deps.Cluster.Announce(beating, a.beat) })

	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { a.listen(ctx); return nil })
	g.Go(func() error {
		return a.deps.Cluster.Lead(ctx, "autoscaler", func(reign context.Context, epoch uint64) {
			a.lead(reign, epoch)
			if a.cfg.StopWorkers && ctx.Err() != nil {
				// The lease is kept while this goes on.
				a.stopAll(outer, epoch)
			}
		})
	})
	err := g.Wait()
	silence()
	if err := errors.Join(err, beats.Wait()); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// listen hears what comes in at the APIs and looks at the pools file, leading or not: who takes over knows the last minutes.
func (a *Autoscaler) listen(ctx context.Context) {
	t := time.NewTicker(a.cfg.Tick)
	defer t.Stop()
	for {
		now := time.Now()
		members := a.deps.Cluster.Members()
		a.traffic.hear(now, members)
		a.noteLeader(now, members)
		a.file.look()
		a.metrics.fileInvalid.Set(number(a.file.invalid()))
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// noteLeader remembers since when the dispatcher leads that does: at first it has not looked at any queue.
func (a *Autoscaler) noteLeader(now time.Time, members []cluster.Member) {
	id := ""
	if d := leadingDispatcher(members); d != nil {
		id = d.ID
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if id != a.ledBy {
		a.ledBy, a.ledSince = id, now
	}
}

func (a *Autoscaler) beat() cluster.Heartbeat {
	a.mu.Lock()
	defer a.mu.Unlock()
	host, _ := os.Hostname() // shown to people only; "" is fine
	h := cluster.Heartbeat{ID: a.id, Role: cluster.RoleAutoscaler, Version: a.deps.Version, Host: host, Started: a.begun.UnixMilli(), Epoch: a.deps.Process, Leader: a.leading}
	for _, name := range slices.Sorted(maps.Keys(a.pools)) {
		h.Pools = append(h.Pools, a.pools[name])
	}
	return h
}

func (a *Autoscaler) setLeading(leading bool) {
	a.mu.Lock()
	a.leading, a.pools = leading, map[string]cluster.PoolInfo{}
	a.mu.Unlock()
	a.metrics.lead(leading)
	a.deps.Cluster.Nudge()
}

// tell puts what is known of a pool into the heartbeat; nil takes it out.
func (a *Autoscaler) tell(name string, info *cluster.PoolInfo) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if info == nil {
		delete(a.pools, name)
		return
	}
	a.pools[name] = *info
}

// lead does the leader's work until ctx ends or another one leads.
func (a *Autoscaler) lead(ctx context.Context, epoch uint64) {
	a.log.Info("leading", "epoch", epoch)
	defer a.log.Info("leading no more", "epoch", epoch)
	ctx, resign := context.WithCancel(ctx)
	defer resign()
	l := newLeader(a, epoch, resign)
	// From here on a leader before is refused whatever it tries: what it wrote before stays true, and is read next.
	for {
		err := l.take(ctx)
		if err == nil {
			break
		}
		l.failed("lead", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(a.cfg.Tick):
		}
	}
	a.setLeading(true)
	defer a.setLeading(false)

	var g sync.WaitGroup
	for _, duty := range []struct {
		name   string
		period time.Duration
		do     func(context.Context) error
	}{
		{"pools", a.cfg.Tick, l.syncPools},
		{"batches", a.timing.sync, l.readBatches},
		{"arrivals", a.timing.sync, l.recordArrivals},
		{"remember", a.cfg.Tick, l.rememberModels}, // a new pool's at once
		{"trim", a.timing.trim, l.trim},
	} {
		g.Go(func() { l.loop(ctx, duty.name, duty.period, duty.do) })
	}
	g.Wait()
	l.running.Wait()
}

// stopAll ends all workers, as those of pools that were removed end. ctx is not Run's, which has ended.
func (a *Autoscaler) stopAll(ctx context.Context, epoch uint64) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := newLeader(a, epoch, cancel)
	if err := l.take(ctx); err != nil {
		a.log.Warn("the workers are not stopped: the database does not say which there are", "err", err)
		return
	}
	if err := l.stopAll(ctx); err != nil {
		a.log.Warn("not all workers are stopped", "err", err)
	}
}

func number(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// leadingDispatcher is the one that leads, nil if none was heard: that which was heard last, where two say so.
func leadingDispatcher(members []cluster.Member) *cluster.Member {
	var leader *cluster.Member
	for i, m := range members {
		if m.Role == cluster.RoleDispatcher && m.Leader && (leader == nil || m.Heard.After(leader.Heard)) {
			leader = &members[i]
		}
	}
	return leader
}

// modelsOf is the set of the models that pools serve.
func modelsOf(pools ...*scale.Pool) map[job.Model]bool {
	set := map[job.Model]bool{}
	for _, p := range pools {
		for _, m := range p.Models {
			set[m] = true
		}
	}
	return set
}
