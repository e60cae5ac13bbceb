package dispatcher

import (
	"context"
	"errors"
	"fmt"
)

// expireFiles removes the files whose time is over, unless a batch that lives reads them: it is removed when that has ended. To clients they are gone already. The rows go first, then the objects: if we crash in between, objects without a file
// are left, which are swept. It also forgets the idempotency keys that are over.
func (d *Dispatcher) expireFiles(ctx context.Context) error {
	now := d.deps.Results.Now()
	for {
		gone, err := d.deps.Ledger.ExpireFiles(ctx, now, fileChunk)
		if err != nil {
			return fmt.Errorf("expiring files: %w", err)
		}
		var errs []error
		for i := range gone {
			f := &gone[i]
			d.log.Info("file expired", "file", f.ID, "tenant", f.Tenant)
			if err := d.deps.Blobs.Delete(ctx, f.Blob); err != nil {
				errs = append(errs, fmt.Errorf("removing the object of file %s, which is swept later: %w", f.ID, err))
			}
		}
		if len(errs) > 0 {
			return errors.Join(errs...)
		}
		if len(gone) < fileChunk {
			break
		}
	}
	if err := d.deps.Ledger.Tidy(ctx, now); err != nil {
		return fmt.Errorf("tidying the database: %w", err)
	}
	return nil
}
