package scaling

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

// coldSpread is the sigma of the log-normal time that a start takes.
const coldSpread = 0.05

// batchSlots of a worker may be taken by lines of a batch; the others are kept for calls.
const batchSlots = slots - slots/8

// queued is for how many seconds of the workers' speed there are lines of the batch in the queue; the others are not fed yet.
const queued = 4

// run is the outcome of one simulation.
type run struct {
	wait, first []float64 // of each request, in seconds
	requests    []request
	gpuSeconds  float64
	gpuByDay    []float64
	// changes counts the ticks at which workers were started or stopped, turns how often these changed direction.
	changes, turns int
	most           int // workers at once
	atStart        int // workers when counting began
	lines          int // of the batch that were done
	linesBy        float64
	series         []moment
	served         int
}

// moment is what the picture shows.
type moment struct {
	at      float64
	workers int // that can work
	live    int // and those that start
	waiting int
	rate    float64
}

type simulation struct {
	trace    *trace
	pool     *scale.Pool
	policy   policy
	requests []request
	cold     *rand.Rand
	now      float64
	workers  []*worker
	started  int // ever
	queue    []int32
	head     int // of queue
	lines    int // of the batch that have not begun
	memory   scale.Memory
	recorder recorder
	arrived  []float64
	recorded []scale.Arrivals
	season   *scale.Season
	colds    []float64
	// What full workers have done, in tokens and seconds.
	fullTokens, fullTime float64
	run                  run
	view                 view
	inFlight             int
	inFlightTokens       int64
	waitingTokens        int64
	keep                 bool
	lastWay              int
}

// simulate runs one policy on the arrivals of a trace. Equal arguments give equal outcomes. Its error is ctx's, or that a request was never served.
func simulate(ctx context.Context, t *trace, requests []request, pool *scale.Pool, p policy, seed uint64, keep bool) (*run, error) {
	s := &simulation{trace: t, pool: pool, policy: p, requests: requests, cold: rand.New(rand.NewPCG(seed, 3)), keep: keep}
	s.run = run{requests: requests, wait: make([]float64, len(requests)), first: make([]float64, len(requests))}
	for i := range s.run.wait {
		s.run.wait[i] = -1
	}
	for range t.workers {
		w := s.start(0)
		s.ready(w)
	}
	if err := s.loop(ctx); err != nil {
		return nil, err
	}
	return &s.run, nil
}

func (s *simulation) loop(ctx context.Context) error {
	end, tick := s.trace.end().Seconds(), s.trace.tick.Seconds()
	next, ticks := 0, 0
	batchAt := math.Inf(1)
	if s.trace.lines > 0 {
		batchAt = s.trace.batchAt.Seconds()
	}
	for {
		// The next that happens: a worker's event, an arrival, or a look.
		at, who := math.Inf(1), -1
		for i, w := range s.workers {
			if w.next < at {
				at, who = w.next, i
			}
		}
		arrival := math.Inf(1)
		if next < len(s.requests) {
			arrival = s.requests[next].at
		}
		look := float64(ticks) * tick
		if math.Min(math.Min(at, arrival), look) >= end && look >= end {
			break
		}
		switch {
		case batchAt <= min(at, arrival, look):
			s.now, s.lines, batchAt = batchAt, s.trace.lines, math.Inf(1)
			for _, w := range s.workers {
				s.fill(w)
			}
		case look <= at && look <= arrival:
			s.now = look
			ticks++
			if ticks%1024 == 0 && ctx.Err() != nil {
				return ctx.Err()
			}
			s.look()
		case arrival <= at:
			s.now = arrival
			s.arrive(next)
			next++
		default:
			s.now = at
			s.event(s.workers[who])
		}
	}
	s.now = end
	for _, w := range s.workers {
		s.count(w)
	}
	return s.finish(next)
}

// finish lets what was begun end, without any more decisions, so that every request has its wait; workers that start come yet, and without any the pool gets one.
func (s *simulation) finish(next int) error {
	counted := s.run.gpuSeconds
	byDay := slices.Clone(s.run.gpuByDay)
	if len(s.workers) == 0 && s.head < len(s.queue) {
		s.start(s.coldStart())
	}
	s.lines = 0
	for {
		at, who := math.Inf(1), -1
		for i, w := range s.workers {
			if w.next < at {
				at, who = w.next, i
			}
		}
		if who < 0 {
			break
		}
		s.now = at
		s.event(s.workers[who])
	}
	s.run.gpuSeconds, s.run.gpuByDay = counted, byDay
	if s.run.served != len(s.requests) || next != len(s.requests) {
		return fmt.Errorf("simulating %s: %d of %d requests were served", s.trace.name, s.run.served, len(s.requests))
	}
	return nil
}

func (s *simulation) coldStart() float64 {
	return time.Duration(s.pool.ColdStart).Seconds() * math.Exp(coldSpread*s.cold.NormFloat64())
}

