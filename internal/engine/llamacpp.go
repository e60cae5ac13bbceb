package engine

import (
	"context"
	"fmt"

	"github.com/millrace/millrace/internal/job"
)

// llama.cpp's server has a fixed number of slots, each with a context of its own: one request runs in one slot, and has all of it.
var llamaCPP = &driver{
	kind:       LlamaCPP,
	signs:      []string{"llamacpp:", "llamacpp_requests_processing"},
	recognize:  recognizeLlamaCPP,
	owner:      "llamacpp",
	health:     []string{"/health"}, // 503 while it loads
	hint:       "llama-server --slots --metrics",
	load:       llamaCPPLoad,
	rawPrompts: true,
}

func recognizeLlamaCPP(ctx context.Context, e *Engine) (facts, bool, error) {
	var props struct {
		Slots    int `json:"total_slots"`
		Settings struct {
			Length job.Tokens `json:"n_ctx"` // of one slot
		} `json:"default_generation_settings"`
	}
	ok, err := e.hasJSON(ctx, "/props", &props)
	if !ok || err != nil || props.Slots < 1 {
		return facts{}, false, err
	}
	if props.Slots > maxRanks {
		return facts{}, false, fmt.Errorf("GET /props: %d slots: at most %d can be", props.Slots, maxRanks)
	}
	length := believed(props.Settings.Length)
	return facts{capacity: length, ranks: props.Slots, maxRunning: props.Slots, contextLength: length}, true, nil
}

// llamaCPPLoad looks at the slots, or where those are hidden, counts the busy ones in the metrics.
func llamaCPPLoad(ctx context.Context, e *Engine, s *session) (l Load, missing string, err error) {
	f, err := s.facts(ctx, e)
	if err != nil {
		return Load{}, "", err
	}
	m, err := e.readMetrics(ctx, s.metrics, s.port)
	if err != nil {
		return Load{}, "", err
	}
	l = unknownLoad() // its count of tokens moves only when a request ends
	l.PromptTokens = counter(m.samples("llamacpp:prompt_tokens_total"))
	l.MaxRunning = f.maxRunning
	if waiting, ok := total(m.samples("llamacpp:requests_deferred")); ok {
		l.Waiting = int(waiting)
	}
	var slots []struct {
		Length job.Tokens `json:"n_ctx"`
		Busy   *bool      `json:"is_processing"`
		State  *int       `json:"state"` // before there was is_processing: 0 is idle
	}
	told, err := e.hasJSON(ctx, "/slots", &slots)
	if err != nil {
		return Load{}, "", err
	}
	if told && len(slots) > 0 && len(slots) <= maxRanks {
		l.MaxRunning = len(slots)
		for _, slot := range slots {
			rank := Rank{Capacity: believed(slot.Length)}
			if rank.Capacity == 0 {
				rank.Capacity = f.capacity
			}
			switch {
			case rank.Capacity == 0:
				missing = "the slots' n_ctx"
				continue
			case slot.Busy == nil && slot.State == nil:
				missing = "the slots' is_processing"
			case slot.Busy != nil && *slot.Busy, slot.Busy == nil && *slot.State != 0:
				rank.Used = rank.Capacity
				l.Running++
			}
			l.Ranks = append(l.Ranks, rank)
		}
		return l, missing, nil
	}
	if f.capacity > 0 {
		for range f.ranks {
			l.Ranks = append(l.Ranks, Rank{Capacity: f.capacity})
		}
	}
	busy, ok := total(m.samples("llamacpp:requests_processing"))
	if !ok || len(l.Ranks) == 0 {
		return l, "/slots and llamacpp:requests_processing", nil
	}
	l.Running = int(busy)
	for i := range min(l.Running, len(l.Ranks)) {
		l.Ranks[i].Used = l.Ranks[i].Capacity
	}
	return l, "", nil
}
