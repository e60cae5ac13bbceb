package autoscaler

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

const (
	// mostCalls bounds the calls of a pool's provider at once.
	mostCalls = 8
	// stopGrace is how much longer than the pool's Drain a stop may take, commandGrace how much longer than its timeout a command.
	stopGrace    = 2 * time.Minute
	commandGrace = 10 * time.Second
	// orderTimeout bounds an order to drain.
	orderTimeout = 5 * time.Second
)

// A worker's life, and what is true if this process dies after each step. Whoever leads next begins from the launches in the database and the provider's list.
//
//	InsertLaunches   it counts from here on. Nobody has been asked yet: the next leader asks under the same name.
//	provider.Start   taken on or not: the next leader asks again under the same name, which starts no second one.
//	UpdateLaunch     (Ready) only what was learned of this cold start is lost.
//	UpdateLaunch     (Stopping) it is to go: the next leader drains and stops it, whatever the demand is by then.
//	OrderDrain       it takes no more work, and finishes what it has: ordered again, nothing changes.
//	provider.Stop    gone or going: stopping it again is no error.
//	DeleteLaunch     nothing is left.
//
// Each call of a provider is preceded by a write that names this leader's epoch. Where another one has begun to lead it is refused, and this one's time ends.

// progress leads each worker a step on. It is false if a write failed: the next turn tries again.
func (k *keeper) progress(ctx context.Context, now time.Time) bool {
	if k.provider == nil {
		return true
	}
	for _, name := range slices.Sorted(maps.Keys(k.workers)) {
		if !k.step(ctx, now, k.workers[name]) {
			return false
		}
	}
	return k.find(ctx, now)
}

func (k *keeper) step(ctx context.Context, now time.Time, w *worker) bool {
	if w.calling != "" {
		return true
	}
	if w.gone {
		return k.drop(ctx, w)
	}
	instance, listed := k.instances[w.Name]
	// A listing that began before the last call ended says nothing of it.
	fresh := !k.listedAt.IsZero() && k.listedAt.After(w.ended)
	listed = listed && fresh
	if listed {
		w.missed = 0
		if instance.State != provider.Pending { // of one that is pending, a call that was cut off may have made a part
			w.asked = true
		}
	}
	switch {
	case w.Stopping > 0:
		return k.leave(ctx, now, w)
	case listed && instance.State == provider.Failed:
		return k.died(ctx, now, w, cmp.Or(instance.Reason, "it ended by itself"))
	case listed && instance.State == provider.Running && w.beat != nil && w.beat.Worker.State == cluster.Draining:
		// Somebody has told it to drain: it will take nothing more, and would stay for ever.
		k.a.log.Info("a worker was told to drain by somebody else: it is stopped once it is empty", "pool", k.name(), "worker", w.Name)
		return k.stopping(ctx, now, w)
	case w.Ready == 0 && w.beat != nil && w.beat.Worker.State == cluster.Ready:
		return k.ready(ctx, now, w)
	case w.Ready == 0 && (w.asked || listed) && now.Sub(w.from) > k.startLimit():
		return k.died(ctx, now, w, k.late(w))
	case fresh && !listed && w.asked:
		return k.missing(ctx, now, w)
	case !w.asked && !k.listedAt.IsZero():
		return k.start(ctx, now, w, false)
	case w.state == scale.Away && now.Sub(w.stateSince) > k.startLimit():
		k.a.log.Warn("a worker does not come back: it is stopped", "pool", k.name(), "worker", w.Name)
		return k.stopping(ctx, now, w)
	case w.state == scale.Ready && !w.steady && now.Sub(w.Ready.Time()) >= k.a.timing.steady:
		w.steady = true
		k.learned.Fragile = 0
		k.learned.works()
	}
	return true
}

// startLimit is how long a start may take. What quick starts have taught does not make it shorter than what the pool says.
func (k *keeper) startLimit() time.Duration {
	return max(k.a.timing.startLimit, 4*time.Duration(k.pool.ColdStart), 4*k.learned.coldStart(k.pool).P90)
}

