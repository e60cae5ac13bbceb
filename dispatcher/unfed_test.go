package dispatcher_test

import (
	"testing"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/ledger"
)

// TestLinesThatAreNotFedAreTold: what of batches has no place in the queue yet is told by tenant, with what it is expected to need, until it has.
func TestLinesThatAreNotFedAreTold(t *testing.T) {
	e := newEnv(t)
	e.worker("w1") // which takes nothing
	const mine, others = 400, 50
	_, err := e.ledger.CreateTenant(t.Context(), ledger.Tenant{ID: "other"})
	e.ok(err)
	e.batch(e.upload(requests(mine)))
	e.batch(e.uploadFor("other", requests(others)), func(b *ledger.Batch) { b.Tenant = "other" })
	cfg := quick
	cfg.FeedLeast = 32
	l := e.lead(cfg)
	look := func() (info cluster.QueueInfo) {
		for _, q := range l.Queues() {
			if q.Model == model {
				info = q
			}
		}
		return info
	}
	var got cluster.QueueInfo
	e.until("what is not fed is told", func() bool {
		got = look()
		return got.Waiting[job.Batch] >= 32 && got.Waiting[job.Batch]+got.BatchLines[job.DefaultTenant]+got.BatchLines["other"] == mine+others
	})
	if got.BatchLines["other"] > others || got.BatchLines[job.DefaultTenant] > mine || len(got.WaitingLines) > 0 {
		t.Errorf("%+v", got)
	}
	lines := got.BatchLines[job.DefaultTenant] + got.BatchLines["other"]
	if each := float64(got.BatchTokens) / float64(lines); each < 8 || each > 100 { // max_tokens and a short prompt
		t.Errorf("%d tokens for %d lines", got.BatchTokens, lines)
	}
	l.stop()
	// With room for all of it nothing is left.
	cfg.FeedLeast = 2 * (mine + others)
	l = e.lead(cfg)
	e.until("all is fed", func() bool {
		got = look()
		return got.Waiting[job.Batch] == mine+others
	})
	e.until("nothing is left to be told", func() bool {
		got = look()
		return len(got.BatchLines) == 0 && got.BatchTokens == 0
	})
}
