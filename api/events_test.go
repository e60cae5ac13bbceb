package api_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// event is one of a stream as a client reads it.
type event struct {
	id         int64
	kind, data string
}

// events reads a stream's events and drops its comments.
func events(t testing.TB, raw []byte) []event {
	t.Helper()
	var all []event
	var e event
	var some bool
	for line := range strings.Lines(string(raw)) {
		line = strings.TrimSuffix(line, "\n")
		switch {
		case line == "":
			if some {
				all = append(all, e)
			}
			e, some = event{}, false
		case strings.HasPrefix(line, ":"):
		default:
			name, value, _ := strings.Cut(line, ": ")
			some = true
			switch name {
			case "id":
				e.id, _ = strconv.ParseInt(value, 10, 64)
			case "event":
				e.kind = value
			case "data":
				if e.data != "" {
					e.data += "\n"
				}
				e.data += value
			default:
				t.Errorf("line %q", line)
			}
		}
	}
	return all
}

// withoutComments is a stream's text as clients take it.
func withoutComments(raw []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(raw)) {
		if !strings.HasPrefix(line, ":") {
			b.WriteString(line)
		}
	}
	return b.String()
}

func TestEventsTellAJobsLife(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	id := e.submit(jobBody(chat(3, ""), ""))
	a := e.send("GET", "/v1/jobs/"+string(id)+"/events", "")
	if a.header.Get("Content-Type") != "text/event-stream" || a.header.Get("Cache-Control") != "no-cache" || a.header.Get("X-Accel-Buffering") != "no" {
		t.Errorf("headers: %v", a.header)
	}
	got := events(t, a.body)
	var kinds []string
	for i, ev := range got {
		kinds = append(kinds, ev.kind)
		if ev.id != int64(i+1) {
			t.Errorf("event %d has the number %d", i, ev.id)
		}
	}
	if diff := cmp.Diff([]string{"status", "token", "token", "token", "done"}, kinds); diff != "" {
		t.Fatal(diff)
	}
	if want := repeat(nil, []byte(chat(3, ""))).chunks[1]; got[2].data != want {
		t.Errorf("the chunk is %s, want %s", got[2].data, want)
	}
	object := e.send("GET", "/v1/jobs/"+string(id), "")
	if diff := cmp.Diff(string(object.body), got[4].data); diff != "" {
		t.Errorf("done is not the job's object: %s", diff)
	}
}

func TestEventsResumeExactlyAfterEveryEvent(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.chunks[2] += "\n" + `{"id":"c2","choices":[]}` // two chunks share an event
		return r
	})
	id := e.submit(jobBody(chat(8, ""), ""))
	e.wait(id)
	path := "/v1/jobs/" + string(id) + "/events"
	whole := withoutComments(e.send("GET", path, "").body)
	all := events(t, []byte(whole))
	if len(all) != 10 {
		t.Fatalf("%d events: %s", len(all), whole)
	}
	parts := strings.SplitAfter(whole, "\n\n")
	for k := range all {
		if k == 5 { // the API is another process from here on
			e.stopAPI()
			e.startAPI(api.Config{})
		}
		want := strings.Join(parts[k+1:], "")
		for _, how := range []string{"header", "query"} {
			var a answer
			if how == "header" {
				a = e.send("GET", path, "", fmt.Sprintf("Last-Event-ID: %d", all[k].id))
			} else {
				a = e.send("GET", fmt.Sprintf("%s?last_event_id=%d", path, all[k].id), "")
			}
			if k == len(all)-1 {
				if a.status != http.StatusNoContent {
					t.Errorf("after done: %d %s", a.status, a.body)
				}
				continue
			}
			if diff := cmp.Diff(want, withoutComments(a.body)); diff != "" {
				t.Errorf("resumed by %s after event %d: %s", how, k, diff)
			}
		}
	}
	for _, bad := range []string{"x", "-1", "1.5"} {
		e.send("GET", path, "", "Last-Event-ID: "+bad).wantError(t, 400, job.CodeInvalidValue, "Last-Event-ID")
		e.send("GET", path+"?last_event_id="+bad, "").wantError(t, 400, job.CodeInvalidValue, "last_event_id")
	}
}

