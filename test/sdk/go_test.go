package sdk_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/shared"

	millrace "github.com/millrace/millrace/internal/client"
	"github.com/millrace/millrace/internal/job"
)

// keepAlive is short, so that a stream which is silent for a moment has several comments.
const keepAlive = 150 * time.Millisecond

func TestGoClient(t *testing.T) {
	t.Parallel()
	s := start(t, func(c *setup) { c.platform.API.KeepAlive = keepAlive })
	for name, test := range map[string]func(*testing.T, *server){
		"lists and finds models":                      goModels,
		"chats, streamed or not":                      goChat,
		"gets several choices":                        goChoices,
		"calls tools":                                 goTools,
		"completes":                                   goCompletion,
		"embeds":                                      goEmbeddings,
		"passes unknown fields on byte for byte":      goUnknownFields,
		"waits through a silent stream":               goSilence,
		"raises an error in mid-stream":               goMidStreamError,
		"stops the engine by leaving":                 goAbort,
		"gets a job by a header, and leaves and asks": goAsync,
		"lists jobs page by page":                     goJobs,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, s)
		})
	}
}

func goModels(t *testing.T, s *server) {
	client := s.client(t)
	var ids []string
	pager := client.Models.ListAutoPaging(soon(t))
	for pager.Next() {
		ids = append(ids, pager.Current().ID)
	}
	if err := pager.Err(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"other", model}, ids); diff != "" {
		t.Errorf("the models (-want +got):\n%s", diff)
	}
	m, err := client.Models.Get(soon(t), model)
	if err != nil {
		t.Fatal(err)
	}
	if m.ID != model || m.Object != "model" || m.OwnedBy == "" || time.Since(time.Unix(m.Created, 0)).Abs() > time.Hour {
		t.Errorf("the model is %s", m.RawJSON())
	}
}

// streamed is what came by a stream.
type streamed struct {
	whole  openai.ChatCompletion
	chunks []openai.ChatCompletionChunk
}

func collect(t *testing.T, stream *ssestream.Stream[openai.ChatCompletionChunk]) streamed {
	t.Helper()
	var acc openai.ChatCompletionAccumulator
	var got streamed
	for stream.Next() {
		chunk := stream.Current()
		if !acc.AddChunk(chunk) {
			t.Errorf("the accumulator takes no %s", chunk.RawJSON())
		}
		got.chunks = append(got.chunks, chunk)
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	got.whole = acc.ChatCompletion
	return got
}

func goChat(t *testing.T, s *server) {
	var sent []byte
	client := s.client(t, option.WithMiddleware(func(r *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		var err error
		if sent, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
		r.Body = io.NopCloser(bytes.NewReader(sent))
		return next(r)
	}))
	question := chat("Why is the sky <blue> & deep?", 12)
	whole, err := client.Chat.Completions.New(soon(t), question)
	if err != nil {
		t.Fatal(err)
	}
	c := whole.Choices[0]
	if c.Message.Content == "" || c.Message.Role != "assistant" || c.FinishReason != "length" || whole.Model != model || whole.Usage.CompletionTokens != 12 {
		t.Errorf("the answer is %s", whole.RawJSON())
	}
	if calls := s.calls("the sky"); len(calls) != 1 || !bytes.Equal(calls[0], sent) {
		t.Errorf("the client sent %s, the engine got %s", sent, calls)
	}

	plain := collect(t, client.Chat.Completions.NewStreaming(soon(t), question))
	if got := plain.whole.Choices[0].Message.Content; got != c.Message.Content {
		t.Errorf("streamed it says %q, in one piece %q", got, c.Message.Content)
	}
	for _, chunk := range plain.chunks {
		if len(chunk.Choices) == 0 {
			t.Errorf("a chunk that nobody asked for: %s", chunk.RawJSON())
		}
	}

	question.StreamOptions.IncludeUsage = openai.Bool(true)
	tailed := collect(t, client.Chat.Completions.NewStreaming(soon(t), question))
	last := tailed.chunks[len(tailed.chunks)-1]
	if len(last.Choices) != 0 || last.Usage.CompletionTokens != 12 || last.Usage.PromptTokens != whole.Usage.PromptTokens {
		t.Errorf("the usage at the end is %s", last.RawJSON())
	}
	if len(tailed.chunks) != len(plain.chunks)+1 {
		t.Errorf("%d chunks with the usage, %d without", len(tailed.chunks), len(plain.chunks))
	}
	if calls := s.calls("the sky"); !bytes.Equal(calls[2], sent) {
		t.Errorf("the client sent %s, the engine got %s", sent, calls[2])
	}
}

func goChoices(t *testing.T, s *server) {
	client := s.client(t)
	question := chat("Give me two.", 6)
	question.N = openai.Int(2)
	whole, err := client.Chat.Completions.New(soon(t), question)
	if err != nil {
		t.Fatal(err)
	}
	got := collect(t, client.Chat.Completions.NewStreaming(soon(t), question))
	if len(whole.Choices) != 2 || len(got.whole.Choices) != 2 {
		t.Fatalf("%d choices, and %d streamed", len(whole.Choices), len(got.whole.Choices))
	}
	for i := range whole.Choices {
		if a, b := whole.Choices[i].Message.Content, got.whole.Choices[i].Message.Content; a == "" || a != b {
			t.Errorf("choice %d is %q, and %q streamed", i, a, b)
		}
	}
}

func goTools(t *testing.T, s *server) {
	client := s.client(t)
	question := chat("What is the weather in Ulm?", 200)
	question.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
		Name:       "weather",
		Parameters: shared.FunctionParameters{"type": "object", "properties": map[string]any{"city": map[string]any{"type": "string"}}, "required": []string{"city"}},
	})}
	question.ToolChoice.OfAuto = openai.String("required")
	whole, err := client.Chat.Completions.New(soon(t), question)
	if err != nil {
		t.Fatal(err)
	}
	got := collect(t, client.Chat.Completions.NewStreaming(soon(t), question))
	for _, a := range []openai.ChatCompletion{*whole, got.whole} {
		calls := a.Choices[0].Message.ToolCalls
		if len(calls) != 1 || a.Choices[0].FinishReason != "tool_calls" || calls[0].ID == "" || calls[0].Function.Name != "weather" {
			t.Fatalf("the answer is %+v", a.Choices[0])
		}
		if args := decode[map[string]any](t, []byte(calls[0].Function.Arguments)); args["city"] == nil {
			t.Errorf("the arguments are %v", args)
		}
	}
}

