package scaling

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/scale"
)

var update = flag.Bool("update", false, "write the golden files anew")

// scribe is Millrace, with each decision that changes anything written down.
type scribe struct{ bytes.Buffer }

func (s *scribe) decide(v *view) plan {
	d := scale.Decide(v.Sample, v.history(), v.pool)
	if d.Start > 0 || len(d.Stop) > 0 {
		fmt.Fprintf(s, "%5.0f s  %-10s %2d there, %2d wanted: start %2d, stop %v: %s\n", v.now.Seconds(), d.Action, v.live, d.Want, d.Start, d.Stop, d.Reason)
	}
	return plan{needed: d.Needed, start: d.Start, stop: d.Stop, yield: d.Yield, trend: d.Forecast.Trend}
}

// TestDecisionsOnRecordedTraces: when how many workers are asked for and taken away, and why, on one recording of each short trace. A change of how is decided shows here; -update takes it.
func TestDecisionsOnRecordedTraces(t *testing.T) {
	t.Parallel()
	pool, err := defaultPool()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []TraceName{Step, Ramp120, Ramp600, Square, Batch} {
		tr := newTrace(name)
		var got scribe
		if _, err := simulate(t.Context(), tr, tr.requests(1), pool, &got, 1, false); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join("testdata", string(name)+".golden")
		if *update {
			if err := os.WriteFile(file, got.Bytes(), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got.String()); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