func TestEventsFollowARunningJobAcrossAPIRestarts(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	each := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.each = each
		return r
	})
	const n = 6
	id := e.submit(jobBody(chat(n, ""), ""))
	path := "/v1/jobs/" + string(id) + "/events"
	var got []event
	last := int64(0)
	for i := range n { // each connection sees one more token, then is cut
		each <- struct{}{}
		ctx, cancel := context.WithCancel(t.Context())
		resp := e.open(ctx, "GET", path, "", fmt.Sprintf("Last-Event-ID: %d", last))
		in := bufio.NewReader(resp.Body)
		var raw bytes.Buffer
		for {
			line, err := in.ReadString('\n')
			if err != nil {
				t.Fatalf("after %d tokens: %v", i, err)
			}
			raw.WriteString(line)
			if evs := events(t, raw.Bytes()); len(evs) > 0 && evs[len(evs)-1].kind == "token" {
				got = append(got, evs...)
				last = evs[len(evs)-1].id
				break
			}
		}
		cancel()
		resp.Body.Close()
		if i == n/2 {
			e.stopAPI()
			e.startAPI(api.Config{})
		}
	}
	got = append(got, events(t, e.send("GET", path, "", fmt.Sprintf("Last-Event-ID: %d", last)).body)...)
	if diff := cmp.Diff(events(t, e.send("GET", path, "").body), got, cmp.AllowUnexported(event{})); diff != "" {
		t.Error(diff)
	}
}

func TestEventsOfUnknownAndLostNumbers(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	id := e.submit(jobBody(chat(3, ""), ""))
	e.wait(id)
	path := "/v1/jobs/" + string(id) + "/events"
	kinds := func(evs []event) (k string) {
		for _, ev := range evs {
			k += fmt.Sprintf("%s:%d ", ev.kind, ev.id)
		}
		return k
	}
	got := events(t, e.send("GET", path, "", "Last-Event-ID: 99").body)
	if kinds(got) != "reset:4 done:5 " || got[0].data != `{"text":"t0 t1 t2 "}` {
		t.Errorf("an unknown number: %+v", got)
	}
	// The stream is gone: the text from the answer, then done under its own number.
	e.redis.Wipe()
	for _, after := range []string{"", "2", "3"} {
		got = events(t, e.send("GET", path+"?last_event_id="+after, "").body)
		if kinds(got) != "reset:4 done:5 " || got[0].data != `{"text":"t0 t1 t2 "}` {
			t.Errorf("after %q: %+v", after, got)
		}
	}
	if got = events(t, e.send("GET", path, "", "Last-Event-ID: 4").body); kinds(got) != "done:5 " {
		t.Errorf("after the last token: %+v", got)
	}
	if a := e.send("GET", path, "", "Last-Event-ID: 5"); a.status != http.StatusNoContent {
		t.Errorf("after done: %d", a.status)
	}
	// An older number than the stream keeps.
	j := job.Job{ID: job.NewID(time.Now()), Tenant: "default", Model: model, Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup, Events: true, Created: e.results.Now(), Expires: e.results.Now() + 60_000}
	if err := e.results.Queued(t.Context(), &j, []byte(`{}`)); err != nil {
		t.Fatal(err)
	}
	if err := e.results.Restore(t.Context(), &j, []job.Event{
		{N: 40, Token: 1, Kind: job.EventToken, Data: []byte(`{"choices":[{"index":0,"delta":{"content":"a"}}]}`)},
		{N: 41, Token: 1, Kind: job.EventToken, Data: []byte(`{"choices":[{"index":0,"delta":{"content":"b"}}]}`)},
	}); err != nil {
		t.Fatal(err)
	}
	path = "/v1/jobs/" + string(j.ID) + "/events"
	for after, want := range map[string]string{"": "gap:39 token:40 token:41 ", "7": "gap:39 token:40 token:41 ", "39": "token:40 token:41 ", "40": "token:41 ", "77": "reset:41 "} {
		ctx, cancel := context.WithCancel(t.Context())
		resp := e.open(ctx, "GET", path+"?last_event_id="+after, "")
		in := bufio.NewReader(resp.Body)
		var raw bytes.Buffer
		for kinds(events(t, raw.Bytes())) != want {
			line, err := in.ReadString('\n')
			if err != nil {
				t.Fatalf("after %q: %v in %s", after, err, raw.Bytes())
			}
			raw.WriteString(line)
		}
		if evs := events(t, raw.Bytes()); after == "77" && evs[0].data != `{"text":"ab"}` {
			t.Errorf("the text so far is %s", evs[0].data)
		}
		cancel()
		resp.Body.Close()
	}
}

