package scale_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

// noon of a Monday.
var noon = time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)

// aPool has a worker that does 1,000 tokens a second after a start of 45 s, and what the text adds.
func aPool(t testing.TB, more string) *scale.Pool {
	t.Helper()
	if !strings.Contains(more, "max:") {
		more = "max: 10, " + more
	}
	all, err := scale.ParsePools([]byte("pools: [{name: p, models: [m], provider: process, engine: {command: [e]}, tokens_per_second: 1000, " + more + "}]"))
	if err != nil {
		t.Fatal(err)
	}
	return &all[0]
}

// aSample is of a pool without demand.
func aSample(workers ...scale.Worker) scale.Sample {
	return scale.Sample{
		Now: noon, Throughput: 1000, ColdStart: scale.ColdStart{P50: 45 * time.Second, P90: 45 * time.Second},
		Waiting: map[job.Class]scale.Amount{}, Workers: workers,
	}
}

// some are n workers in a state for a while; ready ones are idle or have a job.
func some(n int, state scale.WorkerState, since time.Duration, jobs int) []scale.Worker {
	var all []scale.Worker
	for i := range n {
		w := scale.Worker{Name: fmt.Sprintf("%s-%d", state, i), State: state, Since: noon.Add(-since), Jobs: jobs}
		if state == scale.Ready && jobs == 0 {
			w.IdleSince = w.Since
		}
		all = append(all, w)
	}
	return all
}

// wanted is a history in which n were needed for an hour, with demand until some time ago.
func wanted(n int, demand time.Duration) scale.History {
	var h scale.History
	for at := noon.Add(-time.Hour); at.Before(noon); at = at.Add(10 * time.Second) {
		h.Wanted = append(h.Wanted, scale.Wanted{At: at, N: n})
	}
	h.LastDemand = noon.Add(-demand)
	return h
}

// arriving are ten minutes of arrivals, of which f is the rate in tokens per second so many seconds before noon; each job has 500 tokens.
func arriving(f func(ago float64) float64, noise *rand.Rand) []scale.Arrivals {
	var all []scale.Arrivals
	for i := range 120 {
		start := noon.Add(time.Duration(i-120) * scale.Bucket)
		mean := f(noon.Sub(start).Seconds()-scale.Bucket.Seconds()/2) * scale.Bucket.Seconds() / 500
		n := int(math.Round(mean))
		if noise != nil {
			n = int(math.Round(max(0, mean+math.Sqrt(mean)*noise.NormFloat64())))
		}
		all = append(all, scale.Arrivals{Start: start, Amount: scale.Amount{Jobs: n, Tokens: job.Tokens(500 * n)}, Squares: float64(n) * 500 * 500})
	}
	return all
}

func steady(rate float64) func(float64) float64 { return func(float64) float64 { return rate } }

