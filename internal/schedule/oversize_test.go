package schedule_test

import (
	"testing"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

// TestJobThatCanNeverFitWaitsForNoRoom: the engine refuses it, or knows better. But one is enough at a time.
func TestJobThatCanNeverFitWaitsForNoRoom(t *testing.T) {
	t.Parallel()
	r := cache(1000, 0)
	r.Ranks = append(r.Ranks, schedule.Rank{Capacity: 1000})
	b := start(t, schedule.Config{DefaultOutput: 1}, r)
	b.run(ask(job.Standard, 900))
	full := cache(1000, 900)
	full.Ranks = append(full.Ranks, schedule.Rank{Capacity: 1000, Used: 900})
	b.Observe(b.now, full)
	if fits, n := b.offer(ask(job.Batch, 990)); n != 0 {
		t.Error("one that fits in a rank when it is empty does not wait for it")
	} else {
		b.Withdraw(fits)
	}
	never, n := b.offer(ask(job.Standard, 1500))
	if n != 1 {
		t.Error("it waits for room that can never be")
	}
	if _, n := b.offer(ask(job.Standard, 1500)); n != 0 {
		t.Error("two of them start")
	}
	b.End(b.now, never, schedule.Result{})
	if n := b.start(); n != 1 {
		t.Error("the second does not start after the first")
	}
}
