package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

func TestJobRunsAndTellsAll(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(repeat)
	inner := `{"seed":9007199254740993,"messages":[{"content":"<b>&</b>","role":"user"}], "model":"test/model-8b","max_tokens":2,"a":1,"a":2,"vendor":null}`
	a := e.send("POST", "/v1/jobs", `{"metadata":{"k":"v"},"session":"user-42","body":`+inner+`,"priority":"batch","deadline":"10m"}`)
	if a.status != http.StatusAccepted {
		t.Fatalf("%d %s", a.status, a.body)
	}
	o := a.object(t)
	id := job.ID(o["id"].(string))
	if got := a.header.Get("Location"); got != "/v1/jobs/"+string(id) {
		t.Errorf("Location is %q", got)
	}
	if a.header.Get("Retry-After") == "" || a.header.Get("ETag") == "" {
		t.Errorf("headers: %v", a.header)
	}
	if o["status"] != "queued" || o["queue"] == nil {
		t.Errorf("the fresh job is %s", a.body)
	}
	o = e.wait(id)
	for key, want := range map[string]any{
		"id": string(id), "object": "job", "status": "completed", "endpoint": "/v1/chat/completions", "model": string(model), "priority": "batch", "session": "user-42", "error": nil, "queue": nil,
	} {
		if o[key] != want {
			t.Errorf("%s is %v, want %v", key, o[key], want)
		}
	}
	if diff := cmp.Diff(map[string]any{"k": "v"}, o["metadata"]); diff != "" {
		t.Error(diff)
	}
	created, expires := o["created_at"].(float64), o["expires_at"].(float64)
	if d := expires - created; d < 599 || d > 601 {
		t.Errorf("deadline after %v s", d)
	}
	for _, key := range []string{"started_at", "first_token_at", "finished_at"} {
		if at, ok := o[key].(float64); !ok || at < created-1 || at > created+60 {
			t.Errorf("%s is %v", key, o[key])
		}
	}
	if n := len(o["attempts"].([]any)); n != 1 {
		t.Errorf("%d attempts", n)
	}
	if calls := w.calledWith(id); len(calls) != 1 || string(calls[0]) != inner {
		t.Errorf("the engine got %q", calls)
	}
	// The engine's answer stands in the object byte for byte.
	raw := e.send("GET", "/v1/jobs/"+string(id), "")
	if want := `"result":{"status_code":200,"body":` + repeat(nil, []byte(inner)).body + `}`; !strings.Contains(string(raw.body), want) {
		t.Errorf("%s is not in %s", want, raw.body)
	}
}

// TestAnswerLeavesTheRestOfItsJobAlone: answers of all lengths, above all short ones of jobs whose object goes on behind them.
func TestAnswerLeavesTheRestOfItsJobAlone(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(func(_ *job.Job, body []byte) reply {
		return reply{status: 400, body: fmt.Sprintf(`{"error":{"message":%q,"type":"t","param":null,"code":null}}`, strings.Repeat("x", 7*bytes.Count(body, []byte("y"))))}
	})
	for n := 0; n < 120; n += 10 {
		id := e.submit(jobBody(chat(1, fmt.Sprintf(`,"pad":%q`, strings.Repeat("y", n))), ""))
		o := e.wait(id) // which fails where it is no JSON
		if o["status"] != "failed" || o["metadata"] == nil {
			t.Errorf("an answer with %d characters: %v", 7*n, o)
		}
	}
}

func TestCreateRefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	ok := chat(1, "")
	pairs := make(map[string]string)
	for i := range 17 {
		pairs[fmt.Sprint(i)] = "v"
	}
	many, _ := json.Marshal(pairs)
	long := func(n int) string { return strings.Repeat("x", n) }
	tests := map[string]struct {
		body   string
		status int
		code   job.Code
		param  string
	}{
		"no body":                  {"", 400, job.CodeInvalidJSON, ""},
		"broken JSON":              {`{"body":`, 400, job.CodeInvalidJSON, ""},
		"not an object":            {`[1]`, 400, job.CodeInvalidType, ""},
		"not UTF-8":                {"{\"body\":\"\xff\"}", 400, job.CodeInvalidJSON, ""},
		"no request":               {`{}`, 400, job.CodeMissingParameter, "body"},
		"request not an object":    {`{"body":"x"}`, 400, job.CodeInvalidType, "body"},
		"no model":                 {`{"body":{"messages":[]}}`, 400, job.CodeMissingParameter, "body.model"},
		"model not a string":       {`{"body":{"model":1,"messages":[]}}`, 400, job.CodeInvalidType, "body.model"},
		"no messages":              {`{"body":{"model":"test/model-8b"}}`, 400, job.CodeMissingParameter, "body.messages"},
		"messages not a list":      {`{"body":{"model":"test/model-8b","messages":"hi"}}`, 400, job.CodeInvalidType, "body.messages"},
		"no prompt":                {`{"endpoint":"/v1/completions","body":{"model":"test/model-8b"}}`, 400, job.CodeMissingParameter, "body.prompt"},
		"no input":                 {`{"endpoint":"/v1/embeddings","body":{"model":"test/model-8b"}}`, 400, job.CodeMissingParameter, "body.input"},
		"unknown model":            {`{"body":{"model":"nope","messages":[]}}`, 404, job.CodeModelNotFound, "body.model"},
		"surely too long":          {jobBody(fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":%q}]}`, model, long(16*100_001)), ""), 400, job.CodeContextLength, "body.messages"},
		"endpoint unsupported":     {jobBody(ok, `,"endpoint":"/v1/images/generations"`), 400, job.CodeInvalidValue, "endpoint"},
		"priority unknown":         {jobBody(ok, `,"priority":"high"`), 400, job.CodeInvalidValue, "priority"},
		"priority not a string":    {jobBody(ok, `,"priority":1`), 400, job.CodeInvalidType, "priority"},
		"webhook":                  {jobBody(ok, `,"webhook":{"url":"https://x"}`), 400, job.CodeUnsupportedParameter, "webhook"},
		"an unknown field":         {jobBody(ok, `,"foo":1`), 400, job.CodeUnsupportedParameter, "foo"},
		"stream not a bool":        {jobBody(ok, `,"stream":"yes"`), 400, job.CodeInvalidType, "stream"},
		"inner stream not a bool":  {jobBody(chat(1, `,"stream":"yes"`), ""), 400, job.CodeInvalidType, "body.stream"},
		"deadline nonsense":        {jobBody(ok, `,"deadline":"soon"`), 400, job.CodeInvalidValue, "deadline"},
		"deadline too far":         {jobBody(ok, `,"deadline":"169h"`), 400, job.CodeInvalidValue, "deadline"},
		"deadline passed":          {jobBody(ok, `,"deadline":1000`), 400, job.CodeInvalidValue, "deadline"},
		"deadline far, in seconds": {jobBody(ok, `,"deadline":99999999999`), 400, job.CodeInvalidValue, "deadline"},
		"deadline of a wrong type": {jobBody(ok, `,"deadline":[]`), 400, job.CodeInvalidType, "deadline"},
		"queue_timeout negative":   {jobBody(ok, `,"queue_timeout":"-1s"`), 400, job.CodeInvalidValue, "queue_timeout"},
		"run_timeout too long":     {jobBody(ok, `,"run_timeout":"13h"`), 400, job.CodeInvalidValue, "run_timeout"},
		"run_timeout a number":     {jobBody(ok, `,"run_timeout":5`), 400, job.CodeInvalidType, "run_timeout"},
		"session too long":         {jobBody(ok, `,"session":"`+long(257)+`"`), 400, job.CodeInvalidValue, "session"},
		"17 metadata pairs":        {jobBody(ok, `,"metadata":`+string(many)), 400, job.CodeInvalidValue, "metadata"},
		"metadata key too long":    {jobBody(ok, `,"metadata":{"`+long(65)+`":"v"}`), 400, job.CodeInvalidValue, "metadata"},
		"metadata value too long":  {jobBody(ok, `,"metadata":{"k":"`+long(513)+`"}`), 400, job.CodeInvalidValue, "metadata"},
		"metadata not strings":     {jobBody(ok, `,"metadata":{"k":1}`), 400, job.CodeInvalidType, "metadata"},
		"metadata null value":      {jobBody(ok, `,"metadata":{"k":null}`), 400, job.CodeInvalidType, "metadata"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			e.send("POST", "/v1/jobs", tt.body).wantError(t, tt.status, tt.code, tt.param)
		})
	}
	// On the OpenAI routes the same names stand without "body.".
	e.send("POST", "/v1/chat/completions", `{"messages":[]}`).wantError(t, 400, job.CodeMissingParameter, "model")
	e.send("POST", "/v1/completions", `{"model":"test/model-8b"}`).wantError(t, 400, job.CodeMissingParameter, "prompt")
	e.send("POST", "/v1/embeddings", `{"model":"test/model-8b","input":7}`).wantError(t, 400, job.CodeInvalidType, "input")
	e.send("POST", "/v1/chat/completions", `{"model":"nope","messages":[]}`).wantError(t, 404, job.CodeModelNotFound, "model")
	e.send("POST", "/v1/chat/completions", ok, "X-Millrace-Priority: high").wantError(t, 400, job.CodeInvalidValue, "X-Millrace-Priority")
	e.send("POST", "/v1/chat/completions", ok, "Content-Encoding: gzip").wantError(t, 415, job.CodeUnsupportedMedia, "")
	e.send("POST", "/v1/chat/completions", ok, "Content-Type: multipart/form-data; boundary=x").wantError(t, 415, job.CodeUnsupportedMedia, "")
	if a := e.send("POST", "/v1/chat/completions", ok, "Content-Type: application/x-www-form-urlencoded"); a.status != 200 {
		t.Errorf("what curl sends by default is refused: %d %s", a.status, a.body)
	}
}

