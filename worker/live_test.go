package worker_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/testenv"
)

// desk is the API's side of live jobs.
func (e *env) desk() *relay.Desk {
	e.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	e.Cleanup(cancel)
	d, err := e.relay.Desk(ctx, api, testenv.Log(e))
	e.ok(err)
	return d
}

// call publishes a live job and returns its seat.
func (e *env) call(d *relay.Desk, m *queue.Message) *relay.Seat {
	e.Helper()
	s := d.Expect(m.Job.ID)
	e.Cleanup(s.Close)
	e.ok(e.queue.Enqueue(context.Background(), queue.Live, queue.AnyLane, m))
	return s
}

func live(j *job.Job) { j.API, j.Class = api, job.Interactive }

func liveStream(j *job.Job) {
	live(j)
	j.Stream = true
}

// collect reads a seat's answer to its end.
func (e *env) collect(s *relay.Seat) (*relay.Head, string, *relay.End) {
	e.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var head *relay.Head
	var body strings.Builder
	for {
		p, err := s.Next(ctx)
		e.ok(err)
		switch {
		case p.Head != nil:
			head = p.Head
		case p.End != nil:
			return head, body.String(), p.End
		default:
			body.Write(p.Data)
		}
	}
}

// settledLive waits for a live job's outcome, and until its message is gone.
func (e *env) settledLive(j *job.Job) *job.Outcome {
	e.Helper()
	var o *job.Outcome
	e.until("the live job is settled", func() bool {
		r, err := e.queue.Outcome(context.Background(), j.Tenant, j.Group, j.ID)
		if err == nil {
			o = &r.Outcome
			if r.Result != nil {
				e.Error("the answer of a live job is stored")
			}
		}
		return err == nil
	})
	e.until("the message is gone", func() bool {
		for _, err := range e.queue.Waiting(context.Background(), queue.Live, j.Model, "", false) {
			e.ok(err)
			return false
		}
		return true
	})
	return o
}

func TestLiveJobIsPassedThroughByteForByte(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	const usage = `{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`
	const first, second = `{ "choices":[{"index":0,"delta":{"content":"a"}}], "x": 9007199254740993}`, `{"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":"stop"}]}`
	whole := ` {"id":"x","choices":[{"index":0,"message":{"content":"<b>"}}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}` + "\n"
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/completions" {
			reply(200, whole)(w, r)
			return
		}
		send(w, first)
		_, _ = io.WriteString(w, ": a comment\n\n")
		send(w, second, usage, "[DONE]")
	})
	e.work(eng.URL, generic)
	d := e.desk()

	m := e.job(chat("x", `"stream":true,`), liveStream)
	head, body, end := e.collect(e.call(d, m))
	if want := "data: " + first + "\n\n: a comment\n\ndata: " + second + "\n\ndata: [DONE]\n\n"; body != want { // the usage was asked by us alone
		t.Errorf("the client got %q", body)
	}
	if head == nil || head.StatusCode != 200 || head.ContentType != "text/event-stream" || end.State != job.Completed || end.Usage == nil || end.Usage.TotalTokens != 5 {
		t.Errorf("head %+v, end %+v", head, end)
	}
	if o := e.settledLive(&m.Job); o.State != job.Completed || o.Usage == nil || o.Usage.TotalTokens != 5 || o.FirstToken == 0 {
		t.Errorf("outcome %+v", o)
	}

	raw := `{"model":"emulator-test","stream":false,"prompt":"<b>"}`
	m = e.job(raw, live, func(j *job.Job) { j.Endpoint = job.Completions })
	head, body, end = e.collect(e.call(d, m))
	if body != whole || head.ContentType != "application/json" || end.State != job.Completed || end.Usage.TotalTokens != 5 {
		t.Errorf("head %+v, body %q, end %+v", head, body, end)
	}
	if o := e.settledLive(&m.Job); o.Usage == nil || o.Usage.TotalTokens != 5 {
		t.Errorf("outcome %+v", o)
	}
	if got := eng.list(); got[len(got)-1].body != raw {
		t.Errorf("the engine got %q", got[len(got)-1].body)
	}
}

