package emulator

import (
	"fmt"
	"slices"
	"time"
)

// The engine's limits, those of vLLM's defaults.
const (
	// TokenBudget is the most tokens that one step computes.
	TokenBudget = 2048
	// MaxRunning is the most sequences that run at once, unless SetMaxRunning says otherwise.
	MaxRunning = 256
	// A sequence is admitted only if 1/watermark of the cache stays free for the growth of those that run.
	watermark = 100
)

// ID names a sequence in a Core.
type ID uint64

// Request is one sequence to run.
type Request struct {
	// Prompt is its length in tokens, at least 1. Output is how many tokens it generates; 0 is prefill alone, as for an embedding.
	Prompt, Output int
	// Names of the prompt's full blocks, each standing for the block and all before it; they make prefixes reusable. May be nil.
	Names []uint64
	// Seed stands for the generated text: requests with the same last prompt block and seed share generated blocks too. 0 shares none.
	Seed uint64
	// Hold freezes the sequence, holding what it has, once it has generated Hold-1 tokens. 0 never.
	Hold int
	// Priority counts once SetPriorities was called: the lowest number runs first.
	Priority int
	// Ref comes back in the request's events.
	Ref any
}

// Event is what one step did for one sequence.
type Event struct {
	ID  ID
	Ref any
	// First and Done mark the first token and the end. Every event but the one of a request without output is one generated token.
	First, Done bool
}

// Step is what one step did. Its events belong to the core and are valid until the next step.
type Step struct {
	Duration time.Duration
	// Prefill is the number of prompt tokens computed, Decoding that of sequences that decoded, Cached that of the cached tokens they read.
	Prefill, Decoding, Cached int
	Preempted                 int
	Events                    []Event
}

// Stats is the state of a Core, and its counters since the start.
type Stats struct {
	// Running sequences are at most MaxRunning; Waiting ones have no blocks.
	Running, Waiting, MaxRunning int
	UsedBlocks, Blocks           int
	// PrefillPending is the number of prompt tokens that running sequences have yet to compute.
	PrefillPending int

	Finished, Cancelled, Preemptions int64
	// PromptTokens are those of prompts whose prefill has ended; GeneratedTokens include end tokens.
	PromptTokens, GeneratedTokens int64
	// PrefixQueries are prompt tokens looked for in the cache, PrefixHits those found.
	PrefixQueries, PrefixHits int64
}

// Usage is the part of the KV cache in use, 0 to 1.
func (s Stats) Usage() float64 { return float64(s.UsedBlocks) / float64(s.Blocks) }

func (s *Stats) add(o Stats) {
	s.Running, s.Waiting, s.MaxRunning = s.Running+o.Running, s.Waiting+o.Waiting, s.MaxRunning+o.MaxRunning
	s.UsedBlocks, s.Blocks, s.PrefillPending = s.UsedBlocks+o.UsedBlocks, s.Blocks+o.Blocks, s.PrefillPending+o.PrefillPending
	s.Finished, s.Cancelled, s.Preemptions = s.Finished+o.Finished, s.Cancelled+o.Cancelled, s.Preemptions+o.Preemptions
	s.PromptTokens, s.GeneratedTokens = s.PromptTokens+o.PromptTokens, s.GeneratedTokens+o.GeneratedTokens
	s.PrefixQueries, s.PrefixHits = s.PrefixQueries+o.PrefixQueries, s.PrefixHits+o.PrefixHits
}

// Core is the engine in virtual time. It is not safe for concurrent use.
type Core struct {
	profile    Profile
	pool       *pool
	maxRunning int
	priorities bool
	quiet      bool
	waiting    line
	running    []*sequence // in the order of admission
	prefilling int         // so many of running do not decode yet; stats.PrefillPending is what they have to compute
	byID       map[ID]*sequence
	last       ID
	events     []Event
	stats      Stats
}

// sequence is a request in the core. Its tokens are the prompt and what was generated; computed of them are in the cache.
type sequence struct {
	id                ID
	generated         int
	computed, planned int // planned: tokens that the step at hand computes
	blocks            []int32
	named             int // so many of blocks have been offered for reuse
	decoding          bool
	waits             bool
	prev, next        *sequence // neighbours in the waiting line, while it waits
	Request
}

func (s *sequence) total() int { return s.Prompt + s.generated }
func (s *sequence) held() bool { return s.Hold > 0 && s.generated >= s.Hold-1 }

// after tells whether s comes after o where priorities count: by priority, then by arrival.
func (s *sequence) after(o *sequence) bool {
	return s.Priority > o.Priority || s.Priority == o.Priority && s.id > o.id
}
func blocksFor(tokens int) int { return (tokens + BlockTokens - 1) / BlockTokens }
func (s *sequence) nameOf(b int) uint64 {
	if b < len(s.Names) {
		return s.Names[b]
	}
	if s.Seed == 0 {
		return 0
	}
	base := s.Seed
	if n := len(s.Names); n > 0 {
		base ^= s.Names[n-1]
	}
	return mix(base + mix(uint64(b)))
}

