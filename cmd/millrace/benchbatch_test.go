package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/millrace/millrace/bench/batch"
)

// TestBenchBatchFillsItsReport runs it small, on the stores that it brings along: what it finds on a busy machine is nobody's business here.
func TestBenchBatchFillsItsReport(t *testing.T) {
	t.Parallel()
	r := millrace(t, nil, "", "bench", "batch", "--lines", "60", "--speed", "10", "--rate", "10", "--redis-server", "off", "--dir", t.TempDir(), "-o", "json")
	if r.code != 0 {
		t.Fatalf("%+v", r)
	}
	var got batch.Report
	if err := json.Unmarshal([]byte(r.out), &got); err != nil {
		t.Fatal(err)
	}
	if got.Counts != (batch.Counts{Completed: 60, Once: 60}) {
		t.Errorf("counts %+v", got.Counts)
	}
	if got.Phases.Run <= 0 || got.Ideal.Seconds <= 0 || got.BusyShare <= 0 || got.Direct.LinesPerSecond <= 0 || got.Direct.BusyShare <= 0 || got.LinesPerSecond <= 0 {
		t.Errorf("a figure is missing: %s", r.out)
	}
	if i := got.Interactive; i == nil || i.Alone.N == 0 || i.Beside.N == 0 || i.Failed > 0 {
		t.Errorf("interactive calls: %+v", i)
	}
	names := map[string]int{}
	for _, role := range got.Roles {
		names[role.Name] = role.Processes
		if role.Peak < 1<<20 {
			t.Errorf("%s has %d bytes", role.Name, role.Peak)
		}
	}
	for name, n := range map[string]int{"api": 1, "dispatcher": 1, "workers": 2, "engines": 2, "stores (embedded NATS and Redis)": 1} {
		if names[name] != n {
			t.Errorf("%d processes of %s, want %d", names[name], name, n)
		}
	}
	for name := range got.Notes {
		if strings.TrimSpace(got.Notes[name]) == "" {
			t.Errorf("nothing is said of %s", name)
		}
	}
}
