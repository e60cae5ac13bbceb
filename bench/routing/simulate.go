package routing

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/schedule"
)

// Study is what Simulate runs.
type Study struct {
	// Params of the workload. Its Seed is the first.
	Params
	// Seeds is how many workloads, of Seed and those after it, every arm gets, at least 1. Default 15.
	Seeds int
	// Order in which Millrace's workers start what they have in hand. Default schedule.Oldest.
	Order schedule.Order
}

// Simulate runs all arms in virtual time on every processor. The report has the medians over the seeds. Equal Studies give equal figures. The error is that of bad
// Params, or ctx's.
func Simulate(ctx context.Context, s Study) (*Report, error) {
	begun := time.Now()
	if s.Seeds == 0 {
		s.Seeds = 15
	}
	if s.Seeds < 1 {
		return nil, fmt.Errorf("seeds is %d, it must be at least 1", s.Seeds)
	}
	if err := s.complete(); err != nil {
		return nil, err
	}
	runs := Runs{}
	policies := append(Policies(), oneEngine)
	for _, p := range policies {
		runs[p] = make([]*Run, s.Seeds)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0))
	for i := range s.Seeds {
		p := s.Params
		p.Seed += uint64(i)
		w, err := NewWorkload(p)
		if err != nil {
			return nil, err
		}
		for _, policy := range policies {
			w := w
			if policy == oneEngine {
				if w = w.merged(); w == nil {
					continue
				}
			}
			g.Go(func() error {
				sim, err := newSimulation(w, policy, s.Order)
				if err != nil {
					return err
				}
				run, err := sim.run(ctx)
				if err != nil {
					return fmt.Errorf("simulating %s on seed %d: %w", policy, p.Seed, err)
				}
				runs[policy][i] = run
				return nil
			})
		}
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	r := &Report{Simulated: true, Workload: s.Shape, Variant: s.Variant, Rate: s.Rate, Requests: s.Requests}
	r.Median(runs)
	if bound := runs[oneEngine]; bound[0] != nil {
		arm := medianArm(oneEngine, armsOf(oneEngine, bound))
		r.LowerBound = &arm
	}
	r.Seconds = time.Since(begun).Seconds()
	return r, nil
}

// oneEngine is the arm of the lower bound: a router in front of a merged fleet.
const oneEngine Policy = "one-engine"

// merged is w on one engine that is as fast and as large as all of w's together, or nil if those are not equal or stall.
func (w *Workload) merged() *Workload {
	one, n := w.Engines[0], len(w.Engines)
	for _, e := range w.Engines {
		if e.Profile != one.Profile || e.Slowdown != one.Slowdown || len(e.Stalls) > 0 {
			return nil
		}
	}
	one.Slowdown /= float64(n)
	one.Profile.KVTokens *= n
	merged := *w
	merged.Engines = []Engine{one}
	return &merged
}

// givenUp is how long after the last arrival a simulation must have ended: an arm that loses a request is found out.
const givenUp = 2 * time.Hour

// front is what stands between the arrivals and the engines.
type front interface {
	// arrive takes a request that came now.
	arrive(r *request)
	// token is told of one that node made for r, done of r's last.
	token(n *node, r *request, first, done bool)
	// stepped is told that all tokens of node's step have been told.
	stepped(n *node)
}

// request is one arrival on its way.
type request struct {
	Arrival
	index int
	// Where it runs, and under what name.
	node *node
	id   emulator.ID
	// ticket is its worker's, of the pull front.
	ticket *schedule.Ticket
}

// simulation is one run of one arm. Time is since its start.
type simulation struct {
	workload *Workload
	front    front
	now      time.Duration
	events   events
	nodes    []*node
	requests []request
	samples  []Sample
	open     int // requests that have not ended
	spread   float64
	looks    int // samples of spread
	err      error
}

