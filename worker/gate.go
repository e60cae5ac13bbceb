package worker

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

// Why a job in hand does not start here.
var (
	errClosed = errors.New("the worker starts no more work")
	errShut   = errors.New("the engine is not ready")
	errHalted = errors.New("the engine gives no tokens")
)

// gate asks the scheduler what starts and what is pulled, and tells those who wait. The scheduler decides; the gate has its lock, its clock, and its channels.
// After any mix of success, failure, cancel and panic the ledger is back at zero when nothing runs.
type gate struct {
	stop func(job.ID, error) // stops a job's attempt for a reason, so that it is given back
	// others: another worker could take what this one's engine has halted on.
	others atomic.Bool

	mu      sync.Mutex
	sched   *schedule.Scheduler
	open    bool // work may start
	closed  bool // work will never start again
	hand    map[*schedule.Ticket]*waiter
	running map[*schedule.Ticket]job.ID
	timer   *time.Timer   // looks again when something changes by time alone
	changed chan struct{} // closed, and another put in its place, when who wanted to pull and could not may ask again
	refused bool          // somebody has been told to wait for changed
	pullers map[int]*puller
	yielded *time.Timer // ends the time for which lower classes wait for higher ones
}

// headStart is how long a pull of a class that has work waits before lower classes pull too: without it they would be served in turn.
const headStart = 20 * time.Millisecond

// puller is one consumer of a class (rank; -1 is the own lane, which has all).
type puller struct {
	class int
	brisk bool      // its last pull brought something: there may be more
	since time.Time // of the pull that is out, zero if none is
}

// waiter is one who waits for a job in hand.
type waiter struct {
	id    job.ID
	start chan *reservation // gets one value, nil if the job is sent away
	why   error             // set before nil is sent
}

// reservation is what a running job holds of the engine.
type reservation struct {
	gate   *gate
	ticket *schedule.Ticket

	mu     sync.Mutex // guards what follows
	first  bool       // the first token came
	result schedule.Result
}

func newGate(cfg schedule.Config, stop func(job.ID, error)) (*gate, error) {
	s, err := schedule.New(cfg)
	if err != nil {
		return nil, err
	}
	g := &gate{stop: stop, sched: s, hand: map[*schedule.Ticket]*waiter{}, running: map[*schedule.Ticket]job.ID{}, changed: make(chan struct{}), pullers: map[int]*puller{}}
	g.timer = time.AfterFunc(time.Hour, g.look)
	g.timer.Stop()
	g.yielded = time.AfterFunc(time.Hour, g.tell)
	g.yielded.Stop()
	return g, nil
}

// entry is a job that wants to start.
type entry struct {
	id  job.ID
	ask schedule.Ask
	// preemptible: it may be given back for an interactive job; rescuable: when the engine halts before its first token. lane: it waits for this worker alone.
	preemptible, rescuable, lane bool
}

// enter waits in the scheduler's order until the job may start. It may be sent away: when ctx ends (its cause), while the engine is not ready (errShut), when it has halted (errHalted), and for good (errClosed).
func (g *gate) enter(ctx context.Context, e entry) (*reservation, error) {
	w := &waiter{id: e.id, start: make(chan *reservation, 1)}
	g.mu.Lock()
	switch {
	case g.closed:
		g.mu.Unlock()
		return nil, errClosed
	case !g.open:
		g.mu.Unlock()
		return nil, errShut
	}
	t := g.sched.Offer(time.Now(), e.ask)
	t.Preemptible, t.Rescuable, t.Lane = e.preemptible, e.rescuable, e.lane
	g.hand[t] = w
	g.turnLocked()
	g.mu.Unlock()
	select {
	case r := <-w.start:
		return r, w.why
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.hand[t] != nil {
		delete(g.hand, t)
		g.sched.Withdraw(t)
		g.turnLocked() // it may have stood before others
	} else if r := <-w.start; r != nil { // it started in that moment
		g.releaseLocked(r)
	}
	return nil, context.Cause(ctx)
}

// look acts on what time alone has changed.
func (g *gate) look() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.turnLocked()
}

// turnLocked has the scheduler look at the hand, and tells those who are concerned.
func (g *gate) turnLocked() {
	now := time.Now()
	if g.open {
		started, next := g.sched.Start(now)
		for _, t := range started {
			w := g.hand[t]
			delete(g.hand, t)
			g.running[t] = w.id
			w.start <- &reservation{gate: g, ticket: t}
		}
		for _, t := range g.sched.Preempt(now) {
			go g.stop(g.running[t], errPreempted) // it takes other locks; it ends at once
		}
		if g.others.Load() {
			for _, t := range g.sched.Rescue(now) {
				go g.stop(g.running[t], errHalted)
			}
			for _, t := range g.sched.Return(now) {
				g.sendAwayLocked(t, errHalted)
			}
		}
		if !next.IsZero() {
			g.timer.Reset(next.Sub(now))
		}
	}
	g.tellLocked()
}

// tell tells those who wait for it that they may ask again.
func (g *gate) tell() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tellLocked()
}

func (g *gate) tellLocked() {
	if g.refused {
		g.refused = false
		close(g.changed)
		g.changed = make(chan struct{})
	}
}

