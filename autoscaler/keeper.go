package autoscaler

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// wish is how a pool shall be, nil if it was removed, and when that was written.
type wish struct {
	pool    *scale.Pool
	changed job.Millis
}

// keeper keeps one pool, while this process leads: in a goroutine of its own, so that a pool whose provider is slow or fails holds up no other. That goroutine owns all fields but those that say otherwise; calls that may take long run beside it
// and hand back what is to be done once they have returned.
type keeper struct {
	l     *leader
	a     *Autoscaler
	begun time.Time
	spec  atomic.Pointer[wish] // set by the leader
	// place is a description of the pool that says where its workers are: it does not change. leaving: they are to go, by the leader's word.
	place   *scale.Pool
	leaving atomic.Bool
	done    chan struct{} // closed once a removed pool has nothing left
	// calls are those under way; after has what is to be done after them.
	calls sync.WaitGroup
	after chan func(context.Context)

	pool     *scale.Pool
	provider provider.Provider
	removing bool
	// ending: the platform ends, and the pool does not: what was learned of it stays.
	ending  bool
	learned *learned
	saved   []byte // the learned as the database has it
	savedAt time.Time
	workers map[string]*worker

	listing   bool
	triedAt   time.Time // when the provider was asked last
	listedAt  time.Time // when the last listing that succeeded began, zero if none did
	listError error
	instances map[string]provider.Instance
	// startsEnded is when the last call of Start returned, stopped when those were that were stopped lately: a listing that began before may not know of it.
	startsEnded time.Time
	stopped     map[string]time.Time

	memory      scale.Memory
	season      *scale.Season
	seasonAt    time.Time
	learning    bool
	absence     absence
	meters      map[string]*meter
	told        scale.Decision // the one that was written down last
	failingList bool
	// removalTold: it was written down that the pool goes.
	removalTold bool
}

// call is a kind of call that may take long.
type call string

const (
	starts call = "start"
	stops  call = "stop"
	orders call = "order"
)

// worker is one of the pool: asked for, or found.
type worker struct {
	ledger.Launch
	// asked: the provider has taken it on, as far as this leader knows: it said so, or its instance is more than pending. forgotten: it was, and then the provider did not list it. from is when it was first asked by this leader or the one
	// before.
	asked, forgotten bool
	from             time.Time
	// calling is the call that is under way, "" if none is. ended is when the last one returned, next when the next one may be, tries how many failed in a row.
	calling call
	ended   time.Time
	next    time.Time
	tries   int
	// waits is what it waits for that its start could not be taken on yet, "" if nothing. later: that was so once.
	waits string
	later bool
	// limited: it was told for how long it may drain.
	limited bool
	// dead: it is not drained but tidied away, and counts as no worker any more. gone: the provider has none of that name any more.
	dead, gone bool
	// told: the provider was told to stop it.
	told bool
	// missed counts listings in a row without it.
	missed   int
	missedAt time.Time
	// beat is its heartbeat, nil while it is not heard.
	beat *cluster.Member
	// hintAt is when it may be told again whether to yield.
	hintAt      time.Time
	sawStarting bool
	idleSince   time.Time
	state       scale.WorkerState
	stateSince  time.Time
	// steady: it has been ready for long enough.
	steady bool
	// guessed: nobody knows when it was asked for.
	guessed bool
}

// wish tells the keeper how the pool shall be now, nil if it was removed.
func (k *keeper) wish(p *scale.Pool, changed job.Millis) {
	if p == nil || !samePlace(k.place, p) {
		k.leaving.Store(true)
	}
	k.spec.Store(&wish{p, changed})
}

