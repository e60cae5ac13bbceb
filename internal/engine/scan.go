package engine

import (
	"bytes"
	"iter"
	"strconv"

	"github.com/millrace/millrace/internal/job"
)

// The scanner walks JSON text that json.Valid has passed, without spaces around it, so it needs no syntax checks of its own. What it yields are parts of that text.

// members yields the members of an object: each key without its quotes and its escapes as they stand (engines write no key with any), and the value's text.
func members(raw []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(key, value []byte) bool) {
		i := job.SkipSpace(raw, 1)
		for raw[i] != '}' {
			keyEnd := job.SkipString(raw, i)
			key := raw[i+1 : keyEnd-1]
			i = job.SkipSpace(raw, keyEnd)
			i = job.SkipSpace(raw, i+1) // behind the colon
			end := job.SkipValue(raw, i)
			if !yield(key, raw[i:end]) {
				return
			}
			if i = job.SkipSpace(raw, end); raw[i] == ',' {
				i = job.SkipSpace(raw, i+1)
			}
		}
	}
}

// elements yields the elements of an array.
func elements(raw []byte) iter.Seq[[]byte] {
	return func(yield func(element []byte) bool) {
		i := job.SkipSpace(raw, 1)
		for raw[i] != ']' {
			end := job.SkipValue(raw, i)
			if !yield(raw[i:end]) {
				return
			}
			if i = job.SkipSpace(raw, end); raw[i] == ',' {
				i = job.SkipSpace(raw, i+1)
			}
		}
	}
}

// indexOf returns the element's place as its member "index" tells; false if it is no object or tells none.
func indexOf(raw []byte) (int, bool) {
	if raw[0] != '{' {
		return 0, false
	}
	for key, value := range members(raw) {
		if string(key) == "index" {
			n, err := strconv.Atoi(string(value))
			return n, err == nil && n >= 0
		}
	}
	return 0, false
}

// carries tells whether a value holds anything: text, or an object or array that is not empty.
func carries(raw []byte) bool {
	switch raw[0] {
	case '"':
		return len(raw) > 2
	case '{', '[':
		return len(bytes.TrimSpace(raw[1:len(raw)-1])) > 0
	}
	return false
}

func isNull(raw []byte) bool { return raw[0] == 'n' }
