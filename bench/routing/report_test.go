package routing_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/millrace/millrace/bench/routing"
)

// took is a run whose requests took so many milliseconds to the first token, and ten times as many to the last.
func took(spread float64, preemptions int, ms ...int) *routing.Run {
	r := &routing.Run{LoadSpread: spread, Preemptions: preemptions}
	for _, n := range ms {
		d := time.Duration(n) * time.Millisecond
		r.Samples = append(r.Samples, routing.Sample{TTFT: d, E2E: 10 * d, Failed: n == 0})
	}
	return r
}

func TestMedianTakesTheMiddleOfTheRuns(t *testing.T) {
	t.Parallel()
	runs := routing.Runs{
		routing.LeastLoadRandom: {took(0.1, 0, 10, 100), took(0.3, 4, 20, 200), took(0.5, 2, 30, 400)},
		routing.Millrace:        {took(0.2, 0, 10, 50), took(0.2, 0, 10, 50), took(0.2, 0, 10, 100, 0)},
	}
	var r routing.Report
	r.Median(runs)
	want := routing.Arm{Name: routing.LeastLoadRandom, TTFTP50: 200, TTFTP99: 200, E2EP50: 2000, E2EP99: 2000, LoadSpread: 0.3, Preemptions: 2}
	if d := cmp.Diff(want, r.Arms[2]); d != "" {
		t.Error(d)
	}
	// 50/100, 50/200, 100/400
	if r.Runs != 3 || r.RatioTTFTP99 != 0.25 || r.RatioE2EP99 != 0.25 {
		t.Errorf("%d runs, ratios %v and %v", r.Runs, r.RatioTTFTP99, r.RatioE2EP99)
	}
}

func TestPoolTakesTheRequestsOfAllRunsTogether(t *testing.T) {
	t.Parallel()
	runs := routing.Runs{
		routing.LeastLoadRandom: {took(0.1, 1, 10, 100), took(0.3, 2, 20, 0)},
		routing.Millrace:        {took(0.2, 0, 10, 50), took(0.2, 0, 10, 20)},
	}
	var r routing.Report
	r.Pool(runs)
	want := routing.Arm{Name: routing.LeastLoadRandom, TTFTP50: 20, TTFTP99: 100, E2EP50: 200, E2EP99: 1000, LoadSpread: 0.2, Preemptions: 1.5, Errors: 0.5}
	if d := cmp.Diff(want, r.Arms[2], cmpopts.EquateApprox(0, 1e-9)); d != "" {
		t.Error(d)
	}
	if r.Runs != 2 || r.RatioTTFTP99 != 0.5 || r.RatioE2EP99 != 0.5 {
		t.Errorf("%d runs, ratios %v and %v", r.Runs, r.RatioTTFTP99, r.RatioE2EP99)
	}
}

func TestTheReportsJSONHasItsFields(t *testing.T) {
	t.Parallel()
	var r routing.Report
	r.Median(routing.Runs{})
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	arm, _ := got["arms"].([]any)[0].(map[string]any)
	for _, name := range []string{"name", "ttft_p50_ms", "ttft_p99_ms", "e2e_p50_ms", "e2e_p99_ms", "load_spread", "preemptions", "errors"} {
		if _, ok := arm[name]; !ok {
			t.Errorf("an arm lacks %s", name)
		}
	}
	for _, name := range []string{"simulated", "workload", "variant", "rate", "runs", "requests", "ratio_ttft_p99", "ratio_e2e_p99", "seconds"} {
		if _, ok := got[name]; !ok {
			t.Errorf("the report lacks %s", name)
		}
	}
}
