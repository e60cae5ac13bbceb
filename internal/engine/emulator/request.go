package emulator

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// apiError is an answer that is no success, in vLLM's words.
type apiError struct {
	status     int
	kind       string
	message    string
	param      string // "" is null
	retryAfter string
}

func badRequest(param, format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "BadRequestError", message: fmt.Sprintf(format, args...), param: param}
}

// invalid is what pydantic, which checks vLLM's bodies, says of one field.
func invalid(field, kind, message string) *apiError {
	e := badRequest(field, "1 validation error:\n  {'type': '%s', 'loc': ('body', '%s'), 'msg': '%s'}", kind, field, message)
	e.kind = "Bad Request"
	return e
}

// maxChoices bounds n and the number of prompts or inputs of one call.
const maxChoices = 128

// request is a checked body.
type request struct {
	endpoint job.Endpoint
	model    string
	stream   bool
	// usage is asked for at the end of a stream, continuous with each chunk.
	usage, continuous bool
	n                 int
	// maxTokens is -1 if the body sets no limit.
	maxTokens, minTokens int
	ignoreEOS            bool
	stop                 []string
	keepStop             bool
	// logprobs is the number of alternatives asked for, -1 for no logprobs.
	logprobs int
	echo     bool
	priority int
	// continues: the body has continue_final_message, whatever its value.
	continues bool
	// base64 and dimensions are an embedding's.
	base64     bool
	dimensions int

	prompts []prompt
	// seed is that of the whole body but for what is not the model's business.
	seed uint64
	// call is the tool that the answer has to call; nil for text.
	call *toolCall
	// fixed is an answer that is not free text: a call's arguments, or JSON.
	fixed []byte
}

// prompt is one text to answer.
type prompt struct {
	// text is what is counted and cached: prompt tokens of 4 bytes.
	text []byte
	// said is the part of the answer that the prompt ends with.
	said []byte
	seed uint64
	salt hash
}

// notTheModels are the fields that do not change what the model would say: how it is delivered, where it is cut, and who asks.
var notTheModels = []string{
	"add_generation_prompt", "background", "best_of", "cache_salt", "continue_final_message", "dimensions", "echo", "encoding_format", "ignore_eos",
	"include_stop_str_in_output", "logprobs", "max_completion_tokens", "max_output_tokens", "max_tokens", "metadata", "min_tokens", "n", "priority", "request_id",
	"return_token_ids", "session_id", "stop", "stop_token_ids", "store", "stream", "stream_options", "top_logprobs", "user",
}

// reader takes fields out of a body and keeps the first error.
type reader struct {
	object *job.Object
	err    *apiError
}

// read decodes a field, if it is there and not null.
func read[T any](r *reader, key string, into *T) {
	raw := r.object.Get(key)
	if r.err != nil || raw == nil || string(raw) == "null" {
		return
	}
	if json.Unmarshal(raw, into) == nil {
		return
	}
	switch any(into).(type) {
	case *string:
		r.err = invalid(key, "string_type", "Input should be a valid string")
	case *bool:
		r.err = invalid(key, "bool_parsing", "Input should be a valid boolean")
	case *int:
		r.err = invalid(key, "int_parsing", "Input should be a valid integer")
	case *float64:
		r.err = invalid(key, "float_parsing", "Input should be a valid number")
	case *[]json.RawMessage:
		r.err = invalid(key, "list_type", "Input should be a valid list")
	default:
		r.err = invalid(key, "dict_type", "Input should be a valid dictionary")
	}
}

func (r *reader) fail(e *apiError) {
	if r.err == nil {
		r.err = e
	}
}

// parse checks a body. salt is the engine's own part of all seeds.
func parse(endpoint job.Endpoint, raw []byte, salt hash) (*request, *apiError) {
	object, err := job.ParseObject(raw)
	switch {
	case errors.Is(err, job.ErrNotObject):
		e := badRequest("", "1 validation error:\n  {'type': 'dict_type', 'loc': ('body',), 'msg': 'Input should be a valid dictionary'}")
		e.kind = "Bad Request"
		return nil, e
	case err != nil:
		e := badRequest("", "1 validation error:\n  {'type': 'json_invalid', 'loc': ('body', 0), 'msg': 'JSON decode error', 'ctx': {'error': '%s'}}", err)
		e.kind = "Bad Request"
		return nil, e
	}
	r := &reader{object: object}
	q := &request{endpoint: endpoint, n: 1, maxTokens: -1, logprobs: -1}
	read(r, "model", &q.model)
	salt = salt.string(q.model).end()
	read(r, "priority", &q.priority)
	var cacheSalt string
	read(r, "cache_salt", &cacheSalt)
	kv := salt.string(cacheSalt).end()
	seed := salt
	for _, key := range modelFields(object) {
		seed = seed.string(key).end().bytes(compact(object.Get(key))).end()
	}
	switch endpoint {
	case job.ChatCompletions:
		q.readGeneration(r)
		q.readChat(r, seed, kv)
	case job.Completions:
		q.readGeneration(r)
		q.readCompletion(r, seed, kv)
	case job.Embeddings:
		q.readEmbedding(r, seed, kv)
	case job.Responses:
		q.readGeneration(r)
		q.readResponse(r, seed, kv)
	}
	if r.err != nil {
		return nil, r.err
	}
	q.seed = q.prompts[0].seed
	return q, nil
}

