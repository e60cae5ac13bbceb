package scaling

import (
	"fmt"
	"io"
	"math"

	"github.com/millrace/millrace/bench/chart"
)

// plotted are the policies of the picture, in the legend's order: more could not be told apart.
var plotted = []struct {
	policy PolicyName
	colour string
}{{KEDA, "#9aa0a6"}, {KEDATuned, "#e69f00"}, {TokenRate, "#d55e00"}, {Clairvoyant, "#009e73"}, {Millrace, "#0072b2"}}

const plotEvery = 5 // seconds between two points of a line

// Plot writes an SVG of each trace but the week's: over time the workers that there are, those that start included, and the requests that wait, of the first recording.
func (r *Report) Plot(w io.Writer) error {
	var panels []chart.Panel
	for _, t := range r.Traces {
		if t.Trace == Week {
			continue
		}
		from := newTrace(t.Trace).warm.Seconds() // what the figures count begins at 0
		live := chart.Panel{Title: string(t.Trace) + ": workers, those that start included", Height: 200, LegendLeft: true, Y: chart.Axis{Label: "workers"}}
		waiting := chart.Panel{Title: string(t.Trace) + ": requests that wait", Height: 120, Y: chart.Axis{Label: "requests"}, X: chart.Axis{Label: "seconds"}}
		for _, p := range plotted {
			arm := t.arm(p.policy)
			if arm == nil {
				continue
			}
			a, b := chart.Line{Name: string(p.policy), Colour: p.colour}, chart.Line{Colour: p.colour}
			for _, m := range arm.series {
				if m.at < from || math.Mod(m.at-from, plotEvery) != 0 {
					continue
				}
				a.Points = extend(a.Points, chart.Point{X: m.at - from, Y: float64(m.live)})
				b.Points = extend(b.Points, chart.Point{X: m.at - from, Y: float64(m.waiting)})
			}
			live.Lines, waiting.Lines = append(live.Lines, a), append(waiting.Lines, b)
		}
		if len(live.Lines) == 0 {
			continue
		}
		to := t.Seconds - from
		for _, p := range []*chart.Panel{&live, &waiting} {
			p.X.To, p.X.Ticks = to, ticks(to, 8)
			for _, l := range p.Lines {
				for _, q := range l.Points {
					p.Y.To = max(p.Y.To, q.Y*1.05, 1)
				}
			}
			p.Y.Ticks = ticks(p.Y.To, 4)
		}
		panels = append(panels, live, waiting)
	}
	if len(panels) == 0 {
		return fmt.Errorf("plotting: there is nothing to show: the picture is of %s, %s, %s, %s and %s, on all traces but %s", KEDA, KEDATuned, TokenRate, Clairvoyant, Millrace, Week)
	}
	return chart.Write(w, panels...)
}

// extend goes on to p. Of points of one height in a row it keeps the first and the last.
func extend(line []chart.Point, p chart.Point) []chart.Point {
	if n := len(line); n >= 2 && line[n-1].Y == p.Y && line[n-2].Y == p.Y {
		line[n-1] = p
		return line
	}
	return append(line, p)
}

// ticks are about n round numbers from 0 to most.
func ticks(most float64, n int) []chart.Tick {
	step := math.Pow(10, math.Floor(math.Log10(most/float64(n))))
	for _, f := range []float64{1, 2, 5, 10} {
		if most/(f*step) <= float64(n) {
			step *= f
			break
		}
	}
	var all []chart.Tick
	for v := 0.0; v <= most; v += step {
		all = append(all, chart.Tick{At: v, Text: fmt.Sprintf("%g", v)})
	}
	return all
}
