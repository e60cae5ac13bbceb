package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/singleflight"

	"github.com/millrace/millrace/internal/job"
)

// Kind of engine.
type Kind string

// The kinds. Generic is anything OpenAI-compatible.
const (
	VLLM     Kind = "vllm"
	SGLang   Kind = "sglang"
	LlamaCPP Kind = "llamacpp"
	TGI      Kind = "tgi"
	Triton   Kind = "triton"
	TRTLLM   Kind = "trtllm"
	LMDeploy Kind = "lmdeploy"
	Ollama   Kind = "ollama"
	Generic  Kind = "openai"
)

// drivers are the kinds, in the order in which an engine is asked whether it is one: a new kind is a file of its own and a line here. Those whose names others take
// over stand behind them: many an engine shows vLLM's metrics or answers as Ollama does.
var drivers = []*driver{triton, trtllm, sglang, lmdeploy, llamaCPP, tgi, vllm, ollama, generic}

// Kinds lists what Config.Kind may be.
func Kinds() []Kind {
	kinds := make([]Kind, len(drivers))
	for i, d := range drivers {
		kinds[i] = d.kind
	}
	return kinds
}

func driverOf(k Kind) *driver {
	for _, d := range drivers {
		if d.kind == k {
			return d
		}
	}
	return nil
}

// driver is what is to be known of one kind of engine. What a kind does not have stays zero.
type driver struct {
	kind Kind
	// signs are names of metrics that give the kind away; one that ends in a colon or underscore stands for all that begin so.
	signs []string
	// recognize asks a route that no other kind has: false if it is not there.
	recognize func(context.Context, *Engine) (facts, bool, error)
	// owner is whom the models of /v1/models are owned by: the last sign of an engine that shows no other.
	owner string
	// health are the routes that tell whether the engine lives: the first that is there counts.
	health []string
	// metrics is the path of the metrics, "/metrics" if empty. port, if not 0, is another port where they may be instead.
	metrics string
	port    int
	// hint says how the engine is started so that it tells its load.
	hint string
	// load reads how full the engine is. missing names what it does not tell, so that the load must be estimated.
	load func(ctx context.Context, e *Engine, s *session) (l Load, missing string, err error)
	// shape reads from the metrics what the facts do not have.
	shape func(metrics) Shape
	// models completes what /v1/models lists.
	models func(ctx context.Context, e *Engine, listed []listedModel) ([]ModelInfo, error)

	// rawPrompts: /v1/completions takes its prompt as it is, without a template around it.
	rawPrompts bool
	// mayContinue and mayPrioritize: a probe tells whether it does so for a model.
	mayContinue, mayPrioritize bool
	// cacheSalts: the body's field cache_salt keeps the KV cache of a prompt apart from that of the same prompt with another.
	cacheSalts bool
}

// facts are what an engine tells of itself that does not change while it runs. What it does not tell is zero.
type facts struct {
	shape Shape
	// capacity is each data-parallel rank's KV cache.
	capacity job.Tokens
	// ranks is how many there are, 0 for one.
	ranks int
	// maxRunning is the engine's limit on running sequences.
	maxRunning int
	// model is the one that it serves, and contextLength what each of its models takes.
	model         job.Model
	contextLength job.Tokens
}

// session is what has been found out of an engine since it was detected.
type session struct {
	*driver

	mu         sync.Mutex // guards what follows
	known      *facts
	abilities  map[job.Model]verdict
	responds   map[job.Model]responds
	slotLength job.Tokens // Ollama: the context length last seen, which it tells only while a model is loaded

	probes singleflight.Group // of abilities, by model
}

func newSession(d *driver, f *facts) *session {
	return &session{driver: d, known: f, abilities: map[job.Model]verdict{}, responds: map[job.Model]responds{}}
}

// facts asks for them once.
func (s *session) facts(ctx context.Context, e *Engine) (facts, error) {
	s.mu.Lock()
	known := s.known
	s.mu.Unlock()
	if known != nil {
		return *known, nil
	}
	var f facts
	if s.recognize != nil {
		var err error
		if f, _, err = s.recognize(ctx, e); err != nil {
			return facts{}, fmt.Errorf("asking the engine what it is: %w", err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known = &f
	return f, nil
}

// Detect asks the engine what it is, unless Kind was configured. Call it until it succeeds: an engine that is still starting is an error, not a guess. The answer is
// kept until Reset.
func (e *Engine) Detect(ctx context.Context) (Kind, error) {
	s, err := e.detected(ctx)
	if err != nil {
		return "", err
	}
	return s.kind, nil
}

// Reset forgets what has been found out of the engine. Call it when the engine was away: it may come back as another.
func (e *Engine) Reset() { e.session.Store(e.configured()) }

// configured is the session of an engine whose kind need not be asked for, nil for any other.
func (e *Engine) configured() *session {
	if e.cfg.Kind == "" {
		return nil
	}
	return newSession(driverOf(e.cfg.Kind), nil)
}

func (e *Engine) detected(ctx context.Context) (*session, error) {
	if s := e.session.Load(); s != nil {
		return s, nil
	}
	s, err := e.detect(ctx)
	if err != nil {
		return nil, fmt.Errorf("detecting the engine: %w", err)
	}
	if !e.session.CompareAndSwap(nil, s) {
		if first := e.session.Load(); first != nil {
			return first, nil
		}
	}
	return s, nil
}

// detect looks for a kind's own metrics, then for its own routes, then at the owner of its models. Any answer of an engine that is not well ends it with an error.
func (e *Engine) detect(ctx context.Context) (*session, error) {
	// The metrics come first: they alone prove that the load can be read as a kind tells it. Forks and emulators share the names, not always the routes.
	m, err := e.readMetrics(ctx, "", 0)
	if err != nil && !errors.Is(err, errNotMetrics) { // what stands there may be a page for people, or JSON
		return nil, err
	}
	for _, d := range drivers {
		if m.has(d.signs) {
			return newSession(d, nil), nil
		}
	}
	for _, d := range drivers {
		if d.recognize == nil {
			continue
		}
		f, ok, err := d.recognize(ctx, e)
		if err != nil {
			return nil, err
		}
		if ok {
			return newSession(d, &f), nil
		}
	}
	models, err := e.listModels(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range drivers {
		if d.owner != "" && len(models) > 0 && models[0].OwnedBy == d.owner {
			return newSession(d, nil), nil
		}
	}
	return newSession(generic, nil), nil
}

// hasJSON reads the page at path into v, and tells false if there is no such page.
func (e *Engine) hasJSON(ctx context.Context, path string, v any) (bool, error) {
	switch err := e.getJSON(ctx, path, v); {
	case err == nil:
		return true, nil
	case absent(err):
		return false, nil
	default:
		return false, err
	}
}

// Shape is how an engine is spread over GPUs. A number that it does not tell is 0.
type Shape struct {
	// TensorParallel and PipelineParallel are the GPUs that share each rank's layers, and the stages in a row. DataParallel is the number of ranks.
	TensorParallel, PipelineParallel, DataParallel int
}

// Shape asks the engine how it is spread over GPUs.
func (e *Engine) Shape(ctx context.Context) (Shape, error) {
	s, err := e.detected(ctx)
	if err != nil {
		return Shape{}, err
	}
	f, err := s.facts(ctx, e)
	if err != nil {
		return Shape{}, err
	}
	if s.shape == nil {
		return f.shape, nil
	}
	m, err := e.readMetrics(ctx, s.metrics, s.port)
	if err != nil {
		return Shape{}, err
	}
	return s.shape(m), nil
}
