package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// duePage is how many late jobs are looked at at a time.
const duePage = 256

// expire ends what is past its deadline, or has waited longer than its queue timeout without a first start.
func (d *Dispatcher) expire(ctx context.Context) error {
	for {
		now := d.deps.Results.Now()
		ids, err := d.deps.Results.Due(ctx, now, duePage)
		if err != nil {
			return fmt.Errorf("listing late jobs: %w", err)
		}
		var failed error
		for _, id := range ids {
			err := d.expireOne(ctx, id, now)
			if passing(err) {
				return err
			}
			if err != nil { // the others are late all the same
				failed = err
			}
		}
		if failed != nil || len(ids) < duePage {
			return failed
		}
	}
}

func (d *Dispatcher) expireOne(ctx context.Context, id job.ID, now job.Millis) error {
	rec, err := d.deps.Results.Get(ctx, id)
	if errors.Is(err, results.ErrNotFound) {
		// If it has a message, the reconciler finds it without a record, and puts it back among the live ones.
		if err := d.deps.Results.Forget(ctx, id); err != nil {
			return fmt.Errorf("dropping job %s from the index: %w", id, err)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading late job %s: %w", id, err)
	}
	message := late(rec, now, d.deps.Cluster.Workers(rec.Job.Model))
	if message == "" {
		return nil
	}
	return d.end(ctx, rec, job.Outcome{State: job.Expired, Error: job.NewError(job.TypeServer, job.CodeExpired, message)})
}

// late says why a job must end now, "" if it need not. A job that has started once has only its deadline to keep. workers are those of its model: of one that never started they tell what it waited for.
func late(rec *results.Record, now job.Millis, workers []cluster.Member) string {
	j := &rec.Job
	switch {
	case rec.State.Ended():
		return ""
	case now >= j.Expires && rec.State == job.Running:
		return "The job's deadline passed while it ran."
	case now >= j.Expires && len(rec.Attempts) > 0:
		return fmt.Sprintf("The job's deadline passed while it waited for another attempt; it had %d, the last ended with %q.", len(rec.Attempts), rec.Attempts[len(rec.Attempts)-1].Outcome)
	case now >= j.Expires:
		return "The job's deadline passed before a worker had room for it: " + capacity(workers)
	case rec.Token == 0 && j.QueueTimeout > 0 && now >= j.Created+j.QueueTimeout:
		return fmt.Sprintf("The job waited longer than its queue_timeout of %s: %s", j.QueueTimeout.Duration(), capacity(workers))
	}
	return ""
}

// capacity says what there is to run a model's jobs.
func capacity(workers []cluster.Member) string {
	ready, others := 0, map[cluster.WorkerState]int{}
	for _, w := range workers {
		switch {
		case w.Worker == nil:
		case w.Worker.State == cluster.Ready:
			ready++
		default:
			others[w.Worker.State]++
		}
	}
	switch {
	case ready > 0:
		return fmt.Sprintf("its model's ready workers, %d now, had other jobs to run.", ready)
	case len(others) == 0:
		return "no worker serves its model now."
	}
	states := make([]string, 0, len(others))
	for _, s := range slices.Sorted(maps.Keys(others)) {
		states = append(states, fmt.Sprintf("%d %s", others[s], s))
	}
	return "none of its model's workers is ready now (" + strings.Join(states, ", ") + ")."
}
