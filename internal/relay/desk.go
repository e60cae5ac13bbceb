package relay

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

// remembered is how many attempts that have ended a Desk remembers, to acknowledge them once more: for a worker whose acknowledgement was lost.
const remembered = 16 << 10

// Desk is an API's side: the connections that wait here.
type Desk struct {
	relay   *Relay
	log     *slog.Logger
	subject string
	sub     *nats.Subscription

	mu     sync.Mutex // guards what follows; taken before a Seat's, never after
	seats  map[job.ID]*Seat
	closed bool
	// over has the number of the last part of attempts that ended, order their order, next the place in it that is overwritten next.
	over  map[attempt]uint64
	order []attempt
	next  int
}

// Desk listens for claims and answers to api until ctx ends; then all seats are closed. It returns once it listens.
func (r *Relay) Desk(ctx context.Context, api job.API, log *slog.Logger) (*Desk, error) {
	d := &Desk{relay: r, log: log, subject: liveSubject + token(string(api)) + ".", seats: make(map[job.ID]*Seat), over: make(map[attempt]uint64)}
	sub, err := r.nc.Subscribe(d.subject+"*", d.handle)
	if err != nil {
		return nil, fmt.Errorf("listening for answers: %w", err)
	}
	d.sub = sub
	context.AfterFunc(ctx, d.close)
	r.listen()
	return d, nil
}

func (d *Desk) close() {
	d.mu.Lock()
	d.closed = true
	open := slices.Collect(maps.Values(d.seats))
	d.mu.Unlock()
	for _, s := range open {
		s.Close()
	}
	_ = d.sub.Unsubscribe() // fails only if the connection has ended it
}

// Expect opens a seat for a live job before it is published. Once the Desk has ended the seat is closed from the start.
func (d *Desk) Expect(id job.ID) *Seat {
	s := &Seat{desk: d, id: id, wake: make(chan struct{}, 1), maxShown: d.maxShown()}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		s.closed = true
		return s
	}
	d.seats[id] = s
	return s
}

// maxShown is how many bytes of a stream a claim's reply can carry: in its JSON they are base64.
func (d *Desk) maxShown() int {
	return max(0, min(MaxShown, (int(d.relay.nc.MaxPayload())-replyRoom)/4*3))
}

// Seats lists the open seats' ids: what the API publishes again when a LIVE stream was lost. A seat whose answer has ended is not among them.
func (d *Desk) Seats() []job.ID {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := make([]job.ID, 0, len(d.seats))
	for id, s := range d.seats {
		if !s.hasEnded() {
			list = append(list, id)
		}
	}
	slices.SortFunc(list, cmp.Compare)
	return list
}

// handle takes all that workers say.
func (d *Desk) handle(m *nats.Msg) {
	switch strings.TrimPrefix(m.Subject, d.subject) {
	case "claim":
		d.claim(m)
	case "part":
		d.part(m)
	}
}

// claim answers a worker that wants a job.
func (d *Desk) claim(m *nats.Msg) {
	var c ClaimRequest
	if err := json.Unmarshal(m.Data, &c); err != nil {
		d.log.Warn("claim that cannot be read", "err", err)
		return
	}
	reply := claimReply{Refused: refusedGone}
	if s := d.seat(c.ID); s != nil {
		reply = s.claim(time.Now(), c)
	}
	data, err := json.Marshal(reply)
	if err != nil {
		d.log.Error("claim not answered", "job", c.ID, "err", err)
		return
	}
	d.relay.say(m.Reply, data)
}

// part takes a piece of an answer, or what its worker says about it.
func (d *Desk) part(m *nats.Msg) {
	msg, err := decode(m.Data)
	if err != nil {
		d.log.Warn("part that cannot be read", "err", err)
		return
	}
	s := d.seat(msg.id)
	if s != nil && s.take(msg, m.Reply) {
		return
	}
	// It is not of a current attempt.
	d.mu.Lock()
	last, over := d.over[msg.attempt]
	d.mu.Unlock()
	switch {
	case msg.kind == kindLeft:
	case over:
		d.tell(m.Reply, kindHave, msg.attempt, last)
	case s != nil && !s.hasEnded():
		d.tell(m.Reply, kindHeld, msg.attempt, 0)
	default:
		d.tell(m.Reply, kindGone, msg.attempt, 0)
	}
}

func (d *Desk) seat(id job.ID) *Seat {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.seats[id]
}

// tell says something to an attempt's worker. It may be lost: the worker says again how far it is, and is told again.
func (d *Desk) tell(control string, k kind, a attempt, seq uint64) {
	if control == "" {
		return
	}
	if err := d.relay.nc.PublishRequest(control, d.subject+"part", message{kind: k, attempt: a, seq: seq}.encode()); err != nil {
		d.log.Debug("worker not told", "job", a.id, "err", err)
	}
}

// remember keeps that a has ended with part number last.
func (d *Desk) remember(a attempt, last uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.order) < remembered {
		d.order = append(d.order, a)
	} else {
		delete(d.over, d.order[d.next])
		d.order[d.next] = a
		d.next = (d.next + 1) % remembered
	}
	d.over[a] = last
}

// forget takes a closed seat away.
func (d *Desk) forget(s *Seat) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seats[s.id] == s {
		delete(d.seats, s.id)
	}
}
