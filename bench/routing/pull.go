package routing

import (
	"fmt"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

// The delays of Millrace's real path, as `millrace bench dispatch` measures them on two processors, rounded up.
const (
	enqueueWay = time.Millisecond       // from the client to the queue
	pullWay    = 500 * time.Microsecond // of a pull, or of a job that is handed back, to the queue
	deliverWay = time.Millisecond       // of a job from the queue into a worker's hand
	claimWay   = time.Millisecond       // from started to the engine: claim and call
	returnWay  = time.Millisecond       // of a token to the client
	settleWay  = 2 * time.Millisecond   // from the end of a call to the end of the reservation
)

// What the worker does, and when.
const (
	scrapeBusy    = 250 * time.Millisecond // between looks at a working engine
	scrapeIdle    = 2 * time.Second
	scrapeTimeout = 2 * time.Second
	expiryBusy    = 250 * time.Millisecond // of a pull while anything runs or is in hand
	expiryIdle    = 5 * time.Second
	elsewhere     = 500 * time.Millisecond // in hand for so long: look whether another worker has room; handed back for so long
	beatEvery     = time.Second            // between heartbeats, from which others know a worker's room
	growth        = 16                     // tokens that a job needs beside its prompt where it is to start
	leastWait     = time.Millisecond       // of a worker's timer
)

// epoch is the start of a simulation for those who know only the time of day.
var epoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

// pullFront is Millrace: one line at the queue, and at each engine a worker that pulls. All requests are streamed, interactive and for all workers, so a worker has
// one consumer at work.
type pullFront struct {
	sim     *simulation
	line    []*request // the oldest in front; what is handed back comes first
	waiting []*pull    // pulls at the queue, the lowest level in front, and of a level in their order
	workers []*puller
	limit   job.Tokens // on new tokens, which each request names
}

// pull is one at the queue.
type pull struct {
	worker *puller
	left   int // deliveries that may still come
	level  int
}

// puller is one worker.
type puller struct {
	front     *pullFront
	node      *node
	scheduler *schedule.Scheduler
	hand      map[*schedule.Ticket]*request
	running   map[*schedule.Ticket]*request
	pull      *pull           // outstanding; nil if none is
	refused   bool            // nothing could be pulled when it was asked last
	turn      bool            // a token of this step calls for a turn
	wake      time.Duration   // when the timer is set to, 0 if it is not
	beat      schedule.Status // as others know it
}

// consumer is the number of a worker's one consumer.
const consumer = 1

func newPullFront(s *simulation, order schedule.Order) (*pullFront, error) {
	f := &pullFront{sim: s}
	for _, a := range s.workload.Arrivals {
		f.limit = max(f.limit, job.Tokens(a.Output))
	}
	for _, n := range s.nodes {
		scheduler, err := schedule.New(schedule.Config{Order: order})
		if err != nil {
			return nil, fmt.Errorf("making a scheduler: %w", err)
		}
		w := &puller{front: f, node: n, scheduler: scheduler, hand: map[*schedule.Ticket]*request{}, running: map[*schedule.Ticket]*request{}}
		f.workers = append(f.workers, w)
		// Workers did not start at one moment.
		s.after(scrapeBusy*time.Duration(n.index)/time.Duration(len(s.nodes)), w.scrape)
		s.every(beatEvery, func() bool {
			w.beat = w.scheduler.Status(w.now())
			return true
		})
	}
	return f, nil
}

func (f *pullFront) arrive(r *request) {
	f.sim.after(enqueueWay, func() {
		f.line = append(f.line, r)
		f.dispatch()
	})
}

// handBack has r delivered again, after d.
func (f *pullFront) handBack(r *request, d time.Duration) {
	f.sim.after(d+pullWay, func() {
		f.line = slices.Insert(f.line, 0, r)
		f.dispatch()
	})
}

// dispatch gives what waits in line to the pulls that wait for it, as JetStream's prioritized policy does: to the head, which then goes behind those of its level.
func (f *pullFront) dispatch() {
	for len(f.line) > 0 && len(f.waiting) > 0 {
		p, r := f.waiting[0], f.line[0]
		f.waiting, f.line = slices.Delete(f.waiting, 0, 1), f.line[1:]
		if p.left--; p.left > 0 {
			f.enlist(p)
		}
		last := p.left == 0
		f.sim.after(deliverWay, func() { p.worker.deliver(r, last) })
	}
}

// enlist puts p behind the others of its level.
func (f *pullFront) enlist(p *pull) {
	i := len(f.waiting)
	for i > 0 && f.waiting[i-1].level > p.level {
		i--
	}
	f.waiting = slices.Insert(f.waiting, i, p)
}

func (f *pullFront) token(n *node, r *request, first, done bool) {
	w, now := f.workers[n.index], epoch.Add(f.sim.now)
	w.turn = w.turn || first || w.refused && w.scheduler.Brake(now) != ""
	if first {
		f.sim.first(r, returnWay)
		w.scheduler.First(now, r.ticket)
	}
	w.scheduler.Grow(now, r.ticket, 1)
	if done {
		f.sim.end(r, returnWay)
		w.end(r, schedule.Result{Completed: true, Prompt: job.Tokens(r.Prompt), Output: job.Tokens(r.Output)}, nil)
	}
}

func (f *pullFront) stepped(n *node) {
	if w := f.workers[n.index]; w.turn {
		w.turn = false
		w.act()
	}
}

func (w *puller) now() time.Time { return epoch.Add(w.front.sim.now) }

// end releases what r holds once it has been settled, and does what comes then.
func (w *puller) end(r *request, result schedule.Result, then func()) {
	w.front.sim.after(settleWay, func() {
		delete(w.running, r.ticket)
		w.scheduler.End(w.now(), r.ticket, result)
		if then != nil {
			then()
		}
		w.act()
	})
}

// scrape looks at the engine, waits for its answer as long as that takes, and looks again.
func (w *puller) scrape() {
	s := w.front.sim
	switch until := w.node.stalledUntil(); {
	case until == 0:
		w.scheduler.Observe(w.now(), reading(w.node.core.Stats()))
	case until <= s.now+scrapeTimeout:
		s.at(until, w.scrape)
		return
	default:
		s.after(scrapeTimeout, func() {
			w.scheduler.Unseen(w.now())
			w.act()
			s.after(w.pause(), w.scrape)
		})
		return
	}
	w.act()
	s.after(w.pause(), w.scrape)
}

func (w *puller) pause() time.Duration {
	if len(w.running) > 0 {
		return scrapeBusy
	}
	return scrapeIdle
}

// reading is what the engine's metrics page tells.
func reading(s emulator.Stats) schedule.Reading {
	return schedule.Reading{
		Ranks:   []schedule.Rank{{Capacity: job.Tokens(s.Blocks * emulator.BlockTokens), Used: job.Tokens(s.UsedBlocks * emulator.BlockTokens)}},
		Running: s.Running, Waiting: s.Waiting,
		Preemptions: s.Preemptions, GeneratedTokens: s.GeneratedTokens, PromptTokens: s.PromptTokens,
	}
}

// act does what the scheduler decides: starts what may start, hands back what it gives up, and pulls what may be pulled.
func (w *puller) act() {
	s, f, now := w.front.sim, w.front, w.now()
	started, next := w.scheduler.Start(now)
	for _, t := range started {
		r := w.hand[t]
		delete(w.hand, t)
		w.running[t] = r
		s.after(claimWay, func() {
			if r.ticket == t { // else it was given back meanwhile
				w.node.add(r)
			}
		})
	}
	for _, t := range w.scheduler.Return(now) {
		f.handBack(w.hand[t], 0)
		delete(w.hand, t)
	}
	for _, t := range w.scheduler.Rescue(now) {
		r := w.running[t]
		if r.node == w.node {
			w.node.cancel(r)
		}
		w.end(r, schedule.Result{}, func() { f.handBack(r, 0) })
	}
	w.setTimer(next)
	w.tryPull(now)
}

// setTimer has the worker act at next, if that is not zero.
func (w *puller) setTimer(next time.Time) {
	s := w.front.sim
	if next.IsZero() {
		return
	}
	at := max(next.Sub(epoch), s.now+leastWait)
	if at == w.wake {
		return
	}
	w.wake = at
	s.at(at, func() {
		if w.wake == at { // else it was set anew
			w.wake = 0
			w.act()
		}
	})
}

// tryPull pulls what may be pulled, unless a pull is outstanding or what the last one brought is still in hand.
func (w *puller) tryPull(now time.Time) {
	if w.pull != nil || len(w.hand) > 0 {
		return
	}
	wish := w.scheduler.Pull(now, job.Interactive.Rank())
	w.refused = wish.Batch < 1
	if w.refused {
		return
	}
	w.scheduler.Pulling(consumer, wish.Batch)
	p := &pull{worker: w, left: wish.Batch, level: wish.Level}
	w.pull = p
	expires := expiryIdle
	if wish.Busy {
		expires = expiryBusy
	}
	s := w.front.sim
	s.after(pullWay, func() {
		w.front.enlist(p)
		w.front.dispatch()
		s.after(expires, p.expire)
	})
}

// expire ends p at the queue, and a moment later at its worker.
func (p *pull) expire() {
	if p.left == 0 {
		return
	}
	w, f := p.worker, p.worker.front
	f.waiting = slices.DeleteFunc(f.waiting, func(o *pull) bool { return o == p })
	p.left = 0
	f.sim.after(deliverWay, func() {
		w.pulled()
		w.tryPull(w.now())
	})
}

func (w *puller) pulled() {
	w.pull = nil
	w.scheduler.Pulled(consumer)
}

// deliver puts r in hand. last says that it was the last that its pull asked for.
func (w *puller) deliver(r *request, last bool) {
	if last {
		w.pulled()
	}
	t := w.scheduler.Offer(w.now(), schedule.Ask{
		Tenant: "bench", Model: "bench", Group: job.NoGroup, Class: job.Interactive,
		Cost:    job.Cost{Prompt: job.Tokens(r.Prompt), Output: w.front.limit, Answers: 1},
		Created: epoch.Add(r.At), Streams: true,
	})
	t.Rescuable = true
	r.ticket = t
	w.hand[t] = r
	w.act()
	if w.hand[t] != nil {
		w.front.sim.after(elsewhere, func() { w.glance(t) })
	}
}

// glance hands back what is still in hand, if another worker has room for it.
func (w *puller) glance(t *schedule.Ticket) {
	r := w.hand[t]
	if r == nil {
		return
	}
	need := job.Tokens(r.Prompt + growth)
	if !slices.ContainsFunc(w.front.workers, func(o *puller) bool {
		return o != w && o.beat.InHand == 0 && o.beat.Brake == "" && o.beat.FreeRank >= need
	}) {
		w.front.sim.after(elsewhere, func() { w.glance(t) })
		return
	}
	delete(w.hand, t)
	w.scheduler.Withdraw(t)
	w.front.handBack(r, elsewhere)
	w.act()
}