// late says of a worker that it took too long to start, and what to do.
func (k *keeper) late(w *worker) string {
	text := fmt.Sprintf("it was not ready within %s", scale.Duration(k.startLimit().Round(time.Second)))
	if i := k.instances[w.Name]; i.State == provider.Pending && i.Reason != "" {
		text += " (" + i.Reason + ")"
	}
	return text + ": if it needs longer, raise cold_start of the pool, of which it gets four times"
}

// write changes the launch, and with that makes sure that this process leads.
func (k *keeper) write(ctx context.Context, w *worker, to ledger.Launch) bool {
	err := k.a.deps.Ledger.UpdateLaunch(ctx, k.l.epoch, to)
	if errors.Is(err, ledger.ErrNotFound) { // somebody removed the row: if the worker is there it is found again
		delete(k.workers, w.Name)
		return true
	}
	if !k.report("changing a launch", err) {
		return false
	}
	w.Launch = to
	return true
}

// ready notes that a worker is ready for the first time.
func (k *keeper) ready(ctx context.Context, now time.Time, w *worker) bool {
	at, begun := now, k.beginning(w, now)
	// Who was not there when it became ready believes what it says, within reason: clocks differ.
	if said := time.UnixMilli(int64(w.beat.Worker.StateSince * 1000)); !w.sawStarting && said.After(begun) && said.Before(now) {
		at = said
	}
	to := w.Launch
	to.Ready = job.MillisOf(at)
	if !k.write(ctx, w, to) {
		return false
	}
	w.asked = true
	w.hear(now, w.beat)
	took := at.Sub(begun)
	if w.tries == 0 && !w.guessed && took > 0 {
		k.learned.ColdStarts = keep(k.learned.ColdStarts, took.Seconds(), keptStarts)
		k.a.metrics.coldStart.WithLabelValues(k.name()).Observe(took.Seconds())
	}
	if k.learned.Fragile == 0 {
		k.learned.works()
	}
	k.a.log.Info("worker ready", "pool", k.name(), "worker", w.Name, "after", scale.Duration(took.Round(time.Millisecond)))
	return true
}

// beginning is when the worker's cold start began: without the time that its first start waited for something that is there from then on. Of one whose start another leader has seen to, its instance tells.
func (k *keeper) beginning(w *worker, ready time.Time) time.Time {
	begun, created := w.At.Time(), k.instances[w.Name].Created
	switch {
	case w.later:
		return w.from
	case begun.Before(k.begun) && created.After(begun) && created.Before(ready):
		return created
	}
	return begun
}

// died has a worker tidied away that ended by itself, or never became ready. That is a start that failed if it was never ready, or if it is not the first one that died soon after it was.
func (k *keeper) died(ctx context.Context, now time.Time, w *worker, why string) bool {
	if k.held(w) {
		// It can only be tidied away after others that are well. Whoever runs it is left to try again.
		if !now.Before(w.next) {
			k.failed(now, w, why)
			w.next = k.learned.RetryAt
		}
		return true
	}
	failed := w.Ready == 0
	fragile := w.Ready > 0 && !w.steady
	if !k.stopping(ctx, now, w) {
		return false
	}
	w.dead = true
	if fragile {
		k.learned.Fragile++
		failed = k.learned.Fragile >= 2
	}
	if failed {
		k.failed(now, w, why)
	} else {
		k.a.log.Warn("a worker died: it is tidied away", "pool", k.name(), "worker", w.Name, "reason", why)
	}
	return true
}

// failed notes a start that failed.
func (k *keeper) failed(now time.Time, w *worker, why string) {
	before := k.learned.Failures
	k.learned.failStart(now, why, k.a.timing)
	k.a.metrics.failedStarts.WithLabelValues(k.name()).Inc()
	k.a.log.Warn("a start failed", "pool", k.name(), "worker", w.Name, "reason", why, "in_a_row", k.learned.Failures, "next", k.learned.RetryAt)
	if before < scale.GiveUp && k.learned.Failures >= scale.GiveUp {
		k.a.log.Error("the pool is unavailable: its starts fail", "pool", k.name(), "reason", why)
	}
}

