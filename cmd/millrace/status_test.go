package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

// TestStatusOfWorkers: what a person sees of workers in every condition, within 120 columns but for notes and models.
func TestStatusOfWorkers(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	began := func(ago time.Duration) float64 { return float64(now.Add(-ago).Unix()) }
	const gib = 1 << 30
	workers := []client.Worker{
		{
			Name: "gpu-box-1", State: "ready", StateSince: began(3*time.Hour + 2*time.Minute), Models: []job.Model{"llama-70b"}, Engine: "vllm", Source: "engine",
			Shape:    client.Shape{TensorParallel: 2, PipelineParallel: 1, DataParallel: 4},
			Capacity: 1_200_000, Used: 800_000, Free: 364_000, Load: 0.667, Level: 2, TTFT: 0.083, Running: 61, Limit: 256, InHand: 2, TokensPerSecond: 2431.4, Completed: 123_456, Failed: 12,
			GPUs: []client.GPU{
				{Index: 0, Model: "NVIDIA H100 80GB HBM3", MemoryTotal: 80 * gib, MemoryUsed: 71.5 * gib, Utilization: 0.97, Temperature: 64},
				{Index: 1, Model: "NVIDIA H100 80GB HBM3", MemoryTotal: 80 * gib, MemoryUsed: 70 * gib, Stale: true},
			},
		},
		{
			Name: "gpu-box-2", State: "unready", Reason: "gpu_fault: GPU 0: Xid 79: it has fallen off the bus", StateSince: began(12 * time.Second), FallBacks: 4, ProbeSeconds: 0.042,
			Models: []job.Model{"llama-70b"}, Engine: "vllm", Source: "engine", Capacity: 1_200_000, Free: 1_200_000, Level: 9,
			GPUs: []client.GPU{{Index: 0, Model: "NVIDIA H100 80GB HBM3", Fault: "Xid 79: it has fallen off the bus"}},
		},
		{
			Name: "laptop", State: "ready", StateSince: began(90 * time.Second), Models: []job.Model{"llama3.2:1b"}, Engine: "ollama", Source: "estimated", Capacity: 32_768, Used: 24_576, Free: 7_209,
			Load: 1.25, Level: 7, TTFT: 3.2, Running: 4, Limit: 4, Brake: "requests wait inside the engine", EngineWaiting: 1, TokensPerSecond: 38, Completed: 2,
		},
	}
	var out strings.Builder
	if err := printWorkers(&out, now, workers); err != nil {
		t.Fatal(err)
	}
	if err := printGPUs(&out, workers); err != nil {
		t.Fatal(err)
	}
	want := `WORKER     STATE    SINCE  KV CACHE                 LOAD  TTFT      RUNNING    TOK/S  DONE     FAILED  ENGINE        MODELS
gpu-box-1  ready    3h02m  █████░░░  67% of 1.2M    67%   83ms (2)  61/256 +2  2431   123,456  12      vllm tp2 dp4  llama-70b
gpu-box-2  unready  12s    ░░░░░░░░  0% of 1.2M     0%    - (9)     0          0      0        0       vllm          llama-70b
laptop     ready    1m30s  ██████░░  75% of 32,768  125%  3.2s (7)  4/4        38     2        0       ollama        llama3.2:1b

gpu-box-2: gpu_fault: GPU 0: Xid 79: it has fallen off the bus; fell back 4 times, the last probe took 42ms
laptop: pulls nothing: requests wait inside the engine; 1 request waiting inside the engine; its engine does not tell its cache: the size is the configured one

WORKER     GPU  MODEL                  MEMORY            BUSY  TEMP   FAULT
gpu-box-1  0    NVIDIA H100 80GB HBM3  71.5 of 80.0 GiB  97%   64 °C  
gpu-box-1  1    NVIDIA H100 80GB HBM3  70.0 of 80.0 GiB  0%    0 °C   the driver does not answer
gpu-box-2  0    NVIDIA H100 80GB HBM3  0.0 of 0.0 GiB    0%    0 °C   Xid 79: it has fallen off the bus
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
	for line := range strings.Lines(out.String()) {
		if i := strings.Index(line, "MODELS"); i >= 0 && utf8.RuneCountInString(line[:i]) > 120 {
			t.Errorf("the table is wider than 120 columns: %q", line)
		}
	}
}

// TestWorkersOfOneKindNeedNoModels: they stand above, with the queues.
func TestWorkersOfOneKindNeedNoModels(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	workers := []client.Worker{{Name: "a", Models: []job.Model{"m"}}, {Name: "b", Models: []job.Model{"m"}}}
	if err := printWorkers(&out, time.Now(), workers); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.String(), "MODELS") || len(strings.Split(strings.TrimSpace(out.String()), "\n")) != 3 {
		t.Errorf("got\n%s", out.String())
	}
}

// TestStatusOfABatch: the lines that are not queued yet are told, and what keeps them.
func TestStatusOfABatch(t *testing.T) {
	t.Parallel()
	for want, q := range map[string]client.ModelQueue{
		"7":                                   {Waiting: map[job.Class]int{job.Standard: 3, job.Batch: 4}},
		"7 (5 in line)":                       {Waiting: map[job.Class]int{job.Standard: 2}, WaitingLines: map[job.Tenant]int{"a": 5}},
		"9,207 (9,000 in batches)":            {Waiting: map[job.Class]int{job.Batch: 207}, BatchLines: map[job.Tenant]int{"a": 8999, "b": 1}},
		"9,212 (5 in line, 9,000 in batches)": {Waiting: map[job.Class]int{job.Batch: 207}, WaitingLines: map[job.Tenant]int{"a": 5}, BatchLines: map[job.Tenant]int{"a": 9000}},
	} {
		if got := waiting(q); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	full := client.Worker{Running: 248, Sequences: 248, BatchLimit: 248}
	if got, want := note(full), "its places for batch work are taken: 248 sequences run, and 248 may for one of it to start"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	full.Sequences = 247
	if got := note(full); got != "" {
		t.Errorf("with a place left: %q", got)
	}
}

// TestStatusOfPools: a line for each, however many models it serves, that says when a worker is there.
func TestStatusOfPools(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_700_000_000, 0)
	at := func(in time.Duration) float64 { return float64(now.Add(in).UnixMilli()) / 1000 }
	two := client.PoolState{Name: "two-models", Wanted: 2, Ready: 1, Starting: 1, Max: 8, ReadyAt: at(31500 * time.Millisecond), Reason: "the backlog needs it"}
	queues := []client.ModelQueue{
		{Model: "a", Pools: []client.PoolState{two}},
		{Model: "b", Pools: []client.PoolState{two, {Name: "idle", Max: 1200, Reason: "nobody has\nasked for 10m"}}},
		{Model: "c", Pools: []client.PoolState{
			{Name: "broken", Wanted: 1, Max: 2, Unavailable: "image x: not found.", RetryAt: at(80 * time.Second), ReadyAt: at(time.Hour)},
			{Name: "tried", Wanted: 1, Starting: 1, Max: 2, Unavailable: "exit code 1", RetryAt: at(-time.Second)},
			{Name: "due", Max: 2, Unavailable: "exit code 1", RetryAt: at(-time.Second)},
			{Name: "foreign", Max: 2, Unavailable: "there is no provider x"},
			{Name: "late", Wanted: 1, Starting: 1, Draining: 3, Max: 2, ReadyAt: at(-4 * time.Second)},
			{Name: "fresh", Wanted: 1, Starting: 1, Max: 2},
			{Name: "waits", Wanted: 1, Starting: 1, Max: 2, Reason: "1 worker needed; w-1 waits: pulling the image x"},
		}},
		{Model: "d"},
	}
	var out strings.Builder
	if err := printPoolStates(&out, now, queues); err != nil {
		t.Fatal(err)
	}
	want := `
POOL        WANTED  READY  STARTING  DRAINING  MAX    NOW
two-models  2       1      1         0         8      first ready in ~32 s
idle        0       0      0         0         1,200  nobody has; asked for 10m
broken      1       0      0         0         2      no worker can be started: image x: not found; the next try is in ~1m20s
tried       1       0      1         0         2      no worker can be started: exit code 1; the next try is under way
due         0       0      0         0         2      no worker can be started: exit code 1; the next try is due, once there is work
foreign     0       0      0         0         2      no worker can be started: there is no provider x
late        1       0      1         3         2      first ready late: it was expected 4.0s ago
fresh       1       0      1         0         2      first ready: not known yet
waits       1       0      1         0         2      first ready: not known yet: 1 worker needed; w-1 waits: pulling the image x
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
	// Those that no autoscaler tells of are there all the same.
	alone := []client.Pool{{Name: "gpus", Spec: []byte(`{"models":["d"],"max":3}`)}}
	for _, row := range []struct {
		queues []client.ModelQueue
		says   string
	}{{queues[3:], "start `millrace autoscaler`"}, {queues[:1], "has not decided about it yet"}} {
		out.Reset()
		if err := printPoolStates(&out, now, row.queues, alone...); err != nil || !strings.Contains(out.String(), "gpus ") || !strings.Contains(out.String(), row.says) {
			t.Errorf("%v, %s", err, out.String())
		}
	}
	out.Reset()
	reason := "no_worker"
	if err := printStatus(&out, now, &overview{Queues: []client.ModelQueue{{Model: "d", Reason: &reason}}, Workers: []client.Worker{}, Pools: alone}); err != nil || !strings.Contains(out.String(), "no worker serves this model, and no autoscaler runs to start one\n") {
		t.Errorf("%v, %s", err, out.String())
	}
	out.Reset()
	if err := printPoolStates(&out, now, queues[3:]); err != nil || out.Len() > 0 {
		t.Errorf("without pools: %v, %q", err, out.String())
	}
}

