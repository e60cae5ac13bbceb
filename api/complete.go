package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/responses"
	"github.com/millrace/millrace/internal/results"
)

// complete answers an OpenAI route. A plain call runs as long as its connection; one with an Idempotency-Key is a durable job whose answer this connection waits for, so that
// the same call again gets the same answer; with `Prefer: respond-async` the client gets the job at once.
func (s *Server) complete(endpoint job.Endpoint) echo.HandlerFunc {
	return func(c echo.Context) error {
		body, o, release, err := s.readBody(c)
		if err != nil {
			return err
		}
		defer release()
		r, err := parseRequest(endpoint, body, o, "")
		if err != nil {
			return err
		}
		prefer := parsePrefer(c.Request().Header)
		background := false
		if endpoint == job.Responses {
			if err := s.checkResponse(c, o, r.model); err != nil {
				return err
			}
			background = responses.Flag(o, "background")
		}
		class := job.Interactive
		if prefer.async || background {
			class = job.Standard
		}
		j := job.Job{
			Tenant: tenantOf(c), Model: r.model, Endpoint: endpoint, Class: class, Group: job.NoGroup, Stream: r.stream,
			RunTimeout: job.Millis(s.cfg.DefaultRunTimeout.Milliseconds()), Cost: job.EstimateCost(o, body), BodySize: int64(len(body)),
		}
		if h := c.Request().Header.Get(headerPriority); h != "" {
			if j.Class, err = job.ParseClass(h); err != nil {
				return invalid(headerPriority, job.CodeInvalidValue, "%v.", err)
			}
		}
		if j.Session, err = s.sessionOf(c, o); err != nil {
			return err
		}
		durable := prefer.async || background || c.Request().Header.Get(headerKey) != ""
		sub := &submission{job: j, body: body, deadline: s.cfg.DefaultDeadline}
		at, err := s.admit(c.Request().Context(), &j, r, !durable)
		if err != nil && (!durable || !sub.refuse(err)) {
			return err
		}
		if !durable {
			defer at.leave()
			return s.answerLive(c, j, r, at.lane, release)
		}
		sub.lane = at.lane
		if sub.dedupe, err = dedupeOf(c, body); err != nil {
			return err
		}
		sub.job.Events = r.stream || background
		if background {
			if sub.job.Metadata, err = metadataField(o); err != nil {
				return err
			}
			sub.job.Echo = responses.Echo(o)
		}
		v, err := s.submit(c.Request().Context(), j.Tenant, sub)
		if err != nil {
			return err
		}
		release()
		c.Response().Header().Set(headerJob, string(v.job.ID))
		switch {
		case background:
			return s.answerBackground(c, v, r.stream)
		case prefer.async:
			return s.answerAsync(c, v, prefer)
		case r.stream:
			return s.answerFromEvents(c, v)
		default:
			return s.answerFromJob(c, v)
		}
	}
}

// maxSession bounds a session key in characters.
const maxSession = 256

// sessionOf is the call's affinity key: by its header, or by its body where that is configured. A body's field that is no fit is no session, for it has other uses.
func (s *Server) sessionOf(c echo.Context, o *job.Object) (job.Session, error) {
	if h := c.Request().Header.Get(headerSession); h != "" {
		if utf8.RuneCountInString(h) > maxSession {
			return "", invalid(headerSession, job.CodeInvalidValue, "The session has more than %d characters.", maxSession)
		}
		return job.Session(strings.ToValidUTF8(h, "\uFFFD")), nil
	}
	if !s.cfg.SessionFromBody {
		return "", nil
	}
	for _, field := range []string{"prompt_cache_key", "user"} {
		var v string
		if raw := o.Get(field); !isNull(raw) && json.Unmarshal(raw, &v) == nil && v != "" && utf8.RuneCountInString(v) <= maxSession {
			return job.Session(v), nil
		}
	}
	return "", nil
}

// preference is what the Prefer header asks (RFC 7240): an answer at once, or after at most wait.
type preference struct {
	async bool
	wait  time.Duration
}

// maxWait bounds long polls.
const maxWait = time.Minute

// parsePrefer reads the preferences that we know. Others, and those that make no sense, are ignored, as the standard asks.
func parsePrefer(h http.Header) preference {
	var p preference
	for _, line := range h.Values("Prefer") {
		for part := range strings.SplitSeq(line, ",") {
			part, _, _ = strings.Cut(part, ";")
			name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
			switch strings.ToLower(strings.TrimSpace(name)) {
			case "respond-async":
				p.async = true
			case "wait":
				if n, err := strconv.Atoi(strings.Trim(strings.TrimSpace(value), `"`)); err == nil && n > 0 {
					p.wait = min(time.Duration(n)*time.Second, maxWait)
				}
			}
		}
	}
	return p
}