func goCompletion(t *testing.T, s *server) {
	client := s.client(t)
	question := openai.CompletionNewParams{
		Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Once upon a time")}, MaxTokens: openai.Int(8),
	}
	whole, err := client.Completions.New(soon(t), question)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	stream := client.Completions.NewStreaming(soon(t), question)
	for stream.Next() {
		text.WriteString(stream.Current().Choices[0].Text)
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if want := whole.Choices[0].Text; want == "" || text.String() != want {
		t.Errorf("in one piece %q, streamed %q", want, text.String())
	}
}

func goEmbeddings(t *testing.T, s *server) {
	client := s.client(t)
	question := openai.EmbeddingNewParams{Model: model, Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"a mill", "a race"}}}
	floats, err := client.Embeddings.New(soon(t), question)
	if err != nil {
		t.Fatal(err)
	}
	if len(floats.Data) != 2 || len(floats.Data[0].Embedding) == 0 || floats.Usage.PromptTokens == 0 {
		t.Fatalf("the vectors are %.300s", floats.RawJSON())
	}
	question.EncodingFormat = openai.EmbeddingNewParamsEncodingFormatBase64
	var coded struct {
		Data []struct {
			Embedding string `json:"embedding"`
		} `json:"data"`
	}
	if err := client.Post(soon(t), "embeddings", question, &coded); err != nil {
		t.Fatal(err)
	}
	raw, err := base64.StdEncoding.DecodeString(coded.Data[1].Embedding)
	if err != nil {
		t.Fatal(err)
	}
	if len(raw) != 4*len(floats.Data[1].Embedding) {
		t.Fatalf("%d bytes for %d numbers", len(raw), len(floats.Data[1].Embedding))
	}
	for i, want := range floats.Data[1].Embedding {
		if got := math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:])); math.Abs(float64(got)-want) > 1e-6 {
			t.Fatalf("number %d is %v, and %v in base64", i, want, got)
		}
	}
}

func goUnknownFields(t *testing.T, s *server) {
	client := s.client(t)
	body := []byte(`{"vendor":{"big":9007199254740993,"html":"<b>&</b>","none":null,"more":1e400},"max_tokens":2, "stop":null,"model":"` + model + `",
	"messages":[{"content":"Unknown fields \u00e9.","role":"user","vendor":[1.0]}]}`)
	if _, err := client.Chat.Completions.New(soon(t), openai.ChatCompletionNewParams{}, option.WithRequestBody("application/json", body)); err != nil {
		t.Fatal(err)
	}
	if calls := s.calls("Unknown fields"); len(calls) != 1 || !bytes.Equal(calls[0], body) {
		t.Errorf("the engine got %s", calls)
	}
}

// spy keeps the bytes of an answer's body as they come.
type spy struct {
	io.ReadCloser
	seen bytes.Buffer
}

func (s *spy) Read(b []byte) (int, error) {
	n, err := s.ReadCloser.Read(b)
	s.seen.Write(b[:n])
	return n, err
}

