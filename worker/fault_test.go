package worker_test

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/testenv"
)

func TestEngineRefusalFailsTheJobAndKeepsItsWords(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	const refusal = `{"error":{"message":"no such thing","type":"BadRequestError","param":"x","code":400}}`
	eng := play(t, reply(400, refusal))
	e.work(eng.URL, generic)
	for _, change := range []func(*job.Job){withEvents, func(*job.Job) {}} {
		j := e.submit(e.job(chat("x", ""), change))
		rec := e.await(j)
		if o := rec.Outcome; o.State != job.Failed || o.StatusCode != 400 || o.Error.CodeOf() != job.CodeEngineError || o.Error.Type != job.TypeInvalidRequest {
			t.Errorf("outcome %+v", rec.Outcome)
		}
		if got := string(e.outcome(j).Result); got != refusal {
			t.Errorf("kept %q", got)
		}
		if n := eng.of(string(j.ID)); n != 1 {
			t.Errorf("%d calls", n)
		}
	}
}

// TestEngineErrorsAreChargedAndEnd: a constant error gets as many calls as there are attempts, with growing pauses, and its last words are kept.
func TestEngineErrorsAreChargedAndEnd(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(429, `{"error":{"message":"busy"}}`))
	p := e.work(eng.URL, generic)
	j := e.submit(e.job(chat("x", ""), withEvents))
	rec := e.await(j)
	if o := rec.Outcome; o.State != job.Failed || o.StatusCode != 429 || o.Error.CodeOf() != job.CodeEngineError || len(o.Attempts) != 5 {
		t.Errorf("outcome %+v", o)
	}
	if n := eng.of(string(j.ID)); n != 5 {
		t.Errorf("%d calls", n)
	}
	for i, a := range rec.Outcome.Attempts {
		want := "engine_429"
		if i == 4 {
			want = "failed"
		}
		if a.Outcome != want || a.Ended < a.Started {
			t.Errorf("attempt %d: %+v", i+1, a)
		}
		if i > 0 {
			pause, least := (a.Started - rec.Outcome.Attempts[i-1].Ended).Duration(), 10*time.Millisecond<<(i-1)
			if pause < least {
				t.Errorf("attempt %d began after %s, want at least %s", i+1, pause, least)
			}
		}
	}
	e.idle(p)
}

// TestNoPageIsAnAnswer: a proxy's page, a redirect and an empty answer are failed attempts, not results.
func TestNoPageIsAnAnswer(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]http.HandlerFunc{
		"a page with 200": reply(200, "<html>welcome</html>"),
		"nothing":         reply(204, ""),
		"a redirect":      reply(302, ""),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, 5*time.Second)
			eng := play(t, answer)
			e.work(eng.URL, generic)
			j := e.submit(e.job(chat("x", "")))
			if o := e.await(j).Outcome; o.State != job.Failed || o.Error.CodeOf() != job.CodeEngineError || len(o.Attempts) != 5 {
				t.Errorf("outcome %+v", o)
			}
		})
	}
}

func TestRetryAfterIsAFloor(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "1")
		reply(429, "")(w, r)
	})
	e.work(eng.URL, generic)
	j := e.submit(e.job(chat("x", "")))
	e.until("it goes back", func() bool { return e.get(j).NotBefore > 0 })
	eng.then(reply(200, `{"choices":[]}`))
	fresh := e.submit(e.job(chat("y", ""))) // does not wait behind it
	e.completed(fresh)
	e.completed(j)
	rec := e.get(j)
	if pause := (rec.Outcome.Attempts[1].Started - rec.Outcome.Attempts[0].Ended).Duration(); pause < time.Second {
		t.Errorf("tried again after %s", pause)
	}
	if e.get(fresh).Outcome.Finished > rec.Outcome.Finished {
		t.Error("a fresh job waited for one that waits for its retry")
	}
}

