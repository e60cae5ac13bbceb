package relay

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
)

const (
	// A Seat acknowledges after so many parts or bytes, and the last part at once.
	ackParts = 64
	ackBytes = 1 << 20
	// partSize is what a part costs in memory beside its data.
	partSize = 64
	// voidAfter is when a claim is void whose answer was never opened: longer than its worker waits for the reply.
	voidAfter = claimTimeout + time.Second
	// replyRoom is what a claim's reply has beside what was shown, in bytes.
	replyRoom = 4 << 10
)

// MaxShown bounds the bytes that a Seat keeps of a stream so that another attempt can go on with it.
const MaxShown = 512 << 10

// Seat is one waiting connection. One goroutine may call Next; the rest is safe for concurrent use.
type Seat struct {
	desk *Desk
	id   job.ID
	wake chan struct{} // gets a value when there is something for Next

	mu sync.Mutex // guards what follows; nothing that takes the Desk's is called under it
	// The current attempt. held: it has the job. opened: its worker has taken up the claim, and is told things at control.
	held, opened bool
	token        job.Token // of the current or last attempt
	worker       job.Worker
	ackSubject   string
	claimed      time.Time
	control      string
	next         uint64 // number of the part that is due
	asked        uint64 // for which number the worker was last asked to begin again
	// unacked and unackedBytes count the parts and bytes since the last acknowledgement.
	unacked, unackedBytes int

	charged int
	parts   []*Part // unread
	bytes   int     // in parts
	started bool    // a part was read
	ended   bool    // the answer's last part has come
	over    bool    // and was read
	closed  bool

	// head is that of the answer as read. shown is what was read of a stream behind it, over all attempts, at most maxShown bytes; lost: there was more.
	maxShown int
	head     *Head
	shown    []byte
	lost     bool
}

// claim answers c at the time now.
func (s *Seat) claim(now time.Time, c ClaimRequest) claimReply {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed || s.ended:
		return claimReply{Refused: refusedGone}
	case s.held && s.worker == c.Worker && s.ackSubject == c.AckSubject:
		// The reply was lost.
	case s.held && s.opened:
		// If the attempt was given up and its word of that was lost, this gets it said again.
		s.desk.tell(s.control, kindKnown, s.attempt(), 0)
		return claimReply{Refused: refusedHeld}
	case s.held && now.Sub(s.claimed) < voidAfter:
		return claimReply{Refused: refusedHeld}
	default:
		s.token = max(s.token+1, job.Token(now.UnixMilli()))
		s.held, s.opened, s.control = true, false, ""
		s.worker, s.ackSubject, s.claimed = c.Worker, c.AckSubject, now
		s.next, s.asked, s.unacked, s.unackedBytes = 1, 0, 0, 0
	}
	return claimReply{Claimed: Claimed{Token: s.token, Charged: s.charged, Shown: s.shown}}
}

func (s *Seat) attempt() attempt { return attempt{s.id, s.token} }

// take handles what the worker at control says, and tells whether it is of the current attempt.
func (s *Seat) take(m message, control string) bool {
	s.mu.Lock()
	if s.closed || !s.held || m.token != s.token {
		s.mu.Unlock()
		return false
	}
	s.opened, s.control = true, control
	over := false
	switch m.kind {
	case kindHead, kindData, kindEnd:
		over = s.add(m)
	case kindTell:
		if m.seq >= s.next {
			s.again()
		} else {
			s.have()
		}
	case kindLeft:
		over = s.giveBack(&End{Reason: "the worker gave the job up"})
	}
	last := s.next - 1
	s.mu.Unlock()
	if over {
		s.desk.remember(m.attempt, last)
	}
	return true
}

// add takes part m if it is due, and tells whether the attempt has ended by it. s.mu is held.
func (s *Seat) add(m message) (over bool) {
	switch {
	case m.seq < s.next: // it came before
		return false
	case m.seq > s.next:
		// One is missing. It is asked for once; if the question is lost, the worker's next tell repeats it.
		if s.asked != s.next {
			s.again()
		}
		return false
	}
	p, err := m.part()
	if err != nil {
		// Asking again would bring the same.
		s.desk.log.Error("answer broken off", "job", s.id, "worker", s.worker, "err", err)
		s.breakOff(failure("the worker's answer cannot be read"))
		return false
	}
	s.next++
	if p.End != nil {
		defer s.have() // at once: the worker waits for it
		if p.End.Retry {
			return s.giveBack(p.End)
		}
		s.ended, s.held = true, false
		s.push(p)
		return true
	}
	s.push(p)
	if s.bytes > MaxBuffered {
		s.desk.log.Warn("answer broken off: its client reads too slowly", "job", s.id, "bytes", s.bytes)
		s.breakOff(&End{
			Error: job.NewError(job.TypeServer, job.CodeClientGone, fmt.Sprintf("more than %d MiB of the answer were not read", MaxBuffered>>20)), State: job.Cancelled,
		})
		return false
	}
	s.unacked++
	s.unackedBytes += len(p.Data)
	if s.unacked >= ackParts || s.unackedBytes >= ackBytes {
		s.have()
	}
	return false
}

