package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/results"
)

const (
	deathsAtOnce  = 8               // deaths that are followed up side by side
	deathAgain    = time.Second     // after a store was away
	deathPatience = 5 * time.Minute // for how long
)

// watchDeaths acts on each death as it is found, until ctx ends.
func (d *Dispatcher) watchDeaths(ctx context.Context) {
	var g errgroup.Group
	g.SetLimit(deathsAtOnce)
	for death := range d.deps.Cluster.Deaths(ctx) {
		g.Go(func() error {
			d.followUp(ctx, death)
			return nil
		})
	}
	_ = g.Wait() // none of them returns an error
}

// followUp does what follows from a death. While a store is away it tries again: nobody else would find out that the death is charged, nor look for the jobs of a dead API.
func (d *Dispatcher) followUp(ctx context.Context, death cluster.Death) {
	var act func() error
	switch death.Role {
	case cluster.RoleWorker:
		d.log.Warn("a worker is gone", "worker", death.ID, "farewell", death.Farewell, "charged", death.Charged)
		d.metrics.deaths.Inc()
		act = func() error { return d.recoverWorker(ctx, job.Worker(death.ID), death.Charged && !death.Farewell) }
	case cluster.RoleAPI:
		act = func() error { return d.cancelLive(ctx, job.API(death.ID)) }
	default:
		return
	}
	d.setFollowing(death.ID, true)
	defer d.setFollowing(death.ID, false)
	for end := time.Now().Add(deathPatience); ; {
		err := act()
		if err == nil || ctx.Err() != nil {
			return
		}
		d.log.Warn("following up a death", "member", death.ID, "err", err)
		if !passing(err) || time.Now().After(end) {
			return
		}
		select {
		case <-time.After(deathAgain):
		case <-ctx.Done():
			return
		}
	}
}

// setFollowing notes that a death is followed up.
func (d *Dispatcher) setFollowing(id string, following bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if following {
		d.following[id] = true
	} else {
		delete(d.following, id)
	}
}

func (d *Dispatcher) isFollowing(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.following[id]
}

// recoverWorker frees what a dead worker held. Per job: lease ended (token kept, so that a zombie's late writes are refused) -> delivery handed back -> out of its held set. A crash
// between the steps is found by the sweep, which starts from the held set. charged: the death counts against the jobs.
func (d *Dispatcher) recoverWorker(ctx context.Context, w job.Worker, charged bool) error {
	held, err := d.deps.Results.Held(ctx, w)
	if err != nil {
		return fmt.Errorf("listing what worker %s held: %w", w, err)
	}
	var failed error
	for _, id := range held {
		err := d.free(ctx, w, id, charged)
		if err == nil {
			err = d.deps.Results.LetGo(ctx, w, id)
		}
		if passing(err) {
			return err
		}
		if err != nil { // the others are freed all the same
			failed = err
		}
	}
	if err := d.recoverLanes(ctx, w); err != nil {
		return err
	}
	return failed
}

// free ends the lease of one job of a dead worker, and hands its delivery back.
func (d *Dispatcher) free(ctx context.Context, w job.Worker, id job.ID, charged bool) error {
	rec, err := d.deps.Results.EndLease(ctx, id, w, charged)
	switch {
	case errors.Is(err, results.ErrNotFound), errors.Is(err, results.ErrFenced): // over, or another's already
		return nil
	case err != nil:
		return fmt.Errorf("ending the lease of job %s: %w", id, err)
	case rec.Deaths >= d.cfg.MaxDeaths:
		return d.end(ctx, rec, job.Outcome{
			State: job.Failed, Error: job.NewError(job.TypeServer, job.CodeWorkerCrashed, fmt.Sprintf("The job's worker died %d times while running it.", rec.Deaths)),
		})
	case rec.AckSubject == "":
		return nil
	}
	if err := d.deps.Queue.NakSubject(ctx, rec.AckSubject, 0); err != nil {
		return fmt.Errorf("handing back job %s: %w", id, err)
	}
	d.deps.Relay.Bell(id)
	return nil
}

// recoverLanes moves what waits for a dead worker alone to where all can have it.
func (d *Dispatcher) recoverLanes(ctx context.Context, w job.Worker) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	for _, m := range models {
		for _, kind := range []queue.Kind{queue.Work, queue.Live} {
			lane := queue.WorkerLane(w)
			if err := d.moveLane(ctx, lane, d.deps.Queue.Waiting(ctx, kind, m, lane, false), 0); err != nil {
				return err
			}
		}
		if err := d.deps.Queue.DeleteLane(ctx, m, w); err != nil {
			return fmt.Errorf("removing the lane of worker %s: %w", w, err)
		}
	}
	return nil
}

// cancelAtOnce bounds how many live jobs are cancelled side by side.
const cancelAtOnce = 32

// cancelLive settles what waits for an API that is gone: nobody can be answered any more. What runs is stopped by its worker.
func (d *Dispatcher) cancelLive(ctx context.Context, api job.API) error {
	models, err := d.deps.Queue.Models(ctx)
	if err != nil {
		return fmt.Errorf("listing models: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(cancelAtOnce)
	for _, m := range models {
		for s, err := range d.deps.Queue.Waiting(ctx, queue.Live, m, "", false) {
			if err != nil {
				g.Go(func() error { return fmt.Errorf("reading the live jobs of model %s: %w", m, err) })
				break
			}
			if s.Job.API == api {
				g.Go(func() error { return d.cancelOne(ctx, s) })
			}
		}
	}
	return g.Wait()
}

func (d *Dispatcher) cancelOne(ctx context.Context, s *queue.Stored) error {
	o := job.Outcome{
		State: job.Cancelled, Finished: d.deps.Results.Now(),
		Error: job.NewError(job.TypeServer, job.CodeClientGone, "The API that held the client's connection has died."),
	}
	if _, err := d.deps.Queue.Settle(ctx, &queue.Record{Job: s.Job, Outcome: o}); err != nil && !errors.Is(err, queue.ErrSettled) {
		return fmt.Errorf("cancelling live job %s: %w", s.Job.ID, err)
	}
	if err := d.deps.Queue.Remove(ctx, queue.Live, s.Job.Model, s.Job.ID); err != nil {
		return fmt.Errorf("removing live job %s: %w", s.Job.ID, err)
	}
	d.metrics.ended.WithLabelValues(string(job.Cancelled)).Inc()
	return nil
}
