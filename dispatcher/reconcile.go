package dispatcher

import (
	"context"
	"errors"
	"fmt"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// restorePage is how many records go to Redis in one round trip.
const restorePage = 256

// reconcile compares the jobs that Redis counts as live with the messages in the streams, and repairs each difference. A difference may be a job that is just moving from one state to
// the next, so a missing message is acted on only when it was missing in the turn before too (missing carries that from turn to turn).
func (d *Dispatcher) reconcile(ctx context.Context, missing map[job.ID]bool) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	present := map[job.ID]job.Model{}
	for _, m := range models {
		ids, err := d.deps.Queue.Present(ctx, m)
		if err != nil {
			return fmt.Errorf("listing the messages of model %s: %w", m, err)
		}
		for id := range ids {
			present[id] = m
		}
	}
	live := map[job.ID]bool{}
	seen := map[job.ID]bool{}
	err = d.deps.Results.Live(ctx, func(ids []job.ID) error {
		for _, id := range ids {
			live[id] = true
			_, there := present[id]
			if there && d.young(id) {
				continue // nothing can be wrong with it yet
			}
			if !there && !missing[id] {
				if !d.young(id) {
					seen[id] = true
				}
				continue
			}
			if err := d.check(ctx, id, there); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("comparing live jobs with their messages: %w", err)
	}
	clear(missing)
	for id := range seen {
		missing[id] = true
	}
	for id, m := range present {
		if !live[id] && !d.young(id) {
			if err := d.checkUnrecorded(ctx, id, m); err != nil {
				return err
			}
		}
	}
	return nil
}

// young tells whether the job is too new to be judged.
func (d *Dispatcher) young(id job.ID) bool {
	return d.deps.Results.Now()-job.MillisOf(id.Time()) < job.Millis(d.cfg.Reconcile.Milliseconds())
}

// check looks at one live job again, closely, and repairs it. there: it has a message.
func (d *Dispatcher) check(ctx context.Context, id job.ID, there bool) error {
	rec, err := d.deps.Results.Get(ctx, id)
	if errors.Is(err, results.ErrNotFound) {
		if there {
			return nil // checkUnrecorded's, or the claim's
		}
		return d.deps.Results.Forget(ctx, id)
	}
	if err != nil {
		return fmt.Errorf("reading job %s: %w", id, err)
	}
	now := d.deps.Results.Now()
	switch {
	case rec.State.Ended():
		return d.deps.Results.Forget(ctx, id)
	case rec.State == job.Accepting:
		if now-rec.Since < job.Millis(d.cfg.AcceptingAfter.Milliseconds()) {
			return nil
		}
		return d.decideAccepting(ctx, rec)
	case there || rec.Lease > now:
		return nil
	}
	return d.putBack(ctx, rec)
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
	gone, err := d.deps.Results.Discard(ctx, j, rec.Since)
	if err != nil {
		return fmt.Errorf("discarding job %s: %w", j.ID, err)
	}
	if gone && j.Key != "" {
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
	stored, err := d.deps.Queue.Outcome(ctx, j.Tenant, j.Group, j.ID)
	switch {
	case err == nil:
		d.metrics.repaired.WithLabelValues("unrecorded_outcome").Inc()
		return d.settler.Finish(ctx, stored)
	case !errors.Is(err, queue.ErrNotFound):
		return fmt.Errorf("looking for the outcome of job %s: %w", j.ID, err)
	}
	var body []byte
	if j.Blob == "" {
		if body, err = d.deps.Results.Body(ctx, j.ID); err != nil {
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

// checkUnrecorded repairs a message whose job Redis does not count as live.
func (d *Dispatcher) checkUnrecorded(ctx context.Context, id job.ID, m job.Model) error {
	rec, err := d.deps.Results.Get(ctx, id)
	if err == nil {
		if rec.State.Ended() { // its message comes once more, and is acked then; if nobody pulls it, it goes here
			return d.deps.Queue.Remove(ctx, queue.Work, m, id)
		}
		return nil
	}
	if !errors.Is(err, results.ErrNotFound) {
		return fmt.Errorf("reading job %s: %w", id, err)
	}
	s, err := d.deps.Queue.Find(ctx, m, id)
	if errors.Is(err, queue.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the message of job %s: %w", id, err)
	}
	stored, err := d.deps.Queue.Outcome(ctx, s.Job.Tenant, s.Job.Group, id)
	switch {
	case err == nil:
		d.metrics.repaired.WithLabelValues("unrecorded_outcome").Inc()
		return d.settler.Finish(ctx, stored)
	case !errors.Is(err, queue.ErrNotFound):
		return fmt.Errorf("looking for the outcome of job %s: %w", id, err)
	}
	d.metrics.repaired.WithLabelValues("lost_record").Inc()
	return d.deps.Results.RestoreQueued(ctx, []results.QueuedJob{{Job: s.Job, Body: s.Body}})
}

// rebuild fills a wiped Redis: the outcomes first, so that a job which has one is never restored as waiting, then what waits. Records that are there are left alone, so running
// workers and new jobs may write meanwhile. The sentinel comes last: until then creates with a key are refused, because the key might be one that is not restored yet.
func (d *Dispatcher) rebuild(ctx context.Context) error {
	wiped, err := d.deps.Results.Wiped(ctx)
	if err != nil {
		return fmt.Errorf("looking whether the result store was wiped: %w", err)
	}
	if !wiped {
		return nil
	}
	d.log.Info("the result store is empty: filling it from the streams")
	ended, waiting := 0, 0
	page := make([]results.EndedJob, 0, restorePage)
	flush := func() error {
		if err := d.deps.Results.RestoreEnded(ctx, page); err != nil {
			return fmt.Errorf("restoring ended jobs: %w", err)
		}
		ended += len(page)
		page = page[:0]
		return nil
	}
	for r, err := range d.deps.Queue.Outcomes(ctx, 0) {
		if err != nil {
			return fmt.Errorf("reading outcomes: %w", err)
		}
		if r.Outcome.Erased || r.Job.Live() {
			continue
		}
		if page = append(page, results.EndedJob{Job: r.Job, Outcome: r.Outcome}); len(page) == cap(page) {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	for _, m := range models {
		n, err := d.restoreWaiting(ctx, m)
		if err != nil {
			return err
		}
		waiting += n
	}
	if err := d.deps.Results.SetSentinel(ctx); err != nil {
		return fmt.Errorf("marking the result store as whole: %w", err)
	}
	d.log.Info("the result store is whole again", "ended", ended, "waiting", waiting)
	return nil
}

// restoreWaiting restores the records of a model's waiting jobs. Bodies are held a page at a time, by bytes as well as by number.
func (d *Dispatcher) restoreWaiting(ctx context.Context, m job.Model) (int, error) {
	const pageBytes = 8 << 20
	n, bytes := 0, 0
	var page []results.QueuedJob
	flush := func() error {
		if err := d.deps.Results.RestoreQueued(ctx, page); err != nil {
			return fmt.Errorf("restoring waiting jobs: %w", err)
		}
		n += len(page)
		page, bytes = page[:0], 0
		return nil
	}
	for s, err := range d.deps.Queue.Waiting(ctx, queue.Work, m, "", true) {
		if errors.Is(err, queue.ErrNotFound) {
			break
		}
		if err != nil {
			return n, fmt.Errorf("reading what waits for model %s: %w", m, err)
		}
		page = append(page, results.QueuedJob{Job: s.Job, Body: s.Body})
		if bytes += len(s.Body); len(page) == restorePage || bytes > pageBytes {
			if err := flush(); err != nil {
				return n, err
			}
		}
	}
	return n, flush()
}
