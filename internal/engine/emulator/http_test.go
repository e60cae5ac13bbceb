package emulator_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/engine/emulator/emulatortest"
)

const (
	chat       = "/v1/chat/completions"
	completion = "/v1/completions"
	embedding  = "/v1/embeddings"
)

// post sends body and returns the response, whose body the test's end closes.
func post(ctx context.Context, t testing.TB, s *emulatortest.Server, path, body string) (*http.Response, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err == nil {
		t.Cleanup(func() { _ = resp.Body.Close() })
	}
	return resp, err
}

// ask returns status and body of a call that must be answered whole.
func ask(t testing.TB, s *emulatortest.Server, path, body string) (int, string) {
	t.Helper()
	resp, err := post(t.Context(), t, s, path, body)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func get(t testing.TB, s *emulatortest.Server, path string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// reply is what a test wants to know of an answer, whole or streamed.
type reply struct {
	Text   []string
	Tools  []string // name and arguments
	Finish []string
	Stop   []any
	Usage  usage
	// Chunks is how many carried a part of a choice after the opening.
	Chunks int
	Model  string
	ID     string
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Total      int `json:"total_tokens"`
	Completion int `json:"completion_tokens"`
}

type toolPart struct {
	ID       string `json:"id"`
	Function struct {
		Name      string `json:"name"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

type part struct {
	Index   int    `json:"index"`
	Text    string `json:"text"`
	Message struct {
		Role    string     `json:"role"`
		Content string     `json:"content"`
		Tools   []toolPart `json:"tool_calls"`
	} `json:"message"`
	Delta struct {
		Role    string     `json:"role"`
		Content string     `json:"content"`
		Tools   []toolPart `json:"tool_calls"`
	} `json:"delta"`
	Finish *string         `json:"finish_reason"`
	Stop   any             `json:"stop_reason"`
	Probs  json.RawMessage `json:"logprobs"`
}

type envelope struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Model   string `json:"model"`
	Choices []part `json:"choices"`
	Usage   *usage `json:"usage"`
}

func (r *reply) add(p part, text, tools string) {
	for len(r.Text) <= p.Index {
		r.Text = append(r.Text, "")
		r.Tools = append(r.Tools, "")
		r.Finish = append(r.Finish, "")
		r.Stop = append(r.Stop, nil)
	}
	r.Text[p.Index] += text
	r.Tools[p.Index] += tools
	if p.Finish != nil {
		r.Finish[p.Index] = *p.Finish
		r.Stop[p.Index] = p.Stop
	}
}

func toolText(parts []toolPart) string {
	s := ""
	for _, p := range parts {
		s += p.Function.Name
		if p.Function.Name != "" {
			s += " "
		}
		s += p.Function.Arguments
	}
	return s
}

func whole(t testing.TB, s *emulatortest.Server, path, body string) reply {
	t.Helper()
	status, b := ask(t, s, path, body)
	if status != http.StatusOK {
		t.Fatalf("status %d: %s", status, b)
	}
	var e envelope
	if err := json.Unmarshal([]byte(b), &e); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
	r := reply{Usage: *e.Usage, Model: e.Model, ID: e.ID}
	for _, c := range e.Choices {
		r.add(c, c.Text+c.Message.Content, toolText(c.Message.Tools))
	}
	return r
}

// events reads the data of a stream's events until it ends, with the error that ended it.
func events(body io.Reader) ([]string, error) {
	r := bufio.NewReader(body)
	var out []string
	for {
		line, err := r.ReadString('\n')
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			out = append(out, strings.TrimSuffix(data, "\n"))
		}
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return out, err
		}
	}
}

// withField adds a field at the body's end.
func withField(body, field string) string { return strings.TrimSuffix(body, "}") + "," + field + "}" }

func streamed(t testing.TB, s *emulatortest.Server, path, body string) reply {
	t.Helper()
	resp, err := post(t.Context(), t, s, path, withField(body, `"stream":true,"stream_options":{"include_usage":true}`))
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.Header.Get("Content-Type"); got != "text/event-stream; charset=utf-8" {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("content type %q: %s", got, b)
	}
	data, err := events(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(data); n == 0 || data[n-1] != "[DONE]" {
		t.Fatalf("the stream does not end in [DONE]: %q", data)
	}
	var r reply
	for _, d := range data[:len(data)-1] {
		var e envelope
		if err := json.Unmarshal([]byte(d), &e); err != nil {
			t.Fatalf("%v in %s", err, d)
		}
		r.Model, r.ID = e.Model, e.ID
		if e.Usage != nil {
			r.Usage = *e.Usage
		}
		for _, c := range e.Choices {
			if c.Delta.Role == "" {
				r.Chunks++
			}
			r.add(c, c.Text+c.Delta.Content, toolText(c.Delta.Tools))
		}
	}
	return r
}

func say(text string, fields ...string) string {
	b, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	body := `{"model":"emulator-test","messages":[{"role":"user","content":` + string(b) + `}]}`
	for _, f := range fields {
		body = withField(body, f)
	}
	return body
}

func TestAStreamAddsUpToTheWholeAnswer(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	weather := `"tools":[{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"},"unit":{"enum":["C","F"]},"days":{"type":"integer"},"hourly":{"type":"boolean"},"at":{"type":"array","items":{"type":"number"}}}}}}]`
	rows := []struct{ name, path, body string }{
		{"chat", chat, say("Hello")},
		{"three choices", chat, say("Hello", `"n":3`)},
		{"cut by max_tokens", chat, say("Hello", `"max_tokens":5`)},
		{"cut by max_completion_tokens, which beats max_tokens", chat, say("Hello", `"max_completion_tokens":5,"max_tokens":9`)},
		{"at least and at most", chat, say("Hello", `"min_tokens":300,"max_tokens":400`)},
		{"without an end", chat, say("Hello", `"ignore_eos":true,"max_tokens":700`)},
		{"a stop string", chat, say("Hello", `"stop":["e "]`)},
		{"a stop string across tokens, kept", chat, say("Hello", `"stop":" a","include_stop_str_in_output":true`)},
		{"logprobs", chat, say("Hello", `"logprobs":true,"top_logprobs":2,"max_tokens":4`)},
		{"a required tool", chat, say("Rain?", weather, `"tool_choice":"required"`)},
		{"a named tool", chat, say("Rain?", weather, `"tool_choice":{"type":"function","function":{"name":"weather"}}`)},
		{"a tool left to choice", chat, say("Rain?", weather, `"tool_choice":"auto"`)},
		{"json", chat, say("Rain?", `"response_format":{"type":"json_object"}`)},
		{"a schema", chat, say("Rain?", `"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object","properties":{"a":{"type":"integer","minimum":5}}}}}`)},
		{"an image", chat, `{"model":"emulator-test","messages":[{"role":"user","content":[{"type":"text","text":"what?"},{"type":"image_url","image_url":{"url":"data:x"}}]}]}`},
		{"completion", completion, `{"model":"emulator-test","prompt":"Once","max_tokens":30}`},
		{"completion with the default limit", completion, `{"model":"emulator-test","prompt":"Once"}`},
		{"completion of two prompts, twice each", completion, `{"model":"emulator-test","prompt":["Once","Twice"],"max_tokens":30,"n":2}`},
		{"completion of token ids", completion, `{"model":"emulator-test","prompt":[1,2,3],"max_tokens":30}`},
		{"completion with its prompt", completion, `{"model":"emulator-test","prompt":"Once \"","max_tokens":30,"echo":true,"logprobs":1}`},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			w, st := whole(t, s, row.path, row.body), streamed(t, s, row.path, row.body)
			if st.Chunks != st.Usage.Completion {
				t.Errorf("%d chunks for %d tokens", st.Chunks, st.Usage.Completion)
			}
			w.ID, st.ID, st.Chunks = "", "", 0
			if diff := cmp.Diff(w, st); diff != "" {
				t.Errorf("whole against streamed:\n%s", diff)
			}
			if w.Usage.Total != w.Usage.Prompt+w.Usage.Completion || w.Usage.Prompt == 0 || w.Usage.Completion == 0 {
				t.Errorf("usage %+v", w.Usage)
			}
		})
	}
}

func TestAnswersAreAsAsked(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	long := whole(t, s, chat, say("Hi", `"ignore_eos":true,"max_tokens":200`))
	if long.Usage.Completion != 200 || long.Finish[0] != "length" {
		t.Errorf("ignore_eos gave %d tokens, %s", long.Usage.Completion, long.Finish)
	}
	short := whole(t, s, chat, say("Hi", `"max_tokens":1`))
	if short.Usage.Completion != 1 || short.Finish[0] != "length" || !strings.HasPrefix(long.Text[0], short.Text[0]) {
		t.Errorf("max_tokens 1 gave %q (%d tokens, %s), which should begin %q", short.Text, short.Usage.Completion, short.Finish, long.Text[0])
	}
	natural := whole(t, s, chat, say("Hi"))
	if natural.Finish[0] != "stop" {
		t.Errorf("a free answer ends by %q", natural.Finish)
	}
	if atLeast := whole(t, s, chat, say("Hi", `"min_tokens":1000`)); atLeast.Usage.Completion != 1000 || atLeast.Finish[0] != "stop" {
		t.Errorf("min_tokens 1000 gave %d tokens, %s", atLeast.Usage.Completion, atLeast.Finish)
	}
	word := strings.Fields(long.Text[0])[3]
	stopped := whole(t, s, chat, say("Hi", `"ignore_eos":true,"max_tokens":200,"stop":["never said","`+word+`"]`))
	if before, _, _ := strings.Cut(long.Text[0], word); stopped.Text[0] != before || stopped.Finish[0] != "stop" || stopped.Stop[0] != word {
		t.Errorf("stopped at %q: %q, %s, %v", word, stopped.Text, stopped.Finish, stopped.Stop)
	}
	fixed := whole(t, s, chat, say("Hi [[emulator:tokens=20]]"))
	if fixed.Usage.Completion != 20 || fixed.Finish[0] != "stop" {
		t.Errorf("tokens=20 gave %d, %s", fixed.Usage.Completion, fixed.Finish)
	}
	choices := whole(t, s, chat, say("Hi", `"n":2`))
	if choices.Text[0] == choices.Text[1] || choices.Text[0] != natural.Text[0] {
		t.Error("choices do not differ, or the first is not that of one choice")
	}
	call := whole(t, s, chat, say("Hi", `"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"string"}}}}}],"tool_choice":"required"`))
	arguments, ok := strings.CutPrefix(call.Tools[0], "f ")
	if !ok || !json.Valid([]byte(arguments)) || call.Finish[0] != "tool_calls" {
		t.Errorf("a required call gave %q, %s", call.Tools, call.Finish)
	}
}

func TestTheSameBodyGivesTheSameAnswerOnAnyEngine(t *testing.T) {
	t.Parallel()
	a, b := emulatortest.Start(t, emulator.Config{Speed: 100}), emulatortest.Start(t, emulator.Config{Speed: 100, Profile: "h100-8b", Models: []string{"emulator-test"}})
	other := emulatortest.Start(t, emulator.Config{Speed: 100, Seed: 1})
	same := func(r reply) reply { r.ID = ""; return r }
	for _, text := range []string{"one", "two", "three"} {
		first := whole(t, a, chat, say(text))
		if diff := cmp.Diff(same(first), same(whole(t, b, chat, say(text)))); diff != "" {
			t.Error(diff)
		}
		again := whole(t, a, chat, withField(` { "messages" : [ {"role":"user", "content":"`+text+`"} ], "model":"emulator-test"}`, `"priority":0,"user":"x"`))
		if diff := cmp.Diff(same(first), same(again)); diff != "" {
			t.Error(diff)
		}
		if again.ID == first.ID {
			t.Error("two calls have one id")
		}
		if first.Text[0] == whole(t, other, chat, say(text)).Text[0] {
			t.Error("another seed gives the same text")
		}
		if first.Text[0] == whole(t, a, chat, say(text, `"temperature":0.5`)).Text[0] {
			t.Error("another temperature gives the same text")
		}
	}
}

func TestAPartialAnswerIsContinued(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	marshal := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	full := whole(t, s, chat, say("Tell me")).Text[0]
	fullTokens := whole(t, s, chat, say("Tell me")).Usage.Completion
	raw := whole(t, s, completion, `{"model":"emulator-test","prompt":"Once upon","max_tokens":500}`)
	for cut := 1; cut < len(full); cut += 37 { // between tokens and inside of them
		prior := strings.ToValidUTF8(full[:cut], "")
		rest := whole(t, s, chat, `{"model":"emulator-test","messages":[{"role":"user","content":"Tell me"},{"role":"assistant","content":`+marshal(prior)+`}],"continue_final_message":true,"add_generation_prompt":false}`)
		if prior+rest.Text[0] != full {
			t.Fatalf("cut at %d the rest is %q of %q", cut, rest.Text[0], full)
		}
		if rest.Finish[0] != "stop" || rest.Usage.Completion > fullTokens {
			t.Errorf("cut at %d: %s after %d tokens", cut, rest.Finish, rest.Usage.Completion)
		}
	}
	first := whole(t, s, completion, `{"model":"emulator-test","prompt":"Once upon","max_tokens":1}`)
	for _, prior := range []string{first.Text[0], raw.Text[0][:len(raw.Text[0])/2], raw.Text[0]} {
		prior = strings.ToValidUTF8(prior, "")
		rest := whole(t, s, completion, `{"model":"emulator-test","max_tokens":500,"prompt":`+marshal("Once upon"+prior)+`}`)
		if prior+rest.Text[0] != raw.Text[0] {
			t.Errorf("after %q comes %q", prior, rest.Text[0])
		}
	}
	foreign := `{"model":"emulator-test","messages":[{"role":"user","content":"Tell me"},{"role":"assistant","content":"My own words:"}],"continue_final_message":true}`
	if got := whole(t, s, chat, foreign); got.Text[0] == "" || strings.HasPrefix(full, got.Text[0]) {
		t.Errorf("a foreign beginning is continued by %q", got.Text[0])
	}
}

func TestTheWireIsVLLMs(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Speed: 100})
	resp, err := post(t.Context(), t, s, chat, say("Hi", `"max_tokens":2,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`))
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	want := `data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"emulator-test","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"usage":{"prompt_tokens":7,"total_tokens":7,"completion_tokens":0}}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"emulator-test","choices":[{"index":0,"delta":{"content":"W1"},"logprobs":null,"finish_reason":null,"token_ids":null}],"usage":{"prompt_tokens":7,"total_tokens":8,"completion_tokens":1}}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"emulator-test","choices":[{"index":0,"delta":{"content":" W2"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"emulator-test","choices":[],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}

data: [DONE]

`
	text := strings.Fields(whole(t, s, chat, say("Hi", `"max_tokens":2`)).Text[0])
	want = strings.NewReplacer("W1", text[0], "W2", text[1]).Replace(want)
	if diff := cmp.Diff(want, anonymous(string(b))); diff != "" {
		t.Error(diff)
	}

	_, got := ask(t, s, chat, say("Hi", `"max_tokens":2`))
	want = `{"id":"ID","object":"chat.completion","created":0,"model":"emulator-test","choices":[{"index":0,"message":{"role":"assistant","content":"W1 W2","refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[],"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2,"prompt_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"kv_transfer_params":null}`
	want = strings.NewReplacer("W1", text[0], "W2", text[1]).Replace(want)
	if diff := cmp.Diff(want, anonymous(got)); diff != "" {
		t.Error(diff)
	}

	_, got = ask(t, s, completion, `{"model":"emulator-test","prompt":"Hi","max_tokens":1}`)
	word := whole(t, s, completion, `{"model":"emulator-test","prompt":"Hi","max_tokens":1}`).Text[0]
	want = `{"id":"ID","object":"text_completion","created":0,"model":"emulator-test","choices":[{"index":0,"text":"` + word + `","logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null}],"service_tier":null,"system_fingerprint":null,"usage":{"prompt_tokens":1,"total_tokens":2,"completion_tokens":1,"prompt_tokens_details":null},"kv_transfer_params":null}`
	if diff := cmp.Diff(want, anonymous(got)); diff != "" {
		t.Error(diff)
	}
}

// anonymous replaces what differs from call to call.
func anonymous(s string) string {
	for _, f := range []struct{ open, shut, to string }{{`"id":"`, `"`, "ID"}, {`"created":`, ",", "0"}} {
		out, rest := "", s
		for {
			before, after, ok := strings.Cut(rest, f.open)
			if !ok {
				break
			}
			_, rest, _ = strings.Cut(after, f.shut)
			out += before + f.open + f.to + f.shut
		}
		s = out + rest
	}
	return s
}

func TestEmbeddingsAreUnitVectorsOfTheirInput(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{})
	vectors := func(body string) [][]float64 {
		status, b := ask(t, s, embedding, body)
		var e struct {
			Data []struct {
				Embedding []float64 `json:"embedding"`
			} `json:"data"`
			Usage usage `json:"usage"`
		}
		if err := json.Unmarshal([]byte(b), &e); err != nil || status != http.StatusOK || e.Usage.Prompt == 0 {
			t.Fatalf("status %d, %v: %s", status, err, b)
		}
		var out [][]float64
		for _, d := range e.Data {
			out = append(out, d.Embedding)
		}
		return out
	}
	got := vectors(`{"model":"emulator-test","input":["a","b","a"]}`)
	if len(got) != 3 || len(got[0]) != 64 || !cmp.Equal(got[0], got[2]) || cmp.Equal(got[0], got[1]) {
		t.Errorf("vectors %v", got)
	}
	sum := 0.0
	for _, x := range got[0] {
		sum += x * x
	}
	if sum < 0.999 || sum > 1.001 {
		t.Errorf("length² %v, want 1", sum)
	}
	if got := vectors(`{"model":"emulator-test","input":"a","dimensions":8}`); len(got) != 1 || len(got[0]) != 8 {
		t.Errorf("8 dimensions: %v", got)
	}
	if _, b := ask(t, s, embedding, `{"model":"emulator-test","input":"a","encoding_format":"base64"}`); !strings.Contains(b, `"embedding":"`) {
		t.Errorf("base64: %s", b)
	}
	if s.Stats().UsedBlocks != 0 {
		t.Error("an embedding keeps blocks")
	}
}

