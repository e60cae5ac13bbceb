package scaling

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

// PolicyName is one of those that are compared.
type PolicyName string

// The policies.
const (
	// KEDA is its defaults: a worker for each ten that wait, looked at every 30 s, fewer after 300 s.
	KEDA PolicyName = "keda"
	// KEDATuned counts what runs too, and looks every 5 s.
	KEDATuned PolicyName = "keda-tuned"
	// Reactive is the present rate with 20 % headroom.
	Reactive PolicyName = "reactive"
	// TokenRate is the present rate in tokens, and the backlog done within 60 s.
	TokenRate PolicyName = "token-rate"
	// Trend is TokenRate on the rate that a significant trend leads to within a cold start.
	Trend PolicyName = "trend"
	// TrendSpare is Trend with two workers more.
	TrendSpare PolicyName = "trend-spare"
	// Holt is TokenRate on the rate that double exponential smoothing foretells, significant or not.
	Holt PolicyName = "holt"
	// Instant knows the rate of each moment as it is, but not what comes; it has two workers more than that needs, and all that there may be while anything waits. On a step nobody with as many spare who does not know the future waits less.
	Instant PolicyName = "instant"
	// Clairvoyant knows the rate of the next minute, and keeps the least margin over it with which nobody waits.
	Clairvoyant PolicyName = "clairvoyant"
	// Millrace is scale.Decide.
	Millrace PolicyName = "millrace"
)

// Policies returns all of them.
func Policies() []PolicyName {
	return []PolicyName{KEDA, KEDATuned, Reactive, TokenRate, Trend, TrendSpare, Holt, Instant, Clairvoyant, Millrace}
}

// mostWorkers that the references have at once. The study that their table comes from does not give it; it was fitted to that, together with the bursts and the figures below.
const mostWorkers = 30

// policy decides what is to be done.
type policy interface {
	decide(v *view) plan
}

// plan is how many workers would do, how many are to be started, which are to go, and which are to take only what the others have no room for.
type plan struct {
	needed, start int
	stop, yield   []string
	trend         float64 // that was seen, in tokens per second
}

// newPolicy returns a new one, for one run.
func newPolicy(name PolicyName, t *trace) policy {
	switch name {
	case KEDA:
		return &target{least: t.least, period: 30 * time.Second, next: kedaPhase, down: 300 * time.Second, gradual: true, want: func(v *view) float64 { return float64(v.queue) / 10 }}
	case KEDATuned:
		return &target{least: t.least, period: 5 * time.Second, down: 300 * time.Second, want: func(v *view) float64 { return float64(v.queue+v.running) / kedaPerWorker }}
	case Reactive:
		return rateBased(t, reactiveDown, func(v *view) float64 { return 1.2 * v.rate() / v.Throughput })
	case TokenRate:
		return rateBased(t, rateDown, func(v *view) float64 { return (rateMargin*v.rate() + v.backlog()/60) / v.Throughput })
	case Trend:
		return rateBased(t, rateDown, func(v *view) float64 { return (rateMargin*v.trend() + v.backlog()/60) / v.Throughput })
	case TrendSpare:
		return rateBased(t, rateDown, func(v *view) float64 { return 2 + (rateMargin*v.trend()+v.backlog()/60)/v.Throughput })
	case Holt:
		return rateBased(t, rateDown, func(v *view) float64 { return (rateMargin*v.holt() + v.backlog()/60) / v.Throughput })
	case Instant:
		return &target{least: t.least, down: rateDown, want: func(v *view) float64 {
			if v.Waiting[job.Interactive].Jobs > 0 {
				return mostWorkers
			}
			return 2 + float64(whole(t.at(v.now)/fullRate))
		}}
	case Clairvoyant:
		return &clairvoyant{trace: t, margin: 1}
	default:
		return millrace{}
	}
}

// Fitted, as mostWorkers.
const (
	kedaPhase     = 3 * time.Second // when it looks first
	kedaPerWorker = 16
	ratePeriod    = 2 * time.Second
	reactiveDown  = 100 * time.Second // for how long fewer must have done until some go
	rateDown      = 66 * time.Second
	rateMargin    = 1.26
	trendBuckets  = 7
	trendErrors   = 2.2 // standard errors of a significant slope
	lookahead     = 25 * time.Second
	holtLevel     = 0.9
	holtSlope     = 0.43
)

func rateBased(t *trace, down time.Duration, want func(v *view) float64) *target {
	return &target{least: t.least, period: ratePeriod, down: down, want: want}
}

// view is what a policy sees.
type view struct {
	scale.Sample
	// history is what came before, for those who ask.
	history func() scale.History
	pool    *scale.Pool
	// now is the time since the start.
	now time.Duration
	// queue is how many wait, lines of a batch that are not fed among them; running is how many run.
	queue, running int
	// live is how many workers there are, without those that go.
	live int
	// arrived is how many tokens came in each bucket since the start: what the references reckon with, apart from Millrace's own history.
	arrived []float64
}

// bucket is how long one entry of arrived lasts, in seconds.
const bucket = 5

