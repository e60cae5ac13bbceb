// Package engine speaks to inference engines over HTTP.
package engine

import (
	"context"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"time"

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
	// URL is the engine's base, without /v1.
	URL string
	// Kind overrides the detection.
	Kind Kind
	// APIKey is sent to the engine as a bearer token if set.
	APIKey string
	// KVTokens is the capacity in tokens for engines that do not tell. Default 32,768. MaxConcurrency bounds running requests for such engines. Default 8.
	KVTokens       job.Tokens
	MaxConcurrency int
	// MaxEvent bounds one SSE event, MaxAnswer a whole answer, in bytes. Default 32 MiB each.
	MaxEvent, MaxAnswer int64
}

// Engine is a client of one engine. Safe for concurrent use.
type Engine struct{ impl }

// New validates cfg and connects to nothing.
func New(cfg Config, log *slog.Logger) (*Engine, error) { panic("engine") }

// Detect asks the engine what it is, unless Kind was configured. Call it until it succeeds.
func (e *Engine) Detect(ctx context.Context) (Kind, error) { panic("engine") }

// ModelInfo is a served model.
type ModelInfo struct {
	Model job.Model
	// ContextLength in tokens, 0 if the engine does not tell.
	ContextLength job.Tokens
}

// Models lists what the engine serves.
func (e *Engine) Models(ctx context.Context) ([]ModelInfo, error) { panic("engine") }

// Load is what the engine says about itself now.
type Load struct {
	Running, Waiting int
	// Ranks is each data-parallel rank's KV cache. Empty if the engine does not tell.
	Ranks []Rank
	// MaxRunning is the engine's limit on running sequences, 0 if unknown.
	MaxRunning int
	// Preemptions and GeneratedTokens are counters since the engine's start; -1 if unknown.
	Preemptions, GeneratedTokens int64
	// Source is "engine" if Ranks came from the engine, else "estimated" (from Config).
	Source string
}

// Rank is one data-parallel rank's KV cache in tokens.
type Rank struct{ Capacity, Used job.Tokens }

// Capacity sums the ranks; LargestRank is the largest one's capacity.
func (l Load) Capacity() job.Tokens {
	var n job.Tokens
	for _, r := range l.Ranks {
		n += r.Capacity
	}
	return n
}
func (l Load) LargestRank() job.Tokens {
	var n job.Tokens
	for _, r := range l.Ranks {
		n = max(n, r.Capacity)
	}
	return n
}
func (l Load) Used() job.Tokens {
	var n job.Tokens
	for _, r := range l.Ranks {
		n += r.Used
	}
	return n
}

// Load reads the engine's metrics. For an engine without any it returns the configured capacity as one rank, Source "estimated". A page that is missing, garbage, NaN or without the needed names is an error or
// "estimated", never "nothing used".
func (e *Engine) Load(ctx context.Context) (Load, error) { panic("engine") }

// Healthy asks the engine's health route.
func (e *Engine) Healthy(ctx context.Context) error { panic("engine") }

// Probe completes one token with model: the only proof of readiness. 503 while loading is an error like any other.
func (e *Engine) Probe(ctx context.Context, m job.Model) error { panic("engine") }

// Request is one call.
type Request struct {
	Endpoint job.Endpoint
	// Body is sent as it is.
	Body io.Reader
	Size int64
	// ID becomes the X-Request-Id header.
	ID job.ID
}

// Response is the engine's answer: the caller closes Body. Closing it, or ending the call's context, before its end cancels the work in the engine.
type Response struct {
	StatusCode  int
	ContentType string
	Header      http.Header
	// RetryAfter is the engine's Retry-After (seconds or a date), 0 if none.
	RetryAfter time.Duration
	Body       io.ReadCloser
	impl       responseImpl
}

// Call posts the request and returns when the answer's head is here. Errors wrap ErrUnreachable or the context's.
func (e *Engine) Call(ctx context.Context, r Request) (*Response, error) { panic("engine") }

// ReadAll reads the answer whole, at most MaxAnswer bytes. A cut answer is ErrUnreachable.
func (r *Response) ReadAll() ([]byte, error) { panic("engine") }

// Event is one server-sent event of an engine's stream.
type Event struct {
	// Raw is the event as it came, with its blank line. Data is its data lines joined by newlines; nil for a comment. Both are valid until the next event.
	Raw, Data []byte
	// Done: data is [DONE].
	Done bool
}

// Events yields the events of a streamed answer. It ends after [DONE], or with ErrUnreachable where the stream ends without it, ErrTooLarge, ErrBadStream.
func (r *Response) Events() iter.Seq2[Event, error] { panic("engine") }

// Assembler builds from a stream's chunks the answer that the engine would have given without streaming.
type Assembler struct{ asm }

// NewAssembler returns an assembler for the endpoint. hideUsage: the usage chunk was asked by us alone; it is counted and not shown (Add tells).
func NewAssembler(ep job.Endpoint, hideUsage bool) *Assembler { panic("engine") }

// Chunk is what one chunk says.
type Chunk struct {
	// Show tells whether the client gets to see it.
	Show bool
	// Error is set if the chunk is the engine's error object.
	Error *job.Error
	// Token tells whether it carries generated text (or a tool call, reasoning, ...).
	Token bool
}

// Add takes one chunk's JSON, which it does not keep.
func (a *Assembler) Add(data []byte) (Chunk, error) { panic("engine") }

// Body is the assembled answer; Usage what the engine counted, nil if it did not; Text the generated text of each choice so far, by index.
func (a *Assembler) Body() ([]byte, error) { panic("engine") }
func (a *Assembler) Usage() *job.Usage     { panic("engine") }
func (a *Assembler) Text() []string        { panic("engine") }

// UsageOf reads the usage of a whole answer, nil if it has none.
func UsageOf(body []byte) *job.Usage { panic("engine") }

type (
	impl         struct{}
	responseImpl struct{}
	asm          struct{}
)
