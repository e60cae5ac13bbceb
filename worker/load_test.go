package worker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/testenv"
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
	delivered := 0
	for _, c := range job.Classes() {
		m, err := e.nc.Request("$JS.API.CONSUMER.INFO.WORK_"+string(model)+"."+string(c), nil, patience)
		e.ok(err)
		var info struct {
			Delivered struct {
				Consumer int `json:"consumer_seq"`
			} `json:"delivered"`
		}
		e.ok(json.Unmarshal(m.Data, &info))
		delivered += info.Delivered.Consumer
	}
	if delivered != len(jobs) {
		t.Errorf("%d deliveries of %d jobs", delivered, len(jobs))
	}
	e.idle(p)
}

// TestLedgerReturnsToZero: after a thousand jobs of all kinds, of which the engine fails a third, some are cancelled, and some lose their client.
func TestLedgerReturnsToZero(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	e := newEnvOn(t, 5*time.Second, r.URL(), func() {})
	eng, _ := emulate(t, emulator.Config{Faults: emulator.Faults{ErrorRate: 0.2, ResetRate: 0.13, PreemptionRate: 0.01}})
	p := e.work(eng.URL, func(c *workerConfig) { c.RetryDelay = time.Millisecond })
	d := e.desk()
	var durable []*job.Job
	var seats []*relay.Seat
	for i := range 1000 {
		body := chat(fmt.Sprintf("number %d [[emulator:tokens=%d]]", i, 1+i%20), "")
		switch {
		case i%10 == 0:
			s := e.call(d, e.job(body, live))
			if i%40 == 0 {
				s.Close()
			} else {
				seats = append(seats, s)
			}
		case i%2 == 0:
			durable = append(durable, e.submit(e.job(body, withEvents)))
		default:
			durable = append(durable, e.submit(e.job(body, func(j *job.Job) { j.Class = job.Batch })))
		}
		if i%25 == 7 {
			e.cancel(durable[len(durable)-1])
		}
	}
	for _, s := range seats {
		e.collect(s)
	}
	for _, j := range durable {
		e.until("it ends", func() bool { return e.get(j).State.Ended() })
	}
	e.until("no message is left", func() bool {
		present, err := e.queue.Present(t.Context(), model)
		e.ok(err)
		return len(present) == 0
	})
	outcomes := map[job.ID]int{}
	for r, err := range e.queue.Outcomes(t.Context(), 0) {
		e.ok(err)
		outcomes[r.Job.ID]++
	}
	for _, j := range durable {
		if outcomes[j.ID] != 1 {
			t.Errorf("job %s has %d outcomes", j.ID, outcomes[j.ID])
		}
	}
	e.until("no live message is left", func() bool {
		for range e.queue.Waiting(context.Background(), queue.Live, model, "", false) {
			return false
		}
		return true
	})
	e.idle(p)
	if s := eng.Stats(); s.Running+s.Waiting != 0 {
		t.Errorf("the engine still runs %+v", s)
	}
	e.until("the whole cache is free", func() bool {
		return gauge(e, p, "millrace_worker_kv_free_tokens") >= 0.96*gauge(e, p, "millrace_worker_kv_capacity_tokens")
	})
}
