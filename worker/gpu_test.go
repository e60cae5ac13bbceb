package worker_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/gpu"
	"github.com/millrace/millrace/internal/testenv"
	"github.com/millrace/millrace/worker"
)

// gpus are a machine's, as a driver tells them.
type gpus struct {
	first chan struct{}

	mu  sync.Mutex
	all []gpu.GPU
}

func newGPUs(uuids ...string) *gpus {
	g := &gpus{first: make(chan struct{})}
	close(g.first)
	for i, uuid := range uuids {
		g.all = append(g.all, gpu.GPU{Index: i, UUID: uuid, Model: "NVIDIA A10", MemoryTotal: 24 << 30, MemoryUsed: 20 << 30, Temperature: 60})
	}
	return g
}

func (g *gpus) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

func (g *gpus) First() <-chan struct{} { return g.first }

func (g *gpus) GPUs() []gpu.GPU {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]gpu.GPU(nil), g.all...)
}

func (g *gpus) fail(i int, why string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all[i].Fault = why
}

// TestFailedGPUStopsTheWorker, which hands back what runs and goes on when the GPU is well again. A GPU that another engine uses is nothing to it.
func TestFailedGPUStopsTheWorker(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	end := make(chan struct{})
	close(end)
	eng := play(t, ticking(end))
	machine := newGPUs("GPU-a", "GPU-b", "GPU-c")
	p := e.work(eng.URL, generic, func(c *workerConfig) {
		c.gpus, c.GPUs, c.TensorParallel = machine, []string{"1", "GPU-c"}, 2
	})
	w := e.member(p)
	if diff := cmp.Diff(cluster.Shape{TensorParallel: 2, PipelineParallel: 1, DataParallel: 1, Devices: []string{"1", "GPU-c"}}, w.Shape); diff != "" {
		t.Error(diff)
	}
	if len(w.GPUs) != 2 || w.GPUs[0].UUID != "GPU-b" || w.GPUs[0].MemoryUsed != 20<<30 || w.GPUs[1].Index != 2 {
		t.Errorf("it tells of %+v", w.GPUs)
	}
	machine.fail(0, "Xid 79: it has fallen off the bus")
	e.completed(e.submit(e.job(chat("x", ""), withEvents)))
	if err := p.Ready(); err != nil {
		t.Errorf("another engine's GPU stopped it: %v", err)
	}

	eng.then(ticking(nil)) // so that it runs at that moment
	j := e.submit(e.job(chat("y", ""), withEvents))
	e.running(j, 1)
	machine.fail(2, "Xid 48: an uncorrectable memory error")
	e.gaveUp(p, j)
	if w := e.member(p); w.State != cluster.Unready || w.Reason != "gpu_fault: GPU 2: Xid 48: an uncorrectable memory error" || w.GPUs[1].Fault == "" {
		t.Errorf("it says of itself %+v", w)
	}
	if rec := e.get(j); rec.Attempts[0].Outcome != "gpu_fault" {
		t.Errorf("record %+v", rec)
	}
	if n := gpuMetric(e, p, "millrace_worker_gpu_fault", "2"); n != 1 {
		t.Errorf("metric %v", n)
	}
	eng.then(ticking(end))
	machine.fail(2, "")
	e.completed(j)
}

func gpuMetric(e *env, p *process, name, index string) float64 {
	e.Helper()
	families, err := p.reg.Gather()
	e.ok(err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetName() == "gpu" && l.GetValue() == index {
					return m.GetGauge().GetValue()
				}
			}
		}
	}
	return -1
}

// TestWhichGPUsAreTheEngines, where none are named.
func TestWhichGPUsAreTheEngines(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		machine []string
		change  func(*workerConfig)
		want    []string
	}{
		"one, and one is needed":  {[]string{"GPU-a"}, func(*workerConfig) {}, []string{"GPU-a"}},
		"two, and one is needed":  {[]string{"GPU-a", "GPU-b"}, func(*workerConfig) {}, nil},
		"two, and two are needed": {[]string{"GPU-a", "GPU-b"}, func(c *workerConfig) { c.PipelineParallel = 2 }, []string{"GPU-a", "GPU-b"}},
		"all":                     {[]string{"GPU-a", "GPU-b"}, func(c *workerConfig) { c.GPUs = []string{worker.AllGPUs} }, []string{"GPU-a", "GPU-b"}},
		"none":                    {[]string{"GPU-a"}, func(c *workerConfig) { c.GPUs = []string{worker.NoGPUs} }, nil},
		"none is there":           {nil, func(c *workerConfig) { c.GPUs = []string{"3"} }, []string{"3"}},
		"a slice of one":          {[]string{"GPU-a"}, func(c *workerConfig) { c.GPUs = []string{"MIG-1"} }, []string{"MIG-1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, 5*time.Second)
			eng, _ := emulate(t, emulator.Config{})
			p := e.work(eng.URL, func(c *workerConfig) { c.gpus = newGPUs(tt.machine...); tt.change(c) })
			if diff := cmp.Diff(tt.want, e.member(p).Shape.Devices); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestGPUThatIsNotThereStopsTheStart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	p := e.start(eng.URL, func(c *workerConfig) { c.gpus, c.GPUs = newGPUs("GPU-a"), []string{"1"} })
	err := <-p.ended
	p.ended <- nil
	if err == nil || !strings.Contains(err.Error(), `GPUs: this machine has no GPU "1": it has 0 (GPU-a)`) {
		t.Errorf("it ended with %v", err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, err := engine.New(engine.Config{URL: "http://127.0.0.1:1"}, testenv.Log(t))
	e.ok(err)
	for _, tt := range []struct {
		cfg  worker.Config
		want string
	}{
		{worker.Config{TensorParallel: -1}, "TensorParallel is -1: it must be between 1 and 1024"},
		{worker.Config{PipelineParallel: 4096}, "PipelineParallel is 4096"},
		{worker.Config{DataParallel: -2}, "DataParallel is -2"},
		{worker.Config{TensorParallel: 2, GPUs: []string{"0", "1", "2"}}, "GPUs names 3 GPUs, and an engine of TensorParallel 2, PipelineParallel 1, DataParallel 1 uses 2"},
		{worker.Config{GPUs: []string{"0", "0"}}, `GPUs holds "0" twice`},
		{worker.Config{GPUs: []string{"-1"}}, `GPUs holds "-1"`},
		{worker.Config{GPUs: []string{""}}, `GPUs holds ""`},
		{worker.Config{GPUs: []string{"all", "0"}}, `GPUs holds "all" beside others`},
		{worker.Config{FailuresInRow: -3}, "FailuresInRow is -3"},
		{worker.Config{StallTimeout: -1}, "StallTimeout is -1ns"},
	} {
		tt.cfg.Name = "w"
		_, err := worker.New(tt.cfg, worker.Deps{
			Queue: e.queue, Blobs: e.blobs, Results: e.results, Cluster: e.cluster, Relay: e.relay, Engine: eng, Registerer: prometheus.NewRegistry(), Log: testenv.Log(t),
		})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: error %v, want %q", tt.cfg, err, tt.want)
		}
	}
}
