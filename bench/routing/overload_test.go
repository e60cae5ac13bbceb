package routing_test

import (
	"slices"
	"testing"

	"github.com/millrace/millrace/bench/routing"
)

// TestOverloadCostsNoThroughput: at two and three times the load that the engines can bear they get done at least four fifths of the most tokens a second, and hardly preempt.
func TestOverloadCostsNoThroughput(t *testing.T) {
	t.Parallel()
	for shape, capacity := range map[routing.Shape]float64{routing.ChatLike: 6.8, routing.SeedLike: 80} { // requests/s of three a10-7b
		best := 0.0
		for _, load := range []float64{0.8, 1, 2, 3} {
			w := record(t, routing.Params{Shape: shape, Rate: load * capacity, Requests: int(100 * load * capacity), Seed: 5})
			o, err := routing.Observe(t.Context(), w, routing.Millrace)
			if err != nil {
				t.Fatal(err)
			}
			type end struct {
				at     float64
				tokens int
			}
			var ends []end
			for i, a := range w.Arrivals {
				ends = append(ends, end{(a.At + o.Run.Samples[i].E2E).Seconds(), a.Prompt + a.Output})
			}
			slices.SortFunc(ends, func(a, b end) int { return int(1e6 * (a.at - b.at)) })
			tokens := 0
			for _, e := range ends[:len(ends)*9/10] { // the last ones do not fill the engines
				tokens += e.tokens
			}
			rate := float64(tokens) / ends[len(ends)*9/10].at
			t.Logf("%s at %.1f of capacity: %.0f tokens/s, %d preemptions of %d requests", shape, load, rate, o.Run.Preemptions, len(w.Arrivals))
			best = max(best, rate)
			if load > 1 && rate < 0.8*best {
				t.Errorf("%s at %.1f of capacity: %.0f tokens/s, the best was %.0f", shape, load, rate, best)
			}
			if o.Run.Preemptions > len(w.Arrivals)/50 {
				t.Errorf("%s at %.1f of capacity: %d preemptions of %d requests", shape, load, o.Run.Preemptions, len(w.Arrivals))
			}
		}
	}
}