// newSimulation returns one of an arm.
func newSimulation(w *Workload, p Policy, order schedule.Order) (*simulation, error) {
	s := &simulation{workload: w, requests: make([]request, len(w.Arrivals)), samples: make([]Sample, len(w.Arrivals)), open: len(w.Arrivals)}
	for i, e := range w.Engines {
		n := &node{sim: s, index: i, Engine: e, core: emulator.NewCore(e.Profile)}
		n.stepEnds = n.endStep
		s.nodes = append(s.nodes, n)
	}
	for i, a := range w.Arrivals {
		s.requests[i] = request{Arrival: a, index: i}
	}
	if p != Millrace {
		s.front = newPushFront(s, p)
		return s, nil
	}
	var err error
	s.front, err = newPullFront(s, order)
	return s, err
}

func (s *simulation) run(ctx context.Context) (*Run, error) {
	last := s.requests[len(s.requests)-1].At
	var next int // the request that arrives next
	var arrive func()
	arrive = func() {
		r := &s.requests[next]
		if next++; next < len(s.requests) {
			s.at(s.requests[next].At, arrive)
		}
		s.front.arrive(r)
	}
	s.at(s.requests[0].At, arrive)
	s.every(time.Second, func() bool {
		s.look()
		return s.now < last
	})
	for i := 0; s.open > 0; i++ {
		if i%4096 == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if len(s.events.heap) == 0 || s.now > last+givenUp {
			return nil, fmt.Errorf("%d requests have not ended %v after the start", s.open, s.now)
		}
		e := s.events.pop()
		s.now = e.at
		e.do()
		if s.err != nil {
			return nil, s.err
		}
	}
	run := &Run{Samples: s.samples, LoadSpread: s.spread / float64(max(1, s.looks))}
	for _, n := range s.nodes {
		run.Preemptions += int(n.core.Stats().Preemptions)
	}
	return run, nil
}

// at has do called at a time, after what is to be called at that time already; at once if it is past.
func (s *simulation) at(t time.Duration, do func()) { s.events.push(max(t, s.now), do) }

func (s *simulation) after(d time.Duration, do func()) { s.at(s.now+d, do) }

// every has do called every d until it returns false.
func (s *simulation) every(d time.Duration, do func() bool) {
	var tick func()
	tick = func() {
		if do() {
			s.after(d, tick)
		}
	}
	s.after(d, tick)
}

// look takes a sample of the spread of load.
func (s *simulation) look() {
	var used []float64
	for _, n := range s.nodes {
		if n.stalledUntil() == 0 {
			used = append(used, n.core.Stats().Usage())
		}
	}
	s.looks++
	s.spread += spread(used)
}

// spread is the standard deviation over the mean, 0 if the mean is 0.
func spread(values []float64) float64 {
	var sum, squares float64
	for _, v := range values {
		sum += v
	}
	if sum == 0 {
		return 0
	}
	mean := sum / float64(len(values))
	for _, v := range values {
		squares += (v - mean) * (v - mean)
	}
	return math.Sqrt(squares/float64(len(values))) / mean
}

// first and end note what the client of r sees after a way of so long.
func (s *simulation) first(r *request, way time.Duration) {
	s.samples[r.index].TTFT = s.now + way - r.At
}

func (s *simulation) end(r *request, way time.Duration) {
	s.samples[r.index].E2E = s.now + way - r.At
	s.open--
}

func (s *simulation) fail(r *request) {
	s.samples[r.index].Failed = true
	s.open--
}

// node is an engine of the fleet.
type node struct {
	Engine
	sim      *simulation
	index    int
	core     *emulator.Core
	stepping bool
	step     emulator.Step // at hand; its tokens come when it ends
	stepEnds func()        // endStep, made once
	stall    int           // the first of Stalls that has not ended
}

// add gives r to the engine.
func (n *node) add(r *request) {
	var err error
	if r.id, err = n.core.Add(emulator.Request{Prompt: r.Prompt, Output: r.Output, Ref: r}); err != nil {
		n.sim.err = fmt.Errorf("request %d: %w", r.index, err)
		return
	}
	r.node = n
	n.begin()
}

// cancel takes r away from the engine.
func (n *node) cancel(r *request) {
	n.core.Cancel(r.id)
	r.node = nil
}

