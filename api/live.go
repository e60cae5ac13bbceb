package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/relay"
)

// maxDeaths is how many workers may die while running one held call before the call is blamed.
const maxDeaths = 3

// call is a job that is answered on its own connection, which this process holds.
type call struct {
	message *queue.Message
	seat    *relay.Seat
	// stop ends the call with what its client is told: a *failure or errStopped.
	stop context.CancelCauseFunc
	// shown: the client has bytes of an engine's answer, so that another attempt can only go on with them.
	shown atomic.Bool

	// Owned by the goroutine that looks after held calls.
	deaths      int
	silentSince time.Time // when the holder was first missed
	brokenSince time.Time // when nobody was first seen to hold a call whose stream the client has begun to get
	hopelessAt  time.Time // since when each look found that no worker can be started for it
	published   time.Time
}

// despair notes whether a call is hopeless now, and tells whether it has been so at each look for long: one that was let in is not ended for what passes.
func (c *call) despair(hopeless bool, now time.Time, long time.Duration) bool {
	switch {
	case !hopeless:
		c.hopelessAt = time.Time{}
	case c.hopelessAt.IsZero():
		c.hopelessAt = now
	}
	return hopeless && now.Sub(c.hopelessAt) >= long
}

// doubt notes that starts fail while one is tried: from then on it counts how long the call is without hope.
func (c *call) doubt(now time.Time) {
	if c.hopelessAt.IsZero() {
		c.hopelessAt = now
	}
}

// held are the calls of this process.
type held struct {
	mu    sync.Mutex
	calls map[job.ID]*call
}

func (h *held) len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.calls)
}

// add takes c unless there are limit already.
func (h *held) add(c *call, limit int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.calls) >= limit {
		return false
	}
	if h.calls == nil {
		h.calls = make(map[job.ID]*call)
	}
	h.calls[c.message.Job.ID] = c
	return true
}

func (h *held) remove(id job.ID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.calls, id)
}

func (h *held) all() []*call {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := make([]*call, 0, len(h.calls))
	for _, c := range h.calls {
		all = append(all, c)
	}
	return all
}

// answerLive runs a job, first in lane, for as long as its client waits on the connection, and passes the engine's answer through.
func (s *Server) answerLive(c echo.Context, j job.Job, r *request, lane queue.Lane, release func()) error {
	ctx, stop := context.WithCancelCause(c.Request().Context())
	defer stop(nil)
	now := s.deps.Results.Now()
	j.ID, j.API = job.NewID(now.Time()), s.cfg.ID
	j.Created, j.Expires = now, now+job.Millis(s.cfg.DefaultDeadline.Milliseconds())
	c.Response().Header().Set(headerJob, string(j.ID))

	who := identityOf(c)
	j.APIKey = who.Key.ID
	if err := s.allow(ctx, who, j.Expected()); err != nil {
		s.metrics.submit("live", "refused")
		return err
	}
	leave, err := s.occupy(ctx, who, &j)
	if err != nil {
		s.metrics.submit("live", "refused")
		return err
	}
	defer leave()
	body, err := s.putBody(ctx, &j, r.body)
	if err != nil {
		return err
	}
	if j.Blob != "" {
		r.body, r.object = nil, nil // it is stored apart: nobody here needs it any more
		defer s.dropBlob(context.WithoutCancel(ctx), j.Blob)
	}
	release()
	// The seat is open before the message is there: a worker may claim it at once.
	call := &call{message: &queue.Message{Job: j, Body: body}, seat: s.desk.Expect(j.ID), stop: stop, published: time.Now()}
	defer call.seat.Close()
	if !s.held.add(call, s.cfg.MaxHeld) {
		s.metrics.submit("live", "refused")
		return fail(http.StatusTooManyRequests, job.CodeRateLimit, "This server holds %d calls already: try again later.", s.cfg.MaxHeld)
	}
	defer s.held.remove(j.ID)
	if err := s.publish(ctx, lane, call); err != nil {
		result := "unavailable"
		if errors.Is(err, queue.ErrFull) {
			result = "refused"
		}
		s.metrics.submit("live", result)
		return err // it may be stored after all: then its claim is told that nobody waits
	}
	s.metrics.submit("live", "stored")
	s.traffic.came(time.Now(), j.Model, j.Expected())
	return s.passOn(ctx, c, call)
}

