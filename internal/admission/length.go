package admission

import (
	"encoding/json"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// LeastPrompt is a bound that the longest single prompt in a request does not fall below, in tokens: text counts with job.MaxBytesPerToken, given tokens as
// they are, and all else (images, sound, spaces between JSON, schemas, unknown fields) as nothing. Of several prompts in one request, as embeddings
// have, the longest counts: each is run by itself.
func LeastPrompt(e job.Endpoint, body *job.Object) job.Tokens {
	switch e {
	case job.Embeddings:
		return longest(body.Get("input"), true)
	case job.Completions:
		return longest(body.Get("prompt"), true)
	case job.Responses:
		input := body.Get("input")
		return max(longest(input, false), job.LeastPrompt(textBytes(input))) + longest(body.Get("instructions"), false)
	default:
		return job.LeastPrompt(textBytes(body.Get("messages")))
	}
}

// longest reads a prompt, which is a text, a list of texts, a list of tokens, or (where lists are allowed) a list of lists of tokens. What is nested
// deeper is no prompt, and is not followed.
func longest(raw json.RawMessage, lists bool) job.Tokens {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return job.LeastPrompt(int64(len(text)))
	}
	var items []json.RawMessage
	if json.Unmarshal(raw, &items) != nil {
		return 0 // neither: the engine will say so
	}
	var most, numbers job.Tokens
	for _, item := range items {
		switch c := item[0]; {
		case c == '"', c == '[' && lists:
			most = max(most, longest(item, false))
		case c == '-' || '0' <= c && c <= '9':
			numbers++
		}
	}
	return max(most, numbers)
}

// textBytes is the length of the texts in chat messages: strings under "content" and "text", however deep, that are no data URLs.
func textBytes(raw json.RawMessage) int64 {
	var v any
	if json.Unmarshal(raw, &v) != nil {
		return 0
	}
	var n int64
	var walk func(key string, v any)
	walk = func(key string, v any) {
		switch v := v.(type) {
		case string:
			if (key == "content" || key == "text") && !strings.HasPrefix(v, "data:") {
				n += int64(len(v))
			}
		case []any:
			for _, item := range v {
				walk(key, item)
			}
		case map[string]any:
			for k, item := range v {
				walk(k, item)
			}
		}
	}
	walk("", v)
	return n
}
