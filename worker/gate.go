package worker

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

// growth is how many tokens ahead a running sequence is counted: what is reserved to start a job is small (its prompt and this), because reserving expected
// lengths leaves the cache empty.
const growth = 16

// fill is the share of the KV cache that may be counted as used after a start.
const fill = 0.97

// maxPull bounds what one pull asks for.
const maxPull = 32

// Why a job in hand does not start here.
var (
	errClosed = errors.New("the worker starts no more work")
	errShut   = errors.New("the engine is not ready")
)

// gate decides what starts and when: it keeps the ledger of the engine's KV cache and the jobs in hand in the order in which they may start.
// After any mix of success, failure, cancel and panic the ledger is back at zero when nothing runs.
type gate struct {
	mu       sync.Mutex
	capacity job.Tokens // of the engine's KV cache
	reported job.Tokens // in use at the last look at the engine
	granted  job.Tokens // granted since then, not yet visible in reported
	limit    int        // sequences that the engine runs at once; 0 is no limit
	open     bool       // work may start
	closed   bool       // work will never start again
	running  map[*reservation]struct{}
	held     job.Tokens // what running holds: prompts and tokens so far
	seqs     int        // sequences of running
	hand     []*ticket  // in the order of starting
	typical  float64    // running mean of prompts, in tokens
	changed  chan struct{}
}

// ticket is a job in hand.
type ticket struct {
	class  int // rank
	prompt job.Tokens
	seqs   int
	start  chan *reservation // gets one value, nil if the job is sent away
	why    error             // set before nil is sent
}

// reservation is what a running job holds of the KV cache.
type reservation struct {
	gate   *gate
	prompt job.Tokens
	tokens job.Tokens
	seqs   int
}

func newGate() *gate {
	return &gate{running: map[*reservation]struct{}{}, changed: make(chan struct{}), typical: 256}
}

// enter waits in class order until the job may start. It may be sent away: when ctx ends (its cause), while the engine is not ready (errShut), and for good (errClosed).
// A cost is the job's as admitted.
func (g *gate) enter(ctx context.Context, class job.Class, cost job.Cost) (*reservation, error) {
	t := &ticket{class: class.Rank(), prompt: cost.Prompt, seqs: max(1, cost.Answers), start: make(chan *reservation, 1)}
	g.mu.Lock()
	switch {
	case g.closed:
		g.mu.Unlock()
		return nil, errClosed
	case !g.open:
		g.mu.Unlock()
		return nil, errShut
	}
	at, _ := slices.BinarySearchFunc(g.hand, t, func(a, b *ticket) int {
		if a.class <= b.class { // behind all of its own class
			return -1
		}
		return 1
	})
	g.hand = slices.Insert(g.hand, at, t)
	g.typical += (float64(cost.Prompt) - g.typical) / 32
	g.startLocked()
	g.mu.Unlock()
	select {
	case r := <-t.start:
		if r == nil {
			return nil, t.why
		}
		return r, nil
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if i := slices.Index(g.hand, t); i >= 0 {
		g.hand = slices.Delete(g.hand, i, i+1)
		g.startLocked() // it may have stood before others
	} else if r := <-t.start; r != nil { // it started in that moment
		g.releaseLocked(r)
	}
	return nil, context.Cause(ctx)
}

// startLocked starts from the head of the hand what fits, and tells those who watch that something changed.
func (g *gate) startLocked() {
	for g.open && len(g.hand) > 0 && g.fitsLocked(g.hand[0].prompt, g.hand[0].seqs) {
		t := g.hand[0]
		g.hand = slices.Delete(g.hand, 0, 1)
		r := &reservation{gate: g, prompt: t.prompt, seqs: t.seqs}
		g.running[r] = struct{}{}
		g.held += r.prompt
		g.seqs += r.seqs
		g.granted += r.prompt
		t.start <- r
	}
	close(g.changed)
	g.changed = make(chan struct{})
}

// fitsLocked: a job may start when what is used, its prompt, and a little growth of each sequence stay within the cache. An idle engine gets anything: it knows better than an estimate.
func (g *gate) fitsLocked(prompt job.Tokens, seqs int) bool {
	if len(g.running) == 0 {
		return true
	}
	if g.limit > 0 && g.seqs+seqs > g.limit {
		return false
	}
	return prompt+job.Tokens(growth*seqs) <= g.freeLocked()
}

// usedLocked is the larger of what the engine says and what the ledger says, with the growth of what runs.
func (g *gate) usedLocked() job.Tokens {
	return max(g.held, g.reported+g.granted) + job.Tokens(growth*g.seqs)
}

// grow counts n more tokens of a running job.
func (r *reservation) grow(n job.Tokens) {
	g := r.gate
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.running[r]; ok {
		r.tokens += n
		g.held += n
	}
}

// release gives back what the job held. Only the first call does anything.
func (r *reservation) release() {
	r.gate.mu.Lock()
	defer r.gate.mu.Unlock()
	r.gate.releaseLocked(r)
}

func (g *gate) releaseLocked(r *reservation) {
	if _, ok := g.running[r]; !ok {
		return
	}
	delete(g.running, r)
	g.held -= r.prompt + r.tokens
	g.seqs -= r.seqs
	// The engine's last report may still count it, and the next will not: until then the ledger alone is believed for this much.
	g.granted -= r.prompt
	g.reported = max(0, g.reported-r.tokens)
	if g.granted < 0 {
		g.reported, g.granted = max(0, g.reported+g.granted), 0
	}
	g.startLocked()
}

// observe takes what the engine says about itself.
func (g *gate) observe(l engine.Load) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.capacity, g.limit = l.Capacity(), l.MaxRunning
	g.reported, g.granted = l.Used(), 0
	g.startLocked()
}

