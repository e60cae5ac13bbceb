package scaling

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/millrace/millrace/bench/workload"
	"github.com/millrace/millrace/internal/job"
)

// TraceName is one of the recorded loads.
type TraceName string

// The traces.
const (
	// Step is a burst of twenty times the load, all at once.
	Step TraceName = "step"
	// Ramp120 and Ramp600 reach the same in that many seconds.
	Ramp120 TraceName = "ramp120"
	Ramp600 TraceName = "ramp600"
	// Square is load that comes and goes, with a period below the cool-down.
	Square TraceName = "square"
	// Week is seven days with a burst each weekday's morning.
	Week TraceName = "week"
	// Batch is a batch with eight hours to spare, beside load that leaves its workers time.
	Batch TraceName = "batch"
)

// Traces returns all of them.
func Traces() []TraceName { return []TraceName{Step, Ramp120, Ramp600, Square, Week, Batch} }

// point is where the rate of arrivals bends: it runs straight from one point to the next. Two points of one time are a step.
type point struct {
	at   time.Duration
	rate float64 // requests a second
}

// trace is a load without its randomness.
type trace struct {
	name  TraceName
	start time.Time
	rate  []point // the first at 0, the last at the end
	// warm is how much at the beginning is not counted, so that a policy has seen the usual load when it is judged.
	warm time.Duration
	// tick is the period of the autoscaler.
	tick time.Duration
	// lines of a batch that comes at batchAt and must be done at due.
	lines        int
	batchAt, due time.Duration
	// workers that there are at the beginning.
	workers int
	// least workers of the references.
	least int
	// days: it is reported by the day.
	days bool
}

func (t *trace) end() time.Duration { return t.rate[len(t.rate)-1].at }

// at is the rate at a time.
func (t *trace) at(d time.Duration) float64 {
	i, _ := slices.BinarySearchFunc(t.rate, d, func(p point, d time.Duration) int {
		if p.at <= d {
			return -1
		}
		return 1
	})
	switch {
	case i == 0:
		return t.rate[0].rate
	case i == len(t.rate):
		return t.rate[len(t.rate)-1].rate
	}
	a, b := t.rate[i-1], t.rate[i]
	return a.rate + (b.rate-a.rate)*(d-a.at).Seconds()/(b.at-a.at).Seconds()
}

// request is one that arrives.
type request struct {
	at             float64 // seconds since the start
	prompt, output int32   // tokens
}

// size of the load's prompts and answers.
const shape = workload.ChatLike

// requests draws the arrivals: a Poisson process of the trace's rate, and log-normal lengths. Equal seeds give equal ones.
func (t *trace) requests(seed uint64) []request {
	gaps, lengths := rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
	var all []request
	for i := 1; i < len(t.rate); i++ {
		a, b := t.rate[i-1], t.rate[i]
		most, long := max(a.rate, b.rate), (b.at - a.at).Seconds()
		if long == 0 || most == 0 {
			continue
		}
		for at := gaps.ExpFloat64() / most; at < long; at += gaps.ExpFloat64() / most {
			// Thinning: of the points of a faster process the share that the rate is of its own is kept.
			if a.rate != b.rate && gaps.Float64()*most > a.rate+(b.rate-a.rate)*at/long {
				continue
			}
			prompt, output := shape.Lengths(lengths)
			all = append(all, request{at: a.at.Seconds() + at, prompt: int32(prompt), output: int32(output)})
		}
	}
	return all
}

// expected is what a request is expected to need in all, in tokens: its prompt, and an answer as long as they are on average.
func (r *request) expected() job.Tokens { return job.Tokens(r.prompt) + meanOutput }

// growth of a burst.
const growth = 20

// monday is when traces begin: a Monday, at midnight UTC.
var monday = time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC)

// newTrace makes one of them.
func newTrace(name TraceName) *trace {
	switch name {
	case Step:
		return burstOf(name, 0, 270*time.Second, 500*time.Second)
	case Ramp120:
		return burstOf(name, 120*time.Second, 190*time.Second, 500*time.Second)
	case Ramp600:
		return burstOf(name, 600*time.Second, 130*time.Second, 60*time.Second)
	case Square:
		t := &trace{name: name, start: monday, warm: 10 * time.Minute, tick: time.Second, workers: 3, least: 1, rate: []point{{0, 2}, {10 * time.Minute, 2}}}
		for at := 10 * time.Minute; at < 50*time.Minute; at += 40 * time.Second {
			t.rate = append(t.rate, point{at, 12}, point{at + 20*time.Second, 12}, point{at + 20*time.Second, 2}, point{at + 40*time.Second, 2})
		}
		return t
	case Week:
		t := &trace{name: name, start: monday, tick: 5 * time.Second, workers: 2, least: 1, days: true}
		hour := func(day int, h float64) time.Duration {
			return time.Duration((float64(day)*24 + h) * float64(time.Hour))
		}
		for day := range 7 {
			t.rate = append(t.rate, point{hour(day, 0), 0.3}, point{hour(day, 7), 0.3})
			if day < 5 {
				t.rate = append(t.rate, point{hour(day, 8), 1}, point{hour(day, 9), 1}, point{hour(day, 9) + 30*time.Second, 20}, point{hour(day, 9) + 20*time.Minute, 20}, point{hour(day, 9) + 20*time.Minute, 2}, point{hour(day, 17), 2})
			} else {
				t.rate = append(t.rate, point{hour(day, 10), 0.6}, point{hour(day, 20), 0.6})
			}
			t.rate = append(t.rate, point{hour(day, 21), 0.3}, point{hour(day, 24), 0.3})
		}
		return t
	default: // Batch
		return &trace{
			name: Batch, start: monday, warm: 10 * time.Minute, tick: time.Second, workers: 3, least: 1, rate: []point{{0, 2}, {150 * time.Minute, 2}},
			lines: 15_000, batchAt: 20 * time.Minute, due: 20*time.Minute + 8*time.Hour,
		}
	}
}

// burstOf is load that grows twentyfold within a ramp, stays so for a while, and falls back at once. The references' table was made with such ones; its rate, lengths and calm were fitted to it.
func burstOf(name TraceName, ramp, hold, calm time.Duration) *trace {
	const base = 2.8
	t := &trace{name: name, start: monday, warm: 10 * time.Minute, tick: time.Second, workers: 2, least: 2}
	up := t.warm + 10*time.Minute
	down := up + ramp + hold
	t.rate = []point{{0, base}, {up, base}, {up + ramp, growth * base}, {down, growth * base}, {down, base}, {down + calm, base}}
	return t
}