// publish puts a held call's message into a lane of the live stream. It is not cut by a client that leaves, so that what was stored is known.
func (s *Server) publish(ctx context.Context, lane queue.Lane, call *call) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), submitTimeout)
	defer cancel()
	err := s.publisher.Enqueue(ctx, queue.Live, lane, call.message)
	if err != nil && !errors.Is(err, queue.ErrExists) {
		return fmt.Errorf("queueing job %s: %w", call.message.Job.ID, err)
	}
	return nil
}

// passOn passes the answer's parts to the client until the answer, the client's patience or the job's time ends.
func (s *Server) passOn(ctx context.Context, c echo.Context, call *call) error {
	j := &call.message.Job
	expires := time.Now().Add((j.Expires - s.deps.Results.Now()).Duration())
	out := &liveAnswer{c: c, stream: j.Stream, typed: j.Endpoint == job.Responses, shown: &call.shown}
	beat := s.beat()
	next := time.Now().Add(beat)
	for {
		until := expires
		if j.Stream && next.Before(until) {
			until = next
		}
		wait, cancel := context.WithDeadline(ctx, until)
		part, err := call.seat.Next(wait)
		cancel()
		switch {
		case err == nil:
			next = time.Now().Add(beat)
			done, err := out.take(part)
			if err == nil && !done {
				continue
			}
			if errors.Is(err, errNobodyReads) {
				return s.clientGone(ctx, call)
			}
			if err != nil {
				s.abandon(ctx, call, job.Failed, failureOf(err).body)
			}
			return err
		case ctx.Err() != nil:
			return s.stopped(ctx, call, out)
		case time.Now().Before(expires) && wait.Err() != nil:
			next = time.Now().Add(beat)
			if out.keepAlive(s.liveComment(call)) != nil {
				return s.clientGone(ctx, call)
			}
		case wait.Err() != nil:
			e := job.NewError(job.TypeServer, job.CodeExpired, "The request's deadline passed before its answer was whole.")
			s.abandon(ctx, call, job.Expired, e)
			return out.fail(jobFailure(e))
		case errors.Is(err, relay.ErrGone): // the desk has closed
			return out.fail(unavailable(nil, "The server stops: send the request again."))
		default:
			s.abandon(ctx, call, job.Failed, failureOf(err).body)
			return out.fail(failureOf(fmt.Errorf("waiting for the answer of job %s: %w", j.ID, err)))
		}
	}
}

// stopped ends a call whose context has ended: the client has left, the call was given up, or the server stops.
func (s *Server) stopped(ctx context.Context, call *call, out *liveAnswer) error {
	cause := context.Cause(ctx)
	var f *failure
	switch {
	case errors.As(cause, &f):
		s.abandon(ctx, call, job.Failed, f.body)
	case errors.Is(cause, errStopped):
		f = unavailable(nil, "The server stops: send the request again.")
		s.abandon(ctx, call, job.Cancelled, f.body)
	default:
		return s.clientGone(ctx, call)
	}
	return out.fail(f)
}

// beat is the time after which a silent stream gets a comment.
func (s *Server) beat() time.Duration { return s.cfg.KeepAlive * 2 / 3 }

func (s *Server) liveComment(call *call) []byte {
	v := &view{job: call.message.Job, state: job.Queued}
	if w, _, _ := call.seat.Holder(); w != "" {
		v.state = job.Running
	}
	return s.comment(v)
}

// clientGone ends a call whose client has left.
func (s *Server) clientGone(ctx context.Context, call *call) error {
	s.abandon(ctx, call, job.Cancelled, job.NewError(job.TypeInvalidRequest, job.CodeClientGone, "The client left before the answer."))
	return context.Canceled
}