// start orders a worker, which will be ready after a while.
func (s *simulation) start(after float64) *worker {
	s.started++
	w := &worker{name: s.pool.Name + "-" + strconv.Itoa(s.started), state: scale.Starting, ordered: s.now, since: s.now, at: s.now, next: s.now + after, last: -1}
	s.workers = append(s.workers, w)
	return w
}

func (s *simulation) ready(w *worker) {
	w.state, w.ready, w.since, w.idleSince, w.at = scale.Ready, s.now, s.now, s.now, s.now
	w.next = math.Inf(1)
	s.fill(w)
}

// event is what w.next was for.
func (s *simulation) event(w *worker) {
	if w.state == scale.Starting {
		s.colds = append(s.colds, s.now-w.ordered)
		s.ready(w)
		return
	}
	if len(w.jobs) == slots {
		s.fullTime += s.now - w.at
		s.fullTokens += float64(w.jobs[0].tokens)
	}
	w.catchUp(s.now)
	r := w.pop()
	s.inFlight--
	s.inFlightTokens -= r.tokens
	if r.index < 0 {
		w.lines--
		s.run.lines++
		s.run.linesBy = s.now
	} else {
		s.run.served++
	}
	if w.state == scale.Ready {
		s.fill(w)
	}
	if len(w.jobs) == 0 {
		if w.state == scale.Draining {
			s.gone(w)
			return
		}
		w.idleSince = s.now
	}
	w.plan()
}

// fill has w take what waits, as long as it has room.
func (s *simulation) fill(w *worker) {
	if w.state != scale.Ready {
		return
	}
	w.catchUp(s.now)
	for len(w.jobs) < slots && s.head < len(s.queue) {
		i := s.queue[s.head]
		s.head++
		s.waitingTokens -= int64(s.requests[i].expected())
		s.take(w, i)
	}
	for s.lines > 0 && len(w.jobs) < batchSlots && s.head == len(s.queue) {
		// A line is as long as some request.
		s.lines--
		r := &s.requests[s.lines%len(s.requests)]
		w.lines++
		w.push(running{until: w.done + r.work(), tokens: int64(r.expected()), index: -1})
		s.inFlight++
		s.inFlightTokens += int64(r.expected())
		w.last = s.now
	}
	if s.head == len(s.queue) {
		s.queue, s.head = s.queue[:0], 0
	}
	w.plan()
}

// take has w run a request now. It must be caught up, and be planned again.
func (s *simulation) take(w *worker, i int32) {
	r := &s.requests[i]
	s.run.wait[i] = s.now - r.at
	s.run.first[i] = s.now - r.at + firstStep + float64(r.prompt)/prefillRate
	w.push(running{until: w.done + r.work(), tokens: int64(r.expected()), index: i})
	w.last = s.now
	s.inFlight++
	s.inFlightTokens += int64(r.expected())
}

// arrive takes a request that came now to the worker with room that has the fewest, of several to the one that took none for longest, of those that yield only if no other has room; else it waits.
func (s *simulation) arrive(i int) {
	r := &s.requests[i]
	tokens := r.expected()
	s.bucketUp()
	s.arrived[len(s.arrived)-1] += float64(tokens)
	s.recorder.arrive(s.time(), scale.Amount{Jobs: 1, Tokens: tokens}, float64(tokens)*float64(tokens))
	var best *worker
	if s.head == len(s.queue) {
		for _, w := range s.workers {
			if w.state == scale.Ready && len(w.jobs) < slots && (best == nil || w.before(best)) {
				best = w
			}
		}
	}
	if best == nil {
		s.queue = append(s.queue, int32(i))
		s.waitingTokens += int64(tokens)
		return
	}
	best.catchUp(s.now)
	s.take(best, int32(i))
	best.plan()
}

// bucketUp has arrived reach to the bucket of now.
func (s *simulation) bucketUp() {
	for len(s.arrived) <= int(s.now/bucket) {
		s.arrived = append(s.arrived, 0)
	}
}

// gone removes w.
func (s *simulation) gone(w *worker) {
	s.count(w)
	s.workers = slices.DeleteFunc(s.workers, func(o *worker) bool { return o == w })
}

// count adds what w took from its order to now.
func (s *simulation) count(w *worker) {
	from := max(w.ordered, s.trace.warm.Seconds())
	s.run.gpuSeconds += max(0, s.now-from)
	if !s.trace.days {
		return
	}
	for from < s.now {
		day := int(from / 86400)
		to := min(s.now, float64(day+1)*86400)
		for len(s.run.gpuByDay) <= day {
			s.run.gpuByDay = append(s.run.gpuByDay, 0)
		}
		s.run.gpuByDay[day] += to - from
		from = to
	}
}

func (s *simulation) time() time.Time { return s.when(s.now) }

func (s *simulation) when(t float64) time.Time {
	return s.trace.start.Add(time.Duration(t * float64(time.Second)))
}

