package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// sweepBlobs removes objects that no job needs: a request's whose job has ended or was never accepted, an answer's that is not the outcome's or whose outcome is over its retention.
func (d *Dispatcher) sweepBlobs(ctx context.Context) error {
	limit := time.Now().Add(-d.cfg.BlobAge).UnixMilli()
	return d.deps.Blobs.List(ctx, func(i blob.Info) error {
		id, ok := job.ParseBlob(i.Name)
		if !ok || i.Time > limit {
			return nil
		}
		needed, err := d.blobNeeded(ctx, id, i.Name)
		if err != nil || needed {
			return err
		}
		d.log.Info("removing an object that no job needs", "object", i.Name)
		if err := d.deps.Blobs.Delete(ctx, i.Name); err != nil {
			return fmt.Errorf("removing object %s: %w", i.Name, err)
		}
		return nil
	})
}

func (d *Dispatcher) blobNeeded(ctx context.Context, id job.ID, name string) (bool, error) {
	r, err := d.deps.Queue.FindOutcome(ctx, id)
	if err == nil {
		return r.Outcome.Blob == name, nil
	}
	if !errors.Is(err, queue.ErrNotFound) {
		return false, fmt.Errorf("looking for the outcome of job %s: %w", id, err)
	}
	_, err = d.deps.Queue.Find(ctx, "", id)
	if err == nil {
		return true, nil
	}
	if !errors.Is(err, queue.ErrNotFound) {
		return false, fmt.Errorf("looking for the message of job %s: %w", id, err)
	}
	return false, nil
}
