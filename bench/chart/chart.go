// Package chart draws lines as SVG, for the benchmarks' pictures.
package chart

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
)

// Panel is one pair of axes and what is drawn on them.
type Panel struct {
	Title string
	X, Y  Axis
	Lines []Line
	// Height of the plotted area in pixels. Default 300.
	Height int
	// LegendLeft has the legend on the left side, where the lines leave room there.
	LegendLeft bool
}

// Axis goes from From (left or below) to To. Who wants another scale than a linear one gives transformed values.
type Axis struct {
	Label    string
	From, To float64
	Ticks    []Tick
}

// Tick is a line across, with its text.
type Tick struct {
	At   float64
	Text string
}

// Line goes through points. A name makes it part of the legend.
type Line struct {
	Name, Colour string
	Points       []Point
}

// Point of a line; X and Y outside of the axes are drawn at their edges.
type Point struct{ X, Y float64 }

// Measures in pixels.
const (
	width       = 720
	left, right = 64, 700
	above       = 48 // of a panel's area
	below       = 52
	legendWidth = 160
	legendLine  = 18
)

// Write draws the panels below each other.
func Write(w io.Writer, panels ...Panel) error {
	var b bytes.Buffer
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	total := 0
	for i := range panels {
		if panels[i].Height == 0 {
			panels[i].Height = 300
		}
		total += above + panels[i].Height + below
	}
	line(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12" fill="#333">`, width, total)
	line(`<rect width="%d" height="%d" fill="#fff"/>`, width, total)
	at := 0
	for _, p := range panels {
		p.draw(at, line)
		at += above + p.Height + below
	}
	line(`</svg>`)
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("writing a picture: %w", err)
	}
	return nil
}

func (p *Panel) draw(from int, line func(format string, args ...any)) {
	top, bottom := from+above, from+above+p.Height
	x := func(v float64) float64 { return left + p.X.share(v)*(right-left) }
	y := func(v float64) float64 { return float64(bottom) - p.Y.share(v)*float64(p.Height) }
	line(`<text x="%d" y="%d" font-size="14">%s</text>`, left, top-24, text(p.Title))
	for _, t := range p.Y.Ticks {
		line(`<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`, left, y(t.At), right, left-8, y(t.At)+4, text(t.Text))
	}
	for _, t := range p.X.Ticks {
		line(`<path d="M%.1f %dV%d" stroke="#ddd"/><text x="%.1f" y="%d" text-anchor="middle">%s</text>`, x(t.At), top, bottom, x(t.At), bottom+18, text(t.Text))
	}
	line(`<text x="%d" y="%d" text-anchor="middle">%s</text>`, (left+right)/2, bottom+38, text(p.X.Label))
	line(`<text transform="translate(14 %d) rotate(-90)" text-anchor="middle">%s</text>`, (top+bottom)/2, text(p.Y.Label))
	named, legend := 0, right-legendWidth
	if p.LegendLeft {
		legend = left + 16
	}
	for _, l := range p.Lines {
		var path strings.Builder
		for _, q := range l.Points {
			fmt.Fprintf(&path, " %.1f,%.1f", x(q.X), y(q.Y))
		}
		line(`<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`, strings.TrimPrefix(path.String(), " "), l.Colour)
		if l.Name != "" {
			at := top + 16 + legendLine*named
			line(`<path d="M%d %dh22" stroke="%s" stroke-width="2"/><text x="%d" y="%d">%s</text>`, legend, at, l.Colour, legend+30, at+4, text(l.Name))
			named++
		}
	}
}

// share is where v lies on the axis, 0 to 1.
func (a *Axis) share(v float64) float64 { return min(max((v-a.From)/(a.To-a.From), 0), 1) }

func text(s string) string {
	var b strings.Builder
	if err := xml.EscapeText(&b, []byte(s)); err != nil {
		return "" // a strings.Builder takes everything
	}
	return b.String()
}
