package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/results"
)

// eventPage is how many events are read at once, eventPoll how often a stream looks by itself, for bells may be lost.
const (
	eventPage = 256
	eventPoll = time.Second
)

// sink takes a job's events in order. take gets what the store has after the number that it returned last (perhaps nothing), what the store holds in all, and the job; it returns the number after
// which it wants more, and whether the stream is over.
type sink interface {
	take(ctx context.Context, events []job.Event, span results.Span, v *view) (after int64, done bool, err error)
	keepAlive(comment []byte) error
	// breakOff tells a client that has the stream's head that it will get no more.
	breakOff(f *failure) error
}

// follow feeds out with the events of v's job after `after` until out has enough, the client leaves, or the server drains. A store that is away for a while only
// delays the stream.
func (s *Server) follow(c echo.Context, v *view, after int64, out sink) error {
	s.metrics.streams.Inc()
	defer s.metrics.streams.Dec()
	ctx := c.Request().Context()
	bells, stop := s.deps.Relay.Watch(v.job.ID)
	defer stop()
	poll := time.NewTicker(eventPoll)
	defer poll.Stop()
	beat := time.NewTicker(s.beat())
	defer beat.Stop()
	healthy := time.Now()
	for {
		n, err := s.readEvents(ctx, &v, after)
		var done bool
		if err == nil {
			healthy = time.Now()
			after, done, err = out.take(ctx, n.events, n.span, v)
		}
		switch {
		case ctx.Err() != nil:
			return context.Canceled
		case err != nil && (failureOf(err).status != http.StatusServiceUnavailable || time.Since(healthy) > awaitPatience):
			return broken(c, out, err)
		case done:
			return err
		}
		if len(n.events) > 0 {
			beat.Reset(s.beat())
			if len(n.events) == eventPage {
				continue
			}
		}
		for waiting := true; waiting; {
			select {
			case <-bells:
				waiting = false
			case <-poll.C:
				waiting = false
			case <-beat.C:
				s.locate(ctx, v)
				if out.keepAlive(s.comment(v)) != nil {
					return context.Canceled
				}
			case <-s.closing:
				return broken(c, out, unavailable(nil, "The server stops: connect again."))
			case <-ctx.Done():
				return context.Canceled
			}
		}
	}
}

// page is what one look at a job's stream found.
type page struct {
	events []job.Event
	span   results.Span
}

// readEvents reads what came after a number, and the job anew unless it runs and has news: a stream that only grows says by itself how the job is.
func (s *Server) readEvents(ctx context.Context, v **view, after int64) (page, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	id := (*v).job.ID
	events, span, err := s.deps.Results.Events(ctx, id, after, eventPage)
	if err != nil {
		return page{}, fmt.Errorf("reading the events of job %s: %w", id, err)
	}
	if len(events) == 0 || (*v).state != job.Running {
		latest, err := s.find(ctx, (*v).job.Tenant, id)
		if err != nil {
			return page{}, err
		}
		*v = latest
		if len(events) == 0 && latest.ended() { // it may have ended between the two looks; what the stream has now is all that it will have
			if events, span, err = s.deps.Results.Events(ctx, id, after, eventPage); err != nil {
				return page{}, fmt.Errorf("reading the last events of job %s: %w", id, err)
			}
		}
	}
	return page{events, span}, nil
}

// broken ends an event stream that cannot go on.
func broken(c echo.Context, out sink, err error) error {
	if !c.Response().Committed {
		return err
	}
	if f := failureOf(err); f.status != statusClientGone {
		return out.breakOff(f)
	}
	return context.Canceled
}

// jobEvents streams a job's events, each once and in order, from the one after Last-Event-ID on.
func (s *Server) jobEvents(c echo.Context) error {
	id, err := jobID(c)
	if err != nil {
		return err
	}
	after, resumed, err := lastEventID(c)
	if err != nil {
		return err
	}
	v, err := s.find(c.Request().Context(), tenantOf(c), id)
	if err != nil {
		return err
	}
	if resumed && v.ended() && after > 0 && after == v.lastEvent {
		return c.NoContent(http.StatusNoContent) // tells an EventSource not to come again
	}
	f := &feed{s: s, c: c, after: after}
	if err := f.begin(); err != nil {
		return context.Canceled
	}
	return s.follow(c, v, after, f)
}

// lastEventID reads where the client was. The header goes before the query, for a browser that reconnects sends both.
func lastEventID(c echo.Context) (n int64, resumed bool, err error) {
	param, text := "Last-Event-ID", c.Request().Header.Get("Last-Event-ID")
	if text == "" {
		param = "last_event_id"
		if text = c.QueryParam(param); text == "" {
			return 0, false, nil
		}
	}
	n, err = strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, false, invalid(param, job.CodeInvalidValue, "%s must be the number of an event, not %q.", param, clip(text))
	}
	return n, true, nil
}

