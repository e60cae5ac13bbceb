package worker_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/testenv"
	"github.com/millrace/millrace/worker"
)

// traps panics when certain messages are to be logged: each n-th time.
type traps struct {
	slog.Handler
	every map[string]int64
	count *atomic.Int64
}

func (h *traps) Enabled(context.Context, slog.Level) bool { return true }

func (h *traps) Handle(ctx context.Context, r slog.Record) error {
	if n := h.every[r.Message]; n > 0 && h.count.Add(1)%n == 0 {
		panic(r.Message)
	}
	return nil
}

func (h *traps) WithAttrs([]slog.Attr) slog.Handler { return h }

// TestEveryTroubleLeavesNothingBehind: of a thousand jobs of all kinds, durable and live, three in ten meet a trouble: errors of the engine, broken and hanging calls, cancels, clients that leave, panics of ours within calls and outside of them; and
// once the engine stalls. In the end each has one outcome, and the worker holds nothing.
func TestEveryTroubleLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	const jobs = 1000
	r := testenv.Redis(t)
	e := newEnvOn(t, 5*time.Second, r.URL(), func() {})
	eng, _ := emulate(t, emulator.Config{KVTokens: 16_000})
	hook := &traps{Handler: slog.DiscardHandler, every: map[string]int64{"the engine gave no whole answer": 2, "job given back": 9}, count: &atomic.Int64{}}
	p := e.work(eng.URL, hasty, func(c *workerConfig) { c.RetryDelay, c.FailuresInRow, c.log = time.Millisecond, jobs, slog.New(hook) })
	d := e.desk()
	var durable []*job.Job
	var seats []*relay.Seat
	submit := func(i int) {
		marker, change := "", func(*job.Job) {}
		switch i % 20 {
		case 1, 2, 7:
			marker = ",reset-after=1,times=1"
		case 4, 14: // in a stream: else it is a 500
			marker = ",error-after=1,times=1"
		case 11:
			marker, change = ",hang-after=1", func(j *job.Job) { j.RunTimeout = 50 }
		}
		if i > jobs*4/5 { // late, for they teach the worker to run one after the other
			switch i % 10 {
			case 2:
				marker = ",status=500,times=1"
			case 3:
				marker = ",status=503,times=1"
			case 5:
				marker = ",status=429,times=1"
			}
		}
		body := chat(fmt.Sprintf("number %d [[emulator:tokens=%d%s]]", i, 2+i%20, marker), "")
		switch {
		case i%10 == 0:
			s := e.call(d, e.job(body, live))
			if i%40 == 0 {
				s.Close()
			} else {
				seats = append(seats, s)
			}
		case i%2 == 0:
			durable = append(durable, e.submit(e.job(body, withEvents, change, func(j *job.Job) { j.Cost.Prompt = job.Tokens(10 + i%900) })))
		default:
			durable = append(durable, e.submit(e.job(body, change, func(j *job.Job) { j.Class = job.Batch })))
		}
		if i%25 == 8 {
			e.cancel(durable[len(durable)-1])
		}
	}
	for i := range jobs / 2 {
		submit(i)
	}
	e.ok(eng.SetFaults(emulator.Faults{Stall: true}))
	for i := range jobs / 2 {
		submit(jobs/2 + i)
	}
	e.until("the stall is found", func() bool { return p.Ready() != nil })
	e.ok(eng.SetFaults(emulator.Faults{}))

	for _, s := range seats {
		e.collect(s)
	}
	for _, j := range durable {
		e.until("it ends", func() bool { return e.get(j).State.Ended() })
	}
	e.until("no message is left", func() bool {
		present, err := e.queue.Present(t.Context(), model)
		e.ok(err)
		for range e.queue.Waiting(context.Background(), queue.Live, model, "", false) {
			return false
		}
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
	if n := gauge(e, p, "millrace_worker_panics_total"); n == 0 {
		t.Error("nothing panicked")
	}
	e.nothingHeld(p)
	if s := eng.Stats(); s.Running+s.Waiting != 0 {
		t.Errorf("the engine still runs %+v", s)
	}
	if w := e.member(p); w.State != cluster.Ready {
		t.Errorf("it says of itself %+v", w)
	}
}

// nothingHeld waits until the worker is idle, and checks that its ledger is at zero: the whole cache is free, but for the reserve.
func (e *env) nothingHeld(p *process) {
	e.Helper()
	e.idle(p)
	if held := p.Reserved(); held != (worker.Reserved{}) {
		e.Errorf("left over: %+v", held)
	}
	capacity := gauge(e, p, "millrace_worker_kv_capacity_tokens")
	e.until("the whole cache is free", func() bool {
		return gauge(e, p, "millrace_worker_kv_free_tokens") == float64(int(capacity*0.97))
	})
}
