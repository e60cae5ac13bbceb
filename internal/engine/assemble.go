package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/millrace/millrace/internal/job"
)

// maxChoices bounds the index of a choice: n times the prompts of a request.
const maxChoices = 1 << 16

// Assembler builds from a stream's chunks the answer that the engine would have given without streaming. It is for one goroutine.
type Assembler struct {
	// MaxAnswer bounds the assembled answer in bytes. 0 means 32 MiB.
	MaxAnswer int64

	endpoint  job.Endpoint
	hideUsage bool
	grow      growth
	chunks    int
	top       []topField // all but choices, in the order of their coming
	choices   []*choice  // by index
}

// topField is a member of the answer itself: the last that is not null counts.
type topField struct {
	key string
	raw []byte
}

// choice is one of the answer's choices. Its members stand in the order of their coming, and the deltas' sum is the member "message".
type choice struct {
	index int
	node
}

// NewAssembler returns an assembler for the endpoint. hideUsage: the usage chunk was asked by us alone; it is counted and not shown (Add tells).
func NewAssembler(ep job.Endpoint, hideUsage bool) *Assembler {
	return &Assembler{endpoint: ep, hideUsage: hideUsage}
}

// Chunk is what one chunk says.
type Chunk struct {
	// Show tells whether the client gets to see it: not a usage chunk that only we asked for, and not an error, about which the caller decides.
	Show bool
	// Error is set if the chunk is the engine's error object. It is no part of the answer.
	Error *job.Error
	// Token tells whether it carries generated text (or a tool call, reasoning, ...). Empty: it has a choice that brings nothing at all, not even a role: a token whose text comes later
	// or that has none, as the end of an answer.
	Token, Empty bool
	// Choice and Usage tell whether it has any choice, and a usage.
	Choice, Usage bool
}

// Add takes one chunk's JSON, which it does not keep. What is not a JSON object is ErrBadStream; an answer that grows over MaxAnswer ErrTooLarge.
func (a *Assembler) Add(data []byte) (Chunk, error) {
	if !json.Valid(data) {
		return Chunk{}, fmt.Errorf("%w: a chunk that is not JSON", ErrBadStream)
	}
	data = bytes.TrimSpace(data)
	if data[0] != '{' {
		return Chunk{}, fmt.Errorf("%w: a chunk that is not an object", ErrBadStream)
	}
	if e := parseError(data); e != nil {
		return Chunk{Error: e}, nil
	}
	a.chunks++
	a.grow.limit = a.MaxAnswer
	if a.grow.limit == 0 {
		a.grow.limit = defaults.MaxAnswer
	}
	var chunk Chunk
	for key, value := range members(data) {
		switch string(key) {
		case "choices":
			if value[0] != '[' {
				continue
			}
			for c := range elements(value) {
				chunk.Choice = true
				token, role, err := a.addChoice(c)
				if err != nil {
					return Chunk{}, err
				}
				chunk.Token = chunk.Token || token
				chunk.Empty = chunk.Empty || !token && !role
			}
		case "error": // an empty one: no error, and no part of an answer
		default:
			chunk.Usage = chunk.Usage || string(key) == "usage" && !isNull(value)
			if err := a.setTop(key, value); err != nil {
				return Chunk{}, err
			}
		}
	}
	chunk.Empty = chunk.Empty && !chunk.Token
	chunk.Show = chunk.Choice || !chunk.Usage || !a.hideUsage
	return chunk, nil
}

func (a *Assembler) setTop(key, value []byte) error {
	i := slices.IndexFunc(a.top, func(f topField) bool { return f.key == string(key) })
	switch {
	case i < 0:
		a.top = append(a.top, topField{key: string(key), raw: bytes.Clone(value)})
		return a.grow.add(nodeSize + len(key) + len(value))
	case isNull(value) || string(value) == `""`:
		return nil
	}
	grown := len(value) - len(a.top[i].raw)
	a.top[i].raw = append(a.top[i].raw[:0], value...)
	return a.grow.add(grown)
}

// addChoice adds one choice of a chunk, and tells whether it carries anything generated, and whether it tells a role.
func (a *Assembler) addChoice(raw []byte) (token, role bool, err error) {
	if raw[0] != '{' {
		return false, false, fmt.Errorf("%w: a choice that is not an object", ErrBadStream)
	}
	index, _ := indexOf(raw)
	c, err := a.choice(index)
	if err != nil {
		return false, false, err
	}
	for key, value := range members(raw) {
		name, pieces := key, false
		switch chat := a.endpoint != job.Completions; {
		case chat && string(key) == "delta":
			name, pieces = []byte("message"), true
			if value[0] == '{' {
				for k, v := range members(value) {
					if string(k) == "role" {
						role = role || carries(v)
					} else {
						token = token || carries(v)
					}
				}
			}
		case chat && string(key) == "message":
			continue // some repeat in their last chunk what the deltas said
		case !chat && string(key) == "text":
			pieces = true
			token = token || carries(value)
		}
		m, err := a.grow.member(&c.node, name)
		if err != nil {
			return false, false, err
		}
		if err := a.grow.merge(m, value, pieces); err != nil {
			return false, false, err
		}
	}
	return token, role, nil
}

