package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/responses"
)

// answering is how an engine is had to answer a request of /v1/responses.
type answering struct {
	frame responses.Frame
	// request is what the chat is made from; nil if the engine serves /v1/responses itself.
	request *responses.Request
}

func (a *answering) native() bool { return a.request == nil }

// endpoint is what is called for it.
func (a *answering) endpoint() job.Endpoint {
	if a.native() {
		return job.Responses
	}
	return job.ChatCompletions
}

// respond answers a request of /v1/responses: by the engine's own such route, or by a chat. An answer that broke off begins anew.
func (c *call) respond(ctx context.Context) (*reply, *fault) {
	if c.earlier != nil && !c.anew() {
		return nil, failed(job.CodeEngineError, "The answer broke off, and a response cannot be continued.")
	}
	o, err := job.ParseObject(c.request)
	if err != nil {
		return nil, failed(job.CodeInvalidJSON, "The job's request cannot be read: "+err.Error())
	}
	a := &answering{frame: responses.FrameOf(&c.d.Job, o)}
	refusal := responses.Check(o)
	body := c.request
	if native := refusal == nil && c.servesResponses(ctx); refusal == nil && !native {
		if a.request, refusal = responses.ParseObject(o); refusal == nil {
			body = a.request.Chat()
		}
	}
	if f := c.stopped(ctx); f != nil {
		return nil, f
	}
	if refusal != nil {
		return &reply{status: http.StatusBadRequest, contentType: "application/json", body: responses.Encode(map[string]*job.Error{"error": refusal})}, nil
	}
	c.answering = a
	r, f, _ := c.generate(ctx, body, nil)
	return r, f
}

// servesResponses tells whether the engine serves /v1/responses for the job's model. A job that is stopped does not stop the asking.
func (c *call) servesResponses(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	does, _ := c.w.deps.Engine.ServesResponses(ctx, c.d.Job.Model)
	return does
}

// streams tells whether the engine is asked for a stream.
func (c *call) streams() bool {
	j := &c.d.Job
	return j.Events || j.Live() && j.Stream
}

// now is in unix seconds.
func (c *call) now() int64 { return int64(c.w.deps.Results.Now()) / 1000 }

// respondWhole makes a response of the engine's whole answer, which is a good one.
func (c *call) respondWhole(ctx context.Context, r *reply) *fault {
	a := c.answering
	var status responses.Status
	if a.native() {
		sum, err := responses.Summarize(r.body)
		switch {
		case err != nil:
			return c.broken(ctx, err)
		case sum.Error != nil:
			c.w.badCall(c.d.Job.ID, "it answers with a response that failed")
			return again(true, reasonBroken, 0, job.CodeEngineError, "The engine failed: "+sum.Error.Message)
		}
		if r.body, err = a.frame.Own(r.body); err != nil {
			return c.broken(ctx, err)
		}
		r.usage, status = sum.Usage, sum.Status
		if r.usage != nil {
			c.w.rate.add(time.Now(), r.usage.CompletionTokens)
		}
	} else {
		o, err := a.request.Answer(a.frame, r.body, r.usage, c.now())
		if err != nil {
			return c.broken(ctx, err)
		}
		r.body, status = responses.Encode(o), o.Status
	}
	r.contentType = "application/json"
	if j := &c.d.Job; !j.Live() || !j.Stream {
		return nil
	}
	events, err := responses.Whole(r.body, status) // its client wants a stream, and the engine gave none
	if err != nil {
		return c.broken(ctx, err)
	}
	r.streamed, r.contentType = true, "text/event-stream"
	return c.showEvents(r, events)
}

// streamResponse reads a stream to its end, shows its events, and makes the reply that of the whole response.
func (c *call) streamResponse(ctx context.Context, r *reply, response *engine.Response, called time.Time) *fault {
	r.streamed = true
	c.w.progress.stream(+1)
	defer c.w.progress.stream(-1)
	read := c.readChat
	if c.answering.native() {
		read = c.readNative
	}
	object, f := read(ctx, r, response, called)
	if f != nil {
		return f
	}
	c.w.goodCall()
	if !c.d.Job.Live() { // else its client has the stream
		r.body, r.contentType = object, "application/json"
	}
	return nil
}

// readNative reads the events of an engine that makes them itself, up to that which ends the response: not every engine says [DONE] behind it.
func (c *call) readNative(ctx context.Context, r *reply, response *engine.Response, called time.Time) ([]byte, *fault) {
	stream := c.answering.frame.NativeStream()
	for ev, err := range response.Events() {
		switch {
		case err != nil:
			return nil, c.broken(ctx, err)
		case ev.Done:
			return nil, c.broken(ctx, fmt.Errorf("%w: it ended without its last event", engine.ErrBadStream))
		case ev.Data == nil:
			c.w.progress.alive()
			continue
		}
		step, err := stream.Add(ev.Data)
		if err != nil {
			return nil, c.broken(ctx, fmt.Errorf("%w: %w", engine.ErrBadStream, err))
		}
		if step.Error != nil {
			return nil, c.brokeOff(step.Error)
		}
		c.token(step.Token, called, nil)
		if step.Object != nil {
			sum, err := responses.Summarize(step.Object)
			if err != nil {
				return nil, c.broken(ctx, err)
			}
			r.usage = sum.Usage
		}
		if f := c.showEvents(r, []responses.Event{step.Event}); f != nil {
			return nil, f
		}
		if step.Object != nil {
			response.Over()
			return step.Object, nil
		}
	}
	return nil, c.broken(ctx, engine.ErrUnreachable) // not reached: the events end with [DONE] or an error
}