// stopping writes that a worker is to go.
func (k *keeper) stopping(ctx context.Context, now time.Time, w *worker) bool {
	to := w.Launch
	to.Stopping = job.MillisOf(now)
	if !k.write(ctx, w, to) {
		return false
	}
	w.hear(now, w.beat)
	w.next, w.tries = time.Time{}, 0
	return true
}

// leave drains a worker that is to go, and stops it once it is empty, its time is over, or nobody hears it. The order says for how long it may drain, so that one that is told to stop then hands back at once what it has; the provider, which kills
// it after its Drain, is for one that does not.
func (k *keeper) leave(ctx context.Context, now time.Time, w *worker) bool {
	if now.Before(w.next) {
		return true
	}
	empty := false
	switch {
	case w.dead:
		empty = true
	case w.beat == nil:
		// Silence is no proof while nobody could have been heard.
		empty = k.a.deps.Cluster.Listening(k.a.begun) >= k.a.timing.stale
	case w.beat.Worker.State == cluster.Draining:
		empty = w.jobs() == 0
	case w.beat.Worker.State == cluster.Starting && w.Ready == 0:
		empty = w.jobs() == 0 // it has had nothing; if it becomes ready now, stopping it lets it finish
	}
	late := now.Sub(w.Stopping.Time()) >= time.Duration(k.pool.Drain)
	if !empty && !late {
		if w.beat != nil && (w.beat.Worker.State != cluster.Draining || !w.limited) { // who drains already may not know for how long it may
			k.orderDrain(ctx, now, w)
		}
		return true
	}
	if k.before(w) != "" {
		return true // its turn comes
	}
	if late && !empty {
		k.a.log.Warn("a worker has not finished in time: it is stopped", "pool", k.name(), "worker", w.Name, "jobs", w.jobs(), "drain", k.pool.Drain)
	}
	return k.stop(ctx, w)
}

func (k *keeper) orderDrain(ctx context.Context, now time.Time, w *worker) {
	id, left := w.beat.ID, time.Duration(k.pool.Drain)-now.Sub(w.Stopping.Time())
	w.calling = orders
	k.call(ctx, orderTimeout, func(ctx context.Context) func(context.Context) {
		err := k.a.deps.Cluster.OrderDrainWithin(ctx, id, left)
		return func(context.Context) {
			w.calling = ""
			w.next = time.Now().Add(k.a.cfg.Tick) // until its heartbeat says so
			w.limited = w.limited || err == nil
			if err != nil && ctx.Err() == nil {
				k.a.log.Warn("a worker was told to drain and did not answer: telling it again", "pool", k.name(), "worker", w.Name, "err", err)
			}
		}
	})
}

// stop has the provider stop a worker.
func (k *keeper) stop(ctx context.Context, w *worker) bool {
	if k.underWay(stops) >= mostCalls {
		return true
	}
	if !k.write(ctx, w, w.Launch) {
		return false
	}
	if k.workers[w.Name] != w {
		return true
	}
	w.calling, w.told = stops, true
	pool := k.pool
	k.call(ctx, stopLimit(pool), func(ctx context.Context) func(context.Context) {
		err := k.provider.Stop(ctx, pool, w.Name)
		return func(ctx context.Context) {
			now := time.Now()
			w.calling, w.ended = "", now
			if err != nil {
				w.tries++
				w.next = now.Add(pause(w.tries, k.a.timing.firstRetry, k.a.timing.lastRetry))
				k.a.metrics.failedStops.WithLabelValues(k.name()).Inc()
				k.a.log.Warn("a worker could not be stopped: trying again", "pool", k.name(), "worker", w.Name, "err", err, "next", w.next)
				return
			}
			k.a.metrics.stops.WithLabelValues(k.name()).Inc()
			k.a.log.Info("worker stopped", "pool", k.name(), "worker", w.Name)
			w.gone = true
			k.stopped[w.Name] = now
			k.drop(ctx, w)
		}
	})
	return true
}

