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
	relist        = 30 * time.Second // between looks at which models it serves
	suspectCalls  = 3                // failed calls or looks in a row after which the engine is probed
)

// doubt is why the engine should be looked at now. state Stalled is no question any more.
type doubt struct {
	state cluster.WorkerState
	why   string
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
		w.badCalls.Store(0)
		w.resume()
		w.setState(cluster.Ready, "")
		w.gate.setOpen(true)
		state, reason := w.whileReady(ctx, serve)
		w.gate.setOpen(false)
		if ctx.Err() != nil {
			return
		}
		w.deps.Engine.Reset() // it may come back as another
		w.setState(state, reason)
		w.metrics.unready.WithLabelValues(string(state)).Inc()
	}
}

// becomeReady tries until the engine has completed one token, and tells false if ctx ended first.
func (w *Worker) becomeReady(ctx context.Context, serve func(job.Model) context.CancelFunc) bool {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 100*time.Millisecond, 2*time.Second
	for {
		err := w.prepare(ctx, serve)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		w.mu.Lock()
		if w.state == cluster.Starting || w.state == cluster.Unready { // else the reason is not the engine's answer
			w.reason = err.Error()
		}
		w.mu.Unlock()
		select {
		case <-time.After(b.NextBackOff()):
		case <-ctx.Done():
			return false
		}
	}
}

// prepare asks the engine all that must be known before work is taken, the probe last.
func (w *Worker) prepare(ctx context.Context, serve func(job.Model) context.CancelFunc) error {
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	kind, err := w.deps.Engine.Detect(short)
	if err != nil {
		return err
	}
	models, err := w.listModels(short)
	if err != nil {
		return err
	}
	load, err := w.deps.Engine.Load(short)
	if err != nil {
		return err
	}
	probe, cancelProbe := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
	defer cancelProbe()
	if err := w.deps.Engine.Probe(probe, models[0].Model); err != nil {
		return err
	}
	w.mu.Lock()
	w.kind = kind
	w.mu.Unlock()
	w.see(load)
	w.adopt(ctx, models, serve)
	return nil
}

// listModels lists the models to serve, at least one.
func (w *Worker) listModels(ctx context.Context) ([]engine.ModelInfo, error) {
	models, err := w.deps.Engine.Models(ctx)
	if err != nil {
		return nil, err
	}
	if len(w.cfg.Models) > 0 {
		models = slices.DeleteFunc(models, func(m engine.ModelInfo) bool { return !slices.Contains(w.cfg.Models, m.Model) })
	}
	switch {
	case len(models) > 0:
		return models, nil
	case len(w.cfg.Models) > 0:
		return nil, fmt.Errorf("the engine serves none of the wanted models %v", w.cfg.Models)
	default:
		return nil, errors.New("the engine serves no models")
	}
}

// see takes a reading of the engine.
func (w *Worker) see(l engine.Load) {
	w.gate.observe(l)
	w.progress.tells(l.GeneratedTokens >= 0)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.source != l.Source && l.Source == engine.SourceEstimated {
		w.log.Warn("the engine does not tell its KV capacity: the configured one is used", "tokens", l.Capacity())
	}
	w.source = l.Source
	w.largest = l.LargestRank()
	for _, m := range w.models {
		if m.length > 0 {
			w.largest = min(w.largest, m.length)
		}
	}
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
	largest, kind := w.largest, w.kind
	w.mu.Unlock()
	for _, m := range models {
		fit := largest
		if m.ContextLength > 0 {
			fit = min(fit, m.ContextLength)
		}
		short, cancel := context.WithTimeout(ctx, storeTimeout)
		err := w.deps.Cluster.Remember(short, cluster.KnownModel{Model: m.Model, Largest: fit, Seen: time.Now().UnixMilli(), Engine: string(kind)})
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
func (w *Worker) whileReady(ctx context.Context, serve func(job.Model) context.CancelFunc) (cluster.WorkerState, string) {
	generated := int64(-1)
	failures := 0
	listed := time.Now()
	timer := time.NewTimer(scrapeBusy)
	defer timer.Stop()
	for {
		var d doubt
		select {
		case <-ctx.Done():
			return "", ""
		case d = <-w.doubts:
			if d.state == cluster.Stalled {
				return d.state, d.why
			}
		case <-timer.C:
		}
		load, err := w.load(ctx)
		if err != nil {
			w.metrics.scrapeErrors.Inc()
			w.gate.unseen()
			if failures++; failures >= suspectCalls && d.why == "" {
				d.why = fmt.Sprintf("its metrics cannot be read: %v", err)
			}
		} else {
			failures = 0
			w.see(load)
			if load.GeneratedTokens > generated {
				w.progress.alive()
			}
			generated = load.GeneratedTokens
		}
		if d.why != "" {
			probe, cancel := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
			err := w.probe(probe)
			cancel()
			if err != nil && ctx.Err() == nil {
				return cluster.Unready, fmt.Sprintf("%s; probe: %v", d.why, err)
			}
			failures = 0
			w.badCalls.Store(0)
		}
		if time.Since(listed) > relist {
			listed = time.Now()
			w.relist(ctx, serve)
		}
		if w.gate.idle() {
			timer.Reset(scrapeIdle)
		} else {
			timer.Reset(scrapeBusy)
		}
	}
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

// probe has the engine complete one token.
func (w *Worker) probe(ctx context.Context) error {
	w.mu.Lock()
	var model job.Model
	for m := range w.models {
		if model == "" || m < model {
			model = m
		}
	}
	w.mu.Unlock()
	return w.deps.Engine.Probe(ctx, model)
}

// notReady probes the engine once, shortly: whether it is the engine that is at fault, and not a job. Those who ask at the same time share the answer.
func (w *Worker) notReady(ctx context.Context) bool {
	_, err, _ := w.probes.Do("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), scrapeTimeout) // others may wait for it
		defer cancel()
		return nil, w.probe(ctx)
	})
	return err != nil
}

// doubt asks for a look at the engine now. Of several doubts at a time the first counts, but that a stall is always told.
func (w *Worker) doubt(d doubt) {
	for {
		select {
		case w.doubts <- d:
			return
		default:
		}
		if d.state != cluster.Stalled {
			return
		}
		select {
		case <-w.doubts:
		default:
		}
	}
}

// badCall counts a call that failed through the engine's fault; several in a row raise doubt.
func (w *Worker) badCall(why string) {
	if w.badCalls.Add(1) >= suspectCalls {
		w.doubt(doubt{why: why})
	}
}
