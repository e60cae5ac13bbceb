package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// responsesProbe is what an engine has to answer that serves /v1/responses. Fewer tokens than 16 are refused by some.
const responsesProbe = `,"input":"Hi","max_output_tokens":16,"store":false}`

// ServesResponses tells whether the engine serves /v1/responses itself for model m: many have the route, and not all of them answer on it, so it is tried, once per model until Reset. sure is false
// where the try failed for another reason; then it is made again after a while.
func (e *Engine) ServesResponses(ctx context.Context, m job.Model) (does, sure bool) {
	s, err := e.detected(ctx)
	if err != nil {
		return false, false
	}
	if v, ok := s.respondsTo(m); ok {
		return v.does, v.until.IsZero()
	}
	type answer struct{ does, sure bool }
	found, _, _ := s.probes.Do("responses "+string(m), func() (any, error) { // those who ask at the same time share the answer
		if v, ok := s.respondsTo(m); ok {
			return answer{v.does, v.until.IsZero()}, nil
		}
		probing, cancel := context.WithTimeout(ctx, abilityTimeout)
		defer cancel()
		does, sure := e.probeResponses(probing, m)
		if errors.Is(ctx.Err(), context.Canceled) { // nobody wants to know any more, which says nothing of the engine
			return answer{}, nil
		}
		v := responds{does: does}
		if !sure {
			v.until = time.Now().Add(doubtFor)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.responds) >= maxAbilities {
			clear(s.responds)
		}
		s.responds[m] = v
		return answer{does, sure}, nil
	})
	a := found.(answer)
	return a.does, a.sure
}

// KnownResponses is ServesResponses as far as it is known, without asking the engine.
func (e *Engine) KnownResponses(m job.Model) (does, sure bool) {
	s := e.session.Load()
	if s == nil {
		return false, false
	}
	v, ok := s.respondsTo(m)
	return v.does, ok && v.until.IsZero()
}

// responds is whether an engine serves /v1/responses for a model; until is when that must be asked again, zero for never.
type responds struct {
	does  bool
	until time.Time
}

func (s *session) respondsTo(m job.Model) (responds, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.responds[m]
	return v, ok && (v.until.IsZero() || time.Now().Before(v.until))
}

func (e *Engine) probeResponses(ctx context.Context, m job.Model) (does, sure bool) {
	name, err := json.Marshal(m)
	if err != nil {
		return false, true
	}
	err = func() error {
		req, err := e.newRequest(ctx, http.MethodPost, e.base+string(job.Responses), bytes.NewReader([]byte(`{"model":`+string(name)+responsesProbe)))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/json")
		page, err := e.ask(req)
		if err != nil {
			return err
		}
		var answer struct {
			Object string            `json:"object"`
			Status string            `json:"status"`
			Output []json.RawMessage `json:"output"`
		}
		if err := json.Unmarshal(page, &answer); err != nil || answer.Object != "response" || answer.Status == "failed" || answer.Output == nil {
			return fmt.Errorf("POST %s: %w", job.Responses, errNotJSON)
		}
		return nil
	}()
	return err == nil, err == nil || absent(err)
}
