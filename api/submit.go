package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
	"github.com/millrace/millrace/internal/results"
)

// submission is a durable job that wants to enter.
type submission struct {
	// job is complete but for its id, times and body reference.
	job  job.Job
	body []byte
	lane queue.Lane
	// refusal is why it may not enter, nil if it may: it is told once it is sure that the submit repeats no earlier one.
	refusal *failure
	// deadline is the length of time from Created to Expires.
	deadline time.Duration
	dedupe
}

// refuse keeps a refusal by admission for later, and tells whether it is one that an earlier submit of the same job does not meet: one that time heals.
func (sub *submission) refuse(err error) bool {
	var f *failure
	if !errors.As(err, &f) || f.status != http.StatusTooManyRequests {
		return false
	}
	sub.refusal = f
	return true
}

// dedupe tells which earlier submit a new one may repeat.
type dedupe struct {
	// key is the hash under which the submit is known; hash is that of what it asks, "" if the key is implied.
	key, hash string
	// implied: the client sent no key of its own, and the key stands for its body alone. Such a submit repeats an earlier one only if it says that it is a retry.
	implied, retry bool
}

// fresh tells whether the submit is a new one for sure. What its key stood for does not count then.
func (d dedupe) fresh() bool { return d.implied && !d.retry }

// maxKey bounds an idempotency key in bytes.
const maxKey = 255

// dedupeOf reads the request's headers. body is the whole request's.
func dedupeOf(c echo.Context, body []byte) (dedupe, error) {
	d, err := retryOf(c.Request().Header)
	if err != nil {
		return dedupe{}, err
	}
	if d.implied { // a retry has the very bytes of what it repeats
		h := sha256.New()
		_, _ = io.WriteString(h, route(c)+"\n") // a hash never fails
		_, _ = h.Write(body)
		return d.of(hex.EncodeToString(h.Sum(nil))), nil
	}
	d.hash, err = hashBody(route(c), body)
	return d, err
}

// retryOf reads from a request's headers which earlier create it may repeat. What is asked is not known yet: see dedupe.of.
func retryOf(h http.Header) (dedupe, error) {
	key := h.Get(headerKey)
	switch {
	case len(key) > maxKey:
		return dedupe{}, invalid(headerKey, job.CodeInvalidValue, "The idempotency key has %d bytes: at most %d are allowed.", len(key), maxKey)
	case key != "":
		return dedupe{key: hashKey("client", key)}, nil
	}
	n, err := strconv.Atoi(h.Get(headerRetryCount))
	return dedupe{implied: true, retry: err == nil && n > 0}, nil
}

// of completes d with the hash of what is asked. An implied key says it already.
func (d dedupe) of(hash string) dedupe {
	if d.implied {
		d.key = hashKey("implied", hash)
	} else {
		d.hash = hash
	}
	return d
}

// submit makes the job durable and returns it as it then is: a fresh one is queued, a repeated one may be anywhere.
//
// The order of the writes, and what a crash after each leaves:
//
//  1. the key, bound to the id: a retry takes the id over. That of a fresh one with a small body is bound with the record.
//  2. a large body, under the id's name: an object without a job, which is swept.
//  3. the record, as accepting: the reconciler removes it, then the key.
//  4. the message. From here on the job exists and runs, whatever happens to us: the reconciler makes the record queued.
//  5. the record, as queued. If Redis goes away here the client gets its 202 all the same.
//
// Once begun the writes are not cut by a client that leaves: they have a deadline of their own.
func (s *Server) submit(ctx context.Context, t job.Tenant, sub *submission) (*view, error) {
	v, repeated, err := s.store(context.WithoutCancel(ctx), t, sub)
	var f *failure
	switch {
	case err == nil && repeated:
		s.metrics.submit("work", "repeated")
	case err == nil:
		s.metrics.submit("work", "stored")
	case errors.As(err, &f) && f.status < 500, errors.Is(err, queue.ErrFull):
		s.metrics.submit("work", "refused")
	default:
		s.metrics.submit("work", "unavailable")
	}
	return v, err
}

