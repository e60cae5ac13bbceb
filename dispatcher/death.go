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

// watchDeaths acts on each death as it is found, until ctx ends.
func (d *Dispatcher) watchDeaths(ctx context.Context) {
	for death := range d.deps.Cluster.Deaths(ctx) {
		var err error
		switch death.Role {
		case cluster.RoleWorker:
			say := d.log.Warn
			if death.Farewell {
				say = d.log.Info
			}
			say("a worker is gone", "worker", death.ID, "farewell", death.Farewell, "charged", death.Charged)
			d.metrics.deaths.Inc()
			err = d.recoverWorker(ctx, job.Worker(death.ID), death.Charged && !death.Farewell)
		case cluster.RoleAPI:
			err = d.cancelLive(ctx, job.API(death.ID))
		}
		if err != nil && ctx.Err() == nil { // the sweep finds again what is left
			d.log.Warn("recovering after a death: the sweep goes on", "member", death.ID, "err", err)
		}
	}
}

// recoverWorker frees what a dead worker held. Per job: lease ended (token kept, so that a zombie's late writes are refused) -> delivery handed back -> out of its held set. A crash
// between the steps is found by the sweep, which starts from the held set. charged: the death counts against the jobs.
func (d *Dispatcher) recoverWorker(ctx context.Context, w job.Worker, charged bool) error {
	held, err := d.deps.Results.Held(ctx, w)
	if err != nil {
		return fmt.Errorf("listing what worker %s held: %w", w, err)
	}
	for _, id := range held {
		rec, err := d.deps.Results.EndLease(ctx, id, w, charged)
		switch {
		case err == nil:
		case errors.Is(err, results.ErrNotFound), errors.Is(err, results.ErrFenced): // over, or another's already
			if err := d.deps.Results.LetGo(ctx, w, id); err != nil {
				return fmt.Errorf("dropping job %s from a dead worker's set: %w", id, err)
			}
			continue
		default:
			return fmt.Errorf("ending the lease of job %s: %w", id, err)
		}
		if rec.Deaths >= d.cfg.MaxDeaths {
			o := job.Outcome{State: job.Failed, Error: job.NewError(job.TypeServer, job.CodeWorkerCrashed, fmt.Sprintf("The job's worker died %d times while running it.", rec.Deaths))}
			if err := d.end(ctx, rec, o); err != nil {
				return err
			}
		} else if rec.AckSubject != "" {
			if err := d.deps.Queue.NakSubject(ctx, rec.AckSubject, 0); err != nil {
				return fmt.Errorf("handing back job %s: %w", id, err)
			}
			d.deps.Relay.Bell(id)
		}
		if err := d.deps.Results.LetGo(ctx, w, id); err != nil {
			return fmt.Errorf("dropping job %s from a dead worker's set: %w", id, err)
		}
	}
	return d.recoverLanes(ctx, w)
}

// recoverLanes moves what waits for a dead worker alone to where all can have it.
func (d *Dispatcher) recoverLanes(ctx context.Context, w job.Worker) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	for _, m := range models {
		for _, kind := range []queue.Kind{queue.Work, queue.Live} {
			if err := d.moveLane(ctx, kind, m, queue.WorkerLane(w)); err != nil {
				return err
			}
		}
		if err := d.deps.Queue.DeleteLane(ctx, m, w); err != nil {
			return fmt.Errorf("removing the lane of worker %s: %w", w, err)
		}
	}
	return nil
}

// moveLane moves a lane's messages to the lane `any`, but for those whose job another attempt runs, or whose retry is not due.
func (d *Dispatcher) moveLane(ctx context.Context, kind queue.Kind, m job.Model, lane queue.Lane) error {
	for s, err := range d.deps.Queue.Waiting(ctx, kind, m, lane, true) {
		if errors.Is(err, queue.ErrNotFound) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading lane %s of model %s: %w", lane, m, err)
		}
		if kind == queue.Work {
			movable, err := d.movable(ctx, s.Job.ID)
			if err != nil {
				return err
			}
			if !movable {
				continue
			}
		}
		if err := d.deps.Queue.Move(ctx, s, queue.AnyLane); err != nil {
			return fmt.Errorf("moving job %s out of lane %s: %w", s.Job.ID, lane, err)
		}
	}
	return nil
}

// movable tells whether a waiting message may be moved: no live lease, no delay of a retry.
func (d *Dispatcher) movable(ctx context.Context, id job.ID) (bool, error) {
	rec, err := d.deps.Results.Get(ctx, id)
	if errors.Is(err, results.ErrNotFound) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading job %s: %w", id, err)
	}
	now := d.deps.Results.Now()
	return rec.Lease <= now && rec.NotBefore <= now, nil
}

