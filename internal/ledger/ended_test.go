package ledger_test

import (
	"testing"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

func TestEndedBatchesAreListedByTheirEnd(t *testing.T) {
	each(t, func(t *testing.T, s *ledger.Store) {
		tenants(t, s)
		for i, id := range []string{"batch_a", "batch_b", "batch_c"} {
			started(t, s, id, 3)
			_, err := s.FinalizeBatch(t.Context(), 1, id, 1000, id == "batch_b")
			ok(t, err)
			_, err = s.EndBatch(t.Context(), 1, id, job.Millis(3000-1000*i), 3, 0, nil, nil)
			ok(t, err)
		}
		started(t, s, "batch_live", 3)
		list := func(after, until job.Millis, limit int) (ids []string) {
			t.Helper()
			all, err := s.EndedBatches(t.Context(), after, until, limit)
			ok(t, err)
			for _, b := range all {
				ids = append(ids, b.ID)
			}
			return ids
		}
		same(t, list(0, 5000, 10), []string{"batch_c", "batch_b", "batch_a"})
		same(t, list(1000, 2000, 10), []string{"batch_b"})
		same(t, list(0, 5000, 2), []string{"batch_c", "batch_b"})
		same(t, list(3000, 5000, 10), []string(nil))
	})
}