func (a *Assembler) choice(index int) (*choice, error) {
	if index >= maxChoices {
		return nil, fmt.Errorf("%w: choice %d, the highest is %d", ErrBadStream, index, maxChoices-1)
	}
	i, found := slices.BinarySearchFunc(a.choices, index, func(c *choice, index int) int { return c.index - index })
	if found {
		return a.choices[i], nil
	}
	c := &choice{index: index, node: node{kind: nodeObject}}
	a.choices = slices.Insert(a.choices, i, c)
	return c, a.grow.add(nodeSize)
}

// leading are the members that engines write before the choices.
var leading = []string{"id", "object", "created", "model", "system_fingerprint"}

// Body is the assembled answer. It is ErrBadStream if there was no chunk.
func (a *Assembler) Body() ([]byte, error) {
	if a.chunks == 0 {
		return nil, fmt.Errorf("%w: no chunk in it", ErrBadStream)
	}
	w := objectWriter{out: make([]byte, 1, a.grow.size+256)}
	w.out[0] = '{'
	for _, key := range leading {
		if raw := a.topRaw(key); key == "object" {
			w.key(key)
			w.out = append(w.out, a.object(raw)...)
		} else if raw != nil {
			w.key(key)
			w.out = append(w.out, raw...)
		}
	}
	w.key("choices")
	w.out = append(w.out, '[')
	for i, c := range a.choices {
		if i > 0 {
			w.out = append(w.out, ',')
		}
		w.out = a.writeChoice(w.out, c)
	}
	w.out = append(w.out, ']')
	if raw := a.topRaw("usage"); raw != nil {
		w.key("usage")
		w.out = append(w.out, raw...)
	}
	for _, f := range a.top {
		if f.key != "usage" && !slices.Contains(leading, f.key) {
			w.key(f.key)
			w.out = append(w.out, f.raw...)
		}
	}
	return append(w.out, '}'), nil
}

// Begun tells whether there was any chunk.
func (a *Assembler) Begun() bool { return a.chunks > 0 }

func (a *Assembler) topRaw(key string) []byte {
	for _, f := range a.top {
		if f.key == key {
			return f.raw
		}
	}
	return nil
}

// object is the answer's type, by that of the chunks.
func (a *Assembler) object(raw []byte) string {
	if len(raw) > 2 && raw[0] == '"' {
		return strings.TrimSuffix(string(raw[:len(raw)-1]), ".chunk") + `"`
	}
	if a.endpoint == job.Completions {
		return `"text_completion"`
	}
	return `"chat.completion"`
}

func (a *Assembler) writeChoice(out []byte, c *choice) []byte {
	w := objectWriter{out: append(out, '{')}
	if c.get("index") == nil {
		w.key("index")
		w.out = strconv.AppendInt(w.out, int64(c.index), 10)
	}
	if a.endpoint != job.Completions && c.get("message") == nil {
		w.key("message")
		w.out = writeMessage(w.out, &node{})
	}
	for i := range c.members {
		m := &c.members[i]
		if m.key == "message" && a.endpoint != job.Completions {
			w.key(m.key)
			w.out = writeMessage(w.out, &m.node)
		} else {
			w.member(m.key, &m.node)
		}
	}
	return append(w.out, '}')
}

// writeMessage writes the deltas' sum with role and content first, which a message always has. Tool calls lose the index, which is the stream's alone.
func writeMessage(out []byte, n *node) []byte {
	w := objectWriter{out: append(out, '{')}
	w.key("role")
	if role := n.get("role"); role != nil {
		w.out = role.write(w.out, "")
	} else {
		w.out = append(w.out, `"assistant"`...)
	}
	w.key("content")
	if content := n.get("content"); content != nil {
		w.out = content.write(w.out, "")
	} else {
		w.out = append(w.out, "null"...)
	}
	for i := range n.members {
		m := &n.members[i]
		switch m.key {
		case "role", "content":
		case "tool_calls":
			w.key(m.key)
			w.out = m.write(w.out, "index")
		default:
			w.member(m.key, &m.node)
		}
	}
	return append(w.out, '}')
}

// Usage is what the engine counted, nil if it did not.
func (a *Assembler) Usage() *job.Usage { return parseUsage(a.topRaw("usage")) }