func TestEventsKeepAliveWhileQueued(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{KeepAlive: 200 * time.Millisecond})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	id := e.submit(jobBody(chat(1, ""), ""))
	resp := e.open(t.Context(), "GET", "/v1/jobs/"+string(id)+"/events", "")
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	for i := range 3 {
		line, err := in.ReadString('\n')
		if err != nil || !strings.HasPrefix(line, ": ") || i > 0 && !strings.Contains(line, "no_worker") {
			t.Fatalf("%q, %v", line, err)
		}
	}
	e.startWorker(repeat)
	rest, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	if evs := events(t, rest); len(evs) != 3 || evs[2].kind != "done" {
		t.Errorf("%s", rest)
	}
}

func TestDoneCarriesALargeAnswer(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	large := "{\r\n \"text\": \"" + strings.Repeat("r", 400<<10) + "\",\n\"more\": [1,\n2]}"
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.body = large
		return r
	})
	id := e.submit(jobBody(chat(1, ""), ""))
	evs := events(t, e.send("GET", "/v1/jobs/"+string(id)+"/events", "").body)
	var o struct {
		Status string
		Result struct {
			Body json.RawMessage `json:"body"`
		}
	}
	if err := json.Unmarshal([]byte(evs[len(evs)-1].data), &o); err != nil {
		t.Fatal(err)
	}
	if got := strings.ReplaceAll(large, "\r\n", "\n"); string(o.Result.Body) != got {
		t.Errorf("%d bytes of %d", len(o.Result.Body), len(got))
	}
	// The object itself has the bytes as they are.
	if a := e.send("GET", "/v1/jobs/"+string(id), ""); !bytes.Contains(a.body, []byte(large)) {
		t.Error("the object has not the answer's bytes")
	}
}

func TestJobWithoutEventsStillEndsItsStream(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	id := e.submit(`{"endpoint":"/v1/embeddings","body":{"model":"test/model-8b","input":"x","max_tokens":1}}`)
	if evs := events(t, e.send("GET", "/v1/jobs/"+string(id)+"/events", "").body); len(evs) != 1 || evs[0].kind != "done" || evs[0].id != 1 {
		t.Errorf("%+v", evs)
	}
}

func TestEventsOfAJobThatGoesAwayEndWithAnError(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	id := e.submit(jobBody(chat(1, ""), ""))
	resp := e.open(t.Context(), "GET", "/v1/jobs/"+string(id)+"/events", "")
	defer resp.Body.Close()
	// As when another server deletes it, and its done event is missed.
	if err := e.queue.Remove(t.Context(), queue.Work, model, id); err != nil {
		t.Fatal(err)
	}
	e.redis.Wipe()
	e.relay.Bell(id)
	got, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(got), "\nevent: error\ndata: {\"error\":{") || !strings.Contains(string(got), string(job.CodeJobNotFound)) {
		t.Errorf("%q, %v", got, err)
	}
}