func newKeeper(l *leader, p *scale.Pool, s *learned, launches []ledger.Launch, now time.Time) *keeper {
	k := &keeper{
		l: l, a: l.a, begun: now, done: make(chan struct{}), after: make(chan func(context.Context)), pool: p, provider: l.a.deps.Providers[p.Provider], learned: s,
		workers: map[string]*worker{}, stopped: map[string]time.Time{}, meters: map[string]*meter{},
	}
	if s != nil && s.Spec != nil && len(launches) > 0 && !samePlace(s.Spec, p) {
		// Its workers are where the pool was before: they go first.
		k.pool, k.provider, k.removing = s.Spec, l.a.deps.Providers[s.Spec.Provider], true
		k.leaving.Store(true)
	}
	k.place = k.pool
	if k.learned == nil {
		k.learned = &learned{}
	} else {
		k.memory.Asked(k.learned.LastDemand)
		k.saved, _ = json.Marshal(k.learned) // it was read as JSON
	}
	for _, launch := range launches {
		w := &worker{Launch: launch, from: now}
		if launch.Ready > 0 {
			w.asked = true
			w.steady = now.Sub(launch.Ready.Time()) >= l.a.timing.steady
		}
		k.workers[launch.Name] = w
	}
	return k
}

// samePlace tells whether the workers of one description can be found and stopped by the other.
func samePlace(a, b *scale.Pool) bool {
	host := func(p *scale.Pool) string {
		if p.Docker == nil {
			return ""
		}
		return p.Docker.Host
	}
	workload := func(p *scale.Pool) scale.Kubernetes {
		if p.Kubernetes == nil {
			return scale.Kubernetes{}
		}
		w := *p.Kubernetes
		w.Observe = false
		return w
	}
	return a.Provider == b.Provider && host(a) == host(b) && workload(a) == workload(b)
}

// same compares as JSON, which is how pools are kept.
func same(a, b any) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// sameStart tells whether what was learned of starting and running workers of one description holds for the other.
func sameStart(a, b *scale.Pool) bool {
	parts := func(p *scale.Pool) any {
		return []any{p.Provider, p.Models, p.Shape, p.Engine, p.Docker, p.Kubernetes, p.Command}
	}
	return same(parts(a), parts(b))
}

// run keeps the pool until ctx ends, or it was removed and nothing of it is left.
func (k *keeper) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	// What is under way when this ends is cut off: the next leader finds it in the database, and at the provider.
	defer k.calls.Wait()
	defer cancel()
	defer k.saveLast(ctx)
	defer k.a.tell(k.name(), nil)
	defer k.a.metrics.forget(k.name())
	t := time.NewTicker(k.a.cfg.Tick)
	defer t.Stop()
	for {
		if k.turn(ctx) {
			close(k.done)
			return
		}
		for waiting := true; waiting; {
			select {
			case <-ctx.Done():
				return
			case f := <-k.after:
				f(ctx)
			case <-t.C:
				waiting = false
			}
		}
	}
}

func (k *keeper) name() string { return k.pool.Name }

// call runs f beside the keeper, and then what it returns in the keeper's goroutine.
func (k *keeper) call(ctx context.Context, limit time.Duration, f func(context.Context) func(context.Context)) {
	k.calls.Go(func() {
		bound, cancel := context.WithTimeout(ctx, limit)
		then := f(bound)
		cancel()
		select {
		case k.after <- then:
		case <-ctx.Done():
		}
	})
}

// report tells of a write that failed; it is false then. One that is refused because another one leads ends the time of leading.
func (k *keeper) report(doing string, err error) bool {
	if err != nil {
		err = fmt.Errorf("pool %s: %s: %w", k.name(), doing, err)
	}
	k.l.failed("pool "+k.name(), err)
	return err == nil
}