// watched is a client whose answer's bytes can be looked at.
func watched(t *testing.T, s *server) (openai.Client, *spy) {
	t.Helper()
	seen := new(spy)
	return s.client(t, option.WithMiddleware(func(r *http.Request, next option.MiddlewareNext) (*http.Response, error) {
		resp, err := next(r)
		if err == nil {
			seen.ReadCloser = resp.Body
			resp.Body = seen
		}
		return resp, err
	})), seen
}

// goSilence streams while the engine says nothing for a moment: comments come, which the client must not take for events.
func goSilence(t *testing.T, s *server) {
	client, seen := watched(t, s)
	got := collect(t, client.Chat.Completions.NewStreaming(soon(t), chat("[[emulator:delay=600ms]] Be slow to begin.", 4)))
	if got.whole.Choices[0].Message.Content == "" {
		t.Errorf("no text came: %s", seen.seen.Bytes())
	}
	checkComments(t, seen.seen.String(), 3)

	client, seen = watched(t, s)
	got = collect(t, client.Chat.Completions.NewStreaming(soon(t), chat("[[emulator:token-delay=300ms]] Be slow to go on.", 3)))
	if got.whole.Choices[0].Message.Content == "" {
		t.Errorf("no text came: %s", seen.seen.Bytes())
	}
	checkComments(t, seen.seen.String(), 3)
}

// checkComments checks that a stream has at least n comments, and nothing that some client takes for an event without data: an id, an empty data line, or a
// comment with a blank line after it.
func checkComments(t *testing.T, stream string, n int) {
	t.Helper()
	lines := strings.Split(stream, "\n")
	comments := 0
	for i, line := range lines {
		switch {
		case strings.HasPrefix(line, ":"):
			comments++
			if lines[i+1] == "" {
				t.Errorf("a blank line after the comment %q", line)
			}
		case line != "" && !strings.HasPrefix(line, "data: "):
			t.Errorf("the line %q is neither comment nor data", line)
		}
	}
	if comments < n {
		t.Errorf("%d comments, want at least %d:\n%s", comments, n, stream)
	}
	if !strings.HasSuffix(stream, "data: [DONE]\n\n") {
		t.Errorf("the stream's end is %q", stream[max(0, len(stream)-60):])
	}
}

func goMidStreamError(t *testing.T, s *server) {
	for _, marker := range []string{"error-after=3", "reset-after=3"} {
		var resp *http.Response
		client := s.client(t)
		stream := client.Chat.Completions.NewStreaming(soon(t), chat("[[emulator:"+marker+"]] Break off.", 20), option.WithResponseInto(&resp))
		chunks := 0
		for stream.Next() {
			chunks++
		}
		err := stream.Err()
		var told *ssestream.StreamError
		if !errors.As(err, &told) || !strings.Contains(string(told.Event.Data), `"code":"engine_error"`) {
			t.Errorf("%s: after %d chunks the error is %v", marker, chunks, err)
		}
		if chunks < 2 {
			t.Errorf("%s: %d chunks came before it", marker, chunks)
		}
		if resp == nil {
			t.Fatalf("%s: no answer came", marker)
		}
		// The outcome is written after the answer's end.
		var j *millrace.Job
		eventually(t, "the job has ended", func() error {
			if j = getJob(t, &client, resp.Header.Get("X-Millrace-Job"), "1s"); !j.Status.Ended() {
				return fmt.Errorf("it is %s", j.Status)
			}
			return nil
		})
		if j.Status != job.Failed {
			t.Errorf("%s: the job is %s", marker, j.Status)
		}
	}
}

// goAbort leaves calls that the engine would go on with for ever.
func goAbort(t *testing.T, s *server) {
	client := s.client(t)
	before := s.engine.Counts().Disconnects

	ctx, leave := context.WithCancel(soon(t))
	stream := client.Chat.Completions.NewStreaming(ctx, chat("[[emulator:hang-after=3]] I leave the stream.", 100))
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	leave()
	for stream.Next() {
	}
	if err := stream.Err(); !errors.Is(err, context.Canceled) {
		t.Errorf("the stream ends with %v", err)
	}

	ctx, leave = context.WithCancel(soon(t))
	ended := make(chan error, 1)
	go func() {
		_, err := client.Chat.Completions.New(ctx, chat("[[emulator:hang]] I leave the call.", 100))
		ended <- err
	}()
	eventually(t, "the engine runs it", func() error {
		if len(s.calls("I leave the call.")) == 0 {
			return errors.New("it has not come")
		}
		return nil
	})
	leave()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the call ends with %v", err)
	}
	eventually(t, "the engine has lost both", func() error {
		if n := s.engine.Counts().Disconnects - before; n != 2 {
			return fmt.Errorf("%d disconnects", n)
		}
		return nil
	})
}

