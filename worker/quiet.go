package worker

import (
	"context"
	"time"

	"github.com/millrace/millrace/internal/schedule"
)

const (
	quietGlance = 500 * time.Millisecond // between looks at whether the engine has halted
	quietProbe  = time.Second            // of silence before it is probed
)

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
