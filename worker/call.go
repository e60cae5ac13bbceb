package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// storeTimeout bounds one call of a store.
const storeTimeout = 5 * time.Second

// reasonBroken is the reason of attempts whose engine broke off.
const reasonBroken = string(job.CodeEngineError)

// engineAgain is the least delay of a job whose engine was not ready for it.
const engineAgain = time.Second

// call is one call of the engine for a job that this worker has claimed.
type call struct {
	w     *Worker
	log   *slog.Logger
	d     *queue.Delivery
	holds *reservation
	// show gets each event of a stream that the client may see, as it comes and before the stream's end is known. False ends the call: nobody takes it.
	show func(*reply, engine.Event) bool
	// first is when the first token of a stream came.
	first job.Millis
}

// reply is what an engine answered. Its body is there once it is whole; a streamed one's is assembled.
type reply struct {
	status      int
	contentType string
	body        []byte
	usage       *job.Usage
	streamed    bool
	retryAfter  time.Duration
}

// fault says why a call did not end its job with a good answer.
type fault struct {
	// err is what the client is told, state how the job ends (failed if it is ""), if no other attempt is made.
	err   *job.Error
	state job.State
	// again: another attempt may do better, after floor at the earliest. charged: this one counts. reason goes into the list of attempts.
	again, charged bool
	floor          time.Duration
	reason         string
	// lost: another attempt has the job, and nothing may be written.
	lost bool
}

// failed is a fault that no other attempt mends.
func failed(code job.Code, message string) *fault {
	return &fault{err: job.NewError(job.TypeServer, code, message)}
}

// ended is failed for a job that ends in another way.
func ended(s job.State, code job.Code, message string) *fault {
	f := failed(code, message)
	f.state = s
	return f
}

// again is a fault that another attempt may mend.
func again(charged bool, reason string, floor time.Duration, code job.Code, message string) *fault {
	f := failed(code, message)
	f.again, f.charged, f.reason, f.floor = true, charged, reason, floor
	return f
}

// late says why a job must not begin at the time now, nil if it may. waiting: it has never begun.
func late(j *job.Job, now job.Millis, waiting bool) *fault {
	switch {
	case now >= j.Expires:
		return ended(job.Expired, job.CodeExpired, "The job's deadline passed before it could run.")
	case waiting && j.QueueTimeout > 0 && now >= j.Created+j.QueueTimeout:
		return ended(job.Expired, job.CodeExpired, fmt.Sprintf("The job waited longer than its queue_timeout of %s.", j.QueueTimeout.Duration()))
	}
	return nil
}

// run calls the engine within the job's limits; now is the time by the store's clock. Without a fault the answer is the job's end. With one the answer may be there too: the engine's
// own word on what went wrong.
func (c *call) run(ctx context.Context, now job.Millis) (r *reply, f *fault) {
	defer func() { c.holds.ended(r, f) }()
	defer func() {
		if p := recover(); p != nil { // a bug of ours: the next attempt is charged, lest it come round for ever
			c.w.panicked(c.log, p)
			r, f = nil, again(true, string(job.CodeInternal), 0, job.CodeInternal, "The worker failed while running the job.")
		}
	}()
	j := &c.d.Job
	if j.RunTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, j.RunTimeout.Duration(), errRunTimeout)
		defer cancel()
	}
	ctx, cancel := context.WithTimeoutCause(ctx, (j.Expires - now).Duration(), errExpired)
	defer cancel()
	if f := c.stopped(ctx); f != nil { // it was cancelled while it was claimed
		return nil, f
	}
	body, hideUsage, f := c.body(ctx)
	if f != nil {
		return nil, f
	}
	c.w.progress.begin()
	defer c.w.progress.end()
	called := time.Now()
	response, err := c.w.deps.Engine.Call(ctx, engine.Request{Endpoint: j.Endpoint, Body: bytes.NewReader(body), Size: int64(len(body)), ID: j.ID})
	if err != nil {
		return nil, c.broken(ctx, err)
	}
	defer response.Body.Close() //nolint:errcheck // closing is how the engine learns that nobody reads on
	c.w.progress.alive()
	r = &reply{status: response.StatusCode, contentType: response.ContentType, retryAfter: response.RetryAfter}
	if r.status == http.StatusOK && strings.HasPrefix(r.contentType, "text/event-stream") {
		return r, c.stream(ctx, r, response, called, hideUsage)
	}
	if r.body, err = response.ReadAll(); err != nil {
		return nil, c.broken(ctx, err)
	}
	return r, c.judge(ctx, r)
}

