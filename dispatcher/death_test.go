package dispatcher_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// TestDeathHandsWorkBackAtOnce: long before the ack wait, charged to the job, and what waited for the dead worker alone is everybody's.
func TestDeathHandsWorkBackAtOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	dead, other := e.worker("dead"), e.worker("other")
	e.until("both are heard", func() bool { return len(l.cluster.Workers(model)) == 2 })
	e.submit(queue.AnyLane, e.job())
	d, c := e.claim(dead, job.Standard)
	j := &d.Job
	waiting := e.submit(queue.WorkerLane(dead.id), e.job())
	dead.link.cut()

	again := e.pull(other, job.Standard)
	if again.Job.ID == waiting.ID { // the order of the two is nobody's
		e.ok(again.Ack())
		again = e.pull(other, job.Standard)
	}
	if again.Job.ID != j.ID || again.Delivered != 2 {
		t.Errorf("delivered %+v", again)
	}
	rec := e.get(j)
	if rec.State != job.Queued || rec.Deaths != 1 || rec.Charged != 1 || rec.Token != c.Token || rec.Lease != 0 || rec.Attempts[0].Outcome != "worker_lost" {
		t.Errorf("record %+v", rec)
	}
	e.until("the lane is empty", func() bool { return !cmp.Equal(e.lanes(waiting), []queue.Lane{queue.WorkerLane(dead.id)}) })
	e.until("it holds nothing", func() bool {
		held, err := e.results.Held(t.Context(), dead.id)
		e.ok(err)
		return len(held) == 0
	})
}

func TestFarewellChargesNobody(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.lead(quick)
	w := e.worker("leaves")
	e.submit(queue.AnyLane, e.job())
	d, _ := e.claim(w, job.Standard)
	w.farewell()
	e.until("the lease is ended", func() bool { return e.get(&d.Job).State == job.Queued })
	if rec := e.get(&d.Job); rec.Charged != 0 || rec.Uncharged != 1 {
		t.Errorf("record %+v", rec)
	}
}

// TestDispatcherThatWasCutOffKillsNobody: the worker's silence was its own. One that has really gone is found all the same.
func TestDispatcherThatWasCutOffKillsNobody(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	alive, dead := e.worker("alive"), e.worker("dead")
	e.submit(queue.AnyLane, e.job())
	mine, _ := e.claim(alive, job.Standard)
	e.submit(queue.AnyLane, e.job())
	its, _ := e.claim(dead, job.Standard)
	e.until("both are heard", func() bool { return len(l.cluster.Workers(model)) == 2 })
	l.link.cut()
	dead.link.cut()
	e.until("the others know", func() bool { return !e.cluster.Alive("dead") }) // so the cut has lasted longer than silence may
	if rec := e.get(&its.Job); rec.State != job.Running {
		t.Errorf("recovered by a dispatcher that is cut off: %+v", rec)
	}
	l.link.mend()
	e.until("the dead one's job is free", func() bool { return e.get(&its.Job).State == job.Queued })
	if rec := e.get(&its.Job); rec.Charged != 0 { // nobody heard it die
		t.Errorf("record %+v", rec)
	}
	if rec := e.get(&mine.Job); rec.State != job.Running || rec.Uncharged+rec.Charged != 0 {
		t.Errorf("the living one's job: %+v", rec)
	}
}

func TestThirdDeathEndsAJob(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	j := e.submit(queue.AnyLane, e.job())
	for _, name := range []string{"a", "b", "c"} {
		w := e.worker(name)
		e.claim(w, job.Standard)
		e.until("it is heard", func() bool { return len(l.cluster.Workers(model)) == 1 })
		w.link.cut()
		e.until("it is dead", func() bool { return e.get(j).State != job.Running })
	}
	rec := e.ended(j, job.Failed, job.CodeWorkerCrashed)
	if rec.Deaths != 3 || len(rec.Outcome.Attempts) != 3 {
		t.Errorf("record %+v", rec)
	}
}

// TestLanesOfWorkersThatNobodyHeardAreMoved: they died before this leader was elected. Those of living workers stay, also where the name is not to be read from the lane.
func TestLanesOfWorkersThatNobodyHeardAreMoved(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	long := strings.Repeat("ü", 40)
	e.worker("alive")
	e.worker(long)
	for _, w := range []job.Worker{"alive", job.Worker(long)} {
		e.submit(queue.WorkerLane(w), e.job())
	}
	orphan := e.submit(queue.WorkerLane("forgotten"), e.job())
	due := e.results.Now() + 3_600_000
	delayed := e.submit(queue.WorkerLane("forgotten"), e.job())
	w := e.worker("claims")
	c, err := w.results.Claim(t.Context(), claimOf(delayed, w.id))
	e.ok(err)
	e.ok(w.results.GiveBack(t.Context(), delayed.ID, c.Token, (due - e.results.Now()).Duration(), false, "drained"))
	e.lead(quick)
	e.until("the orphan is moved", func() bool { return cmp.Equal(e.lanes(orphan), []queue.Lane{queue.AnyLane}) })
	depth, err := e.queue.Depth(t.Context(), queue.Work, model)
	e.ok(err)
	want := map[queue.Lane]int{queue.WorkerLane("alive"): 1, queue.WorkerLane(job.Worker(long)): 1, queue.WorkerLane("forgotten"): 1}
	if diff := cmp.Diff(want, depth.WorkerLanes); diff != "" {
		t.Error(diff)
	}
}

func TestLiveJobsOfADeadAPIAreCancelled(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	l := e.lead(quick)
	p := e.open()
	e.announce(p, cluster.Heartbeat{ID: "api-2", Role: cluster.RoleAPI})
	live := func(api job.API) *job.Job {
		m := e.job(func(j *job.Job) { j.API = api })
		e.ok(e.queue.Enqueue(t.Context(), queue.Live, queue.AnyLane, m))
		return &m.Job
	}
	dead, other := live("api-2"), live("api-1")
	e.until("it is heard", func() bool { return len(l.cluster.Members()) == 3 })
	p.link.cut()
	e.until("its job is cancelled", func() bool {
		r, err := e.queue.Outcome(t.Context(), dead.Tenant, dead.Group, dead.ID)
		return err == nil && r.Outcome.State == job.Cancelled && r.Outcome.Error.CodeOf() == job.CodeClientGone
	})
	e.until("its message is gone", func() bool {
		var left []job.ID
		for s, err := range e.queue.Waiting(t.Context(), queue.Live, model, "", false) {
			e.ok(err)
			left = append(left, s.Job.ID)
		}
		return cmp.Equal(left, []job.ID{other.ID})
	})
}
