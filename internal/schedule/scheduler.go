package schedule

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const (
	// block is the engines' unit of KV cache in tokens: costs are rounded up to it.
	block = 16
	// margin is how many tokens ahead each running sequence is counted: what is reserved to start a job is small, because reserving expected lengths leaves the cache empty.
	margin = 16
	// peakQuantile of the answers' lengths is what the check of the future peak expects: the sum of many comes near it, and a higher one leaves the cache empty.
	peakQuantile = 0.5
	// maxBatch bounds what one pull asks for.
	maxBatch = 32
	// topTTFT is the expected TTFT in seconds up to which the level is 0; each level doubles it.
	topTTFT = 0.025
	// loadWeight is by how many times the expected TTFT counts more for the level at a full cache: what starts there slows all that runs, and brings the next one closer to waiting.
	loadWeight = 8
	// longestStep is the most prompt tokens that an engine computes in one step, as far as silence goes.
	longestStep = 8192
	// computedPart is the most of the pending prompts that is taken as computed before a first token proves it: what starts then is in the engine's line when its step ends.
	computedPart = 0.6
	// briefly is for how many seconds prompts may be computed in any case that start together. It is no multiple of a first token's time: what is learned of that has the wait for long
	// prompts in it, and a budget that grows with it costs a tenth of the TTFT's P99.
	briefly = topTTFT
	// rescueAfter is how long after an engine has halted what has no token there yet is given back.
	rescueAfter = 100 * time.Millisecond
	// overdue is how old a reading is when the engine must have failed to answer, blindHalt the silence of an engine without counters that proves a halt.
	overdue   = 400 * time.Millisecond
	blindHalt = time.Second
	// fresh is for how long a job that has started may be missing in what the engine says.
	fresh = 500 * time.Millisecond
	// preemptAfter is how long an interactive job is in hand before batch work is given back for it: room that comes by itself is cheaper.
	preemptAfter = 50 * time.Millisecond
	// quietLeast is the least silence of an engine that has work which counts as a halt, quietSteps that in expected steps.
	quietLeast = 120 * time.Millisecond
	quietSteps = 2.5
	// mostTrickle bounds the batch class's share, so that the others get something, and firstPatient is what one of its jobs is taken to need, in tokens, before any was seen.
	mostTrickle  = 0.99
	firstPatient = 512
	// leastReading is the least time in seconds between two readings whose difference says something of a rate.
	leastReading = 0.1
	// countSlack is by how small a part the engine's count of a prompt may be less than ours.
	countSlack = 0.25
	// countedLook is how often it is looked whether what an engine has computed since its last reading makes room.
	countedLook = 10 * time.Millisecond
	// An engine's places are as many as before where they differ by samePlaces at most, and known after placesTaken readings; that they are fewer than they were, after placesLost: requests wait for a moment in an engine with free places, too, while it
	// computes others' prompts. After placesHold it is tried whether there are more, and half as often after each try in vain, down to once in mostHold. One of sparePart places is not for batch work.
	samePlaces  = 1
	placesTaken = 2
	placesLost  = 20
	placesHold  = 5 * time.Second
	mostHold    = 5 * time.Minute
	sparePart   = 32
	// linedPart: so small a part of what an engine runs may wait in it besides.
	linedPart = 8
	// blindStarts is how many sequences run at most while the engine's metrics cannot be read, unless more do already.
	blindStarts = 8
	// window is the time without trouble after which a limit that was cut grows again.
	window = time.Second
	// Each reading with new preemptions cuts the part of the cache that is filled by keep; each without gives regain back; leastFill is the least.
	keep, regain, leastFill = 0.9, 0.01, 0.5
)

// Why nothing is pulled though there is room.
const (
	BrakeQuiet      = "the engine gives no tokens"
	BrakeWaiting    = "requests wait inside the engine"
	BrakePreempting = "the engine preempts sequences"
)

// Scheduler is one engine's ledger and line of jobs in hand. Not safe for concurrent use.
type Scheduler struct {
	cfg     Config
	lengths *lengths
	pace    pace
	prompts map[job.Model]float64 // prompt tokens as the engine counts them, for each as estimated

	// What the engine said last.
	ranks     []Rank
	estimated bool
	read      bool      // there is a reading
	blind     bool      // metrics cannot be read
	readAt    time.Time // of the last reading
	last      Reading
	most      int     // sequences that the engine runs at once; 0 is no limit
	share     float64 // of what the ledger counts that the engine holds: prefixes may be shared
	foreign   float64 // tokens that the engine holds and the ledger does not know
	waited    int     // readings in a row with requests waiting that nothing explains
	places    int     // sequences that the engine runs at once, as seen by others' waiting inside it; 0 is unknown
	found     int     // places as they were seen; places is more while it is tried whether there are
	hold      time.Duration
	placedAt  time.Time
	taken     int     // readings in a row at which all places seemed taken
	since     int     // sequences started since the last reading, less those ended
	prefill   float64 // prompt tokens a second that the engine computes, over about the last second; by its counter
	surplus   float64 // prompt tokens that it has counted and that are not yet those of a job
	preempted bool    // preemptions rose at the last reading
	fill      float64 // part of what may be used that is, 1 without preemptions

	// What runs, in the order of starting.
	running    []*Ticket
	seqs       int
	held       job.Tokens // by running, prompts and tokens
	young      job.Tokens // of held, what started so lately that a reading may not show it
	pending    job.Tokens // prompt tokens that are started and not yet computed
	alive      time.Time  // the last sign of progress
	doneAt     time.Time  // when the prefill of what started last is expected to end
	computedAt time.Time  // when a prefill ended last

	// Additive increase, multiplicative decrease.
	limit   int // 0 is none
	ceiling int // running sequences when the limit was cut first
	cutAt   time.Time
	grownAt time.Time

	hand    []*Ticket
	arrived uint64
	credit  float64 // tokens that the batch class has coming while higher ones wait; below zero it has had more
	patient float64 // running mean of what a batch job took in tokens; what is expected of one until learned
	learned bool
	typical float64 // running mean of prompts in tokens
	supply  supply
	pulls   map[int]int
}