func TestSameKeyIsOneJob(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	gate := make(chan struct{})
	w := e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = gate
		return r
	})
	ids := make([]string, 50)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), `,"priority":"standard"`), "Idempotency-Key: k1")
			if a.status != http.StatusAccepted {
				t.Errorf("%d %s", a.status, a.body)
				return
			}
			ids[i] = a.object(t)["id"].(string)
		})
	}
	wg.Wait()
	slices.Sort(ids)
	if ids = slices.Compact(ids); len(ids) != 1 {
		t.Fatalf("50 requests made the jobs %v", ids)
	}
	close(gate)
	e.wait(job.ID(ids[0]))
	// The order of keys and space do not count.
	a := e.send("POST", "/v1/jobs", `{ "priority":"standard", "body": {"max_tokens":1,"messages":[{"content":"hi","role":"user"}],"model":"test/model-8b"}}`, "Idempotency-Key: k1")
	if a.status != http.StatusAccepted || a.object(t)["id"] != ids[0] {
		t.Errorf("reordered: %d %s", a.status, a.body)
	}
	a = e.send("POST", "/v1/jobs", jobBody(chat(2, ""), ""), "Idempotency-Key: k1")
	a.wantError(t, http.StatusConflict, job.CodeIdempotencyConflict, "Idempotency-Key")
	if a.header.Get("X-Should-Retry") != "false" {
		t.Error("no x-should-retry: false")
	}
	if n := len(w.calledWith(job.ID(ids[0]))); n != 1 {
		t.Errorf("the engine was called %d times", n)
	}
}

func TestRetriedCreateWithoutKeyIsOneJob(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(repeat)
	body := jobBody(chat(1, ""), "")
	first := e.submit(body, "X-Stainless-Retry-Count: 0")
	if again := e.submit(body, "X-Stainless-Retry-Count: 1"); again != first {
		t.Error("the retry made another job")
	}
	second := e.submit(body, "X-Stainless-Retry-Count: 0")
	if second == first {
		t.Error("the same request meant as a new one was taken for a retry")
	}
	if again := e.submit(body, "X-Stainless-Retry-Count: 2"); again != second {
		t.Error("the retry of the second made another job")
	}
	a, b := e.submit(body), e.submit(body)
	if a == b {
		t.Error("requests that say nothing of retries are one job")
	}
	if again := e.submit(body, "X-Stainless-Retry-Count: 1"); again != b {
		t.Error("the retry of a request that said nothing of retries made another job")
	}
	third := e.submit(body, "X-Stainless-Retry-Count: 0")
	if third == b {
		t.Error("a request that says it is the first is an earlier job")
	}
	// What was deleted had been answered, so that nobody tries it again.
	e.wait(third)
	e.send("DELETE", "/v1/jobs/"+string(third), "")
	if again := e.submit(body, "X-Stainless-Retry-Count: 1"); again == third {
		t.Error("the retry is a job that was deleted")
	}
}