func TestDecide(t *testing.T) {
	t.Parallel()
	busy4 := some(4, scale.Ready, time.Hour, 1)
	for name, c := range map[string]struct {
		pool    string
		sample  scale.Sample
		change  func(*scale.Sample)
		history scale.History
		want    scale.Decision // Want, Start, Stop, Action
		reason  string
	}{
		"nothing is asked of an empty pool": {history: wanted(0, time.Hour), want: scale.Decision{Action: scale.Hold}, reason: "nothing is asked"},
		"a backlog brings all that it needs at once": { // 225,000 tokens within 45 s
			change: func(s *scale.Sample) { s.Waiting[job.Interactive] = scale.Amount{Jobs: 2500, Tokens: 225_000} },
			want:   scale.Decision{Want: 5, Start: 5, Action: scale.ScaleUp}, reason: "225000 tokens wait",
		},
		"those that start count": {
			sample: aSample(some(5, scale.Starting, 10*time.Second, 0)...),
			change: func(s *scale.Sample) { s.Waiting[job.Interactive] = scale.Amount{Jobs: 2500, Tokens: 225_000} },
			want:   scale.Decision{Want: 5, Action: scale.Cooling}, // what starts helps from before a sixth could
		},
		"work with patience needs fewer": { // within ten minutes
			change: func(s *scale.Sample) { s.Waiting[job.Batch] = scale.Amount{Jobs: 2500, Tokens: 225_000} },
			want:   scale.Decision{Want: 1, Start: 1, Action: scale.ScaleUp},
		},
		"max bounds it": {
			sample: aSample(some(10, scale.Ready, time.Hour, 3)...),
			change: func(s *scale.Sample) { s.Waiting[job.Interactive] = scale.Amount{Jobs: 9e6, Tokens: 9e9} },
			want:   scale.Decision{Want: 10, Action: scale.AtMax}, reason: "max is 10",
		},
		"a busy worker stays though nothing waits": {
			pool: "idle: 5s, cooldown: 5s", sample: aSample(busy4...),
			change:  func(s *scale.Sample) { s.InFlight = scale.Amount{Jobs: 4, Tokens: 4000} },
			history: wanted(1, 0), want: scale.Decision{Want: 1, Action: scale.Busy}, reason: "none of 4 has been idle for long enough",
		},
		"an idle one goes when fewer were enough for the cool-down": {
			sample: aSample(append(some(2, scale.Ready, time.Hour, 0), some(1, scale.Ready, time.Hour, 1)...)...), change: func(s *scale.Sample) { s.InFlight = scale.Amount{Jobs: 1, Tokens: 1000} },
			history: wanted(1, 0), want: scale.Decision{Want: 1, Stop: []string{"ready-0", "ready-1"}, Action: scale.ScaleDown},
		},
		"and not before": {
			sample: aSample(some(3, scale.Ready, time.Hour, 0)...), change: func(s *scale.Sample) { s.InFlight = scale.Amount{Jobs: 1, Tokens: 1000} },
			history: wanted(3, 0), want: scale.Decision{Want: 3, Action: scale.Cooling}, reason: "more were needed",
		},
		"nor while it is not known what was needed": {
			sample: aSample(some(3, scale.Ready, time.Hour, 0)...), change: func(s *scale.Sample) { s.InFlight = scale.Amount{Jobs: 1, Tokens: 1000} },
			want: scale.Decision{Want: 3, Action: scale.Cooling},
		},
		"the last one stays for the idle time": {
			sample: aSample(some(1, scale.Ready, time.Hour, 0)...), history: wanted(0, 4*time.Minute), want: scale.Decision{Want: 1, Action: scale.Cooling}, reason: "after 5m0s",
		},
		"and goes then": {
			sample: aSample(some(1, scale.Ready, time.Hour, 0)...), history: wanted(0, 6*time.Minute), want: scale.Decision{Stop: []string{"ready-0"}, Action: scale.ScaleDown}, reason: "for 5m0s",
		},
		"all go after the idle time, whatever came before": {
			pool: "idle: 5s", sample: aSample(some(4, scale.Ready, time.Minute, 0)...),
			history: func() scale.History { h := wanted(4, 6*time.Second); h.Recent = arriving(steady(3000), nil); return h }(),
			want:    scale.Decision{Stop: []string{"ready-0", "ready-1", "ready-2", "ready-3"}, Action: scale.ScaleDown},
		},
		"min stays": {
			pool: "min: 2", sample: aSample(some(3, scale.Ready, time.Hour, 0)...), history: wanted(2, time.Hour),
			want: scale.Decision{Want: 2, Stop: []string{"ready-0"}, Action: scale.ScaleDown},
		},
		"one that starts is never stopped": {
			sample: aSample(some(3, scale.Starting, time.Minute, 0)...), history: wanted(0, time.Hour), want: scale.Decision{Action: scale.Busy},
		},
		"nor what is ready while others only start": {
			pool: "min: 2", sample: aSample(append(some(2, scale.Starting, time.Minute, 0), some(2, scale.Ready, time.Hour, 0)...)...), history: wanted(2, time.Hour),
			want: scale.Decision{Want: 2, Action: scale.Busy},
		},
		"headroom": {
			sample: aSample(some(4, scale.Ready, time.Hour, 1)...), history: scale.History{Recent: arriving(steady(3900), nil)},
			want: scale.Decision{Want: 5, Start: 1, Action: scale.ScaleUp}, reason: "3900 tokens/s come now",
		},
		"spares count headroom in": {
			pool: "spare: 2", history: scale.History{Recent: arriving(steady(900), nil)}, want: scale.Decision{Want: 3, Start: 3, Action: scale.ScaleUp},
		},
		"no spare without load": {pool: "spare: 2", history: wanted(0, time.Hour), want: scale.Decision{Action: scale.Hold}},
		"a speed that is not known is measured on one": {
			change: func(s *scale.Sample) {
				s.Throughput, s.Waiting[job.Interactive] = 0, scale.Amount{Jobs: 2500, Tokens: 225_000}
			},
			want: scale.Decision{Want: 1, Start: 1, Action: scale.ScaleUp}, reason: "measured on the first",
		},
		"a batch with slack takes what is there": {
			sample: aSample(some(2, scale.Ready, time.Hour, 1)...), history: wanted(2, 0),
			change: func(s *scale.Sample) {
				s.Unfed = []scale.Due{{Amount: scale.Amount{Jobs: 20_000, Tokens: 20e6}, By: noon.Add(8 * time.Hour)}}
			},
			want: scale.Decision{Want: 2, Action: scale.Cooling},
		},
		"one that must end soon does not": { // 20,000 tokens a second for 18 minutes
			pool: "max: 40", sample: aSample(some(2, scale.Ready, time.Hour, 1)...), history: wanted(2, 0),
			change: func(s *scale.Sample) {
				s.Unfed = []scale.Due{{Amount: scale.Amount{Jobs: 20_000, Tokens: 20e6}, By: noon.Add(20 * time.Minute)}}
			},
			want: scale.Decision{Want: 20, Start: 18, Action: scale.ScaleUp}, reason: "are to end in time",
		},
		"a batch alone has a worker": {
			change: func(s *scale.Sample) {
				s.Unfed = []scale.Due{{Amount: scale.Amount{Jobs: 1, Tokens: 100}, By: noon.Add(24 * time.Hour)}}
			},
			want: scale.Decision{Want: 1, Start: 1, Action: scale.ScaleUp},
		},
		"a schedule counts a cold start before": {
			pool: `schedule: ["weekdays 12:00-13:00 at least 3"]`, sample: func() scale.Sample { s := aSample(); s.Now = noon.Add(-40 * time.Second); return s }(),
			want: scale.Decision{Want: 3, Start: 3, Action: scale.ScaleUp}, reason: "by the schedule",
		},
		"a demand that is not known keeps the last plan": {
			sample: aSample(some(3, scale.Ready, time.Hour, 0)...), history: wanted(3, 0), change: func(s *scale.Sample) { s.Unknown = "no dispatcher is heard" },
			want: scale.Decision{Want: 3, Action: scale.Unknown}, reason: "no dispatcher is heard",
		},
		"and goes on with it": {
			sample: aSample(some(1, scale.Ready, time.Hour, 0)...), history: wanted(3, 0), change: func(s *scale.Sample) { s.Unknown = "no dispatcher is heard" },
			want: scale.Decision{Want: 3, Start: 2, Action: scale.ScaleUp},
		},
		"a start that failed is not tried again at once": {
			change: func(s *scale.Sample) {
				s.Waiting[job.Standard] = scale.Amount{Jobs: 1, Tokens: 10}
				s.Failures, s.RetryAt, s.Failure = 1, noon.Add(10*time.Second), "exit code 1"
			},
			want: scale.Decision{Want: 1, Action: scale.Unavailable}, reason: `"exit code 1": the next is tried at 12:00:10`,
		},
		"after three one is tried alone": {
			change: func(s *scale.Sample) {
				s.Waiting[job.Interactive] = scale.Amount{Jobs: 2500, Tokens: 225_000}
				s.Failures, s.RetryAt = 3, noon.Add(-time.Second)
			},
			want: scale.Decision{Want: 5, Start: 1, Action: scale.ScaleUp},
		},
		"and no second one beside it": {
			sample: aSample(some(1, scale.Starting, time.Second, 0)...),
			change: func(s *scale.Sample) {
				s.Waiting[job.Interactive] = scale.Amount{Jobs: 2500, Tokens: 225_000}
				s.Failures, s.RetryAt = 3, noon.Add(-time.Second)
			},
			want: scale.Decision{Want: 5, Action: scale.Unavailable},
		},
		"what the provider has no room for is not asked for": {
			sample: aSample(some(2, scale.Ready, time.Hour, 5)...),
			change: func(s *scale.Sample) {
				s.Waiting[job.Interactive], s.Limit = scale.Amount{Jobs: 2500, Tokens: 900_000}, 2
			},
			want: scale.Decision{Want: 10, Action: scale.AtCapacity}, reason: "no room for more than 2",
		},
		"one that has been away for long is replaced": {
			sample: aSample(some(1, scale.Away, 10*time.Minute, 0)...), history: wanted(1, 0), change: func(s *scale.Sample) { s.Waiting[job.Standard] = scale.Amount{Jobs: 1, Tokens: 10} },
			want: scale.Decision{Want: 1, Start: 1, Action: scale.ScaleUp},
		},
		"and one that was here a moment ago is not": {
			sample: aSample(some(1, scale.Away, time.Minute, 0)...), history: wanted(1, 0), change: func(s *scale.Sample) { s.Waiting[job.Standard] = scale.Amount{Jobs: 1, Tokens: 10} },
			want: scale.Decision{Want: 1, Action: scale.Hold},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := c.sample
			if s.Now.IsZero() {
				s = aSample()
			}
			if c.change != nil {
				c.change(&s)
			}
			d := scale.Decide(s, c.history, aPool(t, c.pool))
			got := scale.Decision{Want: d.Want, Start: d.Start, Stop: d.Stop, Action: d.Action}
			if diff := cmp.Diff(c.want, got, cmpopts.IgnoreUnexported(scale.Decision{})); diff != "" {
				t.Errorf("(-want +got)\n%s\nreason: %s\nneed: %+v\nforecast: %+v", diff, d.Reason, d.Need, d.Forecast)
			}
			if d.Reason == "" || !strings.Contains(d.Reason, c.reason) {
				t.Errorf("the reason is %q, want %q in it", d.Reason, c.reason)
			}
			if again := scale.Decide(s, c.history, aPool(t, c.pool)); !cmp.Equal(again, d, cmpopts.IgnoreUnexported(scale.Decision{})) {
				t.Error("the same arguments give another decision")
			}
		})
	}
}