// Ticket is a job in hand or running.
type Ticket struct {
	Ask Ask
	// Preemptible jobs of the batch class may be given back for interactive ones, Rescuable ones when the engine halts before their first token. Lane jobs wait for this worker alone.
	Preemptible, Rescuable, Lane bool

	state   ticketState
	number  uint64
	offered time.Time
	started time.Time
	last    time.Time // of its last token
	due     time.Time // when an unseen prefill is expected to have ended
	rank    int
	prompt  job.Tokens // all answers together
	seqs    int
	grown   job.Tokens
	expects job.Tokens // for one answer, at most
	ahead   float64    // prompt tokens that stood before its first token at the start, its own included
	young   bool
	pending bool
	named   bool    // for preemption
	work    float64 // tokens that it was counted with when it started
	owed    bool    // started as what the batch class has coming: higher classes do not take it back
}

type ticketState int

const (
	inHand ticketState = iota
	running
	over
)

// New validates cfg; the error names the field, its value and the bound.
func New(cfg Config) (*Scheduler, error) {
	def := Defaults()
	if cfg.Order == "" {
		cfg.Order = def.Order
	}
	if cfg.Order != Oldest && cfg.Order != Shortest {
		return nil, fmt.Errorf("schedule: Order is %q: want %s or %s", cfg.Order, Oldest, Shortest)
	}
	if cfg.Reserve == 0 {
		cfg.Reserve = def.Reserve
	}
	if !(cfg.Reserve > 0 && cfg.Reserve < 1) {
		return nil, fmt.Errorf("schedule: Reserve is %v: want more than 0 and less than 1", cfg.Reserve)
	}
	if cfg.TokenBudget == 0 {
		cfg.TokenBudget = def.TokenBudget
	}
	if cfg.TokenBudget < 1 {
		return nil, fmt.Errorf("schedule: TokenBudget is %d: want 1 or more", cfg.TokenBudget)
	}
	if cfg.Trickle == 0 {
		cfg.Trickle = def.Trickle
	}
	if !(cfg.Trickle <= 1) {
		return nil, fmt.Errorf("schedule: Trickle is %v: want 1 or less; a negative one is none", cfg.Trickle)
	}
	if cfg.DefaultOutput == 0 {
		cfg.DefaultOutput = def.DefaultOutput
	}
	if cfg.DefaultOutput < 1 {
		return nil, fmt.Errorf("schedule: DefaultOutput is %d: want 1 or more", cfg.DefaultOutput)
	}
	return &Scheduler{
		cfg: cfg, lengths: newLengths(cfg.DefaultOutput), pace: newPace(), prompts: map[job.Model]float64{}, share: 1, fill: 1, typical: 256, patient: firstPatient, pulls: map[int]int{},
	}, nil
}

// --- what the engine says ---

// Observe takes what the engine says about itself. Readings come every 250 ms while anything runs, else every few seconds.
func (s *Scheduler) Observe(now time.Time, r Reading) {
	s.settle(now)
	if s.estimated != r.Estimated || len(s.ranks) != len(r.Ranks) {
		s.share, s.foreign = 1, 0
	}
	s.ranks, s.estimated, s.most = append(s.ranks[:0], r.Ranks...), r.Estimated, r.MaxRunning
	progress := s.read && !s.blind && (r.GeneratedTokens > s.last.GeneratedTokens || r.PromptTokens > s.last.PromptTokens)
	if progress {
		s.alive = now
		if d := r.GeneratedTokens - s.last.GeneratedTokens; d > 0 && s.last.GeneratedTokens >= 0 && r.Running > 0 && s.last.Running > 0 && len(s.running) > 0 {
			s.pace.tick(now.Sub(s.readAt).Seconds() * float64(r.Running+s.last.Running) / 2 / float64(d))
		}
	}
	s.countPrompts(now, r)
	s.countPlaces(now, r)
	s.reconcile(r)
	s.brake(now, r)
	s.last, s.read, s.blind, s.readAt, s.since = r, true, false, now, 0
}

// countPrompts follows the engine's counter of prompt tokens: it tells of prompts that nobody sees computed, those of jobs without a stream, which of them are. The oldest are computed first. What has run for longer than
// that takes in an engine in which nothing waits is computed too, whatever the counter says, as it may leave out what was cached.
func (s *Scheduler) countPrompts(now time.Time, r Reading) {
	dt := now.Sub(s.readAt).Seconds()
	if r.PromptTokens < 0 || !s.read || s.blind || s.last.PromptTokens < 0 {
		s.prefill, s.surplus = 0, 0
		return
	}
	d := float64(max(0, r.PromptTokens-s.last.PromptTokens))
	if dt >= leastReading { // of two readings right after each other the first one was late
		if d > 0 {
			s.pace.prefilled(d, dt)
		}
		if len(s.running) > 0 {
			s.prefill = max(d/dt, s.prefill+(d/dt-s.prefill)*(1-math.Exp(-dt)))
		}
	}
	s.surplus = max(0, s.surplus+d)
	_, each := s.pace.line()
	for _, t := range s.running {
		if t.Ask.Streams || !t.pending {
			continue
		}
		if p := float64(t.prompt); s.surplus >= p*(1-countSlack) {
			s.surplus = max(0, s.surplus-p)
		} else if r.Waiting > 0 || now.Sub(t.started) < seconds(leastReading+2*each*p) {
			break
		}
		s.computed(now, t)
	}
	if s.pending == 0 {
		s.surplus = 0
	}
}

