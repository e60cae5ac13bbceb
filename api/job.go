package api

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
)

// jobObject is a job as clients see it. Times are unix seconds with the milliseconds as fraction.
type jobObject struct {
	ID           job.ID            `json:"id"`
	Object       string            `json:"object"`
	Status       job.State         `json:"status"`
	Endpoint     job.Endpoint      `json:"endpoint"`
	Model        job.Model         `json:"model"`
	Priority     job.Class         `json:"priority"`
	Session      *job.Session      `json:"session"`
	CreatedAt    float64           `json:"created_at"`
	StartedAt    *float64          `json:"started_at"`
	FirstTokenAt *float64          `json:"first_token_at"`
	FinishedAt   *float64          `json:"finished_at"`
	ExpiresAt    float64           `json:"expires_at"`
	Attempts     []attemptObject   `json:"attempts"`
	Queue        *queueObject      `json:"queue"`
	Result       *resultObject     `json:"result"`
	Error        *job.Error        `json:"error"`
	Usage        *job.Usage        `json:"usage"`
	Cost         costObject        `json:"cost"`
	Metadata     map[string]string `json:"metadata"`
}

type attemptObject struct {
	Worker    job.Worker `json:"worker"`
	StartedAt float64    `json:"started_at"`
	EndedAt   *float64   `json:"ended_at"`
	Outcome   *string    `json:"outcome"`
}

// queueObject says why a job waits. Position counts the waiting jobs that go before it and itself; the ETA is until it starts. Both are null while nothing is known.
type queueObject struct {
	Position   *int     `json:"position"`
	ETASeconds *float64 `json:"eta_seconds"`
	Reason     string   `json:"reason"`
}

type resultObject struct {
	StatusCode int             `json:"status_code"`
	Body       json.RawMessage `json:"body"`
}

// costObject: GPUSeconds is the time for which attempts at the job ran, in seconds.
type costObject struct {
	GPUSeconds float64 `json:"gpu_seconds"`
}

// render makes the object of v without the answer's body.
func (s *Server) render(v *view) *jobObject {
	j := &v.job
	o := &jobObject{
		ID: j.ID, Object: "job", Status: v.state.Public(), Endpoint: j.Endpoint, Model: j.Model, Priority: j.Class,
		CreatedAt: j.Created.Seconds(), StartedAt: seconds(v.started), FirstTokenAt: seconds(v.firstToken), ExpiresAt: j.Expires.Seconds(),
		Attempts: make([]attemptObject, 0, len(v.attempts)), Metadata: j.Metadata,
	}
	if j.Session != "" {
		o.Session = &j.Session
	}
	if o.Metadata == nil {
		o.Metadata = map[string]string{}
	}
	var ran job.Millis
	for _, a := range v.attempts {
		ao := attemptObject{Worker: a.Worker, StartedAt: a.Started.Seconds(), EndedAt: seconds(a.Ended)}
		if a.Outcome != "" {
			ao.Outcome = &a.Outcome
		}
		o.Attempts = append(o.Attempts, ao)
		switch {
		case a.Ended > a.Started:
			ran += a.Ended - a.Started
		case a.Ended == 0 && !v.ended():
			ran += max(0, s.deps.Results.Now()-a.Started)
		}
	}
	o.Cost.GPUSeconds = ran.Seconds()
	if out := v.outcome; out != nil {
		o.FinishedAt, o.Error, o.Usage = seconds(out.Finished), out.Error, out.Usage
		if out.StatusCode != 0 {
			o.Result = &resultObject{StatusCode: out.StatusCode, Body: json.RawMessage("null")}
		}
	}
	if o.Status == job.Queued {
		o.Queue = s.why(v)
	}
	return o
}

// seconds is m as unix seconds, nil for "not yet".
func seconds(m job.Millis) *float64 {
	if m == 0 {
		return nil
	}
	f := m.Seconds()
	return &f
}

