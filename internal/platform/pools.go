package platform

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/internal/gpu"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/provider/process"
)

const (
	// gpuTimeout bounds the wait for a driver that is to say how many GPUs there are.
	gpuTimeout = 5 * time.Second
	// leftoverGrace is how long workers of an earlier process have to end: the queue that they worked for is gone, so that they have nothing to finish. endGrace is the same for those that the autoscaler has left in the end.
	leftoverGrace = 2 * time.Second
	endGrace      = 2 * time.Second
	// endTimeout bounds how long is waited for processes that were killed, beyond that.
	endTimeout = 20 * time.Second
)

// ProcessProvider makes the provider of workers that are processes of this machine, whose state is kept in dir. attached workers end with this process.
func ProcessProvider(dir string, join provider.Join, attached bool, log *slog.Logger) (*process.Provider, error) {
	return process.New(process.Config{
		Dir: dir, Join: join, Attached: attached, GPUs: countGPUs(log),
		Args: []string{"--metrics-listen", "127.0.0.1:0"}, // several workers of one machine cannot have one port
	}, log.With("provider", "process"))
}

// countGPUs is how many GPUs this machine has, 0 if nobody tells.
func countGPUs(log *slog.Logger) int {
	ctx, cancel := context.WithTimeout(context.Background(), gpuTimeout) // nobody who asks has one, and this is the bound
	defer cancel()
	w := gpu.New(gpu.Config{Every: 100 * time.Millisecond}, log)
	done := make(chan struct{})
	go func() { // ends within a second of ctx
		defer close(done)
		_ = w.Run(ctx) // it returns no error
	}()
	select {
	case <-w.First():
	case <-ctx.Done():
	}
	n := len(w.GPUs())
	cancel()
	<-done
	return n
}

// addAutoscaler makes the autoscaler of a platform in one process. Its workers live no longer than the platform.
func (p *Platform) addAutoscaler(ctx context.Context, cfg Config, join provider.Join, reg prometheus.Registerer, log *slog.Logger) error {
	join = maps.Clone(join)
	for name, value := range cfg.WorkerJoin {
		if _, ours := join[name]; !ours {
			join[name] = value
		}
	}
	processes, err := ProcessProvider(filepath.Join(cfg.Dir, "workers"), join, true, log)
	if err != nil {
		return err
	}
	p.onClose(func() { _ = processes.Close() }) // none is left
	// An earlier platform that was killed may have left workers: its queue went with it.
	bounded, cancel := context.WithTimeout(ctx, leftoverGrace+endTimeout)
	defer cancel()
	if err := processes.StopAll(bounded, leftoverGrace); err != nil {
		return fmt.Errorf("stopping the workers of an earlier run: %w", err)
	}
	a, err := p.backbone.Autoscaler(autoscaler.Config{PoolsFile: cfg.PoolsFile, StopWorkers: true}, map[string]provider.Provider{"process": processes}, reg, log)
	if err != nil {
		return fmt.Errorf("making the autoscaler: %w", err)
	}
	p.autoscaler = a
	run := func(ctx context.Context) error {
		err := a.Run(ctx)
		own, cancel := context.WithTimeout(context.WithoutCancel(ctx), endGrace+endTimeout) // the end of the others is waited for
		defer cancel()
		return errors.Join(err, processes.StopAll(own, endGrace))
	}
	p.stages = slices.Insert(p.stages, 1, []part{{"autoscaler", run}})
	return nil
}
