package emulator

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/millrace/millrace/internal/job"
)

// toolCall is the call that an answer consists of.
type toolCall struct {
	id, name string
	// finish is the reason given at the end of a whole call.
	finish string
}

// readForm reads what form the answer has to have: a tool's call, JSON, or text. Where the model may choose, it chooses text.
func (q *request) readForm(r *reader, tools []json.RawMessage) {
	var format *struct {
		Type   string `json:"type"`
		Schema struct {
			Schema json.RawMessage `json:"schema"`
		} `json:"json_schema"`
	}
	read(r, "response_format", &format)
	if r.err == nil && format != nil {
		switch format.Type {
		case "json_object":
			q.fixed = appendSample(nil, []byte(`{"properties":{"answer":{"type":"string"}}}`), q.prompts[0].seed, 0)
		case "json_schema":
			q.fixed = appendSample(nil, format.Schema.Schema, q.prompts[0].seed, 0)
		}
	}
	if !r.given("tool_choice") {
		return
	}
	wanted, finish := "", "tool_calls"
	raw := r.object.Get("tool_choice")
	var mode string
	if json.Unmarshal(raw, &mode) == nil {
		switch mode {
		case "required":
		case "none", "auto":
			return
		default:
			r.fail(invalid("tool_choice", "literal_error", "Input should be none, auto, required or a function"))
		}
	} else {
		var named struct {
			Function struct {
				Name string `json:"name"`
			} `json:"function"`
		}
		if json.Unmarshal(raw, &named) != nil || named.Function.Name == "" {
			r.fail(invalid("tool_choice", "literal_error", "Input should be none, auto, required or a function"))
		}
		wanted, finish = named.Function.Name, "stop" // vLLM ends a named call so
	}
	if r.err != nil {
		return
	}
	if len(tools) == 0 {
		r.fail(badRequest("tool_choice", "When using `tool_choice`, `tools` must be set."))
		return
	}
	for _, t := range tools {
		var tool struct {
			Function struct {
				Name       string          `json:"name"`
				Parameters json.RawMessage `json:"parameters"`
			} `json:"function"`
		}
		if json.Unmarshal(t, &tool) != nil || tool.Function.Name == "" {
			r.fail(invalid("tools", "missing", "a tool needs a function with a name"))
			return
		}
		if wanted != "" && tool.Function.Name != wanted {
			continue
		}
		seed := q.prompts[0].seed
		q.call = &toolCall{id: fmt.Sprintf("chatcmpl-tool-%016x%016x", mix(seed+3), mix(seed+4)), name: tool.Function.Name, finish: finish}
		q.fixed = appendSample(nil, tool.Function.Parameters, seed, 0)
		return
	}
	r.fail(badRequest("tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`"))
}

// appendSample writes a value that fits a JSON schema, for the common keywords. Without a schema it is an empty object.
func appendSample(dst, schema []byte, seed uint64, depth int) []byte {
	var s struct {
		Type       json.RawMessage   `json:"type"`
		Enum       []json.RawMessage `json:"enum"`
		Const      json.RawMessage   `json:"const"`
		Properties json.RawMessage   `json:"properties"`
		Items      json.RawMessage   `json:"items"`
		Minimum    *int64            `json:"minimum"`
	}
	if len(schema) == 0 || json.Unmarshal(schema, &s) != nil || depth > 8 {
		return append(dst, "{}"...)
	}
	var kind string
	if json.Unmarshal(s.Type, &kind) != nil {
		var kinds []string
		if json.Unmarshal(s.Type, &kinds) == nil && len(kinds) > 0 {
			kind = kinds[0]
		}
	}
	n := int64(mix(seed) % 100)
	switch {
	case s.Const != nil:
		return append(dst, compact(s.Const)...)
	case len(s.Enum) > 0:
		return append(dst, compact(s.Enum[n%int64(len(s.Enum))])...)
	case kind == "string":
		a := utter(voice{seed: seed}, nil, limits{natural: 4, most: 4})
		return appendString(dst, a.text)
	case kind == "integer", kind == "number":
		if s.Minimum != nil {
			n += *s.Minimum
		}
		return strconv.AppendInt(dst, n, 10)
	case kind == "boolean":
		return strconv.AppendBool(dst, n%2 == 0)
	case kind == "null":
		return append(dst, "null"...)
	case kind == "array":
		dst = append(dst, '[')
		if s.Items != nil {
			dst = appendSample(dst, s.Items, mix(seed), depth+1)
		}
		return append(dst, ']')
	}
	dst = append(dst, '{')
	if o, err := job.ParseObject(s.Properties); err == nil {
		for i, f := range o.Fields {
			if i > 0 {
				dst = append(dst, ", "...)
			}
			dst = append(appendString(dst, []byte(f.Key)), ": "...)
			dst = appendSample(dst, f.Value, mix(seed+uint64(i)), depth+1)
		}
	}
	return append(dst, '}')
}
