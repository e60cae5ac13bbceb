package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
)

const (
	// silence is how long after its end a pull is waited for: then its server has gone without a word.
	silence = 900 * time.Millisecond
	// spare places for deliveries of pulls that had been given up.
	spare = 16
	// refusedPause keeps a caller who pulls in a loop from flooding a server that refuses.
	refusedPause = 250 * time.Millisecond
)

// PullerConfig says what a Puller pulls: class's AnyLane, or, if Worker is set, that worker's own lane with all classes.
type PullerConfig struct {
	Kind   Kind
	Model  job.Model
	Class  job.Class
	Worker job.Worker
}

// Puller pulls from one consumer. One Pull may be outstanding at a time. The reply inbox lives as long as the Puller, so nothing delivered late is lost.
type Puller struct {
	q        *Queue
	cfg      PullerConfig
	model    *model
	stream   string
	consumer string
	ackWait  time.Duration
	inbox    string // with the last dot; each pull has its own token below
	sub      *nats.Subscription

	mu     sync.Mutex
	number uint64 // of the last pull
	open   *pull  // the outstanding pull, if any
	closed bool
}

// pull is one request. Its fields are under the puller's mu.
type pull struct {
	number     uint64
	out        chan *Delivery
	left       int
	generation uint64 // of the connection that it was sent on
	epoch      uint64 // of the model when it was sent
	deadline   time.Time
	silent     *time.Timer
	recovering bool
}

// Puller creates the consumer if needed.
func (q *Queue) Puller(ctx context.Context, cfg PullerConfig) (*Puller, error) {
	m := q.model(cfg.Model)
	p := &Puller{
		q: q, cfg: cfg, model: m, stream: m.stream(cfg.Kind), consumer: string(cfg.Class),
		ackWait: q.ackWait(cfg.Kind), inbox: q.nc.NewInbox() + ".",
	}
	if cfg.Worker != "" {
		p.consumer = WorkerLane(cfg.Worker).token()
	}
	if err := p.ensure(ctx, m.epoch.Load(), false); err != nil {
		return nil, fmt.Errorf("pulling %s of model %s: %w", p.consumer, cfg.Model, err)
	}
	sub, err := q.nc.Subscribe(p.inbox+"*", p.receive)
	if err != nil {
		return nil, fmt.Errorf("pulling %s of model %s: %w", p.consumer, cfg.Model, transport(err))
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil { // bounded by what is pulled; a message dropped here would be lost until AckWait
		return nil, fmt.Errorf("pulling %s of model %s: %w", p.consumer, cfg.Model, transport(err))
	}
	p.sub = sub
	q.mu.Lock()
	q.pullers[p] = struct{}{}
	q.mu.Unlock()
	return p, nil
}

// ensure makes sure of the puller's stream and consumer. lost says that one of them is known to be missing since epoch seen.
func (p *Puller) ensure(ctx context.Context, seen uint64, lost bool) error {
	ctx, cancel := p.q.brief(ctx)
	defer cancel()
	if lost || !p.model.ok.Load() {
		if err := p.q.ensure(ctx, p.model, seen); err != nil {
			return err
		}
	}
	if p.cfg.Worker == "" {
		return nil
	}
	return p.q.ensureConsumer(ctx, p.stream, p.q.consumerConfig(p.cfg.Kind, p.model, "", p.cfg.Worker))
}

// PullRequest is one pull.
type PullRequest struct {
	// Batch is how many deliveries are wanted at most, at least 1.
	Batch int
	// Expires ends the pull at the server.
	Expires time.Duration
	// Level is the pull's priority, 0..9, the lowest served first. Ignored for a worker's own lane.
	Level int
}

// Pull sends one request and returns a channel of its deliveries that is closed when the request has ended: all delivered, expired, or refused. A lost
// stream or consumer is created again and a lost connection waited for before the channel closes, so that a caller may simply pull again.
// ctx ending does not end the request: the channel must be drained until closed, which happens at most a second after Expires.
// While there is no connection Pull waits for one, at most for Expires, and then returns ErrUnavailable.
func (p *Puller) Pull(ctx context.Context, r PullRequest) (<-chan *Delivery, error) {
	if r.Batch < 1 || r.Expires < time.Millisecond || r.Level < 0 || r.Level > 9 {
		return nil, fmt.Errorf("pulling %s: batch %d, expires %v, level %d: must be at least 1, at least 1 ms, 0 to 9", p.consumer, r.Batch, r.Expires, r.Level)
	}
	request := struct {
		Expires  time.Duration `json:"expires"`
		Batch    int           `json:"batch"`
		Group    string        `json:"group,omitempty"`
		Priority int           `json:"priority,omitempty"`
	}{Expires: r.Expires, Batch: r.Batch}
	if p.cfg.Worker == "" {
		request.Group, request.Priority = priorityGroup, r.Level
	}
	data, err := json.Marshal(request)
	if err != nil {
		return nil, fmt.Errorf("pulling %s: %w", p.consumer, err)
	}
	wait, cancel := context.WithTimeout(ctx, r.Expires)
	defer cancel()
	for {
		if err := p.q.waitConnected(wait); err != nil {
			return nil, fmt.Errorf("pulling %s: %w", p.consumer, err)
		}
		out, err := p.send(r, data)
		if !errors.Is(err, errCutOff) {
			return out, err
		}
	}
}

// errCutOff: the connection went between the look at it and the publish.
var errCutOff = errors.New("cut off")

func (p *Puller) send(r PullRequest, data []byte) (<-chan *Delivery, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.open != nil {
		return nil, fmt.Errorf("pulling %s: the puller is closed, or the last pull has not ended", p.consumer)
	}
	p.number++
	l := &pull{
		number: p.number, out: make(chan *Delivery, r.Batch+spare), left: r.Batch,
		generation: p.q.nc.Stats().Reconnects, epoch: p.model.epoch.Load(),
		deadline: time.Now().Add(r.Expires + silence),
	}
	err := p.q.nc.PublishRequest(apiPrefix+"CONSUMER.MSG.NEXT."+p.stream+"."+p.consumer, p.inbox+strconv.FormatUint(l.number, 10), data)
	if errors.Is(err, nats.ErrReconnectBufExceeded) {
		return nil, errCutOff
	}
	if err != nil {
		return nil, fmt.Errorf("pulling %s: %w", p.consumer, transport(err))
	}
	p.open = l
	l.silent = time.AfterFunc(r.Expires+silence, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.finish(l)
	})
	return l.out, nil
}

