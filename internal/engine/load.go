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
	// Ranks is each data-parallel rank's KV cache: one request must fit in one of them.
	Ranks []Rank
	// MaxRunning is the engine's limit on running sequences, 0 if unknown.
	MaxRunning int
	// Preemptions, GeneratedTokens and PromptTokens are counters since the engine's start; -1 if unknown. Tokens are counted as they come: one who counts them when a
	// request ends counts as unknown, for a long answer would look like a hang.
	Preemptions, GeneratedTokens, PromptTokens int64
	// Source is "engine" if Ranks came from the engine, else "estimated": what is used must then be counted by who calls, of which the ranks' Used is only what is known,
	// and MaxRunning is at most the configured bound.
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

// Load asks the engine how full it is. For an engine that tells nothing it returns the configured capacity as one rank, Source "estimated"; so it does, and logs once,
// where a page is missing, lacks a name, or has a number that cannot be. A page that cannot be read, or is garbage, is an error. Neither ever means "nothing used".
//
// The slots of llama.cpp and Ollama are a rank each.
func (e *Engine) Load(ctx context.Context) (Load, error) {
	s, err := e.detected(ctx)
	if err != nil {
		return Load{}, err
	}
	load, missing, err := s.load(ctx, e, s)
	if err == nil && len(load.Ranks) > maxRanks {
		err = fmt.Errorf("%d ranks of KV cache: at most %d can be", len(load.Ranks), maxRanks)
	}
	if err != nil {
		return Load{}, fmt.Errorf("reading the engine's load: %w", err)
	}
	if missing == "" {
		load.Source = SourceEngine
		return load, nil
	}
	if _, said := e.said.LoadOrStore([2]string{string(s.kind), missing}, true); !said && missing != tellsNothing {
		e.log.Warn("engine does not tell its load: estimating it", "kind", s.kind, "missing", missing, "hint", s.hint)
	}
	return e.estimated(load), nil
}

// tellsNothing is missing of an engine of which nothing else can be expected.
const tellsNothing = "everything"

// unknownLoad is the load of an engine that tells nothing.
func unknownLoad() Load { return Load{Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1} }

// estimated completes l from the configuration. Ranks that l has are kept.
func (e *Engine) estimated(l Load) Load {
	l.Source = SourceEstimated
	if l.MaxRunning == 0 || l.MaxRunning > e.cfg.MaxConcurrency {
		l.MaxRunning = e.cfg.MaxConcurrency
	}
	if len(l.Ranks) == 0 {
		l.Ranks = []Rank{{Capacity: e.cfg.KVTokens}}
	}
	return l
}

// fromMetrics is the load of a kind that tells it all on its page of metrics.
func fromMetrics(read func(metrics, facts, Config) (Load, string)) func(context.Context, *Engine, *session) (Load, string, error) {
	return func(ctx context.Context, e *Engine, s *session) (Load, string, error) {
		f, err := s.facts(ctx, e)
		if err != nil {
			return Load{}, "", err
		}
		m, err := e.readMetrics(ctx, s.metrics, s.port)
		if err != nil {
			return Load{}, "", err
		}
		l, missing := read(m, f, e.cfg)
		if m == nil {
			missing = "its metrics"
		}
		return l, missing, nil
	}
}

// queue reads how many requests run and wait. missing is the name that the page lacks.
func (l *Load) queue(m metrics, running, waiting string) (missing string) {
	r, ok := total(m.samples(running))
	if !ok {
		missing = running
	}
	w, ok := total(m.samples(waiting))
	if !ok {
		missing = waiting
	}
	l.Running, l.Waiting = int(r), int(w)
	return missing
}
