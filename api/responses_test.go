package api_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/responses"
)

// ask is a request of /v1/responses.
func ask(more string) string { return fmt.Sprintf(`{"model":%q,"input":"hi"%s}`, model, more) }

const inBackground = `,"background":true`

// respond is the reply of a worker whose engine says two words.
func respond(j *job.Job, _ []byte) reply {
	return reply{
		status: 200, contentType: "application/json",
		chunks: []string{
			`{"type":"response.in_progress","sequence_number":1,"response":{}}`, `{"type":"response.output_text.delta","delta":"a","sequence_number":2}`,
			`{"type":"response.output_text.delta","delta":"b","sequence_number":3}`,
		},
		body: fmt.Sprintf(`{"id":%q, "object":"response","status":"completed","output":[],"instructions":"kept","usage":null}`, responses.ID(j.ID)),
	}
}

// began asks for a response in the background, and returns its id.
func (e *env) began(more string, headers ...string) string {
	e.t.Helper()
	a := e.send("POST", "/v1/responses", ask(inBackground+more), headers...)
	if a.status != http.StatusOK {
		e.t.Fatalf("creating a response: %d %s", a.status, a.body)
	}
	o := a.object(e.t)
	if o["object"] != "response" || o["background"] != true || o["store"] != true || o["model"] != string(model) {
		e.t.Errorf("the response is %s", a.body)
	}
	return o["id"].(string)
}

// polled asks for a response until it has ended.
func (e *env) polled(id string) map[string]any {
	e.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		a := e.send("GET", "/v1/responses/"+id, "", "Prefer: wait=5")
		if a.status != http.StatusOK {
			e.t.Fatalf("polling: %d %s", a.status, a.body)
		}
		o := a.object(e.t)
		if o["status"] != "queued" && o["status"] != "in_progress" {
			return o
		}
		if a.header.Get("Retry-After") == "" {
			e.t.Error("one that has not ended has no Retry-After")
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("it does not end: %s", a.body)
		}
	}
}

// typed is a stream of a response: for each event its number and type, and a delta's text.
func typed(t testing.TB, raw []byte) []string {
	t.Helper()
	var all []string
	for _, ev := range events(t, raw) {
		var e struct {
			Type, Delta string
			Sequence    int64 `json:"sequence_number"`
		}
		if err := json.Unmarshal([]byte(ev.data), &e); err != nil || e.Type != ev.kind || ev.id != 0 {
			t.Errorf("the event %+v: %v", ev, err)
		}
		all = append(all, strings.TrimSpace(fmt.Sprintf("%d %s %s", e.Sequence, strings.TrimPrefix(e.Type, "response."), e.Delta)))
	}
	return all
}

func TestBackgroundResponsesAreJobs(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(respond)
	id := e.began(`,"metadata":{"a":"b"},"instructions":"Be brief."`)
	if o := e.polled(id); o["status"] != "completed" || o["id"] != id || o["instructions"] != "kept" {
		t.Errorf("the response is %v", o)
	}
	jid := "job_" + strings.TrimPrefix(id, "resp_")
	o := e.send("GET", "/v1/jobs/"+jid, "").object(t)
	if o["priority"] != "standard" || o["endpoint"] != "/v1/responses" || o["metadata"].(map[string]any)["a"] != "b" {
		t.Errorf("the job is %v", o)
	}
	if calls := w.calledWith(job.ID(jid)); len(calls) != 1 || !bytes.Contains(calls[0], []byte(`"instructions":"Be brief."`)) {
		t.Errorf("the worker got %s", calls)
	}
	urgent := e.began("", "X-Millrace-Priority: batch")
	if o := e.send("GET", "/v1/jobs/job_"+strings.TrimPrefix(urgent, "resp_"), "").object(t); o["priority"] != "batch" {
		t.Errorf("with a priority of its own the job is %v", o)
	}
	// A retry by the client itself, and one with a key, find what is there.
	first := e.began(`,"user":"a"`, "X-Stainless-Retry-Count: 0")
	if again := e.send("POST", "/v1/responses", ask(inBackground+`,"user":"a"`), "X-Stainless-Retry-Count: 1").object(t)["id"]; again != first { // it may have ended by now
		t.Errorf("the retry is %s, the first try %s", again, first)
	}
	silent := e.began(`,"user":"a"`)
	if again := e.send("POST", "/v1/responses", ask(inBackground+`,"user":"a"`), "X-Stainless-Retry-Count: 1").object(t)["id"]; again != silent || silent == first {
		t.Errorf("the retry is %s, the first try without any word %s", again, silent)
	}
	keyed := e.send("POST", "/v1/responses", ask(inBackground), "Idempotency-Key: k").object(t)["id"]
	e.polled(keyed.(string))
	if again := e.send("POST", "/v1/responses", ask(inBackground), "Idempotency-Key: k").object(t); again["id"] != keyed || again["status"] != "completed" {
		t.Errorf("asked again it is %v", again)
	}
	e.send("POST", "/v1/responses", ask(inBackground+`,"user":"b"`), "Idempotency-Key: k").wantError(t, 409, job.CodeIdempotencyConflict, "Idempotency-Key")
}

