package admission

import (
	"fmt"
	"math"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// BusyAt is the load of a worker, as its heartbeat tells it, above which it counts as busy.
const BusyAt = 0.8

// Pressure is what is measured of a model's workers, and of the work that goes before a new call. Zero is no pressure.
type Pressure struct {
	// Ready workers, and how many of them are busy.
	Ready, Busy int
	// Ahead is how many tokens wait before the call, Rate how many the workers get done per second; 0 is unknown.
	Ahead job.Tokens
	Rate  float64
	// TTFT is the least time to the first token that a worker expects, 0 if none tells.
	TTFT time.Duration
}

// Wait is how long a new call is expected to wait for its first token; false where nothing is known: a worker has room, none is there to be measured, or none has been measured yet.
func (p Pressure) Wait() (time.Duration, bool) {
	if p.Ready == 0 || p.Busy < p.Ready || !(p.Rate > 0) {
		return 0, false
	}
	return Drain(p.Ahead, p.Rate) + p.TTFT, true
}

// Drain is how long tokens take at rate tokens per second, at most a year.
func Drain(tokens job.Tokens, rate float64) time.Duration {
	const most = 365 * 24 * time.Hour
	seconds := float64(max(0, tokens)) / rate
	if seconds >= most.Seconds() {
		return most
	}
	return time.Duration(seconds * float64(time.Second))
}

// overload refuses a call that would wait for longer than most, when all ready workers are busy. No ready worker at all is no overload: a call then waits for one.
func overload(m job.Model, p Pressure, most time.Duration) (Decision, bool) {
	wait, known := p.Wait()
	if most <= 0 || !known || wait <= most {
		return Decision{}, false
	}
	after := wait - most
	workers := fmt.Sprintf("All %d ready workers of %.100q are", p.Ready, m)
	if p.Ready == 1 {
		workers = fmt.Sprintf("The one ready worker of %.100q is", m)
	}
	return Decision{After: after, Refuse: refusal(job.TypeRateLimit, job.CodeRateLimit, "", fmt.Sprintf(
		"%s over %.0f %% loaded, and about %d tokens wait, of which %s are done per second: this call would wait about %.0f s, and at most %.0f s are allowed. Try again in about %.0f s, or send it as a job, which may wait.",
		workers, BusyAt*100, p.Ahead, perSecond(p.Rate), wait.Seconds(), most.Seconds(), math.Ceil(after.Seconds()),
	))}, true
}

// perSecond is a rate as people read it.
func perSecond(rate float64) string {
	if rate < 10 {
		return fmt.Sprintf("%.1f", rate)
	}
	return fmt.Sprintf("%.0f", rate)
}
