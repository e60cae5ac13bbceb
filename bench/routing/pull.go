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
	pullWay    = 500 * time.Microsecond // of a pull to the queue
	deliverWay = time.Millisecond       // of a job from the queue into a worker's hand
	claimWay   = time.Millisecond       // from started to the engine: claim and call
	returnWay  = time.Millisecond       // of a token to the client
	settleWay  = 2 * time.Millisecond   // from the last token to the end of the reservation
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

// pullFront is Millrace: one line at the queue, and at each engine a worker that pulls. All requests are streamed, interactive and for all workers.
type pullFront struct {
	sim     *simulation
	line    fifo
	waiting []*pull // pulls at the queue, the lowest level in front, and of a level in their order
	workers []*puller
	limit   job.Tokens // on new tokens, which each request names
}

// pull is one at the queue.
type pull struct {
	worker *puller
	left   int // deliveries that may still come
	level  int
}

// handed is what a worker knows of a request.
type handed struct {
	request *request
	ticket  *schedule.Ticket
}

// puller is one worker.
type puller struct {
	front     *pullFront
	node      *node
	scheduler *schedule.Scheduler
	hand      []*handed
	pull      *pull // outstanding; nil if none is
	wake      time.Duration
	beat      schedule.Status // as others know it
}

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
		w := &puller{front: f, node: n, scheduler: scheduler}
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
		f.line.push(r)
		f.dispatch()
	})
}

// dispatch gives what waits in line to the pulls that wait for it, as JetStream's prioritized policy does: to the head, which then goes behind those of its level.
func (f *pullFront) dispatch() {
	for !f.line.empty() && len(f.waiting) > 0 {
		p := f.waiting[0]
		f.waiting = slices.Delete(f.waiting, 0, 1)
		if p.left--; p.left > 0 {
			f.enlist(p)
		}
		r, last := f.line.pop(), p.left == 0
		f.sim.after(deliverWay, func() { p.worker.deliver(r, p, last) })
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
	w := f.workers[n.index]
	if first {
		f.sim.first(r, returnWay)
		w.scheduler.First(w.now(), r.hand.ticket)
	}
	w.scheduler.Grow(w.now(), r.hand.ticket, 1)
	if done {
		f.sim.end(r, returnWay)
		f.sim.after(settleWay, func() {
			w.scheduler.End(w.now(), r.hand.ticket, schedule.Result{Completed: true, Prompt: job.Tokens(r.Prompt), Output: job.Tokens(r.Output)})
			w.act()
		})
	}
}

func (f *pullFront) stepped(n *node) { f.workers[n.index].act() }

func (w *puller) now() time.Time { return epoch.Add(w.front.sim.now) }

// scrape looks at the engine, waits for its answer as long as that takes, and looks again.
func (w *puller) scrape() {
	s := w.front.sim
	until := w.node.stalledUntil()
	switch {
	case until == 0:
		w.scheduler.Observe(w.now(), reading(w.node.core.Stats()))
	case until > s.now+scrapeTimeout:
		s.after(scrapeTimeout, func() {
			w.scheduler.Unseen(w.now())
			w.act()
			s.after(w.pause(), w.scrape)
		})
		return
	default:
		s.at(until, w.scrape)
		return
	}
	w.act()
	s.after(w.pause(), w.scrape)
}

func (w *puller) pause() time.Duration {
	if w.scheduler.Status(w.now()).Running > 0 {
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

// act starts what may start, and pulls what may be pulled.
func (w *puller) act() {
	s := w.front.sim
	now := w.now()
	started, next := w.scheduler.Start(now)
	for _, t := range started {
		i := slices.IndexFunc(w.hand, func(h *handed) bool { return h.ticket == t })
		r := w.hand[i].request
		w.hand = slices.Delete(w.hand, i, i+1)
		s.after(claimWay, func() { w.node.add(r) })
	}
	if !next.IsZero() {
		if at := max(next.Sub(epoch), s.now+leastWait); at != w.wake {
			w.wake = at
			s.at(at, func() {
				if w.wake == at { // else another time was set since
					w.wake = 0
					w.act()
				}
			})
		}
	}
	if w.pull != nil || len(w.hand) > 0 {
		return
	}
	wish := w.scheduler.Pull(now, job.Interactive.Rank())
	if wish.Batch < 1 {
		return
	}
	p := &pull{worker: w, left: wish.Batch, level: wish.Level}
	w.pull = p
	expires := expiryIdle
	if wish.Busy {
		expires = expiryBusy
	}
	s.after(pullWay, func() {
		w.front.enlist(p)
		w.front.dispatch()
		s.after(expires, p.expire)
	})
}

// expire ends p at the queue, and a moment later at its worker.
func (p *pull) expire() {
	f := p.worker.front
	if p.left == 0 {
		return
	}
	f.waiting = slices.DeleteFunc(f.waiting, func(o *pull) bool { return o == p })
	p.left = 0
	f.sim.after(deliverWay, func() {
		p.worker.pull = nil
		p.worker.act()
	})
}

// deliver puts r in hand. last says that it was the last that its pull asked for.
func (w *puller) deliver(r *request, p *pull, last bool) {
	if last {
		w.pull = nil
	}
	h := &handed{request: r}
	h.ticket = w.scheduler.Offer(w.now(), schedule.Ask{
		Tenant: "bench", Model: "bench", Group: job.NoGroup, Class: job.Interactive,
		Cost:    job.Cost{Prompt: job.Tokens(r.Prompt), Output: w.front.limit, Answers: 1},
		Created: epoch.Add(r.At), Streams: true,
	})
	r.hand = h
	w.hand = append(w.hand, h)
	w.act()
	if slices.Contains(w.hand, h) {
		w.front.sim.after(elsewhere, func() { w.glance(h) })
	}
}

// glance hands back what is still in hand, if another worker has room for it.
func (w *puller) glance(h *handed) {
	s := w.front.sim
	if !slices.Contains(w.hand, h) {
		return
	}
	need := job.Tokens(h.request.Prompt + growth)
	if !slices.ContainsFunc(w.front.workers, func(o *puller) bool { return o != w && o.beat.InHand == 0 && o.beat.FreeRank >= need }) {
		s.after(elsewhere, func() { w.glance(h) })
		return
	}
	w.hand = slices.DeleteFunc(w.hand, func(o *handed) bool { return o == h })
	w.scheduler.Withdraw(h.ticket)
	s.after(elsewhere, func() {
		w.front.line.putBack(h.request)
		w.front.dispatch()
	})
	w.act()
}