// answerAsync answers with the job, or with the engine's answer if it comes in time.
func (s *Server) answerAsync(c echo.Context, v *view, p preference) error {
	applied := "respond-async"
	if p.wait > 0 {
		applied += ", wait=" + strconv.Itoa(int(p.wait/time.Second))
		ctx, cancel := context.WithTimeout(c.Request().Context(), p.wait)
		latest, err := s.await(ctx, v, (*view).ended)
		cancel()
		if err == nil {
			v = latest
		} // it is stored: whatever the wait met, the client gets its id
	}
	c.Response().Header().Set("Preference-Applied", applied)
	// Only a client that waits is ready for the answer itself: without a wait a repeated call gets its job, though it may have ended.
	if p.wait > 0 && v.ended() && v.outcome.StatusCode != 0 {
		return s.writeAnswer(c, v)
	}
	return s.writeAccepted(c, v)
}

// writeAccepted answers 202 with the job.
func (s *Server) writeAccepted(c echo.Context, v *view) error {
	h := c.Response().Header()
	h.Set(echo.HeaderLocation, "/v1/jobs/"+string(v.job.ID))
	h.Set(headerRetryAfter, s.pollHint(v))
	return s.writeJob(c, http.StatusAccepted, v)
}

// pollHint is in how many seconds it is worth asking again, 1..60.
func (s *Server) pollHint(v *view) string {
	hint := 1
	if v.state == job.Queued {
		if o := s.why(v); o.ETASeconds != nil {
			hint = min(60, max(1, int(*o.ETASeconds)))
		}
	}
	return strconv.Itoa(hint)
}

// answerFromJob waits for a durable job and answers as if the call had gone to the engine. A client that leaves does not cancel it.
func (s *Server) answerFromJob(c echo.Context, v *view) error {
	ctx := c.Request().Context()
	latest, err := s.await(ctx, v, (*view).ended)
	if err != nil {
		return err
	}
	if !latest.ended() {
		if ctx.Err() != nil && context.Cause(ctx) != errStopped { //nolint:errorlint // a sentinel by identity
			return context.Canceled
		}
		return unavailable(nil, "The server stops before job %s has ended: send the same request with the same key again.", v.job.ID)
	}
	return s.writeAnswer(c, latest)
}

// awaitPatience is for how long a wait goes on while a store does not answer.
const awaitPatience = 30 * time.Second

// pollPeriod is how often a waiting request looks by itself, for bells may be lost.
const pollPeriod = 1500 * time.Millisecond

// await returns the job once `until` holds, or as it was last seen when ctx ends or the server drains.
func (s *Server) await(ctx context.Context, v *view, until func(*view) bool) (*view, error) {
	bells, stop := s.deps.Relay.Watch(v.job.ID)
	defer stop()
	t := time.NewTicker(pollPeriod)
	defer t.Stop()
	healthy := time.Now()
	for {
		latest, err := s.find(ctx, v.job.Tenant, v.job.ID)
		switch {
		case err == nil:
			healthy = time.Now()
			if v = latest; until(v) {
				return v, nil
			}
		case ctx.Err() != nil:
			return v, nil
		case failureOf(err).status != http.StatusServiceUnavailable || time.Since(healthy) > awaitPatience:
			return v, err
		}
		select {
		case <-bells:
		case <-t.C:
		case <-s.closing:
			return v, nil
		case <-ctx.Done():
			return v, nil
		}
	}
}

// answerFromEvents streams a durable job's answer from its token events, from the first on. A client that leaves does not cancel it.
func (s *Server) answerFromEvents(c echo.Context, v *view) error {
	if !v.job.Events {
		return s.answerFromJob(c, v)
	}
	if v.job.Endpoint == job.Responses {
		return s.follow(c, v, 0, &typedReplay{eventStream: eventStream{c: c}, s: s, fresh: true})
	}
	return s.follow(c, v, 0, &replay{eventStream: eventStream{c: c}, s: s})
}

// replay writes a job's token events as an engine's stream.
type replay struct {
	eventStream
	s     *Server
	after int64
	// shown: the client has some of the answer.
	shown bool
}