// feed writes a job's events as they are.
type feed struct {
	s     *Server
	c     echo.Context
	after int64
	// idle counts looks in a row at an ended job that found nothing.
	idle int
}

// begin sends the head at once, with a comment as its first byte.
func (f *feed) begin() error {
	beginEvents(f.c)
	if _, err := f.c.Response().Write([]byte(": events\n")); err != nil {
		return errNobodyReads
	}
	return flush(f.c)
}

func (f *feed) keepAlive(comment []byte) error {
	if _, err := f.c.Response().Write(comment); err != nil {
		return errNobodyReads
	}
	return flush(f.c)
}

// breakOff writes the error event, which has no number: a client that resumes misses nothing. Where the server is at fault for a while the stream just ends, for that makes clients connect again.
func (f *feed) breakOff(why *failure) error {
	if why.status == http.StatusServiceUnavailable {
		return context.Canceled
	}
	var b bytes.Buffer
	b.WriteString("event: " + string(job.EventError) + "\n")
	writeData(&b, encode(errorObject{why.body}))
	b.WriteByte('\n')
	return f.write(&b)
}

func (f *feed) take(ctx context.Context, events []job.Event, span results.Span, v *view) (after int64, done bool, err error) {
	var b bytes.Buffer
	switch {
	case span.Last == 0:
		return f.takeNothing(ctx, &b, v)
	case f.after > span.Last:
		return f.takeBack(ctx, &b, span, v)
	case f.after+1 < span.First && (f.after > 0 || len(events) > 0 && events[0].Kind == job.EventToken):
		writeEvent(&b, span.First-1, job.EventGap, fmt.Appendf(nil, `{"from":%d,"to":%d}`, f.after+1, span.First-1))
	}
	for _, e := range events {
		if e.Kind == job.EventDone {
			return e.N, true, f.end(ctx, &b, e.N, v)
		}
		writeEvent(&b, e.N, e.Kind, e.Data)
		f.after, f.idle = e.N, 0
	}
	if len(events) == 0 && v.ended() {
		// The outcome is recorded and its event is not there: it comes with the next write, or was lost.
		if f.idle++; f.idle > 2 {
			n := max(v.lastEvent, f.after+1)
			return n, true, f.end(ctx, &b, n, v)
		}
	}
	return f.after, false, f.write(&b)
}

// takeBack answers a client that names an event which this stream never had: it gets the text so far, and what comes after it. Numbers go back by that.
func (f *feed) takeBack(ctx context.Context, b *bytes.Buffer, span results.Span, v *view) (after int64, done bool, err error) {
	at := span.Last
	if v.ended() && span.Last > 1 {
		at-- // the last is `done`, which follows
	}
	text, err := f.textSoFar(ctx, v, at)
	if err != nil {
		return f.after, false, err
	}
	writeEvent(b, at, job.EventReset, resetData(text))
	f.after = at
	more, _, err := f.s.deps.Results.Events(ctx, v.job.ID, at, eventPage)
	if err != nil {
		return f.after, false, f.cut(b, fmt.Errorf("reading the events of job %s: %w", v.job.ID, err))
	}
	if err := f.write(b); err != nil {
		return f.after, true, err
	}
	return f.take(ctx, more, span, v)
}

// takeNothing decides what to do about a stream that is empty or gone. While the job lives its worker will write, or write again, under the numbers that the client knows. Of an
// ended job the text is told from its answer.
func (f *feed) takeNothing(ctx context.Context, b *bytes.Buffer, v *view) (after int64, done bool, err error) {
	if !v.ended() {
		return f.after, false, nil
	}
	n := max(v.lastEvent, 1)
	if v.job.Events && n > 1 && f.after != n-1 && v.outcome.ResultSize > 0 {
		text, err := f.answerText(ctx, v)
		if err != nil {
			return f.after, false, err
		}
		writeEvent(b, n-1, job.EventReset, resetData(text))
	}
	return n, true, f.end(ctx, b, n, v)
}

