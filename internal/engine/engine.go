package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/millrace/millrace/internal/job"
)

// Errors that callers branch on.
var (
	// ErrUnreachable: the engine could not be reached, or broke the connection before its answer was whole.
	ErrUnreachable = errors.New("the engine broke the connection")
	// ErrBadStream: the engine sent something that is not an event stream of JSON chunks.
	ErrBadStream = errors.New("the engine sent a broken stream")
	// ErrTooLarge: an event or answer over the limit.
	ErrTooLarge = errors.New("the engine's answer is too large")
)

// Config of an Engine. Zero fields get the defaults named.
type Config struct {
	// URL is the engine's base, without /v1 (which is cut off where it stands).
	URL string
	// Kind overrides the detection.
	Kind Kind
	// MetricsURL is the page of the engine's metrics, where it is not at the place usual for its kind.
	MetricsURL string
	// APIKey is sent to the engine as a bearer token if set, and to no other host.
	APIKey string
	// KVTokens is the capacity in tokens for engines that do not tell. Default 32,768. MaxConcurrency bounds running requests for such engines; for Ollama it is
	// the engine's OLLAMA_NUM_PARALLEL. Default 8.
	KVTokens       job.Tokens
	MaxConcurrency int
	// MaxEvent bounds one SSE event, MaxAnswer a whole answer, in bytes. Default 32 MiB each.
	MaxEvent, MaxAnswer int64
}

// defaults stand for the zero fields of a Config.
var defaults = Config{
	KVTokens:       32_768,
	MaxConcurrency: 8,
	MaxEvent:       32 << 20,
	MaxAnswer:      32 << 20,
}

// Engine is a client of one engine. Safe for concurrent use.
type Engine struct {
	cfg  Config
	url  *url.URL
	base string // scheme, host and path prefix, without a slash at the end
	http *http.Client
	log  *slog.Logger

	session atomic.Pointer[session] // nil until the engine is detected
	said    sync.Map                // of kind and metric: that it is missing
}

// New validates cfg and connects to nothing.
func New(cfg Config, log *slog.Logger) (*Engine, error) {
	u, err := parseURL("URL", cfg.URL)
	if err != nil {
		return nil, err
	}
	if cfg.MetricsURL != "" {
		if _, err := parseURL("MetricsURL", cfg.MetricsURL); err != nil {
			return nil, err
		}
	}
	if cfg.Kind != "" && driverOf(cfg.Kind) == nil {
		return nil, fmt.Errorf("engine kind %q: want one of %v", cfg.Kind, Kinds())
	}
	for _, f := range []struct {
		name  string
		value int64
	}{
		{"KVTokens", int64(cfg.KVTokens)},
		{"MaxConcurrency", int64(cfg.MaxConcurrency)},
		{"MaxEvent", cfg.MaxEvent},
		{"MaxAnswer", cfg.MaxAnswer},
	} {
		if f.value < 0 {
			return nil, fmt.Errorf("engine %s is %d: want 0 for the default, or more", f.name, f.value)
		}
	}
	if cfg.KVTokens == 0 {
		cfg.KVTokens = defaults.KVTokens
	}
	if cfg.MaxConcurrency == 0 {
		cfg.MaxConcurrency = defaults.MaxConcurrency
	}
	if cfg.MaxEvent == 0 {
		cfg.MaxEvent = defaults.MaxEvent
	}
	if cfg.MaxAnswer == 0 {
		cfg.MaxAnswer = defaults.MaxAnswer
	}
	e := &Engine{
		cfg:  cfg,
		url:  u,
		base: strings.TrimSuffix(strings.TrimRight(u.String(), "/"), "/v1"),
		http: newHTTPClient(),
		log:  log,
	}
	e.Reset()
	return e, nil
}

func parseURL(field, text string) (*url.URL, error) {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the engine's %s: %w", field, err)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "":
		return nil, fmt.Errorf("engine %s %q: want http://HOST:PORT or https://HOST", field, u.Redacted())
	case u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("engine %s %q: a query or fragment cannot be kept", field, u.Redacted())
	}
	return u, nil
}

// Close lets go of idle connections. Calls that run are not touched.
func (e *Engine) Close() { e.http.CloseIdleConnections() }

// ModelInfo is a served model.
type ModelInfo struct {
	Model job.Model
	// ContextLength in tokens, 0 if the engine does not tell.
	ContextLength job.Tokens
}

// listedModel is one entry of /v1/models. MaxModelLen is vLLM's and SGLang's name for the context length; others who tell call it ContextLength.
type listedModel struct {
	ID            string     `json:"id"`
	OwnedBy       string     `json:"owned_by"`
	MaxModelLen   job.Tokens `json:"max_model_len"`
	ContextLength job.Tokens `json:"context_length"`
}

// Models lists what the engine serves. Ollama lists NAME:latest for what everybody calls NAME and takes both, so both are listed.
func (e *Engine) Models(ctx context.Context) ([]ModelInfo, error) {
	s, err := e.detected(ctx)
	if err != nil {
		return nil, err
	}
	f, err := s.facts(ctx, e)
	if err != nil {
		return nil, err
	}
	listed, err := e.listModels(ctx)
	if absent(err) && f.model != "" { // it serves one and has no list
		listed, err = []listedModel{{ID: string(f.model)}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the engine's models: %w", err)
	}
	listed = slices.DeleteFunc(listed, func(m listedModel) bool { return m.ID == "" })
	for i := range listed {
		if m := &listed[i]; m.MaxModelLen <= 0 && m.ContextLength <= 0 {
			m.ContextLength = f.contextLength
		}
	}
	if s.models != nil {
		return s.models(ctx, e, listed)
	}
	models := make([]ModelInfo, len(listed))
	for i, m := range listed {
		models[i] = ModelInfo{Model: job.Model(m.ID), ContextLength: m.length()}
	}
	return models, nil
}

// length is the model's context length in tokens, 0 if it is not told.
func (m listedModel) length() job.Tokens { return max(m.MaxModelLen, m.ContextLength, 0) }

func (e *Engine) listModels(ctx context.Context) ([]listedModel, error) {
	var list struct {
		Data []listedModel `json:"data"`
	}
	if err := e.getJSON(ctx, "/v1/models", &list); err != nil {
		return nil, err
	}
	return list.Data, nil
}