// NewCore returns an idle engine of that profile.
func NewCore(p Profile) *Core {
	return &Core{profile: p, pool: newPool(p.Blocks()), maxRunning: MaxRunning, byID: make(map[ID]*sequence)}
}

// SetPriorities has requests start in the order of their priority, then of their arrival, and has the last in that order give way when the cache is full, as vLLM does
// with --scheduling-policy priority. Call it before the first Add.
func (c *Core) SetPriorities() { c.priorities = true }

// SetQuiet leaves out the events that are neither a first token nor an end, for callers that do not follow each token.
func (c *Core) SetQuiet() { c.quiet = true }

// SetMaxRunning changes the limit on running sequences; what runs goes on. 0 is the default.
func (c *Core) SetMaxRunning(n int) {
	if n <= 0 {
		n = MaxRunning
	}
	c.maxRunning = n
}

// Add puts r into the waiting line: at its end, unless priorities count. It refuses what can never run.
func (c *Core) Add(r Request) (ID, error) {
	if r.Prompt < 1 || r.Output < 0 {
		return 0, fmt.Errorf("a request of %d prompt and %d output tokens", r.Prompt, r.Output)
	}
	if capacity := c.pool.size() * BlockTokens; r.Prompt+r.Output > capacity {
		return 0, fmt.Errorf("a request of %d tokens in a cache of %d", r.Prompt+r.Output, capacity)
	}
	c.last++
	s := &sequence{Request: r, id: c.last}
	at := c.waiting.last
	for c.priorities && at != nil && at.after(s) {
		at = at.prev
	}
	c.waiting.insert(s, at)
	c.byID[s.id] = s
	return s.id, nil
}

// Cancel removes a sequence and frees what it holds. It reports whether the sequence was there.
func (c *Core) Cancel(id ID) bool {
	s := c.byID[id]
	if s == nil {
		return false
	}
	if s.waits {
		c.waiting.remove(s)
	} else {
		c.dropRunning(slices.Index(c.running, s))
	}
	c.forget(s)
	c.stats.Cancelled++
	return true
}

// Preempt takes the cache from a sequence as if another had needed it, unless it runs alone.
func (c *Core) Preempt() bool {
	if len(c.running) < 2 {
		return false
	}
	c.preempt(c.victim())
	return true
}

// Stats returns the state now.
func (c *Core) Stats() Stats {
	s := c.stats
	s.Running, s.Waiting = len(c.running), c.waiting.n
	s.UsedBlocks, s.Blocks = c.pool.used(), c.pool.size()
	s.MaxRunning = c.maxRunning
	return s
}

// Step runs one step: every decoding sequence gets one token, then prefill chunks, first those begun, fill the token budget. It returns false,
// and no step, if there is nothing to compute.
func (c *Core) Step() (Step, bool) {
	var st Step
	budget := TokenBudget
	for i := 0; i < len(c.running); i++ {
		s := c.running[i]
		if !s.decoding || s.held() || budget == 0 {
			continue
		}
		if s.computed == len(s.blocks)*BlockTokens {
			for s.decoding && c.pool.free == 0 {
				at := c.victim()
				if v := c.running[at]; v.planned > 0 { // only where priorities count
					budget += v.planned
					st.Decoding--
					st.Cached -= v.computed
				}
				c.preempt(at)
				st.Preempted++
				if at <= i {
					i--
				}
			}
			if !s.decoding {
				continue // it had to give way itself
			}
			s.blocks = append(s.blocks, c.pool.take())
		}
		st.Decoding++
		st.Cached += s.computed
		budget -= c.plan(s, 1)
	}
	if c.prefilling > 0 {
		for _, s := range c.running {
			if !s.decoding && !s.held() && budget > 0 {
				budget -= c.planPrefill(s, budget, &st)
			}
		}
	}
	// After a preemption nothing is admitted: it would take the blocks that were just found missing.
	for st.Preempted == 0 && budget > 0 && len(c.running) < c.maxRunning && c.waiting.n > 0 {
		s := c.waiting.first
		if !c.admit(s) {
			break
		}
		if !s.held() {
			budget -= c.planPrefill(s, budget, &st)
		}
	}
	if st.Prefill+st.Decoding == 0 {
		return Step{}, false
	}
	st.Duration = c.profile.StepTime(st.Prefill, st.Decoding, st.Cached)
	c.finish()
	st.Events = c.events
	return st, true
}

func (c *Core) planPrefill(s *sequence, budget int, st *Step) int {
	n := c.plan(s, min(budget, s.total()-s.computed))
	st.Prefill += n
	return n
}

// plan has this step compute n tokens of s. Blocks that become full are offered for reuse at once: who shares them in the same step reads what
// this step writes, layer by layer.
func (c *Core) plan(s *sequence, n int) int {
	s.planned = n
	for ; s.named < (s.computed+n)/BlockTokens; s.named++ {
		if name := s.nameOf(s.named); name != 0 {
			c.pool.name(s.blocks[s.named], name)
		}
	}
	return n
}