// Text is the generated text of each choice so far, by index.
func (a *Assembler) Text() []string {
	if len(a.choices) == 0 {
		return nil
	}
	texts := make([]string, a.choices[len(a.choices)-1].index+1)
	for _, c := range a.choices {
		n := c.get("text")
		if a.endpoint != job.Completions {
			if n = c.get("message"); n != nil {
				n = n.get("content")
			}
		}
		if n == nil || n.kind != nodeString {
			continue
		}
		// It is a part of valid JSON.
		_ = json.Unmarshal(n.write(make([]byte, 0, len(n.text)+2), ""), &texts[c.index])
	}
	return texts
}

// Partial is the text so far, if the answer so far is nothing but one choice's text: no tool call, no reasoning, no log probabilities. Finished(1) tells whether that choice has ended.
func (a *Assembler) Partial() (text string, ok bool) {
	for _, c := range a.choices {
		if c.index != 0 {
			return "", false
		}
		for i := range c.members {
			switch m := &c.members[i]; m.key {
			case "text":
			case "message":
				for k := range m.members {
					if field := &m.members[k]; field.key != "role" && field.key != "content" && field.holds() {
						return "", false
					}
				}
				if content := m.get("content"); content != nil && content.kind != nodeString && content.holds() {
					return "", false
				}
			default:
				if m.kind != nodeString && m.holds() { // a string names something, as the reason of the end
					return "", false
				}
			}
		}
	}
	if texts := a.Text(); len(texts) > 0 {
		text = texts[0]
	}
	return text, true
}

// Finished tells whether there are n choices, and all so far have told why they ended.
func (a *Assembler) Finished(n int) bool {
	for _, c := range a.choices {
		if reason := c.get("finish_reason"); reason == nil || reason.kind != nodeString || len(reason.text) == 0 {
			return false
		}
	}
	return len(a.choices) >= n
}

// UsageOf reads the usage of a whole answer, nil if it has none.
func UsageOf(body []byte) *job.Usage {
	var answer struct {
		Usage json.RawMessage `json:"usage"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil
	}
	return parseUsage(answer.Usage)
}

// parseUsage reads a usage object. One of zeros counts nothing: Ollama puts it in each chunk of a completion before the last.
func parseUsage(raw []byte) *job.Usage {
	var u struct {
		PromptTokens     job.Tokens `json:"prompt_tokens"`
		CompletionTokens job.Tokens `json:"completion_tokens"`
		TotalTokens      job.Tokens `json:"total_tokens"`
		PromptDetails    struct {
			Cached job.Tokens `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
		CompletionDetails struct {
			Reasoning job.Tokens `json:"reasoning_tokens"`
		} `json:"completion_tokens_details"`
	}
	if len(raw) == 0 || json.Unmarshal(raw, &u) != nil {
		return nil
	}
	usage := job.Usage{
		PromptTokens:     u.PromptTokens,
		CompletionTokens: u.CompletionTokens,
		TotalTokens:      u.TotalTokens,
		CachedTokens:     u.PromptDetails.Cached,
		ReasoningTokens:  u.CompletionDetails.Reasoning,
	}
	lowest := min(usage.PromptTokens, usage.CompletionTokens, usage.TotalTokens, usage.CachedTokens, usage.ReasoningTokens)
	if lowest < 0 || usage == (job.Usage{}) {
		return nil
	}
	return &usage
}

// parseError reads an engine's error object in the forms that engines use, nil if data is none: {"error":{...}}, {"error":"text"}, {"object":"error",...}.
func parseError(data []byte) *job.Error {
	if !bytes.Contains(data, []byte(`"error"`)) { // most chunks
		return nil
	}
	var outer struct {
		Error  json.RawMessage `json:"error"`
		Object json.RawMessage `json:"object"`
	}
	if json.Unmarshal(data, &outer) != nil {
		return nil //nolint:nilerr // it returns no error but what it read: text that is no JSON object is no engine's error object
	}
	var d struct {
		Message string          `json:"message"`
		Type    string          `json:"type"`
		Param   json.RawMessage `json:"param"`
		Code    json.RawMessage `json:"code"`
	}
	// A field of an odd type stays empty: it is an error all the same.
	switch {
	case len(outer.Error) > 0 && carries(outer.Error):
		if outer.Error[0] == '"' {
			_ = json.Unmarshal(outer.Error, &d.Message)
		} else {
			_ = json.Unmarshal(outer.Error, &d)
		}
	case string(outer.Object) == `"error"`:
		_ = json.Unmarshal(data, &d)
	default:
		return nil
	}
	e := job.NewError(d.Type, job.CodeEngineError, d.Message)
	if e.Message == "" {
		e.Message = "the engine reported an error without a message"
	}
	if e.Type == "" {
		e.Type = job.TypeServer
	}
	var param, code string
	if json.Unmarshal(d.Param, &param) == nil && param != "" {
		e.Param = &param
	}
	if json.Unmarshal(d.Code, &code) == nil && code != "" { // vLLM's is the HTTP status, a number, which tells clients nothing to match on
		e.Code = new(job.Code(code))
	}
	return e
}
