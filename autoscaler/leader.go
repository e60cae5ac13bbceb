package autoscaler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/scale"
)

const (
	keepDecisions = 14 * 24 * time.Hour
	keepArrivals  = 5 * 7 * 24 * time.Hour
)

// leader is one time of leading.
type leader struct {
	a     *Autoscaler
	epoch uint64
	// resign ends it: another one leads.
	resign  context.CancelFunc
	running sync.WaitGroup // the keepers of pools

	// What the database had at the beginning, by pool.
	launches map[string][]ledger.Launch
	states   map[string]*learned
	batches  atomic.Pointer[batches]

	mu      sync.Mutex // guards what follows
	failing map[string]bool
	keepers map[string]*keeper
	pools   map[string]*scale.Pool // as they were last read
	// changed is when each was last written; an operator's word, also where it says what was said before.
	changed map[string]job.Millis
	// poolsAt is when the reading of pools began, zero if there was none yet.
	poolsAt time.Time

	// The duty "pools" has these.
	synced int // version of the file that the database has
	// refused is the version that the database did not take, refusedAt when it was tried last.
	refused   int
	refusedAt time.Time
	readAt    time.Time
	unusable  map[string]bool // pools whose description cannot be read
	// The duty "arrivals" has this: the first bucket that is not recorded yet.
	recorded int64
	// The duty "remember" has this: when each model was remembered last.
	remembered map[job.Model]time.Time
}

// batches is the work of batches that is not queued yet.
type batches struct {
	at    time.Time
	unfed map[job.Model][]scale.Due
}

func newLeader(a *Autoscaler, epoch uint64, resign context.CancelFunc) *leader {
	return &leader{
		a: a, epoch: epoch, resign: resign, launches: map[string][]ledger.Launch{}, states: map[string]*learned{}, failing: map[string]bool{}, keepers: map[string]*keeper{},
		pools: map[string]*scale.Pool{}, changed: map[string]job.Millis{}, unusable: map[string]bool{}, remembered: map[job.Model]time.Time{},
	}
}

// take makes this epoch the highest, and reads what those before it have left.
func (l *leader) take(ctx context.Context) error {
	if err := l.a.deps.Ledger.LeadScaling(ctx, l.epoch); err != nil {
		return fmt.Errorf("taking the lead: %w", err)
	}
	launches, err := l.a.deps.Ledger.Launches(ctx)
	if err != nil {
		return fmt.Errorf("reading which workers were asked for: %w", err)
	}
	states, err := l.a.deps.Ledger.PoolStates(ctx)
	if err != nil {
		return fmt.Errorf("reading what was learned: %w", err)
	}
	clear(l.launches)
	for _, one := range launches {
		l.launches[one.Pool] = append(l.launches[one.Pool], one)
	}
	clear(l.states)
	for name, raw := range states {
		var s learned
		if err := json.Unmarshal(raw, &s); err != nil {
			l.a.log.Warn("what was learned of a pool cannot be read: it begins anew", "pool", name, "err", err)
			continue
		}
		if s.Spec != nil { // as the pools are read, so that the two compare
			if spec, err := json.Marshal(s.Spec); err == nil {
				if p, err := scale.ParsePool(spec); err == nil {
					s.Spec = p
				}
			}
		}
		s.clamp(time.Now(), l.a.timing)
		l.states[name] = &s
	}
	return nil
}

// failed tells once that a duty fails, and ends the time of leading if another one leads.
func (l *leader) failed(duty string, err error) {
	l.mu.Lock()
	before := l.failing[duty]
	l.failing[duty] = err != nil
	l.mu.Unlock()
	switch {
	case err == nil:
		if before {
			l.a.log.Info("a duty works again", "duty", duty)
		}
		return
	case errors.Is(err, context.Canceled):
		return
	case errors.Is(err, ledger.ErrFenced):
		l.a.log.Warn("another autoscaler leads: leaving it to that one", "epoch", l.epoch)
		l.resign()
		return
	}
	l.a.metrics.failures.WithLabelValues(duty).Inc()
	if !before { // once per outage, not once per turn
		l.a.log.Warn("a duty failed: repeating it", "duty", duty, "err", err)
	}
}