// backlog is what waits, in tokens.
func (v *view) backlog() float64 {
	var sum float64
	for _, a := range v.Waiting {
		sum += float64(a.Tokens)
	}
	for _, d := range v.Unfed {
		sum += float64(d.Tokens)
	}
	return sum
}

// rate is that of the last bucket, in tokens a second.
func (v *view) rate() float64 {
	if len(v.arrived) == 0 {
		return 0
	}
	return v.arrived[len(v.arrived)-1] / bucket
}

// trend is where a straight line through the last buckets leads within a cold start, if it is significantly steep; else the present rate.
func (v *view) trend() float64 {
	now := v.rate()
	if len(v.arrived) < trendBuckets {
		return now
	}
	recent := v.arrived[len(v.arrived)-trendBuckets:]
	const mid = float64(trendBuckets-1) / 2
	var mean, slope, sxx, squares float64
	for i, y := range recent {
		x := float64(i) - mid
		mean += y / trendBuckets
		slope += x * y
		sxx += x * x
	}
	slope /= sxx
	for i, y := range recent {
		e := y - mean - slope*(float64(i)-mid)
		squares += e * e
	}
	if slope < trendErrors*math.Sqrt(squares/(trendBuckets-2)/sxx) {
		return now
	}
	return max(now, (mean+slope*(mid+v.ahead()))/bucket)
}

// ahead is for how many buckets is planned.
func (v *view) ahead() float64 { return (v.ColdStart.P50 + lookahead).Seconds() / bucket }

// holt is double exponential smoothing over the last ten minutes, as far ahead.
func (v *view) holt() float64 {
	recent := v.arrived[max(0, len(v.arrived)-120):]
	if len(recent) == 0 {
		return 0
	}
	level, slope := recent[0], 0.0
	for _, y := range recent[1:] {
		before := level
		level = holtLevel*y + (1-holtLevel)*(level+slope)
		slope = holtSlope*(level-before) + (1-holtSlope)*slope
	}
	return max(0, level+slope*v.ahead()) / bucket
}

// target is a policy that knows how many workers it wants: more at once, fewer when no more were wanted for a while.
type target struct {
	want         func(v *view) float64
	least        int
	period, next time.Duration
	down         time.Duration
	gradual      bool // at most four more, or twice as many, each 15 s, as a HorizontalPodAutoscaler does
	wanted       []scale.Wanted
	sizes        []scale.Wanted
}

func (t *target) decide(v *view) plan {
	if v.now < t.next {
		return plan{}
	}
	t.next = v.now + t.period
	want := min(max(whole(t.want(v)), t.least), mostWorkers)
	if t.gradual {
		t.sizes = lately(t.sizes, v.Now, v.live, 15*time.Second)
		want = min(want, max(2*t.sizes[0].N, t.sizes[0].N+4))
	}
	t.wanted = lately(t.wanted, v.Now, want, t.down)
	return resize(v, want, t.wanted)
}

// lately adds n, and forgets what is older than a while.
func lately(all []scale.Wanted, now time.Time, n int, long time.Duration) []scale.Wanted {
	all = append(all, scale.Wanted{At: now, N: n})
	for now.Sub(all[0].At) > long {
		all = all[1:]
	}
	return all
}

// whole workers do so much.
func whole(workers float64) int { return int(math.Ceil(workers - 1e-9)) }

// resize turns how many are wanted into what is to be done. As many stay as were wanted at any time in wanted.
func resize(v *view, want int, wanted []scale.Wanted) plan {
	if want >= v.live {
		return plan{needed: want, start: want - v.live}
	}
	keep := want
	for _, w := range wanted {
		keep = max(keep, w.N)
	}
	if keep >= v.live {
		return plan{needed: want}
	}
	// First those that start, then those with the least to do, of these the youngest.
	all := slices.DeleteFunc(slices.Clone(v.Workers), func(w scale.Worker) bool { return w.State == scale.Draining })
	slices.SortStableFunc(all, func(a, b scale.Worker) int {
		return cmp.Or(cmp.Compare(stage(a), stage(b)), cmp.Compare(a.Jobs, b.Jobs), b.Since.Compare(a.Since))
	})
	p := plan{needed: want}
	for _, w := range all[:v.live-keep] {
		p.stop = append(p.stop, w.Name)
	}
	return p
}

func stage(w scale.Worker) int {
	if w.State == scale.Starting {
		return 0
	}
	return 1
}

// clairvoyant has, at any time, what the rate of the next cold start needs, with a margin against chance.
type clairvoyant struct {
	trace  *trace
	margin float64
}

// foresight is more than any start takes.
const foresight = 53 * time.Second

func (c *clairvoyant) decide(v *view) plan {
	most := max(c.trace.at(v.now), c.trace.at(v.now+foresight))
	for _, p := range c.trace.rate {
		if p.at >= v.now && p.at <= v.now+foresight {
			most = max(most, p.rate)
		}
	}
	return resize(v, max(whole(most*c.margin/fullRate), c.trace.least), nil)
}

// millrace is the autoscaler's own decision.
type millrace struct{}

func (millrace) decide(v *view) plan {
	d := scale.Decide(v.Sample, v.history(), v.pool)
	return plan{needed: d.Needed, start: d.Start, stop: d.Stop, yield: d.Yield, trend: d.Forecast.Trend}
}