// modelFields are the names of the fields that seed the text, but for the prompt itself, in order.
func modelFields(o *job.Object) []string {
	var keys []string
	for _, f := range o.Fields {
		switch f.Key {
		case "model", "messages", "prompt", "input":
		default:
			if !slices.Contains(notTheModels, f.Key) {
				keys = append(keys, f.Key)
			}
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// compact is raw without the space between its parts.
func compact(raw []byte) []byte {
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return raw // unreachable: the whole body has been found valid
	}
	return b.Bytes()
}

func (q *request) readGeneration(r *reader) {
	read(r, "stream", &q.stream)
	var options *struct {
		IncludeUsage    *bool `json:"include_usage"`
		ContinuousUsage *bool `json:"continuous_usage_stats"`
	}
	read(r, "stream_options", &options)
	if options != nil {
		if !q.stream {
			r.fail(badRequest("stream_options", "Stream options can only be defined when `stream=True`."))
		}
		q.usage = options.IncludeUsage == nil || *options.IncludeUsage // vLLM's default, once there are options
		q.continuous = q.usage && options.ContinuousUsage != nil && *options.ContinuousUsage
	}
	read(r, "n", &q.n)
	if q.n < 1 || q.n > maxChoices {
		r.fail(badRequest("n", "n must be at least 1 and at most %d, got %d.", maxChoices, q.n))
	}
	read(r, "max_tokens", &q.maxTokens)
	also := "max_tokens"
	switch q.endpoint {
	case job.ChatCompletions:
		also = "max_completion_tokens"
	case job.Responses:
		also = "max_output_tokens"
	}
	read(r, also, &q.maxTokens)
	read(r, "echo", &q.echo)
	if given := r.given("max_tokens") || r.given(also); given && q.maxTokens < 1 {
		r.fail(badRequest("max_tokens", "max_tokens must be at least 1, got %d.", q.maxTokens))
	}
	read(r, "min_tokens", &q.minTokens)
	if q.minTokens < 0 {
		r.fail(badRequest("min_tokens", "min_tokens must be greater than or equal to 0, got %d.", q.minTokens))
	}
	if q.maxTokens >= 0 && q.minTokens > q.maxTokens {
		r.fail(badRequest("min_tokens", "min_tokens must be less than or equal to max_tokens=%d, got %d.", q.maxTokens, q.minTokens))
	}
	read(r, "ignore_eos", &q.ignoreEOS)
	read(r, "include_stop_str_in_output", &q.keepStop)
	q.readStop(r)
	var temperature, topP float64
	topP = 1
	read(r, "temperature", &temperature)
	if temperature < 0 {
		r.fail(badRequest("temperature", "temperature must be non-negative, got %v.", temperature))
	}
	read(r, "top_p", &topP)
	if topP <= 0 || topP > 1 {
		r.fail(badRequest("top_p", "top_p must be in (0, 1], got %v.", topP))
	}
}

func (r *reader) given(key string) bool {
	raw := r.object.Get(key)
	return raw != nil && string(raw) != "null"
}

func (q *request) readStop(r *reader) {
	if !r.given("stop") {
		return
	}
	raw := r.object.Get("stop")
	var one string
	if json.Unmarshal(raw, &one) == nil {
		q.stop = []string{one}
	} else if json.Unmarshal(raw, &q.stop) != nil {
		r.fail(invalid("stop", "list_type", "Input should be a valid list"))
	}
	if slices.Contains(q.stop, "") {
		r.fail(badRequest("stop", "stop cannot contain an empty string."))
	}
}

// message is one of a chat's.
type message struct {
	Role      string            `json:"role"`
	Content   json.RawMessage   `json:"content"`
	ToolCalls []json.RawMessage `json:"tool_calls"`
}

// imageTokens is what an image, audio or video part counts.
const imageTokens = 576

// appendText renders the message's content. A part that is not text becomes as many bytes as its tokens have, made from its hash.
func (m *message) appendText(dst []byte) ([]byte, error) {
	if len(m.Content) == 0 || string(m.Content) == "null" {
		return dst, nil
	}
	var s string
	if json.Unmarshal(m.Content, &s) == nil {
		return append(dst, s...), nil
	}
	var parts []json.RawMessage
	if json.Unmarshal(m.Content, &parts) != nil {
		return nil, errors.New("content must be a string or a list of parts")
	}
	for _, raw := range parts {
		var part struct {
			Type string  `json:"type"`
			Text *string `json:"text"`
		}
		if json.Unmarshal(raw, &part) != nil {
			return nil, errors.New("a content part must be an object")
		}
		if part.Text != nil {
			dst = append(dst, *part.Text...)
			continue
		}
		h := hashStart.bytes(raw).seed()
		for range imageTokens * tokenBytes / 8 {
			dst = binary.LittleEndian.AppendUint64(dst, h)
		}
	}
	return dst, nil
}

func (q *request) readChat(r *reader, seed, kv hash) {
	var logprobs bool
	var top int
	read(r, "logprobs", &logprobs)
	read(r, "top_logprobs", &top)
	if top < 0 || top > 20 {
		r.fail(badRequest("top_logprobs", "top_logprobs must be from 0 to 20, got %d.", top))
	}
	if top > 0 && !logprobs {
		r.fail(badRequest("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true."))
	}
	if logprobs {
		q.logprobs = top
	}
	var messages, tools []json.RawMessage
	if !r.given("messages") {
		r.fail(invalid("messages", "missing", "Field required"))
	}
	read(r, "messages", &messages)
	read(r, "tools", &tools)
	if r.err == nil && len(messages) == 0 {
		r.fail(badRequest("messages", "messages must not be empty"))
	}
	var proceed, generation bool
	read(r, "continue_final_message", &proceed)
	q.continues = r.given("continue_final_message")
	read(r, "add_generation_prompt", &generation)
	if proceed && generation {
		r.fail(badRequest("", "Cannot set both `continue_final_message` and `add_generation_prompt` to True."))
	}
	if r.err != nil {
		return
	}
	q.readMessages(r, messages, tools, proceed, seed, kv)
	q.readForm(r, tools)
}

// readMessages makes the prompt of a chat. proceed: its last message, if it is the assistant's, is to be continued.
func (q *request) readMessages(r *reader, messages, tools []json.RawMessage, proceed bool, seed, kv hash) {
	var p prompt
	p.salt = kv
	for _, t := range tools {
		p.text = append(append(p.text, compact(t)...), '\n')
	}
	for i, raw := range messages {
		var m message
		if json.Unmarshal(raw, &m) != nil || m.Role == "" {
			r.fail(invalid("messages", "missing", fmt.Sprintf("message %d needs a role and valid content", i)))
			return
		}
		p.text = append(append(append(p.text, "<|"...), m.Role...), "|>\n"...)
		start := len(p.text)
		text, err := m.appendText(p.text)
		if err != nil {
			r.fail(invalid("messages", "string_type", fmt.Sprintf("message %d: %s", i, err)))
			return
		}
		p.text = text
		if proceed && i == len(messages)-1 && m.Role == "assistant" {
			p.said = p.text[start:]
			break
		}
		for _, c := range m.ToolCalls {
			p.text = append(p.text, compact(c)...)
		}
		p.text = append(p.text, '\n')
		seed = seed.bytes(compact(raw)).end()
	}
	if p.said == nil {
		p.text = append(p.text, "<|assistant|>\n"...)
	}
	p.seed = seed.seed()
	q.prompts = []prompt{p}
}

func (q *request) readCompletion(r *reader, seed, kv hash) {
	read(r, "logprobs", &q.logprobs)
	if r.given("logprobs") && (q.logprobs < 0 || q.logprobs > 20) {
		r.fail(badRequest("logprobs", "`logprobs` must be from 0 to 20, got %d.", q.logprobs))
	}
	if q.maxTokens < 0 {
		q.maxTokens = max(16, q.minTokens) // the API's default
	}
	for _, text := range r.texts("prompt") {
		// Where the prompt ends in a partial answer, that answer is continued.
		at, s := splitCompletion(seed, text)
		q.prompts = append(q.prompts, prompt{text: text, said: text[at:], seed: s, salt: kv})
	}
	if r.err == nil && len(q.prompts)*q.n > maxChoices {
		r.fail(badRequest("prompt", "at most %d answers in one call", maxChoices))
	}
}

// maxDimensions bounds an embedding; defaultDimensions is its length if none is asked for.
const maxDimensions, defaultDimensions = 4096, 64

func (q *request) readEmbedding(r *reader, seed, kv hash) {
	q.dimensions = defaultDimensions
	read(r, "dimensions", &q.dimensions)
	if q.dimensions < 1 || q.dimensions > maxDimensions {
		r.fail(badRequest("dimensions", "dimensions must be from 1 to %d, got %d.", maxDimensions, q.dimensions))
	}
	format := "float"
	read(r, "encoding_format", &format)
	if format != "float" && format != "base64" {
		r.fail(invalid("encoding_format", "literal_error", "Input should be \\'float\\' or \\'base64\\'"))
	}
	q.base64 = format == "base64"
	for _, text := range r.texts("input") {
		q.prompts = append(q.prompts, prompt{text: text, seed: seed.bytes(text).end().seed(), salt: kv})
	}
	if len(q.prompts) > 2048 {
		r.fail(badRequest("input", "at most 2048 inputs in one call, got %d", len(q.prompts)))
	}
}

// texts reads a prompt or input: a text, a list of texts, the ids of a text's tokens, or a list of those. Ids become tokens of 4 bytes.
func (r *reader) texts(key string) [][]byte {
	if !r.given(key) {
		r.fail(invalid(key, "missing", "Field required"))
		return nil
	}
	raw := r.object.Get(key)
	var out [][]byte
	var one string
	var list []json.RawMessage
	if json.Unmarshal(raw, &one) == nil {
		out = [][]byte{[]byte(one)}
	} else if json.Unmarshal(raw, &list) == nil {
		if ids, ok := tokenIDs(raw); ok && len(list) > 0 {
			out = [][]byte{ids}
		} else {
			for _, element := range list {
				if json.Unmarshal(element, &one) == nil {
					out = append(out, []byte(one))
				} else if ids, ok := tokenIDs(element); ok {
					out = append(out, ids)
				} else {
					out = nil
					break
				}
			}
		}
	}
	for _, text := range out {
		if len(text) == 0 {
			r.fail(badRequest(key, "%s cannot be empty", key))
		}
	}
	if len(out) == 0 {
		r.fail(invalid(key, "string_type", "Input should be a valid string, a list of strings, or token ids"))
	}
	return out
}

func tokenIDs(raw []byte) ([]byte, bool) {
	var ids []uint32
	if json.Unmarshal(raw, &ids) != nil {
		return nil, false
	}
	out := make([]byte, 0, len(ids)*tokenBytes)
	for _, id := range ids {
		out = binary.LittleEndian.AppendUint32(out, id)
	}
	return out, true
}

// fit checks that the prompts leave room in a context of that many tokens, and returns how many tokens each may generate.
func (q *request) fit(context int) ([]int, *apiError) {
	most := make([]int, len(q.prompts))
	for i := range q.prompts {
		n := countTokens(q.prompts[i].text)
		if q.endpoint == job.Embeddings {
			if n > context {
				return nil, badRequest("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d tokens in the input for embedding generation. Please reduce the length of the input.", context, n)
			}
			continue
		}
		asked := max(q.maxTokens, 0)
		if n >= context || asked > context-n {
			return nil, badRequest("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains at least %d input tokens, for a total of at least %d tokens. Please reduce the length of the input prompt or the number of requested output tokens.", context, asked, n, uint64(n)+uint64(asked))
		}
		most[i] = context - n
		if q.maxTokens >= 0 {
			most[i] = q.maxTokens
		}
	}
	return most, nil
}

func (e *apiError) body() []byte {
	b := append([]byte(nil), `{"error":{"message":`...)
	b = appendString(b, []byte(e.message))
	b = appendString(append(b, `,"type":`...), []byte(e.kind))
	b = append(b, `,"param":`...)
	if e.param == "" {
		b = append(b, "null"...)
	} else {
		b = appendString(b, []byte(e.param))
	}
	return fmt.Appendf(b, `,"code":%d}}`, e.status)
}

// failure is the error that vLLM gives with that status when it is not the request's fault.
func failure(status int, message string) *apiError {
	kind := map[int]string{
		http.StatusBadRequest: "BadRequestError", http.StatusNotFound: "NotFoundError", http.StatusInternalServerError: "InternalServerError",
		http.StatusServiceUnavailable: "ServiceUnavailableError", http.StatusTooManyRequests: "TooManyRequestsError",
	}[status]
	if kind == "" {
		kind = strings.ReplaceAll(http.StatusText(status), " ", "") + "Error"
	}
	return &apiError{status: status, kind: kind, message: message}
}
