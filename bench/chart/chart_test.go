package chart_test

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/millrace/millrace/bench/chart"
)

func TestPicturesAreXML(t *testing.T) {
	t.Parallel()
	p := chart.Panel{
		Title: "5 < 6 & 7", X: chart.Axis{Label: "x", To: 10, Ticks: []chart.Tick{{At: 5, Text: "<5>"}}}, Y: chart.Axis{Label: "y", From: 1, To: 2},
		Lines: []chart.Line{{Name: "a & b", Colour: "#000", Points: []chart.Point{{X: 0, Y: 1}, {X: 20, Y: -3}}}},
	}
	var b strings.Builder
	if err := chart.Write(&b, p, p); err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(b.String())); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	// From the lower left corner to the edge: what is outside is drawn there.
	if !strings.Contains(b.String(), `points="64.0,348.0 700.0,348.0"`) {
		t.Error(b.String())
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestAPictureThatCannotBeWrittenIsAnError(t *testing.T) {
	t.Parallel()
	if err := chart.Write(full{}); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Error(err)
	}
}
