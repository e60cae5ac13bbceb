package job

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// ErrNotObject says that a text is valid JSON but not an object.
var ErrNotObject = errors.New("not a JSON object")

// Field is one member of a JSON object, as it stands in the text.
type Field struct {
	// Key is the member's name with its escapes decoded.
	Key string
	// Value is the member's raw text, without the space around it: a part of the parsed text, not a copy.
	Value []byte
	// start and end bound the member from the key's quote to the value's end; valueStart is where Value begins.
	start, valueStart, end int
}

// Object is the top level of a JSON object's text. Members keep their order, and a repeated key is a member each time.
type Object struct {
	Fields []Field
	raw    []byte
	open   int // index of '{'
}

// ParseObject reads the top level of raw, which must be one valid JSON object. It copies nothing but the keys.
func ParseObject(raw []byte) (*Object, error) {
	if !json.Valid(raw) {
		var v json.RawMessage
		if err := json.Unmarshal(raw, &v); err != nil {
			return nil, fmt.Errorf("not valid JSON: %w", err)
		}
		return nil, errors.New("not valid JSON")
	}
	i := SkipSpace(raw, 0)
	if raw[i] != '{' {
		return nil, ErrNotObject
	}
	o := &Object{raw: raw, open: i}
	i = SkipSpace(raw, i+1)
	for raw[i] != '}' {
		f := Field{start: i}
		keyEnd := SkipString(raw, i)
		key := raw[i:keyEnd]
		if bytes.IndexByte(key, '\\') < 0 {
			f.Key = string(key[1 : len(key)-1])
		} else if err := json.Unmarshal(key, &f.Key); err != nil {
			return nil, fmt.Errorf("reading a key: %w", err)
		}
		i = SkipSpace(raw, keyEnd) // at ':'
		i = SkipSpace(raw, i+1)    // at the value
		f.valueStart = i
		i = SkipValue(raw, i)
		f.end = i
		f.Value = raw[f.valueStart:f.end]
		o.Fields = append(o.Fields, f)
		i = SkipSpace(raw, i)
		if raw[i] == ',' {
			i = SkipSpace(raw, i+1)
		}
	}
	return o, nil
}

// Get returns the value of key, nil if it is absent. Of a repeated key the last counts, as engines read it.
func (o *Object) Get(key string) json.RawMessage {
	for i := len(o.Fields) - 1; i >= 0; i-- {
		if o.Fields[i].Key == key {
			return o.Fields[i].Value
		}
	}
	return nil
}

// SetField returns body with key set to the raw JSON value. Each member of that name gets the value in place; if there is none, one is added
// at the object's end. No other byte changes, and a body in which the value stands already is returned as it is.
func SetField(body []byte, key string, value []byte) ([]byte, error) {
	o, err := ParseObject(body)
	if err != nil {
		return nil, err
	}
	found, same := false, true
	for _, f := range o.Fields {
		if f.Key == key {
			found = true
			same = same && bytes.Equal(f.Value, value)
		}
	}
	if found && same {
		return body, nil
	}
	out := make([]byte, 0, len(body)+len(key)+len(value)+4)
	at := 0
	for _, f := range o.Fields {
		if f.Key == key {
			out = append(out, body[at:f.valueStart]...)
			out = append(out, value...)
			at = f.end
		}
	}
	if !found {
		end := o.open + 1
		if n := len(o.Fields); n > 0 {
			end = o.Fields[n-1].end
		}
		out = append(out, body[:end]...)
		if len(o.Fields) > 0 {
			out = append(out, ',')
		}
		name, err := json.Marshal(key)
		if err != nil {
			return nil, fmt.Errorf("writing the key %q: %w", key, err)
		}
		out = append(out, name...)
		out = append(out, ':')
		out = append(out, value...)
		at = end
	}
	return append(out, body[at:]...), nil
}