// TestAnyWorkWakesAnEmptyPool: each kind of work alone.
func TestAnyWorkWakesAnEmptyPool(t *testing.T) {
	t.Parallel()
	one := scale.Amount{Jobs: 1}
	for name, change := range map[string]func(*scale.Sample){
		"interactive": func(s *scale.Sample) { s.Waiting[job.Interactive] = one },
		"standard":    func(s *scale.Sample) { s.Waiting[job.Standard] = one },
		"batch":       func(s *scale.Sample) { s.Waiting[job.Batch] = one },
		"in flight":   func(s *scale.Sample) { s.InFlight = one },
		"unfed":       func(s *scale.Sample) { s.Unfed = []scale.Due{{Amount: one, By: noon.Add(time.Hour)}} },
	} {
		s := aSample()
		change(&s)
		if d := scale.Decide(s, wanted(0, time.Hour), aPool(t, "")); d.Start != 1 {
			t.Errorf("%s: %d are started: %s", name, d.Start, d.Reason)
		}
	}
}

// TestForecast tells a level, a step and a ramp apart, by chance's own measure.
func TestForecast(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		rate  func(ago float64) float64
		now   float64
		least float64 // of the trend; 0: there must be none
		most  float64
		share float64 // share of the runs that agree at least
	}{
		"a level":           {rate: steady(2000), now: 2000, share: 0.9},
		"a step 5 s ago":    {rate: func(ago float64) float64 { return pick(ago < 5, 20_000, 1000) }, now: 20_000, share: 0.85},
		"a step 15 s ago":   {rate: func(ago float64) float64 { return pick(ago < 15, 20_000, 1000) }, now: 20_000, share: 0.85},
		"a step 60 s ago":   {rate: func(ago float64) float64 { return pick(ago < 60, 20_000, 1000) }, now: 20_000, share: 0.85},
		"a fall":            {rate: func(ago float64) float64 { return pick(ago < 30, 1000, 20_000) }, now: 1000, share: 0.85},
		"a ramp since 60 s": {rate: func(ago float64) float64 { return 1000 + max(0, 60-ago)*160 }, now: 10_600, least: 15_000, most: 22_000, share: 0.85},
		"a slow ramp":       {rate: func(ago float64) float64 { return 1000 + max(0, 300-ago)*32 }, now: 10_600, least: 11_000, most: 13_500, share: 0.5},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const runs = 200
			good := 0
			for seed := range uint64(runs) {
				recent := arriving(c.rate, rand.New(rand.NewPCG(seed, 1)))
				d := scale.Decide(aSample(), scale.History{Recent: recent}, aPool(t, ""))
				f := d.Forecast
				trend := f.Trend == 0
				if c.least > 0 {
					trend = f.Trend >= c.least && f.Trend <= c.most
				}
				if trend && math.Abs(f.Now-c.now) <= 0.25*c.now+100 {
					good++
				} else if good == int(seed) && seed < 3 {
					t.Logf("seed %d: %+v", seed, f)
				}
			}
			if float64(good) < c.share*runs {
				t.Errorf("%d of %d agree", good, runs)
			}
		})
	}
}

