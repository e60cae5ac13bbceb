package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

const (
	scrapeBusy    = 250 * time.Millisecond // between looks at a working engine
	scrapeIdle    = 2 * time.Second
	scrapeTimeout = 2 * time.Second
	scrapeFails   = 3                // failed looks in a row after which the engine is probed, if nothing else shows that it lives
	relist        = 30 * time.Second // between looks at which models it serves
	proofLasts    = 30 * time.Second // how long a token, or a probe that was passed, proves an engine without work ready
	scrapeDoubts  = 10 * time.Second // the same while its metrics cannot be read
)

// fall is why the worker's engine is not ready any more.
type fall struct {
	state  cluster.WorkerState
	reason string
	halt   error // why what runs is handed back, nil if it may go on
}

// watch keeps the gate open while the engine is ready, until ctx ends. serve begins to pull for a model that is served, and returns what ends that.
func (w *Worker) watch(ctx context.Context, serve func(job.Model) context.CancelFunc) {
	for {
		if !w.becomeReady(ctx, serve) {
			return
		}
		select { // doubts of before the probe
		case <-w.doubts:
		default:
		}
		w.health.goodCall()
		w.resume()
		w.setState(cluster.Ready, "")
		w.gate.setOpen(true)
		f := w.whileReady(ctx, serve)
		w.gate.setOpen(false)
		if ctx.Err() != nil {
			return
		}
		w.fallBack(f)
	}
}

// fallBack says why the engine is not ready any more. A stall that was found meanwhile says more than the probe that fails with it.
func (w *Worker) fallBack(f fall) {
	w.mu.Lock()
	known := w.state == cluster.Stalled
	w.mu.Unlock()
	if !known {
		w.setState(f.state, f.reason)
	}
	if f.halt != nil {
		w.halt(f.halt)
	}
}

// becomeReady tries until the engine has completed one token, and tells false if ctx ended first. One that has fallen back several times of late must do so twice.
func (w *Worker) becomeReady(ctx context.Context, serve func(job.Model) context.CancelFunc) bool {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 100*time.Millisecond, 2*time.Second
	proofs, pause := w.health.proofs(time.Now())
	for passed := 0; ; {
		err := w.prepare(ctx, serve)
		wait := b.NextBackOff()
		switch {
		case ctx.Err() != nil:
			return false
		case err == nil:
			if passed++; passed >= proofs {
				return true
			}
			wait = pause
		default:
			passed = 0
			if !noAnswer(err) { // what comes back may be another engine
				w.deps.Engine.Reset()
			}
			w.mu.Lock()
			if w.state == cluster.Starting || w.state == cluster.Unready { // else the reason is not the engine's answer
				w.reason = err.Error()
			}
			w.mu.Unlock()
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return false
		}
	}
}

// prepare asks all that must be known before work is taken, the probe last.
func (w *Worker) prepare(ctx context.Context, serve func(job.Model) context.CancelFunc) error {
	if err := w.gpuFault(); err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	kind, err := w.deps.Engine.Detect(short)
	if err != nil {
		return err
	}
	models, err := w.listModels(short)
	if err == nil || errors.Is(err, errNoModels) || errors.Is(err, errNoneWanted) {
		w.name(models, errors.Is(err, errNoneWanted))
	}
	if err != nil {
		return err
	}
	load, err := w.load(ctx)
	if err != nil && (!w.seen() || !noAnswer(err)) { // metrics that keep silent stop nothing: the ledger knows the capacity of before
		return err
	}
	w.take(load, err)
	w.askShape(short)
	probe, cancelProbe := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
	defer cancelProbe()
	if err := w.probeModel(probe, models[0].Model); err != nil {
		return err
	}
	w.deps.Engine.Abilities(probe, models[0].Model) // so that the first job need not wait for them
	w.mu.Lock()
	w.kind = kind
	w.mu.Unlock()
	w.adopt(ctx, models, serve)
	return nil
}

// Why there is nothing to serve, though the engine has listed its models. One that has none may be about to get some.
var (
	errNoModels   = errors.New("the engine serves no models")
	errNoneWanted = errors.New("the engine serves none of the wanted models")
)

// listModels lists the models to serve, at least one.
func (w *Worker) listModels(ctx context.Context) ([]engine.ModelInfo, error) {
	models, err := w.deps.Engine.Models(ctx)
	if err != nil {
		return nil, err
	}
	if len(models) == 0 {
		return nil, errNoModels
	}
	if len(w.cfg.Models) > 0 {
		models = slices.DeleteFunc(models, func(m engine.ModelInfo) bool { return !slices.Contains(w.cfg.Models, m.Model) })
	}
	if len(models) == 0 {
		return nil, fmt.Errorf("%w %v", errNoneWanted, w.cfg.Models)
	}
	return models, nil
}

// name tells the others at once which models there will be, before the engine has proved that it serves them: what asks for them is then held, and what asks for others is refused.
// others: there will be none, as the engine serves only such as are not wanted.
func (w *Worker) name(models []engine.ModelInfo, others bool) {
	named := make([]job.Model, len(models))
	for i, m := range models {
		named[i] = m.Model
	}
	w.mu.Lock()
	news := w.state == cluster.Starting && (!slices.Equal(w.named, named) || w.others != others)
	w.named, w.others = named, others
	w.mu.Unlock()
	if news {
		w.deps.Cluster.Nudge()
	}
}

// take takes a reading of the engine, or that there was none.
func (w *Worker) take(l engine.Load, err error) {
	if err != nil {
		w.metrics.scrapeErrors.Inc()
		w.gate.unseen()
		w.progress.unseen()
		return
	}
	w.gate.observe(l)
	w.progress.observe(l)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.source != l.Source && l.Source == engine.SourceEstimated {
		w.log.Warn("the engine does not tell its KV capacity: the configured one is used", "tokens", l.Capacity())
	}
	w.source = l.Source
	w.rank = l.LargestRank()
}