// end writes the done event with the job's object, read anew: what is in hand may be older than the event.
func (f *feed) end(ctx context.Context, b *bytes.Buffer, n int64, v *view) error {
	latest, err := f.s.find(ctx, v.job.Tenant, v.job.ID)
	if err != nil {
		return f.cut(b, err)
	}
	d, err := f.s.describe(ctx, latest)
	if err != nil {
		return f.cut(b, err)
	}
	defer d.Close()
	fmt.Fprintf(b, "id: %d\nevent: %s\ndata: ", n, job.EventDone)
	if err := f.write(b); err != nil {
		return err
	}
	lines := &lineWriter{to: f.c.Response()}
	if _, err := d.WriteTo(lines); err != nil {
		f.s.log.Warn("sending a job's done event", "job", v.job.ID, "err", err)
		panic(http.ErrAbortHandler) // the client resumes
	}
	b.WriteString("\n\n")
	return f.write(b)
}

// cut sends what there is, and ends the stream before its done event with err: the client resumes.
func (f *feed) cut(b *bytes.Buffer, err error) error {
	if werr := f.write(b); werr != nil {
		return werr
	}
	return err
}

func (f *feed) write(b *bytes.Buffer) error {
	if b.Len() == 0 {
		return nil
	}
	if _, err := f.c.Response().Write(b.Bytes()); err != nil {
		return errNobodyReads
	}
	b.Reset()
	if flush(f.c) != nil {
		return errNobodyReads
	}
	return nil
}

// textSoFar is the text that the events up to number `to` tell: of the whole answer if the job has ended, else of what is kept.
func (f *feed) textSoFar(ctx context.Context, v *view, to int64) (string, error) {
	if v.ended() && v.outcome.ResultSize > 0 {
		return f.answerText(ctx, v)
	}
	var text []byte
	for after := int64(0); after < to; {
		events, _, err := f.s.deps.Results.Events(ctx, v.job.ID, after, eventPage)
		if err != nil {
			return "", fmt.Errorf("reading the events of job %s: %w", v.job.ID, err)
		}
		if len(events) == 0 {
			break
		}
		for _, e := range events {
			after = e.N
			switch {
			case e.N > to:
			case e.Kind == job.EventReset:
				var r reset
				_ = json.Unmarshal(e.Data, &r) // one without text begins from nothing
				text = append(text[:0], r.Text...)
			case e.Kind == job.EventToken:
				for _, chunk := range chunks(e.Data) {
					text = append(text, chunkText(chunk)...)
				}
			}
		}
	}
	return string(text), nil
}

func (f *feed) answerText(ctx context.Context, v *view) (string, error) {
	answer, err := f.s.openAnswer(ctx, v)
	if answer == nil || err != nil {
		return "", err
	}
	defer answer.Close() //nolint:errcheck // read only
	var raw bytes.Buffer
	if _, err := raw.ReadFrom(answer); err != nil {
		return "", fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
	}
	return job.AnswerText(raw.Bytes()), nil
}

// reset is the data of a reset event: the text of the first choice from which generation goes on.
type reset struct {
	Text string `json:"text"`
}

func resetData(text string) []byte { return encode(reset{text}) }

// chunkText is the text that an engine's chunk adds to its first choice.
func chunkText(chunk []byte) string {
	var c struct {
		Type    string `json:"type"` // of a response's event, whose delta is the text
		Delta   string `json:"delta"`
		Choices []struct {
			Index int    `json:"index"`
			Text  string `json:"text"`
			Delta struct {
				Content string `json:"content"`
			} `json:"delta"`
		} `json:"choices"`
	}
	if json.Unmarshal(chunk, &c) != nil {
		return ""
	}
	if c.Type == "response.output_text.delta" {
		return c.Delta
	}
	for _, choice := range c.Choices {
		if choice.Index == 0 {
			return choice.Text + choice.Delta.Content
		}
	}
	return ""
}

// lineWriter writes text as the data of an event: each of its lines gets the field's name.
type lineWriter struct {
	to interface{ Write([]byte) (int, error) }
	// cr: the last byte was \r, after which \n begins no further line.
	cr bool
}

func (w *lineWriter) Write(p []byte) (int, error) {
	rest := p
	if w.cr && len(rest) > 0 {
		w.cr = false
		if rest[0] == '\n' {
			rest = rest[1:]
		}
	}
	for len(rest) > 0 {
		i := bytes.IndexAny(rest, "\r\n")
		if i < 0 {
			if _, err := w.to.Write(rest); err != nil {
				return 0, err
			}
			break
		}
		if _, err := w.to.Write(rest[:i]); err != nil {
			return 0, err
		}
		if _, err := w.to.Write([]byte("\ndata: ")); err != nil {
			return 0, err
		}
		if rest[i] == '\r' {
			switch {
			case i+1 == len(rest):
				w.cr = true
			case rest[i+1] == '\n':
				i++
			}
		}
		rest = rest[i+1:]
	}
	return len(p), nil
}
