package api_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/job"
)

func TestSyncCallGetsTheEnginesBytes(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(repeat)
	body := `{"seed": 9007199254740993, "model":"test/model-8b", "messages":[{"role":"user","content":"<b>&</b> \u00e9"}],"x":1e400, "max_tokens":3,"x":null,"z":{"b":1,"a":2}}`
	a := e.send("POST", "/v1/chat/completions", body)
	if a.status != 200 || a.header.Get("Content-Type") != "application/json" {
		t.Fatalf("%d %v %s", a.status, a.header, a.body)
	}
	if diff := cmp.Diff(repeat(nil, []byte(body)).body, string(a.body)); diff != "" {
		t.Error(diff)
	}
	id := job.ID(a.header.Get("X-Millrace-Job"))
	calls := w.calledWith(id)
	if len(calls) != 1 || string(calls[0]) != body {
		t.Errorf("the engine was called %d times, with %q", len(calls), calls)
	}
}

func TestStreamPassesChunksThrough(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.chunks = append(r.chunks, `{"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}`)
		return r
	})
	// SDKs ask for JSON even when they want a stream.
	a := e.send("POST", "/v1/chat/completions", chat(4, `,"stream":true,"stream_options":{"include_usage":true}`), "Accept: application/json")
	var want strings.Builder
	for _, c := range repeat(nil, []byte(`{"max_tokens":4}`)).chunks {
		want.WriteString("data: " + c + "\n\n")
	}
	want.WriteString("data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7}}\n\ndata: [DONE]\n\n")
	if diff := cmp.Diff(want.String(), string(a.body)); diff != "" {
		t.Error(diff)
	}
	for name, value := range map[string]string{"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"} {
		if a.header.Get(name) != value {
			t.Errorf("%s is %q", name, a.header.Get(name))
		}
	}
}

// firstLine reads the first line of a stream within limit.
func firstLine(t *testing.T, resp *http.Response) string {
	t.Helper()
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line
}

func TestStreamGetsItsFirstByteWhileNoWorkerExists(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{KeepAlive: 300 * time.Millisecond})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil { // the model is known, nobody serves it
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	start := time.Now()
	resp := e.open(ctx, "POST", "/v1/chat/completions", chat(2, `,"stream":true`))
	defer resp.Body.Close()
	in := bufio.NewReader(resp.Body)
	line, err := in.ReadString('\n')
	if took := time.Since(start); err != nil || took > 2*time.Second || !strings.HasPrefix(line, ": queued reason=no_worker") {
		t.Fatalf("after %v: %q, %v", took, line, err)
	}
	// A worker comes: what follows the comments is the engine's stream, with no blank line before it.
	e.startWorker(repeat)
	rest, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	i := bytes.Index(rest, []byte("data: "))
	for line := range strings.Lines(string(rest[:max(i, 0)])) {
		if !strings.HasPrefix(line, ": ") {
			t.Errorf("before the first event stands %q", line)
		}
	}
	if !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n")) {
		t.Errorf("the stream ends with %q", rest)
	}
}

func TestStreamThatFailsAfterItsHeadEndsWithAnErrorEvent(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.err = job.NewError(job.TypeServer, job.CodeEngineError, "it broke")
		return r
	})
	a := e.send("POST", "/v1/chat/completions", chat(2, `,"stream":true`))
	want := `data: {"error":{"message":"it broke","type":"server_error","param":null,"code":"engine_error"}}` + "\n\n"
	if a.status != 200 || !strings.HasSuffix(string(a.body), want) || strings.Contains(string(a.body), "[DONE]") {
		t.Errorf("%d %s", a.status, a.body)
	}
	// Without a stream the same is a plain error.
	e.send("POST", "/v1/chat/completions", chat(2, "")).wantError(t, http.StatusBadGateway, job.CodeEngineError, "")
}

