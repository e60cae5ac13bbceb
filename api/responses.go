package api

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/responses"
	"github.com/millrace/millrace/internal/results"
)

// checkResponse refuses what nobody can do with a request of /v1/responses, and what no ready worker of its model can.
func (s *Server) checkResponse(c echo.Context, o *job.Object, m job.Model) error {
	if e := responses.Check(o); e != nil {
		return &failure{status: http.StatusBadRequest, body: e}
	}
	if _, err := metadataField(o); err != nil {
		return err
	}
	if !mayUse(identityOf(c), m) || !s.chatOnly(m) { // whoever may not use the model hears nothing of its workers
		return nil
	}
	if _, e := responses.ParseObject(o); e != nil {
		return &failure{status: http.StatusBadRequest, body: e}
	}
	return nil
}

// chatOnly tells whether the model has ready workers, and all of them are known to answer /v1/responses by chats. What it does not know the worker finds out.
func (s *Server) chatOnly(m job.Model) bool {
	ready := false
	for _, w := range s.deps.Cluster.Workers(m) {
		if w.Worker == nil || w.Worker.State != cluster.Ready {
			continue
		}
		if ready = slices.Contains(w.Worker.ChatOnly, m); !ready {
			return false
		}
	}
	return ready
}

// answerBackground answers a background request: with the object as it now is, or with the stream of its events, which the client may leave and resume.
func (s *Server) answerBackground(c echo.Context, v *view, stream bool) error {
	if stream {
		return s.follow(c, v, 0, &typedReplay{eventStream: eventStream{c: c}, s: s, fresh: true})
	}
	return s.writeResponse(c, v)
}

// responseID reads the id in the path, and returns that of its job.
func responseID(c echo.Context) (job.ID, error) {
	text := c.Param("id")
	id, err := responses.JobID(text)
	if err != nil {
		return "", noResponse(text)
	}
	return id, nil
}

func noResponse(id string) *failure {
	return fail(http.StatusNotFound, job.CodeResponseNotFound, "There is no response %q: only those that were asked for with background: true are kept.", clip(id)).at("id")
}

// findResponse looks for the tenant's response in the path. A job that is none, or that was answered on its own connection and kept by nobody, is not there; nor is a line of a batch, which is its batch's.
func (s *Server) findResponse(c echo.Context) (*view, error) {
	id, err := responseID(c)
	if err != nil {
		return nil, err
	}
	v, err := s.find(c.Request().Context(), tenantOf(c), id)
	switch {
	case err != nil && failureOf(err).status == http.StatusNotFound:
		return nil, noResponse(c.Param("id"))
	case err != nil && failureOf(err).status == http.StatusGone:
		return nil, fail(http.StatusGone, job.CodeResultExpired, "The response %q is no longer kept.", clip(c.Param("id")))
	case err != nil:
		return nil, err
	case v.job.Endpoint != job.Responses, v.job.Live(), v.job.InBatch():
		return nil, noResponse(c.Param("id"))
	}
	return v, nil
}

// getResponse answers GET /v1/responses/{id}: with the object, at once or, with wait, when its status has changed; or with the stream of its events.
func (s *Server) getResponse(c echo.Context) error {
	ask, err := s.streamAsked(c)
	if err != nil {
		return err
	}
	wait, err := waitParam(c)
	if err != nil {
		return err
	}
	if p := parsePrefer(c.Request().Header); p.wait > wait {
		wait = p.wait
	}
	v, err := s.findResponse(c)
	if err != nil {
		return err
	}
	if ask.stream {
		return s.follow(c, v, ask.after, &typedReplay{eventStream: eventStream{c: c}, s: s, after: ask.after, fresh: !ask.resumed, over: v.ended()})
	}
	if before := v.state.Public(); wait > 0 && !v.ended() {
		ctx, cancel := context.WithTimeout(c.Request().Context(), wait)
		v, err = s.await(ctx, v, func(v *view) bool { return v.ended() || v.state.Public() != before })
		cancel()
		if err != nil {
			return err
		}
	}
	if !v.ended() {
		s.locate(c.Request().Context(), v)
		c.Response().Header().Set(headerRetryAfter, s.pollHint(v))
	}
	return s.writeResponse(c, v)
}

// streamAsk is whether a stream is asked for, and after which event.
type streamAsk struct {
	stream, resumed bool
	after           int64
}

// maxAsk bounds the body of a GET in bytes.
const maxAsk = 64 << 10

