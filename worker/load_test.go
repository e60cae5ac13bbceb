package worker_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// TestBurstIsDeliveredOnce: a worker with four slots never pulls what it must give back.
func TestBurstIsDeliveredOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t, 5*time.Second)
	eng := play(t, reply(200, `{"choices":[]}`))
	var jobs []*job.Job
	for i := range 500 {
		jobs = append(jobs, e.submit(e.job(chat("x", ""), func(j *job.Job) { j.Class = job.Classes()[i%3] })))
	}
	p := e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 4 })
	for _, j := range jobs {
		e.until("it ends", func() bool { return e.get(j).State == job.Completed })
	}
	e.until("no message is left", func() bool {
		present, err := e.queue.Present(t.Context(), model)
		e.ok(err)
		return len(present) == 0
	})
	e.idle(p)
	delivered := 0
	for _, c := range e.consumers() {
		delivered += c.Delivered.Consumer
	}
	// Batch work that made room for an interactive job comes again.
	if preempted := int(gauge(e, p, "millrace_worker_attempts_total")) - len(jobs); delivered != len(jobs)+preempted {
		t.Errorf("%d deliveries of %d jobs, of which %d were preempted", delivered, len(jobs), preempted)
	}
}

// consumer is what the server says of one.
type consumer struct {
	Delivered struct {
		Consumer int `json:"consumer_seq"`
	} `json:"delivered"`
	Waiting int `json:"num_waiting"` // pulls
}

// consumers are those of durable work that all workers share, one for each class.
func (e *env) consumers() []consumer {
	e.Helper()
	var all []consumer
	for _, c := range job.Classes() {
		m, err := e.nc.Request("$JS.API.CONSUMER.INFO.WORK_"+string(model)+"."+string(c), nil, patience)
		e.ok(err)
		var info consumer
		e.ok(json.Unmarshal(m.Data, &info))
		all = append(all, info)
	}
	return all
}

// pulls counts those that wait at the server for durable work.
func (e *env) pulls() int {
	e.Helper()
	n := 0
	for _, c := range e.consumers() {
		n += c.Waiting
	}
	return n
}
