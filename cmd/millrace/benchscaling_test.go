package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/millrace/millrace/bench/scaling"
)

func TestBenchScalingReportsEachPolicyAndTheBars(t *testing.T) {
	t.Parallel()
	picture := filepath.Join(t.TempDir(), "scaling.svg")
	args := []string{"bench", "scaling", "--trace", "ramp120,batch", "--policy", "keda,millrace", "--seeds", "1"}
	r := millrace(t, nil, "", append(args, "--plot", picture, "-o", "json")...)
	if r.code != 0 {
		t.Fatal(r.err)
	}
	var report scaling.Report
	if err := json.Unmarshal([]byte(r.out), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Traces) != 2 || len(report.Traces[0].Arms) != 2 || len(report.Bars) != 2 || report.Traces[1].Arms[1].Lines == 0 {
		t.Errorf("%+v", report)
	}
	if svg, err := os.ReadFile(picture); err != nil || !strings.HasPrefix(string(svg), "<svg") {
		t.Errorf("%.20s, %v", svg, err)
	}
	r = millrace(t, nil, "", args...)
	for _, want := range []string{"ramp120: 1 recording of some ", "GPU-SECONDS", "BATCH DONE IN", "\nkeda ", "\nmillrace ", "the bar is at most 6 s, 17.5k GPU-s", "took "} {
		if !strings.Contains(r.out, want) {
			t.Errorf("no %q in\n%s", want, r.out)
		}
	}
}

func TestBenchScalingRefusesWhatItDoesNotKnow(t *testing.T) {
	t.Parallel()
	for flag, value := range map[string]string{"--trace": "cliff", "--policy": "astral", "--seeds": "-1"} {
		if r := millrace(t, nil, "", "bench", "scaling", flag, value); r.code != 2 || !strings.Contains(r.err, strings.TrimPrefix(flag, "--")) {
			t.Errorf("%s %s: %d, %s", flag, value, r.code, r.err)
		}
	}
}
