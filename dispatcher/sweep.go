package dispatcher

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// sweeper finds what deaths have left, whoever saw them: held sets of workers that are not there, and their lanes.
type sweeper struct {
	d       *Dispatcher
	feed    *feeder
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
	return d.lookAtQueues(ctx, s.elected, s.feed)
}

// lookAtQueues counts every model's queue for the heartbeat and the feeder, and moves what waits in workers' lanes for no good.
func (d *Dispatcher) lookAtQueues(ctx context.Context, elected time.Time, feed *feeder) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	workers := d.lanes()
	backlogs, err := d.deps.Results.Backlogs(ctx)
	if err != nil {
		return fmt.Errorf("reading what is accepted: %w", err)
	}
	infos := make([]cluster.QueueInfo, 0, len(models))
	for _, m := range models {
		info := cluster.QueueInfo{Model: m, Waiting: map[job.Class]int{}, WaitingLines: map[job.Tenant]int{}, BatchLines: map[job.Tenant]int{}, Delivered: map[job.Class]int{}}
		for _, kind := range []queue.Kind{queue.Work, queue.Live} {
			depth, err := d.deps.Queue.Depth(ctx, kind, m)
			if err != nil {
				return fmt.Errorf("counting the %s queue of model %s: %w", kind, m, err)
			}
			count(&info, kind, depth)
			if kind == queue.Work {
				feed.seen(&info, depth)
			}
			for lane := range depth.WorkerLanes {
				if err := d.tendLane(ctx, kind, m, lane, workers[lane], elected); err != nil {
					return err
				}
			}
		}
		if v := d.driver.Load(); v != nil {
			v.unfed(&info)
		}
		weigh(&info, backlogs[m])
		d.metrics.count(info)
		infos = append(infos, info)
	}
	d.mu.Lock()
	d.queues, d.looked = infos, time.Now()
	d.mu.Unlock()
	return nil
}

// count adds one stream's depth to a model's queue.
func count(info *cluster.QueueInfo, kind queue.Kind, depth queue.Depth) {
	for c, n := range depth.Waiting {
		info.Waiting[c] += n
	}
	for c, n := range depth.Delivered {
		info.Running += n
		if kind == queue.Work {
			info.Delivered[c] += n
		}
	}
	for lane, n := range depth.TenantLanes {
		info.WaitingLines[job.Tenant(strings.TrimPrefix(string(lane), "t-"))] += n
	}
	if kind == queue.Work && depth.MaxBytes > 0 {
		info.WorkFill = float64(depth.Bytes) / float64(depth.MaxBytes)
	}
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
