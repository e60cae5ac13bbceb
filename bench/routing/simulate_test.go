package routing_test

import (
	"context"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/millrace/millrace/bench/routing"
)

func simulate(t *testing.T, s routing.Study) *routing.Report {
	t.Helper()
	r, err := routing.Simulate(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// figures leaves out what differs from run to run.
var figures = cmp.Options{cmpopts.IgnoreFields(routing.Report{}, "Seconds"), cmpopts.IgnoreUnexported(routing.Report{})}

func TestEveryRequestIsAnsweredOnceByEveryArm(t *testing.T) {
	t.Parallel()
	for _, v := range routing.Variants() {
		w := record(t, routing.Params{Variant: v, Requests: 1500, Seed: 3})
		for _, p := range routing.Policies() {
			o, err := routing.Observe(t.Context(), w, p)
			if err != nil {
				t.Fatalf("%s, %s: %v", v, p, err)
			}
			for i, a := range w.Arrivals {
				s := o.Run.Samples[i]
				switch {
				case s.Failed && p != routing.Millrace && v == routing.Stalls: // no node was healthy
				case s.Failed:
					t.Errorf("%s, %s: request %d has no answer", v, p, i)
				case s.TTFT <= 0 || s.E2E < s.TTFT:
					t.Errorf("%s, %s: request %d has its first token after %v, its last after %v", v, p, i, s.TTFT, s.E2E)
				case o.Tokens[i] != a.Output || o.Ends[i] != 1:
					t.Errorf("%s, %s: request %d got %d tokens of %d, and %d ends", v, p, i, o.Tokens[i], a.Output, o.Ends[i])
				}
			}
			if o.Left != 0 {
				t.Errorf("%s, %s: the engines still run %d", v, p, o.Left)
			}
			if o.Reserved != 0 {
				t.Errorf("%s, %s: the ledgers hold %d when nothing runs", v, p, o.Reserved)
			}
		}
	}
}

func TestTheSameSeedsGiveTheSameFigures(t *testing.T) {
	t.Parallel()
	s := routing.Study{Params: routing.Params{Variant: routing.Stalls, Requests: 1000}, Seeds: 3}
	first := simulate(t, s)
	if d := cmp.Diff(first, simulate(t, s), figures); d != "" {
		t.Error(d)
	}
	s.Seed = 1
	if cmp.Equal(first, simulate(t, s), figures) {
		t.Error("other seeds give the same figures")
	}
}

// The bars of the whole study, with room for fewer seeds and requests.
func TestMillraceBeatsTheRouters(t *testing.T) {
	t.Parallel()
	for variant, bar := range map[routing.Variant]struct{ ttft, e2e float64 }{
		routing.Equal: {0.75, 0.95}, routing.Stalls: {0.5, 0.9}, routing.Mixed: {0.1, 0.5}, routing.Slow: {0.75, 0.95}, routing.Low: {1.05, 1.05},
	} {
		r := simulate(t, routing.Study{Params: routing.Params{Variant: variant, Requests: 3000}, Seeds: 5})
		if r.RatioTTFTP99 > bar.ttft || r.RatioE2EP99 > bar.e2e {
			t.Errorf("%s: TTFT P99 is %.2f of the best router's and E2E P99 %.2f, want at most %.2f and %.2f", variant, r.RatioTTFTP99, r.RatioE2EP99, bar.ttft, bar.e2e)
		}
	}
}

func TestSimulateEndsWithItsContext(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := routing.Simulate(ctx, routing.Study{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestStudiesAreChecked(t *testing.T) {
	t.Parallel()
	for want, s := range map[string]routing.Study{
		"seeds is -1":  {Seeds: -1},
		`Order is "x"`: {Order: "x"},
		"rate is -1":   {Params: routing.Params{Rate: -1}},
	} {
		if _, err := routing.Simulate(t.Context(), s); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

func TestThePlotIsXMLWithALineForEachArm(t *testing.T) {
	t.Parallel()
	for _, v := range routing.Variants() {
		var b strings.Builder
		if err := simulate(t, routing.Study{Params: routing.Params{Variant: v, Requests: 300}, Seeds: 1}).Plot(&b); err != nil {
			t.Fatal(err)
		}
		if lines := polylines(t, b.String()); lines != len(routing.Policies()) {
			t.Errorf("%s: %d lines", v, lines)
		}
	}
	if err := new(routing.Report).Plot(io.Discard); err == nil {
		t.Error("a plot of nothing")
	}
}

func polylines(t *testing.T, svg string) (lines int) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return lines
		}
		if err != nil {
			t.Fatal(err)
		}
		if s, ok := token.(xml.StartElement); ok && s.Name.Local == "polyline" {
			lines++
		}
	}
}
