package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// createJob answers POST /v1/jobs.
func (s *Server) createJob(c echo.Context) error {
	body, o, release, err := s.readBody(c)
	if err != nil {
		return err
	}
	defer release()
	sub, r, err := s.parseJob(o)
	if err != nil {
		return err
	}
	if sub.dedupe, err = dedupeOf(c, body); err != nil {
		return err
	}
	t := tenantOf(c)
	sub.job.Tenant = t
	at, err := s.admit(c.Request().Context(), &sub.job, r, false)
	if err != nil && !sub.refuse(err) {
		return prefixed("body.", err)
	}
	sub.lane = at.lane
	v, err := s.submit(c.Request().Context(), t, sub)
	if err != nil {
		return err
	}
	return s.writeAccepted(c, v)
}

// prefixed puts a prefix before the parameter that a failure names.
func prefixed(prefix string, err error) error {
	var f *failure
	if errors.As(err, &f) && f.body.Param != nil {
		f.at(prefix + *f.body.Param)
	}
	return err
}

// parseJob reads the fields of POST /v1/jobs strictly: what is not supported is refused and never silently ignored.
func (s *Server) parseJob(o *job.Object) (*submission, *request, error) {
	for _, f := range o.Fields {
		switch f.Key {
		case "endpoint", "body", "priority", "session", "stream", "deadline", "queue_timeout", "run_timeout", "metadata":
		case "webhook":
			return nil, nil, invalid(f.Key, job.CodeUnsupportedParameter, "webhook is not supported by this server yet.")
		default:
			return nil, nil, invalid(clip(f.Key), job.CodeUnsupportedParameter, "There is no field %q.", clip(f.Key))
		}
	}
	j := job.Job{Endpoint: job.ChatCompletions, Class: job.Standard, Group: job.NoGroup}
	if text, given, err := stringField(o, "endpoint"); err != nil {
		return nil, nil, err
	} else if given {
		if j.Endpoint, err = job.ParseEndpoint(text); err != nil {
			return nil, nil, invalid("endpoint", job.CodeInvalidValue, "%v.", err)
		}
	}
	raw := o.Get("body")
	switch {
	case isNull(raw):
		return nil, nil, missing("body")
	case raw[0] != '{':
		return nil, nil, invalid("body", job.CodeInvalidType, "body must be an object: the engine's request.")
	}
	inner, err := job.ParseObject(raw)
	if err != nil {
		return nil, nil, invalid("body", job.CodeInvalidJSON, "body cannot be read: %v.", err)
	}
	r, err := parseRequest(j.Endpoint, raw, inner, "body.")
	if err != nil {
		return nil, nil, err
	}
	if text, given, err := stringField(o, "priority"); err != nil {
		return nil, nil, err
	} else if given {
		if j.Class, err = job.ParseClass(text); err != nil {
			return nil, nil, invalid("priority", job.CodeInvalidValue, "%v.", err)
		}
	}
	if text, _, err := stringField(o, "session"); err != nil {
		return nil, nil, err
	} else if utf8.RuneCountInString(text) > maxSession {
		return nil, nil, invalid("session", job.CodeInvalidValue, "session has more than %d characters.", maxSession)
	} else {
		j.Session = job.Session(text)
	}
	j.Events = j.Endpoint.Generates()
	if raw := o.Get("stream"); !isNull(raw) {
		if json.Unmarshal(raw, &j.Events) != nil {
			return nil, nil, invalid("stream", job.CodeInvalidType, "stream must be true or false.")
		}
		if j.Events && !j.Endpoint.Generates() {
			return nil, nil, invalid("stream", job.CodeInvalidValue, "%s has no token events to keep: leave stream out.", j.Endpoint)
		}
	}
	sub := &submission{body: raw, deadline: s.cfg.DefaultDeadline}
	queueTimeout, runTimeout := time.Duration(0), s.cfg.DefaultRunTimeout
	for _, f := range []struct {
		name string
		to   *time.Duration
		max  time.Duration
		unix bool
	}{
		{"deadline", &sub.deadline, s.cfg.MaxDeadline, true},
		{"queue_timeout", &queueTimeout, s.cfg.MaxDeadline, false},
		{"run_timeout", &runTimeout, MaxRunTimeout, false},
	} {
		if err := s.timeField(o, f.name, f.to, f.max, f.unix); err != nil {
			return nil, nil, err
		}
	}
	j.QueueTimeout, j.RunTimeout = job.Millis(queueTimeout.Milliseconds()), job.Millis(runTimeout.Milliseconds())
	if j.Metadata, err = metadataField(o); err != nil {
		return nil, nil, err
	}
	j.Model, j.Cost, j.BodySize = r.model, job.EstimateCost(inner, raw), int64(len(raw))
	sub.job = j
	return sub, r, nil
}