// getJob reads the job of an answer or a submit.
func getJob(t *testing.T, client *openai.Client, id string, wait string) *millrace.Job {
	t.Helper()
	var j millrace.Job
	if err := client.Get(soon(t), "jobs/"+id, nil, &j, option.WithQuery("wait", wait)); err != nil {
		t.Fatalf("job %q: %v", id, err)
	}
	return &j
}

// goAsync gets its answer as a job, by the header alone. It closes its client in between: what was accepted goes on.
func goAsync(t *testing.T, s *server) {
	question := chat("[[emulator:delay=200ms]] Answer me later.", 9)
	first := s.client(t)
	ctx, leave := context.WithCancel(soon(t))
	defer leave()
	var resp *http.Response
	var j millrace.Job
	if err := first.Post(ctx, "chat/completions", question, &j, option.WithHeader("Prefer", "respond-async"), option.WithResponseInto(&resp)); err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusAccepted || resp.Header.Get("Location") != "/v1/jobs/"+string(j.ID) || resp.Header.Get("Preference-Applied") != "respond-async" {
		t.Errorf("%s %v", resp.Status, resp.Header)
	}
	leave()

	client := s.client(t)
	done := getJob(t, &client, string(j.ID), "20s")
	for !done.Status.Ended() { // a wait ends when the status changes
		done = getJob(t, &client, string(j.ID), "20s")
	}
	if done.Status != job.Completed || done.Result == nil {
		t.Fatalf("the job is %s, error %v", done.Status, done.Error)
	}
	answer := decode[openai.ChatCompletion](t, done.Result.Body)
	direct, err := client.Chat.Completions.New(soon(t), question)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := answer.Choices[0].Message.Content, direct.Choices[0].Message.Content; want == "" || got != want {
		t.Errorf("as a job it says %q, else %q", got, want)
	}

	// With a wait the answer comes on the connection, under its own type.
	waited, err := client.Chat.Completions.New(soon(t), question, option.WithHeader("Prefer", "respond-async, wait=15"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := waited.Choices[0].Message.Content, direct.Choices[0].Message.Content; got != want {
		t.Errorf("waited for it says %q, else %q", got, want)
	}
}

// page is a page of a listing.
type page struct {
	Object  string  `json:"object"`
	FirstID *string `json:"first_id"`
	LastID  *string `json:"last_id"`
	HasMore *bool   `json:"has_more"`
	Data    []struct {
		ID      string  `json:"id"`
		Created float64 `json:"created_at"`
	} `json:"data"`
}

// goJobs lists none, one and many jobs of a session of its own.
func goJobs(t *testing.T, s *server) {
	client := s.client(t)
	list := func(after string) page {
		t.Helper()
		opts := []option.RequestOption{option.WithQuery("session", "listed"), option.WithQuery("limit", "10")}
		if after != "" {
			opts = append(opts, option.WithQuery("after", after))
		}
		var p page
		if err := client.Get(soon(t), "jobs", nil, &p, opts...); err != nil {
			t.Fatal(err)
		}
		if p.Object != "list" || p.Data == nil || p.HasMore == nil || (p.FirstID == nil) != (len(p.Data) == 0) || (p.LastID == nil) != (len(p.Data) == 0) {
			t.Errorf("the list is %+v", p)
		}
		return p
	}
	if p := list(""); len(p.Data) != 0 || *p.HasMore {
		t.Errorf("an empty list is %+v", p)
	}
	var want []string
	for i := range 25 {
		var j millrace.Job
		opts := []option.RequestOption{option.WithHeader("Prefer", "respond-async"), option.WithHeader("X-Millrace-Session", "listed")}
		if err := client.Post(soon(t), "chat/completions", chat(fmt.Sprintf("Number %d.", i), 1), &j, opts...); err != nil {
			t.Fatal(err)
		}
		want = append(want, string(j.ID))
		if i == 0 {
			if p := list(""); len(p.Data) != 1 || *p.HasMore || *p.FirstID != string(j.ID) || *p.LastID != string(j.ID) {
				t.Errorf("a list of one is %+v", p)
			}
		}
	}
	var got []string
	last := math.Inf(1)
	for after := ""; ; {
		p := list(after)
		for _, j := range p.Data {
			got = append(got, j.ID)
			if j.Created > last {
				t.Errorf("the job %s is newer than the one before", j.ID)
			}
			last = j.Created
		}
		if !*p.HasMore {
			break
		}
		after = *p.LastID
	}
	slices.Sort(want) // two of one millisecond are in any order, so only that each is there once is compared
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the jobs (-want +got):\n%s", diff)
	}
}