// storedBlobs calls stored after each object.
type storedBlobs struct {
	blob.Store
	n      atomic.Int32
	stored func(n int32)
}

func (b *storedBlobs) Put(ctx context.Context, name string, r io.Reader) (int64, error) {
	n, err := b.Store.Put(ctx, name, r)
	b.stored(b.n.Add(1))
	return n, err
}

// TestARefusedSubmitLeavesTheBodyToItsRetry: two of the same bytes are under way, of which the second is a retry and takes over the first one's id. The first is refused, and the second has its body.
func TestARefusedSubmitLeavesTheBodyToItsRetry(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.remember() // and all waits
	e.stopAPI()
	b := &storedBlobs{Store: e.blobs}
	e.deps.Blobs = b
	e.startAPI(api.Config{Limits: results.Limits{Queue: results.Amount{Jobs: 1}}})
	first := e.submit(jobBody(chat(1, ""), ""))
	large := jobBody(chat(2, `,"x":"`+strings.Repeat("y", 400<<10)+`"`), "")
	both, refused := make(chan struct{}), make(chan struct{})
	retry := make(chan answer, 1)
	b.stored = func(n int32) {
		if n == 1 {
			go func() { retry <- e.send("POST", "/v1/jobs", large, "X-Stainless-Retry-Count: 1") }()
			<-both
		} else {
			close(both)
			<-refused
		}
	}
	if a := e.send("POST", "/v1/jobs", large); a.status != http.StatusTooManyRequests {
		t.Errorf("beyond the limit: %d %s", a.status, a.body)
	}
	e.send("POST", "/v1/jobs/"+string(first)+"/cancel", "")
	eventually(t, "there is room", func() bool { return e.send("GET", "/v1/jobs/"+string(first), "").object(t)["status"] == "cancelled" })
	close(refused)
	a := <-retry
	if a.status != http.StatusAccepted {
		t.Fatalf("the retry: %d %s", a.status, a.body)
	}
	if len(e.objects()) != 1 {
		t.Errorf("the objects are %v", e.objects())
	}
}

func TestKeyedCallAnswersFromItsJob(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(repeat)
	want := repeat(nil, []byte(chat(3, ""))).body
	var id string
	for range 2 {
		a := e.send("POST", "/v1/chat/completions", chat(3, ""), "Idempotency-Key: s")
		if a.status != 200 || string(a.body) != want {
			t.Fatalf("%d %s", a.status, a.body)
		}
		if id != "" && id != a.header.Get("X-Millrace-Job") {
			t.Error("another job answered")
		}
		id = a.header.Get("X-Millrace-Job")
	}
	if n := len(w.calledWith(job.ID(id))); n != 1 {
		t.Errorf("the engine was called %d times", n)
	}
	var stream strings.Builder
	for _, c := range repeat(nil, []byte(chat(3, ""))).chunks {
		stream.WriteString("data: " + c + "\n\n")
	}
	stream.WriteString("data: [DONE]\n\n")
	for range 2 {
		a := e.send("POST", "/v1/chat/completions", chat(3, `,"stream":true`), "Idempotency-Key: st")
		if diff := cmp.Diff(stream.String(), string(a.body)); diff != "" {
			t.Error(diff)
		}
	}
	e.send("POST", "/v1/chat/completions", chat(4, ""), "Idempotency-Key: s").wantError(t, 409, job.CodeIdempotencyConflict, "Idempotency-Key")
}

