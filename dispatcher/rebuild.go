package dispatcher

import (
	"context"
	"fmt"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// restorePage is how many records go to Redis in one round trip.
const restorePage = 256

// rebuild fills a wiped Redis: the outcomes first, so that a job which has one is never restored as waiting, then what waits, then the outcomes of those that ended meanwhile, for their keys. Records
// that are there are left alone, so running workers and new jobs may write at the same time. The sentinel comes last: until then creates with a key are refused, because the key might be one
// that is not restored yet.
func (d *Dispatcher) rebuild(ctx context.Context) error {
	wiped, err := d.deps.Results.Wiped(ctx)
	if err != nil {
		return fmt.Errorf("looking whether the result store was wiped: %w", err)
	}
	if !wiped {
		return nil
	}
	d.log.Info("the result store is empty: filling it from the streams")
	ended, next, err := d.restoreEnded(ctx, 0)
	if err != nil {
		return err
	}
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	waiting := 0
	for _, m := range models {
		n, err := d.restoreWaiting(ctx, m)
		if err != nil {
			return err
		}
		waiting += n
	}
	more, _, err := d.restoreEnded(ctx, next)
	if err != nil {
		return err
	}
	if err := d.deps.Results.SetSentinel(ctx); err != nil {
		return fmt.Errorf("marking the result store as whole: %w", err)
	}
	d.log.Info("the result store is whole again", "ended", ended+more, "waiting", waiting)
	return nil
}

// restoreEnded restores the records of ended jobs from DONE's sequence seq on, and returns how many there were and which sequence comes next.
func (d *Dispatcher) restoreEnded(ctx context.Context, seq uint64) (n int, next uint64, err error) {
	next = seq
	page := make([]results.EndedJob, 0, restorePage)
	flush := func() error {
		if err := d.deps.Results.RestoreEnded(ctx, page); err != nil {
			return fmt.Errorf("restoring ended jobs: %w", err)
		}
		n += len(page)
		page = page[:0]
		return nil
	}
	for r, err := range d.deps.Queue.Outcomes(ctx, seq) {
		if err != nil {
			return n, next, fmt.Errorf("reading outcomes: %w", err)
		}
		next = r.Seq + 1
		if r.Outcome.Erased || r.Job.Live() {
			continue
		}
		if page = append(page, results.EndedJob{Job: r.Job, Outcome: r.Outcome}); len(page) == cap(page) {
			if err := flush(); err != nil {
				return n, next, err
			}
		}
	}
	return n, next, flush()
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
