package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

// An answer looks every tendEvery whether something may have been lost. It then says how far it has got: if parts are unacknowledged and none was sent for tendEvery, and in any
// case if the API was not heard for tellAfter, which also shows whether it still wants the answer.
const (
	tendEvery = 200 * time.Millisecond
	tellAfter = time.Second
)

// Answer is a worker's side of one attempt's answer. Safe for concurrent use; parts have the order of the calls of Send.
type Answer struct {
	relay   *Relay
	attempt attempt
	subject string
	// cancelled is closed when the API says stop; err is set before.
	cancelled chan struct{}
	// moved gets a value when acked rises.
	moved chan struct{}

	mu    sync.Mutex // guards what follows, and keeps the order of what is published
	kept  [][]byte   // unacknowledged messages, the first has the number acked+1
	bytes int        // in kept
	acked uint64
	sent  uint64 // number of the last part
	// lastSent and lastHeard are when the last part was sent and when the API was last heard; lastTold when it was last told how far this is.
	lastSent, lastHeard, lastTold time.Time

	ended  bool  // by Finish
	err    error // ErrGone or ErrHeld
	closed bool
	timer  *time.Timer
}

// Answer opens the sending side. Close releases it.
func (r *Relay) Answer(api job.API, id job.ID, tok job.Token) (*Answer, error) {
	if len(id) > maxID {
		return nil, fmt.Errorf("opening an answer: the job's id has %d characters and may have %d", len(id), maxID)
	}
	now := time.Now()
	a := &Answer{
		relay: r, attempt: attempt{id, tok}, subject: liveSubject + token(string(api)) + ".part",
		cancelled: make(chan struct{}), moved: make(chan struct{}, 1), lastSent: now, lastHeard: now, lastTold: now,
	}
	if err := r.open(a); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	// Its first word tells the API that the claim was taken up, and the worker whether the job is still wanted, before the engine has said anything.
	a.publish(message{kind: kindTell, attempt: a.attempt}.encode())
	a.timer = time.AfterFunc(tendEvery, a.tend)
	return a, nil
}

// open registers a for what the API says.
func (r *Relay) open(a *Answer) error {
	r.answerMu.Lock()
	defer r.answerMu.Unlock()
	if r.answers[a.attempt] != nil {
		return fmt.Errorf("opening an answer: that of attempt %d at job %s is open already", a.attempt.token, a.attempt.id)
	}
	if r.answerSub == nil {
		sub, err := r.nc.Subscribe(r.control, r.steer)
		if err != nil {
			return fmt.Errorf("opening an answer of job %s: %w", a.attempt.id, err)
		}
		r.answerSub = sub
	}
	r.answers[a.attempt] = a
	return nil
}

// steer takes what an API says to one of this process's answers.
func (r *Relay) steer(m *nats.Msg) {
	msg, err := decode(m.Data)
	if err != nil {
		r.log.Debug("word of an API that cannot be read", "err", err)
		return
	}
	r.answerMu.Lock()
	a := r.answers[msg.attempt]
	r.answerMu.Unlock()
	switch {
	case a != nil:
		a.steer(msg)
	case msg.kind == kindKnown && m.Reply != "":
		r.say(m.Reply, message{kind: kindLeft, attempt: msg.attempt}.encode())
	}
}

func (a *Answer) steer(m message) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || a.err != nil {
		return
	}
	a.lastHeard = time.Now()
	switch m.kind {
	case kindHave:
		a.acknowledge(m.seq)
	case kindAgain:
		if m.seq == 0 {
			return
		}
		a.acknowledge(m.seq - 1)
		for _, b := range a.kept {
			if !a.publish(b) {
				return // NATS is away: the API will ask again
			}
		}
	case kindGone:
		a.abandon(ErrGone)
	case kindHeld:
		a.abandon(ErrHeld)
	}
}

// acknowledge drops the parts up to number seq. a.mu is held.
func (a *Answer) acknowledge(seq uint64) {
	if seq <= a.acked || seq > a.sent {
		return
	}
	n := int(seq - a.acked) //nolint:gosec // at most len(kept)
	for i, b := range a.kept[:n] {
		a.bytes -= len(b)
		a.kept[i] = nil // lest the array keep it
	}
	if a.kept, a.acked = a.kept[n:], seq; len(a.kept) == 0 {
		a.kept = nil
	}
	a.wake()
}

// abandon ends the attempt by the API's will. a.mu is held.
func (a *Answer) abandon(err error) {
	a.err, a.kept, a.bytes = err, nil, 0
	close(a.cancelled)
}

func (a *Answer) wake() {
	select {
	case a.moved <- struct{}{}:
	default:
	}
}

