package worker_test

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// TestNothingIsPulledBeforeTheModelIsLoaded, though the engine's health says that all is well: what waits costs no attempt and no delivery.
func TestNothingIsPulledBeforeTheModelIsLoaded(t *testing.T) {
	t.Parallel()
	for name, faults := range map[string]emulator.Faults{"it says that it loads": {}, "its health lies": {HealthLies: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, time.Minute)
			eng, calls := emulate(t, emulator.Config{ColdStart: 1500 * time.Millisecond, Faults: faults})
			j := e.submit(e.job(chat("x [[emulator:tokens=4]]", ""), withEvents))
			p := e.start(eng.URL)
			e.until("the worker is heard", func() bool { return len(e.cluster.Members()) > 1 })
			if n := e.pulls(); p.Ready() != nil && n != 0 {
				t.Errorf("%d pulls wait while the model loads", n)
			}
			e.completed(j)
			if rec := e.get(j); len(rec.Attempts) != 1 || rec.Charged+rec.Uncharged != 0 || calls.of(string(j.ID)) != 1 {
				t.Errorf("%d calls, record %+v", calls.of(string(j.ID)), rec)
			}
			delivered := 0
			for _, c := range e.consumers() {
				delivered += c.Delivered.Consumer
			}
			if delivered != 1 {
				t.Errorf("it was delivered %d times", delivered)
			}
		})
	}
}

// TestEngineThatIgnoresItsCallerHoldsNoSlot: a call that is over its time is given up though the engine goes on with it, the next job gets its place, and what the engine answers in the end is nobody's.
func TestEngineThatIgnoresItsCallerHoldsNoSlot(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute)
	late := make(chan struct{})
	answered := make(chan struct{}, 8)
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		<-late
		reply(200, `{"choices":[{"message":{"content":"too late"}}]}`)(w, r)
		answered <- struct{}{}
	})
	p := e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 1 })
	over := []*job.Job{
		e.submit(e.job(chat("plain", ""), func(j *job.Job) { j.RunTimeout = 100 })),
		e.submit(e.job(chat("streamed", ""), withEvents, func(j *job.Job) { j.RunTimeout = 100 })),
	}
	var ends []*results.Record
	for _, j := range over {
		rec := e.await(j)
		if rec.State != job.Failed || rec.Outcome.Error.CodeOf() != job.CodeRunTimeout {
			t.Errorf("outcome %+v", rec.Outcome)
		}
		ends = append(ends, rec)
	}
	eng.then(reply(200, `{"choices":[]}`))
	e.completed(e.submit(e.job(chat("next", ""))))
	close(late)
	for range over {
		<-answered
	}
	e.completed(e.submit(e.job(chat("and one more", ""))))
	for i, j := range over {
		if d := cmp.Diff(ends[i].Outcome, e.get(j).Outcome); d != "" {
			t.Errorf("the late answer changed the outcome: %s", d)
		}
		if got := e.outcome(j).Result; len(got) != 0 {
			t.Errorf("the late answer is kept: %s", got)
		}
	}
	e.nothingHeld(p)
}

// TestAcceptedJobsComeBackThoughTheQueueIsFull, as often as it must be, but not for ever: limits are for those who come new.
func TestAcceptedJobsComeBackThoughTheQueueIsFull(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute)
	limits := results.Limits{Queue: results.Amount{Jobs: 5}}
	eng := play(t, reply(200, `{"choices":[]}`))
	accept := func() (*job.Job, error) {
		m := e.job(chat("x", ""), asBatch)
		if _, err := e.results.Accept(t.Context(), &m.Job, m.Body, limits); err != nil {
			return nil, err
		}
		e.ok(e.queue.Enqueue(t.Context(), queue.Work, queue.AnyLane, m))
		e.ok(e.results.Queued(t.Context(), &m.Job, m.Body))
		return &m.Job, nil
	}
	entered := make(chan struct{}, 1)
	eng.then(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case entered <- struct{}{}:
		default:
		}
		<-r.Context().Done()
	})
	var all []*job.Job
	for range 5 {
		j, err := accept()
		e.ok(err)
		all = append(all, j)
	}
	if _, err := accept(); err == nil {
		t.Fatal("the queue takes a sixth")
	}
	p := e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 1 })
	<-entered
	var first *job.Job
	e.until("one runs", func() bool {
		for _, j := range all {
			if e.get(j).State == job.Running {
				first = j
			}
		}
		return first != nil
	})
	e.until("it may give way", func() bool { return p.Preemptible(first.ID) })
	p.Preempt(first.ID)
	e.until("it came back", func() bool { return e.get(first).Uncharged == 1 })
	if _, err := accept(); err == nil {
		t.Error("what came back has left its place to another")
	}
	eng.then(reply(200, `{"choices":[]}`))
	for _, j := range all {
		e.until("it ends", func() bool {
			for _, held := range all {
				p.Preempt(held.ID) // it may have been called before
			}
			return e.get(j).State.Ended()
		})
		e.completed(j)
	}
}

// TestJobThatGoesRoundIsEnded: what is given back through no fault of its own, again and again, does not circle for ever.
func TestJobThatGoesRoundIsEnded(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute)
	j := e.submit(e.job(chat("x", "")))
	for n := 1; n <= 100; n++ {
		c, err := e.results.Claim(t.Context(), results.ClaimRequest{Job: j, Worker: "w", Lease: time.Minute, AckSubject: "a", Delivered: n, Checked: true})
		e.ok(err)
		if c.Verdict != results.Taken {
			t.Fatalf("attempt %d: %+v", n, c)
		}
		e.ok(e.results.GiveBack(t.Context(), j.ID, c.Token, 0, false, "drained"))
	}
	unready := make(chan struct{})
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		<-unready
		reply(503, "")(w, r)
	})
	p := e.work(eng.URL, generic)
	eng.setUnready(true)
	close(unready)
	rec := e.await(j)
	if rec.State != job.Failed || rec.Outcome.Error.CodeOf() != job.CodeMaxAttempts || eng.of(string(j.ID)) != 1 {
		t.Errorf("%d calls, outcome %+v", eng.of(string(j.ID)), rec.Outcome)
	}
	e.until("the engine is known to be not ready", func() bool { return p.Ready() != nil && e.member(p).State == cluster.Unready })
}