// admit moves s from the head of the waiting line to the running ones, if all its tokens find room beside the watermark. At least its last
// token is computed anew: the next one comes from it.
func (c *Core) admit(s *sequence) bool {
	hits, idle := s.blocks[:0], 0
	for b := range (s.total() - 1) / BlockTokens {
		name := s.nameOf(b)
		id, ok := c.pool.byName[name]
		if name == 0 || !ok {
			break
		}
		if c.pool.blocks[id].holders == 0 {
			idle++
		}
		hits = append(hits, id)
	}
	s.blocks = hits[:0]
	need := blocksFor(s.total()) - len(hits)
	reserve := c.pool.size() / watermark
	if len(c.running) == 0 {
		reserve = 0 // nobody else could grow, and what fits the cache must run one day
	}
	if c.pool.free-idle < need+reserve {
		return false
	}
	for _, id := range hits {
		c.pool.hold(id)
	}
	for range need {
		hits = append(hits, c.pool.take())
	}
	c.stats.PrefixQueries += int64(s.total())
	s.computed = (len(hits) - need) * BlockTokens
	c.stats.PrefixHits += int64(s.computed)
	s.blocks, s.named = hits, len(hits)-need
	c.waiting.remove(s)
	c.running = append(c.running, s)
	c.prefilling++
	c.stats.PrefillPending += s.total() - s.computed
	return true
}

// victim is the place in running of what gives way: the sequence admitted last, or the last one by priority.
func (c *Core) victim() int {
	at := len(c.running) - 1
	if c.priorities {
		for i, s := range c.running {
			if s.after(c.running[at]) {
				at = i
			}
		}
	}
	return at
}

// preempt puts the sequence at that place in running back into the waiting line, before all that came later. It keeps what it generated and computes it all anew.
func (c *Core) preempt(at int) {
	s := c.running[at]
	c.dropRunning(at)
	for ; s.named > s.computed/BlockTokens; s.named-- { // what this step was to compute is not there to be reused
		c.pool.unname(s.blocks[s.named-1])
	}
	c.pool.release(s.blocks)
	s.blocks, s.named, s.computed, s.planned, s.decoding = s.blocks[:0], 0, 0, 0, false
	var before *sequence
	if c.priorities {
		for o := c.waiting.first; o != nil && s.after(o); o = o.next {
			before = o
		}
	}
	c.waiting.insert(s, before)
	c.stats.Preemptions++
}

// finish applies what was planned: counts, events, and the end of what has all its tokens.
func (c *Core) finish() {
	clear(c.events)
	c.events = c.events[:0]
	kept := c.running[:0]
	for _, s := range c.running {
		if !c.advance(s) {
			kept = append(kept, s)
		}
	}
	clear(c.running[len(kept):])
	c.running = kept
}

// advance applies the step to s and reports whether s has ended.
func (c *Core) advance(s *sequence) bool {
	if s.planned == 0 {
		return false
	}
	s.computed += s.planned
	if !s.decoding {
		c.stats.PrefillPending -= s.planned
		s.planned = 0
		if s.computed < s.total() {
			return false
		}
		s.decoding = true
		c.prefilling--
		if s.generated == 0 {
			c.stats.PromptTokens += int64(s.Prompt)
		}
	}
	s.planned = 0
	first := s.generated == 0
	if s.Output > 0 {
		s.generated++
		c.stats.GeneratedTokens++
	}
	done := s.generated == s.Output
	if first || done || !c.quiet {
		c.events = append(c.events, Event{ID: s.id, Ref: s.Ref, First: first, Done: done})
	}
	if done {
		c.forget(s)
		c.stats.Finished++
	}
	return done
}

// dropRunning takes the sequence at that place out of running.
func (c *Core) dropRunning(at int) {
	if s := c.running[at]; !s.decoding {
		c.prefilling--
		c.stats.PrefillPending -= s.total() - s.computed
	}
	c.running = slices.Delete(c.running, at, at+1)
}

func (c *Core) forget(s *sequence) {
	c.pool.release(s.blocks)
	s.blocks = nil
	delete(c.byID, s.id)
}

// line is the waiting line.
type line struct {
	first, last *sequence
	n           int
}

// insert puts s behind after; nil is the front.
func (l *line) insert(s, after *sequence) {
	s.waits, s.prev = true, after
	if after != nil {
		s.next, after.next = after.next, s
	} else {
		s.next, l.first = l.first, s
	}
	if s.next != nil {
		s.next.prev = s
	} else {
		l.last = s
	}
	l.n++
}

func (l *line) remove(s *sequence) {
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		l.first = s.next
	}
	if s.next != nil {
		s.next.prev = s.prev
	} else {
		l.last = s.prev
	}
	s.waits, s.prev, s.next = false, nil, nil
	l.n--
}