// TestBrokenStreamIsRetriedFromNothing where the engine does not continue: readers are told by a reset, and the answer is that of the second attempt alone.
func TestBrokenStreamIsRetriedFromNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, calls := emulate(t, emulator.Config{NoContinuation: true})
	e.work(eng.URL)
	for _, how := range []string{"reset-after=3", "error-after=3", "broken-chunk-after=3"} {
		j := e.submit(e.job(chat("hello [[emulator:times=1,"+how+"]]", ""), withEvents))
		e.completed(j)
		rec := e.get(j)
		if o := rec.Outcome; len(o.Attempts) < 2 || o.Attempts[0].Outcome != "engine_error" || o.Usage == nil || rec.Charged != 1 {
			t.Errorf("%s: outcome %+v, charged %d", how, o, rec.Charged)
		}
		events := e.events(j)
		if diff := cmp.Diff([]job.EventKind{job.EventToken, job.EventReset, job.EventToken, job.EventDone}, e.told(j)); diff != "" {
			t.Errorf("%s: %s", how, diff)
		}
		var text strings.Builder
		for i, ev := range events {
			if ev.N != int64(i)+1 {
				t.Errorf("%s: event %d has number %d", how, i, ev.N)
			}
			switch ev.Kind {
			case job.EventReset:
				text.Reset()
			case job.EventToken:
				text.WriteString(delta(t, ev.Data))
			}
		}
		if want := job.AnswerText(e.outcome(j).Result); text.String() != want || want == "" {
			t.Errorf("%s: the events tell %q, the answer is %q", how, text.String(), want)
		}
		if n := calls.of(string(j.ID)); n < 2 {
			t.Errorf("%s: %d calls", how, n)
		}
	}
}

// TestEngineThatIsNotReadyChargesNobody: it answers 503 as if it loaded, and cannot be reached at all. The worker stops taking work, and goes on when a probe passes.
func TestEngineThatIsNotReadyChargesNobody(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(503, ""))
	p := e.work(eng.URL, generic)
	eng.setUnready(true)
	loading := e.submit(e.job(chat("x", "")))
	e.until("the worker says so", func() bool { return p.Ready() != nil })
	if w := e.member(p); w.State != cluster.Unready {
		t.Errorf("it says that it is %s", w.State)
	}
	e.until("it goes back", func() bool { return e.get(loading).State == job.Queued })
	if rec := e.get(loading); rec.Charged != 0 || rec.Uncharged != 1 || rec.Attempts[0].Outcome != "engine_unready" {
		t.Errorf("record %+v", rec)
	}
	eng.then(reply(200, `{"choices":[]}`))
	eng.setUnready(false)
	e.completed(loading)

	eng.Listener.Close() // nothing can be reached there any more
	eng.CloseClientConnections()
	down := e.submit(e.job(chat("x", "")))
	e.until("it was tried", func() bool { return e.get(down).Uncharged > 0 || p.Ready() != nil })
	e.until("the worker says so", func() bool { return p.Ready() != nil })
	if rec := e.get(down); rec.Charged != 0 {
		t.Errorf("record %+v", rec)
	}
}

// member is what the worker's heartbeat says of it, as others hear it.
func (e *env) member(p *process) *cluster.WorkerInfo {
	e.Helper()
	var info *cluster.WorkerInfo
	e.until("the heartbeat tells what the worker knows", func() bool {
		for _, m := range e.cluster.Workers(model) {
			if m.ID == string(p.ID()) && (m.Worker.State == cluster.Ready) == (p.Ready() == nil) {
				info = m.Worker
				return true
			}
		}
		return false
	})
	return info
}

// Test503OfAReadyEngineIsCharged: it is the job then.
func Test503OfAReadyEngineIsCharged(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(503, ""))
	p := e.work(eng.URL, generic)
	rec := e.await(e.submit(e.job(chat("x", ""))))
	if rec.State != job.Failed || len(rec.Outcome.Attempts) != 5 || rec.Uncharged != 0 {
		t.Errorf("record %+v", rec)
	}
	if err := p.Ready(); err != nil {
		t.Error(err)
	}
}

