// Package relay carries, over core NATS, what is worth saying only now: that a job changed, that one is cancelled, and the answers of jobs whose client waits on its connection.
package relay

import (
	"context"
	"errors"
	"log/slog"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

// Errors that callers branch on.
var (
	// ErrGone: the API that holds the connection says that the job needs no answer any more, or is gone.
	ErrGone = errors.New("nobody waits for this job any more")
	// ErrHeld: another worker's attempt at it lives.
	ErrHeld = errors.New("another worker runs this job")
	// ErrUnreachable: the API did not answer in time; it may still live.
	ErrUnreachable = errors.New("the API that waits for this job does not answer")
)

// Relay is safe for concurrent use.
type Relay struct{ impl }

// New returns a relay on nc, which it does not close.
func New(nc *nats.Conn, log *slog.Logger) *Relay { panic("relay") }

// Bell tells everybody who watches id that its record or its events changed. Best effort: who waits also looks by itself now and then.
func (r *Relay) Bell(id job.ID) { panic("relay") }

// Watch returns a channel that gets a value (at least one, possibly for several bells) after every Bell for id, and a function that ends the watch. One subscription serves all watchers of a process's job.
func (r *Relay) Watch(id job.ID) (<-chan struct{}, func()) { panic("relay") }

// Cancel tells every worker to stop id. Best effort: the intent is stored first, and workers also learn it when they renew.
func (r *Relay) Cancel(id job.ID) { panic("relay") }

// OnCancel calls fn for each Cancel heard, until ctx ends. fn must not block.
func (r *Relay) OnCancel(ctx context.Context, fn func(job.ID)) error { panic("relay") }

// Ended tells dispatchers that a job of m ended: room to feed more. OnEnded listens.
func (r *Relay) Ended(m job.Model)                                     { panic("relay") }
func (r *Relay) OnEnded(ctx context.Context, fn func(job.Model)) error { panic("relay") }

// --- answers of live jobs ---
//
// A live job's answer goes from the worker to the API in numbered parts. The API takes them in order, asks again for a gap, and acknowledges the last. The worker keeps all parts of the attempt until then.

// Part is one piece of an answer.
type Part struct {
	// Head comes first: the engine's status and content type.
	Head *Head
	// Data is a piece of the body: for a stream one or more whole SSE events' raw bytes; else any piece. At most 256 KiB are sent in one message; larger ones are split and joined in order, not re-framed.
	Data []byte
	// End comes last.
	End *End
}

// Head of an answer.
type Head struct {
	StatusCode  int    `json:"status_code"`
	ContentType string `json:"content_type"`
}

// End of an answer. Error is set when the attempt ended without a whole answer: the job failed for good. Retry says that the job was given back and another attempt will follow; then no part of the answer had been sent before.
type End struct {
	Error  *job.Error `json:"error,omitempty"`
	Usage  *job.Usage `json:"usage,omitempty"`
	Retry  bool       `json:"retry,omitempty"`
	Reason string     `json:"reason,omitempty"`
	State  job.State  `json:"state,omitempty"`
}

// ClaimRequest is a worker's wish to run a live job.
type ClaimRequest struct {
	ID         job.ID     `json:"id"`
	Worker     job.Worker `json:"worker"`
	AckSubject string     `json:"ack_subject"`
	Charged    bool       `json:"-"`
}

// Claimed is the API's yes: the attempt's token, and the number of tries charged before.
type Claimed struct {
	Token   job.Token `json:"token"`
	Charged int       `json:"charged"`
}

// Claim asks the API for the job. ErrGone (settle as cancelled, ack), ErrHeld (nak), ErrUnreachable (nak).
func (r *Relay) Claim(ctx context.Context, api job.API, c ClaimRequest) (*Claimed, error) {
	panic("relay")
}

// Answer is a worker's side of one attempt's answer.
type Answer struct{ answerImpl }

// Answer opens the sending side. cancelled is closed when the API says that nobody waits any more.
func (r *Relay) Answer(api job.API, id job.ID, token job.Token) (*Answer, error) { panic("relay") }

// Cancelled is closed when the API tells this attempt to stop.
func (a *Answer) Cancelled() <-chan struct{} { panic("relay") }

// Send sends one part. It does not wait for the API, and while NATS is away it keeps the part for later. It fails only when more than MaxBuffered bytes are unacknowledged.
func (a *Answer) Send(p Part) error { panic("relay") }

// Finish sends End and returns once the API has everything, or ErrGone, or ctx's error.
func (a *Answer) Finish(ctx context.Context, e End) error { panic("relay") }

// Close releases the sending side.
func (a *Answer) Close() { panic("relay") }

// MaxBuffered bounds the bytes of one answer that either side keeps.
const MaxBuffered = 64 << 20

// Desk is an API's side: the connections that wait here.
type Desk struct{ deskImpl }

// Desk listens for claims and answers to api until ctx ends.
func (r *Relay) Desk(ctx context.Context, api job.API, log *slog.Logger) (*Desk, error) {
	panic("relay")
}

// Expect opens a seat for a live job before it is published.
func (d *Desk) Expect(id job.ID) *Seat { panic("relay") }

// Seat is one waiting connection.
type Seat struct{ seatImpl }

// Next returns the next part of the answer, or ctx's error. It joins nothing: parts come as sent, split pieces as their own. A Retry end is not shown: the seat then waits for the next claim.
func (s *Seat) Next(ctx context.Context) (*Part, error) { panic("relay") }

// Holder returns who runs the job now ("" if nobody), the attempt's ack subject, and its token.
func (s *Seat) Holder() (job.Worker, string, job.Token) { panic("relay") }

// Started tells whether any part of the answer has been taken from the current or an earlier attempt.
func (s *Seat) Started() bool { panic("relay") }

// Release takes the job from its (dead) holder, so that another may claim it; charged adds to the tries.
func (s *Seat) Release(charged bool) { panic("relay") }

// Close ends the wait; if the answer has not ended the running attempt is told to stop, and later claims get ErrGone.
func (s *Seat) Close() { panic("relay") }

// Seats lists the open seats' ids: what the API publishes again when a LIVE stream was lost.
func (d *Desk) Seats() []job.ID { panic("relay") }

type (
	impl       struct{}
	answerImpl struct{}
	deskImpl   struct{}
	seatImpl   struct{}
)