// begin begins a step unless one is at hand, or there is nothing to do.
func (n *node) begin() {
	if n.stepping {
		return
	}
	step, ok := n.core.Step()
	if !ok {
		return
	}
	n.step, n.stepping = step, true
	n.sim.at(n.through(time.Duration(float64(step.Duration)*n.Slowdown)), n.stepEnds)
}

func (n *node) endStep() {
	for _, e := range n.step.Events {
		if r := e.Ref.(*request); r.node == n && r.id == e.ID { // else it was cancelled during the step
			n.sim.front.token(n, r, e.First, e.Done)
		}
	}
	n.stepping = false
	n.begin()
	n.sim.front.stepped(n)
}

// through is when work of d that begins now is done, if the engine stands still in its stalls.
func (n *node) through(d time.Duration) time.Duration {
	at := n.sim.now
	for i := n.current(); i < len(n.Stalls); i++ {
		s := n.Stalls[i]
		if at < s.From {
			if at+d <= s.From {
				break
			}
			d -= s.From - at
		}
		at = s.To
	}
	return at + d
}

// stalledUntil is when the stall of now ends, 0 if there is none.
func (n *node) stalledUntil() time.Duration {
	if i := n.current(); i < len(n.Stalls) && n.Stalls[i].From <= n.sim.now {
		return n.Stalls[i].To
	}
	return 0
}

// current is the first of Stalls that has not ended.
func (n *node) current() int {
	for n.stall < len(n.Stalls) && n.Stalls[n.stall].To <= n.sim.now {
		n.stall++
	}
	return n.stall
}

// pushFront is a reference router.
type pushFront struct {
	sim    *simulation
	router *Router
}

// routerWay is how long a message takes between a client and an engine by way of a router.
const routerWay = 500 * time.Microsecond

func newPushFront(s *simulation, p Policy) *pushFront {
	f := &pushFront{sim: s, router: NewRouter(p, len(s.nodes), s.workload.Seed)}
	for _, n := range s.nodes {
		// Nodes are not checked all at one moment.
		s.after(HealthEvery*time.Duration(n.index)/time.Duration(len(s.nodes)), func() {
			s.every(HealthEvery, func() bool {
				if n.stalledUntil() > s.now+HealthTimeout {
					s.after(HealthTimeout, func() { f.router.Health(n.index, false) })
				} else {
					f.router.Health(n.index, true)
				}
				return true
			})
		})
	}
	return f
}

func (f *pushFront) arrive(r *request) {
	i, ok := f.router.Pick()
	if !ok {
		f.sim.fail(r)
		return
	}
	n := f.sim.nodes[i]
	f.sim.after(routerWay, func() { n.add(r) })
}

func (f *pushFront) token(n *node, r *request, first, done bool) {
	if first {
		f.sim.first(r, routerWay)
	}
	if done {
		f.router.Done(n.index)
		f.sim.end(r, routerWay)
	}
}

func (f *pushFront) stepped(*node) {}

// events is a heap of what is to be done, the earliest first, and of the same time in the order in which it came.
type events struct {
	heap []event
	last uint64
}

type event struct {
	at time.Duration
	n  uint64
	do func()
}

func (e event) before(o event) bool { return e.at < o.at || e.at == o.at && e.n < o.n }

func (q *events) push(at time.Duration, do func()) {
	q.last++
	q.heap = append(q.heap, event{at, q.last, do})
	h := q.heap
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h[i].before(h[up]) {
			return
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

func (q *events) pop() event {
	h := q.heap
	top := h[0]
	end := len(h) - 1
	h[0] = h[end]
	h[end] = event{}
	h = h[:end]
	q.heap = h
	for i := 0; ; {
		least := i
		for _, down := range [2]int{2*i + 1, 2*i + 2} {
			if down < end && h[down].before(h[least]) {
				least = down
			}
		}
		if least == i {
			return top
		}
		h[i], h[least] = h[least], h[i]
		i = least
	}
}
