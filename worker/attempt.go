package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// attempt is one try at a durable job that this worker owns.
type attempt struct {
	w       *Worker
	log     *slog.Logger
	h       *holding
	job     *job.Job
	claim   *results.Claim
	call    *call
	events  *eventLog // nil if the job keeps none
	started job.Millis
	delist  func() // lets this worker take the job again
}

// runDurable claims h's job, runs it, and settles it or gives it back.
func (w *Worker) runDurable(run context.Context, h *holding, holds *reservation) {
	ctx, cancel := context.WithCancelCause(run)
	defer cancel(nil)
	delist, ok := w.enlist(h.Job.ID, cancel) // before the claim: a cancel that comes right behind it must not be missed
	if !ok {
		h.nak(h.AckWait / 3)
		return
	}
	defer delist()
	leave := w.awaitTurn(ctx, h)
	defer leave()
	claim := w.claim(run, h)
	if claim == nil {
		return
	}
	log := h.log.With("attempt", claim.Token)
	a := &attempt{w: w, log: log, h: h, job: &h.Job, claim: claim, started: claim.Now, delist: delist}
	a.call = &call{w: w, log: log, d: h.Delivery, holds: holds, show: a.show}
	if !a.preemptible(ctx) {
		holds.stay()
	}
	defer a.leaveSoon(leave)()
	if a.job.Events {
		a.events = newEventLog(w.deps.Results, w.deps.Relay, a.job, claim, log)
		writing := make(chan struct{})
		stop, end := context.WithCancel(run)
		go func() {
			defer close(writing)
			a.events.run(stop, func() { cancel(errFenced) })
		}()
		defer func() { end(); <-writing }()
		w.deps.Relay.Bell(a.job.ID) // the claim has appended an event
	}
	h.renewWith(func() { a.renew(run, cancel) })
	if a.claim.Charged+a.claim.Uncharged == 0 {
		w.metrics.wait.WithLabelValues(string(a.job.Class)).Observe((claim.Now - a.job.Created).Seconds())
	}
	got, f := a.execute(ctx)
	a.end(run, got, f)
}

// execute calls the engine, unless the job must not run any more.
func (a *attempt) execute(ctx context.Context) (*reply, *fault) {
	if a.claim.CancelAsked {
		return nil, cancelled()
	}
	if f := late(a.job, a.claim.Now, a.claim.Charged+a.claim.Uncharged == 0); f != nil {
		return nil, f
	}
	if a.claim.Deaths >= a.w.cfg.MaxDeaths {
		return nil, failed(job.CodeWorkerCrashed, fmt.Sprintf("The job's worker died %d times while running it.", a.claim.Deaths))
	}
	if a.claim.Partial {
		a.resume(ctx)
	}
	return a.call.run(ctx, a.claim.Now)
}

// maxPreemptions bounds how often a job makes room for others.
const maxPreemptions = 3

