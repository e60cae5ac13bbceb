package responses

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

const (
	idPrefix  = "resp_"
	jobPrefix = "job_"
)

// ID is the id of the response that the job is.
func ID(id job.ID) string { return idPrefix + strings.TrimPrefix(string(id), jobPrefix) }

// JobID is the id of the job that the response is. It says nothing about whether there is one.
func JobID(id string) (job.ID, error) {
	rest, ok := strings.CutPrefix(id, idPrefix)
	if !ok {
		return "", fmt.Errorf("%q is not a response id", id)
	}
	j, err := job.ParseID(jobPrefix + rest)
	if err != nil {
		return "", fmt.Errorf("%q is not a response id", id)
	}
	return j, nil
}

// Status is where a response stands.
type Status string

// The statuses.
const (
	Queued     Status = "queued"
	InProgress Status = "in_progress"
	Completed  Status = "completed"
	Incomplete Status = "incomplete"
	Failed     Status = "failed"
	Cancelled  Status = "cancelled"
)

// Frame is what Millrace says of a response, whichever engine makes it.
type Frame struct {
	ID string
	// CreatedAt is in unix seconds.
	CreatedAt int64
	// Background: the client asked for it, and the response is kept.
	Background bool
	// Metadata is the client's, nil if it gave none.
	Metadata json.RawMessage
}

// FrameOf is the frame of job j, whose request is body.
func FrameOf(j *job.Job, body *job.Object) Frame {
	f := Frame{ID: ID(j.ID), CreatedAt: int64(j.Created) / 1000}
	if body != nil {
		f.Background = Flag(body, "background")
		if raw := body.Get("metadata"); !unset(raw) {
			f.Metadata = bytes.Clone(raw)
		}
	}
	return f
}

// Flag tells whether a field is true.
func Flag(o *job.Object, key string) bool { return string(o.Get(key)) == "true" }

// Object is a response as clients see it. All its keys always stand in its JSON.
type Object struct {
	ID                string          `json:"id"`
	Object            string          `json:"object"`
	CreatedAt         int64           `json:"created_at"`
	Status            Status          `json:"status"`
	Background        bool            `json:"background"`
	CompletedAt       *int64          `json:"completed_at"`
	Error             *Error          `json:"error"`
	IncompleteDetails *Details        `json:"incomplete_details"`
	Instructions      json.RawMessage `json:"instructions"`
	MaxOutputTokens   json.RawMessage `json:"max_output_tokens"`
	MaxToolCalls      json.RawMessage `json:"max_tool_calls"`
	Model             json.RawMessage `json:"model"`
	Output            []*Item         `json:"output"`
	ParallelToolCalls json.RawMessage `json:"parallel_tool_calls"`
	PreviousResponse  json.RawMessage `json:"previous_response_id"`
	PromptCacheKey    json.RawMessage `json:"prompt_cache_key"`
	Reasoning         json.RawMessage `json:"reasoning"`
	SafetyIdentifier  json.RawMessage `json:"safety_identifier"`
	ServiceTier       json.RawMessage `json:"service_tier"`
	Store             bool            `json:"store"`
	Temperature       json.RawMessage `json:"temperature"`
	Text              json.RawMessage `json:"text"`
	ToolChoice        json.RawMessage `json:"tool_choice"`
	Tools             json.RawMessage `json:"tools"`
	TopLogprobs       json.RawMessage `json:"top_logprobs"`
	TopP              json.RawMessage `json:"top_p"`
	Truncation        json.RawMessage `json:"truncation"`
	Usage             *Usage          `json:"usage"`
	User              json.RawMessage `json:"user"`
	Metadata          json.RawMessage `json:"metadata"`
}

// Error says why a response failed.
type Error struct {
	Code    job.Code `json:"code"`
	Message string   `json:"message"`
}