// etag changes whenever a client's view of the job does, but for its place in the queue.
func (v *view) etag() string {
	var finished job.Millis
	if v.outcome != nil {
		finished = v.outcome.Finished
	}
	last := ""
	if n := len(v.attempts); n > 0 {
		last = v.attempts[n-1].Outcome
	}
	h := sha256.Sum256(fmt.Appendf(nil, "%s %s %d %s %d %d", v.job.ID, v.state.Public(), len(v.attempts), last, v.firstToken, finished))
	return `W/"` + hex.EncodeToString(h[:12]) + `"`
}

// matches tells whether an If-None-Match header names the tag.
func matches(header, tag string) bool {
	for part := range strings.SplitSeq(header, ",") {
		part = strings.TrimSpace(part)
		if part == "*" || part != "" && strings.TrimPrefix(part, "W/") == strings.TrimPrefix(tag, "W/") {
			return true
		}
	}
	return false
}

// document is a job object's JSON in pieces, so that a large answer need not be held whole: head, answer, tail.
type document struct {
	head, tail []byte
	answer     io.ReadCloser // nil if it stands in head
}

// WriteTo writes the document.
func (d *document) WriteTo(w io.Writer) (int64, error) {
	n, err := w.Write(d.head)
	total := int64(n)
	if err != nil || d.answer == nil {
		return total, err
	}
	m, err := io.Copy(w, d.answer)
	if total += m; err != nil {
		return total, err
	}
	n, err = w.Write(d.tail)
	return total + int64(n), err
}

func (d *document) Close() {
	if d.answer != nil {
		_ = d.answer.Close() // read only
	}
}

// describe is the job's object with its answer, whose JSON stands in it byte for byte. An answer that is no JSON becomes a string.
func (s *Server) describe(ctx context.Context, v *view) (*document, error) {
	s.locate(ctx, v)
	o := s.render(v)
	if o.Result == nil {
		return &document{head: encode(o)}, nil
	}
	answer, err := s.openJSON(ctx, v)
	if err != nil {
		return nil, err
	}
	if answer == nil {
		return &document{head: encode(o)}, nil
	}
	// The place of the answer is marked by a word that cannot stand anywhere else in the object.
	mark := `"` + rand.Text() + `"`
	o.Result.Body = json.RawMessage(mark)
	head, tail, _ := bytes.Cut(encode(o), []byte(mark))
	if v.outcome.Blob != "" {
		return &document{head: head, answer: answer, tail: tail}, nil
	}
	defer answer.Close() //nolint:errcheck // read only
	raw, err := io.ReadAll(answer)
	if err != nil {
		return nil, fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
	}
	return &document{head: slices.Concat(head, raw, tail)}, nil // head and tail share their memory
}

// openJSON opens the answer as JSON text. A large one is read through once before, so that a damaged object is a failure and never a cut answer.
func (s *Server) openJSON(ctx context.Context, v *view) (io.ReadCloser, error) {
	answer, err := s.openAnswer(ctx, v)
	if answer == nil || err != nil {
		return nil, err
	}
	if v.outcome.Blob != "" {
		valid, err := validJSON(answer)
		_ = answer.Close() // read only
		if err != nil {
			return nil, fmt.Errorf("checking the answer of job %s: %w", v.job.ID, err)
		}
		if answer, err = s.openAnswer(ctx, v); err != nil || valid {
			return answer, err
		}
	}
	defer answer.Close() //nolint:errcheck // read only
	raw, err := io.ReadAll(answer)
	if err != nil {
		return nil, fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
	}
	if !json.Valid(raw) {
		raw = encode(string(raw))
	}
	return io.NopCloser(bytes.NewReader(raw)), nil
}

// validJSON tells whether r holds exactly one JSON value, holding no more of it than its longest string. An error is one of reading.
func validJSON(r io.Reader) (bool, error) {
	dec := json.NewDecoder(r)
	dec.UseNumber()
	for depth, values := 0, 0; ; {
		t, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return depth == 0 && values == 1, nil
		}
		if err != nil {
			var syntax *json.SyntaxError
			if errors.As(err, &syntax) || errors.Is(err, io.ErrUnexpectedEOF) {
				_, err = io.Copy(io.Discard, r) // a damaged object shows at its end
			}
			return false, err
		}
		switch t {
		case json.Delim('{'), json.Delim('['):
			if depth == 0 {
				values++
			}
			depth++
		case json.Delim('}'), json.Delim(']'):
			depth--
		default:
			if depth == 0 {
				values++
			}
		}
	}
}