func pick(first bool, a, b float64) float64 {
	if first {
		return a
	}
	return b
}

// TestWorkersAreAskedForAColdStartAhead: demand climbs steadily; each worker is asked for at least a cold start before what there is would be too little.
func TestWorkersAreAskedForAColdStartAhead(t *testing.T) {
	t.Parallel()
	const cold = 60 * time.Second
	p := aPool(t, "max: 50, spare: 2")
	rate := func(at time.Time) float64 { return 1000 + 15*max(0, at.Sub(noon).Seconds()) } // of 1,000 a worker does
	var h scale.History
	long := noon.Add(-time.Hour)
	asked := []time.Time{long, long, long, long} // when each worker was
	for now := noon.Add(-10 * time.Minute); now.Before(noon.Add(20 * time.Minute)); now = now.Add(scale.Bucket) {
		n := int(math.Round(rate(now) * scale.Bucket.Seconds() / 100))
		h.Recent = append(h.Recent, scale.Arrivals{Start: now, Amount: scale.Amount{Jobs: n, Tokens: job.Tokens(100 * n)}, Squares: float64(n) * 100 * 100})
		if len(h.Recent) > 120 {
			h.Recent = h.Recent[1:]
		}
		s := aSample()
		s.Now, s.ColdStart = now.Add(scale.Bucket), scale.ColdStart{P50: cold, P90: cold}
		s.InFlight = scale.Amount{Jobs: 10, Tokens: 1000}
		for i, at := range asked {
			w := scale.Worker{Name: fmt.Sprint(i), State: scale.Ready, Since: at, Jobs: 1}
			if s.Now.Sub(at) < cold {
				w.State = scale.Starting
			}
			s.Workers = append(s.Workers, w)
		}
		d := scale.Decide(s, h, p)
		for range d.Start {
			asked = append(asked, s.Now)
		}
		h.Wanted, h.LastDemand = append(h.Wanted, scale.Wanted{At: s.Now, N: d.Needed}), s.Now
		if len(h.Wanted) > 200 {
			h.Wanted = h.Wanted[1:]
		}
	}
	if len(asked) < 18 {
		t.Fatalf("only %d workers were asked for", len(asked))
	}
	for i, at := range asked[4:] {
		// The workers before it are full when the rate is theirs.
		full := noon.Add(time.Duration((float64(i+4)*1000 - 1000) / 15 * float64(time.Second)))
		if ahead := full.Sub(at); ahead < cold {
			t.Errorf("worker %d was asked for %s before the others were full", i+5, ahead)
		}
	}
}

