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
	"unicode/utf8"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/responses"
)

// storeTimeout bounds one call of a store.
const storeTimeout = 5 * time.Second

// reasonBroken is the reason of attempts whose engine broke off.
const reasonBroken = string(job.CodeEngineError)

// reasonPreempted is the reason of attempts that were stopped for a job of a higher class.
const reasonPreempted = "preempted"

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
	// earlier are the chunks that readers have of earlier attempts' streams, nil if nothing was shown of any. anew tells the readers that the answer begins anew in spite of them; it is false where
	// they cannot be told.
	earlier [][]byte
	anew    func() bool
	// first is when the first token of a stream came.
	first job.Millis
	// answering is set where the job is a response.
	answering *answering
	// request is the client's body, and assembler has the stream so far, with what came earlier.
	request   []byte
	assembler *engine.Assembler
}

// reply is what an engine answered. Its body is there once it is whole; a streamed one's is assembled.
type reply struct {
	status      int
	contentType string
	body        []byte
	usage       *job.Usage
	streamed    bool
	continues   bool // what is shown goes on behind what earlier attempts brought
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
	if c.request, f = c.fetch(ctx); f != nil {
		return nil, f
	}
	c.w.progress.begin()
	defer c.w.progress.end()
	if j.Endpoint == job.Responses {
		return c.respond(ctx)
	}
	if c.earlier != nil {
		if r, f, ok := c.goOn(ctx, c.request); ok {
			return r, f
		}
		if f := c.stopped(ctx); f != nil {
			return nil, f
		}
		if !c.anew() {
			return nil, failed(job.CodeEngineError, "The answer broke off, and the next engine cannot continue it.")
		}
	}
	r, f, _ = c.generate(ctx, c.request, nil)
	return r, f
}

// generate has the engine answer body. With s it is the rest of that answer; then ok is false if the engine refuses to bring it, and nothing was shown.
func (c *call) generate(ctx context.Context, body []byte, s *resumption) (r *reply, f *fault, ok bool) {
	j := &c.d.Job
	body, hideUsage, err := c.edit(ctx, body)
	if err != nil {
		return nil, failed(job.CodeInvalidJSON, "The job's request cannot be edited: "+err.Error()), true
	}
	endpoint := j.Endpoint
	if c.answering != nil {
		endpoint = c.answering.endpoint()
	}
	called := time.Now()
	response, err := c.w.deps.Engine.Call(ctx, engine.Request{Endpoint: endpoint, Body: bytes.NewReader(body), Size: int64(len(body)), ID: j.ID})
	if err != nil {
		return nil, c.broken(ctx, err), true
	}
	defer response.Body.Close() //nolint:errcheck // closing is how the engine learns that nobody reads on
	c.w.progress.alive()
	r = &reply{status: response.StatusCode, contentType: response.ContentType, retryAfter: response.RetryAfter, continues: s != nil}
	if r.status == http.StatusOK && strings.HasPrefix(r.contentType, "text/event-stream") {
		if c.answering != nil {
			return r, c.streamResponse(ctx, r, response, called), true
		}
		return r, c.stream(ctx, r, response, called, hideUsage, s), true
	}
	if r.body, err = response.ReadAll(); err != nil {
		return nil, c.broken(ctx, err), true
	}
	f = c.judge(ctx, r)
	if c.answering != nil && f == nil && r.status >= 200 && r.status <= 299 {
		f = c.respondWhole(ctx, r)
	}
	if s == nil {
		return r, f, true
	}
	if f == nil { // it refuses the rest, or gives an answer of another kind
		c.log.Warn("the engine does not continue a partial answer", "status", r.status)
		return nil, nil, false
	}
	return nil, f, true
}

// fetch reads the client's body.
func (c *call) fetch(ctx context.Context) ([]byte, *fault) {
	body, err := c.w.fetch(ctx, c.d)
	switch {
	case err == nil:
		return body, nil
	case errors.Is(err, blob.ErrNotFound):
		return nil, failed(job.CodeInternal, "The job's request is not in the object store any more.")
	}
	if f := c.stopped(ctx); f != nil {
		return nil, f
	}
	c.log.Warn("reading a job's request", "err", err)
	return nil, again(false, "request_unavailable", engineAgain, job.CodeUnavailable, "The job's request could not be read.")
}