func TestEngineErrorsPassThrough(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		status int
		body   string
		want   string
	}{
		"an error object of four keys is not touched": {400, `{ "error": {"message":"no","type":"t","param":null,"code":"c"} }`, `{ "error": {"message":"no","type":"t","param":null,"code":"c"} }`},
		"a code that is a number becomes a string":    {404, `{"error":{"message":"no","type":"NotFoundError","param":null,"code":404}}`, `{"error":{"message":"no","type":"NotFoundError","param":null,"code":"404"}}`},
		"missing keys are added":                      {422, `{"error":{"message":"no"},"x":1}`, `{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null},"x":1}`},
		"a refusal for now is one by its type":        {429, `{"error":{"message":"no","type":"TooManyRequests","param":null,"code":"busy"}}`, `{"error":{"message":"no","type":"rate_limit_exceeded","param":null,"code":"busy"}}`},
		"a conflict is passed on":                     {409, `{"error":{"message":"no","type":"t","param":null,"code":null}}`, `{"error":{"message":"no","type":"t","param":null,"code":null}}`},
		"a failure is one by its type":                {500, `{"error":{"message":"boom"}}`, `{"error":{"message":"boom","type":"server_error","param":null,"code":null}}`},
		"a failure of the engine's own kind, too":     {502, `{"error":{"message":"boom","type":"InternalServerError","param":null,"code":502}}`, `{"error":{"message":"boom","type":"server_error","param":null,"code":"502"}}`},
		"text is wrapped":                             {400, `nope`, `{"error":{"message":"The engine answered 400: nope","type":"invalid_request_error","param":null,"code":"engine_error"}}`},
		"an error that is a string is wrapped":        {503, `{"error":"no"}`, `{"error":{"message":"The engine answered 503: {\"error\":\"no\"}","type":"server_error","param":null,"code":"engine_error"}}`},
	}
	e := newEnv(t, api.Config{})
	var mu sync.Mutex
	replies := map[string]reply{}
	e.startWorker(func(j *job.Job, body []byte) reply {
		mu.Lock()
		defer mu.Unlock()
		for name, r := range replies {
			if bytes.Contains(body, []byte(name)) {
				return r
			}
		}
		return reply{status: 500}
	})
	for name, tt := range tests {
		mu.Lock()
		replies[name] = reply{status: tt.status, contentType: "application/json", body: tt.body}
		mu.Unlock()
	}
	for name, tt := range tests {
		for _, stream := range []string{"", `,"stream":true`} {
			a := e.send("POST", "/v1/chat/completions", chat(1, fmt.Sprintf(`,"user":%q`, name)+stream))
			if diff := cmp.Diff(tt.want, string(a.body)); diff != "" || a.status != tt.status || a.header.Get("Content-Type") != "application/json" {
				t.Errorf("%s: %d %v %s", name, a.status, a.header, diff)
			}
			if final := a.header.Get("X-Should-Retry") == "false"; final != (tt.status == 409) {
				t.Errorf("%s: it must not be tried again: %v", name, final)
			}
			if tt.status == 503 && a.header.Get("Retry-After") == "" {
				t.Errorf("%s: no Retry-After", name)
			}
		}
	}
}

func TestAnswersThatAreNoAnswer(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	var now atomic.Pointer[reply]
	e.startWorker(func(*job.Job, []byte) reply { return *now.Load() })
	for name, r := range map[string]reply{
		"a page":                     {status: 200, contentType: "text/html", body: "<html></html>"},
		"a page that claims more":    {status: 200, contentType: "application/json", body: "<html></html>"},
		"a large page":               {status: 200, contentType: "text/html", body: "<p>" + strings.Repeat("x", 2<<20)},
		"a stream that nobody asked": {status: 200, contentType: "text/plain", body: "data: {}\n\n"},
		"a redirect":                 {status: 302, contentType: "application/json", body: "{}"},
		"the engine's own key is wrong, which is not the client's": {status: 401, contentType: "application/json", body: `{"error":{"message":"no","type":"t","param":null,"code":"invalid_api_key"}}`},
	} {
		now.Store(&r)
		for _, key := range []string{"", name} {
			a := e.send("POST", "/v1/chat/completions", chat(1, ""), "Idempotency-Key: "+key)
			if a.wantError(t, 502, job.CodeEngineError, ""); t.Failed() {
				t.Fatalf("%s, key %q", name, key)
			}
		}
	}
}

