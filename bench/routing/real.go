package routing

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/schedule"
)

// Measurement is what Measure runs.
type Measurement struct {
	// Params of the workload. Its Seed is the first run's. Requests of each run default to as many as fit into the time.
	Params
	// Runs is how many recorded workloads, of Seed and those after it, every arm gets, at least 1: one after the other without a pause, so that each finds the engines
	// as the one before left them. Default 1.
	Runs int
	// Order in which Millrace's workers start what they have in hand. Default schedule.Oldest.
	Order schedule.Order
	// Within bounds all of it, from the start of the engines to their end. Default 235 s.
	Within time.Duration
	// Program is a command that runs an emulated engine when "emulator" and its flags follow. Default this program.
	Program []string
	// Say gets a line for people at each step; nil is nobody.
	Say func(string)
	// Log of Millrace's roles; nil is none.
	Log *slog.Logger
	// Version of this build.
	Version string
}

// What the time is spent on beside the arrivals.
const (
	measureWithin = 235 * time.Second
	startTakes    = 8 * time.Second
	stopTakes     = 4 * time.Second
	// stagger lies between the moments at which two arms get the same arrival: they share the processors.
	stagger = 5 * time.Millisecond
	// busyLate is how late, in milliseconds, one request in a hundred may be sent on a machine whose figures are worth something.
	busyLate = 25
	warmUps  = 12
)

// drainTakes is how long after the last arrival the answers may come. What comes later is an error.
func (p Params) drainTakes() time.Duration {
	if p.Shape == ChatLike {
		return 50 * time.Second // answers of 512 tokens on engines that preempt
	}
	return 12 * time.Second
}

// errTime: the run may not take longer.
var errTime = errors.New("the measurement did not end in time: is the machine busy?")

// Measure runs all arms at real speed, at the same time: each has its own engines, all get each arrival within milliseconds of each other, and so whatever this machine
// does meanwhile hits all alike. The report pools the requests of the runs.
func Measure(ctx context.Context, m Measurement) (*Report, error) {
	if err := m.complete(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, m.Within, errTime)
	defer cancel()
	report, err := m.run(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		return nil, fmt.Errorf("%w (%w)", cause, err)
	}
	return report, err
}

