package worker

import (
	"context"
	"errors"
	"time"

	"github.com/millrace/millrace/internal/queue"
)

// lanePatience is how long a job of the worker's own lane stays in hand before it is looked whether another has room: what is in this one's cache is worth a short wait.
const lanePatience = 2 * time.Second

// moveOn puts a delivery of this worker's own lane into the lane of all: handed back as it is it would come here again and to nobody else. The delivery stays this worker's until it is
// answered.
func (w *Worker) moveOn(ctx context.Context, d *queue.Delivery) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.AckWait/3) // also while the worker stops, and in time for the answer
	defer cancel()
	if err := w.deps.Queue.Move(ctx, &d.Stored, queue.AnyLane); err != nil && !errors.Is(err, queue.ErrNotFound) {
		return err
	}
	return nil
}
