package scaling

import (
	"cmp"
	"fmt"
	"slices"
)

// Report is what Simulate found. Times are in seconds.
type Report struct {
	Traces []TraceReport `json:"traces"`
	// Bars are what Millrace is to reach, as far as the study covers it.
	Bars []Bar `json:"bars,omitempty"`
	// Seconds that it took.
	Seconds float64 `json:"seconds"`
}

// TraceReport is one trace.
type TraceReport struct {
	Trace TraceName `json:"trace"`
	// Runs are its recordings; Requests is how many the first one has, Seconds how long it lasts.
	Runs     int     `json:"runs"`
	Requests int     `json:"requests"`
	Seconds  float64 `json:"trace_seconds"`
	Arms     []Arm   `json:"policies"`
}

// Arm is what one policy reached on one trace: medians over the recordings.
type Arm struct {
	Policy PolicyName `json:"policy"`
	Figures
	// Days are those of a week.
	Days []Day `json:"days,omitempty"`
	// series is the first recording's course.
	series []moment
}

// Figures of a run.
type Figures struct {
	// WaitP50 and WaitP99 of the time from a request's arrival to its start.
	WaitP50 float64 `json:"wait_p50"`
	WaitP99 float64 `json:"wait_p99"`
	// Prompt is the share of requests whose first token came within 5 s.
	Prompt float64 `json:"first_token_within_5s"`
	// GPUSeconds of all workers, each from its order until it is gone.
	GPUSeconds float64 `json:"gpu_seconds"`
	// Changes counts the moments at which workers were ordered or stopped, Turns those of them that went the other way than the one before, the first among them.
	Changes float64 `json:"changes"`
	Turns   float64 `json:"turns"`
	// Most workers at once.
	Most float64 `json:"most"`
	// Added is how many more there were at once than without the batch. Lines of it were done by the end, the last so many seconds after it came.
	Added   float64 `json:"added,omitempty"`
	Lines   float64 `json:"lines,omitempty"`
	LinesIn float64 `json:"lines_in,omitempty"`
}

// Day is one day of a week. MorningP99 is that of the requests between 8:45 and 9:45.
type Day struct {
	Day        string  `json:"day"`
	WaitP99    float64 `json:"wait_p99"`
	MorningP99 float64 `json:"morning_wait_p99"`
	Prompt     float64 `json:"first_token_within_5s"`
	GPUSeconds float64 `json:"gpu_seconds"`
}

// Bar is something that Millrace is to reach.
type Bar struct {
	Name string `json:"name"`
	Met  bool   `json:"met"`
	// Was says what was reached, Bar what was to be.
	Was string `json:"was"`
	Bar string `json:"bar"`
	// Bound says of a bar that was missed what nobody can do better, if the study covers it.
	Bound string `json:"bound,omitempty"`
}

// outcome is one run.
type outcome struct {
	Figures
	days     []Day
	series   []moment
	requests int
}

const within = 5 // seconds to the first token

func (r *run) outcome(t *trace) *outcome {
	o := &outcome{requests: len(r.requests), series: r.series}
	from, _ := slices.BinarySearchFunc(r.requests, t.warm.Seconds(), func(q request, at float64) int { return cmp.Compare(q.at, at) })
	wait := slices.Sorted(slices.Values(r.wait[from:]))
	o.Figures = Figures{
		WaitP50: quantile(wait, 0.5), WaitP99: quantile(wait, 0.99), Prompt: prompt(r.first[from:]), GPUSeconds: r.gpuSeconds,
		Changes: float64(r.changes), Turns: float64(r.turns), Most: float64(r.most), Lines: float64(r.lines), LinesIn: max(0, r.linesBy-t.batchAt.Seconds()),
	}
	if !t.days {
		return o
	}
	for day, gpu := range r.gpuByDay {
		begin, end := r.between(float64(day)*86400, float64(day+1)*86400)
		early, late := r.between(float64(day)*86400+8.75*3600, float64(day)*86400+9.75*3600)
		o.days = append(o.days, Day{
			Day:     t.start.AddDate(0, 0, day).Weekday().String()[:3],
			WaitP99: quantile(slices.Sorted(slices.Values(r.wait[begin:end])), 0.99), MorningP99: quantile(slices.Sorted(slices.Values(r.wait[early:late])), 0.99),
			Prompt: prompt(r.first[begin:end]), GPUSeconds: gpu,
		})
	}
	return o
}