func TestBadRequestsAreRefusedInVLLMsWords(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{})
	long := strings.Repeat("word", 9000)
	rows := []struct {
		name, path, body string
		status           int
		message, param   string
	}{
		{"not JSON", chat, `{"model":`, 400, "JSON decode error", ""},
		{"not an object", chat, `[]`, 400, "valid dictionary", ""},
		{"no messages", chat, `{"model":"emulator-test"}`, 400, "'loc': ('body', 'messages'), 'msg': 'Field required'", "messages"},
		{"messages of the wrong type", chat, `{"model":"emulator-test","messages":"hi"}`, 400, "valid list", "messages"},
		{"empty messages", chat, `{"model":"emulator-test","messages":[]}`, 400, "must not be empty", "messages"},
		{"a message without role", chat, `{"model":"emulator-test","messages":[{"content":"x"}]}`, 400, "role", "messages"},
		{"max_tokens a string", chat, say("x", `"max_tokens":"5"`), 400, "valid integer", "max_tokens"},
		{"max_tokens 0", chat, say("x", `"max_tokens":0`), 400, "max_tokens must be at least 1, got 0.", "max_tokens"},
		{"stream a number", chat, say("x", `"stream":3`), 400, "valid boolean", "stream"},
		{"n 0", chat, say("x", `"n":0`), 400, "n must be at least 1", "n"},
		{"temperature below 0", chat, say("x", `"temperature":-1`), 400, "non-negative", "temperature"},
		{"stream options without a stream", chat, say("x", `"stream_options":{"include_usage":true}`), 400, "Stream options can only be defined", "stream_options"},
		{"an unknown model", chat, `{"model":"nope","messages":[{"role":"user","content":"x"}]}`, 404, "The model `nope` does not exist.", "model"},
		{"no prompt", completion, `{"model":"emulator-test"}`, 400, "Field required", "prompt"},
		{"a prompt of the wrong type", completion, `{"model":"emulator-test","prompt":{}}`, 400, "valid string", "prompt"},
		{"no input", embedding, `{"model":"emulator-test"}`, 400, "Field required", "input"},
		{
			"a prompt longer than the context", chat, say(long), 400,
			"This model's maximum context length is 8192 tokens. However, you requested 0 output tokens and your prompt contains at least 9006 input tokens, for a total of at least 9006 tokens.", "input_tokens",
		},
		{"prompt and answer longer than the context", chat, say("x", `"max_tokens":8190`), 400, "you requested 8190 output tokens and your prompt contains at least 7 input tokens", "input_tokens"},
		{"an answer beyond all bounds", chat, say("x", `"max_tokens":9223372036854775807`), 400, "you requested 9223372036854775807 output tokens", "input_tokens"},
		{"a required tool without tools", chat, say("x", `"tool_choice":"required"`), 400, "`tools` must be set", "tool_choice"},
		{"a marker misspelt", chat, say("[[emulator:sttaus=500]]"), 400, "sttaus", ""},
		{"no such route", "/v1/nothing", `{}`, 404, "Not Found", ""},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			status, b := ask(t, s, row.path, row.body)
			var e struct {
				Error struct {
					Message string  `json:"message"`
					Type    string  `json:"type"`
					Param   *string `json:"param"`
					Code    int     `json:"code"`
				} `json:"error"`
			}
			if err := json.Unmarshal([]byte(b), &e); err != nil {
				t.Fatalf("%v in %s", err, b)
			}
			param := ""
			if e.Error.Param != nil {
				param = *e.Error.Param
			}
			if status != row.status || e.Error.Code != status || e.Error.Type == "" || !strings.Contains(e.Error.Message, row.message) || param != row.param {
				t.Errorf("status %d: %s", status, b)
			}
		})
	}
	if status, _ := get(t, s, chat); status != http.StatusMethodNotAllowed {
		t.Errorf("GET of a completion: %d", status)
	}
}