func TestLiveJobAgainstTheEmulator(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	m := e.job(chat("hello [[emulator:tokens=9]]", `"stream":true,`), liveStream)
	_, body, end := e.collect(e.call(e.desk(), m))
	if !strings.HasSuffix(body, "data: [DONE]\n\n") || end.Usage == nil || end.Usage.CompletionTokens != 9 {
		t.Errorf("body %q, end %+v", body, end)
	}
	e.settledLive(&m.Job)
	e.idle(p)
}

// TestLiveErrorsAreRetriedAFewTimes: the last one reaches the client in the engine's own words.
func TestLiveErrorsAreRetriedAFewTimes(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(500, `{"error":{"message":"broken"}}`))
	e.work(eng.URL, generic)
	d := e.desk()
	m := e.job(chat("x", ""), live)
	head, body, end := e.collect(e.call(d, m))
	if head.StatusCode != 500 || body != `{"error":{"message":"broken"}}` || end.State != job.Failed || end.Error != nil {
		t.Errorf("head %+v, body %q, end %+v", head, body, end)
	}
	if n := eng.of(string(m.Job.ID)); n != 3 {
		t.Errorf("the engine was called %d times", n)
	}
	if o := e.settledLive(&m.Job); o.State != job.Failed || o.Error.CodeOf() != job.CodeEngineError || o.StatusCode != 500 {
		t.Errorf("outcome %+v", o)
	}

	eng.then(reply(400, `{"error":{"message":"bad"}}`)) // is the client's fault
	m = e.job(chat("x", ""), live)
	head, body, _ = e.collect(e.call(d, m))
	if head.StatusCode != 400 || body != `{"error":{"message":"bad"}}` || eng.of(string(m.Job.ID)) != 1 {
		t.Errorf("head %+v, body %q after %d calls", head, body, eng.of(string(m.Job.ID)))
	}

	eng.then(func(w http.ResponseWriter, r *http.Request) { // nobody is kept waiting for so long
		w.Header().Set("Retry-After", "60")
		reply(429, `{"error":{"message":"later"}}`)(w, r)
	})
	m = e.job(chat("x", ""), live)
	head, body, _ = e.collect(e.call(d, m))
	if head.StatusCode != 429 || body != `{"error":{"message":"later"}}` || eng.of(string(m.Job.ID)) != 1 {
		t.Errorf("head %+v, body %q after %d calls", head, body, eng.of(string(m.Job.ID)))
	}

	eng.then(stream(`{"choices":[{"delta":{"content":"a"}}]}`, `{"error":{"message":"out of memory"}}`)) // shown in part: no other attempt can begin anew
	m = e.job(chat("x", `"stream":true,`), liveStream)
	_, body, end = e.collect(e.call(d, m))
	if strings.Contains(body, "DONE") || end.State != job.Failed || end.Error.CodeOf() != job.CodeEngineError || !strings.Contains(end.Error.Message, "out of memory") ||
		eng.of(string(m.Job.ID)) != 1 {
		t.Errorf("body %q, end %+v after %d calls", body, end, eng.of(string(m.Job.ID)))
	}
}

