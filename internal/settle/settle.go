// Package settle ends jobs from outside an attempt (cancelled, expired, crashed), and finishes what a crash left undone behind a stored outcome.
//
// The order is that of every ending: outcome to DONE (the point of no return: the first wins) -> Redis record with the done event -> bell -> the message leaves the queue. Each
// step may be repeated, so whoever finds a later one missing simply takes them again.
package settle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
)

// Settler ends jobs. Safe for concurrent use.
type Settler struct {
	Queue   *queue.Queue
	Results *results.Store
	Relay   *relay.Relay
	Blobs   blob.Store
	Log     *slog.Logger
}

// End writes o, which no attempt made, as the job's outcome, and returns the outcome that holds: of several the first, which may be another. rec is the job's record, nil if there is none.
// A running attempt is told to stop. Errors: queue.ErrUnavailable before the outcome is stored; results.ErrUnavailable after it, when the rest is left to the reconciler.
func (s *Settler) End(ctx context.Context, j *job.Job, rec *results.Record, o job.Outcome) (*queue.Record, error) {
	if o.Finished == 0 {
		o.Finished = s.Results.Now()
	}
	if rec != nil {
		o.Attempts, o.FirstToken = rec.Attempts, rec.FirstToken
		if len(rec.Attempts) > 0 {
			o.Started = rec.Attempts[0].Started
			if last := &o.Attempts[len(o.Attempts)-1]; last.Ended == 0 {
				last.Ended, last.Outcome = o.Finished, string(o.State)
			}
		}
		if j.Events {
			o.LastEvent = rec.N + 1
		}
	}
	stored, err := s.Queue.Settle(ctx, &queue.Record{Job: *j, Outcome: o})
	if err != nil && !errors.Is(err, queue.ErrSettled) {
		return nil, fmt.Errorf("ending job %s as %s: %w", j.ID, o.State, err)
	}
	// If we crash here, the claim of the next delivery, or the reconciler, finds the outcome and does the rest.
	if rec != nil && rec.State == job.Running {
		s.Relay.Cancel(j.ID)
	}
	return stored, s.Finish(ctx, stored)
}

// Finish takes the steps behind a stored outcome.
func (s *Settler) Finish(ctx context.Context, stored *queue.Record) error {
	j := &stored.Job
	if err := s.Results.Finish(ctx, j, &stored.Outcome, stored.Result, nil, nil); err != nil {
		return fmt.Errorf("recording the outcome of job %s: %w", j.ID, err)
	}
	s.Relay.Bell(j.ID)
	s.Relay.Ended(j.Model)
	if err := s.Queue.Remove(ctx, queue.Work, j.Model, j.ID); err != nil {
		s.Log.Warn("removing an ended job's message: its next delivery will", "job", j.ID, "err", err)
	}
	if j.Blob != "" {
		if err := s.Blobs.Delete(ctx, j.Blob); err != nil {
			s.Log.Warn("removing a request's object: the sweep will", "job", j.ID, "err", err)
		}
	}
	return nil
}