// body is the body for the engine: the client's, in which only the fields that ask for a stream are edited, and these only where events are wanted or unwanted.
func (c *call) body(ctx context.Context) (body []byte, hideUsage bool, f *fault) {
	j := &c.d.Job
	body, err := c.w.fetch(ctx, c.d)
	switch {
	case errors.Is(err, blob.ErrNotFound):
		return nil, false, failed(job.CodeInternal, "The job's request is not in the object store any more.")
	case err != nil:
		if f := c.stopped(ctx); f != nil {
			return nil, false, f
		}
		c.log.Warn("reading a job's request", "err", err)
		return nil, false, again(false, "request_unavailable", engineAgain, job.CodeUnavailable, "The job's request could not be read.")
	case j.Events || j.Live() && j.Stream:
		body, hideUsage, err = job.SetStreaming(body)
	case !j.Live():
		body, err = job.SetPlain(body)
	}
	if err != nil {
		return nil, false, failed(job.CodeInvalidJSON, "The job's request cannot be edited: "+err.Error())
	}
	return body, hideUsage, nil
}

// fetch reads a job's request, from the message or the object store.
func (w *Worker) fetch(ctx context.Context, d *queue.Delivery) ([]byte, error) {
	if d.Job.Blob == "" {
		return d.Body, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 4*storeTimeout)
	defer cancel()
	r, err := w.deps.Blobs.Get(ctx, d.Job.Blob)
	if err != nil {
		return nil, fmt.Errorf("opening the request of job %s: %w", d.Job.ID, err)
	}
	defer r.Close() //nolint:errcheck // read only
	body, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("reading the request of job %s: %w", d.Job.ID, err)
	}
	return body, nil
}

// stream reads a stream to its end, and assembles the answer.
func (c *call) stream(ctx context.Context, r *reply, response *engine.Response, called time.Time, hideUsage bool) *fault {
	r.streamed = true
	c.w.progress.stream(+1)
	defer c.w.progress.stream(-1)
	assembler := engine.NewAssembler(c.d.Job.Endpoint, hideUsage)
	for ev, err := range response.Events() {
		if err != nil {
			return c.broken(ctx, err)
		}
		shown := true
		if ev.Data != nil && !ev.Done {
			chunk, err := assembler.Add(ev.Data)
			if err != nil {
				return c.broken(ctx, err)
			}
			if chunk.Error != nil {
				c.w.badCall("it answers with an error in its stream")
				return again(true, reasonBroken, 0, job.CodeEngineError, "The engine failed in the middle of its answer: "+chunk.Error.Message)
			}
			shown = chunk.Show
			c.token(chunk.Token, called)
		}
		if shown && !c.show(r, ev) {
			return ended(job.Cancelled, job.CodeClientGone, "The client read its answer too slowly.")
		}
	}
	r.usage = assembler.Usage()
	if c.d.Job.Live() { // its client has the stream
		c.w.badCalls.Store(0)
		return nil
	}
	var err error
	if r.body, err = assembler.Body(); err != nil {
		return c.broken(ctx, err)
	}
	r.contentType = "application/json"
	c.w.badCalls.Store(0)
	return nil
}

