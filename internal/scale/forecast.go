package scale

import (
	"math"
	"slices"
	"time"
)

const (
	// significant is how many standard errors a change must be away from chance.
	significant = 3
	// worth is by how much a change must lessen the sum of squares, in variances, and doubt how much more if only one full bucket tells of it.
	worth, doubt = 10, 4
	// lasting is for how many times as long as it lasted so far a ramp is expected to go on.
	lasting = 9
	// shortest is how many buckets must have passed since a change before it can be a ramp: two points always lie on a line.
	shortest = 3
	// near is the share of a rate from which on another one is like it.
	near = 0.5
	// regular is how many heaps of one size there must be for more of them to be expected.
	regular = 5
	// window is how many buckets a forecast from the recent past looks at.
	window = 24
	// sizeSpread is E[X^2]/E[X]^2 of a job's tokens where the squares are not known: that of an exponential distribution.
	sizeSpread = 2
)

// rates are the arrivals of the last buckets in tokens per second, with the variance of each.
//
// Arrivals are taken to be a compound Poisson process: jobs come by chance, each with its tokens X. The sum of a bucket then has the variance n E[X^2], of which the sum of squares is an estimate without bias. As the
// estimate of one bucket is rough, E[X^2] is taken over all of them.
type rates struct {
	y     []float64 // tokens per second, without heaps
	often float64   // tokens per second of heaps that keep coming
	size  float64   // E[X^2]/E[X], tokens: a rate's variance over T seconds is size x rate / T
}

func newRates(recent []Arrivals) rates {
	if len(recent) > window {
		recent = recent[len(recent)-window:]
	}
	r := rates{y: make([]float64, len(recent))}
	var jobs, tokens, squares, heaped, heapSquares float64
	for i, a := range recent {
		heaped += a.Heaped
		heapSquares += a.Heaped * a.Heaped
		if a.Tokens == 0 {
			continue
		}
		rest := float64(a.Tokens) - a.Heaped
		r.y[i] = rest / Bucket.Seconds()
		jobs += float64(a.Jobs) * rest / float64(a.Tokens)
		tokens += rest
		squares += a.Squares * rest / float64(a.Tokens)
	}
	r.size = sizeOf(jobs, tokens, squares)
	if heaped*heaped > regular*heapSquares {
		r.often = heaped / (float64(len(recent)) * Bucket.Seconds())
	}
	return r
}

// sizeOf is E[X^2]/E[X] of some jobs.
func sizeOf(jobs, tokens, squares float64) float64 {
	switch {
	case tokens == 0:
		return 0
	case squares > 0:
		return squares / tokens
	default:
		return sizeSpread * tokens / max(jobs, 1)
	}
}

// differ tells whether two means of so many buckets are further apart than chance would have them if both had the rate a.
func (r rates) differ(a float64, n int, b float64, m int) bool {
	return math.Abs(b-a) > significant*math.Sqrt(r.variance(a, n)+r.variance(a, m))
}

// variance of the mean of n buckets whose true rate is rate.
func (r rates) variance(rate float64, n int) float64 {
	return r.size * max(rate, r.size/(float64(n)*Bucket.Seconds())) / (float64(n) * Bucket.Seconds())
}

// forecast is the rate now, of heaps that keep coming, too, and where it leads until ahead: trend is 0 if there is no significant one.
func (r rates) forecast(ahead time.Duration) (now, trend float64) {
	if now, trend = r.leads(ahead); trend > 0 {
		trend += r.often
	}
	return now + r.often, trend
}

