package dispatcher_test

import (
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// leaderInfo is what the leader tells of the model in its heartbeats.
func (e *env) leaderInfo() (info cluster.QueueInfo) {
	for _, m := range e.cluster.Members() {
		for _, q := range m.Queues {
			if q.Model == model {
				info = q
			}
		}
	}
	return info
}

func TestHeartbeatsTellTheBacklog(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.worker("w")
	sized := func(tenant job.Tenant, class job.Class) func(*job.Job) {
		return func(j *job.Job) {
			j.Tenant, j.Class, j.BodySize, j.Cost = tenant, class, 100, job.Cost{Prompt: 30, Output: 20, Answers: 1}
		}
	}
	e.submit(queue.AnyLane, e.job(sized("acme", job.Standard)))
	e.submit(queue.AnyLane, e.job(sized("acme", job.Standard)))
	e.submit(queue.TenantLane("other"), e.job(sized("other", job.Batch)))
	d, c := e.claim(w, job.Standard)
	e.background(e.dispatcher(quick).Run)
	e.until("the backlog is told", func() bool {
		info := e.leaderInfo()
		return info.Total == cluster.Backlog{Jobs: 3, Bytes: 300, Tokens: 150} && info.Backlog["acme"].Jobs == 2 && info.Backlog["other"].Tokens == 50 && info.Delivered[job.Standard] == 1 &&
			info.ByClass[job.Standard] == cluster.Backlog{Jobs: 2, Bytes: 200, Tokens: 100} && info.ByClass[job.Batch].Tokens == 50 && len(info.ByClass) == 2
	})
	e.finish(w, d, c)
	e.until("one has ended", func() bool { return e.leaderInfo().Total.Jobs == 2 })
}

// TestEachKindOfDurableWorkRaisesTheDemandOfAnIdleModel: an autoscaler sees it in the backlog, whoever holds it now. The calls that are answered on their connections an API tells.
func TestEachKindOfDurableWorkRaisesTheDemandOfAnIdleModel(t *testing.T) {
	t.Parallel()
	cost := func(j *job.Job) { j.Cost = job.Cost{Prompt: 30, Output: 20, Answers: 1} }
	for name, row := range map[string]struct {
		class job.Class
		come  func(e *env)
	}{
		"async":       {job.Standard, func(e *env) { e.submit(queue.AnyLane, e.job(cost)) }},
		"interactive": {job.Interactive, func(e *env) { e.submit(queue.AnyLane, e.job(cost, func(j *job.Job) { j.Class = job.Interactive })) }},
		"in a tenant's line": {job.Standard, func(e *env) {
			e.submit(queue.TenantLane(job.DefaultTenant), e.job(cost))
		}},
		"batch line": {job.Batch, func(e *env) {
			e.submit(queue.AnyLane, e.job(cost, func(j *job.Job) { j.Class, j.Group = job.Batch, "batch_1" }))
		}},
		"retry waiting": {job.Standard, func(e *env) {
			e.submit(queue.AnyLane, e.job(cost))
			w := e.worker("gone")
			d, c := e.claim(w, job.Standard)
			e.ok(e.results.GiveBack(e.Context(), d.Job.ID, c.Token, time.Hour, true, "engine_error"))
			e.ok(e.results.LetGo(t.Context(), w.id, d.Job.ID))
			e.ok(d.Nak(time.Hour))
			w.farewell()
		}},
		"running": {job.Standard, func(e *env) {
			e.submit(queue.AnyLane, e.job(cost))
			e.claim(e.worker("busy"), job.Standard)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.ok(e.queue.EnsureModel(t.Context(), model))
			e.background(e.dispatcher(quick).Run)
			e.until("the idle model is told", func() bool {
				info := e.leaderInfo()
				return info.Model == model && info.Total.Jobs == 0 && len(info.ByClass) == 0
			})
			row.come(e)
			e.until("its demand is told", func() bool {
				info := e.leaderInfo()
				return info.Total.Jobs == 1 && info.ByClass[row.class] == cluster.Backlog{Jobs: 1, Tokens: 50}
			})
		})
	}
}

// TestBacklogIsRepaired: a member whose job has ended, as a crash leaves it, does not stay, and a wipe takes nothing away for long.
func TestBacklogIsRepaired(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.worker("w")
	e.submit(queue.AnyLane, e.job())
	d, c := e.claim(w, job.Standard)
	waiting := e.submit(queue.AnyLane, e.job())
	ghost := d.Job
	ghost.Tenant = "ghost" // nobody ends the job under this name
	_, err := e.results.Accept(t.Context(), &ghost, nil, results.Limits{})
	e.ok(err)
	e.finish(w, d, c)
	jobs := func() int64 {
		all, err := e.results.Backlogs(t.Context())
		e.ok(err)
		return all[model].Sum().Jobs
	}
	if n := jobs(); n != 2 {
		t.Fatalf("%d jobs", n)
	}
	e.lead(quick)
	e.until("only what waits is counted", func() bool { return jobs() == 1 })
	e.wipe()
	e.until("it is there and counted again", func() bool {
		rec, err := e.results.Get(t.Context(), waiting.ID)
		return err == nil && rec.State == job.Queued && jobs() == 1
	})
}

func TestExpiredJobsSayWhatTheyWaitedFor(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	expired := func(want string) {
		t.Helper()
		rec := e.ended(e.submit(queue.AnyLane, e.job(func(j *job.Job) { j.Expires = j.Created + 300 })), job.Expired, job.CodeExpired)
		if !strings.Contains(rec.Outcome.Error.Message, want) {
			t.Errorf("%q does not say %q", rec.Outcome.Error.Message, want)
		}
	}
	expired("no worker serves its model now")
	for state, want := range map[cluster.WorkerState]string{
		cluster.Starting: "none of its model's workers is ready now (1 starting)",
		cluster.Ready:    "ready workers, 1 now, had other jobs to run",
	} {
		gone := e.announce(e.parts, cluster.Heartbeat{ID: string(state), Role: cluster.RoleWorker, Worker: &cluster.WorkerInfo{State: state, Models: []job.Model{model}}})
		e.until("the worker is heard", func() bool { return len(l.cluster.Workers(model)) == 1 })
		expired(want)
		gone()
		e.until("the worker is gone", func() bool { return len(l.cluster.Workers(model)) == 0 })
	}
}
