package routing_test

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/bench/routing"
)

func record(t *testing.T, p routing.Params) *routing.Workload {
	t.Helper()
	w, err := routing.NewWorkload(p)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// near tells whether got is within a share of want.
func near(got, want, within float64) bool { return math.Abs(got-want) <= within*want }

func TestLengthsFollowTheirShapes(t *testing.T) {
	t.Parallel()
	for shape, want := range map[routing.Shape]struct {
		prompt, output           float64 // medians
		promptMean, outputMean   float64 // after the caps
		longestPrompt, maxOutput int
	}{
		// Means: median * exp(sigma^2/2), and one in a hundred of 2,750 tokens for the prompts.
		routing.SeedLike: {prompt: 60, output: 9, promptMean: 0.99*82.6 + 27.5, outputMean: 10.2, longestPrompt: 4000, maxOutput: 64},
		routing.ChatLike: {prompt: 160, output: 140, promptMean: 306, outputMean: 192, longestPrompt: 2048, maxOutput: 512},
	} {
		w := record(t, routing.Params{Shape: shape, Requests: 100_000})
		var prompts, outputs []int
		var promptSum, outputSum, long int
		for _, a := range w.Arrivals {
			prompts, outputs = append(prompts, a.Prompt), append(outputs, a.Output)
			promptSum += a.Prompt
			outputSum += a.Output
			if a.Prompt >= 1500 {
				long++
			}
		}
		slices.Sort(prompts)
		slices.Sort(outputs)
		n := len(prompts)
		if !near(float64(prompts[n/2]), want.prompt, 0.03) || !near(float64(outputs[n/2]), want.output, 0.12) {
			t.Errorf("%s: medians of %d and %d, want %v and %v", shape, prompts[n/2], outputs[n/2], want.prompt, want.output)
		}
		if p, o := float64(promptSum)/float64(n), float64(outputSum)/float64(n); !near(p, want.promptMean, 0.03) || !near(o, want.outputMean, 0.03) {
			t.Errorf("%s: means of %.1f and %.1f, want %.1f and %.1f", shape, p, o, want.promptMean, want.outputMean)
		}
		if prompts[0] < 1 || outputs[0] < 1 || prompts[n-1] > want.longestPrompt || outputs[n-1] > want.maxOutput {
			t.Errorf("%s: prompts from %d to %d, answers from %d to %d", shape, prompts[0], prompts[n-1], outputs[0], outputs[n-1])
		}
		if shape == routing.SeedLike && !near(float64(long), 1000, 0.1) {
			t.Errorf("%d long prompts in 100,000", long)
		}
	}
}

func TestGapsHaveTheirRateAndVariation(t *testing.T) {
	t.Parallel()
	for variant, variation := range map[routing.Variant]float64{routing.Equal: 1, routing.Bursts: 3} {
		w := record(t, routing.Params{Variant: variant, Rate: 20, Requests: 200_000})
		var last time.Duration
		var sum, squares float64
		for _, a := range w.Arrivals {
			if a.At < last {
				t.Fatalf("%s: an arrival at %v after one at %v", variant, a.At, last)
			}
			gap := (a.At - last).Seconds()
			sum, squares, last = sum+gap, squares+gap*gap, a.At
		}
		n := float64(len(w.Arrivals))
		mean := sum / n
		if cv := math.Sqrt(squares/n-mean*mean) / mean; !near(mean, 0.05, 0.03) || !near(cv, variation, 0.04) {
			t.Errorf("%s: gaps of %.4f s with a variation of %.2f, want 0.05 s and %v", variant, mean, cv, variation)
		}
	}
}

func TestVariantsHaveTheirEngines(t *testing.T) {
	t.Parallel()
	for _, v := range routing.Variants() {
		w := record(t, routing.Params{Variant: v, Requests: 2000})
		var names []string
		for i, e := range w.Engines {
			names = append(names, e.Profile.Name)
			if want := v == routing.Slow && i == 0; (e.Slowdown != 1) != want || want && e.Slowdown != 1.6 {
				t.Errorf("%s: engine %d takes %v times as long", v, i, e.Slowdown)
			}
			if (len(e.Stalls) > 0) != (v == routing.Stalls) {
				t.Errorf("%s: engine %d has %d stalls", v, i, len(e.Stalls))
			}
		}
		want := []string{"a10-7b", "a10-7b", "a10-7b"}
		if v == routing.Mixed {
			want[0] = "l40s-8b"
		}
		if d := cmp.Diff(want, names); d != "" {
			t.Errorf("%s: %s", v, d)
		}
	}
}

func TestStallsComeAboutOnceAMinute(t *testing.T) {
	t.Parallel()
	w := record(t, routing.Params{Variant: routing.Stalls, Rate: 1, Requests: 36_000}) // ten hours
	length := w.Arrivals[len(w.Arrivals)-1].At
	for i, e := range w.Engines {
		end := time.Duration(0)
		for _, s := range e.Stalls {
			if s.From < end || s.To-s.From != 3*time.Second {
				t.Fatalf("engine %d: a stall from %v to %v after one that ends at %v", i, s.From, s.To, end)
			}
			end = s.To
		}
		if end < length {
			t.Errorf("engine %d: the last stall is at %v, the last arrival at %v", i, end, length)
		}
		if got := float64(len(e.Stalls)); !near(got, end.Minutes(), 0.05) {
			t.Errorf("engine %d: %v stalls in %v", i, got, end)
		}
	}
}

func TestASeedTellsTheWholeWorkload(t *testing.T) {
	t.Parallel()
	p := routing.Params{Variant: routing.Stalls, Requests: 500, Seed: 7}
	a, b := record(t, p), record(t, p)
	if d := cmp.Diff(a, b); d != "" {
		t.Errorf("the same seed gives another workload: %s", d)
	}
	p.Seed = 8
	if c := record(t, p); slices.Equal(a.Arrivals, c.Arrivals) {
		t.Error("another seed gives the same arrivals")
	}
	p.Seed, p.Variant = 7, routing.Slow
	if c := record(t, p); !slices.Equal(a.Arrivals, c.Arrivals) {
		t.Error("the engines change the arrivals")
	}
}

func TestParamsAreCompletedAndChecked(t *testing.T) {
	t.Parallel()
	for p, want := range map[routing.Params]routing.Params{
		{}:                        {Shape: routing.SeedLike, Variant: routing.Equal, Rate: 50},
		{Variant: routing.Low}:    {Shape: routing.SeedLike, Variant: routing.Low, Rate: 15},
		{Variant: routing.Mixed}:  {Shape: routing.ChatLike, Variant: routing.Mixed, Rate: 10},
		{Shape: routing.ChatLike}: {Shape: routing.ChatLike, Variant: routing.Equal, Rate: 5.4},
	} {
		want.Requests, want.StallEvery = 8000, time.Minute
		if d := cmp.Diff(want, record(t, p).Params); d != "" {
			t.Errorf("%+v: %s", p, d)
		}
	}
	for want, p := range map[string]routing.Params{
		`workload "x" is unknown: use seed-like, chat-like`: {Shape: "x"},
		`variant "x" is unknown: use equal, slow`:           {Variant: "x"},
		"rate is -1 requests a second":                      {Rate: -1},
		"rate is NaN requests a second":                     {Rate: math.NaN()},
		"requests is -1, it must be at least 1":             {Requests: -1},
		"stalls come every 3s, which must be more":          {StallEvery: 3 * time.Second},
	} {
		if err := p.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", p, err, want)
		}
	}
}