func TestItSaysWhatItIs(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{Models: []string{"a", `b"`}, MaxModelLen: 1000})
	if status, b := get(t, s, "/health"); status != http.StatusOK || b != "" {
		t.Errorf("health: %d %q", status, b)
	}
	if _, b := get(t, s, "/version"); b != `{"version":"`+emulator.Version+`"}` {
		t.Errorf("version: %s", b)
	}
	_, b := get(t, s, "/v1/models")
	var models struct {
		Data []struct {
			ID  string `json:"id"`
			Len int    `json:"max_model_len"`
		} `json:"data"`
	}
	if err := json.Unmarshal([]byte(b), &models); err != nil {
		t.Fatal(err)
	}
	if len(models.Data) != 2 || models.Data[1].ID != `b"` || models.Data[0].Len != 1000 {
		t.Errorf("models: %s", b)
	}
}

func TestWhileItLoadsItAnswers503(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{ColdStart: time.Hour})
	if status, _ := get(t, s, "/health"); status != http.StatusServiceUnavailable {
		t.Errorf("health: %d", status)
	}
	if status, b := ask(t, s, chat, say("x")); status != http.StatusServiceUnavailable || !strings.Contains(b, "loading") {
		t.Errorf("chat: %d %s", status, b)
	}
	if err := s.SetFaults(emulator.Faults{HealthLies: true}); err != nil {
		t.Fatal(err)
	}
	if status, _ := get(t, s, "/health"); status != http.StatusOK {
		t.Errorf("a lying health: %d", status)
	}
	soon := emulatortest.Start(t, emulator.Config{ColdStart: 30 * time.Millisecond})
	waitFor(t, "the model to be loaded", func() bool { status, _ := get(t, soon, "/health"); return status == http.StatusOK })
}