// look samples, asks the policy, and does what it says.
func (s *simulation) look() {
	v := s.observe()
	p := s.policy.decide(v)
	counted := s.now >= s.trace.warm.Seconds()
	before := v.live
	for range p.start {
		s.start(s.coldStart())
	}
	for _, name := range p.stop {
		if i := slices.IndexFunc(s.workers, func(w *worker) bool { return w.name == name }); i >= 0 {
			s.stop(s.workers[i])
		}
	}
	for _, w := range s.workers {
		w.yields = slices.Contains(p.yield, w.name)
	}
	live := s.live()
	s.memory.Decided(v.Now, p.needed, p.trend, time.Duration(s.pool.Cooldown))
	if counted {
		if way := live - before; way != 0 {
			s.run.changes++
			if (way > 0) != (s.lastWay > 0) || s.lastWay == 0 {
				s.run.turns++
			}
			s.lastWay = way
		}
		if s.run.most == 0 {
			s.run.atStart = before
		}
		s.run.most = max(s.run.most, live)
	}
	if s.keep {
		ready := 0
		for _, w := range s.workers {
			if w.state == scale.Ready {
				ready++
			}
		}
		s.run.series = append(s.run.series, moment{at: s.now, workers: ready, live: live, waiting: v.queue, rate: s.trace.at(v.now)})
	}
}

func (s *simulation) live() int {
	n := 0
	for _, w := range s.workers {
		if w.state != scale.Draining {
			n++
		}
	}
	return n
}

// stop has w take nothing new and go when it is empty. One that starts goes at once.
func (s *simulation) stop(w *worker) {
	switch {
	case w.state == scale.Draining:
	case len(w.jobs) == 0:
		s.gone(w)
	default:
		w.state, w.since = scale.Draining, s.now
	}
}

// observe makes what the autoscaler would see now.
func (s *simulation) observe() *view {
	v := &s.view
	v.pool, v.now = s.pool, time.Duration(s.now*float64(time.Second))
	now := s.time()
	workers := v.Workers[:0]
	v.live = 0
	for _, w := range s.workers {
		o := scale.Worker{Name: w.name, State: w.state, Since: s.when(w.since), Jobs: len(w.jobs), Yields: w.yields}
		if len(w.jobs) == 0 && w.state != scale.Starting {
			o.IdleSince = s.when(w.idleSince)
		}
		workers = append(workers, o)
		if w.state != scale.Draining {
			v.live++
		}
	}
	waiting := len(s.queue) - s.head
	v.Sample = scale.Sample{
		Now: now, Workers: workers,
		InFlight:   scale.Amount{Jobs: s.inFlight, Tokens: job.Tokens(s.inFlightTokens)},
		Throughput: s.throughput(), ColdStart: s.coldStarts(),
	}
	if waiting > 0 {
		v.Waiting = map[job.Class]scale.Amount{job.Interactive: {Jobs: waiting, Tokens: job.Tokens(s.waitingTokens)}}
	}
	if s.lines > 0 {
		fed := min(s.lines, int(queued*fullRate*float64(v.live))+1)
		if v.Waiting == nil {
			v.Waiting = map[job.Class]scale.Amount{}
		}
		v.Waiting[job.Batch] = scale.Amount{Jobs: fed, Tokens: job.Tokens(fed) * (meanPrompt + meanOutput)}
		if rest := s.lines - fed; rest > 0 {
			v.Unfed = []scale.Due{{Amount: scale.Amount{Jobs: rest, Tokens: job.Tokens(rest) * (meanPrompt + meanOutput)}, By: s.trace.start.Add(s.trace.due)}}
		}
	}
	s.bucketUp()
	v.arrived = s.arrived[:len(s.arrived)-1] // those that have ended
	v.queue, v.running = waiting+s.lines, s.inFlight
	if v.queue+v.running > 0 {
		s.memory.Asked(now)
	}
	s.recorder.advance(now)
	if ended := s.recorder.takeSeason(); len(ended) > 0 && s.trace.days {
		s.recorded = append(s.recorded, ended...)
		s.season = scale.Learn(s.recorded, now, time.UTC)
	}
	v.history = func() scale.History { return s.memory.History(s.recorder.bucketed(now), s.season) }
	return v
}

// throughput is what full workers were seen to do, once they were for a minute; before, what the pool says.
func (s *simulation) throughput() float64 {
	if s.fullTime < 60 {
		return s.pool.TokensPerSecond
	}
	return s.fullTokens / s.fullTime
}

// coldStarts are the quantiles of the last twenty.
func (s *simulation) coldStarts() scale.ColdStart {
	if len(s.colds) == 0 {
		return scale.ColdStart{P50: time.Duration(s.pool.ColdStart), P90: time.Duration(s.pool.ColdStart)}
	}
	last := slices.Clone(s.colds[max(0, len(s.colds)-20):])
	slices.Sort(last)
	at := func(q float64) time.Duration {
		return time.Duration(last[min(len(last)-1, int(q*float64(len(last))))] * float64(time.Second))
	}
	return scale.ColdStart{P50: at(0.5), P90: at(0.9), Samples: len(last)}
}
