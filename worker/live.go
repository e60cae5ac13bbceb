package worker

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
)

const (
	// maxLiveAttempts is how many charged attempts a job has whose client waits on its connection, liveRetry the pause before the second one, which doubles.
	maxLiveAttempts = 3
	liveRetry       = 250 * time.Millisecond
	// liveFloor is the longest delay that an engine may ask for which a waiting client is kept: with a longer one it is told itself.
	liveFloor = 10 * time.Second
	// apiGlance is how often it is looked whether the API that holds the connection lives.
	apiGlance = time.Second
)

// liveAttempt is one try at a job whose client waits on its connection to an API.
type liveAttempt struct {
	w       *Worker
	log     *slog.Logger
	h       *holding
	job     *job.Job
	call    *call
	answer  *relay.Answer
	claimed *relay.Claimed
	started job.Millis
	delist  func() // lets this worker take the job again
	sent    int    // bytes of the stream that have gone to the API, with those of earlier attempts that its client has
	shown   bool   // a part has gone to the API: no other attempt can begin anew
}

// runLive claims h's job from the API that holds the connection, runs it, and passes the answer on. The API is the truth of such a job: while it lives the job does.
func (w *Worker) runLive(run context.Context, h *holding, holds *reservation) {
	j := &h.Job
	ctx, cancel := context.WithCancelCause(run)
	defer cancel(nil)
	delist, ok := w.enlist(j.ID, cancel)
	if !ok {
		h.nak(h.AckWait / 3)
		return
	}
	defer delist()
	claimed := w.claimLive(run, h)
	if claimed == nil {
		return
	}
	log := h.log.With("attempt", claimed.Token)
	answer, err := w.deps.Relay.Answer(j.API, j.ID, claimed.Token)
	if err != nil {
		log.Warn("opening the way back to an API: handing the job back", "err", err)
		h.nak(elsewhere)
		return
	}
	defer answer.Close()
	a := &liveAttempt{w: w, log: log, h: h, job: j, answer: answer, claimed: claimed, started: w.deps.Results.Now(), delist: delist}
	a.call = &call{w: w, log: log, d: h.Delivery, holds: holds, show: a.show}
	if len(claimed.Shown) > 0 {
		a.sent = len(claimed.Shown)
		a.call.earlier, a.call.anew = chunksShown(claimed.Shown), func() bool { return false }
	}
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		a.watchAPI(ctx, cancel)
	}()
	defer func() { cancel(nil); <-watching }()
	waited := claimed.Charged == 0 && a.sent == 0
	if waited {
		w.metrics.wait.WithLabelValues(string(j.Class)).Observe((a.started - j.Created).Seconds())
	}
	f := late(j, a.started, waited)
	var got *reply
	if f == nil {
		got, f = a.call.run(ctx, a.started)
	}
	a.end(run, got, f)
}

// claimLive takes h's job for this worker, or answers the delivery and returns nil.
func (w *Worker) claimLive(ctx context.Context, h *holding) *relay.Claimed {
	j := &h.Job
	claimed, err := w.deps.Relay.Claim(ctx, j.API, relay.ClaimRequest{ID: j.ID, Worker: w.id, AckSubject: h.AckSubject})
	switch {
	case err == nil:
		return claimed
	case errors.Is(err, relay.ErrGone): // the API has settled it
		h.ack()
	case errors.Is(err, relay.ErrHeld):
		h.nak(jitter(time.Second))
	case !w.deps.Cluster.Alive(string(j.API)):
		w.settleLive(ctx, h, h.log, &job.Outcome{
			State: job.Cancelled, Finished: w.deps.Results.Now(),
			Error: job.NewError(job.TypeServer, job.CodeClientGone, "The API that held the client's connection has died."),
		})
	default:
		h.log.Warn("claiming a live job: handing it back", "err", err)
		h.nak(elsewhere)
	}
	return nil
}

// watchAPI stops the attempt when its API says that nobody waits or that another has the job, or has died.
func (a *liveAttempt) watchAPI(ctx context.Context, stop context.CancelCauseFunc) {
	t := time.NewTicker(apiGlance)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.answer.Cancelled():
			if errors.Is(a.answer.Err(), relay.ErrHeld) {
				stop(errFenced)
			} else {
				stop(errNobodyWaits)
			}
			return
		case <-t.C:
			if !a.w.deps.Cluster.Alive(string(a.job.API)) {
				stop(errNobodyWaits)
				return
			}
		}
	}
}

// show passes an event of a stream on as it came.
func (a *liveAttempt) show(got *reply, ev engine.Event) bool {
	if !a.shown {
		a.shown = true
		if a.answer.Send(relay.Part{Head: &relay.Head{StatusCode: got.status, ContentType: got.contentType, Continues: got.continues}}) != nil {
			return false
		}
	}
	a.sent += len(ev.Raw)
	return a.answer.Send(relay.Part{Data: ev.Raw}) == nil
}