// turn looks, decides and acts once. It is true once a removed pool has nothing left.
func (k *keeper) turn(ctx context.Context) bool {
	k.follow()
	if other := k.l.ahead(k); other != "" && !k.removing {
		k.tellWaiting(time.Now(), other)
		return false
	}
	if !k.save(ctx, time.Now(), false) {
		return false // nothing is started whose pool nobody would know after a crash
	}
	now := time.Now()
	members := k.a.deps.Cluster.Members()
	k.hear(now, members)
	k.list(ctx, now)
	if k.removing {
		return k.recordRemoval(ctx, now) && k.remove(ctx, now)
	}
	k.learnSeason(ctx, now)
	if !k.progress(ctx, now) {
		return false
	}
	d := k.a.decide(k.sample(now, members), k.history(now), k.pool)
	if why := k.cannot(now); why != "" && (d.Start > 0 || len(d.Stop) > 0) {
		d.Action, d.Start, d.Stop = scale.Unknown, 0, nil
		d.Reason = fmt.Sprintf("%s: nothing is started or stopped", why)
	}
	k.note(now, &d)
	if k.record(ctx, now, &d) {
		k.act(ctx, now, &d)
		k.yield(ctx, now, &d)
	}
	k.tell(now, &d)
	return false
}

// follow takes the pool as it is wished now. What was learned of other workers does not hold for the new ones; a pool that moves to another provider is removed first.
func (k *keeper) follow() {
	wish := k.spec.Load()
	wanted := wish.pool
	old := k.learned.Spec
	switch {
	case k.removing:
		return
	case wanted == nil || !samePlace(k.pool, wanted):
		k.a.log.Info("the pool is removed: its workers are drained and stopped", "pool", k.name(), "workers", len(k.workers))
		k.removing = true
		if k.learned.Spec == nil {
			k.learned.Spec = k.pool
		}
		return
	case wanted != k.pool && !same(wanted, k.pool):
		k.a.log.Info("the pool was changed", "pool", k.name())
	}
	k.pool = wanted
	if old != nil && !sameStart(old, wanted) {
		k.learned.ColdStarts, k.learned.Rates, k.learned.Fragile = nil, nil, 0
		k.learned.works()
		k.learned.room()
		k.meters = map[string]*meter{}
	}
	// Whoever writes a pool anew, be it as it was, has mended something: its image, its script, its quota.
	changed := wish.changed != k.learned.Changed
	if changed && k.learned.Changed > 0 || old != nil && !sameStart(old, wanted) {
		k.learned.retry(time.Now())
		for _, w := range k.workers {
			if !w.asked {
				w.next = time.Time{}
			}
		}
	}
	k.learned.Changed = wish.changed
	if changed || old == nil || !same(old, wanted) {
		k.learned.Spec = wanted
		k.savedAt = time.Time{}
	}
}

// tellWaiting tells that the pool begins later: what the provider lists of its workload are another pool's workers, which would be taken for its own.
func (k *keeper) tellWaiting(now time.Time, other string) {
	k.tell(now, &scale.Decision{At: now, Pool: k.name(), Action: scale.Unknown, Reason: fmt.Sprintf("its workload is still that of the pool %s, which goes: this one begins when the workers of that are gone", other)})
}

// save keeps what was learned, if it is other than what is kept and that is not too young. It is false if the pool's description could not be kept.
func (k *keeper) save(ctx context.Context, now time.Time, always bool) bool {
	if !always && !k.savedAt.IsZero() && now.Sub(k.savedAt) < k.a.timing.save {
		return true
	}
	raw, err := json.Marshal(k.learned)
	if err == nil && string(raw) != string(k.saved) {
		err = k.a.deps.Ledger.SavePoolState(ctx, k.l.epoch, k.name(), raw)
	}
	if err != nil {
		k.report("keeping what was learned", err)
		return !k.savedAt.IsZero()
	}
	k.saved, k.savedAt = raw, now
	return true
}