// preemptible tells whether the job may be made to give way to one of a higher class.
func (a *attempt) preemptible(ctx context.Context) bool {
	if a.job.Class != job.Batch {
		return false
	}
	if a.claim.Uncharged < maxPreemptions {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	rec, err := a.w.deps.Results.Get(ctx, a.job.ID)
	n := 0
	if err == nil {
		for _, done := range rec.Attempts {
			if done.Outcome == reasonPreempted {
				n++
			}
		}
	}
	return err == nil && n < maxPreemptions
}

// show keeps a chunk as an event.
func (a *attempt) show(_ *reply, ev engine.Event) bool {
	if a.events != nil && ev.Data != nil && !ev.Done {
		a.events.add(ev.Data)
	}
	return true
}

// end settles the job, gives it back, or leaves it to the attempt that has it now.
func (a *attempt) end(ctx context.Context, got *reply, f *fault) {
	switch {
	case f != nil && f.lost:
		a.lose(ctx)
	case f != nil && f.again && !a.spent(f):
		a.giveBack(ctx, f)
	default:
		o, result := outcome(got, f)
		a.settle(ctx, o, result)
	}
}

// lose leaves the job to the attempt that has it now, or to what has ended it: whatever is answered to the delivery might be answered to that one's.
func (a *attempt) lose(ctx context.Context) {
	a.w.metrics.attempts.WithLabelValues("fenced").Inc()
	a.log.Info("attempt dropped: another one owns the job, or it has ended")
	a.h.drop()
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	rec, err := a.w.deps.Results.Get(ctx, a.job.ID)
	if err == nil && (rec.State.Ended() || rec.Worker != a.w.id) { // else another attempt of this worker may hold it
		a.w.ended.add(a.job.ID)
	}
}

// outcome is how a job ends by the engine's reply, a fault, or both.
func outcome(r *reply, f *fault) (*job.Outcome, []byte) {
	o := &job.Outcome{State: job.Completed}
	var result []byte
	if r != nil {
		o.StatusCode, o.ContentType, o.Usage, result = r.status, r.contentType, r.usage, r.body
		if r.status < 200 || r.status > 299 {
			o.State = job.Failed
			o.Error = job.NewError(job.TypeOf(r.status), job.CodeEngineError, fmt.Sprintf("The engine refused the request with %d.", r.status))
		}
	}
	if f != nil {
		o.State, o.Error = job.Failed, f.err
		if f.state != "" {
			o.State = f.state
		}
		if r != nil && (r.streamed || r.status < 400) { // a part of an answer is none, nor is what is no answer under a good status
			o.StatusCode, o.ContentType, result = 0, "", nil
		}
		if o.StatusCode != 0 && o.Error != nil {
			told := *o.Error
			told.Type, o.Error = job.TypeOf(o.StatusCode), &told
		}
	}
	return o, result
}

// maxUncharged bounds how often a job may be given back through no fault of its own, so that nothing circles for ever.
const maxUncharged = 100

// spent tells whether the job has had all its attempts with this one. Then f says so, unless the engine's own last word says more.
func (a *attempt) spent(f *fault) bool {
	switch {
	case f.charged && a.claim.Charged+1 >= a.w.cfg.MaxAttempts:
		f.err.Message = fmt.Sprintf("%s It was attempt %d of %d.", f.err.Message, a.claim.Charged+1, a.w.cfg.MaxAttempts)
		return true
	case !f.charged && a.claim.Uncharged >= maxUncharged:
		f.err = job.NewError(job.TypeServer, job.CodeMaxAttempts, fmt.Sprintf("The job was given back %d times; the last time: %s.", a.claim.Uncharged, f.reason))
		return true
	}
	return false
}

// giveBack returns the job to the queue. Order: record (queued, no lease, not before) -> nak -> bell. If we crash in between, the delivery comes back after its ack wait, and may be
// claimed then.
func (a *attempt) giveBack(ctx context.Context, f *fault) {
	delay := f.floor
	if f.charged {
		delay = max(delay, jitter(retryDelay(a.w.cfg.RetryDelay, a.claim.Charged)))
	}
	if a.events != nil {
		a.events.flush(ctx, time.Second)
	}
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	err := a.w.deps.Results.GiveBack(short, a.job.ID, a.claim.Token, delay, f.charged, f.reason)
	if errors.Is(err, results.ErrFenced) {
		a.lose(ctx)
		return
	}
	if err == nil {
		err = a.w.deps.Results.LetGo(short, a.w.id, a.job.ID) // not with those that ended: this one may be claimed again
	}
	if err != nil {
		a.log.Warn("recording that a job goes back", "err", err)
	}
	a.delist()
	a.h.nak(delay)
	a.w.deps.Relay.Bell(a.job.ID)
	a.w.metrics.attempts.WithLabelValues("given_back").Inc()
	a.log.Info("job given back", "reason", f.reason, "charged", f.charged, "delay", delay)
}

// renew extends the attempt's lease, and stops the attempt if it is cancelled or another's.
func (a *attempt) renew(ctx context.Context, stop context.CancelCauseFunc) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	r := results.Renewal{
		Job: a.job, Body: a.h.Body, Worker: a.w.id, Token: a.claim.Token, N: a.claim.N, Started: a.started, Lease: a.h.AckWait, AckSubject: a.h.AckSubject,
	}
	if a.events != nil {
		r.N = a.events.last()
	}
	cancelAsked, err := a.w.deps.Results.Renew(ctx, r)
	switch {
	case errors.Is(err, results.ErrFenced):
		stop(errFenced)
	case err != nil: // the store is away: the call goes on, its outcome goes to DONE
		a.log.Warn("renewing a lease", "err", err)
	case cancelAsked:
		stop(errCancelAsked)
	case a.events != nil:
		a.events.check()
	}
}

// retryDelay is the pause before the next try after n charged ones: first, doubling to a minute.
func retryDelay(first time.Duration, n int) time.Duration {
	return min(time.Minute, first<<min(n, 6))
}

// jitter spreads d by up to a tenth upwards, so that what failed together does not come back together.
func jitter(d time.Duration) time.Duration { return d + time.Duration(rand.Int64N(int64(d)/10+1)) }
