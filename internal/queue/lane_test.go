package queue_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// TestUndeliveredIsWhatTheWorkerNeverGot: not what it has, nor what it handed back.
func TestUndeliveredIsWhatTheWorkerNeverGot(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		lane := queue.WorkerLane("a worker.1")
		undelivered := func() []job.ID {
			t.Helper()
			var ids []job.ID
			for s, err := range q.Undelivered(t.Context(), kind, model, lane) {
				if err != nil {
					t.Fatal(err)
				}
				if s.Lane != lane || s.Kind != kind {
					t.Errorf("%s came from lane %s of %s", s.Job.ID, s.Lane, s.Kind)
				}
				ids = append(ids, s.Job.ID)
			}
			return ids
		}
		if ids := undelivered(); ids != nil {
			t.Errorf("without a stream or a consumer: %v", ids)
		}
		var want []job.ID
		for _, c := range []job.Class{job.Standard, job.Batch, job.Interactive, job.Batch} {
			m := newMessage(c)
			want = append(want, m.Job.ID)
			enqueue(t, q, kind, lane, m)
			enqueue(t, q, kind, queue.AnyLane, newMessage(c)) // another lane's
		}
		if d := cmp.Diff(want, undelivered()); d != "" {
			t.Errorf("without a consumer (-want +got):\n%s", d)
		}
		p := newPuller(t, q, queue.PullerConfig{Kind: kind, Model: model, Worker: "a worker.1"})
		got := pull(t, p, 2, time.Minute)
		if d := cmp.Diff(want[2:], undelivered()); d != "" {
			t.Errorf("after two were delivered (-want +got):\n%s", d)
		}
		if err := got[0].Nak(0); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want[2:], undelivered()); d != "" {
			t.Errorf("after one was handed back (-want +got):\n%s", d)
		}
		all := pull(t, p, 3, time.Minute)
		ids := make([]job.ID, 0, 3)
		for _, d := range all {
			ids = append(ids, d.Job.ID)
		}
		slices.Sort(ids)
		rest := slices.Concat([]job.ID{got[0].Job.ID}, want[2:])
		slices.Sort(rest)
		if d := cmp.Diff(rest, ids); d != "" {
			t.Errorf("the rest (-want +got):\n%s", d)
		}
		if ids := undelivered(); ids != nil {
			t.Errorf("in the end: %v", ids)
		}
	}
}