func TestOnlyKeptResponsesAreFound(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		if j.Endpoint == job.Responses {
			return respond(j, body)
		}
		return repeat(j, body)
	})
	other := e.submit(jobBody(chat(1, ""), ""))
	e.wait(other)
	live := e.send("POST", "/v1/responses", ask(""))
	if live.status != 200 || live.object(t)["status"] != "completed" {
		t.Fatalf("a plain response is %d %s", live.status, live.body)
	}
	line := job.Job{
		ID: job.NewID(time.Now()), Tenant: job.DefaultTenant, Model: model, Endpoint: job.Responses, Class: job.Batch, Group: "batch_1", Created: e.results.Now(), Expires: e.results.Now() + 60_000,
	}
	if _, err := e.queue.Settle(t.Context(), &queue.Record{Job: line, Outcome: job.Outcome{State: job.Completed, StatusCode: 200, Finished: e.results.Now()}}); err != nil {
		t.Fatal(err)
	}
	e.send("DELETE", "/v1/jobs/"+string(line.ID), "").wantError(t, 409, job.CodeInvalidRequest, "id")
	for reason, id := range map[string]string{
		"a line of a batch": responses.ID(line.ID),
		"unknown":           responses.ID(job.NewID(time.Now())), "no id": "resp_1", "a job's id": string(other), "a job of another endpoint": responses.ID(other),
		"one that was answered on its connection": live.object(t)["id"].(string),
	} {
		for _, call := range []struct{ method, path string }{{"GET", ""}, {"GET", "?stream=true"}, {"DELETE", ""}, {"POST", "/cancel"}} {
			t.Log(reason, call)
			e.send(call.method, "/v1/responses/"+id+call.path, "").wantError(t, 404, job.CodeResponseNotFound, "id")
		}
	}
}

// What ended without an answer tells what was asked all the same, and why it failed in a code that clients know.
func TestResponsesWithoutAnAnswerKeepWhatWasAsked(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	now := make(chan reply, 1)
	e.startWorker(func(*job.Job, []byte) reply { return <-now })
	const asked = `,"instructions":"Be <brief>.","temperature":0.5,"max_output_tokens":7,"user":"u","metadata":{"a":"b"}`
	kept := func(o map[string]any) {
		t.Helper()
		if o["instructions"] != "Be <brief>." || o["temperature"] != 0.5 || o["max_output_tokens"] != 7.0 || o["user"] != "u" || o["background"] != true || o["metadata"].(map[string]any)["a"] != "b" {
			t.Errorf("the response is %v", o)
		}
	}
	for code, r := range map[string]reply{
		"server_error":        {status: 500, contentType: "application/json", body: `{"error":{"message":"boom","type":"InternalServerError","code":500}}`},
		"rate_limit_exceeded": {status: 429, contentType: "application/json", body: `{"error":{"message":"boom","code":"busy"}}`},
		"invalid_prompt":      {status: 400, contentType: "application/json", body: `{"error":{"message":"boom","code":400}}`},
		"invalid_image":       {status: 400, contentType: "application/json", body: `{"error":{"message":"boom","code":"invalid_image"}}`},
	} {
		now <- r
		o := e.polled(e.began(asked))
		if kept(o); o["status"] != "failed" || o["error"].(map[string]any)["code"] != code || o["error"].(map[string]any)["message"] != "boom" {
			t.Errorf("%s: the response is %v", code, o)
		}
	}
	id := e.began(asked + `,"truncation":"auto"`)
	e.send("POST", "/v1/responses/"+id+"/cancel", "")
	o := e.polled(id)
	if kept(o); o["status"] != "cancelled" || o["truncation"] != "auto" {
		t.Errorf("cancelled it is %v", o)
	}
	now <- reply{status: 400} // for the worker that still waits
	e.send("GET", "/v1/responses/"+responses.ID(job.NewID(time.Now().Add(-365*24*time.Hour))), "").wantError(t, http.StatusGone, job.CodeResultExpired, "")
}

