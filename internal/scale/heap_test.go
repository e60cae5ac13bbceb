package scale_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

// heapOf are the seconds of ten minutes until so long after a heap began, over which its jobs are shared out; besides, two jobs of 450 tokens come each second if steady.
func heapOf(jobs int, tokens float64, parts []float64, after int, steady bool) []scale.Arrivals {
	seconds := make([]scale.Arrivals, 600)
	for i := range seconds {
		s := &seconds[i]
		s.Start = noon.Add(time.Duration(i-len(seconds)) * time.Second)
		if steady {
			s.Amount, s.Squares = scale.Amount{Jobs: 2, Tokens: 900}, 2*450*450
		}
		if k := i - (len(seconds) - after); k >= 0 && k < len(parts) {
			share := parts[k] * float64(jobs)
			s.Jobs += int(math.Round(share))
			s.Tokens += job.Tokens(math.Round(share * tokens))
			s.Squares += share * tokens * tokens
		}
	}
	return seconds
}

// TestAHeapPromisesNoMore: jobs that come within a moment are worth what their tokens need within the time that they may wait, and nothing once they are done, wherever seconds and buckets begin.
func TestAHeapPromisesNoMore(t *testing.T) {
	t.Parallel()
	rates := []float64{300, 900, 3000, 20_000} // of a worker
	p := aPool(t, "max: 1000")
	idle := func(rate float64) scale.Sample {
		s := aSample(some(1, scale.Ready, time.Hour, 0)...)
		s.Throughput = rate
		return s
	}
	for _, steady := range []bool{false, true} {
		usual := map[float64]int{}
		for _, rate := range rates {
			if usual[rate] = 1; steady { // one more, as a heap counts as a job
				usual[rate] = 1 + scale.Decide(idle(rate), scale.History{Recent: scale.Buckets(nil, heapOf(0, 0, nil, 0, true))}, p).Needed
			}
		}
		for _, jobs := range []int{1, 2, 3, 4, 9, 15, 20, 50, 200, 500} {
			for _, tokens := range []float64{100, 900, 8000} {
				for _, parts := range [][]float64{{1}, {0.9, 0.1}, {0.5, 0.5}, {0.1, 0.9}, {0.35, 0.5, 0.15}} {
					name := fmt.Sprintf("%d jobs of %g tokens, shared out as %v, others: %t", jobs, tokens, parts, steady)
					var h scale.History
					for age := 1; age <= 125; age++ {
						if age > 18 && age%9 != 0 {
							continue
						}
						h.Recent = scale.Buckets(nil, heapOf(jobs, tokens, parts, age, steady))
						var trend float64
						for _, rate := range rates {
							s := idle(rate)
							d := scale.Decide(s, h, p)
							if d.Needed > usual[rate] {
								t.Errorf("%s: %d s later all is done, and %d workers of %g tokens/s are needed, want %d: %s", name, age, d.Needed, rate, usual[rate], d.Reason)
							}
							trend = d.Forecast.Trend
							all := float64(jobs) * tokens
							s.Waiting[job.Interactive] = scale.Amount{Jobs: jobs, Tokens: job.Tokens(all)}
							if d := scale.Decide(s, h, p); age <= 18 && d.Needed > usual[rate]+int(math.Ceil(all/rate/s.ColdStart.P50.Seconds())) {
								t.Errorf("%s: %d s later all of it waits, and %d workers of %g tokens/s are needed: %s", name, age, d.Needed, rate, d.Reason)
							}
						}
						h.Wanted = []scale.Wanted{{At: noon.Add(-time.Second), Trend: trend}} // the look before saw it, too
					}
				}
			}
		}
	}
}

// TestHeapsThatKeepComingAreARate: after some minutes there are about as many workers as for the same jobs if they came evenly, and no more and no fewer from one look to the next.
func TestHeapsThatKeepComingAreARate(t *testing.T) {
	t.Parallel()
	p := aPool(t, "max: 1000")
	for _, every := range []int{8, 15, 20} {
		for now := range every {
			seconds := heapOf(0, 0, nil, 0, false)
			for i := range seconds {
				if (i-now)%every == 0 {
					seconds[i].Amount, seconds[i].Squares = scale.Amount{Jobs: 50, Tokens: 45_000}, 50*900*900
				}
			}
			d := scale.Decide(aSample(some(1, scale.Ready, time.Hour, 0)...), scale.History{Recent: scale.Buckets(nil, seconds)}, p)
			if rate := 45_000 / float64(every); math.Abs(d.Forecast.Used/rate-1) > 0.25 {
				t.Errorf("one each %d s, the last so long and %d s ago: %.0f tokens/s are reckoned with, and %.0f come: %s", every, now, d.Forecast.Used, rate, d.Reason)
			}
		}
	}
}
