package worker

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/gpu"
)

// Words in the place of GPUs' names.
const (
	AllGPUs = "all"
	NoGPUs  = "none"
)

// gpusWithin is how long the start waits for the driver to tell what GPUs there are, where some were named.
const gpusWithin = 10 * time.Second

// GPUs tells of the machine's GPUs: a *gpu.Watcher.
type GPUs interface {
	// Run reads until ctx ends.
	Run(ctx context.Context) error
	// First is closed once it is known what GPUs there are.
	First() <-chan struct{}
	// GPUs are those last read.
	GPUs() []gpu.GPU
}

// checkShape refuses what no engine can be.
func (c *Config) checkShape() error {
	gpus := 1
	for _, d := range []struct {
		name  string
		value int
	}{{"TensorParallel", c.TensorParallel}, {"PipelineParallel", c.PipelineParallel}, {"DataParallel", c.DataParallel}} {
		if d.value < 0 || d.value > 1024 {
			return fmt.Errorf("worker: %s is %d: it must be between 1 and 1024, or 0 to ask the engine", d.name, d.value)
		}
		gpus *= max(d.value, 1)
	}
	seen := map[string]bool{}
	for _, name := range c.GPUs {
		n, err := strconv.Atoi(name)
		switch {
		case name == "" || err == nil && n < 0:
			return fmt.Errorf("worker: GPUs holds %q: it must be an index from 0 on, a UUID, %s or %s", name, AllGPUs, NoGPUs)
		case (name == AllGPUs || name == NoGPUs) && len(c.GPUs) > 1:
			return fmt.Errorf("worker: GPUs holds %q beside others", name)
		case seen[name]:
			return fmt.Errorf("worker: GPUs holds %q twice", name)
		}
		seen[name] = true
	}
	known := c.TensorParallel > 0 && c.PipelineParallel > 0 && c.DataParallel > 0
	if n := len(c.named()); n > 0 && n > gpus && (known || gpus > 1) {
		return fmt.Errorf("worker: GPUs names %d GPUs, and an engine of TensorParallel %d, PipelineParallel %d, DataParallel %d uses %d", n,
			max(c.TensorParallel, 1), max(c.PipelineParallel, 1), max(c.DataParallel, 1), gpus)
	}
	return nil
}

// named are the GPUs of the configuration, nil where it names none.
func (c *Config) named() []string {
	if len(c.GPUs) == 1 && (c.GPUs[0] == AllGPUs || c.GPUs[0] == NoGPUs) {
		return nil
	}
	return c.GPUs
}

// watchesGPUs tells whether the machine's GPUs concern the worker.
func (w *Worker) watchesGPUs() bool {
	return w.deps.GPUs != nil && !slices.Equal(w.cfg.GPUs, []string{NoGPUs})
}

// awaitGPUs refuses GPUs that were named and are not there, once the driver tells what there is. A machine whose driver tells nothing has said so in the log, and may start.
func (w *Worker) awaitGPUs(ctx context.Context) error {
	if !w.watchesGPUs() || len(w.cfg.named()) == 0 {
		return nil
	}
	t := time.NewTimer(gpusWithin)
	defer t.Stop()
	select {
	case <-w.deps.GPUs.First():
	case <-t.C:
	case <-ctx.Done():
	}
	if all := w.deps.GPUs.GPUs(); len(all) > 0 {
		if _, err := gpu.Pick(all, whole(w.cfg.named())); err != nil {
			return fmt.Errorf("worker: GPUs: %w", err)
		}
	}
	return nil
}

// whole leaves out slices of GPUs, which the driver tells nothing of by their names.
func whole(names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(n string) bool { return strings.HasPrefix(n, "MIG-") })
}

// shape is how the engine is spread over GPUs: as configured, else as it says itself.
type shape struct {
	mu      sync.Mutex // guards what follows
	told    engine.Shape
	said    bool // that the two contradict each other
	unnamed bool // it was said that its GPUs are not known
}

// askShape asks the engine for its shape. One that does not tell has what was configured.
func (w *Worker) askShape(ctx context.Context) {
	told, err := w.deps.Engine.Shape(ctx)
	if err != nil {
		w.log.Debug("asking the engine for its shape", "err", err)
		return
	}
	w.shape.mu.Lock()
	defer w.shape.mu.Unlock()
	w.shape.told = told
	differ := func(configured, told int) bool { return configured > 0 && told > 0 && configured != told }
	c := &w.cfg
	if !w.shape.said && (differ(c.TensorParallel, told.TensorParallel) || differ(c.PipelineParallel, told.PipelineParallel) || differ(c.DataParallel, told.DataParallel)) {
		w.shape.said = true
		w.log.Warn("the engine tells another shape than was configured: the configured one counts",
			"tensor_parallel", told.TensorParallel, "pipeline_parallel", told.PipelineParallel, "data_parallel", told.DataParallel)
	}
}