// publish sends b and tells whether it could. a.mu is held.
func (a *Answer) publish(b []byte) bool {
	return a.relay.nc.PublishRequest(a.subject, a.relay.control, b) == nil
}

// tend says how far the answer has got where something may have been lost: a part, an acknowledgement, the API's word to stop, or all that was published while NATS was away.
func (a *Answer) tend() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || a.err != nil {
		return
	}
	now := time.Now()
	stuck := a.sent > a.acked && now.Sub(a.lastSent) >= tendEvery
	if stuck || now.Sub(a.lastHeard) >= tellAfter && now.Sub(a.lastTold) >= tellAfter {
		a.publish(message{kind: kindTell, attempt: a.attempt, seq: a.sent}.encode())
		a.lastTold = now
	}
	a.timer.Reset(tendEvery)
}

// Cancelled is closed when the API tells this attempt to stop. Err says why.
func (a *Answer) Cancelled() <-chan struct{} { return a.cancelled }

// Err is why the API told the attempt to stop: ErrGone if nobody waits for the answer any more (settle the job as cancelled), ErrHeld if the job was taken from this attempt, so that
// another worker's is the one that counts (drop it and settle nothing). It is nil before Cancelled is closed.
func (a *Answer) Err() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// Send sends one part; its Data may be used again afterwards. It does not wait for the API, and while NATS is away it keeps the part for later. It fails only when more than MaxBuffered bytes are unacknowledged,
// or after Finish. After the API told the attempt to stop it does nothing.
func (a *Answer) Send(p Part) error {
	if p.End != nil {
		return errors.New("sending a part: an end is sent by Finish")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.ended || a.closed:
		return fmt.Errorf("sending a part of the answer of job %s: it has ended", a.attempt.id)
	case a.err != nil:
		return nil
	case a.bytes+len(p.Data) > MaxBuffered:
		return fmt.Errorf("sending a part of the answer of job %s: the API has not taken %d bytes, and %d are kept at most", a.attempt.id, a.bytes, MaxBuffered)
	}
	if p.Head != nil {
		head, err := json.Marshal(p.Head)
		if err != nil {
			return fmt.Errorf("sending the head of the answer of job %s: %w", a.attempt.id, err)
		}
		a.add(kindHead, head)
	}
	for rest := p.Data; len(rest) > 0; {
		n := min(len(rest), maxPiece)
		a.add(kindData, rest[:n])
		rest = rest[n:]
	}
	return nil
}

// add numbers a part, keeps it and sends it. a.mu is held.
func (a *Answer) add(k kind, body []byte) {
	a.sent++
	b := message{kind: k, attempt: a.attempt, seq: a.sent, body: body}.encode()
	a.kept = append(a.kept, b)
	a.bytes += len(b)
	a.lastSent = time.Now()
	a.publish(b) // if it could not be sent, tend makes the API ask for it
}

// Finish sends End and returns once the API has everything; or ErrGone or ErrHeld if it told the attempt to stop (see Err); or ctx's error. An End with Retry gives the job back for another attempt. What
// the client has been shown cannot be taken back: where no other attempt can go on with it, the API then ends the answer with an error.
func (a *Answer) Finish(ctx context.Context, e End) error {
	body, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("ending the answer of job %s: %w", a.attempt.id, err)
	}
	a.mu.Lock()
	if !a.ended && !a.closed && a.err == nil {
		a.add(kindEnd, body)
		a.ended = true
	}
	a.mu.Unlock()
	for {
		a.mu.Lock()
		err, done, closed := a.err, a.ended && a.acked == a.sent, a.closed
		a.mu.Unlock()
		switch {
		case done:
			return nil
		case err != nil:
			return fmt.Errorf("ending the answer of job %s: %w", a.attempt.id, err)
		case closed:
			return fmt.Errorf("ending the answer of job %s: it is closed", a.attempt.id)
		}
		select {
		case <-a.moved:
		case <-a.cancelled:
		case <-ctx.Done():
			return fmt.Errorf("ending the answer of job %s: %w", a.attempt.id, ctx.Err())
		}
	}
}

// Close releases the sending side. If the answer was not finished, the job is given back, uncharged.
func (a *Answer) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	a.closed = true
	a.timer.Stop()
	a.relay.answerMu.Lock()
	delete(a.relay.answers, a.attempt)
	a.relay.answerMu.Unlock()
	if whole := a.ended && a.acked == a.sent; !whole && a.err == nil {
		// If this is lost, the API learns it when another worker claims the job: it then asks whether this attempt is still known.
		a.publish(message{kind: kindLeft, attempt: a.attempt, seq: a.sent}.encode())
	}
	a.kept = nil
	a.wake()
}
