package relay

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

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

const (
	bellSubject   = "millrace.bell."
	cancelSubject = "millrace.cancel"
	endedSubject  = "millrace.ended."
	liveSubject   = "millrace.live."
	answerSubject = "millrace.answer."
)

// listening is how long a new subscription waits for the server to know it.
const listening = 250 * time.Millisecond

// Relay is safe for concurrent use.
type Relay struct {
	nc  *nats.Conn
	log *slog.Logger
	// control is where the APIs that this process's answers go to say what they have.
	control string

	bellMu sync.Mutex // guards bells and what is in them
	bells  map[job.ID]*bell

	answerMu  sync.Mutex // guards what follows
	answers   map[attempt]*Answer
	answerSub *nats.Subscription // made with the first answer
}

// attempt is one try at a job.
type attempt struct {
	id    job.ID
	token job.Token
}

// New returns a relay on nc, which it does not close.
func New(nc *nats.Conn, log *slog.Logger) *Relay {
	return &Relay{nc: nc, log: log, control: answerSubject + nuid.Next(), bells: make(map[job.ID]*bell), answers: make(map[attempt]*Answer)}
}

// bell is one watched job. There is a subscription for each, so that the server drops the bells of jobs that nobody watches, which are most.
type bell struct {
	sub      *nats.Subscription
	heard    chan struct{} // closed once the server knows the subscription
	watchers map[chan struct{}]struct{}
}

// Bell tells everybody who watches id that its record or its events changed. Best effort: who waits also looks by itself now and then.
func (r *Relay) Bell(id job.ID) { r.say(bellSubject+token(string(id)), nil) }

// say publishes what may be lost.
func (r *Relay) say(subject string, data []byte) {
	if err := r.nc.Publish(subject, data); err != nil {
		r.log.Debug("not published", "subject", subject, "err", err)
	}
}

// Watch returns a channel that gets a value (at least one, possibly for several bells) after every Bell for id, and a function that ends the watch. One subscription serves all watchers of a process's job.
// While NATS is connected, every Bell rung after Watch returned is heard: look at the record after Watch, not before.
func (r *Relay) Watch(id job.ID) (<-chan struct{}, func()) {
	ch := make(chan struct{}, 1)
	r.bellMu.Lock()
	b := r.bells[id]
	first := b == nil
	if first {
		b = &bell{heard: make(chan struct{}), watchers: make(map[chan struct{}]struct{})}
		var err error
		// This fails only on a closed connection; then nobody rings, and the watcher looks by itself.
		if b.sub, err = r.nc.Subscribe(bellSubject+token(string(id)), func(*nats.Msg) { r.ring(b) }); err != nil {
			r.log.Debug("bell not watched", "job", id, "err", err)
		}
		r.bells[id] = b
	}
	b.watchers[ch] = struct{}{}
	r.bellMu.Unlock()
	if first {
		r.listen()
		close(b.heard)
	} else {
		<-b.heard
	}
	return ch, func() {
		r.bellMu.Lock()
		defer r.bellMu.Unlock()
		delete(b.watchers, ch)
		if len(b.watchers) == 0 && r.bells[id] == b {
			delete(r.bells, id)
			if b.sub != nil {
				_ = b.sub.Unsubscribe() // fails only if the connection has ended it
			}
		}
	}
}

func (r *Relay) ring(b *bell) {
	r.bellMu.Lock()
	defer r.bellMu.Unlock()
	for ch := range b.watchers {
		select {
		case ch <- struct{}{}:
		default:
		}
	}
}

// listen returns once the server knows the subscriptions made so far. While NATS is away or hangs there is nothing to hear; the subscription then begins with the next connection.
func (r *Relay) listen() {
	if r.nc.IsConnected() {
		_ = r.nc.FlushTimeout(listening)
	}
}

// Cancel tells every worker to stop id. Best effort: the intent is stored first, and workers also learn it when they renew.
func (r *Relay) Cancel(id job.ID) { r.say(cancelSubject, []byte(id)) }

// OnCancel calls fn for each Cancel heard, until ctx ends. It returns once it listens. fn must not block.
func (r *Relay) OnCancel(ctx context.Context, fn func(job.ID)) error {
	return r.on(ctx, cancelSubject, func(m *nats.Msg) { fn(job.ID(m.Data)) })
}

// Ended tells dispatchers that a job of m ended: room to feed more. Best effort.
func (r *Relay) Ended(m job.Model) { r.say(endedSubject+token(string(m)), []byte(m)) }

// OnEnded calls fn for each Ended heard, of any model, until ctx ends. It returns once it listens. fn must not block.
func (r *Relay) OnEnded(ctx context.Context, fn func(job.Model)) error {
	return r.on(ctx, endedSubject+"*", func(m *nats.Msg) { fn(job.Model(m.Data)) })
}

// on calls handle for each message until ctx ends. It returns once the server knows the subscription.
func (r *Relay) on(ctx context.Context, subject string, handle nats.MsgHandler) error {
	sub, err := r.nc.Subscribe(subject, func(m *nats.Msg) {
		if ctx.Err() == nil {
			handle(m)
		}
	})
	if err != nil {
		return fmt.Errorf("listening to %s: %w", subject, err)
	}
	context.AfterFunc(ctx, func() { _ = sub.Unsubscribe() }) // fails only if the connection has ended it
	r.listen()
	return nil
}

// token makes one subject token of any name.
func token(name string) string { return base64.RawURLEncoding.EncodeToString([]byte(name)) }