// finish closes l's channel if l is still open. p.mu is held.
func (p *Puller) finish(l *pull) {
	if p.open != l {
		return
	}
	p.open = nil
	l.silent.Stop()
	close(l.out)
}

// receive takes what comes to the inbox: deliveries, which have a subject to answer to, and statuses, which have none.
func (p *Puller) receive(m *nats.Msg) {
	if m.Reply == "" {
		number, _ := strconv.ParseUint(strings.TrimPrefix(m.Subject, p.inbox), 10, 64)
		p.status(number, m.Header.Get("Status"), m.Header.Get("Description"))
		return
	}
	d, err := p.delivery(m)
	p.mu.Lock()
	defer p.mu.Unlock()
	// A delivery comes under the subject that it was stored on, so it does not tell which pull it answers. One that was given up and is served late
	// counts for the next; what that one then gets too much goes to its successor or back.
	l := p.open
	switch {
	case err != nil:
		// It would come again for ever, and nobody could ever answer its client by it.
		p.q.log.Error("a delivery cannot be read: it is dropped", "stream", p.stream, "subject", m.Subject, "err", err)
		if err := p.q.nc.Publish(m.Reply, []byte("+TERM")); err != nil {
			p.q.log.Error("dropping a delivery", "stream", p.stream, "err", err)
		}
	case l == nil || len(l.out) == cap(l.out): // late, of a pull given up, and nobody to take it
		if err := d.Nak(0); err != nil {
			p.q.log.Warn("handing back a late delivery", "job", d.Job.ID, "err", err) // AckWait does it then
		}
	default:
		l.out <- d
	}
	if l != nil {
		if l.left--; l.left == 0 {
			p.finish(l)
		}
	}
}

func (p *Puller) delivery(m *nats.Msg) (*Delivery, error) {
	meta, err := m.Metadata()
	if err != nil {
		return nil, fmt.Errorf("reading %q: %w", m.Reply, err)
	}
	j, err := decodeJob(m.Header)
	if err != nil {
		return nil, err
	}
	d := &Delivery{
		Stored: Stored{
			Message: Message{Job: j}, Kind: p.cfg.Kind, Lane: AnyLane, Seq: meta.Sequence.Stream, Time: meta.Timestamp,
		},
		Delivered: int(meta.NumDelivered), AckSubject: m.Reply, AckWait: p.ackWait, nc: p.q.nc,
	}
	if p.cfg.Worker != "" {
		d.Lane = WorkerLane(p.cfg.Worker)
	}
	if j.Blob == "" {
		d.Body = m.Data
	}
	return d, nil
}

