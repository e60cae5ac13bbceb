package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

const (
	storeTimeout   = 5 * time.Second  // of one call to a store
	recordPatience = 60 * time.Second // how long a written outcome's record is tried again
	notClaimed     = time.Second      // delay of a delivery that cannot be claimed because a store is away
)

// attempt is one try at a durable job that this worker owns.
type attempt struct {
	w       *Worker
	log     *slog.Logger
	d       *queue.Delivery
	job     *job.Job
	claim   *results.Claim
	holds   *reservation
	events  *eventLog // nil if the job keeps none
	started job.Millis
	first   job.Millis // when the first token came
}

// ending is how an attempt ended. Exactly one of the three ways holds.
type ending struct {
	// An outcome to settle, with the engine's answer.
	outcome *job.Outcome
	result  []byte
	// The job goes back: after at least floor, for a reason, charged or not. A charged one that was the last allowed ends the job with outcome instead.
	back    bool
	charged bool
	reason  string
	floor   time.Duration
	// Nothing may be written: another attempt has the job.
	lost bool
}

// runDurable claims d's job, runs it, and settles it or gives it back.
func (w *Worker) runDurable(run context.Context, log *slog.Logger, d *queue.Delivery, holds *reservation, pulse *pulse) {
	claim := w.claim(run, log, d)
	if claim == nil {
		return
	}
	ctx, cancel := context.WithCancelCause(run)
	defer cancel(nil)
	defer w.enlist(d.Job.ID, cancel)()
	a := &attempt{w: w, log: log.With("attempt", claim.Token), d: d, job: &d.Job, claim: claim, holds: holds, started: claim.Now}
	if a.job.Events {
		a.events = newEventLog(w.deps.Results, w.deps.Relay, a.job, claim.Token, claim.N, a.log)
		writing := make(chan struct{})
		stop, ended := context.WithCancel(run)
		go func() {
			defer close(writing)
			a.events.run(stop, func() { cancel(errFenced) })
		}()
		defer func() { ended(); <-writing }()
		w.deps.Relay.Bell(a.job.ID) // the claim has appended an event
	}
	renew := func() { a.renew(run, cancel) }
	pulse.renew.Store(&renew)

	e := a.execute(ctx)
	if e.back && !errors.Is(context.Cause(ctx), errFenced) {
		a.giveBack(run, &e)
	}
	if e.outcome != nil && !e.back {
		a.settle(run, e.outcome, e.result)
	}
	if e.lost {
		w.metrics.attempts.WithLabelValues("fenced").Inc()
		a.log.Warn("attempt dropped: another one owns the job")
		// Neither ack nor nak: the delivery is the newer attempt's business, or comes back after its ack wait and is decided by the claim.
	}
}

// claim takes d's job for this worker, or ends d and returns nil.
func (w *Worker) claim(ctx context.Context, log *slog.Logger, d *queue.Delivery) *results.Claim {
	r := results.ClaimRequest{Job: &d.Job, Worker: w.id, Lease: d.AckWait, AckSubject: d.AckSubject, Delivered: d.Delivered}
	if d.Delivered > 1 && !w.checkDone(ctx, log, d, &r) {
		return nil
	}
	for range 4 { // each turn settles one question: DONE, the record, the lease
		c, err := w.tryClaim(ctx, r)
		if err != nil {
			log.Warn("claiming a job: handing it back until the store is there", "err", err)
			w.nak(log, d, jitter(notClaimed))
			return nil
		}
		switch c.Verdict {
		case results.Taken:
			return c
		case results.Ended:
			w.ack(log, d)
			return nil
		case results.Held, results.TooEarly:
			w.nak(log, d, c.Wait)
			return nil
		case results.CheckDone:
			if !w.checkDone(ctx, log, d, &r) {
				return nil
			}
		case results.Unrecorded:
			r.Whole, r.Body = true, d.Body
		}
	}
	w.nak(log, d, jitter(notClaimed)) // the record changed under each look: somebody else is at it
	return nil
}

func (w *Worker) tryClaim(ctx context.Context, r results.ClaimRequest) (*results.Claim, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	return w.deps.Results.Claim(ctx, r)
}

