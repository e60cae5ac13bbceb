package dispatcher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/millrace/millrace/internal/batch"
	"github.com/millrace/millrace/internal/blob"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/queue"
)

// fileChunk is how many files are looked at, or removed, at a time.
const fileChunk = 100

// sweepBlobs removes old objects that nobody needs: a request's whose job has ended or was never accepted, an answer's that is not the outcome's or whose outcome is over its retention, a file's that has no row, and the index of a batch that
// has ended; and what crashed writers have left of objects that never became visible.
func (d *Dispatcher) sweepBlobs(ctx context.Context) error {
	limit := time.Now().Add(-d.cfg.BlobAge)
	var files, indexes []string
	err := d.deps.Blobs.List(ctx, func(i blob.Info) error {
		id, isJob := job.ParseBlob(i.Name)
		switch {
		case i.Time > limit.UnixMilli():
			return nil
		case strings.HasPrefix(i.Name, ledger.FilePrefix):
			if files = append(files, i.Name); len(files) == fileChunk {
				defer func() { files = files[:0] }()
				return d.dropUnknownFiles(ctx, files)
			}
			return nil
		case strings.HasPrefix(i.Name, batch.IndexPrefix):
			indexes = append(indexes, i.Name)
			return nil
		case !isJob:
			return nil
		}
		needed, err := d.blobNeeded(ctx, id, i.Name)
		if err != nil || needed {
			return err
		}
		return d.dropBlob(ctx, i.Name)
	})
	if err == nil && len(files) > 0 {
		err = d.dropUnknownFiles(ctx, files)
	}
	if err == nil && len(indexes) > 0 {
		err = d.dropEndedIndexes(ctx, indexes)
	}
	if err == nil {
		err = d.deps.Blobs.Tidy(ctx, limit)
	}
	return err
}

func (d *Dispatcher) dropBlob(ctx context.Context, name string) error {
	d.log.Info("removing an object that nobody needs", "object", name)
	if err := d.deps.Blobs.Delete(ctx, name); err != nil {
		return fmt.Errorf("removing object %s: %w", name, err)
	}
	return nil
}

// dropUnknownFiles removes those of the objects that are no file's. An upload's object is there a moment before its row, and a batch's output for as long as the batch is being finished, both of which BlobAge is longer than.
func (d *Dispatcher) dropUnknownFiles(ctx context.Context, names []string) error {
	known, err := d.deps.Ledger.KnownBlobs(ctx, names)
	if err != nil {
		return fmt.Errorf("looking for the files of objects: %w", err)
	}
	for _, name := range names {
		if known[name] {
			continue
		}
		if err := d.dropBlob(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// dropEndedIndexes removes the indexes whose batches do not live. That is asked behind the listing: a batch whose index was seen is among those that live, or has ended.
func (d *Dispatcher) dropEndedIndexes(ctx context.Context, names []string) error {
	live, err := d.deps.Ledger.LiveBatches(ctx)
	if err != nil {
		return fmt.Errorf("listing the batches that live: %w", err)
	}
	needed := make(map[string]bool, len(live))
	for i := range live {
		needed[indexBlob(live[i].ID)] = true
	}
	for _, name := range names {
		if needed[name] {
			continue
		}
		if err := d.dropBlob(ctx, name); err != nil {
			return err
		}
	}
	return nil
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