// largestLocked is the longest sequence of a model that fits, 0 if that is not known yet; of model "" one that fits whichever it is.
func (w *Worker) largestLocked(model job.Model) job.Tokens {
	n := w.rank
	for name, m := range w.models {
		if m.length > 0 && (model == "" || model == name) {
			n = min(n, m.length)
		}
	}
	return n
}

// seen tells whether the engine has ever told its load.
func (w *Worker) seen() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.source != ""
}

// adopt begins to serve the models that are new, ends those that are gone, and has all remembered.
func (w *Worker) adopt(ctx context.Context, models []engine.ModelInfo, serve func(job.Model) context.CancelFunc) {
	var fresh []job.Model
	w.mu.Lock()
	for name, m := range w.models {
		if !slices.ContainsFunc(models, func(i engine.ModelInfo) bool { return i.Model == name }) {
			m.stop()
			delete(w.models, name)
		}
	}
	for _, m := range models {
		if have := w.models[m.Model]; have != nil {
			have.length = m.ContextLength
		} else {
			fresh = append(fresh, m.Model)
			w.models[m.Model] = &served{length: m.ContextLength, stop: func() {}}
		}
	}
	kind := w.kind
	w.mu.Unlock()
	for _, m := range models {
		w.mu.Lock()
		fit := w.largestLocked(m.Model)
		w.mu.Unlock()
		short, cancel := context.WithTimeout(ctx, storeTimeout)
		err := w.deps.Cluster.Remember(short, cluster.KnownModel{Model: m.Model, Largest: fit, Seen: time.Now().UnixMilli(), First: w.begun.UnixMilli(), Engine: string(kind)})
		cancel()
		if err != nil { // said again soon; heartbeats carry it meanwhile
			w.log.Warn("remembering a served model", "model", m.Model, "err", err)
		}
	}
	for _, m := range fresh {
		stop := serve(m)
		w.mu.Lock()
		w.models[m].stop = stop
		w.mu.Unlock()
	}
}

// whileReady returns why the engine is not ready any more, or when ctx ends.
func (w *Worker) whileReady(ctx context.Context, serve func(job.Model) context.CancelFunc) fall {
	failures := 0 // looks in a row
	listed := time.Now()
	timer := time.NewTimer(scrapeBusy)
	defer timer.Stop()
	for {
		var d doubt
		select {
		case <-ctx.Done():
			return fall{}
		case d = <-w.doubts:
			if d.state != "" {
				return fall{state: d.state, reason: d.why}
			}
		case <-timer.C:
		}
		if err := w.gpuFault(); err != nil { // what it computes now may be wrong
			return fall{cluster.Unready, err.Error(), errNotFit}
		}
		load, err := w.load(ctx)
		w.take(load, err)
		if failures++; err == nil {
			failures = 0
		}
		proof := w.proof()
		switch {
		case d.why != "":
		case failures == scrapeFails, failures > scrapeFails && time.Since(proof) > scrapeDoubts:
			d.why = fmt.Sprintf("its metrics cannot be read (%v)", err)
		case w.gate.idle() && time.Since(proof) > proofLasts && w.mayProbeIdle():
			d.why = "it had no work"
		}
		if d.why != "" {
			if f := w.examine(ctx, d.why); f != nil {
				return *f
			}
		}
		if time.Since(listed) > relist {
			listed = time.Now()
			if failures >= scrapeFails && !noAnswer(err) { // another engine may have come in its place
				w.deps.Engine.Reset()
			}
			w.relist(ctx, serve)
		}
		if w.gate.idle() {
			timer.Reset(scrapeIdle)
		} else {
			timer.Reset(scrapeBusy)
		}
	}
}

// proof is when the engine last showed that it lives.
func (w *Worker) proof() time.Time {
	last := w.progress.silence(time.Now()).since
	w.health.mu.Lock()
	defer w.health.mu.Unlock()
	if w.health.passed.After(last) {
		return w.health.passed
	}
	return last
}

// mayProbeIdle tells whether a probe costs an engine without work no more than a token: Ollama would load its model for it, and keep it loaded for ever.
func (w *Worker) mayProbeIdle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.kind != engine.Ollama
}

// examine probes the engine for a doubt, and returns how it falls back, nil if it does not. One that is so busy that the probe must wait, and gets on meanwhile, is well.
func (w *Worker) examine(ctx context.Context, why string) *fall {
	began := time.Now()
	probe, cancel := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
	defer cancel()
	err := w.probe(probe)
	if err == nil || ctx.Err() != nil {
		return nil
	}
	f := &fall{state: cluster.Unready, reason: fmt.Sprintf("%s; probe: %v", why, err)}
	if noAnswer(err) {
		switch s := w.progress.silence(time.Now()); {
		case s.since.After(began), s.length > 0 && w.full() && !s.counted: // the stall time decides about what cannot be seen
			return nil
		case s.length > 0: // whatever it has is not answered either
			f.state, f.reason, f.halt = cluster.Stalled, "engine_stalled: "+f.reason, errStalled
		}
	}
	return f
}

func (w *Worker) load(ctx context.Context) (engine.Load, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTimeout)
	defer cancel()
	return w.deps.Engine.Load(ctx)
}

// relist follows which models the engine serves. A list that cannot be read changes nothing.
func (w *Worker) relist(ctx context.Context, serve func(job.Model) context.CancelFunc) {
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	models, err := w.listModels(short)
	cancel()
	if err != nil {
		w.log.Warn("listing the engine's models: serving those of before", "err", err)
		return
	}
	w.adopt(ctx, models, serve)
}
