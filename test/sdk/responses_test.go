package sdk_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"
)

// question asks for a response of at most tokens tokens; text may hold the emulator's markers.
func question(text string, tokens int64) responses.ResponseNewParams {
	return responses.ResponseNewParams{
		Model: model, Instructions: openai.String("Be brief."), MaxOutputTokens: openai.Int(tokens),
		Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(text)},
	}
}

func inBackground(p responses.ResponseNewParams) responses.ResponseNewParams {
	p.Background = openai.Bool(true)
	p.Metadata = shared.Metadata{"from": "a test"}
	return p
}

// TestResponses runs both official clients against an engine that serves /v1/responses itself (native), and one that does not.
func TestResponses(t *testing.T) {
	t.Parallel()
	for name, native := range map[string]bool{"by the engine itself": true, "by a chat": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, s *server) {
				for name, test := range map[string]func(*testing.T, *server, bool){
					"whole and streamed":                   goResponses,
					"in the background":                    goBackground,
					"in the background, streamed, resumed": goBackgroundStream,
					"cancelled":                            goCancelResponse,
					"deleted":                              goDeleteResponse,
					"failing":                              goFailingResponse,
					"as jobs":                              goResponseJobs,
					"by openai-node":                       nodeResponses,
				} {
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						test(t, s, native)
					})
				}
			}, func(c *setup) {
				c.engine.Responses = native
				c.platform.API.KeepAlive = keepAlive
			})
		})
	}
}