// readChat reads a chat's chunks, and shows the events that they make.
func (c *call) readChat(ctx context.Context, r *reply, response *engine.Response, called time.Time) ([]byte, *fault) {
	stream := c.answering.request.Stream(c.answering.frame)
	c.assembler = engine.NewAssembler(job.ChatCompletions, true) // for the usage, the errors and the bound on the answer
	for ev, err := range response.Events() {
		if errors.Is(err, engine.ErrNoDone) && c.assembler.Finished(1) {
			break // all has been said but that
		}
		if err != nil {
			return nil, c.broken(ctx, err)
		}
		if ev.Data == nil || ev.Done {
			c.w.progress.alive()
			continue
		}
		chunk, err := c.assembler.Add(ev.Data)
		if err != nil {
			return nil, c.broken(ctx, err)
		}
		if chunk.Error != nil {
			return nil, c.brokeOff(chunk.Error)
		}
		c.token(chunk.Token, called, nil)
		events, err := stream.Add(ev.Data)
		if err != nil {
			return nil, c.broken(ctx, fmt.Errorf("%w: %w", engine.ErrBadStream, err))
		}
		if f := c.showEvents(r, events); f != nil {
			return nil, f
		}
	}
	if !c.assembler.Begun() {
		return nil, c.broken(ctx, fmt.Errorf("%w: no chunk in it", engine.ErrBadStream))
	}
	r.usage = c.assembler.Usage()
	events, object := stream.End(r.usage, c.now())
	return object, c.showEvents(r, events)
}

// brokeOff is the fault of an engine that tells of an error in its stream.
func (c *call) brokeOff(e *job.Error) *fault {
	c.w.badCall(c.d.Job.ID, "it answers with an error in its stream")
	return again(true, reasonBroken, 0, job.CodeEngineError, "The engine failed in the middle of its answer: "+e.Message)
}

// showEvents shows events of a response. Of a durable job those are not kept that the job's own events stand for: its first ones and its end, which has the whole object, are told by whoever reads the
// events, for only the outcome in DONE is the job's end.
func (c *call) showEvents(r *reply, events []responses.Event) *fault {
	for _, e := range events {
		if !c.d.Job.Live() && (e.Type == responses.EventCreated || responses.Ends(e.Type)) {
			continue
		}
		if !c.show(r, typedEvent(e)) {
			return ended(job.Cancelled, job.CodeClientGone, "The client read its answer too slowly.")
		}
	}
	return nil
}

// typedEvent is an event of a stream, with its type as its name.
func typedEvent(e responses.Event) engine.Event {
	data := e.Data
	if bytes.ContainsAny(data, "\r\n") { // space between the parts of an engine's JSON: in one line it stays one event
		var b bytes.Buffer
		if json.Compact(&b, data) == nil {
			data = b.Bytes()
		}
	}
	return engine.Event{Data: data, Raw: slices.Concat([]byte("event: "+e.Type+"\ndata: "), data, []byte("\n\n"))}
}

// learnPeriod is how often it is looked whether there are models of which it is not known how they answer /v1/responses.
const learnPeriod = time.Second

// learnResponses finds out, for each model that is served, whether the engine serves /v1/responses itself, so that heartbeats can tell: what a chat cannot do is then refused before it waits. It ends
// with ctx.
func (w *Worker) learnResponses(ctx context.Context) {
	t := time.NewTicker(learnPeriod)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		for _, m := range w.unlearned() {
			short, cancel := context.WithTimeout(ctx, w.cfg.ProbeTimeout)
			_, sure := w.deps.Engine.ServesResponses(short, m)
			cancel()
			if sure {
				w.deps.Cluster.Nudge()
			}
		}
	}
}

// unlearned are the models of a ready worker of which it is not known. With an engine that would load each one for it, it is found out by the first job.
func (w *Worker) unlearned() []job.Model {
	if !w.mayProbeIdle() {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state != cluster.Ready {
		return nil
	}
	var models []job.Model
	for m := range w.models {
		if _, known := w.deps.Engine.KnownResponses(m); !known {
			models = append(models, m)
		}
	}
	return models
}

// chatOnly are the models, of those given, that answer /v1/responses by chats.
func (w *Worker) chatOnly(models []job.Model) []job.Model {
	var only []job.Model
	for _, m := range models {
		if does, known := w.deps.Engine.KnownResponses(m); known && !does {
			only = append(only, m)
		}
	}
	return only
}
