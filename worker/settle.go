package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// recordPatience is how long a written outcome's record is tried again.
const recordPatience = 60 * time.Second

// settle ends the job. Order: still the owner? -> outcome to DONE -> record with the done event -> bell -> ack. From the moment DONE has an outcome the job is over, whatever
// happens here.
func (a *attempt) settle(ctx context.Context, o *job.Outcome, result []byte) {
	w, j := a.w, a.job
	w.bind(j, a.call.request, o)
	// A token that is not current any more writes nothing: its outcome would hide that of the attempt that has the job. Without the store DONE alone decides.
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	err := w.deps.Results.Owns(short, j.ID, a.claim.Token)
	cancel()
	if errors.Is(err, results.ErrFenced) {
		a.lose(ctx)
		return
	}
	a.describe(ctx, o, err == nil)
	o.ResultSize = int64(len(result))
	record := &queue.Record{Job: *j, Outcome: *o, Result: result}
	if len(result) > blob.Threshold {
		record.Outcome.Blob = job.ResultBlob(j.ID, a.claim.Token)
		record.Result = nil
	}
	stored := a.writeOutcome(ctx, record, result)
	if stored == nil {
		return // the worker stops: the delivery comes again, and the job runs again
	}
	// If we crash here, the next delivery finds the outcome and does the rest.
	if !a.record(ctx, stored) {
		a.h.nak(jitter(notClaimed))
		return
	}
	// If we crash here, the next delivery finds the job ended, and is acked.
	a.h.ack()
	w.ended.add(j.ID)
	w.note(a.log, j, &stored.Outcome)
	a.dropObjects(ctx, record, stored)
}

// describe fills in how the attempt went, what earlier ones did, and which event is the last. stored: the store answers.
func (a *attempt) describe(ctx context.Context, o *job.Outcome, stored bool) {
	o.Token, o.FirstToken, o.Finished, o.Started = a.claim.Token, a.call.first, a.w.deps.Results.Now(), a.started
	if stored && a.claim.Charged+a.claim.Uncharged > 0 {
		ctx, cancel := context.WithTimeout(ctx, storeTimeout)
		defer cancel()
		if rec, err := a.w.deps.Results.Get(ctx, a.job.ID); err == nil && len(rec.Attempts) > 1 {
			o.Attempts = append(o.Attempts, rec.Attempts[:len(rec.Attempts)-1]...)
			o.Started = o.Attempts[0].Started
			if a.call.earlier != nil && rec.FirstToken > 0 {
				o.FirstToken = rec.FirstToken
			}
		} // without the record only this attempt is told
	}
	o.Attempts = append(o.Attempts, job.Attempt{Worker: a.w.id, Started: a.started, Ended: o.Finished, Outcome: string(o.State)})
	if a.events != nil {
		if stored {
			a.events.flush(ctx, 2*time.Second)
		}
		o.LastEvent = a.events.last() + 1
	}
}

// writeOutcome stores the answer where it is large and the outcome in DONE, trying until it is there or ctx ends (nil). It returns what DONE has: of several outcomes the first.
func (a *attempt) writeOutcome(ctx context.Context, r *queue.Record, result []byte) *queue.Record {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		stored, err := a.tryWrite(ctx, r, result)
		if err == nil || errors.Is(err, queue.ErrSettled) {
			return stored
		}
		a.log.Warn("writing an outcome: trying again", "err", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
	}
}

func (a *attempt) tryWrite(ctx context.Context, r *queue.Record, result []byte) (*queue.Record, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*storeTimeout)
	defer cancel()
	if r.Outcome.Blob != "" {
		if _, err := a.w.deps.Blobs.Put(ctx, r.Outcome.Blob, bytes.NewReader(result)); err != nil {
			return nil, fmt.Errorf("storing a large answer: %w", err)
		}
	}
	return a.w.deps.Queue.Settle(ctx, r)
}

// record takes the steps behind the outcome, trying for a minute: the message stays this worker's meanwhile. The events go before, for behind the done event there is no place for them.
func (a *attempt) record(ctx context.Context, stored *queue.Record) bool {
	patience, cancel := context.WithTimeout(ctx, recordPatience)
	defer cancel()
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		err := errUnwritten
		if a.events == nil || a.events.flush(patience, 2*time.Second) {
			err = a.w.settler.Record(patience, stored, a.claim.Token)
		}
		if err == nil {
			return true
		}
		select {
		case <-time.After(wait):
		case <-patience.Done():
			a.log.Warn("recording an outcome: leaving it to the next delivery", "err", err)
			return false
		}
	}
}

// errUnwritten: the store does not take the attempt's last events.
var errUnwritten = errors.New("events are not written yet")

// dropObjects removes the objects that nobody needs any more: the request's, and our answer's if another outcome was first. What fails here is swept.
func (a *attempt) dropObjects(ctx context.Context, ours, stored *queue.Record) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	a.w.settler.DropRequest(ctx, a.job)
	if ours.Outcome.Blob != "" && ours.Outcome.Blob != stored.Outcome.Blob {
		if err := a.w.deps.Blobs.Delete(ctx, ours.Outcome.Blob); err != nil {
			a.log.Warn("removing an answer that came second", "err", err)
		}
	}
}

// note counts a settled job and writes its one log line.
func (w *Worker) note(log *slog.Logger, j *job.Job, o *job.Outcome) {
	w.metrics.attempts.WithLabelValues(string(o.State)).Inc()
	switch { // what was given up half way was not done, and what ended without a start not here
	case o.Started > 0 && o.State == job.Completed:
		w.servedTokens.Add(int64(j.Expected()))
	case o.Started > 0 && o.Usage != nil:
		w.servedTokens.Add(int64(o.Usage.TotalTokens))
	}
	switch o.State {
	case job.Completed:
		w.completed.Add(1)
	case job.Failed:
		w.failed.Add(1)
	}
	attrs := []any{"state", o.State, "class", j.Class}
	if o.Started > 0 {
		attrs = append(attrs, "wait_ms", int64(o.Started-j.Created), "run_ms", int64(o.Finished-o.Started))
	}
	if o.Usage != nil {
		w.metrics.tokens.WithLabelValues("prompt").Add(float64(o.Usage.PromptTokens))
		w.metrics.tokens.WithLabelValues("completion").Add(float64(o.Usage.CompletionTokens))
		attrs = append(attrs, "prompt_tokens", o.Usage.PromptTokens, "completion_tokens", o.Usage.CompletionTokens)
	}
	if o.Error != nil {
		attrs = append(attrs, "code", o.Error.CodeOf())
	}
	log.Info("job settled", attrs...)
}