// TestBrokenAnswerUnderAGoodStatusIsNone: it is tried again as any failure is, and the client gets an error in its place, whether it wants a stream or not.
func TestBrokenAnswerUnderAGoodStatusIsNone(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 30*time.Second)
	broken := map[string]string{
		"half": `{"id":`, "a comma too many": `{"id":"x",}`, "two": `{"id":"x"}{"id":"y"}`, "a raw newline": "{\"id\":\"x\ny\"}", "no number": `{"id":NaN}`, "bytes that are no text": "{\"id\":\"\xff\"}", "nothing": "",
	}
	type asked struct {
		name string
		m    *queue.Message
		seat *relay.Seat
	}
	var all []asked
	answers := map[string]string{}
	for name, body := range broken {
		for _, more := range []string{"", `"stream":true,`} {
			m := e.job(chat("x", more), live, func(j *job.Job) { j.Stream = more != "" })
			answers[string(m.Job.ID)] = body
			all = append(all, asked{name, m, nil})
		}
	}
	eng := play(t, func(w http.ResponseWriter, r *http.Request) { reply(200, answers[r.Header.Get("X-Request-Id")])(w, r) })
	e.work(eng.URL, generic, func(c *workerConfig) { c.FailuresInRow = 1000 })
	d := e.desk()
	for i := range all {
		all[i].seat = e.call(d, all[i].m)
	}
	for _, a := range all {
		head, body, end := e.collect(a.seat)
		if head != nil || body != "" || end.State != job.Failed || end.Error.CodeOf() != job.CodeEngineError || eng.of(string(a.m.Job.ID)) != 3 {
			t.Errorf("%s: head %+v, body %q, end %+v after %d calls", a.name, head, body, end, eng.of(string(a.m.Job.ID)))
		}
	}
}

// TestStreamWhoseChoicesHaveAllEndedIsWhole, though its engine says no [DONE] and not even the last event's blank line. One that ends before has broken off.
func TestStreamWhoseChoicesHaveAllEndedIsWhole(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 30*time.Second)
	const (
		first, second = `{"choices":[{"index":0,"delta":{"content":"a"}}]}`, `{"choices":[{"index":1,"delta":{"content":"b"}}]}`
		ends, other   = `{"choices":[{"index":0,"delta":{"content":"c"},"finish_reason":"stop"}]}`, `{"choices":[{"index":1,"delta":{},"finish_reason":"length"}]}`
		usage         = `{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}`
	)
	event := func(chunks ...string) string { return "data: " + strings.Join(chunks, "\n\ndata: ") }
	eng := play(t, nil)
	e.work(eng.URL, generic, func(c *workerConfig) { c.FailuresInRow = 1000 })
	d := e.desk()
	for name, c := range map[string]struct {
		more, stream string
		whole        bool
	}{
		"all is there":          {"", event(first, ends, usage) + "\n\n", true},
		"no blank line":         {"", event(first, ends) + "\n", true},
		"no end of the line":    {"", event(first, ends), true},
		"both of two":           {`"n":2,`, event(first, second, other, ends) + "\n\n", true},
		"one of two":            {`"n":2,`, event(first, second, ends) + "\n\n", false},
		"the other never began": {`"n":2,`, event(first, ends) + "\n\n", false},
		"no reason":             {"", event(first) + "\n\n", false},
		"cut in the last chunk": {"", event(first, ends[:len(ends)-1]), false},
		"an empty reason":       {"", event(first, strings.Replace(ends, "stop", "", 1)) + "\n\n", false},
	} {
		eng.then(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, c.stream)
		})
		m := e.job(chat("x", `"stream":true,"stream_options":{"include_usage":true},`+c.more), liveStream)
		head, body, end := e.collect(e.call(d, m))
		if c.whole {
			if want := strings.TrimRight(c.stream, "\n") + "\n\n"; head == nil || body != want || end.State != job.Completed || end.Error != nil {
				t.Errorf("%s: the client got %q, end %+v; want %q", name, body, end, want)
			}
		} else if end.State != job.Failed || end.Error.CodeOf() != job.CodeEngineError || !strings.HasPrefix(body, "data: "+first+"\n\n") {
			t.Errorf("%s: the client got %q, end %+v", name, body, end)
		}
	}
	eng.then(func(w http.ResponseWriter, _ *http.Request) { // kept as events, and as a response made of a chat
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, event(first, ends, usage)+"\n\n")
	})
	if got := e.completed(e.submit(e.job(chat("x", ""), withEvents))); !strings.Contains(string(got), `"content":"ac"`) {
		t.Errorf("the job's answer is %s", got)
	}
	m := e.job(`{"model":"emulator-test","stream":true,"input":"x"}`, liveStream, func(j *job.Job) { j.Endpoint = job.Responses })
	if _, body, end := e.collect(e.call(d, m)); end.State != job.Completed || !strings.Contains(body, "response.completed") {
		t.Errorf("the response is %q, end %+v", body, end)
	}
}