// checkDone looks for an outcome. If there is one it repairs what a crash left undone, ends d, and returns false, as it does when DONE cannot be read.
func (w *Worker) checkDone(ctx context.Context, log *slog.Logger, d *queue.Delivery, r *results.ClaimRequest) bool {
	look, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	rec, err := w.deps.Queue.Outcome(look, d.Job.Tenant, d.Job.Group, d.Job.ID)
	switch {
	case errors.Is(err, queue.ErrNotFound):
		r.Checked = true
		return true
	case err != nil:
		log.Warn("looking for an outcome before a claim: handing the job back", "err", err)
		w.nak(log, d, jitter(notClaimed))
		return false
	}
	if err := w.deps.Results.Finish(look, &rec.Job, &rec.Outcome, rec.Result, nil, nil); err != nil {
		log.Warn("recording a stored outcome: handing the job back", "err", err)
		w.nak(log, d, jitter(notClaimed))
		return false
	}
	w.deps.Relay.Bell(d.Job.ID)
	w.ack(log, d)
	return false
}

// renew extends the attempt's lease, and stops the attempt if it is cancelled or another's.
func (a *attempt) renew(ctx context.Context, stop context.CancelCauseFunc) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	r := results.Renewal{
		Job: a.job, Body: a.d.Body, Worker: a.w.id, Token: a.claim.Token, N: a.claim.N, Started: a.started, Lease: a.d.AckWait, AckSubject: a.d.AckSubject,
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
	}
}

// execute decides whether the job may run, calls the engine, and says how that ended.
func (a *attempt) execute(ctx context.Context) ending {
	j, now := a.job, a.claim.Now
	firstTry := a.claim.Charged+a.claim.Uncharged == 0
	switch {
	case a.claim.CancelAsked:
		return a.over(job.Cancelled, job.CodeCancelled, "The job was cancelled.")
	case now >= j.Expires:
		return a.over(job.Expired, job.CodeExpired, "The job's deadline passed before it could run.")
	case firstTry && j.QueueTimeout > 0 && now >= j.Created+j.QueueTimeout:
		return a.over(job.Expired, job.CodeExpired, "The job waited longer than its queue_timeout.")
	case a.claim.Deaths >= a.w.cfg.MaxDeaths:
		return a.over(job.Failed, job.CodeWorkerCrashed, fmt.Sprintf("The job's worker died %d times while running it.", a.claim.Deaths))
	}
	if firstTry {
		a.w.metrics.wait.WithLabelValues(string(j.Class)).Observe(float64(now-j.Created) / 1000)
	}
	if j.RunTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, j.RunTimeout.Duration(), errRunTimeout)
		defer cancel()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, (j.Expires - now).Duration(), errExpired)
	defer cancel()

	body, err := a.w.body(ctx, a.d)
	if err != nil {
		if errors.Is(err, blob.ErrNotFound) {
			return a.over(job.Failed, job.CodeInternal, "The job's body is not in the object store any more.")
		}
		if cause := a.stopped(ctx); cause != nil {
			return *cause
		}
		a.log.Warn("reading a job's body", "err", err)
		return ending{back: true, reason: "body_unavailable", floor: notClaimed}
	}
	hideUsage := false
	if j.Events {
		if body, hideUsage, err = job.SetStreaming(body); err != nil {
			return a.over(job.Failed, job.CodeInvalidJSON, "The job's body cannot be edited: "+err.Error())
		}
	} else if body, err = job.SetPlain(body); err != nil {
		return a.over(job.Failed, job.CodeInvalidJSON, "The job's body cannot be edited: "+err.Error())
	}
	called := time.Now()
	answer, err := a.w.deps.Engine.Call(ctx, engine.Request{Endpoint: j.Endpoint, Body: bytes.NewReader(body), Size: int64(len(body)), ID: j.ID})
	if err != nil {
		return a.broken(ctx, err, true)
	}
	defer answer.Body.Close() //nolint:errcheck // closing is how the engine learns that nobody reads on
	a.w.alive()
	if answer.StatusCode != 200 || !strings.HasPrefix(answer.ContentType, "text/event-stream") {
		result, err := answer.ReadAll()
		if err != nil {
			return a.broken(ctx, err, false)
		}
		return a.answered(ctx, answer, result)
	}
	return a.streamed(ctx, answer, called, hideUsage)
}