// abandon gives up a call. A worker that runs it is told to stop by the seat's closing, and writes the outcome; one that nobody runs is ended here, so that its message does not
// wait for a worker that would only be told so.
func (s *Server) abandon(ctx context.Context, call *call, state job.State, why *job.Error) {
	worker, _, _ := call.seat.Holder()
	call.seat.Close()
	if worker != "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	j := &call.message.Job
	o := job.Outcome{State: state, Error: why, Finished: s.deps.Results.Now()}
	if _, err := s.deps.Queue.Settle(ctx, &queue.Record{Job: *j, Outcome: o}); err != nil && !errors.Is(err, queue.ErrSettled) {
		s.log.Warn("writing the outcome of a call that nobody waits for", "job", j.ID, "err", err)
		return // the next claim is told that nobody waits
	}
	if err := s.deps.Queue.Remove(ctx, queue.Live, j.Model, j.ID); err != nil {
		s.log.Warn("removing a call that nobody waits for", "job", j.ID, "err", err)
	}
}

// errNobodyReads: a write to the client failed.
var errNobodyReads = errors.New("the client does not read")

// bufferWhole is up to how many bytes an answer that is no stream is kept back until it is whole, so that it has a length, and another attempt can give it.
const bufferWhole = 1 << 20

// liveAnswer writes one call's answer to its client.
type liveAnswer struct {
	c echo.Context
	// typed: its stream is one of a response's events, which has no [DONE]; sent counts them.
	typed bool
	sent  int64
	// stream: the client asked for one. events: it gets one now, its head is sent. plain: the head of an answer in one piece is sent.
	stream, events, plain bool
	head                  *relay.Head
	buffer                []byte
	tail                  tail
	shown                 *atomic.Bool
}

// take takes one part and tells whether it was the last.
func (a *liveAnswer) take(p *relay.Part) (done bool, err error) {
	switch {
	case p.Head != nil:
		if a.shown.Load() && !p.Head.Continues {
			return true, a.fail(jobFailure(job.NewError(job.TypeServer, job.CodeEngineError, "The answer broke off, and another attempt began it anew.")))
		}
		a.head, a.buffer = p.Head, nil
		return false, nil
	case p.End != nil:
		return true, a.end(p.End)
	case a.head == nil:
		return true, a.fail(jobFailure(job.NewError(job.TypeServer, job.CodeInternal, "The worker sent an answer without a head.")))
	case a.streamed():
		return false, a.event(p.Data)
	case a.plain:
		return false, a.write(p.Data)
	}
	a.buffer = append(a.buffer, p.Data...)
	if len(a.buffer) > bufferWhole && a.head.StatusCode < 400 && !a.stream {
		if f := unfit(a.head.StatusCode, a.buffer); f != nil {
			return true, f
		}
		a.plain = true
		a.shown.Store(true)
		a.c.Response().Header().Set(echo.HeaderContentType, jsonType(a.head.ContentType))
		a.c.Response().WriteHeader(a.head.StatusCode)
		err = a.write(a.buffer)
		a.buffer = nil
	}
	return false, err
}

// streamed tells whether the engine answers with a stream of events.
func (a *liveAnswer) streamed() bool {
	return a.stream && a.head.StatusCode == http.StatusOK && isEventStream(a.head.ContentType)
}

// end ends the answer.
func (a *liveAnswer) end(e *relay.End) error {
	switch {
	case e.Error != nil:
		return a.fail(jobFailure(e.Error))
	case a.head == nil:
		return a.fail(jobFailure(nil))
	case a.plain:
		return nil
	case a.streamed():
		if a.typed || a.tail.done() {
			return nil
		}
		return a.event([]byte("data: [DONE]\n\n"))
	}
	if f := unfit(a.head.StatusCode, a.buffer); f != nil {
		return a.fail(f)
	}
	switch {
	case a.events && a.head.StatusCode >= 400:
		return a.fail(&failure{status: a.head.StatusCode, body: errorIn(a.head.StatusCode, a.buffer)})
	case a.stream && a.head.StatusCode < 400: // the engine knows no streams: its whole answer is the one event
		var b bytes.Buffer
		writeData(&b, a.buffer)
		b.WriteString("\ndata: [DONE]\n\n")
		return a.event(b.Bytes())
	}
	a.shown.Store(true)
	return writeAnswerRaw(a.c, a.head.StatusCode, a.head.ContentType, a.buffer)
}

