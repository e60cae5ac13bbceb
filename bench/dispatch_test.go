package bench_test

import (
	"encoding/json"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/millrace/millrace/bench"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testenv.NATSLeaves()...) }

// TestDispatchFillsItsReport runs all measurements, much shortened: what they find on a busy machine is nobody's business here.
func TestDispatchFillsItsReport(t *testing.T) {
	t.Parallel()
	r, err := bench.Dispatch(t.Context(), bench.Config{Dir: t.TempDir(), Scale: 0.05, InFlight: 8, RedisServer: bench.FindRedis(), Log: testenv.Log(t)})
	if err != nil {
		t.Fatal(err)
	}
	if r.Embedded == nil || r.Redis == nil {
		t.Fatal("a part is missing")
	}
	for name, v := range map[string]*bench.Variant{"embedded": r.Embedded, "redis": r.Redis} {
		if v.Interactive.N == 0 || v.Interactive.P50 <= 0 || v.Interactive.P99 < v.Interactive.P50 || v.Submitted.N == 0 || v.Accepted.N == 0 {
			t.Errorf("%s: latencies are missing: %+v", name, v)
		}
		if v.Durable.Jobs == 0 || v.Durable.PerSecond <= 0 || v.Durable.Bare <= 0 || v.Durable.Ratio <= 0 {
			t.Errorf("%s: the throughput is missing: %+v", name, v.Durable)
		}
		if v.Memory.Jobs == 0 {
			t.Errorf("%s: the memory is missing: %+v", name, v.Memory)
		}
	}
	if r.DurableRatio != r.Embedded.Durable.Ratio || r.Relaxed.Jobs == 0 || r.TTFT.Direct.N == 0 || r.TTFT.Through.N == 0 {
		t.Errorf("a number is missing: %+v", r)
	}
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(raw, &fields); err != nil {
		t.Fatal(err)
	}
	for name := range fields["embedded"].(map[string]any) {
		if name != "redis" && r.Limits[name] == "" {
			t.Errorf("nothing is said of what limits %s", name)
		}
	}
}

func TestQuantile(t *testing.T) {
	t.Parallel()
	values := []time.Duration{5, 1, 4, 2, 3}
	for _, tt := range []struct {
		q    float64
		want time.Duration
	}{{0, 1}, {0.5, 3}, {0.99, 5}, {1, 5}} {
		if got := bench.Quantile(values, tt.q); got != tt.want {
			t.Errorf("quantile %v is %v, want %v", tt.q, got, tt.want)
		}
	}
	if bench.Quantile(nil, 0.5) != 0 {
		t.Error("of nothing it is not 0")
	}
}