// An engine that knows no streams answers in one piece. A client that asked for a stream gets one.
func TestStreamOfAnEngineWithoutStreams(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	w := e.startWorker(func(*job.Job, []byte) reply {
		return reply{status: 201, contentType: "application/json", body: "{\"a\":\n1}"}
	})
	for _, key := range []string{"", "k", "k"} {
		a := e.send("POST", "/v1/chat/completions", chat(1, `,"stream":true`), "Idempotency-Key: "+key)
		if a.status != 200 || a.header.Get("Content-Type") != "text/event-stream" || string(a.body) != "data: {\"a\":\ndata: 1}\n\ndata: [DONE]\n\n" {
			t.Errorf("key %q: %d %v %q", key, a.status, a.header, a.body)
		}
	}
	w.stop()
}

func TestDisconnectCancelsASyncCall(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	never := make(chan struct{})
	started := make(chan job.ID, 1)
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = never
		started <- j.ID
		return r
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		resp, err := e.tryOpen(ctx, "POST", "/v1/chat/completions", chat(2, ""))
		if err == nil {
			resp.Body.Close()
		}
		ended <- err
	}()
	id := <-started
	cancel()
	<-ended
	eventually(t, "the job is cancelled", func() bool {
		rec, err := e.queue.Outcome(t.Context(), job.DefaultTenant, job.NoGroup, id)
		return err == nil && rec.Outcome.State == job.Cancelled
	})
}

func TestDisconnectBeforeAnyWorkerLeavesNothingInTheQueue(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{KeepAlive: 150 * time.Millisecond})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	resp := e.open(ctx, "POST", "/v1/chat/completions", chat(2, `,"stream":true`))
	firstLine(t, resp)
	cancel()
	resp.Body.Close()
	eventually(t, "the message is gone", func() bool {
		for range e.queue.Waiting(t.Context(), "live", model, "", false) {
			return false
		}
		return true
	})
}

func TestCallOfADeadWorkerGoesToAnother(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	never := make(chan struct{})
	started := make(chan struct{}, 1)
	first := e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = never
		started <- struct{}{}
		return r
	})
	answered := make(chan answer, 1)
	go func() { answered <- e.send("POST", "/v1/chat/completions", chat(2, "")) }()
	<-started
	first.nc.Close() // it falls silent, without a word
	e.startWorker(repeat)
	a := <-answered
	if a.status != 200 || string(a.body) != repeat(nil, []byte(`{"max_tokens":2}`)).body {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// dyingStream begins a stream of n chunks on a worker that dies after the first ones, and returns what the client has got until then, and the rest of its connection.
func (e *env) dyingStream(t *testing.T, n, first int) (string, *bufio.Reader) {
	t.Helper()
	each := make(chan struct{}, first)
	for range first {
		each <- struct{}{}
	}
	w := e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.each = each
		return r
	})
	resp := e.open(t.Context(), "POST", "/v1/chat/completions", chat(n, `,"stream":true`))
	t.Cleanup(func() { resp.Body.Close() })
	in := bufio.NewReader(resp.Body)
	var got strings.Builder
	for strings.Count(got.String(), "\n\n") < first {
		line, err := in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(line, ":") {
			got.WriteString(line)
		}
	}
	w.nc.Close()
	return got.String(), in
}

// TestDeathInMidStreamIsAnErrorEvent: where nobody comes to go on with it.
func TestDeathInMidStreamIsAnErrorEvent(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{ContinueWithin: time.Millisecond})
	_, in := e.dyingStream(t, 3, 1)
	rest, err := io.ReadAll(in)
	if err != nil || !strings.Contains(string(rest), `data: {"error":{`) || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("%q, %v", rest, err)
	}
}

func TestStreamOfADeadWorkerIsContinuedByAnother(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{ContinueWithin: time.Minute})
	got, in := e.dyingStream(t, 6, 3)
	e.startWorker(repeat)
	var want strings.Builder
	for _, c := range repeat(nil, []byte(`{"max_tokens":6}`)).chunks {
		want.WriteString("data: " + c + "\n\n")
	}
	want.WriteString("data: [DONE]\n\n")
	rest, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(rest)) {
		if !strings.HasPrefix(line, ":") {
			got += line
		}
	}
	if diff := cmp.Diff(want.String(), got); diff != "" {
		t.Error(diff)
	}
}