// drop forgets a worker that is gone.
func (k *keeper) drop(ctx context.Context, w *worker) bool {
	if !k.report("removing a launch", k.a.deps.Ledger.DeleteLaunch(ctx, k.l.epoch, k.name(), w.Name)) {
		return false
	}
	delete(k.workers, w.Name)
	return true
}

// start asks the provider for a worker that has its launch. fresh: that was written just now.
func (k *keeper) start(ctx context.Context, now time.Time, w *worker, fresh bool) bool {
	switch {
	case now.Before(w.next) || k.underWay(starts) >= mostCalls || k.listIsOld(now):
		return true
	case w.tries > 0 && now.Before(k.learned.RetryAt):
		return true
	case k.learned.Failures >= scale.GiveUp && k.others(w):
		return true // one is tried alone
	}
	// This changes nothing, but makes sure that this process leads.
	if !fresh && !k.write(ctx, w, w.Launch) {
		return false
	}
	if k.workers[w.Name] != w {
		return true
	}
	w.calling = starts
	if w.later {
		w.from = now // this may be the time at which it is taken on
	}
	pool, total := k.pool, 0
	for _, other := range k.workers {
		if !other.told && !other.gone && k.instances[other.Name].State != provider.Stopping {
			total++
		}
	}
	k.call(ctx, limit(pool, k.a.timing.call), func(ctx context.Context) func(context.Context) {
		err := k.provider.Start(ctx, pool, w.Name, total)
		return func(ctx context.Context) {
			now := time.Now()
			w.calling, w.ended, k.startsEnded = "", now, now
			k.started(ctx, now, w, err)
		}
	})
	return true
}

// limit bounds a call of the provider: a pool's own commands have the time that the pool gives them, and what it takes to end them.
func limit(p *scale.Pool, usual time.Duration) time.Duration {
	if p.Command == nil {
		return usual
	}
	return max(usual, time.Duration(p.Command.Timeout)+commandGrace)
}

// stopLimit is the same of a call that stops a worker.
func stopLimit(p *scale.Pool) time.Duration { return time.Duration(p.Drain) + limit(p, stopGrace) }

// others tells whether another worker is being started.
func (k *keeper) others(w *worker) bool {
	for _, other := range k.workers {
		if other != w && other.Ready == 0 && other.Stopping == 0 && (other.asked || other.calling != "" || other.waits != "") {
			return true
		}
	}
	return false
}

func (k *keeper) underWay(kind call) (n int) {
	for _, w := range k.workers {
		if w.calling == kind {
			n++
		}
	}
	return n
}

