package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
)

// progress follows whether the engine gets on with the calls that it has.
type progress struct {
	mu      sync.Mutex // guards what follows
	calls   int
	streams int // calls whose tokens are seen as they come
	last    time.Time
	reading engine.Load // the last one
	counts  bool        // reading counts tokens, and is not old
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

// observe looks for progress in what the engine says of itself: tokens made, prompts computed, and a cache that fills, which is all that is seen of a long prompt while it is computed.
func (p *progress) observe(l engine.Load) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.GeneratedTokens > p.reading.GeneratedTokens || l.PromptTokens > p.reading.PromptTokens || l.Source == engine.SourceEngine && l.Used() > p.reading.Used() {
		p.last = time.Now()
	}
	p.reading, p.counts = l, l.GeneratedTokens >= 0
}

// unseen notes that the engine's words of itself cannot be read: that its counters stand still tells nothing now.
func (p *progress) unseen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counts = false
}

// silence is for how long an engine has shown no progress.
type silence struct {
	length time.Duration // 0 if it has no calls
	since  time.Time     // the last progress
	// counted: its own counters show no progress. streamed: there are calls whose tokens would be seen, if they had begun to answer.
	counted, streamed bool
}

func (p *progress) silence(now time.Time) silence {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.calls == 0 {
		return silence{since: p.last}
	}
	return silence{length: now.Sub(p.last), since: p.last, counted: p.counts, streamed: p.streams > 0}
}

// places is how many sequences the engine says that it runs at once, 0 if it does not.
func (p *progress) places() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reading.MaxRunning
}

// full tells whether the engine runs as many sequences as it can, so that one more has to wait. The scheduler's own limit may be lower.
func (w *Worker) full() bool {
	places := w.progress.places()
	return places > 0 && w.gate.status().Sequences >= places
}

// The patience with an engine that may be busy and cannot show it, in stall times: it begins with patient, and doubles with each stall that it ends in, up to mostPatient. An
// engine that needs longer for its answers gets them whole in the end, and one that hangs is found in any case.
const (
	patient     = 3
	mostPatient = 60
)

// verdict is what a silence means.
type verdict int

const (
	goesOn verdict = iota
	wait           // a probe is to tell
	stalled
	tired // stalled, for all that can be seen: patience has ended
)

// judge decides about a silence of an engine. probed is when it last completed a probe that began in this silence, zero if it did not; full tells whether a probe would have to wait for a
// place.
func judge(s silence, stall time.Duration, patience int, probed time.Time, full bool, now time.Time) verdict {
	answered := probed.After(s.since)
	switch {
	case s.length < stall/2:
		return goesOn
	case s.counted: // a probe would only be counted too
		if s.length >= stall {
			return stalled
		}
	case s.length >= time.Duration(patience)*stall && (s.streamed || !answered):
		// It completes others' tokens and none of the streams, or it is full of calls that answer in one piece.
		return tired
	case answered:
		if now.Sub(probed) >= stall/2 {
			return wait
		}
	case s.length >= stall && !full:
		return stalled
	default:
		return wait
	}
	return goesOn
}

// try is a probe that is under way.
type try struct {
	stop   context.CancelFunc
	answer chan error // gets one value
}

func (w *Worker) try(ctx context.Context) *try {
	ctx, stop := context.WithCancel(ctx)
	t := &try{stop, make(chan error, 1)}
	go func() { t.answer <- w.probe(ctx) }() // end waits for it
	return t
}

// end ends the try, which may be nil.
func (t *try) end() {
	if t != nil {
		t.stop()
		<-t.answer //nolint:errcheck // nobody asks any more
	}
}

// answered gets the answer; nil, which no answer ever comes from, without a try.
func (t *try) answered() <-chan error {
	if t == nil {
		return nil
	}
	return t.answer
}

// watchProgress hands the work of an engine back that gives no token any more, whether it counts as ready or not, until ctx ends.
func (w *Worker) watchProgress(ctx context.Context) {
	tick := time.NewTicker(min(time.Second, w.cfg.StallTimeout/8))
	defer tick.Stop()
	var (
		patience = patient
		probed   time.Time
		probe    *try
	)
	defer func() { probe.end() }()
	for {
		select {
		case <-ctx.Done():
			return
		case err := <-probe.answered():
			probe.stop()
			probe = nil
			if err == nil {
				probed = time.Now()
			} else { // it answers, but not well
				w.doubt(doubt{why: "it gives no token"})
			}
		case now := <-tick.C:
			s := w.progress.silence(now)
			v := judge(s, w.cfg.StallTimeout, patience, probed, w.full(), now)
			if v == wait { // the probe may wait for long behind what the engine has
				if probe == nil {
					probe = w.try(ctx)
				}
				continue
			}
			if v == goesOn && s.length >= w.cfg.StallTimeout/2 {
				continue
			}
			probe.end()
			probe = nil
			if v == tired {
				patience = min(2*patience, mostPatient)
			}
			if v != goesOn {
				w.stall(fmt.Sprintf("engine_stalled: work runs and no token came for %s", s.length.Round(time.Second/10)))
			}
		}
	}
}

// stall takes the engine's work from it. It gets no more before it has passed a probe.
func (w *Worker) stall(why string) {
	w.gate.setOpen(false)
	w.setState(cluster.Stalled, why)
	w.halt(errStalled)
	w.doubt(doubt{state: cluster.Stalled, why: why})
}

// noAnswer tells whether err says that the engine kept silent, and nothing else of it.
func noAnswer(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