// counted tells whether the engine's own counter says which prompts are computed.
func (s *Scheduler) counted() bool { return s.read && !s.blind && s.last.PromptTokens >= 0 }

// countPlaces learns how many sequences an engine runs at once that does not tell: requests wait inside it for a second, and what runs stays the same.
func (s *Scheduler) countPlaces(now time.Time, r Reading) {
	same := r.Running-s.last.Running <= samePlaces && s.last.Running-r.Running <= samePlaces
	if s.taken++; r.Waiting <= 0 || s.last.Waiting <= 0 || !same || r.Running < 4*linedPart {
		s.taken = 0
	}
	enough := placesTaken
	if r.Running < s.found-samePlaces {
		enough = placesLost
	}
	switch {
	case s.taken >= enough:
		switch {
		case s.found == 0 || r.Running > s.found+samePlaces:
			s.hold = placesHold
		case s.places > s.found: // it was tried in vain
			s.hold = min(2*s.hold, mostHold)
		}
		s.places, s.found, s.placedAt = r.Running, r.Running, now
	case s.places > 0 && now.Sub(s.placedAt) >= s.hold: // there may be more by now
		s.places += max(1, s.places/16)
		s.placedAt = now
	}
}

// spare is how many sequences of the batch class more may run beside all that does: some of the engine's places are left to those who wait for a first token.
func (s *Scheduler) spare() int {
	if s.places == 0 || s.due() {
		return math.MaxInt32
	}
	return s.batchPlaces() - s.seqs
}

// batchPlaces is how many of the engine's places the batch class may fill.
func (s *Scheduler) batchPlaces() int { return s.places - max(1, s.places/sparePart) }

// lined is how many requests may wait inside an engine that runs so many: enough that none of its places stays empty until the next reading.
func lined(running int) int { return running / linedPart }

// lineRoom is how many sequences more may be sent to an engine in which requests wait: it has no places left, whatever room its cache has, and prompts that nobody sees computed may stand in that line too.
func (s *Scheduler) lineRoom() int {
	if s.blind || s.last.Waiting <= 0 || s.last.Running < 4*linedPart { // where few run, the brake is soon enough
		return math.MaxInt32
	}
	return lined(s.last.Running) - s.last.Waiting - s.since
}

// tells reports whether the engine counts its tokens.
func tells(r Reading) bool { return r.GeneratedTokens >= 0 || r.PromptTokens >= 0 }

// reconcile compares the ledger with what the engine holds.
func (s *Scheduler) reconcile(r Reading) {
	if r.Estimated {
		s.share, s.foreign = 1, 0
		return
	}
	var used float64
	for _, k := range r.Ranks {
		used += float64(k.Used)
	}
	known := float64(s.held - s.young)
	if s.young == 0 && s.pending == 0 && r.Waiting == 0 && known > 0 {
		// What runs undisturbed is wholly visible: the rest of the ledger is shared with others. But a page that does not show what runs, as one that stands still, says nothing of what it holds.
		shown := 1.0
		if used > 0 && 2*r.Running >= s.seqs {
			shown = min(1, max(0.05, used/known))
		}
		s.share += (shown - s.share) / 4
	}
	s.foreign = max(0, used-s.share*known-float64(s.young))
}

// brake looks for signs that the engine has more than it can do, whatever its cache says.
func (s *Scheduler) brake(now time.Time, r Reading) {
	unexplained := false
	if r.Waiting > 0 {
		own, oldest := 0, now
		for _, t := range s.running {
			if t.pending {
				own += t.seqs
				if t.started.Before(oldest) {
					oldest = t.started
				}
			}
		}
		unexplained = r.Waiting > own+lined(r.Running) || own > 0 && now.Sub(oldest) > fresh+seconds(2*s.pace.first(float64(s.pending)))
	}
	if unexplained {
		s.waited++
	} else {
		s.waited = 0
	}
	s.preempted = s.read && s.last.Preemptions >= 0 && r.Preemptions > s.last.Preemptions
	if s.preempted {
		s.fill = max(leastFill, s.fill*keep)
	} else {
		s.fill = min(1, s.fill+regain)
	}
}

// Unseen notes that the engine's metrics could not be read: until the next reading the ledger alone counts, and starts are few.
func (s *Scheduler) Unseen(now time.Time) {
	s.settle(now)
	s.blind, s.waited, s.preempted = true, 0, false
}

// Brake says why nothing may be pulled or started though there is room; "" if nothing brakes.
func (s *Scheduler) Brake(now time.Time) string {
	switch {
	case s.quiet(now):
		return BrakeQuiet
	case s.waited >= 2:
		return BrakeWaiting
	case s.preempted:
		return BrakePreempting
	}
	return ""
}

// quiet tells whether the engine has had work and shown no progress for so long that it must have halted: who does not pull then is not fed.
func (s *Scheduler) quiet(now time.Time) bool {
	at := s.quietAt()
	return !at.IsZero() && !now.Before(at)
}

// quietAt is when silence begins to count as a halt; zero if nothing could be seen anyway.
func (s *Scheduler) quietAt() time.Time {
	if len(s.running) == 0 || s.alive.IsZero() {
		return time.Time{}
	}
	if s.seesTokens() {
		return s.alive.Add(s.patience())
	}
	if s.read && tells(s.last) && !s.blind { // by the counters, which are looked at four times a second
		return s.alive.Add(s.patience() + 2*fresh)
	}
	return time.Time{}
}

// patience is how long an engine with this much work may be silent: some steps, of which one computes prompts up to the token budget.
func (s *Scheduler) patience() time.Duration {
	base, each := s.pace.line()
	step := max(base, s.pace.token) + each*float64(min(s.pending, longestStep))
	return max(quietLeast, seconds(quietSteps*step))
}