// started takes in what the provider said to a start.
func (k *keeper) started(ctx context.Context, now time.Time, w *worker, err error) {
	later, isLater := errors.AsType[*provider.LaterError](err)
	switch {
	case err == nil:
		w.asked, w.waits = true, ""
		if w.tries > 0 {
			w.from = now
		}
		k.a.metrics.starts.WithLabelValues(k.name()).Inc()
		if there := k.there(); now.Before(k.learned.RoomAt) {
			k.learned.Limit = max(k.learned.Limit, there) // others were refused at the same time
		} else {
			k.learned.room()
		}
	case errors.Is(err, provider.ErrCapacity):
		// It has none of that name: nothing is left of it.
		w.gone, w.dead = true, true
		k.drop(ctx, w)
		k.learned.refuse(now, k.there(), err.Error(), k.a.timing)
		k.a.metrics.refused.WithLabelValues(k.name()).Inc()
		k.a.log.Warn("the provider has no room for another worker", "pool", k.name(), "workers", k.learned.Limit, "err", err, "next", k.learned.RoomAt)
	case errors.Is(err, provider.ErrInvalid):
		// It does not help to try soon. A change of the pool is tried at once.
		w.gone, w.dead = true, true
		k.drop(ctx, w)
		k.learned.Failures, k.learned.Waves = max(k.learned.Failures, scale.GiveUp-1), 0
		k.failed(now, w, err.Error())
		k.learned.RetryAt = now.Add(k.a.timing.lastRetry)
	case ctx.Err() != nil:
	case isLater:
		// It is asked again under the same name, soon, and counts as one that starts meanwhile.
		if !w.later {
			k.a.log.Info("a start waits", "pool", k.name(), "worker", w.Name, "for", later.For)
		}
		w.later, w.waits = true, later.For
		w.next = now.Add(k.a.timing.list)
	default:
		// It was taken on or not. It is asked again under the same name, and counts as one that starts meanwhile.
		w.waits = ""
		w.tries++
		k.failed(now, w, err.Error())
		w.next = k.learned.RetryAt
	}
}

// there is how many workers the provider is known to have.
func (k *keeper) there() (n int) {
	for _, w := range k.workers {
		if _, listed := k.instances[w.Name]; (w.asked || listed) && !w.gone && !w.dead {
			n++
		}
	}
	return n
}

const noMore = "the provider has it no more"

// missing looks after a worker that the provider does not list though it has taken it on.
func (k *keeper) missing(ctx context.Context, now time.Time, w *worker) bool {
	if k.listedAt.After(w.missedAt) {
		w.missed++
		w.missedAt = k.listedAt
	}
	switch {
	case w.beat != nil || w.missed < 2:
		return true
	case w.Ready == 0 && k.pool.Kubernetes != nil && k.pool.Kubernetes.Observe:
		return true // somebody else starts it, in their own time: the limit of a start tells whether they do
	case w.Ready == 0:
		// The provider forgot it, or gave it another name, under which it is found below.
		if k.unclaimed() != "" {
			return true
		}
		w.asked, w.missed, w.forgotten = false, 0, true
		w.tries++
		k.failed(now, w, noMore)
		w.next = k.learned.RetryAt
		return true
	case k.a.deps.Cluster.Listening(k.a.begun) < k.a.timing.stale:
		return true
	}
	return k.died(ctx, now, w, noMore)
}

// unclaimed is an instance that no launch is known of, "" if there is none.
func (k *keeper) unclaimed() string {
	for _, name := range slices.Sorted(maps.Keys(k.instances)) {
		at, stopped := k.stopped[name]
		if k.workers[name] == nil && k.instances[name].State != provider.Stopping && (!stopped || k.listedAt.After(at)) {
			return name
		}
	}
	return ""
}

// find takes in the instances that nobody here has asked for: under names that the provider gave to what was asked for, left by a leader that was cut off, or made by hand. It waits until all that was asked for is taken on, and the list knows of it.
func (k *keeper) find(ctx context.Context, now time.Time) bool {
	if k.unclaimed() == "" || k.listIsOld(now) || !k.listedAt.After(k.startsEnded) {
		return true
	}
	var nameless []*worker
	for _, name := range slices.Sorted(maps.Keys(k.workers)) {
		w := k.workers[name]
		_, listed := k.instances[name]
		switch {
		case w.Stopping > 0 || listed:
		case !w.asked && !w.forgotten || w.calling != "" || !k.listedAt.After(w.ended):
			return true
		case w.Ready == 0 && w.beat == nil:
			nameless = append(nameless, w)
		}
	}
	for name := k.unclaimed(); name != ""; name = k.unclaimed() {
		launch := ledger.Launch{Pool: k.name(), Name: name, At: job.MillisOf(k.instances[name].Created)}
		w := &worker{asked: true, from: now}
		if launch.At == 0 {
			launch.At, w.guessed = job.MillisOf(now), true
		}
		if len(nameless) > 0 {
			// The provider names its instances itself, and this is the one that was asked for.
			old := nameless[0]
			nameless = nameless[1:]
			if w.from = old.from; old.tries == 0 || w.guessed { // else it was taken on later than it was asked for
				launch.At, w.guessed = old.At, old.tries > 0
			}
			// If we crash here, the instance has no launch: it is found as any other.
			if !k.drop(ctx, old) {
				return false
			}
		} else {
			k.a.log.Info("a worker was found that nobody had asked for", "pool", k.name(), "worker", name)
		}
		if err := k.a.deps.Ledger.InsertLaunches(ctx, k.l.epoch, launch); errors.Is(err, ledger.ErrExists) {
			k.reread()
			return false
		} else if !k.report("noting a worker that was found", err) {
			return false
		}
		w.Launch = launch
		k.workers[name] = w
	}
	k.hear(now, k.a.deps.Cluster.Members())
	return true
}

