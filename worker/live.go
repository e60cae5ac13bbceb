package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
)

// liveAttempt is one try at a job whose client waits on its connection to an API.
type liveAttempt struct {
	w       *Worker
	log     *slog.Logger
	d       *queue.Delivery
	job     *job.Job
	holds   *reservation
	answer  *relay.Answer
	claimed *relay.Claimed
	started job.Millis
	first   job.Millis
	shown   bool // a part has gone to the API: no other attempt can begin anew
}

// runLive claims d's job from the API that holds the connection, runs it, and passes the answer on. The API is the truth of such a job: while it lives the job does.
func (w *Worker) runLive(run context.Context, log *slog.Logger, d *queue.Delivery, holds *reservation) {
	j := &d.Job
	claimed, err := w.deps.Relay.Claim(run, j.API, relay.ClaimRequest{ID: j.ID, Worker: w.id, AckSubject: d.AckSubject})
	switch {
	case err == nil:
	case errors.Is(err, relay.ErrHeld):
		w.nak(log, d, jitter(time.Second))
		return
	case errors.Is(err, relay.ErrGone) || !w.deps.Cluster.Alive(string(j.API)):
		w.ack(log, d) // nobody waits: the API has settled it, or died with it
		return
	default:
		log.Warn("claiming a live job: handing it back", "err", err)
		w.nak(log, d, jitter(500*time.Millisecond))
		return
	}
	answer, err := w.deps.Relay.Answer(j.API, j.ID, claimed.Token)
	if err != nil {
		log.Warn("opening the way back to an API: handing the job back", "err", err)
		w.nak(log, d, jitter(500*time.Millisecond))
		return
	}
	defer answer.Close()
	ctx, cancel := context.WithCancelCause(run)
	defer cancel(nil)
	defer w.enlist(j.ID, cancel)()
	a := &liveAttempt{w: w, log: log.With("attempt", claimed.Token), d: d, job: j, holds: holds, answer: answer, claimed: claimed, started: w.deps.Results.Now()}
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		a.watchAPI(ctx, cancel)
	}()
	defer func() { cancel(nil); <-watching }()
	w.metrics.wait.WithLabelValues(string(j.Class)).Observe(float64(a.started-j.Created) / 1000)

	end := a.execute(ctx)
	if end.Retry {
		a.giveBack(run, end)
		return
	}
	a.finish(run, end)
}

// watchAPI stops the attempt when its API says that nobody waits, or has died.
func (a *liveAttempt) watchAPI(ctx context.Context, stop context.CancelCauseFunc) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.answer.Cancelled():
			stop(errNobodyWaits)
			return
		case <-t.C:
			if !a.w.deps.Cluster.Alive(string(a.job.API)) {
				stop(errNobodyWaits)
				return
			}
		}
	}
}

// execute calls the engine and passes what it says on. What it returns is the end of the answer, with Retry set where another attempt may give a whole one.
func (a *liveAttempt) execute(ctx context.Context) relay.End {
	j := a.job
	now := a.started
	if now >= j.Expires {
		return a.over(job.Expired, job.CodeExpired, "The request's deadline passed before it could run.")
	}
	if j.QueueTimeout > 0 && a.claimed.Charged == 0 && now >= j.Created+j.QueueTimeout {
		return a.over(job.Expired, job.CodeExpired, "The request waited longer than its queue_timeout.")
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
		a.log.Warn("reading a body", "err", err)
		return a.broken(ctx, err, "The request's body cannot be read.")
	}
	hideUsage := false
	if j.Stream {
		if body, hideUsage, err = job.SetStreaming(body); err != nil {
			return a.over(job.Failed, job.CodeInvalidJSON, "The request's body cannot be edited: "+err.Error())
		}
	}
	called := time.Now()
	answer, err := a.w.deps.Engine.Call(ctx, engine.Request{Endpoint: j.Endpoint, Body: bytes.NewReader(body), Size: int64(len(body)), ID: j.ID})
	if err != nil {
		a.w.badCall(err.Error())
		if refused(err) {
			a.w.doubt("it cannot be reached")
		}
		return a.broken(ctx, err, "The engine cannot be reached.")
	}
	defer answer.Body.Close() //nolint:errcheck // closing is how the engine learns that nobody reads on
	a.w.alive()
	if answer.StatusCode == 200 && strings.HasPrefix(answer.ContentType, "text/event-stream") {
		return a.stream(ctx, answer, called, hideUsage)
	}
	return a.whole(ctx, answer)
}

