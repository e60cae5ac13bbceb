package worker_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// TestYieldingWorkerTakesWhatOthersHaveNoRoomFor: little while another has room (what comes in the moment between two of its pulls), and the rest.
func TestYieldingWorkerTakesWhatOthersHaveNoRoomFor(t *testing.T) {
	t.Parallel()
	e := newEnv(t, time.Minute)
	fast := play(t, reply(200, `{"choices":[]}`))
	hold := make(chan struct{}, 1)
	other := play(t, reply(200, `{"choices":[]}`))
	one := func(c *workerConfig) { c.engine.MaxConcurrency = 1 }
	yields := e.work(fast.URL, generic, one)
	e.ok(e.cluster.OrderYield(t.Context(), string(yields.ID()), true))
	e.until("it says that it yields", func() bool { return e.heard(yields).Yields })
	first := e.submit(e.job(chat("alone", ""))) // its pull of before the order is used up, and nobody else is here
	e.completed(first)

	takes := e.work(other.URL, generic, one)
	astray := 0
	for range 20 {
		j := e.submit(e.job(chat("x", "")))
		e.completed(j)
		if e.get(j).Outcome.Attempts[0].Worker != takes.ID() {
			astray++
		}
	}
	if astray > 8 {
		t.Errorf("%d of 20 ran on the worker that yields", astray)
	}
	entered := make(chan struct{})
	other.then(func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-hold
		reply(200, `{"choices":[]}`)(w, r)
	})
	held := e.submit(e.job(chat("held", "")))
	<-entered
	full := e.submit(e.job(chat("y", ""), func(j *job.Job) { j.Class = job.Interactive }))
	e.completed(full)
	if w := e.get(full).Outcome.Attempts[0].Worker; w != yields.ID() {
		t.Errorf("the job that the full worker had no room for ran on %s", w)
	}
	hold <- struct{}{}
	e.completed(held)
	e.ok(e.cluster.OrderYield(t.Context(), string(yields.ID()), false))
	e.until("it yields no more", func() bool { return !e.heard(yields).Yields })
}
