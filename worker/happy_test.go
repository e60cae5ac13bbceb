package worker_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
)

func TestDurableJobIsStreamedAssembledAndSettled(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	p := e.work(eng.URL)
	streamed := e.submit(e.job(chat("hello [[emulator:tokens=12]]", ""), withEvents))
	plain := e.submit(e.job(chat("hello [[emulator:tokens=12]]", "")))
	assembled, whole := e.completed(streamed), e.completed(plain)
	if a, b := job.AnswerText(assembled), job.AnswerText(whole); a == "" || a != b {
		t.Errorf("streamed %q, in one piece %q", a, b)
	}
	rec := e.get(streamed)
	o := rec.Outcome
	if o.StatusCode != 200 || o.ContentType != "application/json" || o.Usage == nil || o.Usage.CompletionTokens != 12 || o.FirstToken < o.Started || o.Finished < o.FirstToken ||
		o.ResultSize != int64(len(assembled)) || len(o.Attempts) != 1 || o.Attempts[0].Worker != p.ID() || o.Attempts[0].Outcome != "completed" {
		t.Errorf("outcome %+v", o)
	}
	events := e.events(streamed)
	if diff := cmp.Diff([]job.EventKind{job.EventStatus, job.EventToken, job.EventDone}, kinds(events)); diff != "" {
		t.Error(diff)
	}
	var text strings.Builder
	for i, ev := range events {
		if ev.N != int64(i)+1 || ev.Token != o.Token {
			t.Errorf("event %d has number %d and token %d", i, ev.N, ev.Token)
		}
		if ev.Kind == job.EventToken {
			text.WriteString(delta(t, ev.Data))
		}
	}
	if text.String() != job.AnswerText(assembled) {
		t.Errorf("the events tell %q, the answer is %q", text.String(), job.AnswerText(assembled))
	}
	if o.LastEvent != int64(len(events)) || rec.N != o.LastEvent {
		t.Errorf("last event %d, in the record %d, of %d", o.LastEvent, rec.N, len(events))
	}
	if n := len(e.events(plain)); n != 0 {
		t.Errorf("a job that keeps no events has %d", n)
	}
	if n := len(calls.list()); n != 2 {
		t.Errorf("the engine was called %d times", n)
	}
	if raw, err := e.results.Result(t.Context(), plain.ID); err != nil || string(raw) != string(whole) {
		t.Errorf("the store has %s (%v), DONE %s", raw, err, whole)
	}
	e.idle(p)
}

// delta is the text in one chunk of a chat's stream.
func delta(t testing.TB, data []byte) string {
	t.Helper()
	var chunk struct {
		Choices []struct{ Delta struct{ Content string } }
	}
	if err := json.Unmarshal(data, &chunk); err != nil {
		t.Fatalf("%s: %v", data, err)
	}
	var text string
	for _, c := range chunk.Choices {
		text += c.Delta.Content
	}
	return text
}

// idle waits until the worker holds nothing any more: no reservation, no job in hand, none in its held set.
func (e *env) idle(p *process) {
	e.Helper()
	var held []job.ID
	var running, inHand float64
	defer func() {
		if e.Failed() {
			e.Logf("%v run, %v are in hand, the held set has %v", running, inHand, held)
			for _, id := range held {
				rec, err := e.results.Get(context.Background(), id)
				e.Logf("%+v %v", rec, err)
			}
		}
	}()
	e.until("the worker holds nothing", func() bool {
		var err error
		held, err = e.results.Held(e.Context(), p.ID())
		e.ok(err)
		running, inHand = gauge(e, p, "millrace_worker_running"), gauge(e, p, "millrace_worker_in_hand")
		return len(held) == 0 && running == 0 && inHand == 0
	})
}

// gauge reads a metric of a worker, the sum of its series.
func gauge(e *env, p *process, name string) float64 {
	e.Helper()
	families, err := p.reg.Gather()
	e.ok(err)
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return sum
}

// TestEngineGetsTheClientsBytes: but for the fields that ask for a stream, and these only where they must change.
func TestEngineGetsTheClientsBytes(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	const awkward = `"seed": 9007199254740993 ,"b":"<b>&</b>\u00e9\/","z":1,"a":1e400,"a": 2, "stop":null, "x":{"y":[null,-0.0]},` + "\n\t"
	eng := play(t, func(w http.ResponseWriter, r *http.Request) { reply(200, `{"choices":[]}`)(w, r) })
	e.work(eng.URL, generic)
	big := chat(strings.Repeat("long ", blob.Threshold/4), awkward)
	for name, c := range map[string]struct {
		body, want string
		change     func(*job.Job)
	}{
		"without events as it came":        {chat("x", awkward), chat("x", awkward), func(*job.Job) {}},
		"without events, but asked for":    {chat("x", awkward+`"stream":true,"stream_options":{"a":1},`), chat("x", awkward+`"stream":false,`), func(*job.Job) {}},
		"with events":                      {chat("x", awkward), strings.TrimSuffix(chat("x", awkward), "}") + `,"stream_options":{"include_usage":true},"stream":true}`, withEvents},
		"with events, streaming by itself": {chat("x", awkward+`"stream":true,"stream_options":{"include_usage":true},`), chat("x", awkward+`"stream":true,"stream_options":{"include_usage":true},`), withEvents},
		"from the object store":            {big, big, func(j *job.Job) { j.Blob = job.RequestBlob(j.ID) }},
	} {
		t.Run(name, func(t *testing.T) {
			j := e.submit(e.job(c.body, c.change))
			e.completed(j)
			for _, s := range eng.list() {
				if s.id == string(j.ID) {
					if diff := cmp.Diff(c.want, s.body); diff != "" {
						t.Error(diff)
					}
				}
			}
			if n := eng.of(string(j.ID)); n != 1 {
				t.Errorf("%d calls", n)
			}
			if j.Blob != "" {
				e.until("the request's object is gone", func() bool {
					_, err := e.blobs.Get(t.Context(), j.Blob)
					return err != nil
				})
			}
		})
	}
}

func TestEmbeddings(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{})
	e.work(eng.URL)
	body := `{"model":"emulator-test","input":["a","b"]}`
	j := e.submit(e.job(body, func(j *job.Job) { j.Endpoint = job.Embeddings }))
	var answer struct {
		Data []struct{ Embedding []float64 }
	}
	if err := json.Unmarshal(e.completed(j), &answer); err != nil || len(answer.Data) != 2 {
		t.Errorf("%v, %d vectors", err, len(answer.Data))
	}
	if got := calls.list(); len(got) != 1 || got[0].path != "/v1/embeddings" || got[0].body != body {
		t.Errorf("the engine got %+v", got)
	}
}

func TestLargeAnswersGoToTheObjectStore(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	large := `{"choices":[{"index":0,"message":{"content":"` + strings.Repeat("x", blob.Threshold+1) + `"}}]}`
	eng := play(t, reply(200, large))
	e.work(eng.URL, generic)
	j := e.submit(e.job(chat("x", "")))
	if inline := e.completed(j); inline != nil {
		t.Errorf("%d bytes stand in DONE", len(inline))
	}
	o := e.get(j).Outcome
	if o.Blob != job.ResultBlob(j.ID, o.Token) || o.ResultSize != int64(len(large)) {
		t.Errorf("outcome %+v", o)
	}
	if got := e.object(o.Blob); got != large {
		t.Errorf("the object has %d bytes", len(got))
	}
}