// fail tells the client that its answer failed. Once the head of a stream is sent that is an event, whatever else the stream was; an answer in one piece is cut.
func (a *liveAnswer) fail(f *failure) error {
	switch {
	case a.events:
		var b bytes.Buffer
		if !a.tail.atBoundary() {
			b.WriteString("\n\n")
		}
		if a.typed {
			writeTypedError(&b, f.body, a.sent)
			return a.event(b.Bytes())
		}
		b.WriteString("data: ")
		b.Write(encode(errorObject{f.body}))
		b.WriteString("\n\n")
		return a.event(b.Bytes())
	case a.plain:
		panic(http.ErrAbortHandler) // a cut answer must not look whole
	default:
		return f
	}
}

// event sends bytes of an event stream at once.
func (a *liveAnswer) event(data []byte) error {
	a.shown.Store(true)
	a.begin()
	if err := a.write(data); err != nil {
		return err
	}
	a.tail.add(data)
	if a.typed {
		a.sent += int64(bytes.Count(data, []byte("\n\n")))
	}
	return a.flush()
}

// keepAlive sends a comment line: no blank line follows it, which clients could take for an empty event. In the middle of an event none is sent.
func (a *liveAnswer) keepAlive(comment []byte) error {
	if a.plain || a.head != nil && !a.streamed() || !a.tail.atBoundary() {
		return nil
	}
	a.begin()
	if err := a.write(comment); err != nil {
		return err
	}
	return a.flush()
}

// begin sends the head of an event stream, once.
func (a *liveAnswer) begin() {
	if !a.events {
		a.events = true
		beginEvents(a.c)
	}
}

func (a *liveAnswer) write(data []byte) error {
	if _, err := a.c.Response().Write(data); err != nil {
		return errNobodyReads
	}
	return nil
}

func (a *liveAnswer) flush() error {
	if flush(a.c) != nil {
		return errNobodyReads
	}
	return nil
}

// --- looking after held calls ---

// How often held calls are looked at; how long a holder may be missing before it counts as dead without a word of its death; and after what time an unclaimed call's
// message is published again in case its stream was lost without this process noticing (that it is there still is no error).
const (
	heldPeriod      = time.Second
	holderMissing   = 5 * time.Second
	republishPeriod = 30 * time.Second
	republishMost   = 200
)

// lookAfterHeld keeps held calls going until ctx ends: it takes them from dead workers, and publishes them again where the live stream was lost.
func (s *Server) lookAfterHeld(ctx context.Context) {
	deaths := s.deps.Cluster.Deaths(ctx)
	t := time.NewTicker(heldPeriod)
	defer t.Stop()
	_, connected := s.deps.Cluster.Connected()
	for {
		select {
		case <-ctx.Done():
			return
		case d, ok := <-deaths:
			if !ok {
				deaths = nil
				continue
			}
			if d.Role == cluster.RoleWorker {
				s.mourn(ctx, job.Worker(d.ID), d.Charged)
			}
		case now := <-t.C:
			ok, since := s.deps.Cluster.Connected()
			if !ok {
				continue
			}
			again := !since.Equal(connected)
			connected = since
			s.lookAtHeld(ctx, now, again)
		}
	}
}

// mourn takes the calls of a dead worker from it.
func (s *Server) mourn(ctx context.Context, w job.Worker, charged bool) {
	for _, call := range s.held.all() {
		if holder, ack, _ := call.seat.Holder(); holder == w {
			s.bereave(ctx, call, ack, charged)
		}
	}
}

