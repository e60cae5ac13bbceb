package routing

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// The picture's measures in pixels.
const (
	plotWidth, plotHeight = 720, 400
	plotLeft, plotRight   = 64, 700
	plotTop, plotBottom   = 48, 348
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
	left, right := math.Log(least.Seconds()), math.Log(max(most, 2*least).Seconds())
	x := func(d time.Duration) float64 {
		return plotLeft + (math.Log(d.Seconds())-left)/(right-left)*(plotRight-plotLeft)
	}
	y := func(share float64) float64 {
		return plotTop + math.Log(share)/math.Log(leastShare)*(plotBottom-plotTop)
	}

	var b bytes.Buffer
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12" fill="#333">`, plotWidth, plotHeight)
	line(`<rect width="%d" height="%d" fill="#fff"/>`, plotWidth, plotHeight)
	line(`<text x="%d" y="24" font-size="14">%s</text>`, plotLeft, r.title())
	for share := 1.0; share >= leastShare*0.99; share /= 10 {
		line(`<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%g %%</text>`, plotLeft, y(share), plotRight, plotLeft-8, y(share)+4, math.Round(share*1e4)/100)
	}
	for decade := time.Microsecond; decade <= most; decade *= 10 {
		for _, d := range []time.Duration{decade, 2 * decade, 5 * decade} {
			if d >= least && d <= most {
				line(`<path d="M%.1f %dV%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle">%s</text>`, x(d), plotTop, plotBottom, x(d), plotBottom+18, d)
			}
		}
	}
	line(`<text x="%d" y="%d" text-anchor="middle">time to the first token</text>`, (plotLeft+plotRight)/2, plotHeight-14)
	line(`<text transform="translate(14 %d) rotate(-90)" text-anchor="middle">requests that waited longer</text>`, (plotTop+plotBottom)/2)
	for i, p := range Policies() {
		all := ttft[p]
		if all == nil {
			continue
		}
		var path strings.Builder
		for k := range plotPoints + 1 {
			share := math.Pow(leastShare, float64(k)/plotPoints)
			at := min(max(x(slower(all, share)), plotLeft), plotRight)
			fmt.Fprintf(&path, " %.1f,%.1f", at, y(share))
		}
		line(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`, path.String()[1:], plotColours[p])
		at := plotTop + 16 + 18*i
		line(`<path d="M%d %dh22" stroke="%s" stroke-width="2"/><text x="%d" y="%d">%s</text>`, plotRight-160, at, plotColours[p], plotRight-130, at+4, p)
	}
	line(`</svg>`)
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("writing a plot: %w", err)
	}
	return nil
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
