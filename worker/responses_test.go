package worker_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/responses"
)

func asResponse(j *job.Job) { j.Endpoint = job.Responses }

// ask is a request of /v1/responses, with more members before its input.
func ask(text, more string) string {
	return fmt.Sprintf(`{"model":%q,%s"input":%q}`, model, more, text)
}

// answered is what tests look at in a response object.
type answered struct {
	ID, Object, Status string
	CreatedAt          int64 `json:"created_at"`
	Background         bool
	Metadata           map[string]string
	Output             []struct {
		Content []struct{ Text string }
	}
	Usage struct {
		Output int `json:"output_tokens"`
	}
}

func (e *env) answered(raw []byte) answered {
	e.Helper()
	var a answered
	if err := json.Unmarshal(raw, &a); err != nil {
		e.Fatalf("%v in %s", err, raw)
	}
	return a
}

func (a answered) text() string {
	var text string
	for _, o := range a.Output {
		for _, c := range o.Content {
			text += c.Text
		}
	}
	return text
}

// bothWays runs a test beside an engine that serves /v1/responses itself, and beside one that does not.
func bothWays(t *testing.T, test func(t *testing.T, cfg emulator.Config)) {
	t.Helper()
	for name, cfg := range map[string]emulator.Config{"by the engine itself": {Responses: true}, "by a chat": {}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, cfg)
		})
	}
}

func TestResponsesAreDurableJobs(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, cfg emulator.Config) {
		e := newEnv(t, 5*time.Second)
		eng, calls := emulate(t, cfg)
		e.work(eng.URL)
		body := ask("hello [[emulator:tokens=12]]", `"background":true,"store":true,"metadata":{"a":"b"},"max_output_tokens":40,`)
		j := e.submit(e.job(body, asResponse, withEvents))
		plain := e.submit(e.job(body, asResponse))
		streamed, whole := e.answered(e.completed(j)), e.answered(e.completed(plain))
		if streamed.ID != responses.ID(j.ID) || streamed.Object != "response" || streamed.Status != "completed" || streamed.CreatedAt != int64(j.Created)/1000 || !streamed.Background ||
			streamed.Metadata["a"] != "b" || streamed.Usage.Output != 12 || streamed.text() == "" {
			t.Errorf("the response is %+v", streamed)
		}
		if whole.ID != responses.ID(plain.ID) || whole.text() != streamed.text() {
			t.Errorf("streamed %q, in one piece %q", streamed.text(), whole.text())
		}
		for _, j := range []*job.Job{j, plain} {
			if o := e.get(j).Outcome; o.StatusCode != 200 || o.ContentType != "application/json" || o.Usage == nil || o.Usage.CompletionTokens != 12 {
				t.Errorf("the outcome is %+v", o)
			}
		}
		var kinds []string
		var text string
		for _, ev := range e.events(j) {
			if ev.Kind != job.EventToken {
				continue
			}
			var said struct{ Type, Delta string }
			if err := json.Unmarshal(ev.Data, &said); err != nil {
				t.Fatal(err)
			}
			kinds, text = append(kinds, said.Type), text+said.Delta
		}
		want := []string{ // how it began and ended the job's own events say
			"response.in_progress", "response.output_item.added", "response.content_part.added", "response.output_text.delta", "response.output_text.done", "response.content_part.done",
			"response.output_item.done",
		}
		if diff := cmp.Diff(want, slices.Compact(kinds)); diff != "" || text != streamed.text() {
			t.Errorf("the events tell %q (-want +got):\n%s", text, diff)
		}
		path := "/v1/chat/completions"
		if cfg.Responses {
			path = "/v1/responses"
		}
		for _, c := range calls.list() {
			if c.path != path || strings.Contains(c.body, "background") {
				t.Errorf("the engine got %s %s", c.path, c.body)
			}
		}
	})
}

// A stream that breaks off begins anew: what one attempt said of the response another cannot go on with.
func TestBrokenResponsesBeginAnew(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, cfg emulator.Config) {
		for _, how := range []string{"reset", "error"} {
			e := newEnv(t, 5*time.Second)
			eng, calls := emulate(t, cfg)
			e.work(eng.URL)
			j := e.submit(e.job(ask("[[emulator:"+how+"-after=5,times=1]] tell me", `"max_output_tokens":9,`), asResponse, withEvents))
			got := e.answered(e.completed(j))
			if got.Usage.Output != 9 || got.Status != "incomplete" || len(calls.list()) != 2 {
				t.Errorf("%s: the response is %+v after %d calls", how, got, len(calls.list()))
			}
			if diff := cmp.Diff([]job.EventKind{job.EventToken, job.EventReset, job.EventToken, job.EventDone}, e.told(j)); diff != "" {
				t.Errorf("%s:\n%s", how, diff)
			}
		}
	})
}

