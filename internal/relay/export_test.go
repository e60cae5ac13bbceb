package relay

import (
	"time"

	"github.com/millrace/millrace/internal/job"
)

// The kinds of messages, for tests that play one of the two sides.
const (
	KindHead  = byte(kindHead)
	KindData  = byte(kindData)
	KindEnd   = byte(kindEnd)
	KindTell  = byte(kindTell)
	KindLeft  = byte(kindLeft)
	KindHave  = byte(kindHave)
	KindAgain = byte(kindAgain)
	KindGone  = byte(kindGone)
	KindHeld  = byte(kindHeld)
	KindKnown = byte(kindKnown)
)

// Message is what travels between an answer's two sides.
type Message struct {
	Kind  byte
	ID    job.ID
	Token job.Token
	Seq   uint64
	Body  string
}

func Encode(m Message) []byte {
	return message{kind: kind(m.Kind), attempt: attempt{m.ID, m.Token}, seq: m.Seq, body: []byte(m.Body)}.encode()
}

func Decode(b []byte) (Message, error) {
	m, err := decode(b)
	return Message{byte(m.kind), m.id, m.token, m.seq, string(m.body)}, err
}

// PartSubject is where api's Desk hears of answers.
func PartSubject(api job.API) string { return liveSubject + token(string(api)) + ".part" }

// VoidAfter is when a claim is void whose answer was never opened.
const VoidAfter = voidAfter

// Remembered is how many ended attempts a Desk remembers.
const Remembered = remembered

// RememberAttempts has a desk remember n attempts, and tells how many it still has and whether the last is among them.
func RememberAttempts(n int) (kept int, last bool) {
	d := &Desk{over: make(map[attempt]uint64)}
	for i := range n {
		d.remember(attempt{"job_1", job.Token(i)}, 1)
	}
	_, last = d.over[attempt{"job_1", job.Token(n - 1)}]
	return len(d.over), last
}

// LooseSeat is a seat without a connection.
type LooseSeat struct{ s *Seat }

func NewSeat() LooseSeat { return LooseSeat{&Seat{id: "job_1"}} }

// Claim returns the token, 0 if it was refused.
func (l LooseSeat) Claim(w job.Worker) job.Token {
	return l.s.claim(time.Now(), ClaimRequest{ID: "job_1", Worker: w, AckSubject: string(w)}).Token
}
