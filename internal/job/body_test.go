package job_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
)

// awkward has what a proxy that decodes and encodes again would spoil.
const awkward = ` { "seed" : 9007199254740993, "b":"<b>&amp;</b> \u00e9é\/", "z":1, "a":1e400, "a": 2 ,` + "\n\t" +
	`"messages":[{"role":"user","content":"}],\"stream\":true,"}], "vendor":{"x":[null,-0.0,[]]}, "stop":null }` + "\n"

func TestSetFieldChangesNoOtherByte(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ body, key, value, want string }{
		"added at the end":                 {`{"a":1}`, "stream", "true", `{"a":1,"stream":true}`},
		"added to an empty object":         {`{ }`, "stream", "true", `{"stream":true }`},
		"replaced in place":                {`{"stream" : false , "a":1}`, "stream", "true", `{"stream" : true , "a":1}`},
		"each of a repeated key":           {`{"stream":false,"a":1,"stream":null}`, "stream", "true", `{"stream":true,"a":1,"stream":true}`},
		"a key written with an escape":     {`{"str\u0065am":false}`, "stream", "true", `{"str\u0065am":true}`},
		"the same name deeper is not it":   {`{"m":{"stream":false}}`, "stream", "true", `{"m":{"stream":false},"stream":true}`},
		"inside a string is not it":        {`{"m":"\"stream\":false"}`, "stream", "true", `{"m":"\"stream\":false","stream":true}`},
		"the value may be an object":       {`{"o":{"a":[1,2]},"z":0}`, "o", `{}`, `{"o":{},"z":0}`},
		"space after the last value stays": {"{\"a\":1 \n}", "b", "2", "{\"a\":1,\"b\":2 \n}"},
		"an awkward body":                  {awkward, "stop", `"x"`, strings.Replace(awkward, `"stop":null`, `"stop":"x"`, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := job.SetField([]byte(c.body), c.key, []byte(c.value))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSetFieldReturnsTheBodyItselfWhereNothingChanges(t *testing.T) {
	t.Parallel()
	body := []byte(`{"stream":true}`)
	got, err := job.SetField(body, "stream", []byte("true"))
	if err != nil {
		t.Fatal(err)
	}
	if &got[0] != &body[0] {
		t.Error("the body was copied")
	}
}

func TestRemoveFieldTakesOneComma(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ body, want string }{
		"the only one":       {`{"x":1}`, `{}`},
		"the first":          {`{"x":1, "a":2}`, `{"a":2}`},
		"in the middle":      {`{"a":1, "x":2, "b":3}`, `{"a":1, "b":3}`},
		"the last":           {`{"a":1, "x":2 }`, `{"a":1 }`},
		"several at the end": {`{"a":1,"x":2,"x":3}`, `{"a":1}`},
		"several all over":   {`{"x":0,"a":1,"x":2,"b":2,"x":3,"x":4}`, `{"a":1,"b":2}`},
		"all":                {`{"x":0,"x":1}`, `{}`},
		"none":               {`{"a":1}`, `{"a":1}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := job.RemoveField([]byte(c.body), "x")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestSetStreaming(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		body, want string
		added      bool
	}{
		"nothing said":             {`{"a":1}`, `{"a":1,"stream_options":{"include_usage":true},"stream":true}`, true},
		"the client's own wish":    {`{"stream":true,"stream_options":{"include_usage":true}}`, `{"stream":true,"stream_options":{"include_usage":true}}`, false},
		"a usage it does not want": {`{"stream_options":{"include_usage":false,"x":1}}`, `{"stream_options":{"include_usage":true,"x":1},"stream":true}`, true},
		"null options":             {`{"stream_options":null}`, `{"stream_options":{"include_usage":true},"stream":true}`, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, added, err := job.SetStreaming([]byte(c.body))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, string(got)); diff != "" || added != c.added {
				t.Error(diff, added)
			}
		})
	}
	if _, _, err := job.SetStreaming([]byte(`{"stream_options":"yes"}`)); err == nil {
		t.Error("options that are no object were taken")
	}
}

func TestSetPlain(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]string{
		`{"a":1}`: `{"a":1}`,
		`{"stream":true,"stream_options":{"include_usage":true},"a":1}`: `{"stream":false,"a":1}`,
		`{"stream":false}`: `{"stream":false}`,
	} {
		got, err := job.SetPlain([]byte(body))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, string(got)); diff != "" {
			t.Error(diff)
		}
	}
}

func TestParseObject(t *testing.T) {
	t.Parallel()
	o, err := job.ParseObject([]byte(awkward))
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, f := range o.Fields {
		keys = append(keys, f.Key)
	}
	if diff := cmp.Diff([]string{"seed", "b", "z", "a", "a", "messages", "vendor", "stop"}, keys); diff != "" {
		t.Error(diff)
	}
	if got := string(o.Get("a")); got != "2" {
		t.Errorf("of a repeated key %s counts, want the last", got)
	}
	if got := string(o.Get("seed")); got != "9007199254740993" {
		t.Errorf("seed is %s", got)
	}
	for _, bad := range []string{"", "{", `{"a":1}x`, `{"a":1,}`, "nul"} {
		if _, err := job.ParseObject([]byte(bad)); err == nil || errors.Is(err, job.ErrNotObject) {
			t.Errorf("%q: got %v, want a syntax error", bad, err)
		}
	}
	for _, bad := range []string{"[]", "1", "null", `"x"`} {
		if _, err := job.ParseObject([]byte(bad)); !errors.Is(err, job.ErrNotObject) {
			t.Errorf("%q: got %v, want ErrNotObject", bad, err)
		}
	}
}

// FuzzSetField checks on any valid object that an edit is seen by a decoder, and that taking the added field away again gives the very same bytes.
func FuzzSetField(f *testing.F) {
	for _, s := range []string{awkward, `{}`, `{"stream":1,"stream":{}}`, `{"a":"\\\"","b":[{"c":"]}"}]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		const key = "millrace key"
		o, err := job.ParseObject(body)
		if err != nil {
			return
		}
		set, err := job.SetField(body, key, []byte(`[true]`))
		if err != nil {
			t.Fatal(err)
		}
		var m map[string]json.RawMessage
		if err := json.Unmarshal(set, &m); err != nil {
			t.Fatalf("%q became %q: %v", body, set, err)
		}
		if string(m[key]) != `[true]` {
			t.Fatalf("%q became %q, in which the field is %q", body, set, m[key])
		}
		if o.Get(key) != nil {
			return
		}
		back, err := job.RemoveField(set, key)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(back, body) {
			t.Fatalf("%q came back as %q", body, back)
		}
	})
}

func BenchmarkSetStreaming(b *testing.B) {
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("lorem ipsum ", 400) + `"}],"max_tokens":64}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := job.SetStreaming(body); err != nil {
			b.Fatal(err)
		}
	}
}