// waitFor polls for a state that only the engine's own page or counters show.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestTheKeyIsAskedFor(t *testing.T) {
	t.Parallel()
	s := emulatortest.Start(t, emulator.Config{APIKey: "k"})
	if status, b := ask(t, s, chat, say("x")); status != http.StatusUnauthorized || b != `{"error":"Unauthorized"}` {
		t.Errorf("without a key: %d %s", status, b)
	}
	if status, _ := get(t, s, "/health"); status != http.StatusOK {
		t.Errorf("health: %d", status)
	}
}

func TestRequestsAreShownByteForByte(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var seen []string
	s := emulatortest.Start(t, emulator.Config{Speed: 100, OnRequest: func(method, path string, h http.Header, body []byte) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, method+" "+path+" "+h.Get("X-Request-Id")+" "+string(body))
	}})
	body := `{ "model":"emulator-test", "seed":9007199254740993,"x":1e400,"x":"<b>&</b>","messages":[{"content":"\u0041","role":"user"}]}`
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+chat, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json; charset=utf-8")
	req.Header.Set("X-Request-Id", "job_1")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := resp.Body.Close(); err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(b, []byte(`{"id":"chatcmpl-job_1",`)) {
		t.Errorf("the answer's id is not the request's: %s", b)
	}
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff([]string{"POST " + chat + " job_1 " + body}, seen); diff != "" {
		t.Error(diff)
	}
}

func BenchmarkStream(b *testing.B) {
	s := emulatortest.Start(b, emulator.Config{Speed: 1e6})
	body := say("Hi", `"stream":true,"ignore_eos":true,"max_tokens":100`)
	client := &http.Client{}
	defer client.CloseIdleConnections()
	b.ReportAllocs()
	for b.Loop() {
		resp, err := client.Post(s.URL+chat, "application/json", strings.NewReader(body))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			b.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(100*float64(b.N)/b.Elapsed().Seconds(), "tokens/s")
}