// streamAsked reads the query, and the JSON body that some clients send with their GET.
func (s *Server) streamAsked(c echo.Context) (streamAsk, error) {
	var ask streamAsk
	stream, after := c.QueryParam("stream"), c.QueryParam("starting_after")
	if r := c.Request(); r.ContentLength != 0 && r.Method == http.MethodGet {
		limit := min(maxAsk, s.cfg.MaxBody)
		_, o, release, err := s.readBodyUpTo(c, limit, fail(http.StatusRequestEntityTooLarge, job.CodeRequestTooLarge, "The body of a GET is larger than %d bytes.", limit))
		if err != nil {
			return ask, err
		}
		defer release()
		for _, f := range []struct {
			key string
			to  *string
		}{{"stream", &stream}, {"starting_after", &after}} {
			if raw := o.Get(f.key); !isNull(raw) && *f.to == "" {
				*f.to = strings.Trim(string(raw), `"`)
			}
		}
	}
	var err error
	if stream != "" {
		if ask.stream, err = strconv.ParseBool(stream); err != nil {
			return ask, invalid("stream", job.CodeInvalidValue, "stream is %q: it must be true or false.", clip(stream))
		}
	}
	if after != "" {
		ask.resumed = true
		if ask.after, err = strconv.ParseInt(after, 10, 64); err != nil || ask.after < 0 {
			return ask, invalid("starting_after", job.CodeInvalidValue, "starting_after must be the sequence_number of an event, not %q.", clip(after))
		}
	}
	return ask, nil
}

// cancelResponse answers POST /v1/responses/{id}/cancel: with the object, also if it has ended already.
func (s *Server) cancelResponse(c echo.Context) error {
	v, err := s.findResponse(c)
	if err != nil {
		return err
	}
	// The wish is carried out though its client may leave.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request().Context()), 2*storeTimeout)
	defer cancel()
	if v, err = s.endNow(ctx, v); err != nil {
		return err
	}
	return s.writeResponse(c, v)
}

// deleteResponse answers DELETE /v1/responses/{id}: its request, answer and record are erased. One that has not ended is cancelled first.
func (s *Server) deleteResponse(c echo.Context) error {
	v, err := s.findResponse(c)
	if err != nil {
		return err
	}
	if err := s.erase(c, v); err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, deletedResponse{ID: responses.ID(v.job.ID), Object: "response", Deleted: true})
}

type deletedResponse struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

// writeResponse answers with the response's object: of one with an answer that is the answer.
func (s *Server) writeResponse(c echo.Context, v *view) error {
	if hasAnswer(v) {
		return s.writeAnswer(c, v)
	}
	return writeJSON(c, http.StatusOK, s.responseOf(c.Request().Context(), v))
}

// hasAnswer tells whether v ended with a response of an engine's.
func hasAnswer(v *view) bool {
	return v.ended() && v.state == job.Completed && v.outcome.StatusCode >= 200 && v.outcome.StatusCode <= 299
}

// responseOf is the object of a response that has not ended, or that ended without an answer. What it tells of its request is as far as that is at hand.
func (s *Server) responseOf(ctx context.Context, v *view) *responses.Object {
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	request := s.requestOf(short, v)
	frame := responses.FrameOf(&v.job, request)
	frame.Background = frame.Background || request == nil
	o := responses.NewObject(frame, statusOfResponse(v.state), request)
	o.Model = encode(v.job.Model)
	if v.job.Metadata != nil {
		o.Metadata = encode(v.job.Metadata)
	}
	if o.Status == responses.Failed {
		o.Error = s.errorOfResponse(short, v)
	}
	return o
}

// requestOf is the request of v, nil if it is not at hand. Once a response has ended its request is gone, and the answer, which repeats it, stands in for it, or what was kept of it.
func (s *Server) requestOf(ctx context.Context, v *view) *job.Object {
	var raw []byte
	var err error
	switch {
	case !v.ended():
		raw, err = s.deps.Results.Body(ctx, v.job.ID)
	case hasAnswer(v) && v.outcome.Blob == "":
		raw, _, err = s.readResponse(ctx, v)
	}
	if err != nil || len(raw) == 0 {
		raw = v.job.Echo
	}
	o, err := job.ParseObject(raw)
	if err != nil {
		return nil
	}
	return o
}

func statusOfResponse(st job.State) responses.Status {
	switch st.Public() {
	case job.Queued:
		return responses.Queued
	case job.Running:
		return responses.InProgress
	case job.Cancelled:
		return responses.Cancelled
	case job.Completed:
		return responses.Completed
	default:
		return responses.Failed
	}
}

// errorOfResponse is why v failed: in the engine's words, if it has said any.
func (s *Server) errorOfResponse(ctx context.Context, v *view) *responses.Error {
	e, status := v.outcome.Error, v.outcome.StatusCode
	if status >= 400 {
		if answer, err := s.openAnswer(ctx, v); err == nil && answer != nil {
			raw, err := io.ReadAll(answer)
			_ = answer.Close() // read only
			if err == nil {
				e = errorIn(status, raw)
			}
		}
	}
	if e == nil {
		e = job.NewError(job.TypeServer, job.CodeInternal, "The response ended without an answer.")
	}
	return responses.NewError(status, e)
}

// typedReplay writes a job's events as the typed events of a response. Each has the number of the job's event as its sequence_number, so that a client which resumes after any gets the next; what the job's own
// events stand for is told in the words of this API: that it was created, with number 0, that it begins anew, and how it ended.
type typedReplay struct {
	eventStream
	s     *Server
	after int64
	// fresh: the client has nothing yet. over: the job had ended before it asked. idle counts looks in a row at an ended job that found nothing.
	fresh, over bool
	idle        int
}

