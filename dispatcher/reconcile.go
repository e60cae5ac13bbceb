package dispatcher

import (
	"context"
	"errors"
	"fmt"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// reconcile compares the jobs that Redis counts as live with the messages in the streams, and repairs each difference. A difference may be a job that is just moving from one state to
// the next, so a missing message is acted on only when it was missing in the turn before too (missing carries that from turn to turn). While the store is being rebuilt there is nothing to compare. It returns the jobs that Redis counts as live, all true; nil if there was nothing to compare.
func (d *Dispatcher) reconcile(ctx context.Context, missing map[job.ID]bool) (live map[job.ID]bool, failed error) {
	wiped, err := d.deps.Results.Wiped(ctx)
	if wiped || err != nil {
		clear(missing)
		return nil, err
	}
	present, err := d.present(ctx)
	if err != nil {
		return nil, err
	}
	// failed is of one job: the others are repaired all the same.
	live = map[job.ID]bool{}
	absent := map[job.ID]bool{}
	err = d.deps.Results.Live(ctx, func(ids []job.ID) error {
		states, err := d.deps.Results.States(ctx, ids)
		if err != nil {
			return err
		}
		for i, id := range ids {
			live[id] = true
			if d.young(id) {
				continue // nothing can be wrong with it yet
			}
			m, there := present[id]
			if !there && !missing[id] {
				absent[id] = true
				continue
			}
			if err := d.repair(ctx, id, states[i], m, there); passing(err) {
				return err
			} else if err != nil {
				failed = err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("comparing live jobs with their messages: %w", err)
	}
	clear(missing)
	for id := range absent {
		missing[id] = true
	}
	if v := d.driver.Load(); v != nil {
		if err := v.compare(ctx, present); passing(err) {
			return nil, err
		} else if err != nil {
			failed = err
		}
	}
	for id, m := range present {
		if live[id] || d.young(id) {
			continue
		}
		if err := d.repairUnlisted(ctx, id, m); passing(err) {
			return nil, err
		} else if err != nil {
			failed = err
		}
	}
	return live, failed
}

// present lists the jobs that have a message, with their models.
func (d *Dispatcher) present(ctx context.Context) (map[job.ID]job.Model, error) {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing models: %w", err)
	}
	present := map[job.ID]job.Model{}
	for _, m := range models {
		ids, err := d.deps.Queue.Present(ctx, m)
		if err != nil {
			return nil, fmt.Errorf("listing the messages of model %s: %w", m, err)
		}
		for id := range ids {
			present[id] = m
		}
	}
	return present, nil
}

// young tells whether the job is too new to be judged.
func (d *Dispatcher) young(id job.ID) bool {
	return d.deps.Results.Now()-job.MillisOf(id.Time()) < job.Millis(d.cfg.Reconcile.Milliseconds())
}

// repair looks at one live job, which is in that state and has a message in m's stream (there) or has had none for two turns.
func (d *Dispatcher) repair(ctx context.Context, id job.ID, state job.State, m job.Model, there bool) error {
	switch {
	case there && state == "":
		return d.repairUnrecorded(ctx, id, m)
	case there && state != job.Accepting: // as it should be, or ended just now
		return nil
	}
	rec, err := d.deps.Results.Get(ctx, id)
	if errors.Is(err, results.ErrNotFound) { // neither record nor message: it has left both while we looked, or was never accepted
		return d.deps.Results.Forget(ctx, id)
	}
	if err != nil {
		return fmt.Errorf("reading job %s: %w", id, err)
	}
	now := d.deps.Results.Now()
	switch {
	case rec.State.Ended():
		return d.deps.Results.Forget(ctx, id)
	case rec.State == job.Accepting && now-rec.Since < job.Millis(d.cfg.AcceptingAfter.Milliseconds()):
		return nil
	case rec.State == job.Accepting:
		return d.decideAccepting(ctx, rec)
	case there || rec.Lease > now: // its attempt will end it
		return nil
	}
	return d.putBack(ctx, rec)
}

// repairUnlisted looks at a message whose job Redis does not count as live.
func (d *Dispatcher) repairUnlisted(ctx context.Context, id job.ID, m job.Model) error {
	rec, err := d.deps.Results.Get(ctx, id)
	switch {
	case errors.Is(err, results.ErrNotFound):
		return d.repairUnrecorded(ctx, id, m)
	case err != nil:
		return fmt.Errorf("reading job %s: %w", id, err)
	case rec.State.Ended(): // its message comes once more, and is acked then; if nobody pulls it, it goes here
		return d.deps.Queue.Remove(ctx, queue.Work, m, id)
	}
	d.metrics.repaired.WithLabelValues("unlisted").Inc()
	return d.deps.Results.RestoreQueued(ctx, []results.QueuedJob{{Job: rec.Job}}) // leaves the record as it is
}

// repairUnrecorded repairs a message whose job has no record.
func (d *Dispatcher) repairUnrecorded(ctx context.Context, id job.ID, m job.Model) error {
	s, err := d.deps.Queue.Find(ctx, m, id)
	if errors.Is(err, queue.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the message of job %s: %w", id, err)
	}
	if over, err := d.finishEnded(ctx, &s.Job); over || err != nil {
		return err
	}
	d.metrics.repaired.WithLabelValues("lost_record").Inc()
	return d.deps.Results.RestoreQueued(ctx, []results.QueuedJob{{Job: s.Job, Body: s.Body}})
}

// finishEnded records a job's outcome if DONE has one, and tells whether it has.
func (d *Dispatcher) finishEnded(ctx context.Context, j *job.Job) (bool, error) {
	stored, err := d.deps.Queue.Outcome(ctx, j.Tenant, j.Group, j.ID)
	switch {
	case errors.Is(err, queue.ErrNotFound):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("looking for the outcome of job %s: %w", j.ID, err)
	}
	d.metrics.repaired.WithLabelValues("unrecorded_outcome").Inc()
	return true, d.settler.Finish(ctx, stored)
}

// decideAccepting decides a job whose API did not finish accepting it: it is queued if its message exists; else it was never accepted, and record and key go. It is never published here:
// its client has not heard 202, and may have gone elsewhere.
func (d *Dispatcher) decideAccepting(ctx context.Context, rec *results.Record) error {
	j := &rec.Job
	stored, err := d.deps.Queue.Find(ctx, j.Model, j.ID)
	switch {
	case err == nil:
		d.metrics.repaired.WithLabelValues("accepting").Inc()
		return d.deps.Results.Queued(ctx, &stored.Job, stored.Body)
	case !errors.Is(err, queue.ErrNotFound):
		return fmt.Errorf("looking for the message of job %s: %w", j.ID, err)
	}
	if over, err := d.finishEnded(ctx, j); over || err != nil { // accepted again after a wipe, when it had run already
		return err
	}
	gone, err := d.deps.Results.Discard(ctx, j, rec.Since)
	if err != nil {
		return fmt.Errorf("discarding job %s: %w", j.ID, err)
	}
	if !gone { // its client has come back just now
		return nil
	}
	// If we crash here, the key leads to a job that is nowhere; whoever uses it next takes it over.
	if j.Key != "" {
		if err := d.deps.Results.ReleaseKey(ctx, j.Tenant, j.Key, j.ID); err != nil {
			return fmt.Errorf("releasing the key of job %s: %w", j.ID, err)
		}
	}
	d.metrics.repaired.WithLabelValues("never_queued").Inc()
	return nil
}

// putBack repairs an accepted job that has neither a message nor a live lease: its outcome is recorded if it has one, else its message is published again.
func (d *Dispatcher) putBack(ctx context.Context, rec *results.Record) error {
	j := &rec.Job
	if _, err := d.deps.Queue.Find(ctx, j.Model, j.ID); err == nil {
		return nil
	} else if !errors.Is(err, queue.ErrNotFound) {
		return fmt.Errorf("looking for the message of job %s: %w", j.ID, err)
	}
	if over, err := d.finishEnded(ctx, j); over || err != nil {
		return err
	}
	if j.InBatch() {
		if v := d.driver.Load(); v != nil {
			return v.putBack(ctx, rec)
		}
		return nil
	}
	var body []byte
	if j.Blob == "" {
		var err error
		body, err = d.deps.Results.Body(ctx, j.ID)
		if errors.Is(err, results.ErrNotFound) {
			d.log.Error("a job's request is in no store any more", "job", j.ID, "model", j.Model, "tenant", j.Tenant)
			return d.end(ctx, rec, job.Outcome{State: job.Failed, Error: job.NewError(job.TypeServer, job.CodeInternal, "The job's request was lost.")})
		}
		if err != nil {
			return fmt.Errorf("reading the body of job %s to publish it again: %w", j.ID, err)
		}
	}
	d.log.Warn("a job's message is gone: publishing it again", "job", j.ID, "model", j.Model, "tenant", j.Tenant)
	if err := d.deps.Queue.Enqueue(ctx, queue.Work, queue.AnyLane, &queue.Message{Job: *j, Body: body}); err != nil && !errors.Is(err, queue.ErrExists) {
		return fmt.Errorf("publishing job %s again: %w", j.ID, err)
	}
	d.metrics.repaired.WithLabelValues("lost_message").Inc()
	return nil
}
