package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// notClaimed delays a delivery that cannot be claimed because a store is away.
const notClaimed = time.Second

// claim takes h's job for this worker, or answers the delivery and returns nil.
func (w *Worker) claim(ctx context.Context, h *holding) *results.Claim {
	c, err := w.tryClaim(ctx, h)
	switch {
	case err != nil:
		h.log.Warn("claiming a job: handing it back until the stores are there", "err", err)
		h.nak(jitter(notClaimed))
	case c.Verdict == results.Taken:
		return c
	case c.Verdict == results.Ended:
		h.ack()
	case c.Verdict == results.Held, c.Verdict == results.TooEarly:
		h.nak(c.Wait)
	default: // the record changed under each look: somebody else is at it
		h.nak(jitter(notClaimed))
	}
	return nil
}

// tryClaim claims as often as the answer asks for something first: a look at DONE, or the whole record. An outcome that DONE has is recorded, which repairs what a crash left undone, and
// counts as Ended.
func (w *Worker) tryClaim(ctx context.Context, h *holding) (*results.Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*storeTimeout)
	defer cancel()
	r := results.ClaimRequest{Job: &h.Job, Worker: w.id, Lease: h.AckWait, AckSubject: h.AckSubject, Delivered: h.Delivered, Resume: true}
	c := &results.Claim{}
	if h.Delivered > 1 { // the script would ask for it anyway
		c.Verdict = results.CheckDone
	}
	for range 4 {
		switch c.Verdict {
		case results.CheckDone:
			over, err := w.finishEnded(ctx, &h.Job)
			if err != nil {
				return nil, err
			}
			if over {
				return &results.Claim{Verdict: results.Ended}, nil
			}
			r.Checked = true
		case results.Unrecorded:
			r.Whole, r.Body = true, h.Body
		}
		var err error
		if c, err = w.deps.Results.Claim(ctx, r); err != nil {
			return nil, err
		}
		if c.Verdict != results.CheckDone && c.Verdict != results.Unrecorded {
			break
		}
	}
	return c, nil
}

// finishEnded looks for a job's outcome in DONE, and takes the steps behind it if it is there.
func (w *Worker) finishEnded(ctx context.Context, j *job.Job) (bool, error) {
	stored, err := w.deps.Queue.Outcome(ctx, j.Tenant, j.Group, j.ID)
	switch {
	case errors.Is(err, queue.ErrNotFound):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("looking for an outcome before the claim: %w", err)
	}
	return true, w.settler.Finish(ctx, stored)
}

// endedPeriod is how often jobs that ended are dropped from the worker's held set.
const endedPeriod = time.Second

// endedJobs collects jobs that have ended under this worker, to drop many at once from its held set. Until then they do no harm there: nothing that has ended is taken from a dead worker.
type endedJobs struct {
	mu  sync.Mutex
	ids []job.ID
}

// maxEnded bounds what is kept while the store is away.
const maxEnded = 100_000

func (e *endedJobs) add(ids ...job.ID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.ids) < maxEnded {
		e.ids = append(e.ids, ids...)
	}
}

func (e *endedJobs) take() []job.ID {
	e.mu.Lock()
	defer e.mu.Unlock()
	ids := e.ids
	e.ids = nil
	return ids
}

// dropEnded drops what has ended from the held set, each second and when ctx ends. What is left is dropped by the dispatcher.
func (w *Worker) dropEnded(ctx context.Context) {
	t := time.NewTicker(endedPeriod)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		short, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout) // the last time is when ctx has ended
		if ids := w.ended.take(); w.deps.Results.LetGo(short, w.id, ids...) != nil {
			w.ended.add(ids...) // the store is away, as others say
		}
		cancel()
		if ctx.Err() != nil {
			return
		}
	}
}
