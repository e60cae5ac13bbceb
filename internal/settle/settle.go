// Package settle ends jobs: the outcomes that no attempt made (cancelled, expired, crashed), and the steps behind every stored outcome, whoever wrote it.
//
// The order is that of every ending: outcome to DONE (the point of no return: the first wins) -> Redis record with the done event -> bell -> the message leaves the queue -> the
// request's object. Each step may be repeated, so whoever finds a later one missing simply takes them again.
package settle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

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
// A running attempt is told to stop. Errors: queue.ErrUnavailable before the outcome is stored; results.ErrUnavailable after it, together with the outcome, when the rest is left to the reconciler.
func (s *Settler) End(ctx context.Context, j *job.Job, rec *results.Record, o job.Outcome) (*queue.Record, error) {
	if o.Finished == 0 {
		o.Finished = s.Results.Now()
	}
	if rec != nil {
		o.Attempts, o.FirstToken = slices.Clone(rec.Attempts), rec.FirstToken
		if n := len(o.Attempts); n > 0 {
			o.Started = o.Attempts[0].Started
			if last := &o.Attempts[n-1]; last.Ended == 0 {
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

// Finish takes the steps behind a stored outcome, for whoever finds that they are missing.
func (s *Settler) Finish(ctx context.Context, stored *queue.Record) error {
	j := &stored.Job
	shown, err := s.shown(ctx, stored)
	if err != nil {
		return err
	}
	if err := s.Record(ctx, stored, shown); err != nil {
		return err
	}
	if err := s.Queue.Remove(ctx, queue.Work, j.Model, j.ID); err != nil {
		s.Log.Warn("removing an ended job's message: its next delivery will", "job", j.ID, "err", err)
	}
	s.DropRequest(ctx, j)
	return nil
}

// partly is no attempt's token: readers have seen, or can see, a part of what the outcome tells.
const partly job.Token = -1

// shown is the attempt whose events the job's readers have seen last, 0 if that is not known, partly if some of the outcome's own events are missing.
func (s *Settler) shown(ctx context.Context, stored *queue.Record) (job.Token, error) {
	j, o := &stored.Job, &stored.Outcome
	if !j.Events || o.Token == 0 {
		return 0, nil
	}
	rec, err := s.Results.Get(ctx, j.ID)
	switch {
	case errors.Is(err, results.ErrNotFound): // a wiped store
	case err != nil:
		return 0, fmt.Errorf("reading job %s: %w", j.ID, err)
	case rec.State.Ended() || rec.Token != 0 && rec.Token != o.Token:
		return rec.Token, nil
	}
	if o.LastEvent == 0 {
		return o.Token, nil
	}
	_, span, err := s.Results.Events(ctx, j.ID, 0, 0)
	if err != nil {
		return 0, fmt.Errorf("reading the events of job %s: %w", j.ID, err)
	}
	if span.Last < o.LastEvent-1 { // the worker died before it had written them all, or they were wiped
		return partly, nil
	}
	return o.Token, nil
}

// Record writes a stored outcome into the record, with the done event, and tells those who wait. shown is the attempt whose events the job's readers have seen last to their end, 0 if that is not
// known: if the outcome is another attempt's, its text is told in a reset before the end.
func (s *Settler) Record(ctx context.Context, stored *queue.Record, shown job.Token) error {
	j, o := &stored.Job, &stored.Outcome
	var reset []byte
	if j.Events && shown != 0 && o.Token != 0 && o.Token != shown {
		var err error
		if reset, err = s.resetTo(ctx, stored); err != nil {
			return err
		}
	}
	if err := s.Results.Finish(ctx, j, o, stored.Result, reset, nil); err != nil {
		return fmt.Errorf("recording the outcome of job %s: %w", j.ID, err)
	}
	s.Relay.Bell(j.ID)
	s.Relay.Ended(j.Model)
	return nil
}

// resetTo is the data of a reset to the text of an outcome's answer.
func (s *Settler) resetTo(ctx context.Context, stored *queue.Record) ([]byte, error) {
	result := stored.Result
	if name := stored.Outcome.Blob; name != "" {
		r, err := s.Blobs.Get(ctx, name)
		if err == nil {
			defer r.Close() //nolint:errcheck // read only
			result, err = io.ReadAll(r)
		}
		if err != nil && !errors.Is(err, blob.ErrNotFound) {
			return nil, fmt.Errorf("reading the answer of job %s: %w", stored.Job.ID, err)
		}
	}
	data, err := json.Marshal(map[string]string{"text": job.AnswerText(result)})
	if err != nil {
		return nil, fmt.Errorf("writing a reset of job %s: %w", stored.Job.ID, err)
	}
	return data, nil
}

// DropRequest removes the object that holds an ended job's request, if there is one. What fails here is swept.
func (s *Settler) DropRequest(ctx context.Context, j *job.Job) {
	if j.Blob == "" {
		return
	}
	if err := s.Blobs.Delete(ctx, j.Blob); err != nil {
		s.Log.Warn("removing a request's object: the sweep will", "job", j.ID, "err", err)
	}
}