// edit makes the body for the engine, in which only the fields are edited that Millrace owns: those that ask for a stream, where events are wanted or unwanted, and the priority and the cache salt, where the engine has any.
func (c *call) edit(ctx context.Context, body []byte) (edited []byte, hideUsage bool, err error) {
	j := &c.d.Job
	switch {
	case c.answering != nil && c.answering.native():
		body, err = responses.Native(body, c.streams())
	case c.streams():
		body, hideUsage, err = job.SetStreaming(body)
	case !j.Live():
		body, err = job.SetPlain(body)
	}
	if err != nil || !j.Endpoint.Generates() {
		return body, hideUsage, err
	}
	can := c.abilities(ctx)
	if can.Priority {
		if body, err = job.SetField(body, "priority", fmt.Append(nil, j.Class.Rank())); err != nil {
			return nil, hideUsage, err
		}
	}
	body, err = c.salt(can, body)
	return body, hideUsage, err
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

// stream reads a stream to its end, and assembles the answer: with s, of which it is the rest, the whole.
func (c *call) stream(ctx context.Context, r *reply, response *engine.Response, called time.Time, hideUsage bool, s *resumption) *fault {
	r.streamed = true
	c.w.progress.stream(+1)
	defer c.w.progress.stream(-1)
	assembler := engine.NewAssembler(c.d.Job.Endpoint, hideUsage)
	if s != nil {
		assembler = s.assembler
	}
	c.assembler = assembler
	for ev, err := range response.Events() {
		if errors.Is(err, engine.ErrNoDone) && assembler.Finished(choices(c.request, c.d.Job.Endpoint)) {
			break // all has been said but that
		}
		if err != nil {
			return c.broken(ctx, err)
		}
		shown := true
		if ev.Data != nil && !ev.Done {
			if s != nil {
				joined, err := s.join(ev.Data)
				if err != nil {
					return c.broken(ctx, err)
				}
				if joined == nil {
					c.w.progress.alive()
					continue
				}
				ev = eventOf(joined)
			}
			chunk, err := assembler.Add(ev.Data)
			if err != nil {
				return c.broken(ctx, err)
			}
			if chunk.Error != nil {
				c.w.badCall(c.d.Job.ID, "it answers with an error in its stream")
				return again(true, reasonBroken, 0, job.CodeEngineError, "The engine failed in the middle of its answer: "+chunk.Error.Message)
			}
			shown = chunk.Show
			c.token(chunk.Token, called, s)
		}
		if shown && !c.show(r, ev) {
			return ended(job.Cancelled, job.CodeClientGone, "The client read its answer too slowly.")
		}
	}
	c.w.goodCall()
	return c.whole(ctx, r, assembler)
}

// whole makes the reply that of the whole stream.
func (c *call) whole(ctx context.Context, r *reply, assembler *engine.Assembler) *fault {
	r.usage = assembler.Usage()
	if c.d.Job.Live() { // its client has the stream
		return nil
	}
	var err error
	if r.body, err = assembler.Body(); err != nil {
		return c.broken(ctx, err)
	}
	r.contentType = "application/json"
	return nil
}

// token notes that a chunk came, and whether it carried a token; s is what it goes on with, nil if nothing.
func (c *call) token(generated bool, called time.Time, s *resumption) {
	c.w.progress.alive()
	if !generated {
		return
	}
	grown := 1
	if c.first == 0 {
		c.first = c.w.deps.Results.Now()
		if s != nil { // the engine has the text so far in its cache, too
			grown += int(s.used)
		} else {
			c.w.metrics.ttft.Observe(time.Since(called).Seconds())
		}
	}
	c.holds.grow(grown)
	c.w.rate.add(time.Now(), 1)
}

// judge says what is wrong with a whole answer; nil if it ends the job, as the engine's refusal of a bad request does.
func (c *call) judge(ctx context.Context, r *reply) *fault {
	switch {
	case r.status >= 200 && r.status < 400 && (r.status > 299 || !json.Valid(r.body) || !utf8.Valid(r.body)):
		// A page, a redirect, half an answer or nothing: whatever answers there, it is no engine that has done the work.
		c.w.badCall(c.d.Job.ID, "it answers with something that is no JSON")
		return again(true, reasonBroken, 0, job.CodeEngineError, fmt.Sprintf("The engine answered %d without JSON.", r.status))
	case r.status >= 200 && r.status <= 299:
		c.w.goodCall()
		if r.usage = engine.UsageOf(r.body); r.usage != nil {
			c.w.rate.add(time.Now(), r.usage.CompletionTokens)
		}
		return nil
	case r.status != http.StatusTooManyRequests && r.status != http.StatusRequestTimeout && r.status < 500:
		return nil
	}
	why := fmt.Sprintf("it answers %d", r.status)
	if r.status != http.StatusTooManyRequests { // one that is full is well
		c.w.badCall(c.d.Job.ID, why)
	}
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
	c.w.badCall(c.d.Job.ID, err.Error())
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
	case errors.Is(cause, errPreempted):
		return again(false, reasonPreempted, 0, job.CodeUnavailable, "The job made room for one of a higher class.")
	case errors.Is(cause, errStalled), errors.Is(cause, errHalted):
		return again(false, string(job.CodeEngineStalled), 0, job.CodeEngineStalled, "The engine stopped answering.")
	case errors.Is(cause, errNotFit):
		return again(false, "gpu_fault", 0, job.CodeEngineError, "A GPU of the worker failed.")
	default: // the worker stops
		return again(false, "drained", 0, job.CodeUnavailable, "The worker stopped.")
	}
}

func cancelled() *fault {
	f := ended(job.Cancelled, job.CodeCancelled, "The job was cancelled.")
	f.err.Type = job.TypeInvalidRequest // as where a waiting job is cancelled
	return f
}