func TestResponsesThatCannotBe(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	tools := `,"tools":[{"type":"function","name":"f"}]`
	w := e.startWorker(func(_ *job.Job, body []byte) reply {
		if !bytes.Contains(body, []byte(`"tools"`)) {
			return reply{status: 422, contentType: "application/json", body: `{"error":{"message":"I refuse.","type":"BadRequestError","code":422}}`}
		}
		return reply{status: 200, body: `{"object":"response","status":"completed"}`}
	})
	for _, c := range []struct {
		more  string
		code  job.Code
		param string
	}{
		{`,"previous_response_id":"resp_1"`, job.CodeUnsupportedParameter, "previous_response_id"},
		{`,"conversation":{"id":"c"}`, job.CodeUnsupportedParameter, "conversation"},
		{`,"background":1`, job.CodeInvalidType, "background"},
		{inBackground + `,"store":false`, job.CodeInvalidValue, "store"},
		{`,"metadata":{"a":1}`, job.CodeInvalidType, "metadata"},
		{`,"input":null`, job.CodeMissingParameter, "input"},
		{`,"input":7`, job.CodeInvalidType, "input"},
	} {
		e.send("POST", "/v1/responses", ask(c.more)).wantError(t, 400, c.code, c.param)
	}
	// While nobody says that it cannot be done, the worker is asked.
	if a := e.send("POST", "/v1/responses", ask(tools)); a.status != 200 {
		t.Errorf("with tools: %d %s", a.status, a.body)
	}
	if o := e.polled(e.began("")); o["status"] != "failed" || o["error"].(map[string]any)["message"] != "I refuse." || o["error"].(map[string]any)["code"] != "invalid_prompt" {
		t.Errorf("what the engine refused is %v", o)
	}
	e.send("POST", "/v1/responses", ask("")).wantError(t, 422, "422", "")
	w.stop()
	eventually(t, "the worker is gone", func() bool { return len(e.cluster.Workers(model)) == 0 })
	announce := e.announce()
	announce(workerBeat("chats", cluster.WorkerInfo{State: cluster.Ready, ChatOnly: []job.Model{model}}))
	eventually(t, "it is known", func() bool { return len(e.cluster.Workers(model)) == 1 })
	for _, more := range []string{tools, tools + inBackground} {
		e.send("POST", "/v1/responses", ask(more)).wantError(t, 400, job.CodeUnsupportedParameter, "tools")
	}
	// Once there is one that can, it is for that one.
	announce(workerBeat("does all", cluster.WorkerInfo{State: cluster.Ready}))
	eventually(t, "both are known", func() bool { return len(e.cluster.Workers(model)) == 2 })
	e.began(tools)
}

