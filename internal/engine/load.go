package engine

import (
	"context"
	"fmt"

	"github.com/millrace/millrace/internal/job"
)

// The sources of a Load.
const (
	SourceEngine    = "engine"
	SourceEstimated = "estimated"
)

// Load is what the engine says about itself now.
type Load struct {
	Running, Waiting int
	// Ranks is each data-parallel rank's KV cache: one request must fit in one of them. Their Used counts only where Source is "engine".
	Ranks []Rank
	// MaxRunning is the engine's limit on running sequences, 0 if unknown.
	MaxRunning int
	// Preemptions, GeneratedTokens and PromptTokens are counters since the engine's start; -1 if unknown.
	Preemptions, GeneratedTokens, PromptTokens int64
	// Source is "engine" if Ranks came from the engine, else "estimated": what is used must then be counted by who calls, and MaxRunning is the configured bound.
	Source string
}

// Rank is one data-parallel rank's KV cache in tokens.
type Rank struct{ Capacity, Used job.Tokens }

// Capacity sums the ranks' capacities.
func (l Load) Capacity() job.Tokens {
	var n job.Tokens
	for _, r := range l.Ranks {
		n += r.Capacity
	}
	return n
}

// LargestRank is the largest rank's capacity: no job over it can run.
func (l Load) LargestRank() job.Tokens {
	var n job.Tokens
	for _, r := range l.Ranks {
		n = max(n, r.Capacity)
	}
	return n
}

// Used sums what is used of the ranks.
func (l Load) Used() job.Tokens {
	var n job.Tokens
	for _, r := range l.Ranks {
		n += r.Used
	}
	return n
}

// Load reads the engine's metrics. For an engine without any it returns the configured capacity as one rank, Source "estimated"; so it does, and logs once, where the
// page lacks a name or says NaN. A page that is missing or garbage is an error. Neither ever means "nothing used".
//
// Ollama's slots are a rank each, of the loaded model's context length.
func (e *Engine) Load(ctx context.Context) (Load, error) {
	kind, err := e.Detect(ctx)
	if err != nil {
		return Load{}, err
	}
	switch kind {
	case VLLM:
		page, err := e.get(ctx, "/metrics")
		if err != nil {
			return Load{}, fmt.Errorf("reading the engine's metrics: %w", err)
		}
		families, err := parseMetrics(page)
		if err != nil {
			return Load{}, fmt.Errorf("reading the engine's metrics: %w", err)
		}
		load, missing := vllmLoad(families)
		if missing != "" {
			e.sayOnce.Do(func() { e.log.Warn("engine does not tell its load: estimating it", "missing", missing) })
			load = e.estimated(load)
		}
		return load, nil
	case Ollama:
		loaded, err := e.ollamaLoaded(ctx)
		if err != nil {
			return Load{}, fmt.Errorf("reading the engine's loaded models: %w", err)
		}
		return e.ollamaLoad(loaded), nil
	default:
		return e.estimated(unknownLoad()), nil
	}
}

// unknownLoad is the load of an engine that tells nothing.
func unknownLoad() Load { return Load{Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1} }

// estimated completes l from the configuration. Ranks that l has are kept for their capacity.
func (e *Engine) estimated(l Load) Load {
	l.Source = SourceEstimated
	l.MaxRunning = e.cfg.MaxConcurrency
	for i := range l.Ranks {
		l.Ranks[i].Used = 0
	}
	if len(l.Ranks) == 0 {
		l.Ranks = []Rank{{Capacity: e.cfg.KVTokens}}
	}
	return l
}