func TestGPUsThatCUDASees(t *testing.T) {
	t.Parallel()
	for list, want := range map[string][]string{
		"": nil, "0": {"0"}, "1, GPU-ab": {"1", "GPU-ab"}, "0,-1,1": {"0"}, "-1": {"none"}, ",": {"none"},
	} {
		if diff := cmp.Diff(want, visibleToCUDA(list)); diff != "" {
			t.Errorf("%q: %s", list, diff)
		}
	}
}

// TestStatusShowsWhatCanBeShown: a part that hangs or fails is told, and hides no other.
func TestStatusShowsWhatCanBeShown(t *testing.T) {
	t.Parallel()
	var failing atomic.Bool
	ended := make(chan struct{})
	mux := http.NewServeMux()
	mux.HandleFunc("/admin/v1/queues", func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-ended:
		}
	})
	mux.HandleFunc("/admin/v1/workers", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"data":[{"name":"gpu-1","state":"ready"}]}`))
	})
	mux.HandleFunc("/admin/v1/pools", func(w http.ResponseWriter, _ *http.Request) {
		if failing.Load() {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		_, _ = w.Write([]byte(`{"data":[]}`))
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(ended) })
	c, err := client.New(client.Config{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	o, err := look(t.Context(), c, 500*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "the queues are not known") || strings.Contains(err.Error(), "workers") || o.Queues != nil || len(o.Workers) != 1 || o.Pools == nil {
		t.Errorf("%+v, %v", o, err)
	}
	var out strings.Builder
	if err := printStatus(&out, time.Now(), &o); err != nil || !strings.Contains(out.String(), "gpu-1") || strings.Contains(out.String(), "no model is known") {
		t.Errorf("%v, %s", err, out.String())
	}
	failing.Store(true)
	var refused *client.Error
	if _, err := look(t.Context(), c, 500*time.Millisecond); !errors.As(err, &refused) || refused.Status != http.StatusUnauthorized {
		t.Errorf("without the key: %v", err)
	}
}
