package scale

import (
	"time"

	"github.com/millrace/millrace/internal/job"
)

// All demand is in expected tokens: those of the prompt and of the answer that is expected. What workers get done is measured in the same.

// Sample is what is known of a pool and its demand at one moment.
type Sample struct {
	Now time.Time `json:"at"`
	// Unknown is why the demand cannot be told now: a reading that failed or is old. The last plan is kept then; "" is known.
	Unknown string `json:"unknown,omitempty"`
	// Waiting is accepted work that no worker has, by class: in the queue, in waiting lines, held calls, retries that are due later; without batch lines that are not queued.
	Waiting map[job.Class]Amount `json:"waiting,omitempty"`
	// InFlight is what workers have, delivered or running.
	InFlight Amount `json:"in_flight"`
	// Unfed is batch work that is not queued yet, by when it must be done.
	Unfed []Due `json:"unfed,omitempty"`
	// Workers are all that exist or were asked for.
	Workers []Worker `json:"workers,omitempty"`
	// Throughput is what one worker gets done when it is full, in tokens per second; 0 is unknown.
	Throughput float64 `json:"throughput"`
	// ColdStart is how long a start takes.
	ColdStart ColdStart `json:"cold_start"`
	// Failures counts the starts that failed in a row, RetryAt is when the next one may be tried; zero is now. Failure is what the last one said.
	Failures int       `json:"failures,omitempty"`
	RetryAt  time.Time `json:"retry_at,omitzero"`
	Failure  string    `json:"failure,omitempty"`
	// Limit is how many workers the provider had room for when it last refused one; 0 if it has not of late.
	Limit int `json:"limit,omitempty"`
}

// Amount is work.
type Amount struct {
	Jobs   int        `json:"jobs"`
	Tokens job.Tokens `json:"tokens"`
}

// Due is work with slack.
type Due struct {
	Amount
	By time.Time `json:"by"`
}

// ColdStart is how long starts take, from the order to the first job that could run. Samples is how many were measured; 0: the pool's own figure.
type ColdStart struct {
	P50     time.Duration `json:"p50"`
	P90     time.Duration `json:"p90"`
	Samples int           `json:"samples"`
}

// WorkerState is where a worker stands in its life, as the autoscaler sees it.
type WorkerState string

// The states. Starting lasts from the order until it was ready once. Away is one that was ready and is not (stalled, unready, silent), which may come back.
const (
	Starting WorkerState = "starting"
	Ready    WorkerState = "ready"
	Away     WorkerState = "away"
	Draining WorkerState = "draining"
)

// Worker is one of the pool.
type Worker struct {
	Name  string      `json:"name"`
	State WorkerState `json:"state"`
	// Since is when it was asked for, if it is starting; else when it became what it is.
	Since time.Time `json:"since"`
	// Jobs that it runs or has in hand.
	Jobs int `json:"jobs"`
	// IdleSince is since when it has had none; zero while it has some.
	IdleSince time.Time `json:"idle_since,omitzero"`
	// Yields: it takes only what the others have no room for.
	Yields bool `json:"yields,omitempty"`
}

// Arrivals is what came in during a while that began at Start: interactive and standard work, whether it was answered on its connection or not. Batch lines come when they are fed and are no arrivals.
type Arrivals struct {
	Start time.Time `json:"start"`
	Amount
	// Squares is the sum of the squares of each job's tokens: how much chance there is in Tokens. 0 is unknown.
	Squares float64 `json:"squares,omitempty"`
	// Heaped is how many of the tokens belong to heaps, as [Buckets] finds them: they promise no more.
	Heaped float64 `json:"heaped,omitempty"`
}

// History is what came before the sample.
type History struct {
	// Recent arrivals of the last ten minutes, one entry each Bucket without gaps, the oldest first; the last one ends with the last full second.
	Recent []Arrivals
	// Season is what was learned of hours and weekdays; nil is nothing.
	Season *Season
	// Wanted is Decision.Needed of each decision lately that knew its demand, the oldest first: for at least the pool's Cooldown, and without older ones than twice that. While it does not reach back so far nothing is removed.
	Wanted []Wanted
	// LastDemand is when there was any demand; zero is never.
	LastDemand time.Time
}

// Bucket is how long one entry of History.Recent lasts, RecentFor how far back they go.
const (
	Bucket    = 5 * time.Second
	RecentFor = 10 * time.Minute
)

// Wanted is how many workers were needed at a moment.
type Wanted struct {
	At time.Time `json:"at"`
	N  int       `json:"n"`
	// Trend is Forecast.Trend as it was seen then.
	Trend float64 `json:"trend,omitempty"`
}

// Decision is what is to be done about a pool, and why.
type Decision struct {
	At   time.Time `json:"at"`
	Pool string    `json:"pool"`
	// Needed is how many workers would do at this moment, within the pool's bounds: what History.Wanted is made of.
	Needed int `json:"needed"`
	// Want is how many there are to be: Needed, or more while that has not been enough for long. Start is how many are to be asked for now, Stop which are to drain and go.
	Want  int      `json:"want"`
	Start int      `json:"start"`
	Stop  []string `json:"stop,omitempty"`
	// Yield are those that are too many and busy: from now on they are to take only what the others have no room for, so that they come to be idle. All others take their share.
	Yield []string `json:"yield,omitempty"`
	// Action is what this is: see the constants. Reason says it in a sentence with its numbers.
	Action Action `json:"action"`
	Reason string `json:"reason"`
	// Forecast in tokens per second.
	Forecast Forecast `json:"forecast"`
	// Need is what each reason alone would have wanted.
	Need Need `json:"need"`
	// Sample that it was made of.
	Sample Sample `json:"sample"`

	// reserve is how many of those that the rate wants are headroom or spares.
	reserve int
}

// Action is what a decision does.
type Action string

// The actions. All but the first two change nothing, and say what keeps them from it.
const (
	ScaleUp     Action = "scale_up"
	ScaleDown   Action = "scale_down"
	Hold        Action = "hold"        // as many as wanted
	Cooling     Action = "cooldown"    // fewer would do, but not for long enough yet
	Busy        Action = "busy"        // fewer would do, but none has been idle for long enough
	AtMax       Action = "at_max"      // more would be better, but the pool's max is reached
	AtCapacity  Action = "at_capacity" // the provider has no room
	Unavailable Action = "unavailable" // starts fail
	Unknown     Action = "unknown"     // the demand cannot be read
)

// Forecast is the rate of arrivals that a decision reckons with, in tokens per second.
type Forecast struct {
	Now float64 `json:"now"`
	// Trend is where the trend leads within a cold start; 0 if there is no significant one. It counts as far as the look before saw it, too.
	Trend float64 `json:"trend"`
	// Season is what hour and weekday promise within a cold start; 0 if nothing was learned.
	Season float64 `json:"season"`
	// Used is the one that counts, without headroom.
	Used float64 `json:"used"`
}

// Need is how many workers each reason alone would have wanted.
type Need struct {
	Rate     int `json:"rate"`     // the forecast, with headroom or spares
	Backlog  int `json:"backlog"`  // the forecast, and what waits within its target wait
	Deadline int `json:"deadline"` // and batches within their windows
	Schedule int `json:"schedule"`
	Min      int `json:"min"`
}