// have acknowledges what has come. s.mu is held.
func (s *Seat) have() {
	s.unacked, s.unackedBytes = 0, 0
	s.desk.tell(s.control, kindHave, s.attempt(), s.next-1)
}

// again asks for all parts from the one that is due. s.mu is held.
func (s *Seat) again() {
	s.asked = s.next
	s.desk.tell(s.control, kindAgain, s.attempt(), s.next)
}

// push gives p to the reader. s.mu is held.
func (s *Seat) push(p *Part) {
	s.parts = append(s.parts, p)
	s.bytes += len(p.Data) + partSize
	s.signal()
}

func (s *Seat) signal() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// breakOff ends the answer with an end of our own, and the attempt with it. s.mu is held.
func (s *Seat) breakOff(e *End) {
	s.desk.tell(s.control, kindGone, s.attempt(), 0)
	s.ended, s.held = true, false
	s.push(&Part{End: e})
}

// giveBack frees the job for another attempt if that can begin anew or go on with what was read of this one, and tells that the attempt is over. s.mu is held.
func (s *Seat) giveBack(e *End) (over bool) {
	s.drop()
	s.held = false
	if e.Charged {
		s.charged++
	}
	if s.started && !s.resumable() {
		end := failure("the worker broke its answer off")
		end.Reason = e.Reason
		s.ended = true
		s.push(&Part{End: end})
	}
	return true
}

// keep notes what the reader gets of a stream. s.mu is held.
func (s *Seat) keep(p *Part) {
	switch {
	case p.Head != nil:
		s.head = p.Head
		if !p.Head.Continues {
			s.shown, s.lost = nil, false
		}
	case p.End != nil:
		s.shown, s.lost = nil, true
	case s.lost || s.head == nil || !s.head.stream():
	case len(s.shown)+len(p.Data) > s.maxShown:
		s.shown, s.lost = nil, true
	default:
		s.shown = append(s.shown, p.Data...)
	}
}

// resumable tells whether another attempt can follow: of the answer as read either nothing was data, or it is a stream of which all was kept, up to the end of an event. s.mu is held.
func (s *Seat) resumable() bool {
	return s.head != nil && s.head.stream() && !s.lost && (len(s.shown) == 0 || atBoundary(s.shown))
}

// atBoundary tells whether an event of a stream ends where b ends.
func atBoundary(b []byte) bool {
	return bytes.HasSuffix(b, []byte("\n\n")) || bytes.HasSuffix(b, []byte("\n\r\n")) || bytes.HasSuffix(b, []byte("\r\r"))
}

// drop forgets what was not read. s.mu is held.
func (s *Seat) drop() { s.parts, s.bytes = nil, 0 }

func failure(text string) *End {
	return &End{Error: job.NewError(job.TypeServer, job.CodeEngineError, text), State: job.Failed}
}

// Next returns the next part of the answer, or ctx's error; io.EOF after the End, ErrGone once the seat is closed. It joins nothing: parts come as sent, split pieces as their own. A Retry end is not shown: the seat then waits for the next claim.
// If more than MaxBuffered bytes are unread, the worker is told to stop and the answer ends with an error.
func (s *Seat) Next(ctx context.Context) (*Part, error) {
	for {
		s.mu.Lock()
		switch {
		case s.closed:
			s.mu.Unlock()
			return nil, ErrGone
		case len(s.parts) > 0:
			p := s.parts[0]
			s.parts[0] = nil // lest the array keep it
			if s.parts = s.parts[1:]; len(s.parts) == 0 {
				s.parts = nil
			}
			s.bytes -= len(p.Data) + partSize
			s.started, s.over = true, p.End != nil
			s.keep(p)
			s.mu.Unlock()
			return p, nil
		case s.over:
			s.mu.Unlock()
			return nil, io.EOF
		}
		s.mu.Unlock()
		select {
		case <-s.wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Holder returns who runs the job now ("" if nobody), the attempt's ack subject, and its token.
func (s *Seat) Holder() (job.Worker, string, job.Token) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.held {
		return "", "", 0
	}
	return s.worker, s.ackSubject, s.token
}

// Started tells whether any part of the answer has been taken from the current or an earlier attempt.
func (s *Seat) Started() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

// Resumable tells whether another attempt can go on with what was read: a stream of which everything was kept, up to the end of an event.
func (s *Seat) Resumable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.resumable()
}

// Release takes the job from its (dead) holder, so that another may claim it; charged adds to the tries. What was not read of the attempt is dropped, and should it live after all it is told ErrHeld.
// If parts of it have been taken, the next attempt's follow them, beginning with its Head, which tells whether it goes on with them: release such a seat only if it is Resumable, or what was taken
// can be thrown away. Without a holder it does nothing.
func (s *Seat) Release(charged bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.held {
		return
	}
	s.desk.tell(s.control, kindHeld, s.attempt(), 0)
	s.held = false
	s.drop()
	if charged {
		s.charged++
	}
}

// Close ends the wait; if the answer has not ended the running attempt is told to stop, and later claims get ErrGone.
func (s *Seat) Close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	if s.held {
		s.desk.tell(s.control, kindGone, s.attempt(), 0)
	}
	s.drop()
	s.signal()
	s.mu.Unlock()
	s.desk.forget(s)
}

func (s *Seat) hasEnded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed || s.ended
}
