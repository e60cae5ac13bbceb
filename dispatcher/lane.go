package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// lanes are the live workers by their lanes: a long name is not to be read from its lane.
func (d *Dispatcher) lanes() map[queue.Lane]*cluster.WorkerInfo {
	lanes := map[queue.Lane]*cluster.WorkerInfo{}
	for _, m := range d.deps.Cluster.Workers("") {
		lanes[queue.WorkerLane(job.Worker(m.ID))] = m.Worker
	}
	return lanes
}

// tendLane moves to the lane `any` what waits in a worker's lane for no good: all of it if the worker is gone; what it never got if it takes nothing, as a draining one; and what a
// ready one has not got within Config.LanePatience. What a live worker has is left to it: what it does not run it moves itself. elected is since when this leader watches.
func (d *Dispatcher) tendLane(ctx context.Context, kind queue.Kind, m job.Model, lane queue.Lane, w *cluster.WorkerInfo, elected time.Time) error {
	switch {
	case w == nil && d.deps.Cluster.SilentSince(strings.TrimPrefix(string(lane), "w-"), elected):
		return d.moveLane(ctx, lane, d.deps.Queue.Waiting(ctx, kind, m, lane, false), 0)
	case w == nil: // it may be heard again
		return nil
	case w.State != cluster.Ready:
		return d.moveLane(ctx, lane, d.deps.Queue.Undelivered(ctx, kind, m, lane), 0)
	}
	return d.moveLane(ctx, lane, d.heldElsewhere(m, lane, w, d.deps.Queue.Undelivered(ctx, kind, m, lane)), d.cfg.LanePatience)
}

// heldElsewhere leaves out of the messages of w's lane what is too long for the model's other workers, and less so for w: they would send it back.
func (d *Dispatcher) heldElsewhere(m job.Model, lane queue.Lane, w *cluster.WorkerInfo, messages iter.Seq2[*queue.Stored, error]) iter.Seq2[*queue.Stored, error] {
	var others job.Tokens
	for _, o := range d.deps.Cluster.Workers(m) {
		if queue.WorkerLane(job.Worker(o.ID)) != lane && o.Worker != nil && o.Worker.State == cluster.Ready {
			others = max(others, o.Worker.Largest)
		}
	}
	return func(yield func(*queue.Stored, error) bool) {
		for s, err := range messages {
			if err == nil && min(s.Job.Cost.Longest(), w.Largest) > others {
				continue
			}
			if !yield(s, err) {
				return
			}
		}
	}
}

// laneAtOnce bounds how many messages of a lane are moved side by side.
const laneAtOnce = 32

// moveLane moves messages of a lane to the lane `any`, but for those that must stay and those of jobs younger than age.
func (d *Dispatcher) moveLane(ctx context.Context, lane queue.Lane, messages iter.Seq2[*queue.Stored, error], age time.Duration) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(laneAtOnce)
	for s, err := range messages {
		if err != nil {
			g.Go(func() error { return fmt.Errorf("reading lane %s: %w", lane, err) })
			break
		}
		if (d.deps.Results.Now() - s.Job.Created).Duration() < age { // both by the store's clock
			continue
		}
		g.Go(func() error {
			moved, err := d.move(ctx, s)
			if moved {
				d.metrics.unlaned.WithLabelValues(string(s.Job.Model)).Inc()
			}
			return err
		})
	}
	return g.Wait()
}

// move moves one message to the lane `any`, and tells whether it did: one whose job another attempt runs, or whose retry is not due, stays, and one that is gone is nobody's concern.
func (d *Dispatcher) move(ctx context.Context, s *queue.Stored) (bool, error) {
	if s.Kind == queue.Work {
		rec, err := d.deps.Results.Get(ctx, s.Job.ID)
		if err != nil && !errors.Is(err, results.ErrNotFound) {
			return false, fmt.Errorf("reading job %s: %w", s.Job.ID, err)
		}
		if now := d.deps.Results.Now(); err == nil && (rec.Lease > now || rec.NotBefore > now) {
			return false, nil
		}
	}
	err := d.deps.Queue.Move(ctx, s, queue.AnyLane)
	if errors.Is(err, queue.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("moving job %s out of lane %s: %w", s.Job.ID, s.Lane, err)
	}
	return true, nil
}