// follow reads a stream of a response to its end.
func follow(t *testing.T, stream *ssestream.Stream[responses.ResponseStreamEventUnion]) []responses.ResponseStreamEventUnion {
	t.Helper()
	var events []responses.ResponseStreamEventUnion
	for stream.Next() {
		events = append(events, stream.Current())
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if len(events) == 0 {
		t.Fatal("no event came")
	}
	for i, e := range events[1:] {
		if e.SequenceNumber <= events[i].SequenceNumber {
			t.Errorf("the event %s has the number %d, the one before %d", e.Type, e.SequenceNumber, events[i].SequenceNumber)
		}
	}
	return events
}

// types are the types of events in their order, one for each run of the same.
func types(events []responses.ResponseStreamEventUnion) []string {
	var all []string
	for _, e := range events {
		all = append(all, e.Type)
	}
	return slices.Compact(all)
}

// wholeStream are the types of a whole stream.
func wholeStream(end string) []string {
	return []string{
		"response.created", "response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_text.done", "response.content_part.done",
		"response.output_item.done", end,
	}
}

// said is the text of the deltas.
func said(events []responses.ResponseStreamEventUnion) string {
	var text strings.Builder
	for _, e := range events {
		if e.Type == "response.output_text.delta" {
			text.WriteString(e.Delta)
		}
	}
	return text.String()
}

// checkResponse checks what each whole response has.
func checkResponse(t *testing.T, r *responses.Response) {
	t.Helper()
	if !strings.HasPrefix(r.ID, "resp_") || len(r.ID) != len("resp_")+36 || r.Object != "response" || r.CreatedAt < 1e9 || r.Model != model {
		t.Errorf("the response is %s", r.RawJSON())
	}
	if len(r.Output) != 1 || r.Output[0].Type != "message" || r.Output[0].Role != "assistant" || r.OutputText() == "" {
		t.Errorf("its output is %s", r.RawJSON())
	}
	if r.Usage.InputTokens == 0 || r.Usage.OutputTokens == 0 || r.Usage.TotalTokens != r.Usage.InputTokens+r.Usage.OutputTokens {
		t.Errorf("its usage is %+v", r.Usage)
	}
}

func goResponses(t *testing.T, s *server, _ bool) {
	client := s.client(t)
	whole, err := client.Responses.New(soon(t), question("[[emulator:tokens=9]] What is a mill?", 50))
	if err != nil {
		t.Fatal(err)
	}
	checkResponse(t, whole)
	if whole.Status != "completed" || whole.Usage.OutputTokens != 9 || whole.Background {
		t.Errorf("the response is %s", whole.RawJSON())
	}
	if _, err := client.Responses.Get(soon(t), whole.ID, responses.ResponseGetParams{}); statusOf(err) != http.StatusNotFound {
		t.Errorf("a response that nobody keeps: %v", err)
	}
	watching, seen := watched(t, s)
	events := follow(t, watching.Responses.NewStreaming(soon(t), question("[[emulator:tokens=9]] What is a mill?", 50)))
	if diff := cmp.Diff(wholeStream("response.completed"), types(events)); diff != "" {
		t.Errorf("the events (-want +got):\n%s", diff)
	}
	last := events[len(events)-1].Response
	checkResponse(t, &last)
	if said(events) != whole.OutputText() || last.OutputText() != whole.OutputText() {
		t.Errorf("streamed it says %q and %q, else %q", said(events), last.OutputText(), whole.OutputText())
	}
	for _, e := range events {
		if id := e.Response.ID; id != "" && id != last.ID {
			t.Errorf("the event %s names the response %s, the last %s", e.Type, id, last.ID)
		}
	}
	if text := seen.seen.String(); strings.Contains(text, "[DONE]") || !strings.Contains(text, "event: response.created\ndata: ") {
		t.Errorf("the stream is\n%s", text)
	}
	cut := follow(t, client.Responses.NewStreaming(soon(t), question("[[emulator:tokens=9]] What is a race?", 3)))
	if last := cut[len(cut)-1]; last.Type != "response.incomplete" || last.Response.Status != "incomplete" || last.Response.IncompleteDetails.Reason != "max_output_tokens" {
		t.Errorf("an answer that was cut ends with %s", last.RawJSON())
	}
	broken := client.Responses.NewStreaming(soon(t), question("[[emulator:error-after=3]] Break off.", 20))
	for broken.Next() {
	}
	if broken.Err() == nil {
		t.Error("a stream that broke off has no error")
	}
}

// statusOf is the HTTP status of a client's error, 0 for any other.
func statusOf(err error) int {
	var told *openai.Error
	if errors.As(err, &told) {
		return told.StatusCode
	}
	return 0
}

// awaitResponse polls until the response has ended.
func awaitResponse(t *testing.T, client *openai.Client, id string) *responses.Response {
	t.Helper()
	for ctx := soon(t); ; {
		r, err := client.Responses.Get(ctx, id, responses.ResponseGetParams{}, option.WithHeader("Prefer", "wait=5"))
		if err != nil {
			t.Fatal(err)
		}
		if r.Status != "queued" && r.Status != "in_progress" {
			return r
		}
	}
}

func goBackground(t *testing.T, s *server, _ bool) {
	client := s.client(t)
	p := inBackground(question("[[emulator:delay=200ms]] [[emulator:tokens=7]] Answer me later.", 30))
	p.Temperature = openai.Float(0.5)
	first, err := client.Responses.New(soon(t), p)
	if err != nil {
		t.Fatal(err)
	}
	if (first.Status != "queued" && first.Status != "in_progress") || !first.Background || len(first.Output) != 0 || first.Temperature != 0.5 || first.Metadata["from"] != "a test" ||
		first.Instructions.OfString != "Be brief." || first.Model != model {
		t.Errorf("at first the response is %s", first.RawJSON())
	}
	last := awaitResponse(t, &client, first.ID)
	checkResponse(t, last)
	if last.ID != first.ID || last.CreatedAt != first.CreatedAt || last.Status != "completed" || !last.Background || last.Usage.OutputTokens != 7 {
		t.Errorf("at last the response is %s", last.RawJSON())
	}
	if again, err := client.Responses.Cancel(soon(t), first.ID); err != nil || again.Status != "completed" || again.OutputText() != last.OutputText() {
		t.Errorf("cancelling what has ended: %v %+v", err, again)
	}
}

func goBackgroundStream(t *testing.T, s *server, _ bool) {
	client := s.client(t)
	ctx, leave := context.WithCancel(soon(t))
	stream := client.Responses.NewStreaming(ctx, inBackground(question("[[emulator:token-delay=10ms]] [[emulator:tokens=20]] I leave the stream.", 40)))
	var begun []responses.ResponseStreamEventUnion
	for stream.Next() && len(begun) < 8 {
		begun = append(begun, stream.Current())
	}
	leave()
	_ = stream.Close()
	if len(begun) < 8 || begun[0].Type != "response.created" || begun[0].Response.Status != "queued" || begun[0].SequenceNumber != 0 {
		t.Fatalf("the stream begins with %v", types(begun))
	}
	id, after := begun[0].Response.ID, begun[len(begun)-1].SequenceNumber
	rest := follow(t, client.Responses.GetStreaming(soon(t), id, responses.ResponseGetParams{StartingAfter: openai.Int(after)}))
	joined := slices.Concat(begun, rest)
	if diff := cmp.Diff(wholeStream("response.completed"), types(joined)); diff != "" {
		t.Errorf("the events (-want +got):\n%s", diff)
	}
	last := joined[len(joined)-1].Response
	if said(joined) != last.OutputText() || last.Usage.OutputTokens != 20 || last.ID != id {
		t.Errorf("the deltas say %q, the response %s", said(joined), last.RawJSON())
	}
	raw := func(events []responses.ResponseStreamEventUnion) (all []string) {
		for _, e := range events {
			all = append(all, e.RawJSON())
		}
		return all
	}
	whole := follow(t, client.Responses.GetStreaming(soon(t), id, responses.ResponseGetParams{}))
	if first := whole[0]; first.Type != "response.created" || first.SequenceNumber != 0 || first.Response.ID != id || first.Response.Status != "queued" {
		t.Errorf("read once more, it begins with %s", first.RawJSON()) // of the request it tells what is still known
	}
	if diff := cmp.Diff(raw(joined[1:]), raw(whole[1:])); diff != "" {
		t.Errorf("read once more, the events differ (-first +again):\n%s", diff)
	}
	for _, i := range []int{0, 1, len(whole) / 2, len(whole) - 2} { // from any event the next ones come
		tail := follow(t, client.Responses.GetStreaming(soon(t), id, responses.ResponseGetParams{StartingAfter: openai.Int(whole[i].SequenceNumber)}))
		if diff := cmp.Diff(raw(whole[i+1:]), raw(tail)); diff != "" {
			t.Errorf("after event %d (-want +got):\n%s", i, diff)
		}
	}
	end := client.Responses.GetStreaming(soon(t), id, responses.ResponseGetParams{StartingAfter: openai.Int(whole[len(whole)-1].SequenceNumber)})
	if end.Next() || end.Err() != nil {
		t.Errorf("after the last event: %v %v", end.Current(), end.Err())
	}
	polled := awaitResponse(t, &client, id)
	if diff := cmp.Diff(last.RawJSON(), polled.RawJSON()); diff != "" {
		t.Errorf("polled, the response differs (-streamed +polled):\n%s", diff)
	}
}

func goCancelResponse(t *testing.T, s *server, _ bool) {
	client := s.client(t)
	stream := client.Responses.NewStreaming(soon(t), inBackground(question("[[emulator:hang-after=2]] I am cancelled.", 50)))
	id := ""
	for stream.Next() {
		if e := stream.Current(); e.Type == "response.created" {
			id = e.Response.ID
		} else if e.Type == "response.output_text.delta" {
			break
		}
	}
	for range 2 { // the second finds it cancelled
		r, err := client.Responses.Cancel(soon(t), id)
		if err != nil || r.Status != "cancelled" || r.ID != id {
			t.Fatalf("cancelling: %v %+v", err, r)
		}
	}
	last := ""
	for stream.Next() {
		last = stream.Current().Type
	}
	if stream.Err() != nil || last != "response.cancelled" {
		t.Errorf("the stream ends with %q, error %v", last, stream.Err())
	}
	if r := awaitResponse(t, &client, id); r.Status != "cancelled" {
		t.Errorf("it is %s", r.Status)
	}
}

func goDeleteResponse(t *testing.T, s *server, _ bool) {
	client := s.client(t)
	for name, text := range map[string]string{"one that runs": "[[emulator:hang-after=2]] I am deleted.", "one that has ended": "[[emulator:tokens=3]] I am deleted, too."} {
		r, err := client.Responses.New(soon(t), inBackground(question(text, 20)))
		if err != nil {
			t.Fatal(err)
		}
		if name == "one that has ended" {
			awaitResponse(t, &client, r.ID)
		}
		var deleted struct {
			ID, Object string
			Deleted    bool
		}
		if err := client.Delete(soon(t), "responses/"+r.ID, nil, &deleted); err != nil || deleted.ID != r.ID || deleted.Object != "response" || !deleted.Deleted {
			t.Errorf("%s: %v %+v", name, err, deleted)
		}
		_, err = client.Responses.Get(soon(t), r.ID, responses.ResponseGetParams{})
		checkRefusal(t, name, err, refusal{404, "invalid_request_error", "response_not_found", "id", 1})
		if err := client.Responses.Delete(soon(t), r.ID); statusOf(err) != http.StatusNotFound {
			t.Errorf("%s, deleted twice: %v", name, err)
		}
	}
}

func goFailingResponse(t *testing.T, s *server, native bool) {
	client := s.client(t)
	p := inBackground(question("Hello?", 20))
	p.Model = "no-such-model"
	_, err := client.Responses.New(soon(t), p)
	checkRefusal(t, "an unknown model", err, refusal{404, "invalid_request_error", "model_not_found", "model", 1})
	p = inBackground(question("Hello?", 20))
	p.PreviousResponseID = openai.String("resp_1")
	_, err = client.Responses.New(soon(t), p)
	checkRefusal(t, "what another response said", err, refusal{400, "invalid_request_error", "unsupported_parameter", "previous_response_id", 1})
	p = inBackground(question("Hello?", 20))
	p.Store = openai.Bool(false)
	_, err = client.Responses.New(soon(t), p)
	checkRefusal(t, "not to be stored", err, refusal{400, "invalid_request_error", "invalid_value", "store", 1})
	p = inBackground(question("Hello?", 20))
	p.Temperature = openai.Float(-1) // which only the engine minds
	r, err := client.Responses.New(soon(t), p)
	if err != nil {
		t.Fatal(err)
	}
	failed := awaitResponse(t, &client, r.ID)
	if failed.Status != "failed" || failed.Error.Message == "" || failed.Error.Code == "" {
		t.Errorf("what the engine refused is %s", failed.RawJSON())
	}
	events := follow(t, client.Responses.GetStreaming(soon(t), r.ID, responses.ResponseGetParams{}))
	if last := events[len(events)-1]; last.Type != "response.failed" || last.Response.Error.Message != failed.Error.Message {
		t.Errorf("its stream ends with %s", last.RawJSON())
	}
	tools := question("What is the weather in Ulm?", 20)
	tools.Tools = []responses.ToolUnionParam{responses.ToolParamOfFunction("weather", map[string]any{"type": "object"}, false)}
	_, err = client.Responses.New(soon(t), tools)
	if native {
		if err != nil {
			t.Errorf("tools, with an engine that knows them: %v", err)
		}
		if calls := s.calls("What is the weather in Ulm?"); len(calls) != 1 || !strings.Contains(string(calls[0]), `"tools":[{`) {
			t.Errorf("the engine got %s", calls)
		}
		return
	}
	checkRefusal(t, "tools", err, refusal{400, "invalid_request_error", "unsupported_parameter", "tools", 1})
	if calls := s.calls("What is the weather in Ulm?"); len(calls) != 0 {
		t.Errorf("the engine got %s", calls)
	}
}

// goResponseJobs asks for responses on the routes of jobs.
func goResponseJobs(t *testing.T, s *server, native bool) {
	client := s.client(t)
	var made struct{ ID string }
	body := map[string]any{
		"endpoint": "/v1/responses", "stream": false,
		"body": map[string]any{"model": model, "input": "[[emulator:tokens=4]] As a job.", "max_output_tokens": 10, "background": true},
	}
	if err := client.Post(soon(t), "jobs", body, &made); err != nil {
		t.Fatal(err)
	}
	done := getJob(t, &client, made.ID, "20s")
	for !done.Status.Ended() {
		done = getJob(t, &client, made.ID, "20s")
	}
	if done.Result == nil || done.Usage == nil || done.Usage.CompletionTokens != 4 {
		t.Fatalf("the job is %+v", done)
	}
	r := decode[responses.Response](t, done.Result.Body)
	checkResponse(t, &r)
	if want := "resp_" + strings.TrimPrefix(made.ID, "job_"); r.ID != want {
		t.Errorf("the response is %s, want %s", r.ID, want)
	}
	// With a key of its own a plain request is asked once, and answered as often as it comes.
	var first string
	for i := range 2 {
		r, err := client.Responses.New(soon(t), question("[[emulator:tokens=4]] Keyed.", 10), option.WithHeader("Idempotency-Key", fmt.Sprintf("response-%t", native)))
		if err != nil {
			t.Fatal(err)
		}
		if checkResponse(t, r); i == 0 {
			first = r.RawJSON()
		} else if r.RawJSON() != first {
			t.Errorf("asked again it is %s", r.RawJSON())
		}
	}
	if calls := s.calls("Keyed."); len(calls) != 1 {
		t.Errorf("the engine was called %d times", len(calls))
	}
}

func nodeResponses(t *testing.T, s *server, native bool) {
	got := startNode(t, "responses responseStream background backgroundStream responseCancel responseDelete responseTools", s.url, s.key).wait(t)
	type object struct {
		ID, Status string
		Text       string `json:"text"`
		Types      []string
		Deltas     string
		Resumed    []string
		Whole      []string
		Numbers    []int64
	}
	var plain, stream, background, resumed, cancelled object
	got.into(t, "responses", &plain)
	got.into(t, "responseStream", &stream)
	got.into(t, "background", &background)
	got.into(t, "backgroundStream", &resumed)
	got.into(t, "responseCancel", &cancelled)
	if plain.Status != "completed" || plain.Text == "" || plain.Text != stream.Text || plain.Text != stream.Deltas {
		t.Errorf("whole %+v, streamed %+v", plain, stream)
	}
	if diff := cmp.Diff(wholeStream("response.completed"), slices.Compact(stream.Types)); diff != "" {
		t.Errorf("the events (-want +got):\n%s", diff)
	}
	if background.Status != "completed" || background.Text == "" {
		t.Errorf("in the background: %+v", background)
	}
	if resumed.Status != "completed" || resumed.Text == "" || resumed.Text != resumed.Deltas || !slices.IsSorted(resumed.Numbers) {
		t.Errorf("resumed: %+v", resumed)
	}
	if diff := cmp.Diff(resumed.Whole, resumed.Resumed); diff != "" {
		t.Errorf("the helper that resumes saw other events (-want +got):\n%s", diff)
	}
	if cancelled.Status != "cancelled" {
		t.Errorf("cancelled: %+v", cancelled)
	}
	got.wantError(t, "responseDelete", "NotFoundError", refusal{404, "invalid_request_error", "response_not_found", "id", 1})
	if native {
		var tools object
		got.into(t, "responseTools", &tools)
	} else {
		got.wantError(t, "responseTools", "BadRequestError", refusal{400, "invalid_request_error", "unsupported_parameter", "tools", 1})
	}
}
