package engine

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const (
	// abilityTimeout bounds the probes of one model's abilities.
	abilityTimeout = 30 * time.Second
	// doubtFor is how long an ability that could not be probed counts as missing before it is probed again.
	doubtFor = 30 * time.Second
	// maxAbilities bounds the models whose abilities are kept.
	maxAbilities = 1000
)

// Abilities are what an engine can do with a model beyond answering.
type Abilities struct {
	// ContinueChat: it goes on with a last message of the assistant's, by continue_final_message and add_generation_prompt: false.
	ContinueChat bool
	// ContinueCompletion: a prompt of /v1/completions is taken as it is, so that prompt and partial answer together are continued.
	ContinueCompletion bool
	// Priority: the body's field priority decides what runs first, the lowest number first.
	Priority bool
	// CacheSalt: the body's field cache_salt keeps the KV cache of a prompt apart from that of the same prompt with another salt.
	CacheSalt bool
}

// verdict is what is known of a model's abilities; until is when it must be asked again, zero for never.
type verdict struct {
	Abilities
	until time.Time
}

// Abilities tells what the engine can do with model m. Where only a try tells, it has the engine complete one token, once per model until Reset. What cannot be found
// out now counts as missing for a while.
func (e *Engine) Abilities(ctx context.Context, m job.Model) Abilities {
	s, err := e.detected(ctx)
	if err != nil {
		return Abilities{}
	}
	known := Abilities{ContinueCompletion: s.rawPrompts, CacheSalt: s.cacheSalts}
	if !s.mayContinue && !s.mayPrioritize {
		return known
	}
	if v, ok := s.verdict(m); ok {
		return v
	}
	found, _, _ := s.probes.Do(string(m), func() (any, error) { // those who ask at the same time share the answer
		if v, ok := s.verdict(m); ok { // of one who was quicker
			return v, nil
		}
		probing, cancel := context.WithTimeout(ctx, abilityTimeout)
		defer cancel()
		v := verdict{Abilities: known}
		sure := true
		try := func(may bool, endpoint job.Endpoint, rest string) bool {
			if !may {
				return false
			}
			does, certain := e.accepts(probing, m, endpoint, rest)
			sure = sure && certain
			return does
		}
		v.ContinueChat = try(s.mayContinue, job.ChatCompletions,
			`,"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}],"continue_final_message":true,"add_generation_prompt":false,"max_tokens":1}`)
		// An engine that does not order by priority refuses any but 0. Completions need no chat template, so every model that generates has them.
		v.Priority = try(s.mayPrioritize, job.Completions, `,"prompt":"Hi","max_tokens":1,"priority":1}`)
		switch {
		case errors.Is(ctx.Err(), context.Canceled): // nobody wants to know any more, which says nothing of the engine
			return v.Abilities, nil
		case !sure:
			v.until = time.Now().Add(doubtFor)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.abilities) >= maxAbilities {
			clear(s.abilities)
		}
		s.abilities[m] = v
		return v.Abilities, nil
	})
	return found.(Abilities)
}

// verdict is what is known of model m.
func (s *session) verdict(m job.Model) (Abilities, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.abilities[m]
	return v.Abilities, ok && (v.until.IsZero() || time.Now().Before(v.until))
}

// accepts has the engine complete a request of model m. It is sure if the engine took it or refused it, and not if it failed.
func (e *Engine) accepts(ctx context.Context, m job.Model, endpoint job.Endpoint, rest string) (does, sure bool) {
	name, err := json.Marshal(m)
	if err != nil {
		return false, true
	}
	err = e.probe(ctx, endpoint, []byte(`{"model":`+string(name)+rest))
	return err == nil, err == nil || absent(err)
}
