package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// view is a job as the stores know it.
type view struct {
	job        job.Job
	state      job.State
	attempts   []job.Attempt
	started    job.Millis
	firstToken job.Millis
	notBefore  job.Millis
	lastEvent  int64 // number of the last event as recorded
	outcome    *job.Outcome
	// place is where a waiting job stands; nil if that was not asked.
	place *results.Place
	// accepting: the record is there, and whether the message is stored is not known. answered: Redis has the answer; else answer may hold it, from DONE.
	accepting, answered bool
	answer              []byte
}

func (v *view) ended() bool { return v.state.Ended() }

func viewOfRecord(r *results.Record) *view {
	v := &view{
		job: r.Job, state: r.State.Public(), attempts: r.Attempts, firstToken: r.FirstToken, notBefore: r.NotBefore, lastEvent: r.N,
		outcome: r.Outcome, accepting: r.State == job.Accepting, answered: r.HasResult,
	}
	if len(v.attempts) > 0 {
		v.started = v.attempts[0].Started
	}
	if r.Outcome != nil {
		v.end(r.Outcome)
		v.lastEvent = r.N // `done` may have got a higher number than the outcome foresaw
	}
	return v
}

func viewOfOutcome(r *queue.Record) *view {
	v := &view{job: r.Job, answer: r.Result}
	v.end(&r.Outcome)
	return v
}

// end takes everything that the outcome tells from it, so that an ended job looks the same whichever store it is read from.
func (v *view) end(o *job.Outcome) {
	v.outcome, v.state = o, o.State
	v.attempts, v.started, v.firstToken, v.lastEvent = o.Attempts, o.Started, o.FirstToken, o.LastEvent
}

// find looks for tenant's job: Redis -> DONE -> WORK -> Redis and DONE once more, for it may have moved between the looks. Its failures are a 404, a 410 for an id
// that has outlived its retention, and a 503 where a store that must answer does not.
func (s *Server) find(ctx context.Context, t job.Tenant, id job.ID) (*view, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	v, err := s.search(ctx, id)
	switch {
	case err != nil:
		return nil, err
	case v == nil && s.outlived(id, s.cfg.MaxDeadline):
		return nil, s.gone(id)
	case v == nil, v.job.Tenant != t, v.outcome != nil && v.outcome.Erased:
		return nil, noJob(string(id))
	case v.ended() && s.deps.Results.Now().Time().After(v.job.Expires.Time().Add(s.cfg.Retention)):
		return nil, s.gone(id)
	}
	return v, nil
}

// search is find without judging what was found; nil is nothing anywhere.
func (s *Server) search(ctx context.Context, id job.ID) (*view, error) {
	rec, err := s.deps.Results.Get(ctx, id)
	if err == nil {
		return viewOfRecord(rec), nil
	}
	if !errors.Is(err, results.ErrNotFound) {
		return nil, fmt.Errorf("reading job %s: %w", id, err)
	}
	if v, err := s.searchDone(ctx, id); v != nil || err != nil {
		return v, err
	}
	stored, err := s.deps.Queue.Find(ctx, "", id)
	if err == nil {
		return &view{job: stored.Job, state: job.Queued}, nil
	}
	if !errors.Is(err, queue.ErrNotFound) {
		return nil, fmt.Errorf("looking for the message of job %s: %w", id, err)
	}
	rec, err = s.deps.Results.Get(ctx, id)
	if err == nil {
		return viewOfRecord(rec), nil
	}
	if !errors.Is(err, results.ErrNotFound) {
		return nil, fmt.Errorf("reading job %s: %w", id, err)
	}
	return s.searchDone(ctx, id)
}

func (s *Server) searchDone(ctx context.Context, id job.ID) (*view, error) {
	rec, err := s.deps.Queue.FindOutcome(ctx, id)
	switch {
	case err == nil:
		return viewOfOutcome(rec), nil
	case errors.Is(err, queue.ErrNotFound):
		return nil, nil
	default:
		return nil, fmt.Errorf("looking for the outcome of job %s: %w", id, err)
	}
}

// outlived tells whether a job of that id with such a deadline would be past its retention.
func (s *Server) outlived(id job.ID, deadline time.Duration) bool {
	return s.deps.Results.Now().Time().After(id.Time().Add(deadline + s.cfg.Retention))
}

func (s *Server) gone(id job.ID) *failure {
	return fail(http.StatusGone, job.CodeResultExpired, "The result of job %s is no longer kept.", id)
}

func noJob(id string) *failure {
	return fail(http.StatusNotFound, job.CodeJobNotFound, "There is no job %q.", clip(id)).at("id")
}

// clip bounds a client's text in a message.
func clip(text string) string {
	const most = 100
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// openAnswer opens the engine's answer to an ended job. nil is no answer: the job ended without one, or none was kept.
func (s *Server) openAnswer(ctx context.Context, v *view) (io.ReadCloser, error) {
	if v.outcome == nil || v.outcome.ResultSize == 0 {
		return nil, nil
	}
	if v.outcome.Blob != "" {
		r, err := s.deps.Blobs.Get(ctx, v.outcome.Blob)
		if err != nil {
			return nil, fmt.Errorf("opening the answer of job %s: %w", v.job.ID, err)
		}
		return r, nil
	}
	short, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	answer := v.answer
	if v.answered {
		var err error
		if answer, err = s.deps.Results.Result(short, v.job.ID); err != nil && !errors.Is(err, results.ErrNotFound) {
			return nil, fmt.Errorf("reading the answer of job %s: %w", v.job.ID, err)
		}
	}
	if answer == nil { // the record was rebuilt without its answer
		rec, err := s.deps.Queue.Outcome(short, v.job.Tenant, v.job.Group, v.job.ID)
		if err != nil && !errors.Is(err, queue.ErrNotFound) {
			return nil, fmt.Errorf("reading the stored answer of job %s: %w", v.job.ID, err)
		}
		if err == nil {
			answer = rec.Result
		}
	}
	if answer == nil {
		return nil, nil
	}
	return io.NopCloser(bytes.NewReader(answer)), nil
}

// putBody stores a body that is too large for a message under j's own name, and notes it in j. It returns the body that goes into the message and the record: nil
// for one that was stored apart.
func (s *Server) putBody(ctx context.Context, j *job.Job, body []byte) ([]byte, error) {
	if len(body) <= blob.Threshold {
		return body, nil
	}
	ctx, cancel := context.WithTimeout(ctx, putTimeout)
	defer cancel()
	if _, err := s.deps.Blobs.Put(ctx, job.RequestBlob(j.ID), bytes.NewReader(body)); err != nil {
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, blob.ErrUnavailable) {
			return nil, unavailable(err, "The object store does not answer: try again later.")
		}
		return nil, fmt.Errorf("storing the body of job %s: %w", j.ID, err)
	}
	j.Blob = job.RequestBlob(j.ID)
	return nil, nil
}

// putTimeout bounds the upload of a large body, dropTimeout the removal of what nobody needs any more.
const (
	putTimeout  = 30 * time.Second
	dropTimeout = 2 * time.Second
)

// dropBlob removes an object if it has a name. Best effort: what stays is swept by whoever sweeps objects without a job.
func (s *Server) dropBlob(ctx context.Context, name string) {
	if name == "" {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dropTimeout)
	defer cancel()
	if err := s.deps.Blobs.Delete(ctx, name); err != nil {
		s.log.Warn("removing an object that is no longer needed", "object", name, "err", err)
	}
}
