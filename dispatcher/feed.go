package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// feedLoop feeds whenever a job has ended, and every so often without.
func (d *Dispatcher) feedLoop(ctx context.Context, ended <-chan struct{}) {
	d.loop(ctx, "feed", 20*time.Millisecond, func(ctx context.Context) error {
		select {
		case <-ended:
		case <-time.After(d.cfg.Sweep / 4):
		case <-ctx.Done():
			return nil
		}
		return d.feed(ctx)
	})
}

// feed fills the lane `any` of each model from the waiting lines, first come first served within a class, from the low water up to the high.
func (d *Dispatcher) feed(ctx context.Context) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	for _, m := range models {
		depth, err := d.deps.Queue.Depth(ctx, queue.Work, m)
		if err != nil {
			return fmt.Errorf("counting the queue of model %s: %w", m, err)
		}
		if len(depth.TenantLanes) == 0 {
			continue
		}
		if err := d.feedModel(ctx, m, depth); err != nil {
			return err
		}
	}
	return nil
}

func (d *Dispatcher) feedModel(ctx context.Context, m job.Model, depth queue.Depth) error {
	room := map[job.Class]int{}
	total := 0
	for _, c := range job.Classes() {
		if n := depth.Waiting[c]; n < d.cfg.LowWater {
			room[c] = d.cfg.HighWater - n
			total += room[c]
		}
	}
	if total == 0 {
		return nil
	}
	for s, err := range d.deps.Queue.Waiting(ctx, queue.Work, m, "", true) {
		if errors.Is(err, queue.ErrNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the waiting lines of model %s: %w", m, err)
		}
		if !strings.HasPrefix(string(s.Lane), "t-") || room[s.Job.Class] == 0 {
			continue
		}
		movable, err := d.movable(ctx, s.Job.ID)
		if err != nil {
			return err
		}
		if !movable {
			continue
		}
		if err := d.deps.Queue.Move(ctx, s, queue.AnyLane); err != nil {
			return fmt.Errorf("moving job %s out of its waiting line: %w", s.Job.ID, err)
		}
		d.metrics.fed.WithLabelValues(string(m)).Inc()
		room[s.Job.Class]--
		if total--; total == 0 {
			return nil
		}
	}
	return nil
}