// TestHungEngineIsFoundStalled: it accepts and never answers, while its health is good. Its work ends on another worker, uncharged.
func TestHungEngineIsFoundStalled(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	hung, _ := emulate(t, emulator.Config{})
	p := e.work(hung.URL, func(c *workerConfig) { c.StallTimeout, c.ProbeTimeout = 500*time.Millisecond, 500*time.Millisecond })
	e.ok(hung.SetFaults(emulator.Faults{Stall: true}))
	streamed, plain := e.submit(e.job(chat("a", ""), withEvents)), e.submit(e.job(chat("b", "")))
	e.until("the worker says so", func() bool { return p.Ready() != nil })
	if w := e.member(p); w.State != cluster.Stalled || !strings.Contains(w.Reason, "engine_stalled") {
		t.Errorf("it says that it is %s: %s", w.State, w.Reason)
	}
	e.until("both go back", func() bool { return e.get(streamed).Uncharged > 0 && e.get(plain).Uncharged > 0 })
	e.until("the engine is told", func() bool { return hung.Stats().Running+hung.Stats().Waiting == 0 })
	other, _ := emulate(t, emulator.Config{})
	e.work(other.URL)
	for _, j := range []*job.Job{streamed, plain} {
		e.completed(j)
		if rec := e.get(j); rec.Charged != 0 || rec.Outcome.Attempts[0].Outcome != "engine_stalled" {
			t.Errorf("record %+v", rec)
		}
	}
	e.idle(p)
	e.ok(hung.SetFaults(emulator.Faults{}))
	e.until("it takes work again", func() bool { return p.Ready() == nil })
}

// TestLongAnswerInOnePieceIsNoStall: of an engine that does not count its tokens.
func TestLongAnswerInOnePieceIsNoStall(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	release := make(chan struct{})
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
			reply(200, `{"choices":[]}`)(w, r)
		case <-r.Context().Done():
		}
	})
	p := e.work(eng.URL, generic, func(c *workerConfig) { c.StallTimeout = 100 * time.Millisecond })
	j := e.submit(e.job(chat("x", "")))
	e.running(j, 1)
	probes := eng.probed()
	e.until("it is probed instead, and again", func() bool { return eng.probed() >= probes+3 })
	close(release)
	e.completed(j)
	if rec := e.get(j); len(rec.Outcome.Attempts) != 1 {
		t.Errorf("attempts %+v", rec.Outcome.Attempts)
	}
	if err := p.Ready(); err != nil {
		t.Error(err)
	}
}

// TestPanicIsChargedAndTheJobGoesOn: what panics is the log, which is told when an engine breaks off.
func TestPanicIsChargedAndTheJobGoesOn(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng, _ := emulate(t, emulator.Config{})
	p := e.work(eng.URL, func(c *workerConfig) {
		c.log = slog.New(&trap{testenv.Log(t).Handler(), "the engine gave no whole answer"})
	})
	j := e.submit(e.job(chat("x [[emulator:tokens=5,times=1,reset-after=2]]", ""), withEvents))
	e.completed(j)
	if rec := e.get(j); rec.Charged != 1 || rec.Outcome.Attempts[0].Outcome != "internal_error" {
		t.Errorf("record %+v", rec)
	}
	if n := gauge(e, p, "millrace_worker_panics_total"); n != 1 {
		t.Errorf("%v panics counted", n)
	}
	e.idle(p)
}

// trap panics when it is to log a message.
type trap struct {
	slog.Handler
	message string
}

func (h *trap) Enabled(context.Context, slog.Level) bool { return true }

func (h *trap) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == h.message {
		panic(h.message)
	}
	if !h.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

func (h *trap) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &trap{h.Handler.WithAttrs(attrs), h.message}
}