func TestBackgroundStreamsAreResumed(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{KeepAlive: 300 * time.Millisecond})
	e.known()
	// Before anybody works on it the client has its id, and hears that it waits.
	ctx, leave := context.WithCancel(t.Context())
	resp := e.open(ctx, "POST", "/v1/responses", ask(inBackground+`,"stream":true`))
	in := bufio.NewReader(resp.Body)
	head := readUntil(t, in, ": queued")
	leave()
	_ = resp.Body.Close()
	if resp.Header.Get("Content-Type") != "text/event-stream" || !strings.HasPrefix(head, "event: response.created\ndata: ") {
		t.Fatalf("the stream begins with %s", head)
	}
	var created struct {
		Response struct{ ID, Status string }
	}
	if err := json.Unmarshal([]byte(strings.TrimPrefix(strings.Split(head, "\n")[1], "data: ")), &created); err != nil || created.Response.Status != "queued" {
		t.Fatalf("%v in %s", err, head)
	}
	path := "/v1/responses/" + created.Response.ID
	each := make(chan struct{}, 3)
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := respond(j, body)
		r.each = each
		return r
	})
	each <- struct{}{}
	each <- struct{}{}
	following := e.open(t.Context(), "GET", path+"?stream=true&starting_after=2", "")
	if got := readUntil(t, bufio.NewReader(following.Body), "data: "); !strings.Contains(got, `"sequence_number":3`) {
		t.Errorf("resumed, the stream begins with %s", got)
	}
	_ = following.Body.Close()
	each <- struct{}{}
	if o := e.polled(created.Response.ID); o["status"] != "completed" {
		t.Errorf("the response is %v", o)
	}
	want := []string{"0 created", "2 in_progress", "3 output_text.delta a", "4 output_text.delta b", "5 completed"}
	for query, from := range map[string]int{"": 0, "&starting_after=0": 1, "&starting_after=1": 1, "&starting_after=2": 2, "&starting_after=4": 4, "&starting_after=5": 5} {
		a := e.send("GET", path+"?stream=true"+query, "")
		if diff := cmp.Diff(want[from:], append([]string{}, typed(t, a.body)...)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", query, diff)
		}
	}
	// A number that there never was.
	for query, body := range map[string]string{"?stream=true&starting_after=6": "", "?stream=true&starting_after=9999": "", "": `{"stream":true,"starting_after":99}`} {
		a := e.send("GET", path+query, body)
		if a.wantError(t, http.StatusBadRequest, job.CodeInvalidValue, "starting_after"); !strings.Contains(string(a.body), "the number 5") {
			t.Errorf("%s%s: %s", query, body, a.body)
		}
	}
	for body, from := range map[string]int{`{"stream":true}`: 0, `{"stream":true,"starting_after":3}`: 3} { // as openai-go asks
		if diff := cmp.Diff(want[from:], typed(t, e.send("GET", path, body).body)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", body, diff)
		}
	}
	if o := e.send("GET", path, `{"stream":false}`).object(t); o["status"] != "completed" {
		t.Errorf("not streamed it is %v", o)
	}
	e.send("GET", path+"?stream=maybe", "").wantError(t, 400, job.CodeInvalidValue, "stream")
	e.send("GET", path+"?stream=true&starting_after=x", "").wantError(t, 400, job.CodeInvalidValue, "starting_after")
	e.send("GET", path, `{"stream":true,"starting_after":-1}`).wantError(t, 400, job.CodeInvalidValue, "starting_after")
	e.send("GET", path, `[]`).wantError(t, 400, job.CodeInvalidType, "")
	large := `{"stream":false}` + strings.Repeat(" ", 64<<10)
	e.send("GET", path, large).wantError(t, 413, job.CodeRequestTooLarge, "")
	req, err := http.NewRequestWithContext(t.Context(), "GET", e.url+path, io.MultiReader(strings.NewReader(large))) // of unknown length
	if err != nil {
		t.Fatal(err)
	}
	unknown, err := client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(unknown.Body)
	_ = unknown.Body.Close()
	if err != nil {
		t.Fatal(err)
	}
	answer{unknown.StatusCode, unknown.Header, raw}.wantError(t, 413, job.CodeRequestTooLarge, "")

	// Without the events there is the answer still.
	e.redis.Wipe()
	want = []string{"0 created", "5 completed"}
	if diff := cmp.Diff(want, typed(t, e.send("GET", path+"?stream=true", "").body)); diff != "" {
		t.Errorf("after a wipe (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want[1:], typed(t, e.send("GET", path+"?stream=true&starting_after=3", "").body)); diff != "" {
		t.Errorf("after a wipe, resumed (-want +got):\n%s", diff)
	}
	// How far they went nobody knows any more: whoever knows of later ones gets the end under the next number.
	if diff := cmp.Diff([]string{"100 completed"}, typed(t, e.send("GET", path+"?stream=true&starting_after=99", "").body)); diff != "" {
		t.Errorf("after a wipe, behind its end (-want +got):\n%s", diff)
	}
}

