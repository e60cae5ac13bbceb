package routing

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/millrace/millrace/bench/chart"
)

const (
	// leastShare is the share of requests at the lower edge; the upper one is all.
	leastShare = 0.001
	// plotPoints of each line.
	plotPoints = 160
)

var plotColours = map[Policy]string{RoundRobin: "#9aa0a6", LeastLoad: "#e69f00", LeastLoadRandom: "#d55e00", Millrace: "#0072b2"}

// Plot writes an SVG of how long first tokens took: for each time, the share of all runs' requests that waited longer. Both axes are logarithmic, so that the slow few are seen; P99
// is where a line crosses 1 %.
func (r *Report) Plot(w io.Writer) error {
	ttft := map[Policy][]time.Duration{}
	least, most := time.Duration(math.MaxInt64), time.Duration(0)
	for _, p := range Policies() {
		var all []time.Duration
		for _, run := range r.runs[p] {
			for _, s := range run.Samples {
				if !s.Failed {
					all = append(all, max(s.TTFT, time.Microsecond))
				}
			}
		}
		if len(all) == 0 {
			continue
		}
		slices.Sort(all)
		ttft[p] = all
		least, most = min(least, slower(all, 0.99)), max(most, slower(all, leastShare))
	}
	if len(ttft) == 0 {
		return errors.New("plotting: there are no answered requests")
	}
	x := func(d time.Duration) float64 { return math.Log(d.Seconds()) }
	p := chart.Panel{
		Title: r.title(),
		X:     chart.Axis{Label: "time to the first token", From: x(least), To: x(max(most, 2*least))},
		Y:     chart.Axis{Label: "requests that waited longer", From: math.Log(leastShare)},
	}
	for share := 1.0; share >= leastShare*0.99; share /= 10 {
		p.Y.Ticks = append(p.Y.Ticks, chart.Tick{At: math.Log(share), Text: fmt.Sprintf("%g %%", math.Round(share*1e4)/100)})
	}
	for decade := time.Microsecond; decade <= most; decade *= 10 {
		for _, d := range []time.Duration{decade, 2 * decade, 5 * decade} {
			if d >= least && d <= most {
				p.X.Ticks = append(p.X.Ticks, chart.Tick{At: x(d), Text: d.String()})
			}
		}
	}
	for _, policy := range Policies() {
		all := ttft[policy]
		if all == nil {
			continue
		}
		l := chart.Line{Name: string(policy), Colour: plotColours[policy]}
		for k := range plotPoints + 1 {
			share := math.Pow(leastShare, float64(k)/plotPoints)
			l.Points = append(l.Points, chart.Point{X: x(slower(all, share)), Y: math.Log(share)})
		}
		p.Lines = append(p.Lines, l)
	}
	return chart.Write(w, p)
}

// slower is the time that a share of the sorted times is longer than.
func slower(sorted []time.Duration, share float64) time.Duration {
	return sorted[min(max(int((1-share)*float64(len(sorted))), 0), len(sorted)-1)]
}

func (r *Report) title() string {
	how := "measured"
	if r.Simulated {
		how = "simulated"
	}
	return fmt.Sprintf("%s, %s, %g requests a second (%s, %d x %d requests)", r.Workload, r.Variant, r.Rate, how, r.Runs, r.Requests)
}