// TestSeasonKnowsTheSecondMorning: a burst of one working day is expected on the next, at its time; and not on when it does not come.
func TestSeasonKnowsTheSecondMorning(t *testing.T) {
	t.Parallel()
	monday := time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC)
	var recorded []scale.Arrivals
	for at := monday; at.Before(monday.AddDate(0, 0, 1)); at = at.Add(scale.SeasonBucket) {
		rate := pick(at.Hour() == 8, 20_000, 1000)
		recorded = append(recorded, scale.Arrivals{Start: at, Amount: scale.Amount{Jobs: 100, Tokens: job.Tokens(rate * scale.SeasonBucket.Seconds())}})
	}
	quiet := func(until time.Time) []scale.Arrivals {
		all := arriving(steady(1000), nil)
		for i := range all {
			all[i].Start = all[i].Start.Add(until.Sub(noon))
		}
		return all
	}
	p := aPool(t, "max: 50, spare: 2")
	season := func(at time.Time) float64 {
		s := aSample()
		s.Now = at
		return scale.Decide(s, scale.History{Recent: quiet(at), Season: scale.Learn(recorded, at, time.UTC)}, p).Forecast.Season
	}
	tuesday := monday.AddDate(0, 0, 1)
	for _, c := range []struct {
		at          time.Time
		least, most float64
	}{
		{tuesday.Add(7 * time.Hour), 900, 1100},
		{tuesday.Add(8*time.Hour - 50*time.Second), 19_000, 21_000},
		{tuesday.Add(8*time.Hour + 15*time.Minute), 0, 4000}, // it has not come
		{tuesday.Add(10 * time.Hour), 900, 1100},
		{tuesday.AddDate(0, 0, 4).Add(8 * time.Hour), 19_000, 21_000}, // of a Saturday nothing is known but this
	} {
		if got := season(c.at); got < c.least || got > c.most {
			t.Errorf("at %s %.0f are expected, want %.0f to %.0f", c.at.Format("Mon 15:04:05"), got, c.least, c.most)
		}
	}
	if d := scale.Decide(aSample(), scale.History{Season: scale.Learn(nil, noon, time.UTC)}, p); d.Forecast.Season != 0 || slices.Contains([]scale.Action{scale.ScaleUp}, d.Action) {
		t.Errorf("nothing was learned, and %+v is expected", d.Forecast)
	}
}