// readUntil reads lines until one has text, and returns all of them.
func readUntil(t testing.TB, in *bufio.Reader, text string) string {
	t.Helper()
	var all strings.Builder
	for {
		line, err := in.ReadString('\n')
		all.WriteString(line)
		if err != nil {
			t.Fatalf("%v after %s", err, all.String())
		}
		if strings.Contains(line, text) {
			return all.String()
		}
	}
}

// What begins anew is told as another beginning, under the next number.
func TestResponsesThatBeginAnew(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	before := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := respond(j, body)
		r.before, r.chunks = before, nil
		return r
	})
	id := e.began("")
	jid, err := responses.JobID(id)
	if err != nil {
		t.Fatal(err)
	}
	var token job.Token
	eventually(t, "it runs", func() bool {
		rec, err := e.results.Get(t.Context(), jid)
		if err == nil {
			token = rec.Token
		}
		return err == nil && rec.State == job.Running
	})
	j := job.Job{ID: jid, Tenant: job.DefaultTenant, Model: model}
	delta := func(n int64, text string) job.Event {
		return job.Event{N: n, Token: token, Kind: job.EventToken, Data: []byte(`{"type":"response.output_text.delta","delta":"` + text + `"}`)}
	}
	if err := e.results.Append(t.Context(), &j, []job.Event{delta(2, "x"), {N: 3, Token: token, Kind: job.EventReset, Data: []byte(`{"text":""}`)}, delta(4, "a")}); err != nil {
		t.Fatal(err)
	}
	stream := e.open(t.Context(), "GET", "/v1/responses/"+id+"?stream=true", "")
	defer stream.Body.Close()
	close(before)
	raw, err := io.ReadAll(stream.Body)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"0 created", "2 output_text.delta x", "3 created", "4 output_text.delta a", "5 completed"}, typed(t, raw)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCancellingAndDeletingResponses(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.known()
	id := e.began("")
	for range 2 {
		a := e.send("POST", "/v1/responses/"+id+"/cancel", "")
		if o := a.object(t); a.status != 200 || o["status"] != "cancelled" || o["id"] != id || o["error"] != nil {
			t.Errorf("cancelled it is %d %s", a.status, a.body)
		}
	}
	if got := typed(t, e.send("GET", "/v1/responses/"+id+"?stream=true", "").body); len(got) != 2 || got[0] != "0 created" || !strings.HasSuffix(got[1], " cancelled") {
		t.Errorf("its stream is %v", got)
	}
	for _, id := range []string{id, e.began("")} { // one that has ended, and one that waits
		a := e.send("DELETE", "/v1/responses/"+id, "")
		if want := `{"id":"` + id + `","object":"response","deleted":true}`; a.status != 200 || string(a.body) != want {
			t.Errorf("deleting: %d %s", a.status, a.body)
		}
		e.send("GET", "/v1/responses/"+id, "").wantError(t, 404, job.CodeResponseNotFound, "id")
	}
}

// A stream on its own connection passes through, and a failure is an event of its kind, which OpenAI's clients take for one.
func TestLiveResponsesStream(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := respond(j, body)
		if bytes.Contains(body, []byte("fail")) {
			r.err = job.NewError(job.TypeServer, job.CodeEngineError, "The engine broke off its answer.")
		}
		return r
	})
	a := e.send("POST", "/v1/responses", ask(`,"stream":true,"user":"fail"`))
	got := events(t, a.body)
	last := got[len(got)-1]
	var told struct {
		Type, Code, Message string
		Sequence            int64 `json:"sequence_number"`
		Error               job.Error
	}
	if err := json.Unmarshal([]byte(last.data), &told); err != nil || last.kind != "error" || told.Type != "error" || told.Code != "engine_error" || told.Error.Message != told.Message || told.Sequence != 3 {
		t.Errorf("the stream ends with %+v, %v", last, err)
	}
	// With a key it is a job, streamed from its events.
	a = e.send("POST", "/v1/responses", ask(`,"stream":true`), "Idempotency-Key: s")
	if got := typed(t, a.body); got[0] != "0 created" || got[len(got)-1] != "5 completed" {
		t.Errorf("with a key the stream is %v", got)
	}
}
