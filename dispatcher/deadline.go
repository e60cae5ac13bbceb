package dispatcher

import (
	"context"
	"errors"
	"fmt"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// duePage is how many late jobs are looked at in one turn.
const duePage = 256

// expire ends what is past its deadline, or has waited longer than its queue timeout without a first start.
func (d *Dispatcher) expire(ctx context.Context) error {
	now := d.deps.Results.Now()
	ids, err := d.deps.Results.Due(ctx, now, duePage)
	if err != nil {
		return fmt.Errorf("listing late jobs: %w", err)
	}
	for _, id := range ids {
		rec, err := d.deps.Results.Get(ctx, id)
		if errors.Is(err, results.ErrNotFound) {
			if err := d.deps.Results.Forget(ctx, id); err != nil {
				return fmt.Errorf("dropping job %s from the index: %w", id, err)
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("reading late job %s: %w", id, err)
		}
		message := late(rec, now)
		if message == "" {
			continue
		}
		o := job.Outcome{State: job.Expired, Error: job.NewError(job.TypeServer, job.CodeExpired, message)}
		if err := d.end(ctx, rec, o); err != nil {
			return err
		}
	}
	return nil
}

// late says why a job must end now, "" if it need not.
func late(rec *results.Record, now job.Millis) string {
	j := &rec.Job
	switch {
	case rec.State.Ended():
		return ""
	case now >= j.Expires && rec.State == job.Running:
		return "The job's deadline passed while it ran."
	case now >= j.Expires && len(rec.Attempts) > 0:
		return fmt.Sprintf("The job's deadline passed while it waited for another attempt; %d had failed, the last with %q.", len(rec.Attempts), rec.Attempts[len(rec.Attempts)-1].Outcome)
	case now >= j.Expires:
		return "The job's deadline passed before a worker had room for it."
	case j.QueueTimeout > 0 && len(rec.Attempts) == 0 && now >= j.Created+j.QueueTimeout:
		return fmt.Sprintf("The job waited longer than its queue_timeout of %s.", j.QueueTimeout.Duration())
	}
	return ""
}
