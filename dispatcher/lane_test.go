package dispatcher_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// in are the lanes in which a job's messages of a kind wait.
func (e *env) in(kind queue.Kind, j *job.Job) []queue.Lane {
	e.Helper()
	var all []queue.Lane
	for s, err := range e.queue.Waiting(e.Context(), kind, j.Model, "", false) {
		e.ok(err)
		if s.Job.ID == j.ID {
			all = append(all, s.Lane)
		}
	}
	return all
}

// workerIn is a worker that takes nothing by itself, in a state.
func (e *env) workerIn(state cluster.WorkerState, name string) job.Worker {
	e.Helper()
	e.announce(e.open(), cluster.Heartbeat{
		ID: name, Role: cluster.RoleWorker, Epoch: name, Worker: &cluster.WorkerInfo{Name: name, State: state, Models: []job.Model{model}},
	})
	return job.Worker(name)
}

// laned puts one durable and one live job into a worker's lane.
func (e *env) laned(w job.Worker) (work, live *job.Job) {
	e.Helper()
	work = e.submit(queue.WorkerLane(w), e.job())
	m := e.job(func(j *job.Job) { j.API = "api-1" })
	e.ok(e.queue.Enqueue(e.Context(), queue.Live, queue.WorkerLane(w), m))
	return work, &m.Job
}

// moves waits until a job is in the lane of all, and nowhere else.
func (e *env) moves(kind queue.Kind, j *job.Job) {
	e.Helper()
	e.until("the job is everybody's", func() bool { return cmp.Equal(e.in(kind, j), []queue.Lane{queue.AnyLane}) })
}

// TestLaneOfABusyWorkerIsLeftAfterAWhile: what it does not take within the patience is everybody's; what it has is its own.
func TestLaneOfABusyWorkerIsLeftAfterAWhile(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.worker("busy-worker.1")
	held := e.submit(queue.WorkerLane(w.id), e.job())
	if d := e.pull(w, ""); d.Job.ID != held.ID {
		t.Fatalf("%s was delivered", d.Job.ID)
	}
	work, live := e.laned(w.id)
	cfg := quick
	cfg.LanePatience = time.Second
	e.lead(cfg)
	e.moves(queue.Work, work)
	e.moves(queue.Live, live)
	for _, j := range []*job.Job{work, live} {
		if age := (e.results.Now() - j.Created).Duration(); age < cfg.LanePatience {
			t.Errorf("it was moved %v after it had come", age)
		}
	}
	later, laterLive := e.laned(w.id)
	e.moves(queue.Work, later)
	e.moves(queue.Live, laterLive)
	if lanes := e.in(queue.Work, held); !cmp.Equal(lanes, []queue.Lane{queue.WorkerLane(w.id)}) {
		t.Errorf("what the worker has in hand is in %v", lanes)
	}
}

// TestLaneOfAWorkerThatTakesNothingIsLeftAtOnce: it drains, or its engine is not ready.
func TestLaneOfAWorkerThatTakesNothingIsLeftAtOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cfg := quick
	cfg.LanePatience = time.Hour
	l := e.lead(cfg)
	states := []cluster.WorkerState{cluster.Draining, cluster.Stalled, cluster.Unready, cluster.Starting, cluster.Ready}
	for _, s := range states {
		e.workerIn(s, string(s))
	}
	e.until("all are heard", func() bool { return len(l.cluster.Workers(model)) == len(states) })
	for _, s := range states[:4] {
		work, live := e.laned(job.Worker(s))
		e.moves(queue.Work, work)
		e.moves(queue.Live, live)
	}
	work, live := e.laned("ready")
	moved, movedLive := e.laned("draining") // behind it in the stream: when it is gone, the other was seen
	e.moves(queue.Work, moved)
	e.moves(queue.Live, movedLive)
	for kind, j := range map[queue.Kind]*job.Job{queue.Work: work, queue.Live: live} {
		if lanes := e.in(kind, j); !cmp.Equal(lanes, []queue.Lane{queue.WorkerLane("ready")}) {
			t.Errorf("in the lane of a worker that is ready: %v", lanes)
		}
	}
}

// TestRetryInALaneWaitsItsTime: a job that must not start yet stays where it is until then.
func TestRetryInALaneWaitsItsTime(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	w := e.workerIn(cluster.Draining, "draining")
	m := e.job()
	lane := queue.WorkerLane(w)
	_, err := e.results.Claim(t.Context(), claimOf(&m.Job, "another"))
	e.ok(err)
	rec := e.get(&m.Job)
	e.ok(e.results.GiveBack(t.Context(), m.Job.ID, rec.Token, 1500*time.Millisecond, true, "engine_500"))
	e.ok(e.queue.Enqueue(t.Context(), queue.Work, lane, m))
	e.lead(quick)
	e.moves(queue.Work, &m.Job)
	if now := e.results.Now(); now < e.get(&m.Job).NotBefore {
		t.Errorf("it was moved %v too early", (e.get(&m.Job).NotBefore - now).Duration())
	}
}