// eventStream is one whose head is sent with its first bytes.
type eventStream struct {
	c     echo.Context
	begun bool
}

func (w *eventStream) keepAlive(comment []byte) error { return w.write(bytes.NewBuffer(comment)) }

func (w *eventStream) write(b *bytes.Buffer) error {
	if b.Len() == 0 {
		return nil
	}
	if !w.begun {
		w.begun = true
		beginEvents(w.c)
	}
	if _, err := w.c.Response().Write(b.Bytes()); err != nil {
		return errNobodyReads
	}
	if flush(w.c) != nil {
		return errNobodyReads
	}
	return nil
}

func (p *replay) take(ctx context.Context, events []job.Event, span results.Span, v *view) (after int64, done bool, err error) {
	var b bytes.Buffer
	for _, e := range events {
		p.after = e.N
		switch e.Kind {
		case job.EventToken:
			for _, chunk := range chunks(e.Data) {
				writeData(&b, chunk)
				b.WriteByte('\n')
			}
			p.shown = true
		case job.EventReset:
			if p.shown {
				return p.after, true, p.fail(&b, job.NewError(job.TypeServer, job.CodeEngineError,
					"The answer began anew on another worker: read it under /v1/jobs/"+string(v.job.ID)+"."))
			}
		case job.EventDone:
			return p.after, true, p.end(ctx, &b, v)
		}
	}
	if len(events) == 0 && v.ended() && span.Last == 0 {
		if p.shown || v.outcome.State == job.Completed {
			return p.after, true, p.fail(&b, job.NewError(job.TypeServer, job.CodeUnavailable,
				"The events of this answer are no longer kept: read it under /v1/jobs/"+string(v.job.ID)+"."))
		}
		return p.after, true, p.end(ctx, &b, v)
	}
	return p.after, false, p.write(&b)
}

// end ends the stream as the job ended.
func (p *replay) end(ctx context.Context, b *bytes.Buffer, v *view) error {
	latest, err := p.s.find(ctx, v.job.Tenant, v.job.ID)
	if err != nil {
		return p.fail(b, failureOf(err).body)
	}
	o := latest.outcome
	switch {
	case o == nil:
		return p.fail(b, job.NewError(job.TypeServer, job.CodeInternal, "The job's end is not recorded yet: read it under /v1/jobs/"+string(v.job.ID)+"."))
	case o.State == job.Completed:
		if !p.shown { // the engine knows no streams
			if err := p.whole(ctx, b, latest); err != nil {
				return p.fail(b, failureOf(err).body)
			}
		}
		b.WriteString("data: [DONE]\n\n")
		return p.write(b)
	case !p.begun && b.Len() == 0:
		return p.s.writeAnswer(p.c, latest)
	case o.Error != nil:
		return p.fail(b, o.Error)
	}
	return p.fail(b, job.NewError(job.TypeServer, job.CodeEngineError, "The engine answered "+strconv.Itoa(o.StatusCode)+"."))
}

// whole writes an answer that came in one piece as the one event.
func (p *replay) whole(ctx context.Context, b *bytes.Buffer, v *view) error {
	answer, err := p.s.openAnswer(ctx, v)
	if answer == nil || err != nil {
		return err
	}
	defer answer.Close() //nolint:errcheck // read only
	raw, err := io.ReadAll(answer)
	if err != nil {
		return fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
	}
	if f := unfit(v.outcome.StatusCode, raw); f != nil {
		return f
	}
	writeData(b, raw)
	b.WriteByte('\n')
	return nil
}

func (p *replay) fail(b *bytes.Buffer, e *job.Error) error {
	if !p.begun && b.Len() == 0 {
		return jobFailure(e)
	}
	b.WriteString("data: ")
	b.Write(encode(errorObject{e}))
	b.WriteString("\n\n")
	return p.write(b)
}

// breakOff is an error event, for a stream that just ended would look whole.
func (p *replay) breakOff(f *failure) error { return p.fail(&bytes.Buffer{}, f.body) }

// chunks parts the engine's chunks that share one event. A chunk that has lines of its own stays whole.
func chunks(data []byte) [][]byte {
	if !bytes.ContainsRune(data, '\n') {
		return [][]byte{data}
	}
	var all [][]byte
	start := 0
	for i := 0; i <= len(data); i++ {
		if (i == len(data) || data[i] == '\n') && json.Valid(data[start:i]) {
			all = append(all, data[start:i])
			start = i + 1
		}
	}
	if start < len(data) {
		all = append(all, data[start:])
	}
	return all
}
