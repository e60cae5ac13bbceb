package scale

import (
	"math"
	"time"
)

const (
	// moment is over how many seconds a heap may lie: what comes within one second is told by two heartbeats, each of which may lie across two.
	moment = 3
	// around is how many seconds before a heap, and after it, say what the rate is there.
	around = 10
	// apart is how many standard errors a moment must be away from what is around it: there are many moments, and chance makes some.
	apart = 4
	// evenly is over how many seconds, at least, the tokens of the last bucket must have come, if they had come evenly, for a rate: (sum x)^2 / sum x^2 of the seconds' tokens.
	evenly = 2.7
)

// heaps returns how many of each second's tokens belong to a heap: jobs that came within a moment, as of a program that submits what it has.
//
// A moment is a heap if more came in it than chance explains, by the rate before it and by the rate after it: of the rise of a rate, what comes after tells. While nothing came after, what is in the last bucket is a heap if
// it came within less than some seconds. Of a heap as much counts as a rate as came around it, and one job more: it is one event, however many jobs it has.
func heaps(seconds []Arrivals) []float64 {
	n := len(seconds)
	heaped := make([]float64, n)
	tokens, jobs, squares := make([]float64, n+1), 0.0, 0.0 // tokens until each second
	for i, s := range seconds {
		tokens[i+1] = tokens[i] + float64(s.Tokens)
		jobs += float64(s.Jobs)
		squares += s.Squares
	}
	size := sizeOf(jobs, tokens[n], squares)
	if size == 0 {
		return heaped
	}
	// sticksOut tells whether more came in some seconds than chance explains by the rate of others, and what that is.
	sticksOut := func(from, to, a, b int, errors float64) (rate float64, out bool) {
		if a = max(a, 0); a >= b {
			return 0, false
		}
		long, other := float64(to-from), float64(b-a)
		rate = (tokens[b] - tokens[a]) / other
		variance := size * long * max(rate, size/around) * (1 + long/other)
		return rate, tokens[to]-tokens[from]-long*rate > errors*math.Sqrt(variance)
	}
	clip := func(from, to int, rate float64) {
		rate += size / float64(to-from)
		for i := from; i < to; i++ {
			heaped[i] = max(heaped[i], float64(seconds[i].Tokens)-rate)
		}
	}
	for i := 0; i+moment < n; i++ {
		before, out := sticksOut(i, i+moment, i-around, i, apart)
		if !out {
			continue
		}
		if after, out := sticksOut(i, i+moment, i+moment, min(n, i+moment+around), apart); out {
			clip(i, i+moment, max(before, after))
		}
	}
	const long = int(Bucket / time.Second)
	if n <= long {
		return heaped
	}
	before, out := sticksOut(n-long, n, n-long-around, n-long, significant)
	if !out {
		return heaped
	}
	var sum, sumOfSquares float64 // of what came beyond
	for _, s := range seconds[n-long:] {
		more := max(0, float64(s.Tokens)-before)
		sum += more
		sumOfSquares += more * more
	}
	if sum*sum < evenly*sumOfSquares {
		clip(n-long, n, before)
	}
	return heaped
}
