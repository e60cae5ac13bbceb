package api

import (
	"encoding/json"
	"strings"
	"testing"
)

// judged is what syntax says of a text that comes in pieces of n bytes.
func judged(text string, n int) bool {
	var s syntax
	for i := 0; i < len(text); i += n {
		if !s.feed([]byte(text[i:min(i+n, len(text))])) {
			return false
		}
	}
	return s.whole()
}

var texts = []string{
	``, ` `, `{}`, `[]`, ` { } `, `{"a":1}`, `{"a":1,}`, `{"a":1,"b":[1,2,{"c":null}]}`, `{,}`, `{"a"}`, `{"a":}`, `{"a" 1}`, `{a:1}`, `{"a":1]`, `[1}`, `[,]`, `[1,]`, `[1 2]`, `]`, `}`, `{"a":1}}`, `[[[]]]`, `[[]`,
	`"x`, `"x"`, `"\"`, `"\\"`, `"\u00e9"`, `"\u00g9"`, `"\u12"`, `"\x"`, "\"a\tb\"", "\"\xff\"", `"a" "b"`, `{"\u0061":"\n"}`,
	`0`, `-0`, `01`, `-`, `-a`, `1.`, `1.5`, `1.5.`, `1e`, `1e+`, `1e+5`, `1E-05`, `1e5e`, `.5`, `+1`, `1 `, `1,`, `[1.5e3,-0,0]`, `[0 ]`, `0x1`, `1.e3`, `--1`,
	`true`, `tru`, `truE`, `false`, `null`, `nulll`, `[true,false,null]`, `true false`, "\ufeff{}", "{}\n{}", "\v{}", "{\"a\":1}\r", `{"a":1} {`,
	strings.Repeat("[", maxDepth) + strings.Repeat("]", maxDepth), strings.Repeat("[", maxDepth+1) + strings.Repeat("]", maxDepth+1),
}

func TestSyntaxIsThatOfJSON(t *testing.T) {
	t.Parallel()
	for _, text := range texts {
		for _, n := range []int{1, 3, len(text) + 1} {
			if got, want := judged(text, n), json.Valid([]byte(text)); got != want {
				t.Errorf("%.60q in pieces of %d: %v, want %v", text, n, got, want)
			}
		}
	}
}

func FuzzSyntax(f *testing.F) {
	for _, text := range texts {
		f.Add(text, 2)
	}
	f.Fuzz(func(t *testing.T, text string, n int) {
		if n < 1 {
			return
		}
		if got, want := judged(text, n), json.Valid([]byte(text)); got != want {
			t.Errorf("%q in pieces of %d: %v, want %v", text, n, got, want)
		}
	})
}
