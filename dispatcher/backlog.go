package dispatcher

import (
	"context"
	"errors"
	"fmt"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// maxTenants bounds how many tenants a heartbeat tells apart.
const maxTenants = 100

// weigh adds what is accepted and has not ended to a model's queue.
func weigh(info *cluster.QueueInfo, backlog *results.Backlog) {
	convert := func(a results.Amount) cluster.Backlog {
		return cluster.Backlog{Jobs: int(a.Jobs), Bytes: a.Bytes, Tokens: a.Tokens}
	}
	info.Total, info.Backlog = convert(backlog.Sum()), map[job.Tenant]cluster.Backlog{}
	for t, a := range backlog.Largest(maxTenants) {
		info.Backlog[t] = convert(a)
	}
	if backlog == nil {
		return
	}
	info.ByClass = make(map[job.Class]cluster.Backlog, len(backlog.Classes))
	for c, a := range backlog.Classes {
		if a.Jobs > 0 {
			info.ByClass[c] = convert(a)
		}
	}
}

// backlogEvery is every how many turns of the reconciler the backlog is compared with its jobs: nothing but a crash makes them differ, and it costs a look at every member.
const backlogEvery = 6

// reconciler compares Redis with the streams, and now and then Redis with itself.
type reconciler struct {
	d       *Dispatcher
	missing map[job.ID]bool
	turn    int
}

func (r *reconciler) reconcile(ctx context.Context) error {
	live, err := r.d.reconcile(ctx, r.missing)
	r.turn++
	if live == nil || r.turn%backlogEvery != 0 {
		return err
	}
	return errors.Join(err, r.d.repairBacklog(ctx, live))
}

// repairBacklog sets right what is counted as accepted and not ended, given the jobs that live.
func (d *Dispatcher) repairBacklog(ctx context.Context, live map[job.ID]bool) error {
	dropped, added, err := d.deps.Results.RepairBacklog(ctx, live, func(id job.ID) bool { return !d.young(id) })
	d.metrics.repaired.WithLabelValues("backlog").Add(float64(dropped + added))
	if dropped+added > 0 {
		d.log.Warn("the backlog was not that of its jobs: it is set right", "dropped", dropped, "added", added)
	}
	if err != nil {
		return fmt.Errorf("repairing the backlog: %w", err)
	}
	return nil
}