func (s *Server) store(ctx context.Context, t job.Tenant, sub *submission) (v *view, repeated bool, err error) {
	short, cancel := context.WithTimeout(ctx, submitTimeout)
	defer cancel()
	now := s.deps.Results.Now()
	j := &sub.job
	j.ID, j.Tenant, j.Created, j.Expires = job.NewID(now.Time()), t, now, now+job.Millis(sub.deadline.Milliseconds())
	j.Key, j.BodyHash = sub.key, sub.hash
	if c := callerOf(ctx); c != nil {
		j.APIKey = c.identity.Key.ID
	}
	takenOver := false
	if !sub.fresh() {
		earlier, held, err := s.reserve(short, t, sub)
		if err != nil {
			return nil, false, err
		}
		if earlier != nil {
			return earlier, true, nil
		}
		takenOver = held
	}
	if c := callerOf(ctx); c != nil && sub.refusal == nil { // what repeats an earlier submit was answered above
		var f *failure
		if err := s.allow(ctx, c.identity, j.Expected()); errors.As(err, &f) {
			sub.refusal = f
		}
	}
	if sub.refusal != nil {
		if !sub.fresh() {
			s.releaseKey(ctx, j, takenOver)
		}
		return nil, false, sub.refusal
	}
	accept := s.deps.Results.Accept
	if sub.fresh() { // the key serves later retries, and nothing depends on what it was
		accept = s.deps.Results.AcceptFresh
	}
	if sub.fresh() && len(sub.body) > blob.Threshold { // they may come while the body is stored
		if err := s.deps.Results.BindKey(short, t, sub.key, j.ID); err != nil {
			return nil, false, fmt.Errorf("binding an idempotency key: %w", err)
		}
	}
	body, err := s.putBody(ctx, j, sub.body)
	if err != nil {
		s.releaseKey(ctx, j, takenOver)
		return nil, false, err
	}
	if len(sub.body) > blob.Threshold { // the upload had its own time
		cancel()
		short, cancel = context.WithTimeout(ctx, submitTimeout)
		defer cancel()
	}
	limits, batched := s.acceptLimits(ctx)
	accepted, err := accept(short, j, body, limits)
	var over *results.LimitError
	switch {
	case accepted != nil && accepted.State != job.Accepting: // somebody else submitted the same id first
		v, err := s.find(short, t, j.ID)
		return v, true, err
	case errors.As(err, &over) && accepted != nil:
		s.discard(ctx, j, accepted.Since, takenOver)
		return nil, false, s.overLimit(j, over, batched)
	case errors.As(err, &over):
		s.releaseKey(ctx, j, takenOver)
		return nil, false, s.overLimit(j, over, batched)
	case err != nil:
		// It may be there or not; nothing is published, so the reconciler will remove it.
		return nil, false, fmt.Errorf("recording job %s: %w", j.ID, err)
	}
	err = s.publisher.Enqueue(short, queue.Work, sub.lane, &queue.Message{Job: *j, Body: body})
	switch {
	case err == nil, errors.Is(err, queue.ErrExists):
	case errors.Is(err, queue.ErrFull), errors.Is(err, queue.ErrRefused):
		s.discard(ctx, j, accepted.Since, takenOver)
		return nil, false, fmt.Errorf("queueing job %s: %w", j.ID, err)
	default:
		// Whether it is stored is not known: the record stays accepting, a retry with the same key publishes the same id again, and the reconciler settles the rest.
		return nil, false, fmt.Errorf("queueing job %s: %w", j.ID, err)
	}
	if sub.lane == queue.TenantLane(j.Tenant) {
		s.deps.Relay.Lined(relay.Lined{Model: j.Model, Tenant: j.Tenant, Class: j.Class})
	}
	// The point of no return: the job is durable. If we crash here the client got no answer, the job runs, and a retry with the same key finds it.
	record, done := context.WithTimeout(ctx, queuedTimeout)
	defer done()
	if err := s.deps.Results.Queued(record, j, body); err != nil {
		s.log.Warn("a job is stored, its record is not marked queued yet", "job", j.ID, "err", err)
	}
	came := time.Now()
	s.pace.came(came, j.Model, j.Expected(), false)
	s.traffic.came(came, j.Model, j.Expected())
	return &view{job: *j, state: job.Queued, place: &accepted.Place}, false, nil
}

// queuedTimeout bounds the last write of a submit, without which the job is durable already.
const queuedTimeout = time.Second

