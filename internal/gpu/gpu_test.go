package gpu_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/millrace/millrace/internal/gpu"
	"github.com/millrace/millrace/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// until repeats check until it returns true.
func until(t *testing.T, what string, check func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !check(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timed out: %s", what)
		}
	}
}

// start runs w until the test ends.
func start(t *testing.T, w *gpu.Watcher) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestDriverThatBlocksHoldsNobody: the last answer is served as stale, and Run ends without the driver.
func TestDriverThatBlocksHoldsNobody(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := gpu.Blocked(testenv.Log(t), time.Millisecond, release)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	until(t, "its answer is stale", func() bool {
		gpus := w.GPUs()
		return len(gpus) == 1 && gpus[0].Stale && gpus[0].Model == "M"
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	close(release)
}

func TestPick(t *testing.T) {
	t.Parallel()
	machine := []gpu.GPU{{Index: 0, UUID: "GPU-aa11"}, {Index: 1, UUID: "GPU-ab22"}, {Index: 2, UUID: "GPU-cc33"}}
	for _, tt := range []struct {
		names []string
		want  []int
		err   string
	}{
		{names: nil, want: []int{}},
		{names: []string{"2", "0"}, want: []int{2, 0}},
		{names: []string{"GPU-ab22", "gpu-cc"}, want: []int{1, 2}},
		{names: []string{"GPU-a"}, err: "several"},
		{names: []string{"3"}, err: `no GPU "3": it has 0 (GPU-aa11), 1 (GPU-ab22), 2 (GPU-cc33)`},
		{names: []string{"1", "GPU-ab"}, err: "named twice"},
	} {
		picked, err := gpu.Pick(machine, tt.names)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%v: error %v, want %q", tt.names, err, tt.err)
			}
			continue
		}
		got := []int{}
		for _, g := range picked {
			got = append(got, g.Index)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
			t.Errorf("%v: %v %s", tt.names, err, diff)
		}
	}
}

// TestApplicationsErrorsAreNotCritical: what a program can cause does not take its GPU away.
func TestApplicationsErrorsAreNotCritical(t *testing.T) {
	t.Parallel()
	critical := gpu.Critical()
	for _, x := range []uint64{13, 31, 43, 45, 63, 68, 69, 92, 137, 154} {
		if slices.Contains(critical, x) {
			t.Errorf("Xid %d is critical", x)
		}
	}
	for _, x := range []uint64{48, 64, 74, 79, 94, 95, 119, 120} {
		if !slices.Contains(critical, x) {
			t.Errorf("Xid %d is not critical", x)
		}
	}
}
