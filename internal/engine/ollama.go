package engine

import (
	"context"

	"github.com/millrace/millrace/internal/job"
)

// ollamaLoaded returns the context length of each loaded model by name.
func (e *Engine) ollamaLoaded(ctx context.Context) (map[string]job.Tokens, error) {
	var ps struct {
		Models []struct {
			Name          string     `json:"name"`
			ContextLength job.Tokens `json:"context_length"`
		} `json:"models"`
	}
	if err := e.getJSON(ctx, "/api/ps", &ps); err != nil {
		return nil, err
	}
	loaded := make(map[string]job.Tokens, len(ps.Models))
	for _, m := range ps.Models {
		loaded[m.Name] = m.ContextLength
	}
	return loaded, nil
}

// ollamaLoad makes a rank of each slot. Ollama unloads an idle model and then tells nothing, so the length last seen is kept; of several the smallest counts.
func (e *Engine) ollamaLoad(loaded map[string]job.Tokens) Load {
	var length job.Tokens
	for _, n := range loaded {
		if n > 0 && (length == 0 || n < length) {
			length = n
		}
	}
	if length > 0 {
		e.slotLength.Store(int64(length))
	} else {
		length = job.Tokens(e.slotLength.Load())
	}
	load := unknownLoad()
	if length > 0 {
		load.Ranks = make([]Rank, e.cfg.MaxConcurrency)
		for i := range load.Ranks {
			load.Ranks[i].Capacity = length
		}
	}
	return e.estimated(load)
}