// streamed reads a stream to its end.
func (a *attempt) streamed(ctx context.Context, answer *engine.Response, called time.Time, hideUsage bool) ending {
	assembler := engine.NewAssembler(a.job.Endpoint, hideUsage)
	for ev, err := range answer.Events() {
		if err != nil {
			return a.broken(ctx, err, false)
		}
		if ev.Done {
			break
		}
		if ev.Data == nil {
			continue
		}
		chunk, err := assembler.Add(ev.Data)
		if err != nil {
			return a.broken(ctx, err, false)
		}
		if chunk.Error != nil {
			return ending{back: true, charged: true, reason: "engine_error", outcome: a.failure(job.CodeEngineError, "The engine failed in the middle of its answer: "+chunk.Error.Message)}
		}
		a.w.alive()
		if chunk.Token {
			a.holds.grow(1)
			a.w.rate.add(time.Now(), 1)
			if a.first == 0 {
				a.first = a.w.deps.Results.Now()
				a.w.metrics.ttft.Observe(time.Since(called).Seconds())
			}
		}
		if chunk.Show && a.events != nil {
			a.events.add(ev.Data)
		}
	}
	body, err := assembler.Body()
	if err != nil {
		return a.broken(ctx, err, false)
	}
	a.w.badCalls.Store(0)
	return ending{
		outcome: &job.Outcome{State: job.Completed, StatusCode: 200, ContentType: "application/json", Usage: assembler.Usage()},
		result:  body,
	}
}

// answered judges a whole answer.
func (a *attempt) answered(ctx context.Context, answer *engine.Response, result []byte) ending {
	status := answer.StatusCode
	o := &job.Outcome{State: job.Completed, StatusCode: status, ContentType: answer.ContentType}
	switch {
	case status >= 200 && status < 300:
		a.w.badCalls.Store(0)
		o.Usage = engine.UsageOf(result)
		if o.Usage != nil && !a.job.Events {
			a.w.rate.add(time.Now(), o.Usage.CompletionTokens)
		}
		return ending{outcome: o, result: result}
	case status == 429 || status == 408 || status >= 500:
		a.w.badCall(fmt.Sprintf("it answers %d", status))
		o.State, o.Error = job.Failed, job.NewError(job.TypeServer, job.CodeEngineError, fmt.Sprintf("The engine answered %d.", status))
		e := ending{back: true, charged: true, reason: fmt.Sprintf("engine_%d", status), floor: answer.RetryAfter, outcome: o, result: result}
		if status == 503 { // an engine that loads or shuts down is no fault of the job
			a.w.doubt("it answers 503")
			e.charged = !a.w.notReady(ctx)
		}
		return e
	default:
		o.State, o.Error = job.Failed, job.NewError(job.TypeInvalidRequest, job.CodeEngineError, fmt.Sprintf("The engine refused the request with %d.", status))
		return ending{outcome: o, result: result}
	}
}

// broken judges a call that gave no whole answer. connecting: not even its head came.
func (a *attempt) broken(ctx context.Context, err error, connecting bool) ending {
	if e := a.stopped(ctx); e != nil {
		return *e
	}
	if errors.Is(err, engine.ErrTooLarge) {
		return ending{outcome: a.failure(job.CodeEngineError, "The engine's answer is too large to keep.")}
	}
	a.w.badCall(err.Error())
	if connecting && refused(err) {
		a.w.doubt("it cannot be reached")
		return ending{back: true, reason: "engine_unready", floor: time.Second}
	}
	a.log.Warn("the engine broke off", "err", err)
	return ending{back: true, charged: true, reason: "engine_error", outcome: a.failure(job.CodeEngineError, "The engine broke off its answer.")}
}

// stopped says how an attempt ends that was stopped from outside, or nil if it was not.
func (a *attempt) stopped(ctx context.Context) *ending {
	if ctx.Err() == nil {
		return nil
	}
	var e ending
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errCancelAsked):
		e = a.over(job.Cancelled, job.CodeCancelled, "The job was cancelled.")
	case errors.Is(cause, errExpired):
		e = a.over(job.Expired, job.CodeExpired, "The job's deadline passed while it ran.")
	case errors.Is(cause, errRunTimeout):
		e = a.over(job.Failed, job.CodeRunTimeout, fmt.Sprintf("The attempt took longer than its run_timeout of %s.", a.job.RunTimeout.Duration()))
	case errors.Is(cause, errFenced):
		e = ending{lost: true}
	case errors.Is(cause, errStalled):
		e = ending{back: true, reason: string(job.CodeEngineStalled)}
	default: // drained, or stopped altogether
		e = ending{back: true, reason: "drained"}
	}
	return &e
}

