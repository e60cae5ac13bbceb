package api_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/millrace/millrace/api"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
)

// told has a leading dispatcher tell of the model's queue, and a worker have that much room, until the test ends. What is stored in the pointer is told next.
func (e *env) told(t *testing.T, free job.Tokens) *atomic.Pointer[cluster.QueueInfo] {
	t.Helper()
	var info atomic.Pointer[cluster.QueueInfo]
	info.Store(&cluster.QueueInfo{Model: model})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, h := range []cluster.Heartbeat{
		{ID: "d", Role: cluster.RoleDispatcher, Epoch: "d", Leader: true},
		{ID: "w", Role: cluster.RoleWorker, Epoch: "w", Worker: &cluster.WorkerInfo{State: cluster.Ready, Models: []job.Model{model}, Capacity: 100_000, Free: free}},
	} {
		wg.Go(func() {
			_ = e.cluster.Announce(ctx, func() cluster.Heartbeat {
				if h.Leader {
					h.Queues = []cluster.QueueInfo{*info.Load()}
				}
				return h
			})
		})
	}
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return &info
}

// lane is where a job is put that comes now.
func (e *env) lane(t *testing.T, class job.Class) queue.Lane {
	t.Helper()
	stored, err := e.queue.Find(t.Context(), model, e.submit(jobBody(chat(1, ""), `,"priority":"`+string(class)+`"`)))
	if err != nil {
		t.Fatal(err)
	}
	return stored.Lane
}

// TestOnlyWhatGoesBeforeAJobKeepsItInLine: a deep queue of a lower class does not, and lines of another class do not; those of its own do.
func TestOnlyWhatGoesBeforeAJobKeepsItInLine(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	info := e.told(t, 1000)
	line := queue.TenantLane(job.DefaultTenant)
	for name, tt := range map[string]struct {
		info  cluster.QueueInfo
		class job.Class
		want  queue.Lane
	}{
		"deep in batch work, for a standard job":    {cluster.QueueInfo{Waiting: map[job.Class]int{job.Batch: 5000}, Lines: map[job.Class]int{job.Batch: 9}}, job.Standard, queue.AnyLane},
		"deep in batch work, for a batch job":       {cluster.QueueInfo{Waiting: map[job.Class]int{job.Batch: 5000}}, job.Batch, line},
		"deep in interactive work":                  {cluster.QueueInfo{Waiting: map[job.Class]int{job.Interactive: 5000}}, job.Standard, line},
		"others of its class wait in lines":         {cluster.QueueInfo{Lines: map[job.Class]int{job.Standard: 1}}, job.Standard, line},
		"a batch waits, for a batch job":            {cluster.QueueInfo{Lines: map[job.Class]int{job.Batch: 1}}, job.Batch, line},
		"its own tenant waits, of whichever class":  {cluster.QueueInfo{WaitingLines: map[job.Tenant]int{job.DefaultTenant: 1}}, job.Interactive, line},
		"other tenants wait in lines of other ones": {cluster.QueueInfo{WaitingLines: map[job.Tenant]int{"other": 7}, Lines: map[job.Class]int{job.Standard: 7}}, job.Interactive, queue.AnyLane},
	} {
		tt.info.Model = model
		info.Store(&tt.info)
		e.cluster.Nudge()
		eventually(t, name, func() bool { return e.lane(t, tt.class) == tt.want })
	}
}

// TestLimitOnRunningWorkIsHeldByTheLine: a tenant that has one gets no job past its line, a dispatcher is told of it, and a job that waits for it says so.
func TestLimitOnRunningWorkIsHeldByTheLine(t *testing.T) {
	t.Parallel()
	e := newEnv(t, api.Config{})
	if err := e.queue.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	if _, err := e.ledger.UpdateTenant(t.Context(), job.DefaultTenant, func(t *ledger.Tenant) error { t.Limits.Running = 2; return nil }); err != nil {
		t.Fatal(err)
	}
	told := make(chan relay.Lined, 16)
	if err := e.relay.OnLined(t.Context(), func(l relay.Lined) { told <- l }); err != nil {
		t.Fatal(err)
	}
	line := queue.TenantLane(job.DefaultTenant)
	eventually(t, "the limit is known", func() bool { return e.lane(t, job.Standard) == line })
	if l := <-told; l != (relay.Lined{Model: model, Tenant: job.DefaultTenant, Class: job.Standard}) {
		t.Errorf("told of %+v", l)
	}
	info := e.told(t, 100_000)
	info.Store(&cluster.QueueInfo{Model: model, WaitingLines: map[job.Tenant]int{job.DefaultTenant: 1}, Quota: []job.Tenant{job.DefaultTenant}})
	e.cluster.Nudge()
	id := e.submit(jobBody(chat(1, ""), ""))
	eventually(t, "the reason is told", func() bool {
		q := e.send("GET", "/v1/jobs/"+string(id), "").object(t)["queue"].(map[string]any)
		return q["reason"] == "quota" && q["eta_seconds"] == nil
	})
	if got := e.lane(t, job.Interactive); got != line {
		t.Errorf("the next one is in lane %s", got)
	}
	o := e.send("GET", "/admin/v1/queues", "").object(t)["data"].([]any)[0].(map[string]any)
	if o["reason"] != "quota" {
		t.Errorf("the queue says %v", o["reason"])
	}
}