// end passes the answer's end on, or gives the job back if another attempt may do better.
func (a *liveAttempt) end(ctx context.Context, got *reply, f *fault) {
	switch {
	case f != nil && f.lost:
		a.lose()
		return
	case f != nil && f.again && f.floor <= liveFloor && (!f.charged || a.claimed.Charged+1 < maxLiveAttempts) &&
		(a.sent == 0 || a.sent <= relay.MaxShown && a.call.continuable(ctx)):
		a.giveBack(ctx, f)
		return
	}
	o, body := outcome(got, f)
	a.w.bind(a.job, a.call.request, o)
	end := relay.End{State: o.State, Error: o.Error, Usage: o.Usage}
	if body != nil && !a.shown { // the engine's own words, good or bad
		end.Error = nil
		err := a.answer.Send(relay.Part{Head: &relay.Head{StatusCode: o.StatusCode, ContentType: o.ContentType}})
		if err == nil {
			err = a.answer.Send(relay.Part{Data: body})
		}
		if err != nil {
			a.log.Warn("an answer is larger than the API takes", "err", err)
			end.State, end.Error = job.Failed, job.NewError(job.TypeServer, job.CodeEngineError, "The engine's answer is too large.")
		}
	}
	a.finish(ctx, end, o)
}

// lose leaves the job to the attempt that has it now.
func (a *liveAttempt) lose() {
	a.w.metrics.attempts.WithLabelValues("fenced").Inc()
	a.log.Warn("attempt dropped: another one owns the job")
	a.h.drop()
}

// giveBack lets another attempt answer.
func (a *liveAttempt) giveBack(ctx context.Context, f *fault) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	delay := f.floor
	if f.charged {
		delay = max(delay, jitter(liveRetry<<min(a.claimed.Charged, 4)))
	}
	err := a.answer.Finish(ctx, relay.End{Retry: true, Charged: f.charged, Reason: f.reason})
	switch {
	case errors.Is(err, relay.ErrHeld):
		a.lose()
		return
	case errors.Is(err, relay.ErrGone):
		a.h.ack()
		return
	}
	// Without an answer of the API the next claim tells: this attempt's leaving is said again then.
	a.delist()
	a.h.nak(delay)
	a.w.metrics.attempts.WithLabelValues("given_back").Inc()
	a.log.Info("live job given back", "reason", f.reason, "charged", f.charged, "delay", delay)
}

// finish hands the end to the API and waits for its word that it has all. Then the usage goes to DONE, which the client does not wait for, and the message is acknowledged.
func (a *liveAttempt) finish(ctx context.Context, end relay.End, o *job.Outcome) {
	patience, cancel := context.WithTimeout(ctx, recordPatience)
	err := a.finishWhileWaited(patience, end)
	cancel()
	switch {
	case errors.Is(err, relay.ErrHeld):
		a.lose()
		return
	case errors.Is(err, relay.ErrGone): // its tokens are counted all the same
		if o.State == job.Completed {
			o.State, o.Error = job.Cancelled, job.NewError(job.TypeServer, job.CodeClientGone, "The client has gone.")
		}
	case err != nil:
		a.log.Warn("ending a live answer", "err", err)
	}
	o.Token, o.Started, o.FirstToken, o.Finished = a.claimed.Token, a.started, a.call.first, a.w.deps.Results.Now()
	o.Attempts = []job.Attempt{{Worker: a.w.id, Started: a.started, Ended: o.Finished, Outcome: string(o.State)}}
	// If we crash here, the message comes again, the API says that nobody waits, and only the usage is lost.
	a.w.settleLive(ctx, a.h, a.log, o)
}

// settleLive writes the outcome of a live job to DONE, as well as it can, and acknowledges its message.
func (w *Worker) settleLive(ctx context.Context, h *holding, log *slog.Logger, o *job.Outcome) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	if _, err := w.deps.Queue.Settle(ctx, &queue.Record{Job: h.Job, Outcome: *o}); err != nil && !errors.Is(err, queue.ErrSettled) {
		log.Warn("writing a live job's outcome", "err", err)
	}
	w.deps.Relay.Ended(h.Job.Model)
	h.ack()
	w.note(log, &h.Job, o)
}

// finishWhileWaited is Finish, given up when the API dies.
func (a *liveAttempt) finishWhileWaited(ctx context.Context, end relay.End) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := every(apiGlance, func() {
		if !a.w.deps.Cluster.Alive(string(a.job.API)) {
			cancel(errNobodyWaits)
		}
	})
	defer watch.stop()
	err := a.answer.Finish(ctx, end)
	if err != nil && errors.Is(context.Cause(ctx), errNobodyWaits) {
		return relay.ErrGone
	}
	return err
}