// cancelLive settles what waits for an API that is gone: nobody can be answered any more. What runs is stopped by its worker.
func (d *Dispatcher) cancelLive(ctx context.Context, api job.API) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	for _, m := range models {
		for s, err := range d.deps.Queue.Waiting(ctx, queue.Live, m, "", false) {
			if errors.Is(err, queue.ErrNotFound) {
				break
			}
			if err != nil {
				return fmt.Errorf("reading the live jobs of model %s: %w", m, err)
			}
			if s.Job.API != api {
				continue
			}
			o := job.Outcome{State: job.Cancelled, Finished: d.deps.Results.Now(), Error: job.NewError(job.TypeServer, job.CodeClientGone, "The API that held the client's connection has died.")}
			if _, err := d.deps.Queue.Settle(ctx, &queue.Record{Job: s.Job, Outcome: o}); err != nil && !errors.Is(err, queue.ErrSettled) {
				return fmt.Errorf("cancelling live job %s: %w", s.Job.ID, err)
			}
			if err := d.deps.Queue.Remove(ctx, queue.Live, m, s.Job.ID); err != nil {
				return fmt.Errorf("removing live job %s: %w", s.Job.ID, err)
			}
			d.metrics.ended.WithLabelValues(string(job.Cancelled)).Inc()
		}
	}
	return nil
}

// sweep looks at everything that a death may have left, whoever saw it: held sets of workers that are not there, their lanes, and what the queues hold.
func (d *Dispatcher) sweep(ctx context.Context, elected time.Time) error {
	holders, err := d.deps.Results.Holders(ctx)
	if err != nil {
		return fmt.Errorf("listing holders: %w", err)
	}
	var oldest job.Millis
	now := d.deps.Results.Now()
	for _, w := range holders {
		if d.deps.Cluster.SilentSince(string(w), elected) {
			// Nobody here saw it die, so nobody can say whose fault it was.
			if err := d.recoverWorker(ctx, w, false); err != nil {
				return err
			}
			continue
		}
		held, err := d.deps.Results.Held(ctx, w)
		if err != nil {
			return fmt.Errorf("listing what worker %s holds: %w", w, err)
		}
		for _, id := range held {
			if rec, err := d.deps.Results.Get(ctx, id); err == nil && rec.State == job.Running && len(rec.Attempts) > 0 {
				oldest = max(oldest, now-rec.Attempts[len(rec.Attempts)-1].Started)
			}
		}
	}
	d.metrics.oldestRunning.Set(oldest.Seconds())
	return d.lookAtQueues(ctx, elected)
}

// lookAtQueues counts every model's queue for the heartbeat, and moves the lanes of workers that are gone.
func (d *Dispatcher) lookAtQueues(ctx context.Context, elected time.Time) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	infos := make([]cluster.QueueInfo, 0, len(models))
	for _, m := range models {
		info := cluster.QueueInfo{Model: m, Waiting: map[job.Class]int{}, WaitingLines: map[job.Tenant]int{}}
		lines := 0
		for _, kind := range []queue.Kind{queue.Work, queue.Live} {
			depth, err := d.deps.Queue.Depth(ctx, kind, m)
			if errors.Is(err, queue.ErrNotFound) {
				continue
			}
			if err != nil {
				return fmt.Errorf("counting the %s queue of model %s: %w", kind, m, err)
			}
			for c, n := range depth.Waiting {
				info.Waiting[c] += n
			}
			for _, n := range depth.Delivered {
				info.Running += n
			}
			for lane, n := range depth.TenantLanes {
				info.WaitingLines[job.Tenant(strings.TrimPrefix(string(lane), "t-"))] += n
				lines += n
			}
			for lane := range depth.WorkerLanes {
				w := strings.TrimPrefix(string(lane), "w-")
				if d.deps.Cluster.SilentSince(w, elected) {
					if err := d.moveLane(ctx, kind, m, lane); err != nil {
						return err
					}
				}
			}
			if kind == queue.Work && depth.MaxBytes > 0 {
				info.WorkFill = float64(depth.Bytes) / float64(depth.MaxBytes)
			}
		}
		for _, c := range job.Classes() {
			d.metrics.waiting.WithLabelValues(string(m), string(c)).Set(float64(info.Waiting[c]))
		}
		d.metrics.waiting.WithLabelValues(string(m), "line").Set(float64(lines))
		infos = append(infos, info)
	}
	d.mu.Lock()
	d.queues = infos
	d.mu.Unlock()
	return nil
}

// end ends a job that runs or waits, from its record.
func (d *Dispatcher) end(ctx context.Context, rec *results.Record, o job.Outcome) error {
	stored, err := d.settler.End(ctx, &rec.Job, rec, o)
	if err != nil {
		return err
	}
	d.metrics.ended.WithLabelValues(string(stored.Outcome.State)).Inc()
	d.log.Info("job ended by the dispatcher", "job", rec.Job.ID, "model", rec.Job.Model, "tenant", rec.Job.Tenant, "state", stored.Outcome.State)
	return nil
}