// loop does one duty again and again until ctx ends. A turn that fails is repeated with the next: every duty begins from what is stored.
func (l *leader) loop(ctx context.Context, name string, period time.Duration, duty func(context.Context) error) {
	t := time.NewTicker(period)
	defer t.Stop()
	for {
		err := duty(ctx)
		if ctx.Err() != nil {
			return
		}
		l.failed(name, err)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// syncPools brings the file's pools into the database, reads all, and sees to it that each has its keeper.
func (l *leader) syncPools(ctx context.Context) error {
	if err := l.syncFile(ctx); err != nil {
		return err
	}
	now := time.Now()
	if now.Sub(l.readAt) < l.a.timing.sync {
		return nil
	}
	rows, err := l.a.deps.Ledger.Pools(ctx)
	if err != nil {
		return err
	}
	l.readAt = now
	pools, changed := map[string]*scale.Pool{}, map[string]job.Millis{}
	for _, row := range rows {
		changed[row.Name] = row.Updated
		p, err := scale.ParsePool(row.Spec)
		if err == nil && p.Name != row.Name {
			err = fmt.Errorf("it has the name %q inside", p.Name)
		}
		if err != nil {
			// Not a pool that was removed: its workers go on as they were told to last.
			if !l.unusable[row.Name] {
				l.a.log.Warn("the description of a pool cannot be used: it stays as it was", "pool", row.Name, "err", err)
			}
			l.unusable[row.Name] = true
			if old := l.known(row.Name); old != nil {
				pools[row.Name] = old
			}
			continue
		}
		delete(l.unusable, row.Name)
		pools[row.Name] = p
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pools, l.changed, l.poolsAt = pools, changed, now
	l.keep(ctx, now)
	return nil
}

// syncFile brings the file's pools into the database if they are others than before. If the database refuses them, since a pool of the API has one of their models or workloads, that is tried again: somebody may remove that one.
func (l *leader) syncFile(ctx context.Context) error {
	file, version := l.a.file.current()
	now := time.Now()
	if version == l.synced || version == l.refused && now.Sub(l.refusedAt) < l.a.timing.sync {
		return nil
	}
	rows := make([]ledger.Pool, 0, len(file))
	for i := range file {
		spec, err := json.Marshal(&file[i])
		if err != nil {
			return fmt.Errorf("writing the pool %s: %w", file[i].Name, err)
		}
		rows = append(rows, ledger.Pool{Name: file[i].Name, Spec: spec, Source: ledger.FromFile})
	}
	err := l.a.deps.Ledger.SyncPools(ctx, l.epoch, rows)
	switch {
	case errors.Is(err, ledger.ErrTaken), errors.Is(err, ledger.ErrWorkload):
		if version != l.refused {
			l.a.log.Warn("the pools file cannot be used: its pools stay as they were", "file", l.a.cfg.PoolsFile, "err", err)
		}
		l.a.file.mark(version, true)
		l.refused, l.refusedAt = version, now
		return nil
	case err != nil:
		return err
	}
	l.a.file.mark(version, false)
	l.synced, l.readAt = version, time.Time{}
	return nil
}

// known is the pool as its keeper has it, or as it was when its workers were started.
func (l *leader) known(name string) *scale.Pool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.pools[name]; p != nil {
		return p
	}
	if s := l.states[name]; s != nil {
		return s.Spec
	}
	return nil
}

// keep starts the keepers of new pools, tells the others how theirs are now, and forgets those that are done. Pools that are gone and have left something behind get a keeper that tidies up. l.mu is held.
func (l *leader) keep(ctx context.Context, now time.Time) {
	for name, k := range l.keepers {
		select {
		case <-k.done:
			delete(l.keepers, name)
		default:
			k.wish(l.pools[name], l.changed[name])
		}
	}
	names := maps.Clone(l.pools)
	for name, s := range l.states {
		if names[name] == nil {
			names[name] = s.Spec
		}
	}
	for name := range l.launches {
		if names[name] == nil && l.states[name] == nil && !l.unusable[name] {
			// The state with the pool's description is written before its first launch.
			l.a.log.Error("workers were asked for of a pool that nobody knows: stop them by hand, and remove the rows of the table launches", "pool", name)
			l.unusable[name] = true
		}
	}
	var begun []*keeper
	for name, p := range names {
		if p == nil || l.keepers[name] != nil {
			continue
		}
		k := newKeeper(l, p, l.states[name], l.launches[name], now)
		k.wish(l.pools[name], l.changed[name])
		delete(l.states, name) // they are the keeper's now
		delete(l.launches, name)
		l.keepers[name] = k
		begun = append(begun, k)
	}
	for _, k := range begun { // all know by now who leaves
		l.running.Go(func() { k.run(ctx) })
	}
}

// ahead is the pool that k's pool has to wait for, since it leaves the workload that both have, "" if there is none.
func (l *leader) ahead(k *keeper) string {
	if k.place.Kubernetes == nil {
		return ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, other := range l.keepers {
		select {
		case <-other.done:
			continue
		default:
		}
		if other != k && other.leaving.Load() && samePlace(other.place, k.place) {
			return name
		}
	}
	return ""
}

// served are the models of all pools.
func (l *leader) served() map[job.Model]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return modelsOf(slices.Collect(maps.Values(l.pools))...)
}

// readBatches reads what of batches is not queued yet.
func (l *leader) readBatches(ctx context.Context) error {
	now := time.Now()
	live, err := l.a.deps.Ledger.LiveBatches(ctx)
	if err != nil {
		return err
	}
	unfed := map[job.Model][]scale.Due{}
	for _, b := range live {
		if b.Status != ledger.InProgress { // one that is being checked has no lines yet, one that ends has none any more
			continue
		}
		portions, err := l.a.deps.Ledger.Portions(ctx, b.ID)
		if err != nil {
			return err
		}
		for _, p := range portions {
			rest := p.Lines - p.Reserved
			if rest <= 0 {
				continue
			}
			tokens := job.Tokens(float64(p.Tokens) * float64(rest) / float64(p.Lines))
			unfed[p.Model] = append(unfed[p.Model], scale.Due{Amount: scale.Amount{Jobs: int(rest), Tokens: tokens}, By: b.Expires.Time()})
		}
	}
	l.batches.Store(&batches{now, unfed})
	return nil
}

// recordArrivals writes down what came in for the pools' models, once for each bucket that is over: whoever leads then. Zeros too, for a bucket that is missing is one of which nothing is known.
func (l *leader) recordArrivals(ctx context.Context) error {
	all, next := l.a.traffic.due(time.Now(), l.served())
	all = slices.DeleteFunc(all, func(r record) bool { return r.bucket < l.recorded })
	if len(all) == 0 {
		return nil
	}
	oldest := all[0].bucket
	var models []job.Model
	for _, r := range all {
		oldest = min(oldest, r.bucket)
		models = append(models, r.model)
	}
	// The one who led before may have written them, or we have, and were not told.
	there, err := l.a.deps.Ledger.Arrivals(ctx, models, job.MillisOf(startOf(oldest, scale.SeasonBucket)))
	if err != nil {
		return err
	}
	has := map[record]bool{}
	for _, t := range there {
		has[record{bucket: bucketOf(t.Start.Time(), scale.SeasonBucket), model: t.Model}] = true
	}
	var rows []ledger.Arrivals
	for _, r := range all {
		if has[record{bucket: r.bucket, model: r.model}] {
			continue
		}
		one := r.at(startOf(r.bucket, scale.SeasonBucket))
		rows = append(rows, ledger.Arrivals{Model: r.model, Start: job.MillisOf(one.Start), Jobs: int64(one.Jobs), Tokens: int64(one.Tokens), Squares: one.Squares})
	}
	// If we crash here, these buckets are written by the next leader, who has heard the same.
	if len(rows) > 0 {
		if err := l.a.deps.Ledger.AddArrivals(ctx, l.epoch, rows...); err != nil {
			return err
		}
	}
	l.recorded = next
	return nil
}

// rememberModels keeps the pools' models known while no worker serves them, so that their jobs are accepted and start one, and has those forgotten that no pool names any more.
func (l *leader) rememberModels(ctx context.Context) error {
	var errs []error
	now := time.Now()
	l.mu.Lock()
	read := l.poolsAt
	l.mu.Unlock()
	served, known := l.served(), l.a.deps.Cluster.Known()
	for m := range served {
		if now.Sub(l.remembered[m]) < l.a.timing.minute && slices.ContainsFunc(known, func(k cluster.KnownModel) bool { return k.Model == m }) {
			continue
		}
		if err := l.a.deps.Cluster.Name(ctx, m); err != nil {
			errs = append(errs, err)
			continue
		}
		l.remembered[m] = now
	}
	if read.IsZero() {
		return errors.Join(errs...)
	}
	for _, k := range known {
		// One that was named just now may be of a pool that was made after they were read.
		if k.Named == 0 || served[k.Model] || read.Sub(time.UnixMilli(k.Named)) < l.a.timing.unnamed {
			continue
		}
		delete(l.remembered, k.Model)
		if err := l.a.deps.Cluster.Unname(ctx, k.Model); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (l *leader) trim(ctx context.Context) error {
	now := time.Now()
	return l.a.deps.Ledger.TrimScaling(ctx, l.epoch, job.MillisOf(now.Add(-keepDecisions)), job.MillisOf(now.Add(-keepArrivals)))
}

// stopAll drains and stops the workers of all pools, each for its own Drain at most, and returns once they are gone.
func (l *leader) stopAll(ctx context.Context) error {
	rows, err := l.a.deps.Ledger.Pools(ctx)
	if err != nil {
		return err
	}
	pools := map[string]*scale.Pool{}
	for _, row := range rows {
		if p, err := scale.ParsePool(row.Spec); err == nil {
			pools[row.Name] = p
		}
	}
	var errs []error
	var mu sync.Mutex
	for name, launches := range l.launches {
		p := pools[name]
		if s := l.states[name]; s != nil {
			p = s.Spec
		}
		if p == nil {
			continue
		}
		k := newKeeper(l, p, l.states[name], launches, time.Now())
		k.ending = true
		k.spec.Store(&wish{}) // as if it had been removed
		l.running.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, stopLimit(p))
			defer cancel()
			k.run(ctx)
			if n := len(k.workers); n > 0 {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("%d workers of the pool %s are left", n, name))
			}
		})
	}
	l.running.Wait()
	return errors.Join(errs...)
}