// act does what was decided. The launches are written before anybody is asked; from then on they count.
func (k *keeper) act(ctx context.Context, now time.Time, d *scale.Decision) {
	if k.cannot(now) != "" || ctx.Err() != nil {
		return
	}
	for _, w := range d.Sample.Workers {
		if slices.Contains(d.Stop, w.Name) {
			k.send(ctx, now, w)
		}
	}
	k.giveUp(ctx, now, d)
	n := d.Start
	switch {
	case now.Before(k.learned.RetryAt) || now.Before(k.learned.RoomAt) && k.learned.Limit == 0:
		return
	case k.learned.Failures >= scale.GiveUp:
		n = min(n, 1)
		if countStates(d.Sample.Workers)[scale.Starting] > 0 {
			return
		}
	}
	if n <= 0 {
		return
	}
	launches := make([]ledger.Launch, n)
	for i := range launches {
		launches[i] = ledger.Launch{Pool: k.name(), Name: k.name() + "-" + strings.ToLower(rand.Text()[:8]), At: job.MillisOf(now)}
	}
	if err := k.a.deps.Ledger.InsertLaunches(ctx, k.l.epoch, launches...); !k.report("noting launches", err) {
		// They may have been written, if the database broke off: the next decision must know of them.
		if errors.Is(err, ledger.ErrUnavailable) {
			k.reread()
		}
		return
	}
	// If we crash here, the next leader asks for them.
	for _, launch := range launches {
		w := &worker{Launch: launch, from: now}
		w.hear(now, nil)
		k.workers[launch.Name] = w
	}
	for _, launch := range launches {
		if !k.start(ctx, now, k.workers[launch.Name], true) {
			return
		}
	}
}

// giveUp tidies away what could not be started and is not wanted any more.
func (k *keeper) giveUp(ctx context.Context, now time.Time, d *scale.Decision) {
	live := 0
	for _, w := range k.workers {
		if !w.dead && w.state != scale.Draining {
			live++
		}
	}
	for _, name := range slices.Sorted(maps.Keys(k.workers)) {
		w := k.workers[name]
		if live > d.Want && !w.asked && (w.tries > 0 || w.waits != "") && w.calling == "" && w.Ready == 0 && w.Stopping == 0 {
			if !k.stopping(ctx, now, w) {
				return
			}
			// It may have been taken on, so it is stopped.
			w.dead = true
			live--
		}
	}
}

// reread ends the time of leading, because the database has, or may have, launches that are not known here: whoever leads next, and that may be this process, begins from what is stored.
func (k *keeper) reread() {
	k.a.log.Warn("the database may have launches that are not known here: beginning anew from what is stored", "pool", k.name())
	k.l.resign()
}

// send has a worker drained and stopped, unless more came to it since the decision was made.
func (k *keeper) send(ctx context.Context, now time.Time, chosen scale.Worker) {
	w := k.workers[chosen.Name]
	if w == nil || w.calling != "" || w.Stopping > 0 || w.Ready == 0 {
		return
	}
	k.hear(now, k.a.deps.Cluster.Members())
	if w.beat == nil || w.jobs() > chosen.Jobs || w.state != scale.Ready {
		return
	}
	if k.stopping(ctx, now, w) && k.workers[w.Name] == w {
		k.leave(ctx, now, w)
	}
}

