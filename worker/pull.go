package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

const (
	expiryBusy = 250 * time.Millisecond // of a pull while anything runs or is in hand: its level is soon old
	expiryIdle = 5 * time.Second
	elsewhere  = 500 * time.Millisecond // in hand for so long: look whether another worker has room; handed back for so long
)

// pull keeps at most one pull of a consumer outstanding, and does not pull again before all of it has started, until ctx ends. Deliveries run under run.
func (w *Worker) pull(ctx, run context.Context, cfg queue.PullerConfig, deliveries *sync.WaitGroup) {
	rank := cfg.Class.Rank() // -1 for the own lane, which has all classes: pulled whenever there is room
	p := w.puller(ctx, cfg)
	if p == nil {
		return
	}
	defer p.Close()
	for {
		wish, changed := w.gate.want(rank)
		if wish.batch == 0 {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				continue
			}
		}
		if ctx.Err() != nil {
			return
		}
		expires := expiryIdle
		if wish.busy {
			expires = expiryBusy
		}
		pulled, err := p.Pull(run, queue.PullRequest{Batch: wish.batch, Expires: expires, Level: wish.level})
		if err != nil {
			w.log.Warn("pulling", "model", cfg.Model, "kind", cfg.Kind, "class", cfg.Class, "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
			continue
		}
		var inHand sync.WaitGroup
		for d := range pulled {
			inHand.Add(1)
			deliveries.Go(func() { w.handle(ctx, run, d, sync.OnceFunc(inHand.Done)) })
		}
		inHand.Wait()
	}
}

// puller makes a consumer's puller, or nil if ctx ends first.
func (w *Worker) puller(ctx context.Context, cfg queue.PullerConfig) *queue.Puller {
	for {
		p, err := w.deps.Queue.Puller(ctx, cfg)
		if err == nil {
			return p
		}
		if ctx.Err() == nil {
			w.log.Warn("making a consumer: trying again", "model", cfg.Model, "kind", cfg.Kind, "class", cfg.Class, "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// handle runs one delivery to its Ack or Nak. started is called when it has left the hand.
func (w *Worker) handle(ctx, run context.Context, d *queue.Delivery, started func()) {
	defer started()
	j := &d.Job
	log := w.log.With("job", j.ID, "model", j.Model, "tenant", j.Tenant)
	pulse := newPulse(d)
	defer pulse.stop()
	defer func() {
		if p := recover(); p != nil { // a bug of ours: the job goes to the next, and is charged by its next claim
			w.metrics.panics.Inc()
			log.Error("panic while running a job", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			_ = d.Nak(time.Second)
		}
	}()
	hand, leave := context.WithCancelCause(ctx)
	defer leave(nil)
	glance := every(elsewhere, func() {
		if w.roomElsewhere(j) {
			leave(errElsewhere)
		}
	})
	reservation, err := w.gate.enter(hand, j.Class, j.Cost)
	glance.stop()
	if err != nil {
		delay := time.Duration(0)
		if errors.Is(err, errElsewhere) {
			delay = elsewhere
		}
		w.nak(log, d, delay)
		return
	}
	defer reservation.release()
	started()
	if j.Live() {
		w.runLive(run, log, d, reservation)
		return
	}
	w.runDurable(run, log, d, reservation, pulse)
}

// roomElsewhere tells whether another worker could start the job at once.
func (w *Worker) roomElsewhere(j *job.Job) bool {
	for _, m := range w.deps.Cluster.Workers(j.Model) {
		if o := m.Worker; o != nil && m.ID != string(w.id) && o.State == cluster.Ready && o.InHand == 0 && o.Free >= j.Cost.Prompt+growth {
			return true
		}
	}
	return false
}
