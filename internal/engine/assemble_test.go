package engine_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
)

// chunks returns the data of a stream's events but [DONE].
func chunks(t testing.TB, stream []byte) [][]byte {
	t.Helper()
	var all [][]byte
	for e, err := range engine.NewResponse(bytes.NewReader(stream), 0).Events() {
		if err != nil {
			t.Fatal(err)
		}
		if e.Data != nil && !e.Done {
			all = append(all, bytes.Clone(e.Data))
		}
	}
	return all
}

// add adds all chunks and returns what each says.
func add(t testing.TB, a *engine.Assembler, all ...[]byte) []engine.Chunk {
	t.Helper()
	var says []engine.Chunk
	for _, data := range all {
		kept := bytes.Clone(data)
		c, err := a.Add(kept)
		if err != nil {
			t.Fatalf("adding %s: %v", data, err)
		}
		for i := range kept { // it must not keep what it was given
			kept[i] = '#'
		}
		says = append(says, c)
	}
	return says
}

func endpointOf(path string) job.Endpoint {
	if strings.HasPrefix(filepath.Base(path), "completion") {
		return job.Completions
	}
	return job.ChatCompletions
}

// Two requests have two ids, and may fall in two seconds.
var idAndTime = regexp.MustCompile(`"id":"[a-z]+-[0-9]+"|"created":[0-9]+`)

