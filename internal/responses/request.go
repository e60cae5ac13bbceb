package responses

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// refuse is the error of a request that cannot be carried out.
func refuse(param string, code job.Code, format string, args ...any) *job.Error {
	e := job.NewError(job.TypeInvalidRequest, code, fmt.Sprintf(format, args...))
	if param != "" {
		e.Param = &param
	}
	return e
}

func unsupported(param, format string, args ...any) *job.Error {
	return refuse(param, job.CodeUnsupportedParameter, format, args...)
}

// Check is what is wrong with a request whichever engine gets it, nil if nothing is: what Millrace itself would have to keep between two requests, and what it reads itself.
func Check(o *job.Object) *job.Error {
	for _, key := range []string{"previous_response_id", "conversation", "prompt"} {
		if !unset(o.Get(key)) {
			return unsupported(key, "%s is not supported: send the whole conversation as input.", key)
		}
	}
	for _, key := range []string{"background", "store", "stream"} {
		if raw := o.Get(key); !unset(raw) && string(raw) != "true" && string(raw) != "false" {
			return refuse(key, job.CodeInvalidType, "%s must be true or false.", key)
		}
	}
	if Flag(o, "background") && string(o.Get("store")) == "false" {
		return refuse("store", job.CodeInvalidValue, "A background response is kept: leave store out, or set it to true.")
	}
	switch raw := o.Get("input"); {
	case unset(raw):
		return refuse("input", job.CodeMissingParameter, "The request must have input.")
	case raw[0] != '"' && raw[0] != '[':
		return refuse("input", job.CodeInvalidType, "input must be a string or an array.")
	}
	return nil
}

// Request is a request that can be had from a chat.
type Request struct {
	object   *job.Object
	messages []message
	format   json.RawMessage // of the answer, as a chat has it
	effort   json.RawMessage
}

