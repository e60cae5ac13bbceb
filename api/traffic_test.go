package api_test

import (
	"net/http"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// traffic is what the API's heartbeats tell of the model.
func (e *env) traffic() (sum cluster.Traffic) {
	e.cluster.Nudge()
	for _, m := range e.cluster.Members() {
		if m.Role != cluster.RoleAPI {
			continue
		}
		for _, tr := range m.Traffic {
			if tr.Model == model {
				sum = tr
			}
		}
	}
	return sum
}

// TestHeartbeatsTellWhatComesIn: each kind of job that is let in raises its model's numbers, once, and nothing else does.
func TestHeartbeatsTellWhatComesIn(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if got := e.traffic(); got != (cluster.Traffic{}) {
		t.Fatalf("before anything came: %+v", got)
	}
	go1 := make(chan struct{})
	e.startWorker(func(j *job.Job, body []byte) reply {
		r := repeat(j, body)
		if j.Live() {
			r.before = go1
		}
		return r
	})
	n := int64(0)
	grows := func(what string) {
		t.Helper()
		n++
		eventually(t, "it is told: "+what, func() bool { return e.traffic().Jobs >= n })
		if got := e.traffic(); got.Jobs != n || got.Tokens < n || got.Squares < float64(got.Tokens) {
			t.Errorf("%s: %+v, want %d jobs", what, got, n)
		}
	}
	e.wait(e.submit(jobBody(chat(1, ""), "")))
	grows("a durable job")
	e.send("POST", "/v1/chat/completions", chat(1, ""), "Prefer: respond-async")
	grows("a call that becomes a job")
	for range 2 {
		e.send("POST", "/v1/chat/completions", chat(1, ""), "Idempotency-Key: once")
	}
	grows("a call with a key, made twice")
	e.send("POST", "/v1/responses", `{"model":"`+string(model)+`","input":"x","background":true}`)
	grows("a response in the background")

	var calls sync.WaitGroup
	for _, more := range []string{"", `,"stream":true`} {
		calls.Go(func() {
			if a := e.send("POST", "/v1/chat/completions", chat(1, more)); a.status != http.StatusOK {
				t.Errorf("%d %s", a.status, a.body)
			}
		})
	}
	n++
	grows("plain calls")
	eventually(t, "both are held, and a worker has them", func() bool {
		got := e.traffic()
		return got.RunningCalls == 2 && got.RunningTokens > 0 && got.WaitingCalls == 0
	})
	close(go1)
	calls.Wait()
	eventually(t, "none is held", func() bool { got := e.traffic(); return got.RunningCalls+got.WaitingCalls == 0 })

	// What counts elsewhere, or not at all.
	e.send("POST", "/v1/chat/completions", `{"model":"nobody's","messages":[]}`).wantError(t, http.StatusNotFound, job.CodeModelNotFound, "model")
	e.create(`{"input_file_id":"` + e.putFile(job.DefaultTenant, "batch", `{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":`+chat(1, "")+`}`) + `","endpoint":"/v1/chat/completions","completion_window":"24h"}`)
	e.wait(e.submit(jobBody(chat(1, ""), "")))
	grows("one more job")
	for _, m := range e.cluster.Members() {
		if m.Role == cluster.RoleAPI && len(m.Traffic) != 1 {
			t.Error(cmp.Diff([]cluster.Traffic{{Model: model}}, m.Traffic))
		}
	}
}

// TestEachKindOfCallRaisesTheDemandOfAnIdleModel: the calls that are answered on their connections, which no backlog has. What is durable the dispatcher tells.
func TestEachKindOfCallRaisesTheDemandOfAnIdleModel(t *testing.T) {
	t.Parallel()
	for name, more := range map[string]string{"sync": "", "stream": `,"stream":true`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, api.Config{})
			e.poolOf(cluster.PoolInfo{})
			if got := e.traffic(); got.WaitingCalls != 0 {
				t.Fatalf("%+v", got)
			}
			done := make(chan answer, 1)
			go func() { done <- e.send("POST", "/v1/chat/completions", chat(1, more)) }()
			eventually(t, "its demand is told", func() bool {
				got := e.traffic()
				return got.WaitingCalls == 1 && got.WaitingTokens > 0 && got.Jobs == 1
			})
			e.startWorker(repeat)
			if a := <-done; a.status != http.StatusOK {
				t.Errorf("%d %s", a.status, a.body)
			}
			eventually(t, "none is left", func() bool { return e.traffic().WaitingCalls == 0 })
		})
	}
}

// TestRefusedCallsAreNoTraffic: neither those over a limit nor those that the queue did not take.
func TestRefusedCallsAreNoTraffic(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{MaxHeld: 1})
	e.known()
	done := make(chan answer, 1)
	go func() { done <- e.send("POST", "/v1/chat/completions", chat(1, "")) }()
	eventually(t, "one is held", func() bool { return e.server.Held() == 1 })
	e.send("POST", "/v1/chat/completions", chat(1, "")).wantError(t, http.StatusTooManyRequests, job.CodeRateLimit, "")
	e.startWorker(repeat)
	<-done
	eventually(t, "one is told", func() bool { return e.traffic().Jobs == 1 })
}