// over is an ending without an answer of the engine.
func (a *attempt) over(s job.State, code job.Code, message string) ending {
	o := a.failure(code, message)
	o.State = s
	return ending{outcome: o}
}

func (a *attempt) failure(code job.Code, message string) *job.Outcome {
	return &job.Outcome{State: job.Failed, Error: job.NewError(job.TypeServer, code, message)}
}

// giveBack returns the job to the queue, unless it has had all its attempts: then e becomes the outcome to settle.
// Order: record (queued, no lease, not before) -> nak -> bell. A crash between them leaves a delivery that comes back after its ack wait and may be claimed then.
func (a *attempt) giveBack(ctx context.Context, e *ending) {
	tries := a.claim.Charged
	if e.charged {
		if tries++; tries >= a.w.cfg.MaxAttempts {
			e.back = false
			if e.outcome == nil {
				e.outcome = a.failure(job.CodeMaxAttempts, fmt.Sprintf("The job failed %d times; the last time: %s.", tries, e.reason))
			}
			return
		}
	} else if a.claim.Uncharged >= maxUncharged {
		e.back = false
		e.outcome = a.failure(job.CodeMaxAttempts, fmt.Sprintf("The job was given back %d times; the last time: %s.", a.claim.Uncharged, e.reason))
		return
	}
	delay := e.floor
	if e.charged {
		delay = max(delay, jitter(retryDelay(a.claim.Charged)))
	}
	if a.events != nil {
		a.events.flush(ctx, time.Second)
	}
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	err := a.w.deps.Results.GiveBack(short, a.job.ID, a.claim.Token, delay, e.charged, e.reason)
	if errors.Is(err, results.ErrFenced) {
		return
	}
	if err != nil {
		a.log.Warn("recording that a job goes back", "err", err)
	}
	a.w.nak(a.log, a.d, delay)
	a.w.deps.Relay.Bell(a.job.ID)
	a.w.metrics.attempts.WithLabelValues("given_back").Inc()
	a.log.Info("job given back", "reason", e.reason, "charged", e.charged, "delay", delay)
}

// settle writes the outcome. From the moment DONE has it the job is over, whatever happens here.
func (a *attempt) settle(ctx context.Context, o *job.Outcome, result []byte) {
	w, j := a.w, a.job
	// A token that is not current any more writes nothing: its outcome would hide that of the attempt that has the job.
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	err := w.deps.Results.Owns(short, j.ID, a.claim.Token)
	cancel()
	if errors.Is(err, results.ErrFenced) {
		w.metrics.attempts.WithLabelValues("fenced").Inc()
		return
	}
	o.Token, o.FirstToken, o.Finished = a.claim.Token, a.first, w.deps.Results.Now()
	o.ResultSize = int64(len(result))
	a.describe(ctx, o)
	if a.events != nil {
		a.events.flush(ctx, 2*time.Second)
		o.LastEvent = a.events.last() + 1
	}
	record := &queue.Record{Job: *j, Outcome: *o, Result: result}
	if len(result) > blob.Threshold {
		record.Outcome.Blob = "result/" + string(j.ID) + "/" + fmt.Sprint(a.claim.Token)
		record.Result = nil
	}
	stored := a.writeOutcome(ctx, record, result)
	if stored == nil {
		return // stopped: the delivery comes again, and the job runs again
	}
	// If we crash here, the next delivery finds the outcome and does the rest.
	var reset []byte
	if stored.Outcome.Token != a.claim.Token && a.events != nil {
		stored.Outcome.LastEvent = max(stored.Outcome.LastEvent, a.events.last()+2)
		reset = resetTo(stored.Result)
	}
	if !a.record(ctx, stored, reset) {
		w.nak(a.log, a.d, jitter(notClaimed))
		return
	}
	w.deps.Relay.Bell(j.ID)
	w.deps.Relay.Ended(j.Model)
	w.ack(a.log, a.d)
	a.w.note(a.log, j, &stored.Outcome)
	a.dropBlobs(ctx, record, stored)
}

