package engine

import (
	"context"
	"fmt"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// Ollama tells neither load nor size, only the context length of the models that are loaded. It lists NAME:latest for what everybody calls NAME.
var ollama = &driver{
	kind:      Ollama,
	recognize: recognizeOllama,
	health:    []string{"/"},
	load:      ollamaLoad,
	models:    ollamaModels,
}

func recognizeOllama(ctx context.Context, e *Engine) (facts, bool, error) {
	var answer struct {
		Version string `json:"version"`
	}
	ok, err := e.hasJSON(ctx, "/api/version", &answer)
	return facts{}, ok && answer.Version != "", err
}

func ollamaModels(ctx context.Context, e *Engine, listed []listedModel) ([]ModelInfo, error) {
	loaded, err := e.ollamaLoaded(ctx)
	if err != nil {
		return nil, err
	}
	var models []ModelInfo
	for _, m := range listed {
		length := max(m.length(), loaded[m.ID])
		if short, ok := strings.CutSuffix(m.ID, ":latest"); ok {
			models = append(models, ModelInfo{Model: job.Model(short), ContextLength: length})
		}
		models = append(models, ModelInfo{Model: job.Model(m.ID), ContextLength: length})
	}
	return models, nil
}

// ollamaLoaded returns the context length of each loaded model by name.
func (e *Engine) ollamaLoaded(ctx context.Context) (map[string]job.Tokens, error) {
	var ps struct {
		Models []struct {
			Name          string     `json:"name"`
			ContextLength job.Tokens `json:"context_length"`
		} `json:"models"`
	}
	if err := e.getJSON(ctx, "/api/ps", &ps); err != nil {
		return nil, fmt.Errorf("listing the engine's loaded models: %w", err)
	}
	loaded := make(map[string]job.Tokens, len(ps.Models))
	for _, m := range ps.Models {
		loaded[m.Name] = believed(m.ContextLength)
	}
	return loaded, nil
}

// ollamaLoad makes a rank of each slot. Ollama unloads an idle model and then tells nothing, so the length last seen is kept; of several the smallest counts.
func ollamaLoad(ctx context.Context, e *Engine, s *session) (Load, string, error) {
	loaded, err := e.ollamaLoaded(ctx)
	if err != nil {
		return Load{}, "", err
	}
	var length job.Tokens
	for _, n := range loaded {
		if n > 0 && (length == 0 || n < length) {
			length = n
		}
	}
	s.mu.Lock()
	if length > 0 {
		s.slotLength = length
	}
	length = s.slotLength
	s.mu.Unlock()
	l := unknownLoad()
	if length > 0 {
		for range min(e.cfg.MaxConcurrency, maxRanks) {
			l.Ranks = append(l.Ranks, Rank{Capacity: length})
		}
	}
	return l, tellsNothing, nil
}