// setOpen opens the gate, or sends away what is in hand and what comes: others may have room.
func (g *gate) setOpen(open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = open && !g.closed
	if !open {
		g.sendAwayLocked(errShut)
	}
	g.startLocked()
}

// close sends away what is in hand and what comes, for good.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open, g.closed = false, true
	g.sendAwayLocked(errClosed)
	g.startLocked()
}

func (g *gate) sendAwayLocked(why error) {
	for _, t := range g.hand {
		t.why = why
		t.start <- nil
	}
	g.hand = nil
}

// status is the gate at one moment.
type status struct {
	capacity, free  job.Tokens
	running, inHand int
	level           int
}

func (g *gate) status() status {
	g.mu.Lock()
	defer g.mu.Unlock()
	return status{capacity: g.capacity, free: max(0, g.freeLocked()), running: len(g.running), inHand: len(g.hand), level: g.levelLocked()}
}

// levelLocked is the priority of a pull, 0..9, the least loaded first: the tenths of the KV cache (or of the sequences, where fewer of those are free) in use.
func (g *gate) levelLocked() int {
	var used float64
	if g.capacity > 0 {
		used = float64(g.usedLocked()) / float64(g.capacity)
	}
	if g.limit > 0 {
		used = max(used, float64(g.seqs)/float64(g.limit))
	}
	return min(9, max(0, int(10*used)))
}

// wish is what a pull may ask for.
type wish struct {
	batch, level int
	busy         bool // something runs or is in hand
}

// want tells what may be pulled now for a class (rank), or that nothing may be and a channel that is closed when that may have changed. Of a class nothing is pulled while
// a job of it or of a higher one is in hand: it could not start before that one.
func (g *gate) want(class int) (wish, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.open || (len(g.hand) > 0 && g.hand[0].class <= class) {
		return wish{}, g.changed
	}
	typical := job.Tokens(max(1, math.Round(g.typical))) + growth
	room := int(g.freeLocked() / typical)
	// As many typical jobs as raise the level by at most one step.
	step := int(g.capacity / 10 / typical)
	if g.limit > 0 {
		room = min(room, g.limit-g.seqs)
		step = min(step, g.limit/10)
	}
	for _, t := range g.hand {
		room -= 1 + int(t.prompt/typical)
	}
	busy := len(g.running)+len(g.hand) > 0
	if !busy {
		room = max(room, 1) // an idle engine gets anything
	}
	if room < 1 {
		return wish{}, g.changed
	}
	return wish{batch: min(room, max(step, 1), maxPull), level: g.levelLocked(), busy: busy}, g.changed
}

// idle reports whether nothing runs.
func (g *gate) idle() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.running) == 0
}

// full reports whether the engine runs as many sequences as it can.
func (g *gate) full() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.limit > 0 && g.seqs >= g.limit
}

// freeLocked is what may still be granted.
func (g *gate) freeLocked() job.Tokens { return job.Tokens(fill*float64(g.capacity)) - g.usedLocked() }