// token notes that a chunk came, and whether it carried a token.
func (c *call) token(generated bool, called time.Time) {
	c.w.progress.alive()
	if !generated {
		return
	}
	c.holds.grow(1)
	c.w.rate.add(time.Now(), 1)
	if c.first == 0 {
		c.first = c.w.deps.Results.Now()
		c.w.metrics.ttft.Observe(time.Since(called).Seconds())
	}
}

// judge says what is wrong with a whole answer; nil if it ends the job, as the engine's refusal of a bad request does.
func (c *call) judge(ctx context.Context, r *reply) *fault {
	switch {
	case r.status >= 200 && r.status < 400 && (r.status != http.StatusOK || !json.Valid(r.body)):
		// A page, a redirect or nothing: whatever answers there, it is no engine that has done the work.
		c.w.badCall("it answers with something that is no JSON")
		return again(true, reasonBroken, 0, job.CodeEngineError, fmt.Sprintf("The engine answered %d without JSON.", r.status))
	case r.status == http.StatusOK:
		c.w.badCalls.Store(0)
		if r.usage = engine.UsageOf(r.body); r.usage != nil {
			c.w.rate.add(time.Now(), r.usage.CompletionTokens)
		}
		return nil
	case r.status != http.StatusTooManyRequests && r.status != http.StatusRequestTimeout && r.status < 500:
		return nil
	}
	why := fmt.Sprintf("it answers %d", r.status)
	c.w.badCall(why)
	f := again(true, fmt.Sprintf("engine_%d", r.status), r.retryAfter, job.CodeEngineError, fmt.Sprintf("The engine answered %d.", r.status))
	if r.status == http.StatusServiceUnavailable { // an engine that loads or shuts down is no fault of the job
		c.w.doubt(doubt{why: why})
		if c.w.notReady(ctx) {
			f.charged, f.reason, f.floor = false, "engine_unready", max(f.floor, engineAgain)
		}
	}
	return f
}

// broken judges a call that gave no whole answer.
func (c *call) broken(ctx context.Context, err error) *fault {
	if f := c.stopped(ctx); f != nil {
		return f
	}
	if errors.Is(err, engine.ErrTooLarge) {
		return failed(job.CodeEngineError, "The engine's answer is too large to be kept.")
	}
	if refused(err) {
		c.w.doubt(doubt{why: "it cannot be reached"})
		return again(false, "engine_unready", engineAgain, job.CodeEngineError, "The engine cannot be reached.")
	}
	c.w.badCall(err.Error())
	c.log.Warn("the engine gave no whole answer", "err", err)
	return again(true, reasonBroken, 0, job.CodeEngineError, "The engine broke off its answer.")
}

// refused tells whether the engine was not even reached: nothing of the job can have run.
func refused(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// stopped says how a call ends that was stopped from outside, nil if it was not.
func (c *call) stopped(ctx context.Context) *fault {
	if ctx.Err() == nil {
		return nil
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errFenced):
		return &fault{lost: true}
	case errors.Is(cause, errCancelAsked):
		return cancelled()
	case errors.Is(cause, errNobodyWaits):
		return ended(job.Cancelled, job.CodeClientGone, "The client has gone.")
	case errors.Is(cause, errExpired):
		return ended(job.Expired, job.CodeExpired, "The job's deadline passed while it ran.")
	case errors.Is(cause, errRunTimeout):
		return failed(job.CodeRunTimeout, fmt.Sprintf("The attempt took longer than its run_timeout of %s.", c.d.Job.RunTimeout.Duration()))
	case errors.Is(cause, errStalled):
		return again(false, string(job.CodeEngineStalled), 0, job.CodeEngineStalled, "The engine stopped answering.")
	default: // the worker stops
		return again(false, "drained", 0, job.CodeUnavailable, "The worker stopped.")
	}
}

func cancelled() *fault {
	f := ended(job.Cancelled, job.CodeCancelled, "The job was cancelled.")
	f.err.Type = job.TypeInvalidRequest // as where a waiting job is cancelled
	return f
}
