package engine

import (
	"bytes"
	"iter"
	"strconv"
	"strings"
)

// The scanner walks JSON text that json.Valid has passed, without spaces around it, so it needs no syntax checks of its own. What it yields are parts of that text.

// members yields the members of an object: each key without its quotes and its escapes as they stand (engines write no key with any), and the value's text.
func members(raw []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(key, value []byte) bool) {
		i := skipSpace(raw, 1)
		for raw[i] != '}' {
			keyEnd := skipString(raw, i)
			key := raw[i+1 : keyEnd-1]
			i = skipSpace(raw, keyEnd)
			i = skipSpace(raw, i+1) // behind the colon
			end := skipValue(raw, i)
			if !yield(key, raw[i:end]) {
				return
			}
			if i = skipSpace(raw, end); raw[i] == ',' {
				i = skipSpace(raw, i+1)
			}
		}
	}
}

// elements yields the elements of an array.
func elements(raw []byte) iter.Seq[[]byte] {
	return func(yield func(element []byte) bool) {
		i := skipSpace(raw, 1)
		for raw[i] != ']' {
			end := skipValue(raw, i)
			if !yield(raw[i:end]) {
				return
			}
			if i = skipSpace(raw, end); raw[i] == ',' {
				i = skipSpace(raw, i+1)
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

func skipSpace(raw []byte, i int) int {
	for raw[i] == ' ' || raw[i] == '\t' || raw[i] == '\n' || raw[i] == '\r' {
		i++
	}
	return i
}

// skipString returns the index behind the string that begins at i.
func skipString(raw []byte, i int) int {
	for i++; raw[i] != '"'; i++ {
		if raw[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// skipValue returns the index behind the value that begins at i.
func skipValue(raw []byte, i int) int {
	depth := 0
	for {
		switch raw[i] {
		case '"':
			i = skipString(raw, i)
		case '{', '[':
			depth++
			i++
		case '}', ']':
			depth--
			i++
		case ' ', '\t', '\n', '\r', ',', ':':
			i++
		default: // a number, true, false or null: it ends where the text around it goes on
			for i < len(raw) && strings.IndexByte(",:]} \t\n\r", raw[i]) < 0 {
				i++
			}
		}
		if depth == 0 {
			return i
		}
	}
}