// bereave lets another worker have a call whose holder is dead, unless the client has seen some of an answer with which no other can go on.
func (s *Server) bereave(ctx context.Context, call *call, ack string, charged bool) {
	call.silentSince = time.Time{}
	if charged {
		call.deaths++
	}
	j := &call.message.Job
	switch {
	case call.shown.Load() && !call.seat.Resumable():
		call.seat.Release(charged)
		call.stop(jobFailure(job.NewError(job.TypeServer, job.CodeEngineError, "The worker died in the middle of its answer.")))
		return
	case call.deaths >= maxDeaths:
		call.seat.Release(charged)
		call.stop(jobFailure(job.NewError(job.TypeServer, job.CodeWorkerCrashed, fmt.Sprintf("The request's worker died %d times while running it.", call.deaths))))
		return
	}
	s.log.Info("a held call's worker is gone: handing the call on", "job", j.ID, "charged", charged)
	call.seat.Release(charged)
	short, cancel := context.WithTimeout(ctx, submitTimeout)
	defer cancel()
	if err := s.deps.Queue.NakSubject(short, ack, 0); err != nil {
		s.log.Warn("handing a held call's delivery back", "job", j.ID, "err", err)
	}
	s.republish(ctx, call) // the message may have been lost with its stream
}

// lookAtHeld looks at each call once. again: the connection was lost since the last look, and with it perhaps the streams.
func (s *Server) lookAtHeld(ctx context.Context, now time.Time, again bool) {
	calls := s.held.all()
	if again {
		for _, call := range calls {
			call.published = time.Time{}
		}
	}
	rare := republishMost
	hopeless := make(map[job.Model]*failure)
	for _, call := range calls {
		holder, ack, _ := call.seat.Holder()
		switch {
		case holder == "":
			call.silentSince = time.Time{}
			if s.brokeOff(call, now) {
				continue
			}
			m := call.message.Job.Model
			f, asked := hopeless[m]
			if !asked {
				f = s.hopeless(m, now)
				hopeless[m] = f
			}
			if f == nil && s.failing(m, now) { // a start is tried, or due: it may succeed, and if it does not the call has waited for it
				call.doubt(now)
			} else if call.despair(f != nil, now, s.cfg.HopelessFor) && !call.shown.Load() {
				call.stop(f)
				continue
			}
			old := now.Sub(call.published) > republishPeriod
			if call.published.IsZero() || old && rare > 0 {
				if !call.published.IsZero() {
					rare--
				}
				if !s.republish(ctx, call) {
					return // the rest is due at the next look
				}
			}
		case s.deps.Cluster.Alive(string(holder)):
			call.silentSince, call.brokenSince, call.hopelessAt = time.Time{}, time.Time{}, time.Time{}
		case call.silentSince.IsZero():
			call.silentSince = now
		case now.Sub(call.silentSince) > holderMissing:
			s.bereave(ctx, call, ack, false)
		}
	}
}

// brokeOff ends a call whose stream the client has begun to get if nobody has taken it to go on with it for too long, and tells so: a stream that has begun does not wait as a call in the line does.
func (s *Server) brokeOff(call *call, now time.Time) bool {
	switch {
	case !call.shown.Load():
		return false
	case call.brokenSince.IsZero():
		call.brokenSince = now
		return false
	case now.Sub(call.brokenSince) < s.cfg.ContinueWithin:
		return false
	}
	call.stop(jobFailure(job.NewError(job.TypeServer, job.CodeEngineError, "The answer broke off, and no other worker came to continue it.")))
	return true
}

// republish publishes a call's message again, for any worker, and tells whether it is there now: one that was there already is left alone.
func (s *Server) republish(ctx context.Context, call *call) bool {
	if err := s.publish(ctx, queue.AnyLane, call); err != nil {
		call.published = time.Time{}
		s.log.Warn("publishing a held call again", "job", call.message.Job.ID, "err", err)
		return false
	}
	call.published = time.Now()
	return true
}
