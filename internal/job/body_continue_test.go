package job_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
)

func TestContinueAsksForTheRest(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		endpoint   job.Endpoint
		body, want string
		part       job.Partial
	}{
		"a chat": {
			job.ChatCompletions, `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":10}`,
			`{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"a <b>&\"c\"\n東"}],"max_tokens":7,"continue_final_message":true,"add_generation_prompt":false}`,
			job.Partial{Text: "a <b>&\"c\"\n東", Tokens: 3},
		},
		"a chat without a limit": {
			job.ChatCompletions, `{"messages":[1]}`, `{"messages":[1,{"role":"assistant","content":"x"}],"continue_final_message":true,"add_generation_prompt":false}`, job.Partial{Text: "x", Tokens: 3},
		},
		"both limits of a chat, and a least length": {
			job.ChatCompletions, `{"messages":[1 ] , "max_tokens":2,"max_completion_tokens":9,"min_tokens":2}`,
			`{"messages":[1 ,{"role":"assistant","content":"x"}] , "max_tokens":1,"max_completion_tokens":6,"min_tokens":0,"continue_final_message":true,"add_generation_prompt":false}`,
			job.Partial{Text: "x", Tokens: 3},
		},
		"fields that the client set": {
			job.ChatCompletions, `{"continue_final_message":false,"add_generation_prompt":true,"messages":[1],"n":1,"logprobs":false,"top_logprobs":0,"tool_choice":"auto","response_format":{"type":"text"}}`,
			`{"continue_final_message":true,"add_generation_prompt":false,"messages":[1,{"role":"assistant","content":"x"}],"n":1,"logprobs":false,"top_logprobs":0,"tool_choice":"auto","response_format":{"type":"text"}}`,
			job.Partial{Text: "x", Tokens: 3},
		},
		"images": {
			job.ChatCompletions, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:]}"}}]}]}`,
			`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:]}"}}]},{"role":"assistant","content":"x"}],"continue_final_message":true,"add_generation_prompt":false}`,
			job.Partial{Text: "x", Tokens: 3},
		},
		"of a repeated field the last counts": {
			job.ChatCompletions, `{"messages":[],"messages":[1]}`, `{"messages":[],"messages":[1,{"role":"assistant","content":"x"}],"continue_final_message":true,"add_generation_prompt":false}`, job.Partial{Text: "x"},
		},
		"a completion": {
			job.Completions, `{"prompt" : "once\u00e9 \"upon\"" , "max_tokens":10, "seed":9007199254740993}`, `{"prompt" : "once\u00e9 \"upon\" a \\ time" , "max_tokens":6, "seed":9007199254740993}`,
			job.Partial{Text: ` a \ time`, Tokens: 4},
		},
		"a completion under the engine's own limit": {
			job.Completions, `{"prompt":""}`, `{"prompt":"x","max_tokens":12}`, job.Partial{Text: "x", Tokens: 4, DefaultLimit: 16},
		},
		"a completion on an engine without a limit": {
			job.Completions, `{"prompt":""}`, `{"prompt":"x"}`, job.Partial{Text: "x", Tokens: 4, DefaultLimit: -1},
		},
		"nothing is left": {
			job.Completions, `{"prompt":"p","max_tokens":4}`, "", job.Partial{Text: "x", Tokens: 4},
		},
		"nothing is left of the limit that counts": {
			job.ChatCompletions, `{"messages":[1],"max_tokens":40,"max_completion_tokens":4}`, "", job.Partial{Text: "x", Tokens: 4},
		},
		"an awkward body": {
			job.ChatCompletions, awkward,
			strings.TrimSuffix(strings.Replace(awkward, `true,"}]`, `true,"},{"role":"assistant","content":"x"}]`, 1), " }\n") + `,"continue_final_message":true,"add_generation_prompt":false }` + "\n",
			job.Partial{Text: "x", Tokens: 4},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := strings.Clone(c.body)
			got, left, err := job.Continue([]byte(c.body), c.endpoint, c.part)
			if err != nil || left != (c.want != "") {
				t.Fatalf("left %v, %v", left, err)
			}
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Error(diff)
			}
			if c.body != before {
				t.Error("the body itself was changed")
			}
		})
	}
}

func TestContinueRefusesWhatHasToBeWhole(t *testing.T) {
	t.Parallel()
	chat := func(more string) string { return `{"messages":[1],` + more + `}` }
	for name, c := range map[string]struct {
		endpoint   job.Endpoint
		body, text string
	}{
		"no text":                            {job.ChatCompletions, `{"messages":[1]}`, ""},
		"several answers":                    {job.ChatCompletions, chat(`"n":2`), "x"},
		"the best of several":                {job.Completions, `{"prompt":"p","max_tokens":9,"best_of":2}`, "x"},
		"log probabilities":                  {job.ChatCompletions, chat(`"logprobs":true`), "x"},
		"log probabilities of none":          {job.Completions, `{"prompt":"p","max_tokens":9,"logprobs":0}`, "x"},
		"a form":                             {job.ChatCompletions, chat(`"response_format":{"type":"json_object"}`), "x"},
		"a form that is no object":           {job.ChatCompletions, chat(`"response_format":"json"`), "x"},
		"a guide":                            {job.ChatCompletions, chat(`"guided_regex":"a+"`), "x"},
		"a tool that must be called":         {job.ChatCompletions, chat(`"tool_choice":"required"`), "x"},
		"its own partial answer":             {job.ChatCompletions, chat(`"continue_final_message":true`), "x"},
		"no place for an answer":             {job.ChatCompletions, chat(`"add_generation_prompt":false`), "x"},
		"an echo":                            {job.Completions, `{"prompt":"p","max_tokens":9,"echo":true}`, "x"},
		"a suffix":                           {job.Completions, `{"prompt":"p","max_tokens":9,"suffix":"s"}`, "x"},
		"several prompts":                    {job.Completions, `{"prompt":["p"],"max_tokens":9}`, "x"},
		"a completion without a limit":       {job.Completions, `{"prompt":"p"}`, "x"},
		"a limit that is none":               {job.ChatCompletions, chat(`"max_tokens":"9"`), "x"},
		"a limit of a fraction":              {job.ChatCompletions, chat(`"max_tokens":1e2`), "x"},
		"a limit of nothing":                 {job.ChatCompletions, chat(`"max_tokens":0`), "x"},
		"a limit below nothing":              {job.ChatCompletions, chat(`"min_tokens":-1`), "x"},
		"no messages":                        {job.ChatCompletions, `{"messages":[ ]}`, "x"},
		"messages that are no list":          {job.ChatCompletions, `{"messages":"hi"}`, "x"},
		"an endpoint that generates nothing": {job.Embeddings, `{"input":"p"}`, "x"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got, _, err := job.Continue([]byte(c.body), c.endpoint, job.Partial{Text: c.text, Tokens: 1}); !errors.Is(err, job.ErrNotContinuable) {
				t.Errorf("%s, %v", got, err)
			}
		})
	}
	if _, _, err := job.Continue([]byte(`{`), job.ChatCompletions, job.Partial{Text: "x"}); err == nil || errors.Is(err, job.ErrNotContinuable) {
		t.Errorf("no JSON: %v", err)
	}
}