// message is one of a chat. Content is a string's JSON, or a list of parts.
type message struct {
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

// textPart is a part of a message's content.
type textPart struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// How a field is dealt with in a translation.
type treatment int

const (
	refused treatment = iota // unless it is null
	echoed                   // it stands in the object, or is Millrace's own, and does not concern the engine
	passed                   // the chat has the same field
	read                     // by code of its own
)

// fields are all that a translated request may have. Those behind the blank line are none of this API, but engines know them in chats.
var fields = map[string]treatment{
	"background": echoed, "metadata": echoed, "prompt_cache_key": echoed, "safety_identifier": echoed, "store": echoed, "stream": echoed, "stream_options": echoed,
	"model": read, "input": read, "instructions": read, "max_output_tokens": read, "reasoning": read, "text": read,
	"include": read, "parallel_tool_calls": read, "service_tier": read, "tool_choice": read, "tools": read, "top_logprobs": read, "truncation": read,
	"temperature": passed, "top_p": passed, "user": passed,

	"cache_salt": passed, "chat_template_kwargs": passed, "frequency_penalty": passed, "ignore_eos": passed, "min_p": passed, "min_tokens": passed, "presence_penalty": passed, "priority": passed,
	"repetition_penalty": passed, "seed": passed, "stop": passed, "top_k": passed,
}

// harmless are the values of fields which ask for no more than a chat gives anyway.
var harmless = map[string][]string{
	"include":             {"[]"},
	"parallel_tool_calls": {"true", "false"}, // of no tools
	"service_tier":        {`"auto"`, `"default"`},
	"tool_choice":         {`"auto"`, `"none"`},
	"tools":               {"[]"},
	"top_logprobs":        {"0"},
	"truncation":          {`"disabled"`},
}

// Parse reads a request that an engine gets as a chat. The error names the field that no chat has, or that is wrong.
func Parse(body []byte) (*Request, *job.Error) {
	o, err := job.ParseObject(body)
	switch {
	case errors.Is(err, job.ErrNotObject):
		return nil, refuse("", job.CodeInvalidType, "The request must be a JSON object.")
	case err != nil:
		return nil, refuse("", job.CodeInvalidJSON, "The request cannot be read: %v.", err)
	}
	return ParseObject(o)
}

// ParseObject is Parse of what was read already.
func ParseObject(o *job.Object) (*Request, *job.Error) {
	if e := Check(o); e != nil {
		return nil, e
	}
	for _, f := range o.Fields {
		how := fields[f.Key]
		switch known := harmless[f.Key]; {
		case unset(f.Value):
		case how == refused, known != nil && !slices.Contains(known, compact(f.Value)):
			return nil, unsupported(clip(f.Key), "%s is not supported by the engines of this model: leave it out.", clip(f.Key))
		}
	}
	r := &Request{object: o}
	for _, step := range []func() *job.Error{r.checkNumbers, r.readInstructions, r.readInput, r.readText, r.readReasoning} {
		if e := step(); e != nil {
			return nil, e
		}
	}
	return r, nil
}

// compact is raw without the space between its parts. What is large is none of the values that it is compared with.
func compact(raw []byte) string {
	const most = 64
	if len(raw) > most {
		return ""
	}
	var b bytes.Buffer
	if json.Compact(&b, raw) != nil {
		return string(raw)
	}
	return b.String()
}

// clip bounds a client's text in a message.
func clip(text string) string {
	const most = 100
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

func (r *Request) checkNumbers() *job.Error {
	if raw := r.object.Get("max_output_tokens"); !unset(raw) {
		var n int64
		if json.Unmarshal(raw, &n) != nil {
			return refuse("max_output_tokens", job.CodeInvalidType, "max_output_tokens must be a whole number.")
		}
		if n < 1 {
			return refuse("max_output_tokens", job.CodeInvalidValue, "max_output_tokens must be at least 1.")
		}
	}
	for _, key := range []string{"temperature", "top_p"} {
		var f float64
		if raw := r.object.Get(key); !unset(raw) && json.Unmarshal(raw, &f) != nil {
			return refuse(key, job.CodeInvalidType, "%s must be a number.", key)
		}
	}
	return nil
}

// readInstructions makes the first message.
func (r *Request) readInstructions() *job.Error {
	raw := r.object.Get("instructions")
	var text string
	switch {
	case unset(raw):
		return nil
	case json.Unmarshal(raw, &text) != nil:
		return refuse("instructions", job.CodeInvalidType, "instructions must be a string.")
	}
	r.messages = append(r.messages, message{"system", raw})
	return nil
}

// item is one element of an input.
type item struct {
	Type    string          `json:"type"`
	Role    string          `json:"role"`
	Content json.RawMessage `json:"content"`
}

func (r *Request) readInput() *job.Error {
	raw := r.object.Get("input")
	if raw[0] == '"' {
		r.messages = append(r.messages, message{"user", raw})
		return nil
	}
	var items []json.RawMessage
	if json.Unmarshal(raw, &items) != nil {
		return refuse("input", job.CodeInvalidType, "input must be a string or an array.")
	}
	if len(items) == 0 {
		return refuse("input", job.CodeInvalidValue, "input must not be empty.")
	}
	for i, raw := range items {
		at := fmt.Sprintf("input[%d]", i)
		var it item
		if raw[0] != '{' || json.Unmarshal(raw, &it) != nil {
			return refuse(at, job.CodeInvalidType, "%s must be a message: an object with a role and a content.", at)
		}
		switch it.Type {
		case "", "message":
		case "reasoning": // of an earlier answer, which chat templates leave out themselves
			continue
		default:
			return unsupported(at+".type", "An input of the type %q is not supported by the engines of this model: only messages are.", clip(it.Type))
		}
		if e := r.readMessage(at, &it); e != nil {
			return e
		}
	}
	if len(r.messages) == 0 {
		return refuse("input", job.CodeInvalidValue, "input must have a message.")
	}
	return nil
}

func (r *Request) readMessage(at string, it *item) *job.Error {
	role := it.Role
	switch role {
	case "user", "assistant", "system":
	case "developer": // which few chat templates know
		role = "system"
	case "":
		return refuse(at+".role", job.CodeMissingParameter, "%s must have a role.", at)
	default:
		return refuse(at+".role", job.CodeInvalidValue, "%s.role is %q: it must be user, assistant, system or developer.", at, clip(it.Role))
	}
	content, e := readContent(at+".content", it.Content)
	if e != nil {
		return e
	}
	if n := len(r.messages); role == "system" && n == 1 && r.messages[0].Role == "system" { // many templates take one such message alone, and it must be the first
		if joined, ok := join(r.messages[0].Content, content); ok {
			r.messages[0].Content = joined
			return nil
		}
	}
	r.messages = append(r.messages, message{role, content})
	return nil
}

// join makes one of two contents, if both are strings.
func join(a, b json.RawMessage) (json.RawMessage, bool) {
	var first, second string
	if json.Unmarshal(a, &first) != nil || json.Unmarshal(b, &second) != nil {
		return nil, false
	}
	return Encode(first + "\n\n" + second), true
}

// readContent is a message's content: a string where it is one text, for some templates know nothing else.
func readContent(at string, raw json.RawMessage) (json.RawMessage, *job.Error) {
	switch {
	case unset(raw):
		return nil, refuse(at, job.CodeMissingParameter, "The message must have %s.", at)
	case raw[0] == '"':
		return raw, nil
	case raw[0] != '[':
		return nil, refuse(at, job.CodeInvalidType, "%s must be a string or an array.", at)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil || len(list) == 0 {
		return nil, refuse(at, job.CodeInvalidValue, "%s must not be empty.", at)
	}
	parts := make([]textPart, 0, len(list))
	for i, raw := range list {
		here := fmt.Sprintf("%s[%d]", at, i)
		var p struct {
			Type string  `json:"type"`
			Text *string `json:"text"`
		}
		if raw[0] != '{' || json.Unmarshal(raw, &p) != nil {
			return nil, refuse(here, job.CodeInvalidType, "%s must be an object with a type and a text.", here)
		}
		switch p.Type {
		case "input_text", "output_text", "text":
		default:
			return nil, unsupported(here+".type", "Content of the type %q is not supported by the engines of this model: only text is.", clip(p.Type))
		}
		if p.Text == nil {
			return nil, refuse(here+".text", job.CodeMissingParameter, "%s must have a text.", here)
		}
		parts = append(parts, textPart{"text", *p.Text})
	}
	if len(parts) == 1 {
		return Encode(parts[0].Text), nil
	}
	return Encode(parts), nil
}

// readText reads which form the answer must have.
func (r *Request) readText() *job.Error {
	raw := r.object.Get("text")
	if unset(raw) {
		return nil
	}
	o, err := job.ParseObject(raw)
	if err != nil {
		return refuse("text", job.CodeInvalidType, "text must be an object.")
	}
	for _, f := range o.Fields {
		switch {
		case f.Key == "format", unset(f.Value), f.Key == "verbosity" && string(f.Value) == `"medium"`:
		default:
			param := "text." + clip(f.Key)
			return unsupported(param, "%s is not supported by the engines of this model: leave it out.", param)
		}
	}
	raw = o.Get("format")
	if unset(raw) {
		return nil
	}
	format, err := job.ParseObject(raw)
	if err != nil {
		return refuse("text.format", job.CodeInvalidType, "text.format must be an object.")
	}
	var kind string
	if json.Unmarshal(format.Get("type"), &kind) != nil {
		return refuse("text.format.type", job.CodeInvalidType, "text.format.type must be text, json_object or json_schema.")
	}
	switch kind {
	case "text":
	case "json_object":
		r.format = json.RawMessage(`{"type":"json_object"}`)
	case "json_schema": // a chat has what stands beside the type in an object of its own
		if unset(format.Get("schema")) {
			return refuse("text.format.schema", job.CodeMissingParameter, "text.format must have a schema.")
		}
		schema, err := job.RemoveField(raw, "type")
		if err != nil {
			return refuse("text.format", job.CodeInvalidType, "text.format cannot be read.")
		}
		r.format = slices.Concat([]byte(`{"type":"json_schema","json_schema":`), schema, []byte("}"))
	default:
		return unsupported("text.format.type", "text.format.type is %q: it must be text, json_object or json_schema.", clip(kind))
	}
	return nil
}

// readReasoning reads how hard the model shall think.
func (r *Request) readReasoning() *job.Error {
	raw := r.object.Get("reasoning")
	if unset(raw) {
		return nil
	}
	o, err := job.ParseObject(raw)
	if err != nil {
		return refuse("reasoning", job.CodeInvalidType, "reasoning must be an object.")
	}
	for _, f := range o.Fields {
		switch {
		case unset(f.Value):
		case f.Key == "effort":
			if f.Value[0] != '"' {
				return refuse("reasoning.effort", job.CodeInvalidType, "reasoning.effort must be a string.")
			}
			r.effort = f.Value
		default:
			param := "reasoning." + clip(f.Key)
			return unsupported(param, "%s is not supported by the engines of this model: leave it out.", param)
		}
	}
	return nil
}

// Chat is the body of the chat that the request becomes. How it is delivered it does not say.
func (r *Request) Chat() []byte {
	b := append([]byte(`{"model":`), r.object.Get("model")...)
	b = append(append(b, `,"messages":`...), Encode(r.messages)...)
	add := func(key string, raw json.RawMessage) {
		if !unset(raw) {
			b = append(append(append(append(b, `,"`...), key...), `":`...), raw...)
		}
	}
	add("max_tokens", r.object.Get("max_output_tokens")) // which every engine knows, unlike max_completion_tokens
	add("response_format", r.format)
	add("reasoning_effort", r.effort)
	done := map[string]bool{}
	for _, f := range r.object.Fields {
		if fields[f.Key] == passed && !done[f.Key] {
			done[f.Key] = true
			add(f.Key, r.object.Get(f.Key))
		}
	}
	return append(b, '}')
}

// Native is a request as an engine gets it that serves /v1/responses itself: without what Millrace owns.
func Native(body []byte, stream bool) ([]byte, error) {
	for _, key := range []string{"background", "stream_options"} {
		var err error
		if body, err = job.RemoveField(body, key); err != nil {
			return nil, fmt.Errorf("editing a request: %w", err)
		}
	}
	for _, f := range []struct {
		key   string
		value bool
	}{{"store", false}, {"stream", stream}} {
		var err error
		if body, err = job.SetField(body, f.key, fmt.Append(nil, f.value)); err != nil {
			return nil, fmt.Errorf("editing a request: %w", err)
		}
	}
	return body, nil
}