// RemoveField returns body without its members named key, each gone with one comma beside it. No other byte changes.
func RemoveField(body []byte, key string) ([]byte, error) {
	o, err := ParseObject(body)
	if err != nil {
		return nil, err
	}
	last := -1 // the last member that stays
	removed := false
	for i, f := range o.Fields {
		if f.Key != key {
			last = i
		} else {
			removed = true
		}
	}
	if !removed {
		return body, nil
	}
	out := make([]byte, 0, len(body))
	at := 0
	for i := range last { // one that goes before the last that stays takes the comma behind it along
		if o.Fields[i].Key == key {
			out = append(out, body[at:o.Fields[i].start]...)
			at = o.Fields[i+1].start
		}
	}
	if n := len(o.Fields); last < n-1 { // those behind the last that stays go with the comma before them
		from := o.Fields[0].start
		if last >= 0 {
			from = o.Fields[last].end
		}
		out = append(out, body[at:from]...)
		at = o.Fields[n-1].end
	}
	return append(out, body[at:]...), nil
}

// SetStreaming returns body asking for a stream that ends with a usage chunk, and whether the client had not asked for that chunk itself.
func SetStreaming(body []byte) (edited []byte, addedUsage bool, err error) {
	o, err := ParseObject(body)
	if err != nil {
		return nil, false, err
	}
	options := o.Get("stream_options")
	var asked struct {
		IncludeUsage bool `json:"include_usage"`
	}
	if len(options) == 0 || bytes.Equal(options, []byte("null")) {
		options = []byte("{}")
	} else if err := json.Unmarshal(options, &asked); err != nil {
		return nil, false, fmt.Errorf("reading stream_options: %w", err)
	}
	if !asked.IncludeUsage {
		if options, err = SetField(options, "include_usage", []byte("true")); err != nil {
			return nil, false, fmt.Errorf("editing stream_options: %w", err)
		}
		if body, err = SetField(body, "stream_options", options); err != nil {
			return nil, false, err
		}
	}
	edited, err = SetField(body, "stream", []byte("true"))
	return edited, !asked.IncludeUsage, err
}

// SetPlain returns body asking for one answer in one piece: without stream and the options that only a stream may have.
func SetPlain(body []byte) ([]byte, error) {
	o, err := ParseObject(body)
	if err != nil {
		return nil, err
	}
	if o.Get("stream") != nil {
		if body, err = SetField(body, "stream", []byte("false")); err != nil {
			return nil, err
		}
	}
	return RemoveField(body, "stream_options")
}

// The Skip functions walk text that json.Valid has passed, so they need no bounds or syntax checks of their own.

// SkipSpace returns the index of the first byte from i on that is no white space.
func SkipSpace(raw []byte, i int) int {
	for i < len(raw) && (raw[i] == ' ' || raw[i] == '\t' || raw[i] == '\n' || raw[i] == '\r') {
		i++
	}
	return i
}

// SkipString returns the index behind the string that begins at i.
func SkipString(raw []byte, i int) int {
	for i++; ; i++ {
		i += bytes.IndexByte(raw[i:], '"')
		escapes := 0 // a quote behind an odd number of them is a part of the string
		for raw[i-1-escapes] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return i + 1
		}
	}
}

// SkipValue returns the index behind the value that begins at i.
func SkipValue(raw []byte, i int) int {
	depth := 0
	for {
		switch raw[i] {
		case '"':
			i = SkipString(raw, i)
		case '{', '[':
			depth++
			i++
		case '}', ']':
			depth--
			i++
		case ' ', '\t', '\n', '\r', ',', ':':
			i++
		default: // a number, true, false or null
			for i < len(raw) && !isDelimiter(raw[i]) {
				i++
			}
		}
		if depth == 0 {
			return i
		}
	}
}

func isDelimiter(b byte) bool {
	switch b {
	case ',', ':', ']', '}', ' ', '\t', '\n', '\r':
		return true
	}
	return false
}