// whole passes an answer in one piece on, once it is here to its last byte: until then another attempt may still give one.
func (a *liveAttempt) whole(ctx context.Context, answer *engine.Response) relay.End {
	result, err := answer.ReadAll()
	if err != nil {
		if errors.Is(err, engine.ErrTooLarge) {
			return a.over(job.Failed, job.CodeEngineError, "The engine's answer is too large.")
		}
		a.w.badCall(err.Error())
		return a.broken(ctx, err, "The engine broke off its answer.")
	}
	status := answer.StatusCode
	end := relay.End{State: job.Completed}
	switch {
	case status >= 200 && status < 300:
		a.w.badCalls.Store(0)
		if end.Usage = engine.UsageOf(result); end.Usage != nil {
			a.w.rate.add(time.Now(), end.Usage.CompletionTokens)
		}
	case status == 429 || status >= 500:
		a.w.badCall(fmt.Sprintf("it answers %d", status))
		if status == 503 {
			a.w.doubt("it answers 503")
		}
		if a.claimed.Charged+1 < maxLiveAttempts {
			return relay.End{Retry: true, Reason: fmt.Sprintf("engine_%d", status)}
		}
		end.State = job.Failed
	default:
		end.State = job.Failed
	}
	a.shown = true
	err = a.answer.Send(relay.Part{Head: &relay.Head{StatusCode: status, ContentType: answer.ContentType}})
	if err == nil {
		err = a.answer.Send(relay.Part{Data: result})
	}
	if err != nil {
		return a.over(job.Cancelled, job.CodeClientGone, "The client reads too slowly.")
	}
	return end
}

// stream passes a stream on, event by event.
func (a *liveAttempt) stream(ctx context.Context, answer *engine.Response, called time.Time, hideUsage bool) relay.End {
	assembler := engine.NewAssembler(a.job.Endpoint, hideUsage)
	send := func(p relay.Part) bool {
		if !a.shown {
			a.shown = true
			if a.answer.Send(relay.Part{Head: &relay.Head{StatusCode: answer.StatusCode, ContentType: answer.ContentType}}) != nil {
				return false
			}
		}
		return a.answer.Send(p) == nil
	}
	for ev, err := range answer.Events() {
		if err != nil {
			a.w.badCall(err.Error())
			return a.broken(ctx, err, "The engine broke off its answer.")
		}
		show := true
		if !ev.Done && ev.Data != nil {
			chunk, err := assembler.Add(ev.Data)
			if err != nil {
				return a.broken(ctx, err, "The engine sent a broken stream.")
			}
			if chunk.Error != nil && !a.shown {
				return a.broken(ctx, chunk.Error, chunk.Error.Message)
			}
			if chunk.Error != nil {
				return relay.End{State: job.Failed, Error: chunk.Error, Usage: assembler.Usage()}
			}
			a.w.alive()
			if show = chunk.Show; chunk.Token {
				a.holds.grow(1)
				a.w.rate.add(time.Now(), 1)
				if a.first == 0 {
					a.first = a.w.deps.Results.Now()
					a.w.metrics.ttft.Observe(time.Since(called).Seconds())
				}
			}
		}
		if show && !send(relay.Part{Data: bytes.Clone(ev.Raw)}) {
			return a.over(job.Cancelled, job.CodeClientGone, "The client reads too slowly.")
		}
	}
	a.w.badCalls.Store(0)
	return relay.End{State: job.Completed, Usage: assembler.Usage()}
}

