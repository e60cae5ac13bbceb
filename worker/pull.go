package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/schedule"
)

const (
	expiryBusy = 250 * time.Millisecond // of a pull while anything runs or is in hand: its level is soon old
	expiryIdle = 5 * time.Second
	elsewhere  = 500 * time.Millisecond // in hand for so long: look whether another worker has room; handed back for so long
	pullAgain  = time.Second            // after a pull that could not even be sent
	maxRescues = 3                      // deliveries of a job that may be given back because the engine has halted before their first token
	room       = 16                     // tokens beside its prompt that a job needs to start elsewhere
)

// pull keeps at most one pull of a consumer outstanding, and does not pull again before all of it has started, until ctx ends. Deliveries run under run.
func (w *Worker) pull(ctx, run context.Context, cfg queue.PullerConfig, deliveries *sync.WaitGroup) {
	log := w.log.With("model", cfg.Model, "kind", cfg.Kind, "class", cfg.Class)
	p := w.puller(ctx, log, cfg)
	if p == nil {
		return
	}
	defer p.Close()
	drained := make(chan struct{})
	context.AfterFunc(ctx, func() { // also ends a pull that is under way
		defer close(drained)
		p.Drain()
	})
	defer func() { <-drained }() // pull returns once ctx has ended

	rank := cfg.Class.Rank() // -1 for the own lane, which has all classes: pulled whenever there is room
	failing := false
	left := make(chan struct{}, 64) // gets a value for each delivery that has left the hand
	consumer := int(w.consumerSeq.Add(1))
	defer w.gate.leave(consumer)
	for {
		wish, changed := w.gate.want(consumer, rank)
		if wish.Batch == 0 {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				continue
			}
		}
		expires := expiryIdle
		if wish.Busy {
			expires = expiryBusy
		}
		if w.yielding() { // others are served first, and no more than one job comes where nobody else has room
			wish.Batch, wish.Level = 1, schedule.MaxLevel
		}
		asked := time.Now()
		pulled, err := p.Pull(ctx, queue.PullRequest{Batch: wish.Batch, Expires: expires, Level: wish.Level})
		if err != nil {
			w.gate.pulled(consumer, 0)
			if ctx.Err() == nil && !failing { // once per outage
				log.Warn("pulling: trying again", "err", err)
			}
			failing = true
			select {
			case <-ctx.Done():
				return
			case <-time.After(pullAgain):
			}
			continue
		}
		failing = false
		inHand := 0
		for d := range pulled {
			if inHand == 0 {
				w.gate.took(time.Since(asked))
			}
			inHand++
			deliveries.Go(func() { w.handle(ctx, run, d, sync.OnceFunc(func() { left <- struct{}{} })) })
		}
		w.gate.pulled(consumer, inHand)
		for ; inHand > 0; inHand-- {
			<-left
		}
	}
}

// puller makes a consumer's puller, or nil if ctx ends first.
func (w *Worker) puller(ctx context.Context, log *slog.Logger, cfg queue.PullerConfig) *queue.Puller {
	for {
		p, err := w.deps.Queue.Puller(ctx, cfg)
		if err == nil {
			return p
		}
		if ctx.Err() == nil {
			log.Warn("making a consumer: trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pullAgain):
		}
	}
}

// handle runs one delivery to its answer. started is called when it has left the hand, which it does at once when ctx ends.
func (w *Worker) handle(ctx, run context.Context, d *queue.Delivery, started func()) {
	defer started()
	j := &d.Job
	h := hold(d, w.log.With("job", j.ID, "model", j.Model, "tenant", j.Tenant))
	if d.Lane != queue.AnyLane {
		h.move = func() error { return w.moveTo(run, d, queue.AnyLane) }
	}
	defer h.close()
	defer func() {
		if p := recover(); p != nil { // a bug of ours outside of the call, which has a net of its own: the job goes to the next
			w.panicked(h.log, p)
			h.nak(elsewhere)
		}
	}()
	if w.sendOn(run, h) {
		return
	}
	reservation, err := w.enter(ctx, d)
	switch {
	case err == nil:
	case errors.Is(err, errClosed), errors.Is(err, errHalted), ctx.Err() != nil:
		h.nak(0) // nothing is pulled here any more, or for now
		return
	default:
		h.nak(elsewhere)
		return
	}
	defer reservation.release()
	started()
	if j.Live() {
		w.runLive(run, h, reservation)
	} else {
		w.runDurable(run, h, reservation)
	}
}

// enter waits in hand until the job may start. It does not wait for long while another worker has room.
func (w *Worker) enter(ctx context.Context, d *queue.Delivery) (*reservation, error) {
	ctx, leave := context.WithCancelCause(ctx)
	defer leave(nil)
	patience := elsewhere
	if d.Lane != queue.AnyLane {
		patience = lanePatience
	}
	glance := every(patience, func() {
		if w.roomElsewhere(&d.Job) {
			leave(errElsewhere)
		}
	})
	defer glance.stop()
	j := &d.Job
	return w.gate.enter(ctx, entry{
		id: j.ID, preemptible: !j.Live(), rescuable: d.Delivered <= maxRescues, lane: d.Lane != queue.AnyLane,
		ask: schedule.Ask{
			Tenant: j.Tenant, Model: j.Model, Group: j.Group, Class: j.Class, Cost: j.Cost, Created: j.Created.Time(),
			Streams: j.Events || j.Live() && j.Stream,
		},
	})
}

// roomElsewhere tells whether another worker could start the job at once.
func (w *Worker) roomElsewhere(j *job.Job) bool {
	for _, m := range w.deps.Cluster.Workers(j.Model) {
		if o := m.Worker; o != nil && m.ID != string(w.id) && hasRoom(o, j) {
			return true
		}
	}
	return false
}

// panicked counts and tells a panic that was caught.
func (w *Worker) panicked(log *slog.Logger, p any) {
	w.metrics.panics.Inc()
	log.Error("panic while running a job", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
}
