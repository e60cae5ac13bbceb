package results

import (
	"context"
	"slices"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// lineKept is how long the record of a batch's line is kept after its end: as long as a delivery of it is likely to be on its way. DONE has the truth, and is asked once the record is gone.
// At a thousand lines a second it is 60,000 records.
const lineKept = time.Minute

// AcceptLines writes the records of batches' lines, as queued, where there are none, and indexes them for Due; they are counted in the backlog, without limits, for their batches were let in whole. Their tenants' lists
// do not name them, and Redis never keeps their bodies and answers. Records that exist are left alone. All go in few round trips. Made before the lines are published, they are found by whoever
// pulls one; a line that is never published after all is found live and without a message.
func (s *Store) AcceptLines(ctx context.Context, lines []*job.Job) error {
	for some := range slices.Chunk(lines, rebuildCount) {
		all := make([]creation, len(some))
		for i, j := range some {
			all[i] = creation{job: j, state: job.Queued}
		}
		short, cancel := context.WithTimeout(ctx, opTimeout)
		_, err := s.create(short, Limits{}, all...)
		cancel()
		if err != nil {
			return wrap(err, "accepting %d lines of batches", len(some))
		}
	}
	return nil
}
