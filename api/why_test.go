package api_test

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

func TestQueuedJobSaysWhyAndWaitsInItsTenantsLine(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	var info atomic.Pointer[cluster.QueueInfo]
	info.Store(&cluster.QueueInfo{
		Model: model, Waiting: map[job.Class]int{job.Interactive: 2, job.Standard: 3, job.Batch: 50}, WaitingLines: map[job.Tenant]int{job.DefaultTenant: 4, "other": 9}, WorkFill: 0.1,
	})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = e.cluster.Announce(ctx, func() cluster.Heartbeat {
			return cluster.Heartbeat{ID: "d", Role: cluster.RoleDispatcher, Epoch: "d", Leader: true, Queues: []cluster.QueueInfo{*info.Load()}}
		})
	})
	defer wg.Wait()
	defer cancel()
	var o map[string]any
	id := e.submit(jobBody(chat(1, ""), ""))
	eventually(t, "the dispatcher is heard", func() bool {
		o = e.send("GET", "/v1/jobs/"+string(id), "").object(t)
		return o["queue"].(map[string]any)["position"] == 3.0
	})
	q := o["queue"].(map[string]any) // it is the first of its class, behind two interactive calls
	if q["reason"] != "no_worker" || q["eta_seconds"] != nil {
		t.Errorf("%v", q)
	}
	stored, err := e.queue.Find(t.Context(), model, e.submit(jobBody(chat(1, ""), "")))
	if err != nil || stored.Lane != queue.TenantLane(job.DefaultTenant) {
		t.Errorf("%+v, %v", stored, err)
	}
	o = e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)[0].(map[string]any)
	if o["reason"] != "no_worker" || o["waiting_lines"].(map[string]any)["other"] != 9.0 || o["waiting"].(map[string]any)["batch"] != 50.0 {
		t.Errorf("%v", o)
	}
	if lines := o["batch_lines"].(map[string]any); len(lines) != 0 {
		t.Errorf("%v", lines)
	}
	info.Store(&cluster.QueueInfo{Model: model, BatchLines: map[job.Tenant]int{"a": 7}, BatchTokens: 700})
	e.cluster.Nudge()
	eventually(t, "lines of batches that are not queued yet wait", func() bool {
		o = e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)[0].(map[string]any)
		return o["batch_lines"].(map[string]any)["a"] == 7.0
	})
	if o["waiting_tokens"] != 700.0 || o["reason"] != "no_worker" {
		t.Errorf("%v", o)
	}
	info.Store(&cluster.QueueInfo{Model: model, WorkFill: 0.81})
	e.cluster.Nudge()
	eventually(t, "the queue is full", func() bool {
		a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""))
		if a.status == 202 {
			return false
		}
		a.wantError(t, 429, job.CodeQueueFull, "")
		return strings.Contains(string(a.body), "81 %")
	})
	// A worker with room takes a job at once, however few have ended lately.
	info.Store(&cluster.QueueInfo{Model: model})
	wg.Go(func() {
		_ = e.cluster.Announce(ctx, func() cluster.Heartbeat {
			return cluster.Heartbeat{ID: "w", Role: cluster.RoleWorker, Epoch: "w", Worker: &cluster.WorkerInfo{State: cluster.Ready, Models: []job.Model{model}, Free: 100_000}}
		})
	})
	e.cluster.Nudge()
	eventually(t, "the worker is heard, and the queue is not full", func() bool {
		a := e.send("POST", "/v1/jobs", jobBody(chat(1, ""), ""))
		if a.status != 202 || len(e.cluster.Workers(model)) == 0 {
			return false
		}
		q := a.object(t)["queue"].(map[string]any)
		if q["reason"] != "dispatching" || q["eta_seconds"] != 0.0 || a.header.Get("Retry-After") != "1" {
			t.Errorf("%v, Retry-After %v", q, a.header["Retry-After"])
		}
		return true
	})
}

func TestPaceIsMeasuredFromHeartbeats(t *testing.T) {
	t.Parallel()
	p := api.NewPace()
	start := time.Now()
	at := start // when the heartbeats are heard
	member := func(id string, ended int64, models ...job.Model) cluster.Member {
		return cluster.Member{Heartbeat: cluster.Heartbeat{ID: id, Worker: &cluster.WorkerInfo{Models: models, Completed: ended}}, Heard: at}
	}
	p.Observe(start, []cluster.Member{member("a", 1000, "m")}, true)
	if got := p.Of("m"); got != 0 {
		t.Errorf("the first look says %v", got)
	}
	for i := range 100 { // 20 a second, and a worker of two models that ends 10 a second
		at = start.Add(time.Duration(i+1) * time.Second)
		p.Observe(at, []cluster.Member{member("a", 1000+20*int64(i+1), "m"), member("b", 10*int64(i+1), "m", "n")}, true)
	}
	if got := p.Of("m"); got < 24.5 || got > 25.5 {
		t.Errorf("m ends %v a second, want 25", got)
	}
	if got := p.Of("n"); got < 4.9 || got > 5.1 {
		t.Errorf("n ends %v a second, want 5", got)
	}
	at = start.Add(101 * time.Second)
	p.Observe(at, []cluster.Member{member("a", 3, "m")}, true) // restarted under its name: nothing negative
	for i := range 200 {
		p.Observe(start.Add(time.Duration(102+i)*time.Second), nil, true)
	}
	if got := p.Of("m"); got != 0 {
		t.Errorf("without workers m ends %v a second", got)
	}
}
