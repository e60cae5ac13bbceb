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

// probeTimeout bounds a probe whose caller set no nearer end. The first one may have to wait for the engine to load the model.
const probeTimeout = 10 * time.Minute

// Healthy asks the engine's health route. It says that a process answers, no more: Probe says that it works.
func (e *Engine) Healthy(ctx context.Context) error {
	s, err := e.detected(ctx)
	if err != nil {
		return err
	}
	for _, path := range s.health {
		if _, err = e.get(ctx, path); err == nil {
			return nil
		}
		if !absent(err) {
			break
		}
	}
	return fmt.Errorf("asking for the engine's health: %w", err)
}

// Probe completes one token with model m: the only proof of readiness. 503 while loading is an error like any other. A model that does not chat (it has no chat
// template, or it embeds) is tried as what else it may be.
func (e *Engine) Probe(ctx context.Context, m job.Model) error {
	ctx, cancel := context.WithTimeoutCause(ctx, probeTimeout, fmt.Errorf("%w: no answer within %s", ErrUnreachable, probeTimeout))
	defer cancel()
	name, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("writing the model's name: %w", err)
	}
	var refused error
	for _, try := range []struct {
		endpoint job.Endpoint
		rest     string
	}{
		{job.ChatCompletions, `,"messages":[{"role":"user","content":"Hi"}],"max_tokens":1}`},
		{job.Completions, `,"prompt":"Hi","max_tokens":1}`},
		{job.Embeddings, `,"input":"Hi"}`},
	} {
		err := e.probe(ctx, try.endpoint, []byte(`{"model":`+string(name)+try.rest))
		if err == nil {
			return nil
		}
		if refused == nil {
			refused = fmt.Errorf("probing model %s: %w", m, err)
		}
		var status *statusError
		if !errors.As(err, &status) || !absent(err) {
			break // the engine is not ready, or its answer makes no sense: asking otherwise proves nothing
		}
	}
	return refused
}

func (e *Engine) probe(ctx context.Context, endpoint job.Endpoint, body []byte) error {
	req, err := e.newRequest(ctx, http.MethodPost, e.base+string(endpoint), bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	page, err := e.ask(req)
	if err != nil {
		return err
	}
	var answer struct {
		Choices []json.RawMessage `json:"choices"`
		Data    []json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(page, &answer); err != nil {
		return fmt.Errorf("POST %s: %w: %w", endpoint, errNotJSON, err)
	}
	if len(answer.Choices) == 0 && len(answer.Data) == 0 {
		return fmt.Errorf("POST %s: the answer completes nothing", endpoint)
	}
	return nil
}