func TestStreamsAssembleToTheAnswerNotStreamed(t *testing.T) {
	t.Parallel()
	streams, err := filepath.Glob("testdata/golden/*.sse")
	if err != nil || len(streams) == 0 {
		t.Fatal(streams, err)
	}
	for _, path := range streams {
		t.Run(filepath.Base(path), func(t *testing.T) {
			t.Parallel()
			stream, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			want, err := os.ReadFile(strings.TrimSuffix(path, ".sse") + ".json")
			if err != nil {
				t.Fatal(err)
			}
			want = bytes.TrimSpace(want)
			a := engine.NewAssembler(endpointOf(path), false)
			add(t, a, chunks(t, stream)...)
			got, err := a.Body()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(idAndTime.ReplaceAllString(string(want), "*"), idAndTime.ReplaceAllString(string(got), "*")); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(engine.UsageOf(want), a.Usage()); diff != "" {
				t.Errorf("usage (-want +got):\n%s", diff)
			}
			var answer struct {
				Choices []struct {
					Text    string
					Message struct{ Content string }
				}
			}
			if err := json.Unmarshal(want, &answer); err != nil {
				t.Fatal(err)
			}
			var texts []string
			for _, c := range answer.Choices {
				texts = append(texts, c.Text+c.Message.Content)
			}
			if diff := cmp.Diff(texts, a.Text()); diff != "" {
				t.Errorf("texts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTheThreeTails(t *testing.T) {
	t.Parallel()
	const first = `{"choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":null}]}`
	const finish = `{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`
	const usage = `"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":2},"completion_tokens_details":{"reasoning_tokens":1}}`
	counted := &job.Usage{PromptTokens: 3, CompletionTokens: 1, TotalTokens: 4, CachedTokens: 2, ReasoningTokens: 1}
	shown, token := engine.Chunk{Show: true}, engine.Chunk{Show: true, Token: true}
	for name, tc := range map[string]struct {
		hide   bool
		chunks []string
		want   []engine.Chunk
		usage  *job.Usage
	}{
		"separate finish chunk":        {false, []string{first, finish}, []engine.Chunk{token, shown}, nil},
		"finish merged with content":   {false, []string{strings.Replace(first, "null", `"stop"`, 1)}, []engine.Chunk{token}, nil},
		"usage alone, asked for":       {false, []string{first, finish, `{"choices":[],` + usage + `}`}, []engine.Chunk{token, shown, shown}, counted},
		"usage alone, not asked for":   {true, []string{first, finish, `{"choices":[],` + usage + `}`}, []engine.Chunk{token, shown, {}}, counted},
		"usage without choices at all": {true, []string{first, finish, `{"choices":null,` + usage + `}`, `{` + usage + `}`}, []engine.Chunk{token, shown, {}, {}}, counted},
		"usage in the finish chunk":    {true, []string{first, strings.TrimSuffix(finish, "}") + "," + usage + "}"}, []engine.Chunk{token, shown}, counted},
		"usage null, not asked for":    {true, []string{`{"choices":[],"usage":null}`, strings.TrimSuffix(first, "}") + `,"usage":null}`}, []engine.Chunk{shown, token}, nil},
		"usage of zeros":               {true, []string{strings.TrimSuffix(first, "}") + `,"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}`}, []engine.Chunk{token}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := engine.NewAssembler(job.ChatCompletions, tc.hide)
			var all [][]byte
			for _, c := range tc.chunks {
				all = append(all, []byte(c))
			}
			var says []engine.Chunk
			for _, c := range add(t, a, all...) {
				says = append(says, engine.Chunk{Show: c.Show, Token: c.Token})
			}
			if diff := cmp.Diff(tc.want, says); diff != "" {
				t.Errorf("chunks (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.usage, a.Usage()); diff != "" {
				t.Errorf("usage (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff([]string{"Hi"}, a.Text()); diff != "" {
				t.Errorf("text (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhatCountsAsAToken(t *testing.T) {
	t.Parallel()
	for delta, want := range map[string]bool{
		`{"content":"a"}`: true, `{"reasoning_content":"a"}`: true, `{"refusal":"a"}`: true, `{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}`: true,
		`{"audio":{"data":"QQ=="}}`: true, `{"role":"assistant","content":""}`: false, `{"role":"assistant","content":null,"tool_calls":[]}`: false, `{}`: false, `null`: false,
	} {
		got := add(t, engine.NewAssembler(job.ChatCompletions, false), []byte(`{"choices":[{"index":0,"delta":`+delta+`}]}`))
		if got[0].Token != want {
			t.Errorf("%s: %t", delta, got[0].Token)
		}
	}
	for text, want := range map[string]bool{`"a"`: true, `""`: false} {
		got := add(t, engine.NewAssembler(job.Completions, false), []byte(`{"choices":[{"index":0,"text":`+text+`}]}`))
		if got[0].Token != want {
			t.Errorf("%s: %t", text, got[0].Token)
		}
	}
}

// TestPartialIsTextAndNothingElse: what can be gone on with.
func TestPartialIsTextAndNothingElse(t *testing.T) {
	t.Parallel()
	const head = `{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}]}`
	for name, c := range map[string]struct {
		endpoint job.Endpoint
		chunks   []string
		text     string
		ok, done bool
	}{
		"nothing":        {job.ChatCompletions, nil, "", true, false},
		"a role":         {job.ChatCompletions, []string{head}, "", true, false},
		"text":           {job.ChatCompletions, []string{head, `{"choices":[{"delta":{"content":"a\"","tool_calls":[],"reasoning":null,"refusal":""},"finish_reason":null,"token_ids":null}]}`, `{"choices":[{"delta":{"content":"\u6771"}}]}`}, `a"東`, true, false},
		"an end":         {job.ChatCompletions, []string{head, `{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop","stop_reason":"x"}]}`}, "a", true, true},
		"an empty end":   {job.ChatCompletions, []string{head, `{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":""}]}`}, "a", true, false},
		"a completion":   {job.Completions, []string{`{"choices":[{"index":0,"text":" a","logprobs":null}]}`, `{"choices":[{"index":0,"text":" b"}]}`}, " a b", true, false},
		"reasoning":      {job.ChatCompletions, []string{head, `{"choices":[{"delta":{"reasoning_content":"hm"}}]}`, `{"choices":[{"delta":{"content":"a"}}]}`}, "", false, false},
		"a tool call":    {job.ChatCompletions, []string{head, `{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f"}}]}}]}`}, "", false, false},
		"logprobs":       {job.ChatCompletions, []string{`{"choices":[{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a"}]}}]}`}, "", false, false},
		"token ids":      {job.ChatCompletions, []string{`{"choices":[{"delta":{"content":"a"},"token_ids":[1]}]}`}, "", false, false},
		"two choices":    {job.ChatCompletions, []string{head, `{"choices":[{"index":1,"delta":{"content":"a"}}]}`}, "", false, false},
		"one of two end": {job.ChatCompletions, []string{`{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`, `{"choices":[{"index":1,"delta":{"content":"a"}}]}`}, "", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := engine.NewAssembler(c.endpoint, false)
			for _, data := range c.chunks {
				add(t, a, []byte(data))
			}
			if text, ok := a.Partial(); text != c.text || ok != c.ok || a.Finished(1) != c.done {
				t.Errorf("%q, %v, finished %v", text, ok, a.Finished(1))
			}
		})
	}
}

func TestAChunkTellsWhatItHas(t *testing.T) {
	t.Parallel()
	for data, want := range map[string]engine.Chunk{
		`{"choices":[{"delta":{"role":"assistant","content":""}}]}`:                     {Show: true, Choice: true},
		`{"choices":[{"delta":{"content":""}}]}`:                                        {Show: true, Choice: true, Empty: true},
		`{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}`: {Show: true, Choice: true, Empty: true, Usage: true},
		`{"choices":[{"delta":{"role":"assistant","content":"a"}}],"usage":null}`:       {Show: true, Choice: true, Token: true},
		`{"choices":[{"delta":{"content":"a"}},{"index":1,"delta":{"content":""}}]}`:    {Show: true, Choice: true, Token: true},
		`{"choices":[],"usage":{"prompt_tokens":1}}`:                                    {Usage: true},
	} {
		if diff := cmp.Diff([]engine.Chunk{want}, add(t, engine.NewAssembler(job.ChatCompletions, true), []byte(data))); diff != "" {
			t.Errorf("%s: %s", data, diff)
		}
	}
}

func TestAnErrorInTheStreamIsReadInEveryForm(t *testing.T) {
	t.Parallel()
	param := "prompt"
	code := job.Code("context_length_exceeded")
	engineError := job.CodeEngineError
	for chunk, want := range map[string]*job.Error{
		`{"error":{"message":"too long","type":"invalid_request_error","param":"prompt","code":"context_length_exceeded"}}`: {Message: "too long", Type: "invalid_request_error", Param: &param, Code: &code},
		`{"error":{"message":"CUDA","type":"InternalServerError","param":null,"code":500}}`:                                 {Message: "CUDA", Type: "InternalServerError", Code: &engineError},
		`{"object":"error","message":"old","type":"","param":null,"code":50001}`:                                            {Message: "old", Type: job.TypeServer, Code: &engineError},
		`{"error":"out of memory","error_type":"generation"}`:                                                               {Message: "out of memory", Type: job.TypeServer, Code: &engineError},
		`{"error":{"message":{"odd":1}}}`:                                                                                   {Message: "the engine reported an error without a message", Type: job.TypeServer, Code: &engineError},
		`{"error":null,"choices":[]}`:                                                                                       nil,
		`{"error":{},"choices":[]}`:                                                                                         nil,
		`{"choices":[{"index":0,"delta":{"content":"\"error\""}}]}`:                                                         nil,
	} {
		a := engine.NewAssembler(job.ChatCompletions, false)
		add(t, a, []byte(`{"choices":[{"index":0,"delta":{"content":"part"}}]}`))
		got := add(t, a, []byte(chunk))[0]
		if diff := cmp.Diff(want, got.Error); diff != "" {
			t.Errorf("%s (-want +got):\n%s", chunk, diff)
		}
		if got.Show != (want == nil) {
			t.Errorf("%s: shown %t", chunk, got.Show)
		}
		if body, err := a.Body(); err != nil || bytes.Contains(body, []byte("too long")) {
			t.Errorf("%s: the answer so far is %s, %v", chunk, body, err)
		}
	}
}

func TestABrokenChunkIsNeverSkipped(t *testing.T) {
	t.Parallel()
	for _, chunk := range []string{"", "{", `{"choices":[{"index":0,"delta":{"content":"a"}}]`, "5", `"text"`, "[]", "null", `{"choices":[5]}`, `{"choices":[{"index":65536}]}`, "{} {}"} {
		if _, err := engine.NewAssembler(job.ChatCompletions, false).Add([]byte(chunk)); !errors.Is(err, engine.ErrBadStream) {
			t.Errorf("%q: %v; want ErrBadStream", chunk, err)
		}
	}
	// And as it comes: the events before it are there, and what follows is not taken for a whole answer.
	stream := strings.NewReader("data: {\"choices\":[]}\n\ndata: {\"choices\":\n\n" + end)
	a := engine.NewAssembler(job.ChatCompletions, false)
	var failed error
	for e, err := range engine.NewResponse(stream, 0).Events() {
		if err == nil && !e.Done {
			_, err = a.Add(e.Data)
		}
		if err != nil {
			failed = err
			break
		}
	}
	if !errors.Is(failed, engine.ErrBadStream) {
		t.Errorf("%v; want ErrBadStream", failed)
	}
}

func TestAnAnswerWithoutAChunkIsNone(t *testing.T) {
	t.Parallel()
	a := engine.NewAssembler(job.ChatCompletions, false)
	if body, err := a.Body(); !errors.Is(err, engine.ErrBadStream) {
		t.Errorf("%s, %v", body, err)
	}
	if a.Text() != nil || a.Usage() != nil {
		t.Errorf("%q, %v", a.Text(), a.Usage())
	}
}

func TestTheLeastAnswerHasWhatClientsRead(t *testing.T) {
	t.Parallel()
	for endpoint, tc := range map[job.Endpoint]struct{ chunk, want string }{
		job.ChatCompletions: {`{"choices":[{"finish_reason":"stop"}]}`, `{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":null},"finish_reason":"stop"}]}`},
		job.Completions:     {` { "choices" : [ { "text" : "a" } , { "index" : 1 , "text" : "b" } ] } `, `{"object":"text_completion","choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}]}`},
	} {
		a := engine.NewAssembler(endpoint, false)
		add(t, a, []byte(tc.chunk))
		if got, err := a.Body(); err != nil || string(got) != tc.want {
			t.Errorf("%s, %v; want %s", got, err, tc.want)
		}
	}
}

func TestAnAssembledAnswerIsBounded(t *testing.T) {
	t.Parallel()
	chunk := []byte(`{"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 1000) + `"}}]}`)
	a := engine.NewAssembler(job.ChatCompletions, false)
	a.MaxAnswer = 10_000
	for range 9 {
		add(t, a, chunk)
	}
	if _, err := a.Add(chunk); !errors.Is(err, engine.ErrTooLarge) {
		t.Errorf("%v; want ErrTooLarge", err)
	}
	// What is replaced again and again does not count again.
	b := engine.NewAssembler(job.ChatCompletions, false)
	b.MaxAnswer = 10_000
	for range 100 {
		add(t, b, []byte(`{"timings":"`+strings.Repeat("x", 1000)+`","choices":[{"index":0,"stop_reason":"`+strings.Repeat("x", 1000)+`"}]}`))
	}
}

func TestUsageOfAWholeAnswer(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]*job.Usage{
		`{"data":[],"usage":{"prompt_tokens":5,"total_tokens":5}}`:   {PromptTokens: 5, TotalTokens: 5},
		`{"usage":{"prompt_tokens":9007199254740993}}`:               {PromptTokens: 9007199254740993},
		`{"usage":{"prompt_tokens":1,"prompt_tokens_details":null}}`: {PromptTokens: 1},
		`{"usage":{"prompt_tokens":-5,"total_tokens":5}}`:            nil,
		`{"usage":{"prompt_tokens":"5"}}`:                            nil,
		`{"usage":null}`:                                             nil, `{}`: nil, `[]`: nil, `{`: nil, ``: nil,
	} {
		if diff := cmp.Diff(want, engine.UsageOf([]byte(body))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", body, diff)
		}
	}
}

func FuzzAssembler(f *testing.F) {
	golden, err := filepath.Glob("testdata/golden/*.sse")
	if err != nil || len(golden) == 0 {
		f.Fatal(golden, err)
	}
	for _, path := range golden {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		all := chunks(f, data)
		f.Add(bytes.Join(all, []byte("\n")), endpointOf(path) == job.Completions)
	}
	f.Add([]byte(`{"choices":[{"delta":{"a":[{"index":1},5,{"b":["\ud83d"]}],"b":"x"}}]}`+"\n"+`{"choices":[{"delta":{"a":{"index":1},"b":[1]}},{"index":3,"delta":"x"}],"":1}`), false)
	f.Fuzz(func(t *testing.T, lines []byte, completion bool) {
		endpoint := job.ChatCompletions
		if completion {
			endpoint = job.Completions
		}
		a := engine.NewAssembler(endpoint, true)
		a.MaxAnswer = 1 << 20
		for line := range bytes.SplitSeq(lines, []byte("\n")) {
			if _, err := a.Add(line); err != nil && !errors.Is(err, engine.ErrBadStream) && !errors.Is(err, engine.ErrTooLarge) {
				t.Fatal(err)
			}
		}
		a.Text()
		a.Usage()
		if body, err := a.Body(); err == nil && !json.Valid(body) {
			t.Errorf("not JSON: %s", body)
		}
	})
}

func BenchmarkAssembler(b *testing.B) {
	chunk := []byte(`{"id":"chatcmpl-488","object":"chat.completion.chunk","created":1796020416,"model":"tiny","choices":[{"index":0,"delta":{"content":" year"},"finish_reason":null}]}`)
	b.SetBytes(int64(1000 * len(chunk)))
	b.ReportAllocs()
	for b.Loop() { // an answer of 1,000 chunks
		a := engine.NewAssembler(job.ChatCompletions, true)
		for range 1000 {
			if _, err := a.Add(chunk); err != nil {
				b.Fatal(err)
			}
		}
		if _, err := a.Body(); err != nil {
			b.Fatal(err)
		}
	}
}
