package worker

import (
	"cmp"
	"context"
	"errors"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// sendOn answers a delivery that is too long for this engine and not, or less so, for another worker's, and tells whether it did: it goes to that worker's lane. Where nobody holds more it runs here: what is known of its length is an estimate,
// and the engine's own word is the better one.
func (w *Worker) sendOn(ctx context.Context, h *holding) bool {
	j := &h.Job
	w.mu.Lock()
	largest := w.largestLocked(j.Model)
	w.mu.Unlock()
	need := j.Cost.Longest()
	if largest <= 0 || need <= largest {
		return false
	}
	var to job.Worker
	held, load := largest, 0.0
	for _, m := range w.deps.Cluster.Workers(j.Model) {
		o := m.Worker
		if o == nil || o.State != cluster.Ready {
			continue
		}
		holds := min(o.Largest, need)
		if c := cmp.Compare(holds, held); c > 0 || c == 0 && to != "" && o.Load < load {
			to, held, load = job.Worker(m.ID), holds, o.Load
		}
	}
	if to == "" {
		return false
	}
	h.log.Debug("a job that is too long for this engine goes to a larger one", "tokens", need, "largest", largest, "to", to)
	h.move = func() error { return w.moveTo(ctx, h.Delivery, queue.WorkerLane(to)) }
	h.nak(elsewhere)
	return true
}

// hasRoom tells whether another worker could start the job at once, as far as it has said.
func hasRoom(o *cluster.WorkerInfo, j *job.Job) bool {
	return o.State == cluster.Ready && o.InHand == 0 && o.Brake == "" && o.FreeRank >= j.Cost.Prompt+room && (o.Largest <= 0 || o.Largest >= j.Cost.Longest())
}

// moveTo puts a delivery into another lane. It stays this worker's until it is answered.
func (w *Worker) moveTo(ctx context.Context, d *queue.Delivery, lane queue.Lane) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.AckWait/3) // also while the worker stops, and in time for the answer
	defer cancel()
	if err := w.deps.Queue.Move(ctx, &d.Stored, lane); err != nil && !errors.Is(err, queue.ErrNotFound) {
		return err
	}
	return nil
}
