package dispatcher

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

const (
	feedPause  = 20 * time.Millisecond // between two turns
	feedAtOnce = 32                    // messages that are moved side by side
	// A line that was read to its end for nothing is left alone for feedRest times as long as that took.
	feedRest = 10
)

// feeder moves jobs from the tenants' waiting lines into the lane that workers pull.
type feeder struct {
	d     *Dispatcher
	ended <-chan job.Model
	lined map[job.Model]bool      // models whose lines had jobs in them when all were looked at
	rest  map[job.Model]time.Time // till when a model's lines are left alone
	last  time.Time               // when all models were looked at
}

// feed waits until a job has ended whose model has waiting lines, or all are to be looked at, and fills the lanes.
func (f *feeder) feed(ctx context.Context) error {
	var models []job.Model
	all := time.NewTimer(time.Until(f.last.Add(f.d.cfg.Sweep / 4)))
	defer all.Stop()
	for len(models) == 0 {
		select {
		case m := <-f.ended:
			if f.lined[m] {
				models = append(models, m)
			}
		case <-all.C:
			f.last = time.Now()
			var err error
			if models, err = f.d.deps.Queue.Models(ctx); err != nil {
				return fmt.Errorf("listing models: %w", err)
			}
			if len(models) == 0 {
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
	for _, m := range models {
		if time.Now().Before(f.rest[m]) {
			continue
		}
		depth, err := f.d.deps.Queue.Depth(ctx, queue.Work, m)
		if err != nil {
			return fmt.Errorf("counting the queue of model %s: %w", m, err)
		}
		if f.lined[m] = len(depth.TenantLanes) > 0; !f.lined[m] {
			continue
		}
		if err := f.feedModel(ctx, m, depth); err != nil {
			return err
		}
	}
	return nil
}

// feedModel fills the lane `any` of each class that is below the low water up to the high, first come first served within a class but for what is moved side by side.
func (f *feeder) feedModel(ctx context.Context, m job.Model, depth queue.Depth) error {
	room := map[job.Class]int{}
	total := 0
	for _, c := range job.Classes() {
		if n := depth.Waiting[c]; n < f.d.cfg.LowWater {
			room[c] = f.d.cfg.HighWater - n
			total += room[c]
		}
	}
	if total == 0 {
		return nil
	}
	begin := time.Now()
	var g errgroup.Group
	g.SetLimit(feedAtOnce)
	for s, err := range f.d.deps.Queue.Waiting(ctx, queue.Work, m, "", false) {
		if err != nil {
			_ = g.Wait() // the first error counts
			return fmt.Errorf("reading the waiting lines of model %s: %w", m, err)
		}
		if !strings.HasPrefix(string(s.Lane), "t-") || room[s.Job.Class] == 0 {
			continue
		}
		room[s.Job.Class]--
		total--
		g.Go(func() error {
			moved, err := f.d.move(ctx, s)
			if moved {
				f.d.metrics.fed.WithLabelValues(string(m)).Inc()
			}
			return err
		})
		if total == 0 {
			return g.Wait()
		}
	}
	f.rest[m] = time.Now().Add(feedRest * time.Since(begin))
	return g.Wait()
}