func stringField(o *job.Object, name string) (text string, given bool, err error) {
	raw := o.Get(name)
	if isNull(raw) {
		return "", false, nil
	}
	if json.Unmarshal(raw, &text) != nil {
		return "", false, invalid(name, job.CodeInvalidType, "%s must be a string.", name)
	}
	return text, true, nil
}

// timeField reads a length of time like "90s", or, where unix allows it, a time as unix seconds, into *to, which keeps its default if the field is absent.
func (s *Server) timeField(o *job.Object, name string, to *time.Duration, most time.Duration, unix bool) error {
	raw := o.Get(name)
	if isNull(raw) {
		return nil
	}
	var d time.Duration
	var text string
	var at float64
	switch {
	case json.Unmarshal(raw, &text) == nil:
		var err error
		if d, err = time.ParseDuration(text); err != nil {
			return invalid(name, job.CodeInvalidValue, "%s is %q: it must be a length of time like \"90s\" or \"10m\".", name, clip(text))
		}
	case unix && json.Unmarshal(raw, &at) == nil:
		ms := at*1000 - float64(s.deps.Results.Now())
		if ms > float64(most.Milliseconds()) {
			return invalid(name, job.CodeInvalidValue, "%s is more than %v from now.", name, most)
		}
		d = time.Duration(max(ms, -1)) * time.Millisecond
	case unix:
		return invalid(name, job.CodeInvalidType, "%s must be a string like \"10m\", or a time in unix seconds.", name)
	default:
		return invalid(name, job.CodeInvalidType, "%s must be a string like \"10m\".", name)
	}
	switch {
	case d < time.Millisecond:
		return invalid(name, job.CodeInvalidValue, "%s must lie in the future.", name)
	case d > most:
		return invalid(name, job.CodeInvalidValue, "%s is %v: at most %v is allowed.", name, d, most)
	}
	*to = d
	return nil
}

// Bounds of metadata.
const (
	maxPairs         = 16
	maxMetadataKey   = 64
	maxMetadataValue = 512
)

func metadataField(o *job.Object) (map[string]string, error) {
	raw := o.Get("metadata")
	if isNull(raw) {
		return nil, nil
	}
	var m map[string]string
	if raw[0] != '{' || json.Unmarshal(raw, &m) != nil {
		return nil, invalid("metadata", job.CodeInvalidType, "metadata must be an object of strings.")
	}
	if len(m) > maxPairs {
		return nil, invalid("metadata", job.CodeInvalidValue, "metadata has %d pairs: at most %d are allowed.", len(m), maxPairs)
	}
	inner, err := job.ParseObject(raw)
	if err != nil {
		return nil, invalid("metadata", job.CodeInvalidJSON, "metadata cannot be read: %v.", err)
	}
	for _, f := range inner.Fields {
		switch {
		case isNull(f.Value): // which decoding takes for an empty string
			return nil, invalid("metadata", job.CodeInvalidType, "metadata must be an object of strings.")
		case utf8.RuneCountInString(f.Key) > maxMetadataKey:
			return nil, invalid("metadata", job.CodeInvalidValue, "The metadata key %q has more than %d characters.", clip(f.Key), maxMetadataKey)
		case utf8.RuneCountInString(m[f.Key]) > maxMetadataValue:
			return nil, invalid("metadata", job.CodeInvalidValue, "The metadata value of %q has more than %d characters.", clip(f.Key), maxMetadataValue)
		}
	}
	return m, nil
}

// jobID reads the id in the path. What has not an id's form names no job.
func jobID(c echo.Context) (job.ID, error) {
	text := c.Param("id")
	id, err := job.ParseID(text)
	if err != nil {
		return "", noJob(text)
	}
	return id, nil
}

