package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/results"
)

// putBack has a line queued again whose message is lost. rec is its record: it has neither message nor outcome.
func (v *driver) putBack(ctx context.Context, rec *results.Record) error {
	j := &rec.Job
	v.mu.Lock()
	r := v.batches[j.Group]
	v.mu.Unlock()
	if r != nil {
		_, err := r.refeed(ctx, []int64{j.Line}) // if the batch is about to end, or not read yet, it will see to the line itself
		return err
	}
	b, err := v.d.ledger.Batch(ctx, j.Tenant, j.Group)
	switch {
	case err == nil && !b.Status.Ended(): // it will be driven in a moment
		return nil
	case err != nil && !errors.Is(err, ledger.ErrNotFound):
		return fmt.Errorf("reading the batch of job %s: %w", j.ID, err)
	}
	v.d.log.Error("a line of a batch that has ended is still about: ending it", "job", j.ID, "batch", j.Group)
	return v.d.end(ctx, rec, job.Outcome{State: job.Failed, Error: job.NewError(job.TypeServer, job.CodeInternal, "The line's batch has ended without it.")})
}

// compare finds lines that should be queued and have no message, at two looks one after the other, and has those queued again that have no outcome. It finds also what no record tells of any more. present are the jobs
// that have a message.
func (v *driver) compare(ctx context.Context, present map[job.ID]job.Model) error {
	v.mu.Lock()
	all := make([]*running, 0, len(v.batches))
	for _, r := range v.batches {
		all = append(all, r)
	}
	v.mu.Unlock()
	var failed error
	for _, r := range all {
		n, err := r.refeed(ctx, r.missing(present))
		if n > 0 {
			r.log.Warn("lines of a batch were lost: they are queued again", "lines", n)
			v.d.metrics.repaired.WithLabelValues("lost_line").Add(float64(n))
		}
		if passing(err) {
			return err
		}
		if err != nil { // the others are looked at all the same
			failed = err
		}
	}
	return failed
}

// missing are the lines that should have a message and had none at this look and the last.
func (r *running) missing(present map[job.ID]job.Model) []int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	absent := map[int64]bool{}
	var twice []int64
	for n, p := range r.open {
		if _, there := present[job.LineID(r.id, n)]; there || p.at >= p.supply.fedTo.Load() {
			continue
		}
		absent[n] = true
		if r.absent[n] {
			twice = append(twice, n)
		}
	}
	r.absent = absent
	return twice
}

// purger removes the outcomes of lines from DONE when their batch has ended long ago: its files have them.
type purger struct {
	d *Dispatcher
	// done: batches that ended until then are purged.
	done job.Millis
}

const (
	purgePage = 200
	// doneAge is longer than DONE keeps anything that is of an older batch, whatever its retention up to a month.
	doneAge = 40 * 24 * time.Hour
)

// purge looks once. A batch is left for a later look while one of its lines has a message: what is delivered without its outcome would run again.
func (p *purger) purge(ctx context.Context) error {
	d := p.d
	until := d.deps.Results.Now() - job.Millis(d.cfg.BatchKeep.Milliseconds())
	p.done = max(p.done, until-job.Millis(doneAge.Milliseconds()))
	for {
		ended, err := d.ledger.EndedBatches(ctx, p.done, until, purgePage)
		if err != nil {
			return fmt.Errorf("listing the batches that ended long ago: %w", err)
		}
		if len(ended) == 0 {
			return nil
		}
		present, err := d.present(ctx)
		if err != nil {
			return err
		}
		for i := range ended {
			b := &ended[i]
			left, err := p.one(ctx, b, present)
			if err != nil {
				return err
			}
			if left > 0 {
				d.log.Warn("a batch that ended long ago has messages: they are removed before its outcomes", "batch", b.ID, "messages", left)
				return nil
			}
			// Of two that ended in one millisecond the second may be on the next page.
			at := b.Completed + b.Expired + b.Cancelled
			if i+1 < len(ended) || len(ended) < purgePage {
				p.done = at
			} else {
				p.done = max(p.done+1, at-1)
			}
		}
	}
}

// one purges a batch, unless there are messages of it: those are removed, and counted.
func (p *purger) one(ctx context.Context, b *ledger.Batch, present map[job.ID]job.Model) (left int, err error) {
	for rec, err := range p.d.deps.Queue.GroupHeaders(ctx, b.Tenant, b.ID) {
		if err != nil {
			return 0, fmt.Errorf("reading the outcomes of batch %s: %w", b.ID, err)
		}
		if _, there := present[rec.Job.ID]; there { // it has ended: its outcome is here
			left++
			if err := p.d.settler.Finish(ctx, rec); err != nil {
				return 0, err
			}
		}
	}
	if left > 0 {
		return left, nil
	}
	return 0, p.d.deps.Queue.PurgeGroup(ctx, b.Tenant, b.ID)
}