// writeJob answers with the job's object.
func (s *Server) writeJob(c echo.Context, status int, v *view) error {
	d, err := s.describe(c.Request().Context(), v)
	if err != nil {
		return err
	}
	defer d.Close()
	c.Response().Header().Set("ETag", v.etag())
	if d.answer == nil {
		return writeRaw(c, status, d.head)
	}
	c.Response().Header().Set(echo.HeaderContentType, "application/json")
	c.Response().WriteHeader(status)
	if _, err := d.WriteTo(c.Response()); err != nil {
		s.log.Warn("sending a large answer", "job", v.job.ID, "err", err)
		panic(http.ErrAbortHandler) // a cut answer must not look whole
	}
	return nil
}

// writeAnswer answers with what the engine answered to an ended job, as if the call had gone to the engine itself.
func (s *Server) writeAnswer(c echo.Context, v *view) error {
	o := v.outcome
	if o.StatusCode == 0 {
		return jobFailure(o.Error)
	}
	answer, err := s.openAnswer(c.Request().Context(), v)
	if err != nil {
		return err
	}
	if answer == nil {
		if o.StatusCode < 400 && o.ResultSize > 0 {
			return fail(http.StatusBadGateway, job.CodeInternal, "The answer of job %s is lost.", v.job.ID)
		}
		answer = io.NopCloser(bytes.NewReader(nil))
	}
	defer answer.Close() //nolint:errcheck // read only
	if o.StatusCode >= 400 || o.ResultSize <= blob.Threshold {
		raw, err := io.ReadAll(answer)
		if err != nil {
			return fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
		}
		return writeAnswerRaw(c, o.StatusCode, o.ContentType, raw)
	}
	in := bufio.NewReader(answer)
	if begin, err := in.Peek(in.Size()); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
	} else if f := unfit(o.StatusCode, begin); f != nil {
		return f
	}
	c.Response().Header().Set(echo.HeaderContentType, jsonType(o.ContentType))
	c.Response().WriteHeader(o.StatusCode)
	if _, err := io.Copy(c.Response(), in); err != nil {
		s.log.Warn("sending a large answer", "job", v.job.ID, "err", err)
		panic(http.ErrAbortHandler) // a cut answer must not look whole
	}
	return nil
}

// writeAnswerRaw passes an engine's whole answer on: a good one byte for byte, another as an error object.
func writeAnswerRaw(c echo.Context, status int, contentType string, body []byte) error {
	if f := unfit(status, body); f != nil {
		return f
	}
	h := c.Response().Header()
	if status >= 400 {
		body, contentType = engineError(status, body), "application/json"
		if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
			h.Set(headerRetryAfter, retryAfter(status))
		}
		if status == http.StatusConflict { // the job has ended with it
			h.Set("X-Should-Retry", "false")
		}
	}
	if err := writeRawAs(c, status, jsonType(contentType), body); err != nil {
		return errNobodyReads
	}
	return nil
}

// unfit is why an engine's answer, of which body is the whole or the beginning, cannot be passed on as it is; nil if it can.
func unfit(status int, body []byte) *failure {
	switch {
	case status == http.StatusUnauthorized, status == http.StatusProxyAuthRequired: // a client would take it for its own key
		return fail(http.StatusBadGateway, job.CodeEngineError, "The engine does not accept the key that this server has for it: it answered %d.", status)
	case status >= 400:
		return nil
	case status < 200 || status > 299:
		return fail(http.StatusBadGateway, job.CodeEngineError, "The engine answered %d.", status)
	case !bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")): // a page, or nothing, under a good status
		return fail(http.StatusBadGateway, job.CodeEngineError, "The engine's answer is no JSON object.")
	}
	return nil
}

// jsonType is the engine's content type if it is one of JSON, for clients fail on any other.
func jsonType(contentType string) string {
	media, _, err := mime.ParseMediaType(contentType)
	if err == nil && (media == "application/json" || strings.HasSuffix(media, "+json")) {
		return contentType
	}
	return "application/json"
}