func TestHeldCallsSurviveANATSRestart(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	answered := make(chan answer, 1)
	go func() { answered <- e.send("POST", "/v1/chat/completions", chat(2, "")) }()
	eventually(t, "the call waits", func() bool {
		d, err := e.queue.Depth(t.Context(), "live", model)
		return err == nil && d.Waiting[job.Interactive] == 1
	})
	e.nats.stop() // the memory stream is gone
	e.nats.start(t)
	eventually(t, "NATS is back", e.nc.IsConnected)
	e.startWorker(repeat)
	if a := <-answered; a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestLargeBodiesGoByReference(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxBody: 9 << 20})
	w := e.startWorker(repeat)
	for _, size := range []int{256 << 10, 256<<10 + 1, 1<<20 - 1, 1 << 20, 1<<20 + 4096, 8 << 20} {
		body := chat(1, "")
		body = chat(1, `,"pad":"`+strings.Repeat("p", size-len(body)-len(`,"pad":""`))+`"`)
		a := e.send("POST", "/v1/chat/completions", body)
		if a.status != 200 {
			t.Fatalf("%d bytes: %d %s", size, a.status, a.body)
		}
		if calls := w.calledWith(job.ID(a.header.Get("X-Millrace-Job"))); len(calls) != 1 || string(calls[0]) != body {
			t.Errorf("%d bytes: the engine got another body", size)
		}
		id := e.submit(jobBody(body, ""))
		if o := e.wait(id); o["status"] != "completed" {
			t.Errorf("%d bytes: %v", size, o["status"])
		}
		if calls := w.calledWith(id); len(calls) != 1 || string(calls[0]) != body {
			t.Errorf("%d bytes as a job: the engine got another body", size)
		}
	}
	over := chat(1, `,"pad":"`+strings.Repeat("p", 9<<20)+`"`)
	a := e.send("POST", "/v1/chat/completions", over)
	a.wantError(t, http.StatusRequestEntityTooLarge, job.CodeRequestTooLarge, "")
	if !strings.Contains(string(a.body), "9437184") {
		t.Errorf("the limit is not named: %s", a.body)
	}
}

func TestClientThatDoesNotReadIsCut(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{WriteTimeout: time.Second})
	started := make(chan struct{}, 1)
	e.startWorker(func(*job.Job, []byte) reply {
		r := reply{status: 200}
		for range 200 {
			r.chunks = append(r.chunks, `{"x":"`+strings.Repeat("y", 200<<10)+`"}`)
		}
		started <- struct{}{}
		return r
	})
	conn := e.dial(t)
	if err := conn.(*net.TCPConn).SetReadBuffer(4 << 10); err != nil { // else the system takes in more than the answer has
		t.Fatal(err)
	}
	body := chat(1, `,"stream":true`)
	if _, err := fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body); err != nil {
		t.Fatal(err)
	}
	<-started // nothing is read
	eventually(t, "the call is not held any more", func() bool { return e.server.Held() == 0 })
}

func TestSlowAndFastCallsNeverMix(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	slow := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		r.before = slow
		return r
	})
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			a := e.send("POST", "/v1/chat/completions", chat(i+1, ""))
			if want := repeat(nil, fmt.Appendf(nil, `{"max_tokens":%d}`, i+1)).body; string(a.body) != want {
				t.Errorf("call %d got %s", i, a.body)
			}
		})
	}
	hc := &http.Client{}
	defer hc.CloseIdleConnections()
	for range 4 {
		wg.Go(func() {
			for range 500 {
				resp, err := hc.Get(e.url + "/healthz")
				if err != nil {
					t.Error(err)
					return
				}
				raw, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if string(raw) != `{"status":"ok"}` {
					t.Errorf("health is %q", raw)
				}
			}
		})
	}
	time.AfterFunc(300*time.Millisecond, func() { close(slow) })
	wg.Wait()
}