// status takes the server's word on a pull.
func (p *Puller) status(number uint64, code, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.open
	if l == nil || l.number != number || l.recovering {
		return
	}
	switch {
	case code == "408", code == "404", code == "409" && strings.HasPrefix(text, "Batch Completed"):
		p.finish(l)
	case code == "100": // a heartbeat
	default:
		// The consumer or its stream is gone (503: nobody listens; 409 Consumer Deleted), its server goes, it has a new leader, or it does not like the request.
		deleted, shutdown := strings.Contains(text, "Deleted"), strings.Contains(text, "Shutdown")
		if gone := code == "503" || deleted; code == "400" || !gone && !shutdown && !strings.Contains(text, "Leadership") {
			p.q.log.Warn("a pull was refused", "stream", p.stream, "consumer", p.consumer, "status", code, "err", text)
		}
		p.recover(l, code == "503" || code == "400" || deleted || shutdown, code != "503" && !deleted)
	}
}

// cut ends a pull that an earlier connection took with it.
func (p *Puller) cut(generation uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l := p.open; l != nil && l.generation < generation && !l.recovering {
		p.recover(l, false, false)
	}
}

// recover makes sure of the consumer and then ends l, by its deadline at the latest. p.mu is held.
func (p *Puller) recover(l *pull, gone, pause bool) {
	p.q.mu.Lock()
	defer p.q.mu.Unlock()
	if p.q.closed {
		p.finish(l)
		return
	}
	l.recovering = true
	p.q.running.Go(func() {
		ctx, cancel := context.WithDeadline(p.q.life, l.deadline)
		defer cancel()
		// A status may be a server's last word: the connection goes next, takes this call along, and the server that comes is asked again.
		err := ErrUnavailable
		for errors.Is(err, ErrUnavailable) && ctx.Err() == nil {
			if err = p.q.waitConnected(ctx); err == nil {
				err = p.ensure(ctx, l.epoch, gone)
			}
			if err != nil || pause {
				select {
				case <-time.After(refusedPause):
				case <-ctx.Done():
				}
			}
		}
		if err != nil && p.q.life.Err() == nil && p.q.nc.IsConnected() {
			// The next pull finds the same and tries again.
			p.q.log.Warn("making sure of a consumer", "stream", p.stream, "consumer", p.consumer, "err", err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.finish(l)
	})
}

// Close unsubscribes; call it once the last Pull's channel is closed.
func (p *Puller) Close() {
	p.q.mu.Lock()
	delete(p.q.pullers, p)
	p.q.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.closed = true
	_ = p.sub.Unsubscribe() // fails only when the connection is closed, and with it the subscription
	if p.open != nil {
		p.finish(p.open)
	}
}

// Delivery is one message handed to this process. Exactly one of Ack and Nak ends it.
type Delivery struct {
	Stored
	// Delivered counts deliveries of this message, from 1.
	Delivered int
	// AckSubject lets another process hand the delivery back (NakSubject).
	AckSubject string
	AckWait    time.Duration

	nc *nats.Conn
}

func (d *Delivery) answer(what string, text []byte) error {
	if err := d.nc.Publish(d.AckSubject, text); err != nil {
		return fmt.Errorf("%s of job %s: %w", what, d.Job.ID, transport(err))
	}
	return nil
}

// Ack removes the message from the stream. It does not wait for the server.
func (d *Delivery) Ack() error { return d.answer("ack", []byte("+ACK")) }

// Nak hands the message back; it is delivered again after delay.
func (d *Delivery) Nak(delay time.Duration) error { return d.answer("nak", nakText(delay)) }

// InProgress restarts AckWait.
func (d *Delivery) InProgress() error { return d.answer("in progress", []byte("+WPI")) }

func nakText(delay time.Duration) []byte {
	if delay <= 0 {
		return []byte("-NAK")
	}
	return []byte(`-NAK {"delay":` + strconv.FormatInt(int64(delay), 10) + `}`)
}