// getJob answers GET /v1/jobs/{id}: at once, or with wait when something has changed.
func (s *Server) getJob(c echo.Context) error {
	id, err := jobID(c)
	if err != nil {
		return err
	}
	wait, err := waitParam(c)
	if err != nil {
		return err
	}
	v, err := s.find(c.Request().Context(), tenantOf(c), id)
	if err != nil {
		return err
	}
	known := c.Request().Header.Get("If-None-Match")
	if wait > 0 {
		before := v.state.Public()
		changed := func(v *view) bool {
			if known != "" && !v.ended() {
				return !matches(known, v.etag())
			}
			return v.ended() || v.state.Public() != before
		}
		if !changed(v) {
			ctx, cancel := context.WithTimeout(c.Request().Context(), wait)
			v, err = s.await(ctx, v, changed)
			cancel()
			if err != nil {
				return err
			}
		}
	}
	if known != "" && matches(known, v.etag()) {
		c.Response().Header().Set("ETag", v.etag())
		return c.NoContent(http.StatusNotModified)
	}
	if !v.ended() {
		s.locate(c.Request().Context(), v)
		c.Response().Header().Set(headerRetryAfter, s.pollHint(v))
	}
	return s.writeJob(c, http.StatusOK, v)
}

// waitParam reads ?wait=, a length of time like 30s or a number of seconds. Longer than a minute is a minute.
func waitParam(c echo.Context) (time.Duration, error) {
	text := c.QueryParam("wait")
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		d, err = time.ParseDuration(text + "s")
	}
	if err != nil || d < 0 {
		return 0, invalid("wait", job.CodeInvalidValue, "wait is %q: it must be a length of time like 30s, at most %v.", clip(text), maxWait)
	}
	return min(d, maxWait), nil
}

// listJobs answers GET /v1/jobs: the tenant's own, newest first. The objects come without the answers' bodies, which GET /v1/jobs/{id} has.
func (s *Server) listJobs(c echo.Context) error {
	limit, err := limitParam(c)
	if err != nil {
		return err
	}
	f := results.Filter{Model: job.Model(c.QueryParam("model")), Session: job.Session(c.QueryParam("session"))}
	if text := c.QueryParam("status"); text != "" {
		var ok bool
		if f.State, ok = job.ParseState(text); !ok {
			return invalid("status", job.CodeInvalidValue, "status is %q: it must be one of %s.", clip(text), stateNames())
		}
	}
	var after job.ID
	if text := c.QueryParam("after"); text != "" {
		if after, err = job.ParseID(text); err != nil {
			return unknownAfter(text)
		}
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), storeTimeout)
	defer cancel()
	records, more, err := s.deps.Results.List(ctx, tenantOf(c), f, after, limit)
	if errors.Is(err, results.ErrNotFound) {
		return unknownAfter(string(after))
	}
	if err != nil {
		return fmt.Errorf("listing jobs: %w", err)
	}
	views := make([]*view, 0, len(records))
	for _, r := range records {
		views = append(views, viewOfRecord(r))
	}
	s.locate(ctx, views...)
	objects := make([]*jobObject, 0, len(views))
	for _, v := range views {
		objects = append(objects, s.render(v))
	}
	return writeJSON(c, http.StatusOK, newList(objects, func(o *jobObject) string { return string(o.ID) }, more))
}

func stateNames() string {
	names := make([]string, 0, 6)
	for _, st := range job.PublicStates() {
		names = append(names, string(st))
	}
	return strings.Join(names, ", ")
}

// cancelPatience is how long a cancel waits for the running attempt to end, so that its answer tells the end.
const cancelPatience = 2 * time.Second

// cancelJob answers POST /v1/jobs/{id}/cancel.
func (s *Server) cancelJob(c echo.Context) error {
	id, err := jobID(c)
	if err != nil {
		return err
	}
	v, err := s.find(c.Request().Context(), tenantOf(c), id)
	if err != nil {
		return err
	}
	// The wish is carried out though its client may leave.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request().Context()), storeTimeout)
	defer cancel()
	if v, err = s.cancel(ctx, v); err != nil {
		return err
	}
	if v.ended() && v.state != job.Cancelled {
		f := fail(http.StatusConflict, job.CodeAlreadyEnded, "Job %s has ended already: it is %s.", id, v.state)
		f.final = true
		return f
	}
	return s.writeJob(c, http.StatusOK, v)
}

