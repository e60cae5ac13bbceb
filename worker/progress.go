package worker

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/cluster"
)

// progress follows whether the engine gets on with the calls that it has.
type progress struct {
	mu      sync.Mutex // guards what follows
	calls   int
	streams int  // calls whose tokens are seen as they come
	counts  bool // the engine tells how many tokens it has made
	last    time.Time
}

// begin counts a call. The engine's silence counts from here if it had none.
func (p *progress) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.calls == 0 {
		p.last = time.Now()
	}
	p.calls++
}

func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls--
}

// stream counts n more calls, or fewer, that stream.
func (p *progress) stream(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.streams += n
}

// alive notes a sign of progress.
func (p *progress) alive() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = time.Now()
}

// tells notes whether the engine counts its tokens.
func (p *progress) tells(counts bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counts = counts
}

// quiet is how long the engine has had calls and shown no progress, 0 if it has none; and whether progress would have been seen.
func (p *progress) quiet(now time.Time) (quiet time.Duration, visible bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.calls == 0 {
		return 0, true
	}
	return now.Sub(p.last), p.counts || p.streams > 0
}

// watchProgress hands the work of an engine back that gives no token any more, whether it counts as ready or not, until ctx ends.
func (w *Worker) watchProgress(ctx context.Context) {
	t := time.NewTicker(min(time.Second, w.cfg.StallTimeout/4))
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		quiet, visible := w.progress.quiet(time.Now())
		if quiet < w.cfg.StallTimeout || !visible && w.worksUnseen(ctx) || ctx.Err() != nil {
			continue
		}
		w.stall(fmt.Sprintf("engine_stalled: work runs and no token came for %s", quiet.Round(time.Second/10)))
	}
}

// worksUnseen decides for an engine that counts no tokens while none of its calls streams: a long answer in one piece looks like a hang. One token more tells, unless the
// engine is so full that it would have to wait for a place.
func (w *Worker) worksUnseen(ctx context.Context) bool {
	if w.gate.full() {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
	defer cancel()
	if w.probe(ctx) != nil {
		return false
	}
	w.progress.alive()
	return true
}

// stall takes the engine's work from it. It gets no more before it has passed a probe.
func (w *Worker) stall(why string) {
	w.gate.setOpen(false)
	w.setState(cluster.Stalled, why)
	w.halt(errStalled)
	w.doubt(doubt{state: cluster.Stalled, why: why})
}
