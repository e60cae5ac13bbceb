package worker

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

const (
	scrapeBusy   = 250 * time.Millisecond // between looks at a working engine
	scrapeIdle   = 2 * time.Second
	relist       = 30 * time.Second // between looks at which models it serves
	remember     = time.Minute      // between notes that the models are served
	suspectCalls = 3                // failed calls or looks in a row after which the engine is probed
)

// watch keeps the gate open while the engine is ready, until ctx ends. serve is called once for each model that is served, while serving has not ended.
func (w *Worker) watch(ctx context.Context, serve func(job.Model), serving context.Context) {
	for {
		if !w.becomeReady(ctx, serve, serving) {
			return
		}
		w.alive()
		w.badCalls.Store(0)
		w.setState(cluster.Ready, "")
		w.gate.setOpen(true)
		state, reason := w.whileReady(ctx, serve, serving)
		w.gate.setOpen(false)
		if ctx.Err() != nil {
			return
		}
		w.setState(state, reason)
		w.metrics.unready.WithLabelValues(string(state)).Inc()
		if state == cluster.Stalled {
			w.stopAttempts(errStalled)
		}
	}
}

// becomeReady tries until the engine has completed one token, and tells false if ctx ended first.
func (w *Worker) becomeReady(ctx context.Context, serve func(job.Model), serving context.Context) bool {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 100*time.Millisecond, 2*time.Second
	for {
		err := w.prepare(ctx, serve, serving)
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		w.mu.Lock()
		if w.state == cluster.Starting || w.state == cluster.Unready || w.state == cluster.Stalled {
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
func (w *Worker) prepare(ctx context.Context, serve func(job.Model), serving context.Context) error {
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	kind, err := w.deps.Engine.Detect(short)
	if err != nil {
		return fmt.Errorf("detecting the engine: %w", err)
	}
	models, err := w.listModels(short)
	if err != nil {
		return err
	}
	load, err := w.deps.Engine.Load(short)
	if err != nil {
		return fmt.Errorf("reading the engine's load: %w", err)
	}
	probe, cancelProbe := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
	defer cancelProbe()
	if err := w.deps.Engine.Probe(probe, models[0].Model); err != nil {
		return fmt.Errorf("probing model %s: %w", models[0].Model, err)
	}
	w.mu.Lock()
	w.kind = kind
	w.mu.Unlock()
	w.see(load)
	w.adopt(ctx, models, serve, serving)
	return nil
}

func (w *Worker) listModels(ctx context.Context) ([]engine.ModelInfo, error) {
	models, err := w.deps.Engine.Models(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing the engine's models: %w", err)
	}
	if len(w.cfg.Models) > 0 {
		models = slices.DeleteFunc(models, func(m engine.ModelInfo) bool { return !slices.Contains(w.cfg.Models, m.Model) })
	}
	if len(models) == 0 {
		return nil, fmt.Errorf("the engine serves none of the wanted models %v", w.cfg.Models)
	}
	return models, nil
}

// see takes a reading of the engine.
func (w *Worker) see(l engine.Load) {
	w.gate.observe(l)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.source != l.Source && l.Source == "estimated" {
		w.log.Warn("the engine does not tell its KV capacity: the configured one is used", "tokens", l.Capacity())
	}
	w.source = l.Source
	w.largest = l.LargestRank()
	for _, length := range w.models {
		if length > 0 && (w.largest == 0 || length < w.largest) {
			w.largest = length
		}
	}
}

// adopt begins to serve the models that are new, and remembers all.
func (w *Worker) adopt(ctx context.Context, models []engine.ModelInfo, serve func(job.Model), serving context.Context) {
	var fresh []job.Model
	w.mu.Lock()
	for _, m := range models {
		if _, known := w.models[m.Model]; !known {
			fresh = append(fresh, m.Model)
		}
		w.models[m.Model] = m.ContextLength
	}
	largest, kind := w.largest, w.kind
	w.mu.Unlock()
	for _, m := range models {
		fit := largest
		if m.ContextLength > 0 {
			fit = min(fit, m.ContextLength)
		}
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := w.deps.Cluster.Remember(short, cluster.KnownModel{Model: m.Model, Largest: fit, Seen: time.Now().UnixMilli(), Engine: string(kind)})
		cancel()
		if err != nil { // said again in a minute; heartbeats carry it meanwhile
			w.log.Warn("remembering a served model", "model", m.Model, "err", err)
		}
	}
	if serving.Err() == nil {
		for _, m := range fresh {
			serve(m)
		}
	}
}

// whileReady returns why the engine is not ready any more, or when ctx ends.
func (w *Worker) whileReady(ctx context.Context, serve func(job.Model), serving context.Context) (cluster.WorkerState, string) {
	var generated int64 = -1
	failures := 0
	listed, remembered := time.Now(), time.Now()
	timer := time.NewTimer(scrapeBusy)
	defer timer.Stop()
	for {
		why := ""
		select {
		case <-ctx.Done():
			return "", ""
		case why = <-w.suspect:
		case <-timer.C:
		}
		now := time.Now()
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		load, err := w.deps.Engine.Load(short)
		cancel()
		switch {
		case err != nil:
			w.metrics.scrapeErrors.Inc()
			if failures++; failures >= suspectCalls && why == "" {
				why = fmt.Sprintf("its metrics cannot be read: %v", err)
			}
		default:
			failures = 0
			w.see(load)
			if load.GeneratedTokens > generated && generated >= 0 {
				w.alive()
			}
			generated = load.GeneratedTokens
		}
		if why != "" {
			probe, cancel := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
			err := w.probe(probe)
			cancel()
			if err != nil && ctx.Err() == nil {
				return cluster.Unready, fmt.Sprintf("%s; probe: %v", why, err)
			}
			failures = 0
			w.badCalls.Store(0)
		}
		idle := w.gate.idle()
		if idle {
			w.alive()
		} else if since := now.Sub(time.Unix(0, w.progress.Load())); since > w.cfg.StallTimeout {
			return cluster.Stalled, fmt.Sprintf("engine_stalled: work runs and no token came for %s", since.Round(time.Second))
		}
		if now.Sub(listed) > relist || now.Sub(remembered) > remember {
			listed, remembered = now, now
			short, cancel := context.WithTimeout(ctx, 5*time.Second)
			if models, err := w.listModels(short); err == nil {
				w.adopt(ctx, models, serve, serving)
			}
			cancel()
		}
		if idle {
			timer.Reset(scrapeIdle)
		} else {
			timer.Reset(scrapeBusy)
		}
	}
}

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

// doubt asks for a probe of the engine now.
func (w *Worker) doubt(why string) {
	select {
	case w.suspect <- why:
	default: // one is asked for already
	}
}

// badCall counts a call that failed through the engine's fault; several in a row raise doubt.
func (w *Worker) badCall(why string) {
	if w.badCalls.Add(1) >= suspectCalls {
		w.doubt(why)
	}
}
