package routing

import (
	"slices"
	"time"
)

// Sample is how one request went, as its client saw it.
type Sample struct {
	// TTFT and E2E are from the arrival to the first token and to the last.
	TTFT, E2E time.Duration
	// Failed: no whole answer came. The times mean nothing then.
	Failed bool
}

// Run is what one arm did with one workload.
type Run struct {
	// Samples are by arrival.
	Samples []Sample
	// LoadSpread is the time mean, over samples of one second, of standard deviation / mean of the KV cache used over the ready workers, 0 where all are empty.
	LoadSpread float64
	// Preemptions are the engines' own.
	Preemptions int
}

// Arm is one line of a Report.
type Arm struct {
	Name Policy `json:"name"`
	// Times in milliseconds, of the requests that were answered.
	TTFTP50 float64 `json:"ttft_p50_ms"`
	TTFTP99 float64 `json:"ttft_p99_ms"`
	E2EP50  float64 `json:"e2e_p50_ms"`
	E2EP99  float64 `json:"e2e_p99_ms"`
	// LoadSpread is Run.LoadSpread.
	LoadSpread float64 `json:"load_spread"`
	// Preemptions of a run, and requests of a run without a whole answer.
	Preemptions float64 `json:"preemptions"`
	Errors      float64 `json:"errors"`
}

// Report is what `millrace bench routing` prints.
type Report struct {
	// Simulated in virtual time, or measured at real speed.
	Simulated bool    `json:"simulated"`
	Workload  Shape   `json:"workload"`
	Variant   Variant `json:"variant"`
	// Rate is the mean of arrivals a second, Runs how often each arm ran (each time with another seed), Requests how many arrived in each.
	Rate     float64 `json:"rate"`
	Runs     int     `json:"runs"`
	Requests int     `json:"requests"`
	Arms     []Arm   `json:"arms"`
	// RatioTTFTP99 and RatioE2EP99 are Millrace's P99 over that of least load + random.
	RatioTTFTP99 float64 `json:"ratio_ttft_p99"`
	RatioE2EP99  float64 `json:"ratio_e2e_p99"`
	// LowerBound is what one engine does that is as fast, and has as much KV cache, as all together: no placement can be better. Simulated only, and only where the engines are
	// equal and do not stall.
	LowerBound *Arm `json:"lower_bound,omitempty"`
	// Seconds that it all took.
	Seconds float64 `json:"seconds"`

	runs Runs
}

// Arm sums up a run.
func (r *Run) Arm(name Policy) Arm {
	var ttft, e2e []time.Duration
	errors := 0
	for _, s := range r.Samples {
		if s.Failed {
			errors++
			continue
		}
		ttft, e2e = append(ttft, s.TTFT), append(e2e, s.E2E)
	}
	slices.Sort(ttft)
	slices.Sort(e2e)
	return Arm{
		Name: name, TTFTP50: ms(ttft, 0.5), TTFTP99: ms(ttft, 0.99), E2EP50: ms(e2e, 0.5), E2EP99: ms(e2e, 0.99),
		LoadSpread: r.LoadSpread, Preemptions: float64(r.Preemptions), Errors: float64(errors),
	}
}

// ms is the value in milliseconds below which the share q of the sorted values lies, by the nearest rank; 0 if there are none.
func ms(sorted []time.Duration, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]) / float64(time.Millisecond)
}

// Runs are an arm's, one for each seed, in the order of the seeds.
type Runs map[Policy][]*Run

// Median fills in the arms of a report with the medians over the runs, each figure on its own; the ratios are medians of each run's.
func (r *Report) Median(runs Runs) {
	r.runs = runs
	var all [][]Arm // by policy, by run
	for _, p := range Policies() {
		arms := armsOf(p, runs[p])
		all = append(all, arms)
		r.Arms = append(r.Arms, medianArm(p, arms))
	}
	base, ours := all[slices.Index(Policies(), LeastLoadRandom)], all[slices.Index(Policies(), Millrace)]
	var ttft, e2e []float64
	for i := range min(len(base), len(ours)) {
		ttft = append(ttft, ratio(ours[i].TTFTP99, base[i].TTFTP99))
		e2e = append(e2e, ratio(ours[i].E2EP99, base[i].E2EP99))
	}
	r.Runs = len(ours)
	r.RatioTTFTP99, r.RatioE2EP99 = median(ttft), median(e2e)
}

// Pool fills in the arms of a report with the figures of all runs' requests together; the spread of load is the runs' mean, preemptions and errors are a run's mean.
func (r *Report) Pool(runs Runs) {
	r.runs = runs
	var base, ours Arm
	for _, p := range Policies() {
		var pooled Run
		for _, run := range runs[p] {
			pooled.Samples = append(pooled.Samples, run.Samples...)
			pooled.LoadSpread += run.LoadSpread
			pooled.Preemptions += run.Preemptions
		}
		n := float64(max(1, len(runs[p])))
		a := pooled.Arm(p)
		a.LoadSpread, a.Preemptions, a.Errors = a.LoadSpread/n, a.Preemptions/n, a.Errors/n
		r.Arms = append(r.Arms, a)
		switch p {
		case LeastLoadRandom:
			base = a
		case Millrace:
			ours = a
		}
	}
	r.Runs = len(runs[Millrace])
	r.RatioTTFTP99, r.RatioE2EP99 = ratio(ours.TTFTP99, base.TTFTP99), ratio(ours.E2EP99, base.E2EP99)
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

func armsOf(p Policy, runs []*Run) []Arm {
	arms := make([]Arm, len(runs))
	for i, run := range runs {
		arms[i] = run.Arm(p)
	}
	return arms
}

// medianArm has the median of each figure.
func medianArm(p Policy, arms []Arm) Arm {
	return Arm{
		Name:        p,
		TTFTP50:     medianOf(arms, func(a Arm) float64 { return a.TTFTP50 }),
		TTFTP99:     medianOf(arms, func(a Arm) float64 { return a.TTFTP99 }),
		E2EP50:      medianOf(arms, func(a Arm) float64 { return a.E2EP50 }),
		E2EP99:      medianOf(arms, func(a Arm) float64 { return a.E2EP99 }),
		LoadSpread:  medianOf(arms, func(a Arm) float64 { return a.LoadSpread }),
		Preemptions: medianOf(arms, func(a Arm) float64 { return a.Preemptions }),
		Errors:      medianOf(arms, func(a Arm) float64 { return a.Errors }),
	}
}

func medianOf(arms []Arm, figure func(Arm) float64) float64 {
	values := make([]float64, len(arms))
	for i, a := range arms {
		values[i] = figure(a)
	}
	return median(values)
}

// median is the middle value, or the mean of the two in the middle; 0 if there are none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}