// saveLast keeps what was learned last, when the time of leading ends: where another one leads already it is refused.
func (k *keeper) saveLast(ctx context.Context) {
	select {
	case <-k.done: // nothing of the pool is left
		return
	default:
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if !k.savedAt.IsZero() {
		k.save(ctx, time.Now(), true)
	}
}

// hear takes the workers' heartbeats in.
func (k *keeper) hear(now time.Time, members []cluster.Member) {
	byName := map[string]*cluster.Member{}
	for i := range members {
		m := &members[i]
		if m.Role != cluster.RoleWorker || m.Worker == nil || k.workers[m.Worker.Name] == nil {
			continue
		}
		// One that was started again under its name is there twice until the first counts as silent.
		if other := byName[m.Worker.Name]; other == nil || m.Started > other.Started {
			byName[m.Worker.Name] = m
		}
	}
	for name, w := range k.workers {
		w.hear(now, byName[name])
	}
}

func (w *worker) hear(now time.Time, m *cluster.Member) {
	w.beat = m
	if m != nil && m.Worker.State == cluster.Starting {
		w.sawStarting = true
	}
	state := scale.Away
	switch {
	case w.Stopping > 0 || m != nil && m.Worker.State == cluster.Draining:
		state = scale.Draining
	case w.Ready == 0:
		state = scale.Starting
	case m != nil && m.Worker.State == cluster.Ready:
		state = scale.Ready
	}
	if state != w.state {
		w.state, w.stateSince = state, now
		if state == scale.Starting {
			w.stateSince = w.At.Time()
		}
		w.idleSince = time.Time{} // one that has just become ready has not been idle yet
	}
	switch {
	case m == nil || w.jobs() > 0:
		w.idleSince = time.Time{}
	case w.idleSince.IsZero():
		w.idleSince = now
	}
}

// jobs is how many the worker says it has.
func (w *worker) jobs() int {
	if w.beat == nil {
		return 0
	}
	return w.beat.Worker.Running + w.beat.Worker.InHand
}

// list asks the provider what there is, every few seconds, beside the keeper. An answer that fails leaves the last one.
func (k *keeper) list(ctx context.Context, now time.Time) {
	k.a.metrics.listStale.WithLabelValues(k.name()).Set(number(k.listIsOld(now)))
	if k.provider == nil || k.listing || now.Sub(k.triedAt) < k.a.timing.list {
		return
	}
	k.listing, k.triedAt = true, now
	pool := k.pool
	k.call(ctx, limit(pool, k.a.timing.listTimeout), func(ctx context.Context) func(context.Context) {
		instances, err := k.provider.List(ctx, pool)
		return func(context.Context) {
			k.listing = false
			k.listError = err
			if err != nil {
				k.a.metrics.listFailures.WithLabelValues(k.name()).Inc()
				if !k.failingList {
					k.a.log.Warn("the provider does not say which workers there are: the last answer stands", "pool", k.name(), "err", err)
				}
				k.failingList = true
				return
			}
			k.failingList = false
			k.listedAt = now
			k.instances = map[string]provider.Instance{}
			for _, i := range instances {
				k.instances[i.Name] = i
			}
			for name, at := range k.stopped {
				if now.After(at) { // it would be listed if it were there
					delete(k.stopped, name)
				}
			}
		}
	})
}

func (k *keeper) listIsOld(now time.Time) bool {
	last := k.listedAt
	if last.IsZero() {
		last = k.begun
	}
	return now.Sub(last) > staleAfter(k.pool, k.a.timing)
}

// staleAfter is how old a listing may be. One is as old as its call was long, and the next one may take as long again.
func staleAfter(p *scale.Pool, t timing) time.Duration {
	if p.Command == nil {
		return t.listStale
	}
	return max(t.listStale, 2*limit(p, t.listTimeout)+15*time.Second)
}

// workersNow is what is known of the pool's workers now.
func (k *keeper) workersNow(now time.Time) scale.Sample {
	s := scale.Sample{Now: now, Throughput: k.learned.throughput(k.pool), ColdStart: k.learned.coldStart(k.pool)}
	s.Failures, s.RetryAt, s.Failure = k.learned.Failures, k.learned.RetryAt, k.learned.Failure
	for _, name := range slices.Sorted(maps.Keys(k.workers)) {
		w := k.workers[name]
		if w.dead {
			continue
		}
		one := scale.Worker{Name: name, State: w.state, Since: w.stateSince, Jobs: w.jobs(), IdleSince: w.idleSince}
		one.Yields = w.beat != nil && w.beat.Worker.Yields
		if k.held(w) {
			one.IdleSince = time.Time{} // however idle it is, it cannot go yet
		}
		s.Workers = append(s.Workers, one)
	}
	return s
}

// sample is what is known of the pool now.
func (k *keeper) sample(now time.Time, members []cluster.Member) scale.Sample {
	s := k.workersNow(now)
	if l := k.learned; now.Before(l.RoomAt) {
		if s.Limit = l.Limit; s.Limit == 0 {
			// No room for even one: as if a start had failed, for a limit of none means that there is no limit.
			s.Failures, s.Failure = max(s.Failures, l.Refusals), l.Refusal
			if l.RoomAt.After(s.RetryAt) {
				s.RetryAt = l.RoomAt
			}
		}
	}

	dispatcher := leadingDispatcher(members)
	b := k.l.batches.Load()
	s.Unknown = cmp.Or(k.cannot(now), k.a.unknown(now, dispatcher))
	switch {
	case s.Unknown != "":
	case b == nil:
		s.Unknown = "the batches have not been read yet"
	case now.Sub(b.at) > k.a.timing.batchesStale:
		s.Unknown = "the batches cannot be read: the database does not answer"
	}
	if dispatcher == nil {
		return s
	}
	d := demandOf(k.pool.Models, dispatcher, members)
	nowhere := k.absence.add(now, d.nowhere(), k.a.timing.absent)
	s.Waiting, s.InFlight = d.split(nowhere)
	if b != nil {
		for _, m := range k.pool.Models {
			s.Unfed = append(s.Unfed, b.unfed[m]...)
		}
		s.Unfed = condense(s.Unfed)
	}
	k.measure(s.Waiting)
	s.Throughput = k.learned.throughput(k.pool)
	return s
}

// cannot says why nothing can be started or stopped now; "" if it can.
func (k *keeper) cannot(now time.Time) string {
	switch {
	case k.provider == nil:
		return fmt.Sprintf("this autoscaler has no provider %q", k.pool.Provider)
	case k.listedAt.IsZero() && k.listError == nil:
		return "the provider has not said yet which workers there are"
	case (k.listedAt.IsZero() || k.listIsOld(now)) && k.listError != nil:
		return fmt.Sprintf("the provider does not say which workers there are: %v", k.listError)
	case k.listIsOld(now):
		return fmt.Sprintf("the provider has not said for %s which workers there are", now.Sub(k.listedAt).Round(time.Second))
	}
	return ""
}

// before is the instance that must be stopped before w can be, "" if there is none.
func (k *keeper) before(w *worker) string {
	name := k.instances[w.Name].After
	at, stopped := k.stopped[name]
	if other, there := k.instances[name]; !there || other.State == provider.Stopping || stopped && !k.listedAt.After(at) {
		return ""
	}
	return name
}

// held tells whether w cannot go since one that must go before it stays.
func (k *keeper) held(w *worker) bool {
	name := k.before(w)
	if name == "" {
		return false
	}
	other := k.workers[name]
	return other == nil || other.Stopping == 0
}

// measure learns from what full workers get done.
func (k *keeper) measure(waiting map[job.Class]scale.Amount) {
	waits := false
	for _, a := range waiting {
		waits = waits || a.Jobs > 0
	}
	for name, w := range k.workers {
		if w.beat == nil || w.Stopping > 0 {
			delete(k.meters, name)
			continue
		}
		if k.meters[name] == nil {
			k.meters[name] = &meter{}
		}
		if rate, ok := k.meters[name].hear(w.beat, waits); ok {
			k.learned.Rates = keep(k.learned.Rates, rate, keptRates)
		}
	}
	for name := range k.meters {
		if k.workers[name] == nil {
			delete(k.meters, name)
		}
	}
}

// recordRemoval writes down that the pool goes, as any decision: once. It is false if that failed.
func (k *keeper) recordRemoval(ctx context.Context, now time.Time) bool {
	if k.removalTold || k.ending {
		return true
	}
	d := scale.Decision{At: now, Pool: k.name(), Action: scale.ScaleDown, Reason: "the pool was removed", Sample: k.workersNow(now)}
	if k.spec.Load().pool != nil {
		d.Reason = "the pool gets another provider or workload, and begins anew there"
	}
	for _, w := range d.Sample.Workers {
		if w.State != scale.Draining {
			d.Stop = append(d.Stop, w.Name)
		}
	}
	switch n := len(d.Stop); n {
	case 0:
		d.Reason += ": it has no workers to stop"
	case 1:
		d.Reason += ": its worker is drained and stopped"
	default:
		d.Reason += fmt.Sprintf(": its %d workers are drained and stopped", n)
	}
	k.told = scale.Decision{} // whatever was told last
	k.removalTold = k.record(ctx, now, &d)
	return k.removalTold
}

// history is what came before.
func (k *keeper) history(now time.Time) scale.History {
	recent, _ := k.a.traffic.last(now, k.pool.Models)
	return k.memory.History(recent, k.season)
}

// note remembers what a decision says of the demand.
func (k *keeper) note(now time.Time, d *scale.Decision) {
	k.a.metrics.show(k.name(), k.pool.Max, d)
	if d.Sample.Unknown != "" {
		return
	}
	k.memory.Decided(now, d.Needed, d.Forecast.Trend, time.Duration(k.pool.Cooldown)+time.Second)
	_, lately := k.a.traffic.last(now, k.pool.Models)
	some := lately || d.Sample.InFlight.Jobs > 0 || len(d.Sample.Unfed) > 0
	for _, a := range d.Sample.Waiting {
		some = some || a.Jobs > 0
	}
	if some {
		k.memory.Asked(now)
		if now.Sub(k.learned.LastDemand) >= time.Minute || now.Sub(k.learned.LastDemand) >= time.Duration(k.pool.Idle)/4 { // not a write each second
			k.learned.LastDemand = now
		}
	}
}

// learnSeason learns from the recorded arrivals what is usual, now and then, beside the keeper.
func (k *keeper) learnSeason(ctx context.Context, now time.Time) {
	if k.learning || !k.seasonAt.IsZero() && now.Sub(k.seasonAt) < k.a.timing.learn {
		return
	}
	k.learning = true
	models, zone := slices.Clone(k.pool.Models), k.pool.Zone()
	k.call(ctx, k.a.timing.listTimeout, func(ctx context.Context) func(context.Context) {
		rows, err := k.a.deps.Ledger.Arrivals(ctx, models, job.MillisOf(now.Add(-keepArrivals)))
		var season *scale.Season
		if err == nil && len(rows) > 0 {
			season = k.a.learn(together(rows), now, zone)
		}
		return func(context.Context) {
			k.learning, k.seasonAt = false, now
			if err != nil {
				k.report("reading recorded arrivals", err)
				k.seasonAt = now.Add(-k.a.timing.learn + k.a.timing.repeat) // what was learned before stands
				return
			}
			k.season = season
		}
	})
}

// together adds up the models' arrivals.
func together(rows []ledger.Arrivals) []scale.Arrivals {
	sums := map[job.Millis]arrived{}
	for _, r := range rows {
		s := sums[r.Start]
		s.add(arrived{float64(r.Jobs), float64(r.Tokens), r.Squares})
		sums[r.Start] = s
	}
	all := make([]scale.Arrivals, 0, len(sums))
	for _, start := range slices.Sorted(maps.Keys(sums)) {
		all = append(all, sums[start].at(start.Time()))
	}
	return all
}

// record writes a decision down: when it is another one than before, when it starts or stops something, and now and then while it declines. It is false if that failed: what it wants cannot be written down then either.
func (k *keeper) record(ctx context.Context, now time.Time, d *scale.Decision) bool {
	changed := d.Action != k.told.Action || d.Want != k.told.Want
	acts := d.Start > 0 || len(d.Stop) > 0
	declines := d.Action != scale.Hold && now.Sub(k.told.At) >= k.a.timing.repeat
	if !changed && !acts && !declines {
		return true
	}
	raw, err := json.Marshal(d)
	if err == nil {
		err = k.a.deps.Ledger.InsertScaling(ctx, k.l.epoch, ledger.Scaling{Pool: k.name(), At: job.MillisOf(now), Action: string(d.Action), Decision: raw})
	}
	if !k.report("keeping a decision", err) {
		return false
	}
	k.told = *d
	k.a.metrics.decisions.WithLabelValues(k.name(), string(d.Action)).Inc()
	waiting := scale.Amount{}
	for _, a := range d.Sample.Waiting {
		waiting.Jobs += a.Jobs
		waiting.Tokens += a.Tokens
	}
	counts := countStates(d.Sample.Workers)
	k.a.log.Info("scaling decision", "pool", k.name(), "action", d.Action, "reason", d.Reason, "want", d.Want, "needed", d.Needed, "start", d.Start, "stop", d.Stop, "yield", d.Yield,
		"ready", counts[scale.Ready], "starting", counts[scale.Starting], "away", counts[scale.Away], "draining", counts[scale.Draining],
		"waiting_jobs", waiting.Jobs, "waiting_tokens", waiting.Tokens, "in_flight_jobs", d.Sample.InFlight.Jobs, "forecast", math.Round(d.Forecast.Used), "throughput", math.Round(d.Sample.Throughput))
	return true
}

func countStates(all []scale.Worker) map[scale.WorkerState]int {
	n := map[scale.WorkerState]int{}
	for _, w := range all {
		n[w.State]++
	}
	return n
}

// tell puts the pool into the heartbeat.
func (k *keeper) tell(now time.Time, d *scale.Decision) {
	n := countStates(d.Sample.Workers)
	info := &cluster.PoolInfo{
		Name: k.name(), Models: k.pool.Models, Wanted: d.Want, Ready: n[scale.Ready], Starting: n[scale.Starting], Draining: n[scale.Draining], Max: k.pool.Max,
		WorkerRate: d.Sample.Throughput, ColdStart: d.Sample.ColdStart.P50.Seconds(),
		Action: string(d.Action), Reason: d.Reason + k.waiting(),
	}
	for _, w := range d.Sample.Workers {
		if w.State != scale.Draining || w.Jobs > 0 {
			info.Desired++
		}
		if own := k.workers[w.Name]; w.State == scale.Starting && (own == nil || own.waits == "") {
			at := w.Since.Add(d.Sample.ColdStart.P50)
			if at.Before(now) {
				at = now
			}
			if s := seconds(at); info.ReadyAt == 0 || s < info.ReadyAt {
				info.ReadyAt = s
			}
		}
	}
	info.Desired = max(info.Desired, d.Want)
	if k.learned.Failures >= scale.GiveUp {
		info.Unavailable, info.RetryAt = k.learned.Failure, seconds(k.learned.RetryAt)
	}
	if k.provider == nil {
		info.Unavailable = d.Sample.Unknown
	}
	k.a.metrics.unavailable.WithLabelValues(k.name()).Set(number(info.Unavailable != ""))
	k.a.tell(k.name(), info)
}

// waiting says what workers that start wait for, as far as that is known, to be put behind a reason.
func (k *keeper) waiting() string {
	text, more := "", 0
	for _, name := range slices.Sorted(maps.Keys(k.workers)) {
		w, why := k.workers[name], ""
		if i := k.instances[name]; w.state == scale.Starting && !w.dead {
			if why = w.waits; why == "" && i.State == provider.Pending {
				why = i.Reason
			}
		}
		switch {
		case why == "":
		case text == "":
			text = "; " + name + " waits: " + why
		default:
			more++
		}
	}
	if more > 0 {
		text += fmt.Sprintf(", and %d more", more)
	}
	return text
}

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }
