package emulator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
)

// Config of an Emulator. The zero value is a healthy a10-7b in real time.
type Config struct {
	// Models are the names that it serves; the first one is what metrics show. Default: one, "emulator-" and the profile's name.
	Models []string
	// Profile names the hardware and the model, one of Profiles. Default a10-7b.
	Profile string
	// Workload names the distribution of natural answer lengths, one of Workloads. Default chat-like.
	Workload string
	// Speed is by how much faster than the profile's hardware it runs. Default 1.
	Speed float64
	// ColdStart is how long after New it answers 503, in wall time, not scaled. 0 is ready at once.
	ColdStart time.Duration
	// Seed changes all texts, and starts the sequence that rates of faults are drawn from. Engines that stand in for each other need the same.
	Seed uint64
	// MaxModelLen replaces the profile's bound on prompt + answer, in tokens. 0 keeps it.
	MaxModelLen int
	// KVTokens replaces the profile's KV cache capacity, in tokens. 0 keeps it.
	KVTokens int
	// DataParallel is how many ranks it has, each with an engine core and a KV cache of its own; a sequence goes to the least loaded one, and must fit in it. Default 1.
	DataParallel int
	// PriorityScheduling honours the field "priority", the lowest first, as vLLM does with --scheduling-policy priority. Without it one that is not 0 is refused.
	PriorityScheduling bool
	// NoContinuation refuses continue_final_message, as an engine does that knows no such field.
	NoContinuation bool
	// Responses serves /v1/responses, as newer engines do. Without it there is no such route.
	Responses bool
	// APIKey, if set, is asked for on /v1 routes as a bearer token.
	APIKey string
	// Faults are what goes wrong from the start; SetFaults changes them.
	Faults Faults
	// OnRequest, if set, gets each request as it came, before it is answered. The body is not used again; it is nil if there was none.
	OnRequest func(method, path string, header http.Header, body []byte)
	// Crash is what the crash marker calls. Default: exit the process with code 3.
	Crash func()
}

// Counts are what an Emulator has seen since it was made.
type Counts struct {
	// Calls of completion and embedding routes, Completed of them to the end, Disconnects those whose client left before.
	Calls, Completed, Disconnects int64
}

// Emulator is one engine. Its handler answers from the start, but nothing is computed unless Run runs.
type Emulator struct {
	cfg     Config
	log     *slog.Logger
	profile Profile
	length  Workload
	salt    hash
	ready   time.Time
	metrics *prometheus.Registry
	handler http.Handler
	ranks   []*rank

	calls, completed, disconnects atomic.Int64

	// faulted wakes who draws the stalls when faults change; stopped is closed when the drivers have ended.
	faulted chan struct{}
	stopped chan struct{}

	// mu guards the rest, and the ranks' cores. A driver holds it while it steps, never while it waits.
	mu     sync.Mutex
	faults Faults
	random *rand.Rand
	times  map[uint64]int // calls of bodies whose marker counts only so many times
	frozen time.Time      // until then nothing is computed and nobody is answered
}

// rank is one engine core with its own driver.
type rank struct {
	core    *Core
	metrics *metrics
	work    chan struct{} // wakes the driver from idleness
}

// wake tells the driver that there may be work.
func (r *rank) wake() {
	select {
	case r.work <- struct{}{}:
	default:
	}
}

// MaxRanks bounds Config.DataParallel.
const MaxRanks = 64

// New checks cfg. Nothing runs before Run.
func New(cfg Config, log *slog.Logger) (*Emulator, error) {
	if cfg.Profile == "" {
		cfg.Profile = "a10-7b"
	}
	p, err := ProfileByName(cfg.Profile)
	if err != nil {
		return nil, fmt.Errorf("field Profile: %w", err)
	}
	if cfg.KVTokens != 0 {
		p.KVTokens = cfg.KVTokens
		p.MaxModelLen = min(p.MaxModelLen, p.Blocks()*BlockTokens)
	}
	if p.Blocks() < 1 {
		return nil, fmt.Errorf("field KVTokens is %d: it must be 0 or at least %d", cfg.KVTokens, BlockTokens)
	}
	if cfg.MaxModelLen != 0 {
		p.MaxModelLen = cfg.MaxModelLen
	}
	if p.MaxModelLen < 2 || p.MaxModelLen > p.Blocks()*BlockTokens {
		return nil, fmt.Errorf("field MaxModelLen is %d: it must be 0 or from 2 to the KV cache's %d", p.MaxModelLen, p.Blocks()*BlockTokens)
	}
	if cfg.Speed == 0 {
		cfg.Speed = 1
	}
	if !(cfg.Speed > 0 && cfg.Speed <= 1e6) {
		return nil, fmt.Errorf("field Speed is %v: it must be more than 0 and at most 1e6", cfg.Speed)
	}
	if cfg.ColdStart < 0 {
		return nil, fmt.Errorf("field ColdStart is %v: it must not be negative", cfg.ColdStart)
	}
	if cfg.DataParallel == 0 {
		cfg.DataParallel = 1
	}
	if cfg.DataParallel < 1 || cfg.DataParallel > MaxRanks {
		return nil, fmt.Errorf("field DataParallel is %d: it must be from 1 to %d", cfg.DataParallel, MaxRanks)
	}
	if err := cfg.Faults.validate(); err != nil {
		return nil, err
	}
	length, err := workloadByName(cfg.Workload)
	if err != nil {
		return nil, fmt.Errorf("field Workload: %w", err)
	}
	if len(cfg.Models) == 0 {
		cfg.Models = []string{"emulator-" + cfg.Profile}
	}
	for i, m := range cfg.Models {
		if m == "" {
			return nil, fmt.Errorf("field Models[%d] is empty", i)
		}
	}
	if cfg.Crash == nil {
		cfg.Crash = func() { os.Exit(3) }
	}
	e := &Emulator{
		cfg: cfg, log: log, profile: p, length: length, salt: hashStart ^ hash(mix(cfg.Seed)), ready: time.Now().Add(cfg.ColdStart),
		faulted: make(chan struct{}, 1), stopped: make(chan struct{}), metrics: prometheus.NewRegistry(),
		faults: cfg.Faults, random: rand.New(rand.NewPCG(cfg.Seed, 1)), times: make(map[uint64]int),
	}
	for i := range cfg.DataParallel {
		r := &rank{core: NewCore(p), work: make(chan struct{}, 1)}
		r.core.SetMaxRunning(cfg.Faults.MaxNumSeqs)
		if cfg.PriorityScheduling {
			r.core.SetPriorities()
		}
		r.metrics = newMetrics(e.metrics, cfg.Models[0], i, p.MaxModelLen, func() (Stats, bool) {
			e.mu.Lock()
			defer e.mu.Unlock()
			return r.core.Stats(), e.faults.Metrics == MetricsNaN
		})
		e.ranks = append(e.ranks, r)
	}
	e.handler = e.routes()
	return e, nil
}

func workloadByName(name string) (Workload, error) {
	var names []string
	for _, w := range Workloads() {
		if w.Name == name || name == "" {
			return w, nil
		}
		names = append(names, w.Name)
	}
	return Workload{}, fmt.Errorf("unknown workload %q: use one of %v", name, names)
}

// Models are the names that it serves.
func (e *Emulator) Models() []string { return e.cfg.Models }

// Handler answers what vLLM answers.
func (e *Emulator) Handler() http.Handler { return e.handler }

// Stats returns the engine's state now: the sums over its ranks.
func (e *Emulator) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	var sum Stats
	for _, r := range e.ranks {
		sum.add(r.core.Stats())
	}
	return sum
}

// Counts returns what it has seen so far.
func (e *Emulator) Counts() Counts {
	return Counts{Calls: e.calls.Load(), Completed: e.completed.Load(), Disconnects: e.disconnects.Load()}
}

// SetFaults changes what goes wrong. Calls that run keep the fate that they were given.
func (e *Emulator) SetFaults(f Faults) error {
	if err := f.validate(); err != nil {
		return err
	}
	e.mu.Lock()
	e.faults = f
	for _, r := range e.ranks {
		r.core.SetMaxRunning(f.MaxNumSeqs)
	}
	e.mu.Unlock()
	for _, r := range e.ranks {
		r.wake()
	}
	select {
	case e.faulted <- struct{}{}:
	default:
	}
	return nil
}

// Freeze stops the whole engine for a time, as a process that gets no CPU: nothing is computed and no HTTP request is answered, health and metrics included. What comes
// meanwhile waits. Periods that overlap end with the last.
func (e *Emulator) Freeze(d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if until := time.Now().Add(d); until.After(e.frozen) {
		e.frozen = until
	}
}

// thawed waits until the engine is not frozen, or done is closed.
func (e *Emulator) thawed(done <-chan struct{}) {
	for {
		e.mu.Lock()
		until := e.frozen
		e.mu.Unlock()
		wait := time.Until(until)
		if wait <= 0 {
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-done:
			t.Stop()
			return
		}
	}
}

// freezeNowAndThen freezes the engine as Faults.StallEvery and StallFor say. How far apart the starts are is drawn from 0.5 to 1.5 times StallEvery.
func (e *Emulator) freezeNowAndThen(ctx context.Context) {
	random := rand.New(rand.NewPCG(e.cfg.Seed, 2))
	for {
		f := e.currentFaults()
		var due <-chan time.Time
		var t *time.Timer
		if f.StallEvery > 0 {
			t = time.NewTimer(time.Duration((0.5 + random.Float64()) * float64(f.StallEvery)))
			due = t.C
		}
		select {
		case <-due:
			e.log.Info("emulated engine stalls", "for", f.StallFor)
			e.Freeze(f.StallFor)
			continue
		case <-e.faulted:
		case <-ctx.Done():
		}
		if t != nil {
			t.Stop()
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// maxLag is how far the driver may fall behind the time that its steps should take, before it gives up catching up.
const maxLag = 50 * time.Millisecond

// Run steps the engine in real time until ctx ends, and then breaks the calls that still run. It must run once only.
func (e *Emulator) Run(ctx context.Context) error {
	defer close(e.stopped)
	e.log.Info("emulated engine runs", "profile", e.profile.Name, "models", e.cfg.Models, "speed", e.cfg.Speed,
		"kv_tokens", e.profile.Blocks()*BlockTokens, "ranks", len(e.ranks))
	var wg sync.WaitGroup
	for _, r := range e.ranks {
		wg.Go(func() { e.drive(ctx, r) })
	}
	wg.Go(func() { e.freezeNowAndThen(ctx) })
	wg.Wait()
	return nil
}

// drive steps one rank.
func (e *Emulator) drive(ctx context.Context, r *rank) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	due := time.Now()
	for ctx.Err() == nil {
		e.thawed(ctx.Done())
		step, ok := e.step(r)
		if !ok {
			select {
			case <-r.work:
			case <-ctx.Done():
			}
			due = time.Now()
			continue
		}
		// Steps follow each other on a timeline of their own: timers are coarser than the steps of fast profiles, so what one wait
		// oversleeps the next steps make up for.
		now := time.Now()
		if now.Sub(due) > maxLag {
			due = now
		}
		due = due.Add(time.Duration(float64(step.Duration) / e.cfg.Speed))
		if wait := due.Sub(now); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
		}
		e.thawed(ctx.Done())
		r.deliver(step, time.Now())
	}
}

func (e *Emulator) step(r *rank) (Step, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.faults.Stall {
		return Step{}, false
	}
	if rate := e.faults.PreemptionRate; rate > 0 && e.random.Float64() < rate {
		r.core.Preempt()
	}
	return r.core.Step()
}

// deliver tells the calls about the tokens of a step, once the step's time has passed.
func (r *rank) deliver(step Step, now time.Time) {
	r.metrics.iterationTokens.Observe(float64(step.Prefill + step.Decoding))
	for _, event := range step.Events {
		s := event.Ref.(*sink)
		r.metrics.observe(s, event, now)
		s.done.Add(1)
		if event.Done {
			s.call.left.Add(-1)
		}
		if s.call.eachToken || event.Done && s.call.left.Load() == 0 {
			s.call.signal()
		}
	}
}

// Serve runs the engine and serves it on l, which it closes, until ctx ends. It then breaks the connections that are open, as an engine that
// is stopped does.
func (e *Emulator) Serve(ctx context.Context, l net.Listener) error {
	srv := &http.Server{Handler: e.handler, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(e.log.Handler(), slog.LevelDebug)}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return e.Run(ctx) })
	g.Go(func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serving the emulated engine: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		return srv.Close()
	})
	return g.Wait()
}

// call is one HTTP call's sequences in the core.
type call struct {
	sinks []sink
	// left counts the sequences that have not ended. wake is signalled at each token if eachToken is set, else at the end of all.
	left      atomic.Int32
	wake      chan struct{}
	eachToken bool
}

// sink is where one sequence's tokens are counted. Their text is known beforehand, so the count is all that travels.
type sink struct {
	call *call
	// rank and id are where it runs, once added.
	rank           *rank
	id             ID
	done           atomic.Int32 // steps of it that have ended: its tokens, or the prefill of one without output
	prompt, output int
	finish         string
	added          time.Time
	lastToken      time.Time // the driver's
}

func (c *call) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// submit adds a call's sequences to the core: each prompt n times.
func (e *Emulator) submit(q *request, answers []answer, m *mishap, now time.Time) (*call, error) {
	n := len(q.prompts) * q.n
	c := &call{sinks: make([]sink, n), wake: make(chan struct{}, 1), eachToken: answers != nil && (q.stream || m.watchesTokens())}
	c.left.Store(int32(n))
	requests := make([]Request, n)
	for i := range requests {
		p := &q.prompts[i/q.n]
		s := &c.sinks[i]
		s.call, s.prompt, s.added, s.finish = c, countTokens(p.text), now, "stop"
		r := Request{Prompt: s.prompt, Seed: mix(p.seed + uint64(i%q.n)), Priority: q.priority, Ref: s}
		if i%q.n == 0 {
			r.Names = blockNames(p.salt, p.text)
		} else {
			r.Names = requests[i-1].Names
		}
		if answers != nil {
			r.Output, s.finish = len(answers[i].ends), answers[i].finish
			s.output = r.Output
		}
		if m.hangAfter != never {
			r.Hold = m.hangAfter/n + 1
		}
		requests[i] = r
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, r := range requests {
		s := &c.sinks[i]
		s.rank = e.leastLoaded()
		id, err := s.rank.core.Add(r)
		if err != nil {
			for k := range i {
				c.sinks[k].rank.core.Cancel(c.sinks[k].id)
			}
			return nil, err
		}
		s.id = id
	}
	for i := range c.sinks {
		c.sinks[i].rank.wake()
	}
	return c, nil
}

// leastLoaded is the rank that gets the next sequence, by vLLM's own measure: one that waits counts as much as four that run.
func (e *Emulator) leastLoaded() *rank {
	best, least := e.ranks[0], math.MaxInt
	for _, r := range e.ranks {
		if s := r.core.Stats(); 4*s.Waiting+s.Running < least {
			best, least = r, 4*s.Waiting+s.Running
		}
	}
	return best
}

// withdraw takes back what of a call still runs: none of it, after its end. An engine that is frozen does so later.
func (e *Emulator) withdraw(c *call) {
	if c.left.Load() > 0 {
		e.thawed(e.stopped)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range c.sinks {
		if s := &c.sinks[i]; s.rank.core.Cancel(s.id) {
			s.rank.metrics.success["abort"].Inc()
			s.rank.wake() // what it held may let another one start
		}
	}
}