func (p *typedReplay) take(ctx context.Context, events []job.Event, span results.Span, v *view) (after int64, done bool, err error) {
	var b bytes.Buffer
	if p.fresh {
		p.fresh = false
		p.created(ctx, &b, v, responses.Queued, 0)
	}
	for _, e := range events {
		p.after, p.idle = e.N, 0
		switch e.Kind {
		case job.EventToken:
			numbered, err := responses.Number(e.Data, e.N)
			if err != nil {
				return p.after, true, p.fail(&b, job.NewError(job.TypeServer, job.CodeInternal, "An event of this response is damaged."))
			}
			writeTyped(&b, responses.TypeOf(e.Data), numbered)
		case job.EventReset:
			p.created(ctx, &b, v, responses.InProgress, e.N)
		case job.EventDone:
			return p.after, true, p.end(ctx, &b, e.N, v)
		}
	}
	if len(events) == 0 && v.ended() {
		switch last := max(span.Last, v.lastEvent); {
		case p.over && span.Last > 0 && p.after > last: // while it lives the client may know of numbers that were wiped, and be right
			return p.after, true, invalid("starting_after", job.CodeInvalidValue, "starting_after is %d: the response has ended, and its last event has the number %d.", p.after, last)
		case v.lastEvent > 0 && p.after >= v.lastEvent && p.after <= last: // the client has all
			return p.after, true, p.write(&b)
		case span.Last == 0, p.idle >= 2: // its last event comes with the next write, or was lost
			n := max(v.lastEvent, p.after+1)
			return n, true, p.end(ctx, &b, n, v)
		}
		p.idle++
	}
	return p.after, false, p.write(&b)
}

// created writes the event with which a response, or another attempt at it, begins: what came before does not count.
func (p *typedReplay) created(ctx context.Context, b *bytes.Buffer, v *view, status responses.Status, n int64) {
	o := p.s.responseOf(ctx, v)
	o.Status, o.Error = status, nil
	e := responses.ObjectEvent(responses.EventCreated, n, encode(o))
	writeTyped(b, e.Type, e.Data)
}

// end writes the event that ends the stream, with the whole object, read anew: what is in hand may be older than the event.
func (p *typedReplay) end(ctx context.Context, b *bytes.Buffer, n int64, v *view) error {
	latest, err := p.s.find(ctx, v.job.Tenant, v.job.ID)
	if err != nil {
		return p.fail(b, failureOf(err).body)
	}
	if !latest.ended() {
		return p.fail(b, job.NewError(job.TypeServer, job.CodeInternal, "The response's end is not recorded yet: ask for it again."))
	}
	var object []byte
	status := statusOfResponse(latest.state)
	if hasAnswer(latest) {
		if object, status, err = p.s.readResponse(ctx, latest); err != nil {
			return p.fail(b, failureOf(err).body)
		}
	} else {
		object = encode(p.s.responseOf(ctx, latest))
	}
	e := responses.ObjectEvent(responses.EndOf(status), n, object)
	writeTyped(b, e.Type, e.Data)
	return p.write(b)
}

// readResponse is the answer of v, and the status that it tells.
func (s *Server) readResponse(ctx context.Context, v *view) ([]byte, responses.Status, error) {
	answer, err := s.openAnswer(ctx, v)
	if err != nil {
		return nil, "", err
	}
	if answer == nil {
		return nil, "", fail(http.StatusBadGateway, job.CodeInternal, "The answer of response %s is lost.", responses.ID(v.job.ID))
	}
	defer answer.Close() //nolint:errcheck // read only
	raw, err := io.ReadAll(answer)
	if err != nil {
		return nil, "", fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
	}
	sum, err := responses.Summarize(raw)
	if err != nil {
		return nil, "", fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
	}
	return raw, sum.Status, nil
}

func (p *typedReplay) fail(b *bytes.Buffer, e *job.Error) error {
	if !p.begun && b.Len() == 0 {
		return jobFailure(e)
	}
	writeTypedError(b, e, p.after)
	return p.write(b)
}

func (p *typedReplay) breakOff(f *failure) error { return p.fail(&bytes.Buffer{}, f.body) }

// writeTyped writes one event under its type's name.
func writeTyped(b *bytes.Buffer, kind string, data []byte) {
	b.WriteString("event: " + kind + "\n")
	writeData(b, data)
	b.WriteByte('\n')
}

// writeTypedError writes the event of a failure after the head: one of this API's, and one at which OpenAI's clients throw, as they do at an error object alone. n is the number of the event before it.
func writeTypedError(b *bytes.Buffer, e *job.Error, n int64) {
	writeTyped(b, responses.EventError, encode(struct {
		Type     string     `json:"type"`
		Sequence int64      `json:"sequence_number"`
		Code     *job.Code  `json:"code"`
		Message  string     `json:"message"`
		Param    *string    `json:"param"`
		Error    *job.Error `json:"error"`
	}{responses.EventError, n, e.Code, e.Message, e.Param, e}))
}