// seesTokens tells whether any of what runs shows its tokens as they come.
func (s *Scheduler) seesTokens() bool {
	for _, t := range s.running {
		if t.Ask.Streams {
			return true
		}
	}
	return false
}

// --- the ledger ---

// settle brings what depends on the time alone up to now: prefills that nobody sees end, and what is not young any more.
func (s *Scheduler) settle(now time.Time) {
	for _, t := range s.running {
		if t.young && now.Sub(t.started) >= fresh {
			s.matured(t)
		}
		if t.pending && !t.Ask.Streams && !s.counted() && !now.Before(t.due) {
			s.computed(now, t)
		}
	}
	if s.limit > 0 && now.Sub(s.cutAt) >= window && now.Sub(s.grownAt) >= window {
		s.grownAt = now
		if s.limit += max(1, s.limit/10); s.limit >= 2*s.ceiling {
			s.limit, s.ceiling = 0, 0
		}
	}
}

func (s *Scheduler) matured(t *Ticket) {
	if t.young {
		t.young = false
		s.young -= t.prompt
	}
}

func (s *Scheduler) computed(now time.Time, t *Ticket) {
	if t.pending {
		t.pending, s.computedAt = false, now
		s.pending -= t.prompt
	}
}

// ahead is how many prompt tokens a job that starts now finds before it: what is pending, less what must be computed by now.
func (s *Scheduler) ahead(now time.Time) job.Tokens {
	for _, t := range s.running {
		if t.pending {
			base, each := s.pace.line()
			if !t.Ask.Streams && s.counted() { // as it went on before the last reading; faster, if it kept up with what it got
				rate := s.prefill
				if s.last.Waiting == 0 {
					rate = max(2*rate, 1/each)
				}
				done := rate * min(now.Sub(maxTime(t.started, s.readAt)), fresh).Seconds()
				return s.pending - job.Tokens(min(done, float64(s.pending)))
			}
			done := (now.Sub(maxTime(t.started, s.computedAt)).Seconds() - base) / each
			return s.pending - job.Tokens(min(max(done, 0), computedPart*float64(s.pending)))
		}
	}
	return 0
}

// capacity is the whole KV cache, usable the part of it that may be filled.
func (s *Scheduler) capacity() (n job.Tokens) {
	for _, r := range s.ranks {
		n += r.Capacity
	}
	return n
}

func (s *Scheduler) usable() float64 {
	return float64(s.capacity()) * (1 - s.cfg.Reserve) * s.fill
}

// filled is what the engine holds, by its last word and what has changed since; used is that with the margin of what runs.
func (s *Scheduler) filled() float64 {
	return s.share*float64(s.held-s.young) + float64(s.young) + s.foreign
}

func (s *Scheduler) used() float64 { return s.filled() + float64(margin*s.seqs) }

func (s *Scheduler) free() float64 { return s.usable() - s.used() }

// freeRank is the largest room in one rank, and that rank. What started since the last reading counts for the rank that it was meant for.
func (s *Scheduler) freeRank() (room float64, rank int) {
	if len(s.ranks) <= 1 {
		return s.free(), 0
	}
	room = math.Inf(-1)
	for i, r := range s.ranks {
		used, seqs := float64(r.Used), 0
		if s.estimated {
			used = 0
		}
		for _, t := range s.running {
			if t.rank == i {
				seqs += t.seqs
				if s.estimated || t.young {
					used += float64(t.prompt + t.grown)
				}
			}
		}
		if f := float64(r.Capacity)*(1-s.cfg.Reserve)*s.fill - used - float64(margin*seqs); f > room {
			room, rank = f, i
		}
	}
	return room, rank
}

// cacheLoad is the share of what may be used of the KV cache that is.
func (s *Scheduler) cacheLoad() float64 {
	if u := s.usable(); u > 0 {
		return s.used() / u
	}
	return 0
}

// load is the share of what may be used that is, of the KV cache or of the sequences. An engine's places are not in it: they are learned while it works, and levels would jump with what is learned.
func (s *Scheduler) load() float64 {
	share := s.cacheLoad()
	if n := s.bound(); n > 0 {
		share = max(share, float64(s.seqs)/float64(n))
	}
	return share
}

// shownLoad is load with the engine's places in it, where they are known: who is shown it asks whether the engine is full.
func (s *Scheduler) shownLoad() float64 {
	if s.places == 0 {
		return s.load()
	}
	return max(s.load(), float64(s.seqs)/float64(s.places))
}

// placeLimits are how many sequences may run for one more to start, of the batch class and of others; 0 is no limit but bound.
func (s *Scheduler) placeLimits() (batch, others int) {
	if len(s.running) == 0 { // an idle engine gets anything
		return 0, 0
	}
	limit := func(left int) int {
		if left == math.MaxInt32 {
			return 0
		}
		return max(1, s.seqs+left)
	}
	line := s.lineRoom()
	return limit(min(s.spare(), line)), limit(line)
}

// bound is how many sequences may run at once, 0 if nothing bounds them.
func (s *Scheduler) bound() int {
	n := s.most
	if s.limit > 0 && (n == 0 || s.limit < n) {
		n = s.limit
	}
	if s.blind || !s.read {
		if most := max(blindStarts, s.mostSettled()); n == 0 || most < n {
			n = most
		}
	}
	return n
}

// mostSettled is how many sequences the engine was seen with at its last reading.
func (s *Scheduler) mostSettled() int { return s.last.Running }

// cost of a job's prompts in tokens, in whole blocks.
func (s *Scheduler) cost(a *Ask) job.Tokens {
	n := float64(a.Cost.Prompt)
	if f, ok := s.prompts[a.Model]; ok {
		n *= f
	}
	each := (job.Tokens(math.Ceil(n)) + block - 1) / block * block
	return max(each, block) * job.Tokens(max(1, a.Cost.Answers))
}

