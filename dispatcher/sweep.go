package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

// sweeper finds what deaths have left, whoever saw them: held sets of workers that are not there, and their lanes.
type sweeper struct {
	d       *Dispatcher
	elected time.Time           // since when this leader watches
	silent  map[job.Worker]bool // found silent by the last turn
}

// sweep looks once. A worker is left for one turn to those who follow up its death, and for longer while they do: they know whether it is charged, and nobody here does.
func (s *sweeper) sweep(ctx context.Context) error {
	d := s.d
	holders, err := d.deps.Results.Holders(ctx)
	if err != nil {
		return fmt.Errorf("listing holders: %w", err)
	}
	silent := map[job.Worker]bool{}
	for _, w := range holders {
		if !d.deps.Cluster.SilentSince(string(w), s.elected) || d.isFollowing(string(w)) {
			continue
		}
		silent[w] = true
		if s.silent[w] {
			if err := d.recoverWorker(ctx, w, false); err != nil {
				return err
			}
		}
	}
	s.silent = silent
	return d.lookAtQueues(ctx, s.elected)
}

// lookAtQueues counts every model's queue for the heartbeat, and moves the lanes of workers that are gone.
func (d *Dispatcher) lookAtQueues(ctx context.Context, elected time.Time) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	lanes := map[queue.Lane]bool{} // of workers that live: a long name is not to be read from its lane
	for _, m := range d.deps.Cluster.Workers("") {
		lanes[queue.WorkerLane(job.Worker(m.ID))] = true
	}
	infos := make([]cluster.QueueInfo, 0, len(models))
	for _, m := range models {
		info := cluster.QueueInfo{Model: m, Waiting: map[job.Class]int{}, WaitingLines: map[job.Tenant]int{}}
		for _, kind := range []queue.Kind{queue.Work, queue.Live} {
			depth, err := d.deps.Queue.Depth(ctx, kind, m)
			if err != nil {
				return fmt.Errorf("counting the %s queue of model %s: %w", kind, m, err)
			}
			count(&info, kind, depth)
			for lane := range depth.WorkerLanes {
				if lanes[lane] || !d.deps.Cluster.SilentSince(strings.TrimPrefix(string(lane), "w-"), elected) {
					continue
				}
				if err := d.moveLane(ctx, kind, m, lane); err != nil {
					return err
				}
			}
		}
		d.metrics.count(info)
		infos = append(infos, info)
	}
	d.mu.Lock()
	d.queues = infos
	d.mu.Unlock()
	return nil
}

// count adds one stream's depth to a model's queue.
func count(info *cluster.QueueInfo, kind queue.Kind, depth queue.Depth) {
	for c, n := range depth.Waiting {
		info.Waiting[c] += n
	}
	for _, n := range depth.Delivered {
		info.Running += n
	}
	for lane, n := range depth.TenantLanes {
		info.WaitingLines[job.Tenant(strings.TrimPrefix(string(lane), "t-"))] += n
	}
	if kind == queue.Work && depth.MaxBytes > 0 {
		info.WorkFill = float64(depth.Bytes) / float64(depth.MaxBytes)
	}
}

// moveLane moves a lane's messages to the lane `any`, but for those that must stay.
func (d *Dispatcher) moveLane(ctx context.Context, kind queue.Kind, m job.Model, lane queue.Lane) error {
	for s, err := range d.deps.Queue.Waiting(ctx, kind, m, lane, false) {
		if err != nil {
			return fmt.Errorf("reading lane %s of model %s: %w", lane, m, err)
		}
		if _, err := d.move(ctx, s); err != nil {
			return err
		}
	}
	return nil
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

// lookAtHolders drops from the held sets what their workers do not hold any more, and finds the attempt that has run longest.
func (d *Dispatcher) lookAtHolders(ctx context.Context) error {
	holders, err := d.deps.Results.Holders(ctx)
	if err != nil {
		return fmt.Errorf("listing holders: %w", err)
	}
	var oldest job.Millis
	for _, w := range holders {
		held, err := d.deps.Results.Held(ctx, w)
		if err != nil {
			return fmt.Errorf("listing what worker %s holds: %w", w, err)
		}
		for _, id := range held {
			rec, err := d.deps.Results.Get(ctx, id)
			switch {
			case passing(err):
				return fmt.Errorf("reading job %s: %w", id, err)
			case err == nil && rec.State == job.Running && rec.Worker == w:
				if n := len(rec.Attempts); n > 0 {
					oldest = max(oldest, d.deps.Results.Now()-rec.Attempts[n-1].Started)
				}
			case !d.young(id) && (err != nil || rec.State.Ended() || rec.Worker != w): // else its claim may be on its way
				if err := d.deps.Results.LetGo(ctx, w, id); err != nil {
					return fmt.Errorf("dropping job %s from the set of worker %s: %w", id, w, err)
				}
			}
		}
	}
	d.metrics.oldestRunning.Set(oldest.Seconds())
	return nil
}