// leads is the rate now without heaps, and where it leads until ahead: trend is 0 if there is no significant one.
//
// The recent past is taken for a level that changed once: into another level, or into a ramp that begins there. The change is put where that explains most. So a step is not taken for the beginning of an endless climb,
// and what came before a change does not dilute what came after it. A change must be worth it: chance alone makes some.
func (r rates) leads(ahead time.Duration) (now, trend float64) {
	n := len(r.y)
	if n == 0 || r.size == 0 { // nothing came
		return 0, 0
	}
	best := fit{level: mean(r.y)}
	best.cost, best.good = r.misfit(r.y, func(int) float64 { return best.level })
	if n >= shortest { // the change may lie before all that is seen
		f := line(r.y)
		if f.cost, f.good = r.misfit(r.y, f.expects); f.good && f.cost+worth < best.cost {
			f.cost += worth
			best = f
		}
	}
	for i := 1; i < n; i++ { // the change is in the bucket i
		before := mean(r.y[:i])
		past, _ := r.misfit(r.y[:i], func(int) float64 { return before })
		for _, f := range []fit{r.step(i, before), r.ramp(i, before)} {
			if f.cost += past; f.good && (f.cost < best.cost || !best.good) {
				best = f
			}
		}
	}
	switch {
	case !best.good: // it jumps to and fro
		last := slices.Sorted(slices.Values(r.y[max(0, n-5):]))
		return last[len(last)/2], 0
	case best.slope == 0:
		return best.level, 0
	}
	steps := float64(n - best.at)
	far := min(ahead.Seconds()/Bucket.Seconds(), lasting*steps)
	now, trend = max(0, best.level+best.slope*steps), max(0, best.level+best.slope*(steps+far))
	if top := highest(r.y[:best.at]); top > near*now { // it comes back to where it was, and no further as far as is known
		trend = min(trend, max(now, top))
	}
	return now, trend
}

// fit is what the recent past may have been: from the bucket at on, a level, or a ramp that leaves the level by slope each bucket.
type fit struct {
	at           int
	level, slope float64
	cost         float64 // the sum of squares, in variances, and what the change must be worth
	good         bool    // chance explains what is left since the change
}

// step is the fit of a level that changed in the bucket i, which may have some of both, into another one. It is not good if that is not surely another.
func (r rates) step(i int, before float64) fit {
	after := r.y[i+1:]
	f := fit{at: i}
	if len(after) == 0 {
		return f
	}
	f.level = mean(after)
	if !r.differ(before, i, f.level, len(after)) {
		return f
	}
	f.cost, f.good = r.misfit(after, f.expects)
	between := min(max(r.y[i], min(before, f.level)), max(before, f.level))
	first, changes := r.misfit(r.y[i:i+1], func(int) float64 { return between })
	f.cost, f.good = f.cost+first+worth, f.good && changes
	if len(after) == 1 { // there are many chances for chance to make such a one
		f.cost += doubt
	}
	return f
}

// ramp is the fit of a level that is left from the bucket i on in a straight line.
func (r rates) ramp(i int, before float64) fit {
	after := r.y[i:]
	f := fit{at: i, level: before}
	if len(after) < shortest || !r.differ(before, i, mean(after), len(after)) {
		return f
	}
	f.slope = kink(after, before)
	f.cost, f.good = r.misfit(after, f.expects)
	f.cost += worth
	return f
}

// expects is the rate that the fit expects in the bucket k behind the change.
func (f *fit) expects(k int) float64 { return max(0, f.level+f.slope*(float64(k)+0.5)) }

// line is the straight line through all of y.
func line(y []float64) fit {
	center, m := float64(len(y))/2, mean(y)
	var sxy, sxx float64
	for i, v := range y {
		x := float64(i) + 0.5 - center
		sxy += x * (v - m)
		sxx += x * x
	}
	slope := sxy / sxx
	return fit{level: m - slope*center, slope: slope}
}

// misfit is the sum of the squares by which y differs from what is expected, in variances, and whether chance explains it.
func (r rates) misfit(y []float64, expected func(int) float64) (sum float64, good bool) {
	for i, v := range y {
		e := expected(i)
		sum += (v - e) * (v - e) / max(r.variance(e, 1), 1e-9)
	}
	k := float64(len(y))
	return sum, sum <= k+significant*math.Sqrt(2*k)+significant*significant
}

// kink is the slope of the line through y that begins at level.
func kink(y []float64, level float64) float64 {
	var sxy, sxx float64
	for i, v := range y {
		x := float64(i) + 0.5
		sxy += x * (v - level)
		sxx += x * x
	}
	return sxy / sxx
}

// highest is the highest mean of three buckets in a row.
func highest(y []float64) (top float64) {
	for ; len(y) >= 3; y = y[1:] {
		top = max(top, mean(y[:3]))
	}
	return top
}

func mean(y []float64) float64 {
	var sum float64
	for _, v := range y {
		sum += v
	}
	return sum / float64(len(y))
}