// fits tells whether t may start now beside what runs. An idle engine gets anything: it knows better than an estimate.
func (s *Scheduler) fits(now time.Time, t *Ticket) bool {
	if len(s.running) == 0 {
		return true
	}
	if n := s.bound(); n > 0 && s.seqs+t.seqs > n || s.lineRoom() < 1 || t.Ask.Class == job.Batch && t.seqs > s.spare() {
		return false
	}
	if s.oversized(t) && !slices.ContainsFunc(s.running, s.oversized) {
		return true
	}
	if s.crowded(now, t.prompt) {
		return false
	}
	need := float64(t.prompt + job.Tokens(margin*t.seqs))
	if need > s.free() {
		return false
	}
	if room, _ := s.freeRank(); need > room {
		return false
	}
	return s.peakFits(now, t)
}

// oversized tells whether t fits in no rank even if that is empty. It would wait for room that can never be: the engine refuses it at once, or the estimate is wrong, and its own word is the better one.
func (s *Scheduler) oversized(t *Ticket) bool {
	return !slices.ContainsFunc(s.ranks, func(r Rank) bool { return t.prompt <= r.Capacity })
}

// crowded tells whether a prompt would have to wait for others to be computed: in the line at the queue it waits as long, and every worker may take it there.
func (s *Scheduler) crowded(now time.Time, prompt job.Tokens) bool {
	return s.pending > 0 && float64(s.ahead(now)+prompt) > s.budget()
}

// budget is how many prompt tokens may be started and not yet computed: where an engine computes more than what is configured within a moment, as much as that, so that the way to it
// bounds nothing.
func (s *Scheduler) budget() float64 {
	_, each := s.pace.line()
	return max(float64(s.cfg.TokenBudget), briefly/each)
}

// peakFits checks the future: with the running and the new sequences sorted by what each has yet to generate, longest first, the cache is fullest when one of them ends. At the end of the i-th
// the first i are still there, each grown by as much as it had to go: max over i of (tokens now of the first i + i * rest of the i-th) must not be over the cache.
func (s *Scheduler) peakFits(now time.Time, t *Ticket) bool {
	if s.estimated && len(s.ranks) > 1 { // slots have their own bounds
		return true
	}
	type sequence struct{ now, rest float64 }
	all := make([]sequence, 0, len(s.running)+1)
	add := func(t *Ticket) {
		grown := s.generated(now, t)
		rest := float64(t.expects - grown)
		if rest < 1 { // longer than expected: it may end at any time, or go on for as much again as a part of what it has
			rest = 1 + float64(grown)/4
			if limit := t.Ask.Cost.Output; limit > 0 {
				rest = min(rest, float64(max(limit-grown, 1)))
			}
		}
		share := s.share
		if t.young {
			share = 1
		}
		for range t.seqs {
			all = append(all, sequence{share*float64(t.prompt)/float64(t.seqs) + float64(grown), rest})
		}
	}
	for _, r := range s.running {
		add(r)
	}
	add(t)
	slices.SortFunc(all, func(a, b sequence) int { return cmp.Compare(b.rest, a.rest) })
	var sum float64
	capacity := float64(s.capacity()) * s.fill
	if s.seesTokens() { // else it holds the growth that is counted here already
		capacity -= s.foreign
	}
	for i, q := range all {
		sum += q.now
		if sum+float64(i+1)*q.rest > capacity {
			return false
		}
	}
	return true
}

// generated is how many tokens of one answer of t are there, as seen or, where nobody sees them, as expected.
func (s *Scheduler) generated(now time.Time, t *Ticket) job.Tokens {
	if t.Ask.Streams || t.pending || s.pace.token == 0 {
		return t.grown / job.Tokens(max(1, t.seqs))
	}
	return min(t.expects, job.Tokens(now.Sub(t.due).Seconds()/s.pace.token))
}

// --- the hand ---

// Offer puts a job in hand.
func (s *Scheduler) Offer(now time.Time, a Ask) *Ticket {
	s.arrived++
	s.supply.delivered(now)
	t := &Ticket{Ask: a, number: s.arrived, offered: now, prompt: s.cost(&a), seqs: max(1, a.Cost.Answers)}
	t.expects = s.lengths.quantile(&a, peakQuantile)
	s.typical += (float64(t.prompt) - s.typical) / 32
	s.hand = append(s.hand, t)
	s.sort(now)
	return t
}

// sort orders the hand: by class, and within a class by age, or by what is expected of each less its age.
func (s *Scheduler) sort(now time.Time) {
	key := func(t *Ticket) float64 { return t.Ask.Created.Sub(now).Seconds() }
	if s.cfg.Order == Shortest && len(s.hand) > 1 {
		var oldest time.Duration
		for _, t := range s.hand {
			oldest = max(oldest, now.Sub(t.Ask.Created))
		}
		// A second of waiting counts as a second of work; where the backlog is old, work counts less and less.
		weight := 1 / (1 + oldest.Seconds()/2)
		_, each := s.pace.line()
		key = func(t *Ticket) float64 {
			work := each*float64(t.prompt) + s.pace.token*float64(t.expects)
			return weight*work + t.Ask.Created.Sub(now).Seconds()
		}
	}
	slices.SortStableFunc(s.hand, func(a, b *Ticket) int {
		return cmp.Or(cmp.Compare(a.Ask.Class.Rank(), b.Ask.Class.Rank()), cmp.Compare(key(a), key(b)), cmp.Compare(a.number, b.number))
	})
}

// Withdraw takes a job from the hand again. One that has started is not touched: end it.
func (s *Scheduler) Withdraw(t *Ticket) {
	if i := slices.Index(s.hand, t); i >= 0 {
		s.hand = slices.Delete(s.hand, i, i+1)
		t.state = over
	}
}