func TestSetOneTokenCountsThePrompt(t *testing.T) {
	t.Parallel()
	got, err := job.SetOneToken([]byte(`{"messages":[1],"stream":true,"stream_options":{},"max_completion_tokens":9,"min_tokens":5,"seed":1e400}`), job.ChatCompletions)
	if want := `{"messages":[1],"stream":false,"seed":1e400,"max_tokens":1}`; err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
}

// FuzzContinue: whatever the body and the text, a continued body is the body but for the fields that say so, and its text is the text.
func FuzzContinue(f *testing.F) {
	for _, body := range []string{
		`{"messages":[{"role":"user","content":"hi"}],"max_tokens":10}`, `{"prompt":"once\ud83d upon","max_tokens":10}`, `{"prompt":"","messages":[1],"max_tokens":3,"max_tokens":7}`, awkward,
	} {
		f.Add([]byte(body), "text \"\\\n\u2028 東", int64(2), true)
		f.Add([]byte(body), "x", int64(0), false)
	}
	f.Fuzz(func(t *testing.T, body []byte, text string, used int64, chat bool) {
		endpoint := job.Completions
		if chat {
			endpoint = job.ChatCompletions
		}
		if used < 0 {
			return
		}
		before := bytes.Clone(body)
		got, left, err := job.Continue(body, endpoint, job.Partial{Text: text, Tokens: job.Tokens(used), DefaultLimit: -1})
		if !bytes.Equal(body, before) {
			t.Fatal("the body itself was changed")
		}
		if err != nil || !left {
			if got != nil {
				t.Fatalf("%v, %v and %s", err, left, got)
			}
			return
		}
		was, err := job.ParseObject(body)
		if err != nil {
			t.Fatal(err)
		}
		is, err := job.ParseObject(got)
		if err != nil {
			t.Fatalf("%s: %v", got, err)
		}
		owned := map[string]bool{"max_tokens": true, "max_completion_tokens": true, "min_tokens": true, "continue_final_message": chat, "add_generation_prompt": chat, "messages": chat, "prompt": !chat}
		for i, field := range was.Fields {
			if is.Fields[i].Key != field.Key || !owned[field.Key] && !bytes.Equal(is.Fields[i].Value, field.Value) {
				t.Fatalf("%s became %s", field.Value, is.Fields[i].Value)
			}
		}
		text = string([]rune(text)) // what is no UTF-8 is replaced
		if !chat {
			var a, b string
			if json.Unmarshal(was.Get("prompt"), &a) != nil || json.Unmarshal(is.Get("prompt"), &b) != nil || b != a+text {
				t.Fatalf("%q became %q", a, b)
			}
			return
		}
		var a, b []json.RawMessage
		var last struct{ Role, Content string }
		if json.Unmarshal(was.Get("messages"), &a) != nil || json.Unmarshal(is.Get("messages"), &b) != nil || len(b) != len(a)+1 || json.Unmarshal(b[len(a)], &last) != nil {
			t.Fatalf("%s became %s", was.Get("messages"), is.Get("messages"))
		}
		if last.Role != "assistant" || last.Content != text || !bytes.HasPrefix(is.Get("messages"), was.Get("messages")[:len(was.Get("messages"))-1]) {
			t.Fatalf("%s became %s", was.Get("messages"), is.Get("messages"))
		}
	})
}

// TestContinuedBodiesAreAsInTestdata: an engine's recorded requests, and what it is asked for their rest.
func TestContinuedBodiesAreAsInTestdata(t *testing.T) {
	t.Parallel()
	for name, part := range map[string]job.Partial{
		"chat":       {Text: "Once upon a time there was a \"model\"\nof <few> words. 東京", Tokens: 14},
		"completion": {Text: " time there was a \"model\"\nof <few> words. 東京", Tokens: 12},
	} {
		endpoint := job.ChatCompletions
		if name == "completion" {
			endpoint = job.Completions
		}
		body, err := os.ReadFile(filepath.Join("testdata", "continue", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join("testdata", "continue", name+".rest.json"))
		if err != nil {
			t.Fatal(err)
		}
		got, left, err := job.Continue(body, endpoint, part)
		if err != nil || !left {
			t.Fatalf("%s: %v, %v", name, left, err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