// between finds the requests that came in a time.
func (r *run) between(from, to float64) (begin, end int) {
	find := func(at float64) int {
		i, _ := slices.BinarySearchFunc(r.requests, at, func(q request, at float64) int { return cmp.Compare(q.at, at) })
		return i
	}
	return find(from), find(to)
}

func prompt(first []float64) float64 {
	n := 0
	for _, f := range first {
		if f < within {
			n++
		}
	}
	return float64(n) / float64(max(1, len(first)))
}

func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// medianArm takes each figure's median.
func medianArm(name PolicyName, all []*outcome) Arm {
	median := func(of func(o *outcome) float64) float64 {
		values := make([]float64, len(all))
		for i, o := range all {
			values[i] = of(o)
		}
		slices.Sort(values)
		return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
	}
	a := Arm{Policy: name, series: all[0].series, Figures: Figures{
		WaitP50:    median(func(o *outcome) float64 { return o.WaitP50 }),
		WaitP99:    median(func(o *outcome) float64 { return o.WaitP99 }),
		Prompt:     median(func(o *outcome) float64 { return o.Prompt }),
		GPUSeconds: median(func(o *outcome) float64 { return o.GPUSeconds }),
		Changes:    median(func(o *outcome) float64 { return o.Changes }),
		Turns:      median(func(o *outcome) float64 { return o.Turns }),
		Most:       median(func(o *outcome) float64 { return o.Most }),
		Added:      median(func(o *outcome) float64 { return o.Added }),
		Lines:      median(func(o *outcome) float64 { return o.Lines }),
		LinesIn:    median(func(o *outcome) float64 { return o.LinesIn }),
	}}
	for i, d := range all[0].days {
		a.Days = append(a.Days, Day{
			Day:        d.Day,
			WaitP99:    median(func(o *outcome) float64 { return o.days[i].WaitP99 }),
			MorningP99: median(func(o *outcome) float64 { return o.days[i].MorningP99 }),
			Prompt:     median(func(o *outcome) float64 { return o.days[i].Prompt }),
			GPUSeconds: median(func(o *outcome) float64 { return o.days[i].GPUSeconds }),
		})
	}
	return a
}

// bars compares Millrace with what it is to reach.
func bars(r *Report) []Bar {
	var all []Bar
	for _, t := range r.Traces {
		a := t.arm(Millrace)
		if a == nil {
			continue
		}
		b := Bar{Name: string(t.Trace)}
		burst := func(wait, gpu float64) {
			b.Met = a.WaitP99 <= wait && a.GPUSeconds <= gpu
			b.Was, b.Bar = fmt.Sprintf("P99 wait %.1f s, %.1fk GPU-s", a.WaitP99, a.GPUSeconds/1000), fmt.Sprintf("at most %g s, %gk GPU-s", wait, gpu/1000)
			if now := t.arm(Instant); !b.Met && now != nil && t.Trace == Step {
				b.Bound = fmt.Sprintf("who knows each moment's rate, but not the next one's, waits %.1f s with two spare workers", now.WaitP99)
			}
		}
		switch t.Trace {
		case Step:
			burst(32, 16_500)
		case Ramp120:
			burst(6, 17_500)
		case Ramp600:
			burst(0.5, 22_000)
		case Square:
			b.Met, b.Was, b.Bar = a.Turns <= 1, fmt.Sprintf("%g changes of direction, the first included", a.Turns), "at most 1"
		case Week:
			b.Met, b.Was, b.Bar = a.Days[1].MorningP99 <= 2, fmt.Sprintf("P99 wait on the second morning %.1f s, on the first %.1f s", a.Days[1].MorningP99, a.Days[0].MorningP99), "at most 2 s on the second"
		case Batch:
			b.Met, b.Was, b.Bar = a.Added == 0, fmt.Sprintf("%g workers added", a.Added), "none"
		}
		all = append(all, b)
	}
	return all
}

// arm finds a policy's; nil if it was not run.
func (t *TraceReport) arm(name PolicyName) *Arm {
	if i := slices.IndexFunc(t.Arms, func(a Arm) bool { return a.Policy == name }); i >= 0 {
		return &t.Arms[i]
	}
	return nil
}
