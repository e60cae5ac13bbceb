package dispatcher_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// TestJobThatOneWorkerAloneHoldsStaysInItsLane: the others would send it back. When there is another that holds it, it is everybody's.
func TestJobThatOneWorkerAloneHoldsStaysInItsLane(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	cfg := quick
	cfg.LanePatience = time.Millisecond
	l := e.lead(cfg)
	worker := func(name string, largest job.Tokens) queue.Lane {
		e.announce(e.open(), cluster.Heartbeat{
			ID: name, Role: cluster.RoleWorker, Epoch: name, Worker: &cluster.WorkerInfo{Name: name, State: cluster.Ready, Models: []job.Model{model}, Largest: largest},
		})
		return queue.WorkerLane(job.Worker(name))
	}
	large := worker("large", 8192)
	worker("small", 1024)
	e.until("both are heard", func() bool { return len(l.cluster.Workers(model)) == 2 })
	cost := func(c job.Cost) func(*job.Job) { return func(j *job.Job) { j.Cost = c } }
	long := e.submit(large, e.job(cost(job.Cost{Prompt: 3000, Answers: 1})))
	answer := e.submit(large, e.job(cost(job.Cost{Prompt: 500, Output: 2000, Answers: 1})))
	short := e.submit(large, e.job(cost(job.Cost{Prompt: 500, Output: 500, Answers: 1}))) // behind them: when it has moved, they were seen
	e.moves(queue.Work, short)
	for _, j := range []*job.Job{long, answer} {
		if lanes := e.in(queue.Work, j); !cmp.Equal(lanes, []queue.Lane{large}) {
			t.Errorf("of %+v the lanes are %v", j.Cost, lanes)
		}
	}
	worker("large-too", 4096)
	e.moves(queue.Work, long)
	e.moves(queue.Work, answer)
}