func TestLiveJobIsStoppedWhenItsClientLeaves(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	d := e.desk()
	m := e.job(chat("hello [[emulator:hang-after=2]]", `"stream":true,`), liveStream)
	s := e.call(d, m)
	_, err := s.Next(t.Context())
	e.ok(err)
	left := time.Now()
	s.Close()
	e.until("the engine is told", func() bool { return eng.Counts().Disconnects == 1 })
	if took := time.Since(left); took > 5*time.Second {
		t.Errorf("the engine heard after %s", took)
	}
	if o := e.settledLive(&m.Job); o.State != job.Cancelled || o.Error.CodeOf() != job.CodeClientGone {
		t.Errorf("outcome %+v", o)
	}
	e.idle(p)

	gone := e.job(chat("never [[emulator:tokens=2]]", ""), live) // its client has left before it was pulled
	e.ok(e.queue.Enqueue(t.Context(), queue.Live, queue.AnyLane, gone))
	e.until("the message is gone", func() bool {
		for range e.queue.Waiting(t.Context(), queue.Live, model, "", false) {
			return false
		}
		return true
	})
	if n := calls.of(string(gone.Job.ID)); n != 0 {
		t.Errorf("the engine was called %d times for nobody", n)
	}
}

// TestLiveJobTakenFromItsWorkerIsNotSettledByIt: its API has given it to another.
func TestLiveJobTakenFromItsWorkerIsNotSettledByIt(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Second)
	held := make(chan struct{})
	t.Cleanup(func() { close(held) })
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-held:
		case <-r.Context().Done():
		}
	})
	p := e.work(eng.URL, generic)
	m := e.job(chat("x", ""), live)
	s := e.call(e.desk(), m)
	e.until("it runs", func() bool { return eng.of(string(m.Job.ID)) == 1 })
	eng.then(reply(200, `{"choices":[]}`))
	s.Release(true)
	_, body, end := e.collect(s) // the message is delivered again after its ack wait, for nobody answers it meanwhile
	if body != `{"choices":[]}` || end.State != job.Completed {
		t.Errorf("body %q, end %+v", body, end)
	}
	if o := e.settledLive(&m.Job); o.State != job.Completed {
		t.Errorf("outcome %+v", o)
	}
	if n := gauge(e, p, "millrace_worker_attempts_total"); n != 2 { // fenced, completed
		t.Errorf("%v attempts were counted", n)
	}
}

func TestLiveJobsOfADeadAPIAreCancelled(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	m := e.job(chat("x", ""), live, func(j *job.Job) { j.API = "dead" })
	e.until("the API counts as dead", func() bool { return !p.cluster.Alive("dead") })
	e.ok(e.queue.Enqueue(t.Context(), queue.Live, queue.AnyLane, m))
	if o := e.settledLive(&m.Job); o.State != job.Cancelled || o.Error.CodeOf() != job.CodeClientGone {
		t.Errorf("outcome %+v", o)
	}
	if n := len(calls.list()); n != 0 {
		t.Errorf("the engine was called %d times", n)
	}
}

// TestLiveJobSurvivesAnEngineThatIsDown: nothing is charged, and it is answered when the engine is back.
func TestLiveJobSurvivesAnEngineThatIsDown(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(503, ""))
	eng.setUnready(false)
	e.work(eng.URL, generic)
	m := e.job(chat("x", ""), live)
	eng.setUnready(true)
	s := e.call(e.desk(), m)
	e.until("it was tried", func() bool { return eng.of(string(m.Job.ID)) >= 1 })
	eng.then(reply(200, `{"choices":[]}`))
	eng.setUnready(false)
	_, _, end := e.collect(s)
	if end.State != job.Completed {
		t.Errorf("end %+v", end)
	}
	if _, err := s.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("behind the end: %v", err)
	}
}