func TestLiveResponsesAreTypedStreams(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, cfg emulator.Config) {
		e := newEnv(t, 5*time.Second)
		eng, calls := emulate(t, cfg)
		e.work(eng.URL)
		d := e.desk()
		m := e.job(ask("[[emulator:tokens=5]] hello", `"stream":true,`), asResponse, liveStream)
		head, body, end := e.collect(e.call(d, m))
		if head.StatusCode != 200 || !strings.HasPrefix(head.ContentType, "text/event-stream") || end.State != job.Completed || end.Usage == nil || end.Usage.CompletionTokens != 5 {
			t.Errorf("head %+v, end %+v", head, end)
		}
		if !strings.HasPrefix(body, "event: response.created\ndata: {") || strings.Contains(body, "[DONE]") || !strings.Contains(body, `"id":"`+responses.ID(m.Job.ID)+`"`) ||
			strings.Count(body, "event: ") != strings.Count(body, "\n\n") || strings.Count(body, "event: response.completed\n") != 1 {
			t.Errorf("the stream is\n%s", body)
		}
		plain := e.job(ask("[[emulator:tokens=5]] hello", ""), asResponse, live)
		_, body, end = e.collect(e.call(d, plain))
		if got := e.answered([]byte(body)); end.State != job.Completed || got.Status != "completed" || got.ID != responses.ID(plain.Job.ID) {
			t.Errorf("end %+v, the response is %s", end, body)
		}
		// One that broke off after its client has seen some cannot be gone on with.
		before := len(calls.list())
		_, _, end = e.collect(e.call(d, e.job(ask("[[emulator:tokens=12,reset-after=5]] tell me", `"stream":true,`), asResponse, liveStream)))
		if end.State != job.Failed || end.Error.CodeOf() != job.CodeEngineError || len(calls.list()) != before+1 {
			t.Errorf("broken off, it ends with %+v after %d calls", end, len(calls.list())-before)
		}
	})
}

func TestWhatAChatCannotDoIsABadRequest(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	e.work(eng.URL)
	for body, param := range map[string]string{
		ask("hello", `"tools":[{"type":"web_search"}],`):                        "tools",
		ask("hello", `"previous_response_id":"resp_1",`):                        "previous_response_id",
		`{"model":"` + string(model) + `","input":[{"type":"item_reference"}]}`: "input[0].type",
	} {
		rec := e.await(e.submit(e.job(body, asResponse, withEvents)))
		var answer struct{ Error job.Error }
		if err := json.Unmarshal(e.outcome(&rec.Job).Result, &answer); err != nil {
			t.Fatal(err)
		}
		if rec.State != job.Failed || rec.Outcome.StatusCode != 400 || answer.Error.CodeOf() != job.CodeUnsupportedParameter || answer.Error.Param == nil || *answer.Error.Param != param {
			t.Errorf("%s: %+v %+v", body, rec.Outcome, answer.Error)
		}
	}
	if n := len(calls.list()); n != 0 {
		t.Errorf("the engine was called %d times", n)
	}
}

func TestHeartbeatsTellWhichModelsAnswerByChats(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, cfg emulator.Config) {
		e := newEnv(t, 5*time.Second)
		eng, _ := emulate(t, cfg)
		p := e.work(eng.URL)
		e.until("the worker has found out", func() bool {
			_, known := p.engine.KnownResponses(model)
			return known
		})
		var only []job.Model
		e.until("its heartbeat is heard", func() bool {
			all := e.cluster.Workers(model)
			if len(all) == 1 {
				only = all[0].Worker.ChatOnly
			}
			return len(all) == 1 && (cfg.Responses || len(only) > 0)
		})
		if want := map[bool]int{true: 0, false: 1}[cfg.Responses]; len(only) != want {
			t.Errorf("it tells %v", only)
		}
	})
}

// An engine may give a response in one piece though a stream was asked, or fail in its own words.
func TestNativeEnginesMayAnswerOtherwise(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	const object = `{"object":"response","id":"resp_x","status":"completed","output":[{"type":"message","content":[{"type":"output_text","text":"x"}]}],"usage":{"input_tokens":1,"output_tokens":2,"total_tokens":3}}`
	eng := play(t, reply(200, object))
	eng.responds = reply(200, object)
	e.work(eng.URL, generic)
	d := e.desk()
	m := e.job(ask("hello", `"stream":true,`), asResponse, liveStream)
	_, body, end := e.collect(e.call(d, m))
	if end.State != job.Completed || end.Usage == nil || end.Usage.TotalTokens != 3 || !strings.HasPrefix(body, "event: response.created\n") || strings.Count(body, "event: response.completed\n") != 1 {
		t.Errorf("end %+v, the stream is\n%s", end, body)
	}
	for reason, answer := range map[string]http.HandlerFunc{
		"a failed response":       reply(200, `{"object":"response","status":"failed","error":{"code":"server_error","message":"out of memory"},"output":[]}`),
		"no response":             reply(200, `{"object":"chat.completion","choices":[]}`),
		"a stream that fails":     stream(`{"type":"response.failed","response":{"object":"response","status":"failed","error":{"message":"out of memory"}}}`),
		"a stream without an end": stream(`{"type":"response.in_progress","response":{"object":"response"}}`),
		"no events":               stream(`{"choices":[]}`),
	} {
		eng.then(answer)
		rec := e.await(e.submit(e.job(ask("hello", ""), asResponse, withEvents)))
		if rec.State != job.Failed || rec.Outcome.Error.CodeOf() != job.CodeEngineError || len(rec.Outcome.Attempts) != 5 {
			t.Errorf("%s: the job is %s, error %v, %d attempts", reason, rec.State, rec.Outcome.Error, len(rec.Outcome.Attempts))
		}
	}
}