func TestRespondAsync(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	gate := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		if j.Session == "slow" {
			r.before = gate
		}
		return r
	})
	a := e.send("POST", "/v1/chat/completions", chat(1, ""), "Prefer: respond-async", "X-Millrace-Session: slow")
	if a.status != 202 || a.header.Get("Preference-Applied") != "respond-async" || a.header.Get("Location") == "" {
		t.Fatalf("%d %v %s", a.status, a.header, a.body)
	}
	slow := job.ID(a.object(t)["id"].(string))
	a = e.send("POST", "/v1/chat/completions", chat(1, ""), "Prefer: respond-async, wait=1", "X-Millrace-Session: slow")
	if a.status != 202 || a.header.Get("Preference-Applied") != "respond-async, wait=1" {
		t.Errorf("%d %v %s", a.status, a.header, a.body)
	}
	a = e.send("POST", "/v1/chat/completions", chat(1, ""), "Prefer: respond-async, wait=20")
	if a.status != 200 || string(a.body) != repeat(nil, []byte(chat(1, ""))).body {
		t.Errorf("%d %s", a.status, a.body)
	}
	// A client that is gone cancels nothing.
	close(gate)
	if o := e.wait(slow); o["status"] != "completed" {
		t.Errorf("%v", o)
	}

	// A repeated call gets its job, though it has ended, and not an answer of another shape.
	again := []string{"Prefer: respond-async", "Idempotency-Key: again"}
	first := job.ID(e.send("POST", "/v1/chat/completions", chat(1, ""), again...).object(t)["id"].(string))
	e.wait(first)
	a = e.send("POST", "/v1/chat/completions", chat(1, ""), again...)
	if o := a.object(t); a.status != 202 || o["id"] != string(first) || o["status"] != "completed" {
		t.Errorf("repeated: %d %s", a.status, a.body)
	}
	a = e.send("POST", "/v1/chat/completions", chat(1, ""), "Prefer: respond-async, wait=20", "Idempotency-Key: again")
	if a.status != 200 || string(a.body) != repeat(nil, []byte(chat(1, ""))).body {
		t.Errorf("repeated with a wait: %d %s", a.status, a.body)
	}
}

func TestLongPollAndETag(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	gate := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = gate
		return r
	})
	id := e.submit(jobBody(chat(1, ""), ""))
	path := "/v1/jobs/" + string(id)
	eventually(t, "it runs", func() bool { return e.send("GET", path, "").object(t)["status"] == "running" })
	a := e.send("GET", path, "")
	tag := a.header.Get("ETag")
	if a := e.send("GET", path, "", "If-None-Match: "+tag); a.status != http.StatusNotModified || len(a.body) != 0 {
		t.Errorf("%d %s", a.status, a.body)
	}
	start := time.Now()
	if a := e.send("GET", path+"?wait=300ms", "", "If-None-Match: "+tag); a.status != http.StatusNotModified || time.Since(start) < 300*time.Millisecond {
		t.Errorf("%d after %v", a.status, time.Since(start))
	}
	if a := e.send("GET", path+"?wait=200ms", ""); a.status != 200 || a.object(t)["status"] != "running" {
		t.Errorf("%d %s", a.status, a.body)
	}
	done := make(chan answer, 1)
	go func() { done <- e.send("GET", path+"?wait=20", "", "If-None-Match: "+tag) }()
	time.AfterFunc(100*time.Millisecond, func() { close(gate) })
	if a := <-done; a.status != 200 || a.object(t)["status"] == "queued" {
		t.Errorf("%d %s", a.status, a.body)
	}
	e.wait(id)
	tag = e.send("GET", path, "").header.Get("ETag")
	start = time.Now()
	if a := e.send("GET", path+"?wait=60s", "", "If-None-Match: "+tag); a.status != http.StatusNotModified || time.Since(start) > 30*time.Second { // what has ended changes no more
		t.Errorf("%d after %v", a.status, time.Since(start))
	}
	e.send("GET", path+"?wait=soon", "").wantError(t, 400, job.CodeInvalidValue, "wait")
}

