package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
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

// Kind of engine.
type Kind string

// The kinds. Generic is anything OpenAI-compatible.
const (
	VLLM    Kind = "vllm"
	Ollama  Kind = "ollama"
	Generic Kind = "openai"
)

// Config of an Engine. Zero fields get the defaults named.
type Config struct {
	// URL is the engine's base, without /v1 (which is cut off where it stands).
	URL string
	// Kind overrides the detection.
	Kind Kind
	// APIKey is sent to the engine as a bearer token if set.
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
	base string // scheme, host and path prefix, without a slash at the end
	http *http.Client
	log  *slog.Logger

	kind       atomic.Pointer[Kind]
	slotLength atomic.Int64 // Ollama: the context length last seen, which it tells only while a model is loaded
	sayOnce    sync.Once    // that the load is estimated
}

// New validates cfg and connects to nothing.
func New(cfg Config, log *slog.Logger) (*Engine, error) {
	u, err := url.Parse(cfg.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the engine's URL: %w", err)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "":
		return nil, fmt.Errorf("engine URL %q: want http://HOST:PORT or https://HOST", u.Redacted())
	case u.RawQuery != "" || u.Fragment != "":
		return nil, fmt.Errorf("engine URL %q: a query or fragment cannot be kept", u.Redacted())
	}
	switch cfg.Kind {
	case "", VLLM, Ollama, Generic:
	default:
		return nil, fmt.Errorf("engine kind %q: want %s, %s or %s", cfg.Kind, VLLM, Ollama, Generic)
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
		base: strings.TrimSuffix(strings.TrimRight(u.String(), "/"), "/v1"),
		http: newHTTPClient(),
		log:  log,
	}
	if cfg.Kind != "" {
		e.kind.Store(&cfg.Kind)
	}
	return e, nil
}

// Close lets go of idle connections. Calls that run are not touched.
func (e *Engine) Close() { e.http.CloseIdleConnections() }

// Detect asks the engine what it is, unless Kind was configured. Call it until it succeeds: an engine that is still starting is an error, not a guess.
func (e *Engine) Detect(ctx context.Context) (Kind, error) {
	if k := e.kind.Load(); k != nil {
		return *k, nil
	}
	kind, err := e.detect(ctx)
	if err != nil {
		return "", fmt.Errorf("detecting the engine: %w", err)
	}
	e.kind.CompareAndSwap(nil, &kind)
	return *e.kind.Load(), nil
}

func (e *Engine) detect(ctx context.Context) (Kind, error) {
	// The metrics are asked first: they alone prove that the capacity can be read the way vLLM tells it. Its emulators and forks share the names, not always /version.
	page, err := e.get(ctx, "/metrics")
	switch {
	case err == nil:
		families, err := parseMetrics(page)
		if err == nil && hasVLLM(families) {
			return VLLM, nil
		}
	case !absent(err):
		return "", err
	}
	var version struct {
		Version string `json:"version"`
	}
	switch err := e.getJSON(ctx, "/api/version", &version); {
	case err == nil && version.Version != "":
		return Ollama, nil
	case err != nil && !absent(err):
		return "", err
	}
	models, err := e.listModels(ctx)
	if err != nil {
		return "", err
	}
	// A vLLM that was told to keep no statistics has a version and names itself as its models' owner.
	if err := e.getJSON(ctx, "/version", &version); err == nil && version.Version != "" && len(models) > 0 && models[0].OwnedBy == "vllm" {
		return VLLM, nil
	}
	return Generic, nil
}

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
	kind, err := e.Detect(ctx)
	if err != nil {
		return nil, err
	}
	listed, err := e.listModels(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing the engine's models: %w", err)
	}
	loaded := map[string]job.Tokens{}
	if kind == Ollama {
		if loaded, err = e.ollamaLoaded(ctx); err != nil {
			return nil, fmt.Errorf("listing the engine's loaded models: %w", err)
		}
	}
	models := make([]ModelInfo, 0, len(listed))
	for _, m := range listed {
		if m.ID == "" {
			continue
		}
		length := max(m.MaxModelLen, m.ContextLength, loaded[m.ID], 0)
		if short, ok := strings.CutSuffix(m.ID, ":latest"); ok && kind == Ollama {
			models = append(models, ModelInfo{Model: job.Model(short), ContextLength: length})
		}
		models = append(models, ModelInfo{Model: job.Model(m.ID), ContextLength: length})
	}
	return models, nil
}

func (e *Engine) listModels(ctx context.Context) ([]listedModel, error) {
	var list struct {
		Data []listedModel `json:"data"`
	}
	if err := e.getJSON(ctx, "/v1/models", &list); err != nil {
		return nil, err
	}
	return list.Data, nil
}