// ownGPUs are the engine's shape, and the GPUs that it uses, as far as they are known: those named, else all of the machine's if it has as many as the shape takes. Another engine's GPU on
// the same machine is none of them.
func (w *Worker) ownGPUs() (cluster.Shape, []gpu.GPU) {
	w.shape.mu.Lock()
	defer w.shape.mu.Unlock()
	told := w.shape.told
	s := cluster.Shape{
		TensorParallel:   cmp.Or(w.cfg.TensorParallel, told.TensorParallel, 1),
		PipelineParallel: cmp.Or(w.cfg.PipelineParallel, told.PipelineParallel, 1),
		DataParallel:     cmp.Or(w.cfg.DataParallel, told.DataParallel, 1),
		Devices:          w.cfg.named(),
	}
	if !w.watchesGPUs() {
		return s, nil
	}
	all := w.deps.GPUs.GPUs()
	switch {
	case len(all) == 0:
		return s, nil
	case s.Devices != nil:
		mine, err := gpu.Pick(all, whole(s.Devices))
		if err != nil { // said at the start
			return s, nil
		}
		return s, mine
	case len(w.cfg.GPUs) == 0 && len(all) != s.TensorParallel*s.PipelineParallel*s.DataParallel:
		if !w.shape.unnamed {
			w.shape.unnamed = true
			w.log.Warn("which of the machine's GPUs the engine uses is not known: none is watched", "gpus", len(all), "needed", s.TensorParallel*s.PipelineParallel*s.DataParallel)
		}
		return s, nil
	}
	for _, g := range all {
		s.Devices = append(s.Devices, g.UUID)
	}
	return s, all
}

// gpuFault is why the engine's GPUs must not be used, nil if they may.
func (w *Worker) gpuFault() error {
	_, mine := w.ownGPUs()
	for _, g := range mine {
		if g.Fault != "" {
			return fmt.Errorf("gpu_fault: GPU %d: %s", g.Index, g.Fault)
		}
	}
	return nil
}

// gpuInfo is what heartbeats say of GPUs.
func gpuInfo(gpus []gpu.GPU) []cluster.GPU {
	infos := make([]cluster.GPU, len(gpus))
	for i, g := range gpus {
		infos[i] = cluster.GPU(g)
	}
	return infos
}

// gpuMetrics collects what the engine's GPUs say. Its label is the GPU's index.
type gpuMetrics struct {
	worker *Worker
	all    []gpuMetric
}

type gpuMetric struct {
	desc  *prometheus.Desc
	value func(gpu.GPU) float64
}

func newGPUMetrics(w *Worker) *gpuMetrics {
	m := &gpuMetrics{worker: w}
	add := func(name, help string, value func(gpu.GPU) float64) {
		m.all = append(m.all, gpuMetric{prometheus.NewDesc("millrace_worker_gpu_"+name, help, []string{"gpu"}, nil), value})
	}
	add("memory_total_bytes", "Memory of the GPU.", func(g gpu.GPU) float64 { return float64(g.MemoryTotal) })
	add("memory_used_bytes", "Memory of the GPU in use.", func(g gpu.GPU) float64 { return float64(g.MemoryUsed) })
	add("utilization_ratio", "Share of the last period in which the GPU was busy.", func(g gpu.GPU) float64 { return g.Utilization })
	add("temperature_celsius", "Temperature of the GPU.", func(g gpu.GPU) float64 { return float64(g.Temperature) })
	add("ecc_uncorrected_errors", "Uncorrectable memory errors since the driver was loaded.", func(g gpu.GPU) float64 { return float64(g.ECCUncorrected) })
	add("last_xid", "Number of the last Xid error; 0 if none was told.", func(g gpu.GPU) float64 { return float64(g.Xid) })
	add("fault", "1 if the GPU must not be used.", func(g gpu.GPU) float64 {
		if g.Fault != "" {
			return 1
		}
		return 0
	})
	return m
}

// Describe implements prometheus.Collector.
func (m *gpuMetrics) Describe(c chan<- *prometheus.Desc) {
	for _, g := range m.all {
		c <- g.desc
	}
}

// Collect implements prometheus.Collector.
func (m *gpuMetrics) Collect(c chan<- prometheus.Metric) {
	_, mine := m.worker.ownGPUs()
	for _, g := range mine {
		for _, one := range m.all {
			c <- prometheus.MustNewConstMetric(one.desc, prometheus.GaugeValue, one.value(g), strconv.Itoa(g.Index))
		}
	}
}

var _ GPUs = (*gpu.Watcher)(nil)