// TestTimeOfWhichNothingIsKnownIsNotQuiet: after an outage that was longer than the pool's cool-down and idle time, nothing is stopped for it.
func TestTimeOfWhichNothingIsKnownIsNotQuiet(t *testing.T) {
	t.Parallel()
	p := aPool(t, "idle: 1m, cooldown: 1m")
	var m scale.Memory
	at := noon.Add(-20 * time.Minute)
	for ; at.Before(noon.Add(-10 * time.Minute)); at = at.Add(time.Second) {
		m.Asked(at)
		m.Decided(at, 5, 0, time.Minute)
	}
	s := aSample(some(5, scale.Ready, time.Hour, 0)...)
	look := func(unknown string) scale.Decision {
		s.Now, s.Unknown = at, unknown
		d := scale.Decide(s, m.History(nil, nil), p)
		if unknown == "" {
			m.Decided(at, d.Needed, d.Forecast.Trend, time.Minute)
		}
		return d
	}
	for ; at.Before(noon); at = at.Add(10 * time.Second) {
		if d := look("no dispatcher is heard"); d.Want != 5 || d.Start+len(d.Stop) > 0 {
			t.Fatalf("%s into the outage: %+v", at.Sub(noon.Add(-10*time.Minute)), d)
		}
	}
	s.Workers = s.Workers[:3]
	if d := look("no dispatcher is heard"); d.Start != 2 {
		t.Errorf("two died, and %d are started: the plan is five", d.Start)
	}
	for end := at.Add(time.Minute); at.Before(end); at = at.Add(time.Second) {
		if d := look(""); len(d.Stop) > 0 {
			t.Fatalf("%s after the outage %v are stopped: %s", at.Sub(end.Add(-time.Minute)), d.Stop, d.Reason)
		}
	}
	if at = at.Add(time.Second); len(look("").Stop) != 3 {
		t.Error("nothing was asked of it for a minute, and the workers stay")
	}
}

