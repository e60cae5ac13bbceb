package ledger

import (
	"context"

	"github.com/millrace/millrace/internal/job"
)

// EndedBatches lists batches of all tenants that ran and ended after `after` and not later than `until`, by the time of their end, at most limit.
func (s *Store) EndedBatches(ctx context.Context, after, until job.Millis, limit int) ([]Batch, error) {
	var all []Batch
	err := s.read(ctx, "listing the batches that ended", func(q *query) error {
		// Of the three times one is set.
		return q.rows(func(row scanner) error {
			var b Batch
			err := scanBatch(row, &b)
			all = append(all, b)
			return err
		}, "SELECT "+batchColumns+" FROM batches WHERE live = 0 AND in_progress > 0 AND completed + expired + cancelled > $1 AND completed + expired + cancelled <= $2 "+
			"ORDER BY completed + expired + cancelled, id LIMIT $3", after, until, limit)
	})
	return all, err
}