func TestListPages(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	empty := e.send("GET", "/v1/jobs", "")
	if diff := cmp.Diff(`{"object":"list","data":[],"first_id":null,"last_id":null,"has_more":false}`, string(empty.body)); diff != "" {
		t.Error(diff)
	}
	want := make([]string, 25)
	var wg sync.WaitGroup
	for i := range want {
		wg.Go(func() { want[i] = string(e.submit(jobBody(chat(1, ""), fmt.Sprintf(`,"session":"s%d"`, i%2)))) })
	}
	wg.Wait()
	slices.Sort(want)
	slices.Reverse(want)
	var got []string
	after := ""
	for pages := 0; ; pages++ {
		a := e.send("GET", "/v1/jobs?limit=10"+after, "")
		o := a.object(t)
		data := o["data"].([]any)
		if len(data) == 0 || pages > 3 {
			t.Fatalf("page %d: %s", pages, a.body)
		}
		for _, d := range data {
			got = append(got, d.(map[string]any)["id"].(string))
		}
		if o["object"] != "list" || o["first_id"] != data[0].(map[string]any)["id"] || o["last_id"] != got[len(got)-1] {
			t.Errorf("page %d: %v %v", pages, o["first_id"], o["last_id"])
		}
		if o["has_more"] == false {
			break
		}
		after = "&after=" + got[len(got)-1]
	}
	// created_at has milliseconds, ids of one millisecond are ordered by their random part: the same order.
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, limit := range []string{"-1", "0", "101", "abc", "1.5", ""} {
		e.send("GET", "/v1/jobs?limit="+limit, "").wantError(t, 400, job.CodeInvalidValue, "limit")
	}
	e.send("GET", "/v1/jobs?limit=100", "")
	e.send("GET", "/v1/jobs?after="+string(job.NewID(time.Now())), "").wantError(t, 400, job.CodeInvalidValue, "after")
	e.send("GET", "/v1/jobs?after=x", "").wantError(t, 400, job.CodeInvalidValue, "after")
	e.send("GET", "/v1/jobs?status=done", "").wantError(t, 400, job.CodeInvalidValue, "status")
	if n := len(e.send("GET", "/v1/jobs?limit=100&session=s1&status=queued", "").object(t)["data"].([]any)); n != 12 {
		t.Errorf("%d jobs of session s1", n)
	}
}

func TestCancel(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	// Queued: at once, and its message is gone.
	id := e.submit(jobBody(chat(1, ""), ""))
	for range 2 {
		if a := e.send("POST", "/v1/jobs/"+string(id)+"/cancel", ""); a.status != 200 || a.object(t)["status"] != "cancelled" {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	if _, err := e.queue.Find(t.Context(), model, id); err == nil {
		t.Error("its message still waits")
	}
	// Its events end.
	if got := events(t, e.send("GET", "/v1/jobs/"+string(id)+"/events", "").body); len(got) != 1 || got[0].kind != "done" {
		t.Errorf("%+v", got)
	}
	// After a wipe: by the queue alone.
	wiped := e.submit(jobBody(chat(1, ""), ""))
	e.redis.Wipe()
	if a := e.send("POST", "/v1/jobs/"+string(wiped)+"/cancel", ""); a.status != 200 || a.object(t)["status"] != "cancelled" {
		t.Errorf("%d %s", a.status, a.body)
	}
	// Running: its worker stops.
	never := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		if j.Session == "slow" {
			r.before = never
		}
		return r
	})
	id = e.submit(jobBody(chat(1, ""), `,"session":"slow"`))
	eventually(t, "it runs", func() bool { return e.send("GET", "/v1/jobs/"+string(id), "").object(t)["status"] == "running" })
	if a := e.send("POST", "/v1/jobs/"+string(id)+"/cancel", ""); a.status != 200 || a.object(t)["status"] != "cancelled" {
		t.Errorf("%d %s", a.status, a.body)
	}
	// Ended otherwise: too late.
	id = e.submit(jobBody(chat(1, ""), ""))
	e.wait(id)
	a := e.send("POST", "/v1/jobs/"+string(id)+"/cancel", "")
	a.wantError(t, 409, job.CodeAlreadyEnded, "")
	if a.header.Get("X-Should-Retry") != "false" {
		t.Error("no x-should-retry: false")
	}
	e.send("POST", "/v1/jobs/"+string(job.NewID(time.Now()))+"/cancel", "").wantError(t, 404, job.CodeJobNotFound, "id")
}