// cancel asks that v's job ends. One that waits is ended here and now; one that runs is told to its worker, and given a moment. The job as it then is comes back.
func (s *Server) cancel(ctx context.Context, v *view) (*view, error) {
	if v.ended() {
		return v, nil
	}
	// The wish is stored first: whoever claims the job from here on ends it. Without a record (a wiped store) the outcome below does the same.
	rec, err := s.deps.Results.AskCancel(ctx, v.job.ID)
	if err != nil && !errors.Is(err, results.ErrNotFound) {
		return nil, fmt.Errorf("asking to cancel job %s: %w", v.job.ID, err)
	}
	s.deps.Relay.Cancel(v.job.ID)
	if rec != nil && rec.State.Ended() {
		return viewOfRecord(rec), nil
	}
	if rec == nil || rec.State != job.Running {
		return s.endCancelled(ctx, v, rec)
	}
	short, cancel := context.WithTimeout(ctx, cancelPatience)
	defer cancel()
	return s.await(short, viewOfRecord(rec), (*view).ended)
}

// endCancelled writes `cancelled` as the outcome, unless another is there already: then that is the job's end.
func (s *Server) endCancelled(ctx context.Context, v *view, rec *results.Record) (*view, error) {
	stored, err := s.settler.End(ctx, &v.job, rec, job.Outcome{
		State: job.Cancelled, Error: job.NewError(job.TypeInvalidRequest, job.CodeCancelled, "The job was cancelled."),
	})
	if stored == nil {
		return nil, err
	}
	if err != nil { // the outcome stands, and the rest is made up for
		s.log.Warn("recording a cancelled job", "job", v.job.ID, "err", err)
	}
	return viewOfOutcome(stored), nil
}

// deleteJob answers DELETE /v1/jobs/{id}: the job's request, answer and record are erased. One that has not ended is cancelled first.
func (s *Server) deleteJob(c echo.Context) error {
	id, err := jobID(c)
	if err != nil {
		return err
	}
	v, err := s.find(c.Request().Context(), tenantOf(c), id)
	if err != nil {
		return err
	}
	if err := s.erase(c, v); err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, deletedObject{ID: id, Object: "job", Deleted: true})
}

// endNow cancels a job, and returns it ended.
func (s *Server) endNow(ctx context.Context, v *view) (*view, error) {
	v, err := s.cancel(ctx, v)
	if err != nil || v.ended() {
		return v, err
	}
	rec, err := s.deps.Results.Get(ctx, v.job.ID) // its worker is slow to stop: the outcome need not wait for it
	if err != nil && !errors.Is(err, results.ErrNotFound) {
		return nil, fmt.Errorf("reading job %s: %w", v.job.ID, err)
	}
	return s.endCancelled(ctx, v, rec)
}

// erase erases v's request, answer and record, and ends it before if it has not ended.
func (s *Server) erase(c echo.Context, v *view) error {
	id := v.job.ID
	if v.job.InBatch() { // whose files must have each of its lines
		f := fail(http.StatusConflict, job.CodeInvalidRequest, "Job %s is a line of the batch %s, which keeps it: delete the batch's files instead.", id, v.job.Group).at("id")
		f.final = true
		return f
	}
	// Once begun it is carried out though its client may leave.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Request().Context()), 2*storeTimeout)
	defer cancel()
	v, err := s.endNow(ctx, v)
	if err != nil {
		return err
	}
	// Order: DONE -> objects -> record. A crash in between leaves a record whose deletion can be asked for again.
	if err := s.deps.Queue.Erase(ctx, v.job.Tenant, v.job.Group, id); err != nil && !errors.Is(err, queue.ErrNotFound) {
		return fmt.Errorf("erasing the outcome of job %s: %w", id, err)
	}
	for _, name := range []string{v.job.Blob, v.outcome.Blob} {
		if name == "" {
			continue
		}
		if err := s.deps.Blobs.Delete(ctx, name); err != nil {
			return fmt.Errorf("removing an object of job %s: %w", id, err)
		}
	}
	if err := s.deps.Results.Delete(ctx, v.job.Tenant, id); err != nil && !errors.Is(err, results.ErrNotFound) {
		return fmt.Errorf("deleting the record of job %s: %w", id, err)
	}
	s.deps.Relay.Bell(id)
	return nil
}

type deletedObject struct {
	ID      job.ID `json:"id"`
	Object  string `json:"object"`
	Deleted bool   `json:"deleted"`
}

// pathParam is a path parameter with its escapes decoded: the router leaves them where a path has any.
func pathParam(c echo.Context, name string) string {
	text := c.Param(name)
	if c.Request().URL.RawPath == "" {
		return text
	}
	if plain, err := url.PathUnescape(text); err == nil {
		return plain
	}
	return text
}