// yield tells the workers that are too many and busy to leave work to the others, and the others to take their share. It is no more than a hint: a worker that misses it is told again, and one that was told by a leader
// who is none any more is told otherwise by the next.
func (k *keeper) yield(ctx context.Context, now time.Time, d *scale.Decision) {
	if d.Sample.Unknown != "" {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(k.workers)) {
		w := k.workers[name]
		to := slices.Contains(d.Yield, name)
		if w.state != scale.Ready || w.calling != "" || w.beat == nil || w.beat.Worker.Yields == to || now.Before(w.hintAt) {
			continue
		}
		id := w.beat.ID
		w.calling = orders
		k.call(ctx, orderTimeout, func(ctx context.Context) func(context.Context) {
			err := k.a.deps.Cluster.OrderYield(ctx, id, to)
			return func(context.Context) {
				w.calling = ""
				w.hintAt = time.Now().Add(k.a.timing.stale) // until its heartbeat says so
				if err != nil && ctx.Err() == nil {
					k.a.log.Debug("a worker did not answer whether it yields", "pool", k.name(), "worker", name, "err", err)
				}
			}
		})
	}
}

// remove drains and stops all workers of a pool that was removed: they finish what they run. It is true once nothing is left.
func (k *keeper) remove(ctx context.Context, now time.Time) bool {
	if k.provider == nil {
		if len(k.workers) > 0 {
			k.report("removing the pool", fmt.Errorf("this autoscaler has no provider %q to stop its workers with", k.pool.Provider))
			return false
		}
		return k.report("removing the pool", k.a.deps.Ledger.SavePoolState(ctx, k.l.epoch, k.name(), nil))
	}
	for _, name := range slices.Sorted(maps.Keys(k.workers)) {
		w := k.workers[name]
		if w.Stopping == 0 && w.calling == "" && !w.gone && !k.stopping(ctx, now, w) {
			return false
		}
	}
	if !k.progress(ctx, now) {
		return false
	}
	k.tellRemoval(now)
	if k.ending && k.givenUp() {
		k.a.log.Warn("workers are left that could not be stopped: whoever leads next tries again", "pool", k.name(), "workers", slices.Sorted(maps.Keys(k.workers)))
		return k.save(ctx, now, true)
	}
	// What the provider lists is found by progress, and goes the same way.
	if len(k.workers) > 0 || !k.listedAt.After(k.startsEnded) || k.listIsOld(now) || k.unclaimed() != "" {
		return false
	}
	for _, at := range k.stopped {
		if !k.listedAt.After(at) {
			return false
		}
	}
	if k.ending {
		return k.save(ctx, now, true)
	}
	if !k.report("removing the pool", k.a.deps.Ledger.SavePoolState(ctx, k.l.epoch, k.name(), nil)) {
		return false
	}
	k.a.log.Info("the pool is gone", "pool", k.name())
	return true
}

// givenUp tells whether all that is left could not be stopped, again and again: a platform that ends does not wait for that.
func (k *keeper) givenUp() bool {
	for _, w := range k.workers {
		if w.tries < scale.GiveUp {
			return false
		}
	}
	return len(k.workers) > 0
}

func (k *keeper) tellRemoval(now time.Time) {
	d := scale.Decision{At: now, Pool: k.name(), Action: scale.ScaleDown, Reason: "the pool was removed"}
	for name, w := range k.workers {
		d.Sample.Workers = append(d.Sample.Workers, scale.Worker{Name: name, State: w.state, Since: w.stateSince, Jobs: w.jobs()})
	}
	k.tell(now, &d)
	k.a.metrics.show(k.name(), 0, &d)
}