func TestDelete(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	never := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		switch j.Session {
		case "slow":
			r.before = never
		case "large":
			r.body = `{"text":"` + strings.Repeat("r", 400<<10) + `"}`
		}
		return r
	})
	for _, session := range []job.Session{"quick", "slow", "large"} {
		id := e.submit(jobBody(chat(1, `,"pad":"`+strings.Repeat("p", 300<<10)+`"`), fmt.Sprintf(`,"session":%q`, session)))
		path := "/v1/jobs/" + string(id)
		if session == "slow" {
			eventually(t, "it runs", func() bool { return e.send("GET", path, "").object(t)["status"] == "running" })
		} else {
			e.wait(id)
		}
		a := e.send("DELETE", path, "")
		if diff := cmp.Diff(fmt.Sprintf(`{"id":%q,"object":"job","deleted":true}`, id), string(a.body)); diff != "" || a.status != 200 {
			t.Fatalf("%s: %d %s", session, a.status, diff)
		}
		e.send("GET", path, "").wantError(t, 404, job.CodeJobNotFound, "id")
		e.send("DELETE", path, "").wantError(t, 404, job.CodeJobNotFound, "id")
		e.send("GET", path+"/events", "").wantError(t, 404, job.CodeJobNotFound, "id")
	}
	if left := e.objects(); len(left) > 0 {
		t.Errorf("objects are left: %v", left)
	}
}

func TestResultsOutliveAWipe(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		if j.Session == "large" {
			r.body = `{"text": "` + strings.Repeat("r", 400<<10) + `"}`
		}
		if j.Session == "text" {
			r.body, r.contentType = "plain \"text\"\n", "text/plain"
		}
		return r
	})
	for _, session := range []string{"small", "large", "text"} {
		id := e.submit(jobBody(chat(2, ""), fmt.Sprintf(`,"session":%q`, session)))
		e.wait(id)
		before := e.send("GET", "/v1/jobs/"+string(id), "")
		e.redis.Wipe()
		after := e.send("GET", "/v1/jobs/"+string(id), "")
		if diff := cmp.Diff(string(before.body), string(after.body)); diff != "" {
			t.Errorf("%s: %s", session, diff)
		}
		if !json.Valid(after.body) || after.header.Get("ETag") != before.header.Get("ETag") {
			t.Errorf("%s: the ETag was %s and is %s", session, before.header.Get("ETag"), after.header.Get("ETag"))
		}
	}
	// A waiting one is found in the queue.
	if err := e.queue.Enqueue(t.Context(), queue.Work, queue.TenantLane("default"), &queue.Message{Job: job.Job{
		ID: "job_" + job.ID(strings.Repeat("f", 36)), Tenant: "default", Model: model, Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup, Created: 1, Expires: 1 << 50,
	}, Body: []byte(`{}`)}); err != nil {
		t.Fatal(err)
	}
	if a := e.send("GET", "/v1/jobs/job_"+strings.Repeat("f", 36), ""); a.status != 200 || a.object(t)["status"] != "queued" {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestUnknownAndForeignAndOldJobs(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	now := time.Now()
	foreign := job.Job{ID: job.NewID(now), Tenant: "other", Model: model, Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup, Created: e.results.Now(), Expires: e.results.Now() + 60_000}
	if _, err := e.results.Accept(t.Context(), &foreign, []byte(`{}`), results.Limits{}); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{string(foreign.ID), string(job.NewID(now)), "x", "job_" + strings.Repeat("z", 36)} {
		e.send("GET", "/v1/jobs/"+path, "").wantError(t, 404, job.CodeJobNotFound, "id")
		e.send("DELETE", "/v1/jobs/"+path, "").wantError(t, 404, job.CodeJobNotFound, "id")
		e.send("POST", "/v1/jobs/"+path+"/cancel", "").wantError(t, 404, job.CodeJobNotFound, "id")
		e.send("GET", "/v1/jobs/"+path+"/events", "").wantError(t, 404, job.CodeJobNotFound, "id")
	}
	old := job.NewID(now.Add(-15 * 24 * time.Hour))
	e.send("GET", "/v1/jobs/"+string(old), "").wantError(t, 410, job.CodeResultExpired, "")
}

func TestDisconnectDoesNotCancelADurableCall(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	gate := make(chan struct{})
	started := make(chan job.ID, 1)
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = gate
		started <- j.ID
		return r
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := e.tryOpen(ctx, "POST", "/v1/chat/completions", chat(1, ""), "Idempotency-Key: d"); err == nil {
			resp.Body.Close()
		}
	}()
	id := <-started
	cancel()
	<-ended
	close(gate)
	if o := e.wait(id); o["status"] != "completed" {
		t.Errorf("%v", o)
	}
}
