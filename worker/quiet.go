package worker

import (
	"context"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

const (
	quietGlance = 500 * time.Millisecond // between looks at whether the engine has halted
	quietProbe  = time.Second            // of silence before it is probed
)

// hasOthers tells whether another worker serves a model of this one and takes work.
func (w *Worker) hasOthers() bool {
	for _, m := range w.deps.Cluster.Workers("") {
		o := m.Worker
		if o == nil || m.ID == string(w.id) || o.State != cluster.Ready || o.Brake != "" {
			continue
		}
		w.mu.Lock()
		shared := slices.ContainsFunc(o.Models, func(m job.Model) bool { return w.models[m] != nil })
		w.mu.Unlock()
		if shared {
			return true
		}
	}
	return false
}

// probeQuiet probes an engine that has work and gives no token, until ctx ends: it may have halted, or one request may hang that the others need not wait for. While it does not
// answer nothing is pulled; the stall time decides about what runs.
func (w *Worker) probeQuiet(ctx context.Context) {
	t := time.NewTicker(quietGlance)
	defer t.Stop()
	var since time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			w.gate.others.Store(w.hasOthers())
			switch {
			case w.gate.status().Brake != schedule.BrakeQuiet:
				since = time.Time{}
			case since.IsZero():
				since = now
			case now.Sub(since) >= quietProbe && !w.notReady(ctx):
				w.gate.alive()
				since = time.Time{}
			}
		}
	}
}