// broken ends an attempt that got no whole answer: another one may, if nothing has been shown and there are tries left.
func (a *liveAttempt) broken(ctx context.Context, err error, message string) relay.End {
	switch cause := context.Cause(ctx); {
	case cause == nil:
	case errors.Is(cause, errNobodyWaits), errors.Is(cause, errCancelAsked):
		return a.over(job.Cancelled, job.CodeClientGone, "The client has gone.")
	case errors.Is(cause, errExpired):
		return a.over(job.Expired, job.CodeExpired, "The request's deadline passed while it ran.")
	case errors.Is(cause, errRunTimeout):
		return a.over(job.Failed, job.CodeRunTimeout, fmt.Sprintf("The request took longer than %s.", a.job.RunTimeout.Duration()))
	case !a.shown:
		return relay.End{Retry: true, Reason: cause.Error()}
	case errors.Is(cause, errStalled):
		return a.over(job.Failed, job.CodeEngineStalled, "The engine stopped in the middle of its answer.")
	default:
		return a.over(job.Failed, job.CodeEngineError, "The worker stopped in the middle of its answer.")
	}
	a.log.Warn("the engine gave no whole answer", "err", err)
	if !a.shown && (a.claimed.Charged+1 < maxLiveAttempts || refused(err)) {
		return relay.End{Retry: true, Reason: message}
	}
	return a.over(job.Failed, job.CodeEngineError, message)
}

func (a *liveAttempt) over(s job.State, code job.Code, message string) relay.End {
	return relay.End{State: s, Error: job.NewError(job.TypeServer, code, message)}
}

// giveBack lets another attempt answer.
func (a *liveAttempt) giveBack(ctx context.Context, end relay.End) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	if err := a.answer.Finish(ctx, end); errors.Is(err, relay.ErrGone) {
		a.w.ack(a.log, a.d)
		return
	}
	delay := time.Duration(0)
	if a.claimed.Charged > 0 || strings.HasPrefix(end.Reason, "engine_") {
		delay = jitter(250 * time.Millisecond << min(a.claimed.Charged, 4))
	}
	a.w.nak(a.log, a.d, delay)
	a.w.metrics.attempts.WithLabelValues("given_back").Inc()
	a.log.Info("live job given back", "reason", end.Reason)
}

// finish hands the end to the API and waits for its word that it has all; then the usage goes to DONE, which the client does not wait for, and the message is acked.
func (a *liveAttempt) finish(ctx context.Context, end relay.End) {
	patience, cancel := context.WithTimeout(ctx, recordPatience)
	err := a.finishWhileWaited(patience, end)
	cancel()
	if errors.Is(err, relay.ErrGone) && end.State == job.Completed {
		end = a.over(job.Cancelled, job.CodeClientGone, "The client has gone.")
	}
	now := a.w.deps.Results.Now()
	o := job.Outcome{
		State: end.State, Token: a.claimed.Token, Error: end.Error, Usage: end.Usage, Started: a.started, FirstToken: a.first, Finished: now,
		Attempts: []job.Attempt{{Worker: a.w.id, Started: a.started, Ended: now, Outcome: string(end.State)}},
	}
	// If we crash here, the message comes again, the API says that nobody waits, and only the usage is lost.
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	stored, err := a.w.deps.Queue.Settle(short, &queue.Record{Job: *a.job, Outcome: o})
	if err != nil && !errors.Is(err, queue.ErrSettled) {
		a.log.Warn("writing a live job's usage", "err", err)
		stored = &queue.Record{Outcome: o}
	}
	a.w.deps.Relay.Ended(a.job.Model)
	a.w.ack(a.log, a.d)
	a.w.note(a.log, a.job, &stored.Outcome)
	if a.job.Blob != "" {
		if err := a.w.deps.Blobs.Delete(short, a.job.Blob); err != nil {
			a.log.Warn("removing a request's object", "err", err)
		}
	}
}

// finishWhileWaited is Finish, given up when the API dies.
func (a *liveAttempt) finishWhileWaited(ctx context.Context, end relay.End) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := every(time.Second, func() {
		if !a.w.deps.Cluster.Alive(string(a.job.API)) {
			cancel(errNobodyWaits)
		}
	})
	defer watch.stop()
	err := a.answer.Finish(ctx, end)
	if errors.Is(context.Cause(ctx), errNobodyWaits) {
		return relay.ErrGone
	}
	return err
}

// refused tells whether the engine was not even reached: nothing of the job can have run.
func refused(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// notReady probes the engine once, shortly: whether it is the engine that is at fault, and not the job.
func (w *Worker) notReady(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return w.probe(ctx) != nil
}