// codes are those of the API that an engine may have given for its own reasons.
var codes = []job.Code{
	"server_error", "rate_limit_exceeded", "invalid_prompt", "vector_store_timeout", "invalid_image", "invalid_image_format", "invalid_base64_image", "invalid_image_url", "image_too_large", "image_too_small", "image_parse_error",
	"image_content_policy_violation", "invalid_image_mode", "image_file_too_large", "unsupported_image_media_type", "empty_image_file", "failed_to_download_image", "image_file_not_found",
}

// NewError tells e, with which a response ended, in a code of the API. status is the engine's, 0 if it gave none.
func NewError(status int, e *job.Error) *Error {
	code := e.CodeOf()
	switch {
	case slices.Contains(codes, code):
	case status == http.StatusTooManyRequests, status == 0 && e.Type == job.TypeRateLimit:
		code = "rate_limit_exceeded"
	case status == http.StatusBadRequest, status == http.StatusRequestEntityTooLarge, status == http.StatusUnprocessableEntity, status == 0 && e.Type == job.TypeInvalidRequest:
		code = "invalid_prompt"
	default:
		code = "server_error"
	}
	return &Error{Code: code, Message: e.Message}
}

// Details say why a response is incomplete: "max_output_tokens" or "content_filter".
type Details struct {
	Reason string `json:"reason"`
}

// Item is a message of the model's, or its reasoning.
type Item struct {
	ID      string `json:"id"`
	Type    string `json:"type"`
	Status  Status `json:"status,omitempty"`
	Role    string `json:"role,omitempty"`
	Content []Part `json:"content"`
	// Summary is a reasoning's, and empty: nobody summarizes.
	Summary *[0]string `json:"summary,omitempty"`
}

// Part is a piece of an item's content. Annotations and Logprobs are of an output_text, and empty.
type Part struct {
	Type        string     `json:"type"`
	Text        string     `json:"text"`
	Annotations *[0]string `json:"annotations,omitempty"`
	Logprobs    *[0]string `json:"logprobs,omitempty"`
}

// Usage counts tokens in the names of this API.
type Usage struct {
	Input        job.Tokens   `json:"input_tokens"`
	InputDetails InputDetails `json:"input_tokens_details"`
	Output       job.Tokens   `json:"output_tokens"`
	Details      OutputDetail `json:"output_tokens_details"`
	Total        job.Tokens   `json:"total_tokens"`
}

// InputDetails tell how much of the input was in the engine's cache.
type InputDetails struct {
	Cached job.Tokens `json:"cached_tokens"`
}

// OutputDetail tells how much of the output was reasoning.
type OutputDetail struct {
	Reasoning job.Tokens `json:"reasoning_tokens"`
}

func usageOf(u *job.Usage) *Usage {
	if u == nil {
		return nil
	}
	return &Usage{Input: u.PromptTokens, InputDetails: InputDetails{u.CachedTokens}, Output: u.CompletionTokens, Details: OutputDetail{u.ReasoningTokens}, Total: u.TotalTokens}
}

// defaults are what stands in an object for fields that the request does not have.
var defaults = map[string]json.RawMessage{
	"parallel_tool_calls": json.RawMessage("true"),
	"service_tier":        json.RawMessage(`"default"`),
	"text":                json.RawMessage(`{"format":{"type":"text"}}`),
	"tool_choice":         json.RawMessage(`"auto"`),
	"tools":               json.RawMessage("[]"),
	"top_logprobs":        json.RawMessage("0"),
	"truncation":          json.RawMessage(`"disabled"`),
	"metadata":            json.RawMessage("{}"),
	"reasoning":           json.RawMessage(`{"effort":null,"summary":null}`),
}

var null = json.RawMessage("null")