// TestEdges: what is easily got wrong.
func TestEdges(t *testing.T) {
	t.Parallel()
	busy := func(s *scale.Sample) { s.InFlight = scale.Amount{Jobs: 2, Tokens: 2000} }
	for name, c := range map[string]struct {
		pool    string
		workers []scale.Worker
		change  func(*scale.Sample)
		history scale.History
		check   func(scale.Decision) bool
	}{
		"a lowered max is not near enough": {
			pool: "max: 9, headroom: 0.5", workers: some(10, scale.Ready, time.Hour, 0), change: busy, history: func() scale.History { h := wanted(9, 0); h.Recent = arriving(steady(6000), nil); return h }(),
			check: func(d scale.Decision) bool { return len(d.Stop) == 1 },
		},
		"a worker that is away is no reason to stop one that is there": {
			workers: append(some(2, scale.Ready, time.Hour, 0), some(1, scale.Away, 30*time.Second, 0)...), change: busy, history: wanted(2, 0),
			check: func(d scale.Decision) bool { return len(d.Stop) == 0 },
		},
		"a crumb of a season wakes nobody": {
			pool: "spare: 2", history: func() scale.History {
				h := wanted(0, time.Hour)
				h.Season = scale.Learn([]scale.Arrivals{{Start: noon.AddDate(0, 0, -7), Amount: scale.Amount{Jobs: 1, Tokens: 300}}}, noon, time.UTC)
				return h
			}(),
			check: func(d scale.Decision) bool { return d.Start == 0 },
		},
		"an absurd speed bounds at max": {
			change: func(s *scale.Sample) { s.Throughput = 1e-18 }, history: scale.History{Recent: arriving(steady(900), nil)},
			check: func(d scale.Decision) bool { return d.Want == 10 },
		},
		"workers of an unknown speed that have nothing to do are too many": {
			workers: append(some(1, scale.Ready, time.Hour, 1), some(4, scale.Ready, time.Hour, 0)...), change: func(s *scale.Sample) { busy(s); s.Throughput = 0 }, history: wanted(1, 0),
			check: func(d scale.Decision) bool { return len(d.Stop) == 4 },
		},
		"both spares are there": {
			pool: "spare: 2", workers: some(2, scale.Ready, time.Hour, 1), change: busy, history: scale.History{Recent: arriving(steady(900), nil)},
			check: func(d scale.Decision) bool { return d.Start == 1 },
		},
	} {
		s := aSample(c.workers...)
		if c.change != nil {
			c.change(&s)
		}
		if d := scale.Decide(s, c.history, aPool(t, c.pool)); !c.check(d) {
			t.Errorf("%s: %s: %s; want %d start %d stop %v need %+v", name, d.Action, d.Reason, d.Want, d.Start, d.Stop, d.Need)
		}
	}
}