// Start takes from the hand what may start now, in order, and counts it as running. next is when to look again though nothing happens; zero is never.
func (s *Scheduler) Start(now time.Time) (started []*Ticket, next time.Time) {
	s.settle(now)
	if s.cfg.Order == Shortest {
		s.sort(now)
	}
	for len(s.hand) > 0 && !s.quiet(now) {
		i, due := 0, s.due()
		if due {
			if b := slices.IndexFunc(s.hand, func(t *Ticket) bool { return t.Ask.Class == job.Batch }); b >= 0 && s.fits(now, s.hand[b]) {
				i = b
			}
		}
		t := s.hand[i]
		if !s.fits(now, t) {
			break
		}
		s.hand = slices.Delete(s.hand, i, i+1)
		t.owed = due && t.Ask.Class == job.Batch
		s.begin(now, t)
		started = append(started, t)
	}
	return started, s.next(now)
}

// due tells whether the batch class has a start coming.
func (s *Scheduler) due() bool { return s.credit >= s.patient }

// Due tells whether the batch class has a start coming.
func (s *Scheduler) Due() bool { return s.due() }

// next is when something changes by time alone.
func (s *Scheduler) next(now time.Time) (next time.Time) {
	sooner := func(t time.Time) {
		if t.After(now) && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	if at := s.quietAt(); !at.IsZero() && (len(s.hand) > 0 || s.pending > 0) {
		sooner(at)
		sooner(at.Add(rescueAfter))
		sooner(s.readAt.Add(overdue + time.Millisecond))
		sooner(s.alive.Add(blindHalt + time.Millisecond))
	}
	if len(s.hand) == 0 {
		return next
	}
	for _, t := range s.running {
		if t.pending && !t.Ask.Streams {
			if s.counted() {
				sooner(now.Add(countedLook))
				break
			}
			sooner(t.due)
		}
	}
	if s.hand[0].Ask.Class == job.Interactive {
		sooner(s.hand[0].offered.Add(preemptAfter))
	}
	if s.limit > 0 {
		sooner(maxTime(s.cutAt, s.grownAt).Add(window))
	}
	return next
}

// begin counts t as running.
func (s *Scheduler) begin(now time.Time, t *Ticket) {
	if len(s.running) == 0 {
		s.alive, s.doneAt = now, now
	}
	s.trickle(t)
	_, t.rank = s.freeRank()
	t.state, t.started, t.last = running, now, now
	t.ahead = float64(s.pending + t.prompt)
	t.young, t.pending = true, true
	base, each := s.pace.line()
	s.doneAt = maxTime(s.doneAt, now.Add(seconds(base))).Add(seconds(each * float64(t.prompt)))
	t.due = s.doneAt
	s.running = append(s.running, t)
	s.seqs += t.seqs
	s.since += t.seqs
	s.held += t.prompt
	s.young += t.prompt
	s.pending += t.prompt
}

// trickle counts what starts for the batch class's share, by what it is expected to need; account corrects that when it has ended. What the class has coming is bounded by two of its jobs; what it gets beyond that, because there is
// room, costs it nothing.
func (s *Scheduler) trickle(t *Ticket) {
	t.work = float64(t.prompt) + float64(t.expects)*float64(t.seqs)
	switch {
	case t.Ask.Class != job.Batch:
	case s.learned: // counted as too little it would be followed by more at once, and then by none for long
		t.work = max(t.work, s.patient)
	default:
		s.patient = t.work
	}
	s.account(t, t.work)
	if t.Ask.Class == job.Batch && !t.owed {
		s.credit = max(min(s.credit, 0), s.credit-t.work)
	}
}

// account counts work more, or less, of a job that has started.
func (s *Scheduler) account(t *Ticket, work float64) {
	switch share := min(s.cfg.Trickle, mostTrickle); {
	case share <= 0:
	case t.Ask.Class != job.Batch:
		s.credit = min(max(s.credit, 2*s.patient), s.credit+work*share/(1-share))
	case t.owed:
		s.credit -= work
	}
}

// Preempt names the running jobs of the batch class that are to be given back now, youngest first, because an interactive job in hand finds no room. Each is named once; it
// holds its room until its End.
func (s *Scheduler) Preempt(now time.Time) (named []*Ticket) {
	if len(s.hand) == 0 {
		return nil
	}
	t := s.hand[0]
	if t.Ask.Class != job.Interactive || now.Sub(t.offered) < preemptAfter || s.quiet(now) || s.fits(now, t) || s.crowded(now, t.prompt) {
		return nil
	}
	tokens, seqs := float64(t.prompt+job.Tokens(margin*t.seqs))-s.free(), 0
	if n := s.bound(); n > 0 {
		seqs = s.seqs + t.seqs - n
	}
	give := func(r *Ticket) {
		tokens -= s.share*float64(r.prompt+r.grown) + float64(margin*r.seqs)
		seqs -= r.seqs
	}
	for _, r := range s.running { // on their way already
		if r.named {
			give(r)
		}
	}
	for i := len(s.running) - 1; i >= 0 && (tokens > 0 || seqs > 0); i-- {
		if r := s.running[i]; r.yields() {
			give(r)
			named = append(named, r)
		}
	}
	if tokens > 0 || seqs > 0 { // all of it would not do
		return nil
	}
	for _, r := range named {
		r.named = true
	}
	return named
}

// yields tells whether a running job may be given back for an interactive one.
func (t *Ticket) yields() bool {
	return t.Preemptible && t.Ask.Class == job.Batch && !t.named && !t.owed
}

// Return takes from the hand what other workers shall have: all of it while the engine has halted, but for what waits for this worker alone.
func (s *Scheduler) Return(now time.Time) (back []*Ticket) {
	if len(s.hand) == 0 || !s.quiet(now) {
		return nil
	}
	s.hand = slices.DeleteFunc(s.hand, func(t *Ticket) bool {
		if t.Lane {
			return false
		}
		t.state = over
		back = append(back, t)
		return true
	})
	return back
}

// Rescue names what runs without a token yet and is to be given back, because the engine has halted: nothing of it is lost, and another worker may begin at once. Each is named once; it
// holds its room until its End.
func (s *Scheduler) Rescue(now time.Time) (named []*Ticket) {
	at := s.quietAt()
	if at.IsZero() || now.Before(at.Add(rescueAfter)) || !s.halted(now) {
		return nil
	}
	for _, t := range s.running {
		if t.pending && t.Ask.Streams && t.Rescuable && !t.named {
			t.named = true
			named = append(named, t)
		}
	}
	return named
}

// halted tells whether silence is proof enough to take work away, which is dearer than to bring none: sequences that had given tokens give none, and the engine's own counters stand still or cannot be
// read. A first token alone may be late for many reasons.
func (s *Scheduler) halted(now time.Time) bool {
	if !slices.ContainsFunc(s.running, func(t *Ticket) bool { return !t.pending && t.Ask.Streams }) {
		return false
	}
	if tells(s.last) {
		return s.readAt.After(s.alive) || now.Sub(s.readAt) > overdue
	}
	return now.Sub(s.alive) > blindHalt
}

// --- what runs ---

// Alive notes that the engine has given a token to somebody: a probe, say.
func (s *Scheduler) Alive(now time.Time) { s.alive = now }

// First notes that a running job's first token came.
func (s *Scheduler) First(now time.Time, t *Ticket) {
	if t.state != running || !t.pending {
		return
	}
	s.alive = now
	s.surplus -= float64(t.prompt)
	s.computed(now, t)
	s.matured(t)
	s.pace.sample(t.ahead, now.Sub(t.started).Seconds())
	t.last = now
}

// Grow counts n more tokens of a running job.
func (s *Scheduler) Grow(now time.Time, t *Ticket, n int) {
	if t.state != running {
		return
	}
	s.alive = now
	t.grown += job.Tokens(n)
	s.held += job.Tokens(n)
	if t.seqs == 1 && n > 0 && now.After(t.last) && t.grown > job.Tokens(n) {
		s.pace.tick(now.Sub(t.last).Seconds() / float64(n))
	}
	t.last = now
}

// End releases what a running job held, and learns from how it went. Only the first call for a ticket does anything.
func (s *Scheduler) End(now time.Time, t *Ticket, r Result) {
	if t.state != running {
		return
	}
	if r.Completed && !t.Ask.Streams && !s.counted() {
		s.unseen(t, now.Sub(t.started).Seconds(), float64(max(1, r.Output)))
	}
	s.settle(now)
	s.matured(t)
	if t.pending {
		s.surplus -= float64(t.prompt)
	}
	s.computed(now, t)
	t.state = over
	i := slices.Index(s.running, t)
	s.running = slices.Delete(s.running, i, i+1)
	s.seqs -= t.seqs
	s.since -= t.seqs
	s.held -= t.prompt + t.grown
	// What was not seen growing stood in foreign; where nothing runs any more it was all ours.
	s.foreign = max(0, s.foreign-float64(max(0, r.Output-t.grown)))
	if len(s.running) == 0 {
		s.foreign = 0
	}
	if r.Completed {
		s.alive = now
	}
	if r.Overloaded {
		s.cut(now, t)
	}
	s.learn(t, r)
}

// unseen learns of a job whose tokens nobody saw: n tokens in so many seconds. The first came when the others had not.
func (s *Scheduler) unseen(t *Ticket, total, n float64) {
	if t.pending { // sooner than expected
		s.pace.prefilled(t.ahead, total)
	}
	s.pace.sample(t.ahead, max(total-(n-1)*s.pace.token, total/n))
}

// learn takes in how long prompt and answer were.
func (s *Scheduler) learn(t *Ticket, r Result) {
	if took := float64(r.Prompt + r.Output); r.Completed && took > 0 {
		s.account(t, took-t.work)
		if t.Ask.Class == job.Batch {
			s.patient += (took - s.patient) / 16
			s.learned = true
		}
	}
	if r.Prompt > 0 && t.Ask.Cost.Prompt > 0 {
		f, known := s.prompts[t.Ask.Model]
		got := min(8, max(0.05, float64(r.Prompt)/float64(t.Ask.Cost.Prompt)))
		switch {
		case known:
			f += (got - f) / 16
		case len(s.prompts) < maxKeys:
			f = 1 + (got-1)/4
		default:
			return
		}
		s.prompts[t.Ask.Model] = f
	}
	if n := r.Output; r.Completed && n > 0 {
		s.lengths.learn(&t.Ask, max(1, n/job.Tokens(t.seqs)))
	}
}

// cut halves the limit on running sequences, once for all that had started when it was cut before.
func (s *Scheduler) cut(now time.Time, t *Ticket) {
	if t.started.Before(s.cutAt) {
		return
	}
	if s.ceiling == 0 {
		s.ceiling = s.seqs + t.seqs
	}
	s.limit = max(1, (s.seqs+t.seqs)/2)
	s.cutAt, s.grownAt = now, now
}

// --- pulling ---

// Pull tells what may be pulled now for a class by its rank; -1 is the worker's own lane, which has all classes. A wish that is acted on counts until Pulled.
//
// Of a class nothing is pulled while a job of it or of a higher one is in hand: it could not start before that one. The batch class is pulled all the same when it has a start coming.
func (s *Scheduler) Pull(now time.Time, class int) Wish {
	s.settle(now)
	if !s.read && !s.blind || s.Brake(now) != "" {
		return Wish{}
	}
	batch := class == job.Batch.Rank()
	if len(s.hand) > 0 && s.hand[0].Ask.Class.Rank() <= class && (!batch || !s.due() || s.holds(job.Batch)) {
		return Wish{}
	}
	if class < 0 && slices.ContainsFunc(s.hand, func(t *Ticket) bool { return t.Lane }) {
		return Wish{}
	}
	typical := max(1, s.typical)
	ttft := s.ttft(now)
	weighted := ttft * (1 + loadWeight*s.load())
	wish := Wish{Level: level(weighted), Busy: len(s.running)+len(s.hand) > 0}
	room := s.room(now, typical)
	if batch {
		room = min(room, s.spare())
	}
	others := 0
	for _, n := range s.pulls {
		others += n
	}
	switch {
	case !wish.Busy:
		room = max(room, 1) // an idle engine gets anything
	case room < 1 && class == job.Interactive.Rank() && s.couldYield(now, typical):
		wish.Batch, wish.Level = 1, level(weighted+2*preemptAfter.Seconds())
		return wish
	case room < 1:
		return Wish{}
	}
	// As many typical jobs as keep the level at the top, else one: what a pull has left when a long prompt comes would be served behind that one.
	wish.Batch = 1
	if wish.Level == 0 {
		_, each := s.pace.line()
		wish.Batch = max(1, int(min(float64(room-others), (topTTFT-ttft)/(each*typical), maxBatch)))
	}
	if n := s.supply.onTheWay(now); n > wish.Batch {
		wish.Batch = max(wish.Batch, min(n, room-others, maxBatch))
	}
	if batch { // nobody waits for its first tokens: what counts is that the engine is never short of work, however long a pull takes
		wish.Batch = max(wish.Batch, min(room-others, maxBatch))
	}
	if batch && s.due() { // more than it has coming would stand in hand in higher classes' way
		wish.Batch = 1
	}
	return wish
}

// Pulling counts a wish for a class that is acted on, until Pulled.
func (s *Scheduler) Pulling(consumer, batch int) { s.pulls[consumer] = batch }

// Took notes how long after a pull its first delivery came.
func (s *Scheduler) Took(d time.Duration) { s.supply.took(d) }

// Pulled notes that a consumer's pull has ended.
func (s *Scheduler) Pulled(consumer int) { delete(s.pulls, consumer) }

// holds tells whether a job of that class is in hand.
func (s *Scheduler) holds(c job.Class) bool {
	return slices.ContainsFunc(s.hand, func(t *Ticket) bool { return t.Ask.Class == c })
}

// room is how many typical jobs more could start now, what is in hand counted as started.
func (s *Scheduler) room(now time.Time, typical float64) int {
	free, _ := s.freeRank() // one rank at a time: the others' room is found by the next pull
	room := max(min(free, s.free()), 0) / (typical + margin)
	if s.pending > 0 {
		room = min(room, (s.budget()-float64(s.ahead(now)))/typical)
	} else {
		room = min(room, max(1, s.budget()/typical))
	}
	if n := s.bound(); n > 0 {
		room = min(room, float64(n-s.seqs))
	}
	room = min(room, float64(s.lineRoom()))
	for _, t := range s.hand {
		room -= max(1, float64(t.prompt)/typical)
	}
	return int(math.Floor(room))
}

// couldYield tells whether a typical interactive job would find room if batch work were given back for it.
func (s *Scheduler) couldYield(now time.Time, typical float64) bool {
	if len(s.hand) > 0 || s.crowded(now, job.Tokens(typical)) {
		return false
	}
	tokens, seqs := s.free(), math.MaxInt
	if n := s.bound(); n > 0 {
		seqs = n - s.seqs
	}
	yields := false
	for _, t := range s.running {
		if t.yields() {
			yields = true
			tokens += s.share*float64(t.prompt+t.grown) + float64(margin*t.seqs)
			seqs = satAdd(seqs, t.seqs)
		}
	}
	return yields && tokens >= typical+margin && seqs >= 1
}

// ttft is the expected time to the first token, in seconds, of a typical job that starts now: what is learned of the engine, but no less than what those before it have waited already.
func (s *Scheduler) ttft(now time.Time) float64 {
	ahead := float64(s.ahead(now)) + max(1, s.typical)
	for _, t := range s.hand {
		ahead += float64(t.prompt)
	}
	expected := s.pace.first(ahead)
	for _, t := range s.running {
		if t.pending && t.Ask.Streams {
			expected = max(expected, now.Sub(t.started).Seconds())
			break // the others are younger
		}
	}
	return expected
}

// level is the priority of a pull by the expected TTFT in seconds.
func level(ttft float64) int {
	return min(MaxLevel, max(0, int(math.Ceil(math.Log2(ttft/topTTFT)-1e-9))))
}

// Status is the state now.
func (s *Scheduler) Status(now time.Time) Status {
	s.settle(now)
	room, _ := s.freeRank()
	ttft := s.ttft(now)
	batch, others := s.placeLimits()
	st := Status{
		Capacity: s.capacity(), Used: max(0, job.Tokens(s.filled())), Free: max(0, job.Tokens(s.free())), FreeRank: max(0, job.Tokens(min(room, s.free()))),
		Running: len(s.running), Sequences: s.seqs, Waiting: s.last.Waiting, InHand: len(s.hand), Level: level(ttft * (1 + loadWeight*s.load())), TTFT: seconds(ttft), Limit: s.bound(), Brake: s.Brake(now),
		PlaceLimit: others, BatchLimit: batch, Load: s.shownLoad(), CacheLoad: s.cacheLoad(),
	}
	return st
}

// Reserved is what the ledger holds: all zero when nothing runs.
func (s *Scheduler) Reserved() (tokens, pending job.Tokens, sequences int) {
	return s.held, s.pending, s.seqs
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func satAdd(a, b int) int {
	if a > math.MaxInt-b {
		return math.MaxInt
	}
	return a + b
}