// NewObject is the object of a response that has not ended, or that ended without an answer: with the fields of its request, as far as there is one.
func NewObject(f Frame, s Status, request *job.Object) *Object {
	get := func(key string) json.RawMessage {
		if request != nil {
			if raw := request.Get(key); !unset(raw) {
				return bytes.Clone(raw) // the request may be large, and need not live as long
			}
		}
		if raw, ok := defaults[key]; ok {
			return raw
		}
		return null
	}
	return &Object{
		ID: f.ID, Object: "response", CreatedAt: f.CreatedAt, Status: s, Background: f.Background, Store: f.Background,
		Instructions: get("instructions"), MaxOutputTokens: get("max_output_tokens"), MaxToolCalls: get("max_tool_calls"), Model: get("model"), Output: []*Item{},
		ParallelToolCalls: get("parallel_tool_calls"), PreviousResponse: null, PromptCacheKey: get("prompt_cache_key"), Reasoning: get("reasoning"),
		SafetyIdentifier: get("safety_identifier"), ServiceTier: get("service_tier"), Temperature: get("temperature"), Text: get("text"), ToolChoice: get("tool_choice"),
		Tools: get("tools"), TopLogprobs: get("top_logprobs"), TopP: get("top_p"), Truncation: get("truncation"), User: get("user"), Metadata: get("metadata"),
	}
}

// maxEcho bounds an Echo in bytes.
const maxEcho = 16 << 10

// Echo is an object of those fields of a request that its response repeats, but for what would make it too large, and for metadata, which the job has.
func Echo(request *job.Object) json.RawMessage {
	echo, size := map[string]json.RawMessage{}, 0
	for _, key := range []string{
		"background", "instructions", "max_output_tokens", "max_tool_calls", "parallel_tool_calls", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p",
		"truncation", "user",
	} {
		if raw := request.Get(key); !unset(raw) && size+len(raw) <= maxEcho {
			echo[key], size = raw, size+len(raw)
		}
	}
	return Encode(echo)
}

func unset(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// Encode is v as JSON in which nothing is escaped that need not be. v is a type of this package, or a map or slice of such, which always marshals.
func Encode(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(fmt.Sprintf("encoding %T: %v", v, err))
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// Own returns an engine's own response object with what Millrace says of it in place. No other byte changes.
func (f Frame) Own(object []byte) ([]byte, error) {
	for _, field := range []struct {
		key   string
		value []byte
	}{
		{"id", Encode(f.ID)},
		{"created_at", fmt.Append(nil, f.CreatedAt)},
		{"background", fmt.Append(nil, f.Background)},
		{"store", fmt.Append(nil, f.Background)},
		{"metadata", f.Metadata}, // which not every engine gives back
	} {
		if field.value == nil {
			continue
		}
		var err error
		if object, err = job.SetField(object, field.key, field.value); err != nil {
			return nil, fmt.Errorf("editing a response: %w", err)
		}
	}
	return object, nil
}

// Summary is what a response object tells about its end.
type Summary struct {
	Status Status
	Usage  *job.Usage
	// Error is why it failed, nil if it did not.
	Error *job.Error
}

// errNotResponse says that an engine's answer is no response object.
var errNotResponse = errors.New("the answer is no response object")

// Summarize reads an engine's own response object.
func Summarize(object []byte) (Summary, error) {
	var r struct {
		Object string `json:"object"`
		Status Status `json:"status"`
		Usage  *Usage `json:"usage"`
		Error  *Error `json:"error"`
	}
	if err := json.Unmarshal(object, &r); err != nil {
		return Summary{}, fmt.Errorf("%w: %w", errNotResponse, err)
	}
	if r.Object != "response" {
		return Summary{}, errNotResponse
	}
	s := Summary{Status: r.Status}
	if u := r.Usage; u != nil && min(u.Input, u.Output, u.Total, u.InputDetails.Cached, u.Details.Reasoning) >= 0 && *u != (Usage{}) {
		s.Usage = &job.Usage{
			PromptTokens: u.Input, CompletionTokens: u.Output, TotalTokens: u.Total, CachedTokens: u.InputDetails.Cached, ReasoningTokens: u.Details.Reasoning,
		}
	}
	if r.Status == Failed || r.Error != nil {
		s.Status = Failed
		s.Error = job.NewError(job.TypeServer, job.CodeEngineError, "the engine reported an error without a message")
		if r.Error != nil && r.Error.Message != "" {
			s.Error.Message = r.Error.Message
		}
	}
	return s, nil
}
