package ledger_test

import (
	"fmt"
	"testing"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
	"github.com/millrace/millrace/internal/testenv"
)

// BenchmarkTally counts pages of 500 outcomes: of one batch, and of many tenants, models and batches.
func BenchmarkTally(b *testing.B) {
	for name, url := range kinds {
		for _, spread := range []int{1, 50} {
			b.Run(fmt.Sprintf("%s/of %d batches", name, spread), func(b *testing.B) {
				s := testenv.OpenLedger(b, url(b))
				tenants(b, s)
				var page []ledger.Ended
				for i := range spread {
					started(b, s, fmt.Sprintf("batch_%d", i), 1<<40)
				}
				for i := range 500 {
					page = append(page, outcome(fmt.Sprintf("batch_%d", i%spread), true, func(e *ledger.Ended) { e.Key = fmt.Sprint(i % spread) }))
				}
				at := ledger.Position{}
				for b.Loop() {
					to := ledger.Position{Stream: "s", Seq: at.Seq + 500}
					ok(b, s.Tally(b.Context(), 1, at, to, page))
					at = to
				}
				b.ReportMetric(float64(b.N)*500/b.Elapsed().Seconds(), "outcomes/s")
			})
		}
	}
}

func BenchmarkIdentify(b *testing.B) {
	for name, url := range kinds {
		b.Run(name, func(b *testing.B) {
			s := testenv.OpenLedger(b, url(b))
			var secret string
			for range 100 {
				var err error
				secret, _, err = s.CreateKey(b.Context(), ledger.Key{Tenant: job.DefaultTenant})
				ok(b, err)
			}
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if _, err := s.Identify(b.Context(), secret, noon); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