// describe fills in what earlier attempts did.
func (a *attempt) describe(ctx context.Context, o *job.Outcome) {
	mine := job.Attempt{Worker: a.w.id, Started: a.started, Ended: o.Finished, Outcome: string(o.State)}
	o.Started = a.started
	if a.claim.Charged+a.claim.Uncharged+a.claim.Deaths > 0 {
		ctx, cancel := context.WithTimeout(ctx, storeTimeout)
		defer cancel()
		if rec, err := a.w.deps.Results.Get(ctx, a.job.ID); err == nil && len(rec.Attempts) > 0 {
			o.Attempts = append(o.Attempts, rec.Attempts[:len(rec.Attempts)-1]...)
			if len(o.Attempts) > 0 {
				o.Started = o.Attempts[0].Started
			}
		} // without the record only this attempt is told
	}
	o.Attempts = append(o.Attempts, mine)
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

// record writes the outcome into Redis, trying for a minute: the message stays this worker's meanwhile.
func (a *attempt) record(ctx context.Context, stored *queue.Record, reset []byte) bool {
	end := time.Now().Add(recordPatience)
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		short, cancel := context.WithTimeout(ctx, storeTimeout)
		err := a.w.deps.Results.Finish(short, a.job, &stored.Outcome, stored.Result, reset, nil)
		cancel()
		if err == nil {
			return true
		}
		if time.Now().After(end) {
			a.log.Warn("recording an outcome: leaving it to the next delivery", "err", err)
			return false
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return false
		}
	}
}

// dropBlobs removes the objects that nobody needs any more: the request's, and our answer's if another outcome was first. What fails here is swept with the job.
func (a *attempt) dropBlobs(ctx context.Context, ours, stored *queue.Record) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	if a.job.Blob != "" {
		if err := a.w.deps.Blobs.Delete(ctx, a.job.Blob); err != nil {
			a.log.Warn("removing a request's object", "err", err)
		}
	}
	if ours.Outcome.Blob != "" && ours.Outcome.Blob != stored.Outcome.Blob {
		if err := a.w.deps.Blobs.Delete(ctx, ours.Outcome.Blob); err != nil {
			a.log.Warn("removing an answer's object", "err", err)
		}
	}
}

// note counts a settled job and writes its one log line.
func (w *Worker) note(log *slog.Logger, j *job.Job, o *job.Outcome) {
	w.metrics.attempts.WithLabelValues(string(o.State)).Inc()
	if o.State == job.Completed {
		w.completed.Add(1)
	} else if o.State == job.Failed {
		w.failed.Add(1)
	}
	attrs := []any{"state", o.State, "class", j.Class, "wait_ms", int64(o.Started - j.Created), "run_ms", int64(o.Finished - o.Started)}
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

// body is the request's body, from the message or the object store.
func (w *Worker) body(ctx context.Context, d *queue.Delivery) ([]byte, error) {
	if d.Job.Blob == "" {
		return d.Body, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 4*storeTimeout)
	defer cancel()
	r, err := w.deps.Blobs.Get(ctx, d.Job.Blob)
	if err != nil {
		return nil, fmt.Errorf("opening the body of job %s: %w", d.Job.ID, err)
	}
	defer r.Close() //nolint:errcheck // read only
	buf := bytes.NewBuffer(make([]byte, 0, d.Job.BodySize+bytes.MinRead))
	if _, err := io.Copy(buf, r); err != nil {
		return nil, fmt.Errorf("reading the body of job %s: %w", d.Job.ID, err)
	}
	return buf.Bytes(), nil
}

// resetTo is the data of a reset to the text of a whole answer.
func resetTo(result []byte) []byte {
	data, err := json.Marshal(map[string]string{"text": job.AnswerText(result)})
	if err != nil { // a map of strings always marshals
		return []byte("{}")
	}
	return data
}

// retryDelay is the pause before the next try after n charged ones: 1 s doubling to 60 s.
func retryDelay(n int) time.Duration { return min(time.Minute, time.Second<<min(n, 6)) }

// jitter spreads d by up to a tenth upwards, so that what failed together does not come back together.
func jitter(d time.Duration) time.Duration { return d + time.Duration(rand.Int64N(int64(d)/10+1)) }
