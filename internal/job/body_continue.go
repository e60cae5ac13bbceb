package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// ErrNotContinuable says that no engine can be asked for the rest of an answer to this body, so that it has to begin anew.
var ErrNotContinuable = errors.New("the answer cannot be continued")

// Partial is the beginning of an answer.
type Partial struct {
	Text string
	// Tokens is how many tokens it is made of.
	Tokens Tokens
	// DefaultLimit is how many tokens the engine generates at most for a completion that sets no limit: 0 is unknown, and such a completion is not continued; -1 is no limit.
	DefaultLimit Tokens
}

// Continue returns body asking for the rest of the answer that begins with p. A chat gets the text as the assistant's last message, to be continued; a completion's prompt gets it
// at its end. Limits of new tokens are reduced by what is there. left is false if that leaves nothing to generate: then edited is nil. Nothing but these fields changes.
// It is ErrNotContinuable, and why, where the rest would not be what an undisturbed answer has: more than one choice, log probabilities, a form that the whole answer must have.
func Continue(body []byte, endpoint Endpoint, p Partial) (edited []byte, left bool, err error) {
	o, err := ParseObject(body)
	if err != nil {
		return nil, false, err
	}
	if err := continuable(o, endpoint, p); err != nil {
		return nil, false, err
	}
	limits, err := limitsOf(o, endpoint)
	if err != nil {
		return nil, false, err
	}
	least, err := count(o, "min_tokens")
	if err != nil {
		return nil, false, err
	}
	switch {
	case len(limits) > 0:
	case endpoint == ChatCompletions || p.DefaultLimit < 0: // bounded by the context alone, which prompt and text share
	case p.DefaultLimit == 0:
		return nil, false, fmt.Errorf("%w: it sets no max_tokens, and what the engine takes then is not known", ErrNotContinuable)
	default:
		limits = []limit{{"max_tokens", p.DefaultLimit}}
	}
	if len(limits) > 0 && limits[0].most <= p.Tokens {
		return nil, false, nil
	}
	if edited, err = appendText(o, endpoint, p.Text); err != nil {
		return nil, false, err
	}
	type field struct {
		key   string
		value []byte
	}
	var fields []field
	if endpoint == ChatCompletions {
		fields = append(fields, field{"continue_final_message", []byte("true")}, field{"add_generation_prompt", []byte("false")})
	}
	for _, l := range limits { // one that does not count may be the smaller one
		fields = append(fields, field{l.key, fmt.Append(nil, max(1, l.most-p.Tokens))})
	}
	if least > 0 {
		fields = append(fields, field{"min_tokens", fmt.Append(nil, max(0, least-p.Tokens))})
	}
	for _, f := range fields {
		if edited, err = SetField(edited, f.key, f.value); err != nil {
			return nil, false, err
		}
	}
	return edited, true, nil
}

// whole are the fields that ask for something which only a whole answer has.
var whole = []string{
	"echo", "suffix", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "prompt_embeds", "truncate_prompt_tokens", "use_beam_search",
	"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag", "regex", "ebnf", "grammar", "json_schema", "format",
	"continue_final_message",
}

// continuable says why no answer to the body can be continued from p's text, nil if one can.
func continuable(o *Object, endpoint Endpoint, p Partial) error {
	no := func(why string) error { return fmt.Errorf("%w: %s", ErrNotContinuable, why) }
	for _, f := range o.Fields {
		switch {
		case isUnset(f.Value), f.Key == "top_logprobs" && string(f.Value) == "0":
		case slices.Contains(whole, f.Key):
			return no("it has " + f.Key)
		case (f.Key == "n" || f.Key == "best_of") && string(f.Value) != "1":
			return no("it asks for several answers")
		}
	}
	switch choice := o.Get("tool_choice"); {
	case isUnset(choice), string(choice) == `"auto"`, string(choice) == `"none"`:
	default:
		return no("it asks for a tool call")
	}
	var form struct {
		Type string `json:"type"`
	}
	if raw := o.Get("response_format"); !isUnset(raw) && (json.Unmarshal(raw, &form) != nil || form.Type != "text") {
		return no("it has response_format")
	}
	switch {
	case p.Text == "":
		return no("there is no text")
	case endpoint == ChatCompletions:
		if string(o.Get("add_generation_prompt")) == "false" {
			return no("it has no generation prompt")
		}
		if raw := o.Get("messages"); len(raw) == 0 || raw[0] != '[' || len(bytes.TrimSpace(raw[1:len(raw)-1])) == 0 {
			return no("it has no messages")
		}
	case endpoint == Completions:
		if raw := o.Get("prompt"); len(raw) == 0 || raw[0] != '"' {
			return no("its prompt is not one text")
		}
	default:
		return no("nothing is generated")
	}
	return nil
}

// isUnset tells whether a value asks for nothing.
func isUnset(raw json.RawMessage) bool {
	switch string(raw) {
	case "", "null", "false":
		return true
	}
	return false
}

// limit is a field that bounds new tokens.
type limit struct {
	key  string
	most Tokens
}

// limitsOf are the body's limits, first the one that counts.
func limitsOf(o *Object, endpoint Endpoint) ([]limit, error) {
	keys := []string{"max_tokens"}
	if endpoint == ChatCompletions {
		keys = []string{"max_completion_tokens", "max_tokens"}
	}
	var limits []limit
	for _, key := range keys {
		n, err := count(o, key)
		if err != nil {
			return nil, err
		}
		if n > 0 {
			limits = append(limits, limit{key, n})
		}
	}
	return limits, nil
}

// count reads a number of tokens, 0 if it is not set. What is no such number is the engine's to judge, and is not continued.
func count(o *Object, key string) (Tokens, error) {
	raw := o.Get(key)
	if isUnset(raw) {
		return 0, nil
	}
	var n int64
	if json.Unmarshal(raw, &n) != nil || n < 0 || n == 0 && key != "min_tokens" {
		return 0, fmt.Errorf("%w: its %s is not a number of tokens", ErrNotContinuable, key)
	}
	return Tokens(n), nil
}

// appendText puts the text behind the last message or the prompt.
func appendText(o *Object, endpoint Endpoint, text string) ([]byte, error) {
	quoted, err := quote(text)
	if err != nil {
		return nil, err
	}
	key, piece := "prompt", quoted[1:len(quoted)-1]
	if endpoint == ChatCompletions {
		key, piece = "messages", slices.Concat([]byte(`,{"role":"assistant","content":`), quoted, []byte("}"))
	}
	at := 0 // of the bracket or quote that ends the value; of a repeated key the last counts
	for _, f := range o.Fields {
		if f.Key == key {
			at = f.end - 1
		}
	}
	return slices.Concat(o.raw[:at], piece, o.raw[at:]), nil
}

// quote is text as JSON, in which nothing is escaped that need not be.
func quote(text string) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(text); err != nil {
		return nil, fmt.Errorf("writing a text: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// SetOneToken returns body asking for one token in one piece: what its answer's usage counts is the prompt.
func SetOneToken(body []byte, endpoint Endpoint) ([]byte, error) {
	body, err := SetPlain(body)
	if err != nil {
		return nil, err
	}
	if body, err = RemoveField(body, "min_tokens"); err != nil {
		return nil, err
	}
	if endpoint == ChatCompletions {
		if body, err = RemoveField(body, "max_completion_tokens"); err != nil {
			return nil, err
		}
	}
	return SetField(body, "max_tokens", []byte("1"))
}