func (m *Measurement) complete() error {
	requests := m.Requests
	if err := m.Params.complete(); err != nil {
		return err
	}
	if m.Runs == 0 {
		m.Runs = 1
	}
	if m.Runs < 1 || m.Runs > 100 {
		return fmt.Errorf("runs is %d, it must be from 1 to 100", m.Runs)
	}
	if m.Within == 0 {
		m.Within = measureWithin
	}
	left := m.Within - startTakes - stopTakes - m.drainTakes()
	fit := int(left.Seconds() * m.Rate / float64(m.Runs))
	if fit < 1 {
		return fmt.Errorf("time is %s, in which no requests can be measured", m.Within)
	}
	if requests > fit {
		return fmt.Errorf("requests is %d in each of %d runs, which at %g a second must be at most %d to end within %s", requests, m.Runs, m.Rate, fit, m.Within)
	}
	m.Requests = requests
	if requests == 0 {
		m.Requests = fit
	}
	if len(m.Program) == 0 {
		program, err := os.Executable()
		if err != nil {
			return fmt.Errorf("finding this program, which runs the engines: %w", err)
		}
		m.Program = []string{program}
	}
	if m.Say == nil {
		m.Say = func(string) {}
	}
	if m.Log == nil {
		m.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// recording is what all arms get: the workloads of the runs, one after the other.
type recording struct {
	workloads []*Workload
	begins    []time.Duration // of each, and the end of the last
	limit     int             // on an answer's tokens, which each request names
}

func (m *Measurement) record() (*recording, error) {
	r := &recording{begins: []time.Duration{0}}
	for i := range m.Runs {
		p := m.Params
		p.Seed += uint64(i)
		w, err := NewWorkload(p)
		if err != nil {
			return nil, err
		}
		r.workloads = append(r.workloads, w)
		for _, a := range w.Arrivals {
			r.limit = max(r.limit, a.Output)
		}
		r.begins = append(r.begins, r.begins[i]+w.Arrivals[len(w.Arrivals)-1].At)
	}
	return r, nil
}

func (r *recording) length() time.Duration { return r.begins[len(r.begins)-1] }

// arm is one policy with its own engines.
type arm struct {
	policy  Policy
	late    time.Duration // behind the first arm
	engines []*liveEngine
	front   liveFront
	runs    []*Run
	// sentLate is by how much each request was sent after its time: what this machine was too busy for.
	sentLate []time.Duration
}

// liveFront is what stands between the clients and an arm's engines.
type liveFront interface {
	// url is where the OpenAI routes are.
	url() string
	// ready is nil when requests can come.
	ready() error
	// close ends it, with all that it started.
	close() error
}

func (m *Measurement) run(ctx context.Context) (_ *Report, err error) {
	begun := time.Now()
	rec, err := m.record()
	if err != nil {
		return nil, err
	}
	fleet := newFleet(ctx, m.Program)
	defer func() { err = errors.Join(err, fleet.close()) }()
	arms, err := m.start(ctx, rec, fleet)
	defer func() {
		for _, a := range arms {
			if a.front != nil {
				err = errors.Join(err, a.front.close())
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}}
	defer client.CloseIdleConnections()
	m.Say("engines and arms are ready")
	if err := warmUp(ctx, client, arms); err != nil {
		return nil, err
	}
	m.Say(fmt.Sprintf("%d requests to each arm, in %.0f s", m.Requests*m.Runs, rec.length().Seconds()))
	if err := m.replay(ctx, client, rec, arms); err != nil {
		return nil, err
	}
	if err := fleet.check(); err != nil {
		return nil, err
	}
	runs := Runs{}
	var late []time.Duration
	for _, a := range arms {
		runs[a.policy] = a.runs
		late = append(late, a.sentLate...)
	}
	slices.Sort(late)
	m.Say(fmt.Sprintf("all answers are there; one request in a hundred was sent over %.0f ms late", ms(late, 0.99)))
	if ms(late, 0.99) > busyLate {
		m.Say("so this machine was too busy: every hop took such times too, and Millrace's way has the most hops")
	}
	r := &Report{Workload: m.Shape, Variant: m.Variant, Rate: m.Rate, Requests: m.Requests}
	r.Pool(runs)
	r.Seconds = time.Since(begun).Seconds()
	return r, nil
}

// start starts the engines of all arms, and the arms. It returns also those arms that it made before an error.
func (m *Measurement) start(ctx context.Context, rec *recording, f *liveFleet) ([]*arm, error) {
	var arms []*arm
	g, starting := errgroup.WithContext(ctx)
	for i, p := range Policies() {
		a := &arm{policy: p, late: time.Duration(i) * stagger, engines: make([]*liveEngine, len(rec.workloads[0].Engines))}
		arms = append(arms, a)
		for k, e := range rec.workloads[0].Engines {
			g.Go(func() (err error) {
				a.engines[k], err = f.start(starting, e)
				return err
			})
		}
	}
	if err := g.Wait(); err != nil {
		return arms, err
	}
	for _, a := range arms {
		var err error
		if a.policy == Millrace {
			a.front, err = newMillraceFront(ctx, m, a.engines)
		} else {
			a.front, err = newProxyFront(ctx, a.policy, a.engines, m.Seed)
		}
		if err != nil {
			return arms, fmt.Errorf("starting %s: %w", a.policy, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for _, a := range arms {
		for err := a.front.ready(); err != nil; err = a.front.ready() {
			if !sleep(ctx, 20*time.Millisecond) {
				return arms, fmt.Errorf("waiting for %s: %w", a.policy, err)
			}
		}
	}
	return arms, nil
}

// replay gives all arms the recorded arrivals at their times, and waits for the answers.
func (m *Measurement) replay(ctx context.Context, client *http.Client, rec *recording, arms []*arm) error {
	begun := time.Now().Add(100 * time.Millisecond)
	answers, cancel := context.WithDeadline(ctx, begun.Add(rec.length()+m.drainTakes()))
	defer cancel()
	g, replaying := errgroup.WithContext(ctx)
	var asked sync.WaitGroup
	for _, a := range arms {
		begun := begun.Add(a.late)
		for _, w := range rec.workloads {
			a.runs = append(a.runs, &Run{Samples: make([]Sample, len(w.Arrivals))})
		}
		g.Go(func() error { return m.arrivals(replaying, answers, client, rec, a, begun, &asked) })
		g.Go(func() error { return a.look(replaying, rec, begun) })
		for i := range a.engines {
			g.Go(func() error { return a.stall(replaying, rec, i, begun) })
		}
	}
	err := g.Wait()
	if err != nil {
		cancel()
	}
	asked.Wait()
	if err != nil {
		return err
	}
	for _, a := range arms {
		a.loads(ctx, stallFor+5*time.Second) // of engines that stand still, too
		a.runs[len(a.runs)-1].Preemptions = a.preemptions()
		for i := len(a.runs) - 1; i > 0; i-- { // counters so far become each run's own
			a.runs[i].Preemptions -= a.runs[i-1].Preemptions
		}
	}
	return context.Cause(ctx)
}

// arrivals sends each request at its time, whatever became of those before it. answers ends those that take too long.
func (m *Measurement) arrivals(ctx, answers context.Context, client *http.Client, rec *recording, a *arm, begun time.Time, asked *sync.WaitGroup) error {
	url, serial := a.front.url()+chatPath, warmUps
	for i, w := range rec.workloads {
		for k, r := range w.Arrivals {
			at := begun.Add(rec.begins[i] + r.At)
			if !sleep(ctx, time.Until(at)) {
				return context.Cause(ctx)
			}
			a.sentLate = append(a.sentLate, time.Since(at))
			serial++
			body, sample := body(serial, r.Prompt, r.Output, rec.limit), &a.runs[i].Samples[k]
			asked.Go(func() {
				s, err := ask(answers, client, url, body, at)
				if err != nil && answers.Err() == nil {
					m.Log.Warn("a request has no whole answer", "arm", a.policy, "err", err)
				}
				*sample = s
			})
		}
	}
	return nil
}

// look samples the spread of load each second until the last arrival, and the preemptions so far.
func (a *arm) look(ctx context.Context, rec *recording, begun time.Time) error {
	for i, run := range a.runs {
		looks := 0
		for at := rec.begins[i] + time.Second; at <= rec.begins[i+1]; at += time.Second {
			if !sleep(ctx, time.Until(begun.Add(at))) {
				return context.Cause(ctx)
			}
			var used []float64
			for _, l := range a.loads(ctx, readyWithin) {
				if l != nil {
					used = append(used, float64(l.Used())/float64(max(1, l.Capacity())))
				}
			}
			looks++
			run.LoadSpread += spread(used)
		}
		run.LoadSpread /= float64(max(1, looks))
		run.Preemptions = a.preemptions()
	}
	return nil
}

// stall freezes one engine when its recording says so.
func (a *arm) stall(ctx context.Context, rec *recording, engine int, begun time.Time) error {
	for i, w := range rec.workloads {
		for _, s := range w.Engines[engine].Stalls {
			if from := rec.begins[i] + s.From; from < rec.begins[i+1] {
				if !sleep(ctx, time.Until(begun.Add(from))) {
					return context.Cause(ctx)
				}
				if err := a.engines[engine].freeze(ctx, s.To-s.From); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// sleep waits, and returns whether ctx let it.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
