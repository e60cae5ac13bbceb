package queue_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// TestLinesAreReadInPages: one line's page after page, in its order, whatever waits in others.
func TestLinesAreReadInPages(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	line := queue.Line{Class: job.Standard, Lane: queue.TenantLane("a b")}
	var want []job.ID
	for i := range 60 {
		m := newMessage(job.Standard)
		lane := line.Lane
		switch i % 3 {
		case 1:
			lane = queue.TenantLane("other")
		case 2:
			m.Job.Class = job.Batch
		default:
			want = append(want, m.Job.ID)
		}
		enqueue(t, q, queue.Work, lane, m)
	}
	var got []job.ID
	for from, pages := uint64(0), 0; ; pages++ {
		page, next, err := q.LinePage(t.Context(), model, line, from, 7)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			if pages != 3 {
				t.Errorf("%d pages", pages)
			}
			break
		}
		for _, s := range page {
			got = append(got, s.Job.ID)
			if s.Lane != line.Lane || s.Job.Class != line.Class || s.Body != nil {
				t.Errorf("%s of class %s with %d bytes", s.Lane, s.Job.Class, len(s.Body))
			}
		}
		from = next
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	ids, err := q.LineIDs(t.Context(), model, line.Lane)
	if err != nil || len(ids) != 40 || !ids[want[0]] {
		t.Errorf("%d ids, %v", len(ids), err)
	}
	if page, _, err := q.LinePage(t.Context(), model, queue.Line{Class: job.Interactive, Lane: line.Lane}, 0, 7); err != nil || len(page) != 0 {
		t.Errorf("an empty line has %d, %v", len(page), err)
	}
}

func TestSharedLaneIsCountedWithoutTheRest(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	for range 3 {
		enqueue(t, q, queue.Work, queue.AnyLane, newMessage(job.Batch))
		enqueue(t, q, queue.Work, queue.TenantLane("a"), newMessage(job.Batch))
	}
	pull(t, newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Batch}), 1, 10*time.Second)
	waiting, delivered, err := q.Shared(t.Context(), queue.Work, model)
	if err != nil || waiting[job.Batch] != 2 || delivered[job.Batch] != 1 || waiting[job.Standard] != 0 {
		t.Errorf("%v wait, %v are delivered, %v", waiting, delivered, err)
	}
	if waiting, _, err := q.Shared(t.Context(), queue.Work, "unknown"); err != nil || len(waiting) != 0 {
		t.Errorf("an unknown model has %v, %v", waiting, err)
	}
}

// BenchmarkLinePage reads a short line behind a long one of another tenant.
func BenchmarkLinePage(b *testing.B) {
	q, _ := fresh(b, queue.Config{})
	for range 2000 {
		enqueue(b, q, queue.Work, queue.TenantLane("long"), newMessage(job.Standard))
	}
	enqueue(b, q, queue.Work, queue.TenantLane("short"), newMessage(job.Standard))
	line := queue.Line{Class: job.Standard, Lane: queue.TenantLane("short")}
	for b.Loop() {
		page, _, err := q.LinePage(b.Context(), model, line, 0, 64)
		if err != nil || len(page) != 1 {
			b.Fatal(fmt.Sprint(len(page)), err)
		}
	}
}
