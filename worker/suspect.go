package worker

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// suspectAlone is how long a suspect keeps others from starting, if it does not end before.
const suspectAlone = time.Second

// awaitTurn waits, before the claim, until h's job may start if it is a suspect: one whose worker has died under it, or whose engine has broken off. What brings down an engine or a worker takes
// those beside it along, and all come back at the same time; starting together again, all would be charged until the last one had failed. So suspects start one by one. The returned
// function lets the next one start; it may be called more than once.
func (w *Worker) awaitTurn(ctx context.Context, h *holding) (leave func()) {
	if h.Delivered == 1 {
		return func() {}
	}
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	rec, err := w.deps.Results.Get(short, h.Job.ID)
	cancel()
	if err != nil || !suspect(rec) { // without the record the claim says what is to be done
		return func() {}
	}
	select {
	case w.suspects <- struct{}{}:
		return sync.OnceFunc(func() { <-w.suspects })
	case <-ctx.Done(): // the claim finds out
		return func() {}
	}
}

func suspect(r *results.Record) bool {
	return r.Deaths > 0 || slices.ContainsFunc(r.Attempts, func(a job.Attempt) bool { return a.Outcome == reasonBroken })
}

// leaveSoon lets the next suspect start in a while; but where one more charge would end the job it stays alone, so that no other one can cost it its last chance.
func (a *attempt) leaveSoon(leave func()) (stop func()) {
	if a.claim.Charged >= a.w.cfg.MaxAttempts-1 || a.claim.Deaths >= a.w.cfg.MaxDeaths-1 {
		return func() {}
	}
	t := time.AfterFunc(a.w.alone, leave)
	return func() { t.Stop() }
}