// grow counts n more tokens of a running job.
func (r *reservation) grow(n int) {
	r.mu.Lock()
	first := !r.first
	r.first = true
	r.mu.Unlock()
	g, now := r.gate, time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	halted := g.refused && g.sched.Brake(now) != ""
	if first {
		g.sched.First(now, r.ticket)
	}
	g.sched.Grow(now, r.ticket, n)
	if first || halted {
		g.turnLocked()
	}
}

// ended notes how the job's call went, for its release.
func (r *reservation) ended(got *reply, f *fault) {
	var result schedule.Result
	if got != nil {
		result.Completed = f == nil && got.status >= 200 && got.status <= 299
		result.Overloaded = got.status == http.StatusTooManyRequests || got.status >= 500
		if got.usage != nil {
			result.Prompt, result.Output = got.usage.PromptTokens, got.usage.CompletionTokens
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result = result
}

// stay keeps the job from being preempted.
func (r *reservation) stay() {
	r.gate.mu.Lock()
	defer r.gate.mu.Unlock()
	r.ticket.Preemptible = false
}

// release gives back what the job held. Only the first call does anything.
func (r *reservation) release() {
	r.gate.mu.Lock()
	defer r.gate.mu.Unlock()
	r.gate.releaseLocked(r)
}

func (g *gate) releaseLocked(r *reservation) {
	if _, ok := g.running[r.ticket]; !ok {
		return
	}
	r.mu.Lock()
	result := r.result
	r.mu.Unlock()
	delete(g.running, r.ticket)
	g.sched.End(time.Now(), r.ticket, result)
	g.turnLocked()
}

// observe takes what the engine says about itself.
func (g *gate) observe(l engine.Load) {
	r := schedule.Reading{
		Estimated: l.Source == engine.SourceEstimated, Running: l.Running, Waiting: l.Waiting, MaxRunning: l.MaxRunning,
		Preemptions: l.Preemptions, GeneratedTokens: l.GeneratedTokens, PromptTokens: l.PromptTokens,
	}
	for _, k := range l.Ranks {
		r.Ranks = append(r.Ranks, schedule.Rank(k))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sched.Observe(time.Now(), r)
	g.turnLocked()
}

// unseen notes that the engine's metrics cannot be read.
func (g *gate) unseen() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sched.Unseen(time.Now())
	g.turnLocked()
}

// alive notes that the engine has given a token to somebody whom the gate does not know, as a probe is.
func (g *gate) alive() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sched.Alive(time.Now())
	g.turnLocked()
}

// setOpen opens the gate, or sends away what is in hand and what comes: others may have room.
func (g *gate) setOpen(open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = open && !g.closed
	if !open {
		g.emptyLocked(errShut)
	} else {
		g.sched.Alive(time.Now()) // it has passed a probe
	}
	g.turnLocked()
}

// close sends away what is in hand and what comes, for good.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open, g.closed = false, true
	g.timer.Stop()
	g.yielded.Stop()
	g.emptyLocked(errClosed)
	g.turnLocked()
}

func (g *gate) emptyLocked(why error) {
	for t := range g.hand {
		g.sched.Withdraw(t)
		g.sendAwayLocked(t, why)
	}
}

func (g *gate) sendAwayLocked(t *schedule.Ticket, why error) {
	w := g.hand[t]
	delete(g.hand, t)
	w.why = why
	w.start <- nil
}

// status is the scheduler's at this moment.
func (g *gate) status() schedule.Status {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sched.Status(time.Now())
}

// want tells what a consumer (one of few small numbers) may pull now for a class (rank), or that nothing may be and a channel that is closed when that may have changed. A wish counts until pulled.
func (g *gate) want(consumer, class int) (schedule.Wish, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.pullers[consumer] == nil {
		g.pullers[consumer] = &puller{class: class}
	}
	now := time.Now()
	if g.open {
		if wish := g.sched.Pull(now, class); wish.Batch > 0 {
			wait := g.yieldLocked(now, class)
			if wait <= 0 {
				g.sched.Pulling(consumer, wish.Batch)
				g.pullers[consumer].since = now
				return wish, nil
			}
			g.yielded.Reset(wait)
		}
	}
	g.refused = true
	return schedule.Wish{}, g.changed
}

// yieldLocked is how long a class waits for higher ones to pull what there is of them: a worker with room for one job more would else get one of each class, and start whichever comes first.
// What the batch class is due it does not wait for.
func (g *gate) yieldLocked(now time.Time, class int) (wait time.Duration) {
	if class == job.Batch.Rank() && g.sched.Due() {
		return 0
	}
	for _, p := range g.pullers {
		if p.class < 0 || p.class >= class || !p.brisk {
			continue
		}
		if p.since.IsZero() { // it has been told as well
			wait = headStart
		} else {
			wait = max(wait, headStart-now.Sub(p.since))
		}
	}
	return wait
}

// took notes how long after a pull its first delivery came.
func (g *gate) took(d time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sched.Took(d)
}

// pulled notes that a consumer's pull has ended, and how many jobs it brought.
func (g *gate) pulled(consumer, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sched.Pulled(consumer)
	p := g.pullers[consumer]
	p.brisk, p.since = n > 0, time.Time{}
}

// leave notes that a consumer pulls no more.
func (g *gate) leave(consumer int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.pullers, consumer)
	g.tellLocked()
}

// idle reports whether nothing runs.
func (g *gate) idle() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.running) == 0
}