// reserve binds the submission's key to its id. It returns the job that the key stands for already, or sets the submission's job to the id that a key without a job is bound to (held).
func (s *Server) reserve(ctx context.Context, t job.Tenant, sub *submission) (earlier *view, held bool, err error) {
	j := &sub.job
	if at := s.wholeAt.Load(); at == nil || time.Since(*at) > wholeFor {
		if err := s.keysKnown(ctx); err != nil {
			return nil, false, err
		}
	}
	ttl := time.Duration(0)
	if sub.implied {
		ttl = results.ImpliedKeyTTL
	}
	bound, mine, err := s.deps.Results.ReserveKey(ctx, t, sub.key, results.KeyEntry{ID: j.ID, Hash: sub.hash}, ttl)
	if err != nil {
		return nil, false, fmt.Errorf("reserving an idempotency key: %w", err)
	}
	if mine {
		// If the store was wiped since we looked, the key that stood in it is not restored yet.
		if err := s.keysKnown(ctx); err != nil {
			s.releaseKey(ctx, j, false)
			return nil, false, err
		}
		return nil, false, nil
	}
	if !sub.implied && bound.Hash != sub.hash {
		f := fail(http.StatusConflict, job.CodeIdempotencyConflict, "The idempotency key stands for another request already: use a new key for a new request.").at(headerKey)
		f.final = true
		return nil, false, f
	}
	v, err := s.search(ctx, bound.ID)
	switch {
	case err != nil:
		return nil, false, err
	case v == nil:
		j.ID = bound.ID // the submit that bound the key went no further
		return nil, true, nil
	case v.outcome != nil && v.outcome.Erased && sub.implied: // whoever deleted it had its answer: this repeats another
		if err := s.deps.Results.BindKey(ctx, t, sub.key, j.ID); err != nil {
			return nil, false, fmt.Errorf("binding an idempotency key: %w", err)
		}
		return nil, false, nil
	case v.outcome != nil && v.outcome.Erased:
		f := fail(http.StatusConflict, job.CodeIdempotencyConflict, "The idempotency key stands for a job that was deleted: use a new key.").at(headerKey)
		f.final = true
		return nil, false, f
	case v.accepting:
		// Whether its message is stored is not known: the same id is published again, with the very job that was recorded.
		*j = v.job
		return nil, true, nil
	}
	return v, false, nil
}

// wholeFor is how long the store counts as whole before a key is reserved, once it was found so. After that it is asked again in any case.
const wholeFor = 250 * time.Millisecond

// keysKnown returns nil if the store's keys are all there: after a wipe they are not until the dispatcher has rebuilt them.
func (s *Server) keysKnown(ctx context.Context) error {
	now := time.Now()
	wiped, err := s.deps.Results.Wiped(ctx)
	if err != nil {
		return fmt.Errorf("asking whether the result store is whole: %w", err)
	}
	if wiped {
		s.wholeAt.Store(nil)
		return unavailable(nil, "The result store is being rebuilt: requests that may repeat an earlier one must wait. Try again later.")
	}
	s.wholeAt.Store(&now)
	return nil
}

// discard undoes a submit whose message was refused for good. An id that was taken over may have been published by an earlier try: it stays, and the reconciler looks.
func (s *Server) discard(ctx context.Context, j *job.Job, since job.Millis, takenOver bool) {
	if takenOver {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dropTimeout)
	defer cancel()
	removed, err := s.deps.Results.Discard(ctx, j, since)
	if err != nil {
		s.log.Warn("removing the record of a refused job: the reconciler will", "job", j.ID, "err", err)
	}
	if err != nil || !removed {
		return // somebody took it over meanwhile
	}
	s.releaseKey(ctx, j, false)
}

// releaseKey unbinds j's key after a submit that came to nothing. Best effort: a key without a record is taken over. A large body stays till it is swept: another try of the same id, which may have come meanwhile, stores it under the same name.
func (s *Server) releaseKey(ctx context.Context, j *job.Job, takenOver bool) {
	if takenOver {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dropTimeout)
	defer cancel()
	if err := s.deps.Results.ReleaseKey(ctx, j.Tenant, j.Key, j.ID); err != nil {
		s.log.Warn("releasing an idempotency key", "job", j.ID, "err", err)
	}
}
