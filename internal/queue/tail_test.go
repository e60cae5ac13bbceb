package queue_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

func settle(t testing.TB, q *queue.Queue, m *queue.Message) {
	t.Helper()
	if _, err := q.Settle(t.Context(), outcomeOf(m, 1)); err != nil {
		t.Fatal(err)
	}
}

// lineOf is a line of a batch.
func lineOf(batch string, n int64) *queue.Message {
	m := newMessage(job.Batch)
	m.Job.ID, m.Job.Group, m.Job.Line, m.Job.CustomID = job.LineID(batch, n), batch, n, fmt.Sprint("line ", n)
	return m
}

// follower reads a tail, whatever happens to the server, and checks that its marks meet.
type follower struct {
	testing.TB
	tail *queue.Tail
	at   queue.Mark
	seen map[job.ID]int
	news int // pages that moved the mark to another stream
}

func follow(t testing.TB, q *queue.Queue, from queue.Mark) *follower {
	t.Helper()
	f := &follower{TB: t, tail: q.Tail(from), at: from, seen: map[job.ID]int{}}
	t.Cleanup(f.tail.Close)
	return f
}

// until reads on until it has seen n jobs.
func (f *follower) until(n int) {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), 30*time.Second)
	defer cancel()
	for len(f.seen) < n {
		page, err := f.tail.Next(ctx)
		switch {
		case ctx.Err() != nil:
			f.Fatalf("%d records, want %d: %v", len(f.seen), n, err)
		case errors.Is(err, queue.ErrUnavailable):
			time.Sleep(10 * time.Millisecond)
			continue
		case err != nil:
			f.Fatal(err)
		}
		if page.From != f.at {
			f.Fatalf("a page begins at %+v, the last one ended at %+v", page.From, f.at)
		}
		if page.To.Stream != f.at.Stream {
			f.news++
		}
		f.at = page.To
		for _, r := range page.Records {
			if r.Result != nil {
				f.Errorf("record %d came with its answer", r.Seq)
			}
			f.seen[r.Job.ID]++
		}
	}
}

func TestTailBringsEachOutcomeOnceInOrder(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	f := follow(t, q, queue.Mark{})
	for range 3 {
		settle(t, q, newMessage(job.Standard))
	}
	f.until(3)
	settle(t, q, newMessage(job.Standard))
	f.until(4)
	// What is erased comes again as a tombstone, and its job is the same.
	m := newMessage(job.Standard)
	settle(t, q, m)
	if err := q.Erase(t.Context(), m.Job.Tenant, job.NoGroup, m.Job.ID); err != nil {
		t.Fatal(err)
	}
	settle(t, q, newMessage(job.Standard))
	f.until(6)
	for id, n := range f.seen {
		if n != 1 {
			t.Errorf("job %s came %d times", id, n)
		}
	}
	again := follow(t, q, queue.Mark{Stream: f.at.Stream, Seq: 3})
	again.until(3)
	if again.news != 0 || f.news != 1 {
		t.Errorf("the stream was new %d and %d times, want 1 and 0", f.news, again.news)
	}
}

func TestTailReadsMoreThanAPage(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	const n = 1203
	done := make(chan error, n)
	for i := range n {
		go func() {
			_, err := q.Settle(context.WithoutCancel(t.Context()), outcomeOf(lineOf("batch_x", int64(i)), 1))
			done <- err
		}()
	}
	f := follow(t, q, queue.Mark{})
	f.until(n)
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestTailOutlivesTheServersRestart(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	q := open(t, connect(t, s), queue.Config{})
	f := follow(t, q, queue.Mark{})
	settle(t, q, newMessage(job.Standard))
	f.until(1)
	for round := range 3 {
		s.shutdown()
		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if _, err := f.tail.Next(short); err == nil {
			t.Error("a page came without a server")
		}
		cancel()
		s.start(t)
		until(t, "the queue is back", func() bool { return q.Healthy(t.Context()) == nil })
		settle(t, q, newMessage(job.Standard))
		f.until(round + 2)
	}
	if f.news != 1 {
		t.Errorf("the stream was another one %d times", f.news-1)
	}
}

func TestTailBeginsAnewWithAnotherDone(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	f := follow(t, q, queue.Mark{})
	for range 3 {
		settle(t, q, newMessage(job.Standard))
	}
	f.until(3)
	old := f.at
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), "DONE"); err != nil {
		t.Fatal(err)
	}
	settle(t, q, newMessage(job.Standard)) // makes it anew
	f.until(4)
	if f.news != 2 || f.at.Seq != 1 || f.at.Stream == old.Stream {
		t.Errorf("after %+v it is at %+v", old, f.at)
	}
	// A reader that was away meanwhile finds out as well.
	late := follow(t, q, old)
	late.until(1)
	if late.at != f.at {
		t.Errorf("a late reader is at %+v, want %+v", late.at, f.at)
	}
	// An end that was lost is gone back over.
	lost := follow(t, q, queue.Mark{Stream: f.at.Stream, Seq: 7})
	settle(t, q, newMessage(job.Standard))
	if page, err := lost.tail.Next(t.Context()); err != nil || len(page.Records) != 0 || page.To.Seq != 2 {
		t.Errorf("behind the end came %+v, %v", page, err)
	}
}

func TestTailEndsWithItsContext(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	f := follow(t, q, queue.Mark{})
	settle(t, q, newMessage(job.Standard))
	f.until(1)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if page, err := f.tail.Next(ctx); err == nil {
		t.Errorf("came %+v", page)
	}
	settle(t, q, newMessage(job.Standard))
	f.until(2) // nothing was lost by that
}

func TestGroupIsReadWholeAndPurged(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	const n = 600 // more than a page
	lines := map[job.ID]string{}
	for i := range int64(n) {
		m := lineOf("batch_a", i+1)
		lines[m.Job.ID] = m.Job.CustomID
		if i%2 == 0 {
			settle(t, q, lineOf("batch_b", i+1))
		}
		settle(t, q, m)
	}
	other := newMessage(job.Standard)
	settle(t, q, other)
	read := func(from uint64) (seen int, next uint64) {
		t.Helper()
		next, err := q.GroupOutcomes(t.Context(), "default", "batch_a", from, func(r *queue.Record) error {
			if lines[r.Job.ID] != r.Job.CustomID || string(r.Result) != `{"by":1}` {
				t.Errorf("read %+v", r)
			}
			seen++
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return seen, next
	}
	seen, next := read(0)
	if seen != n {
		t.Errorf("read %d records, want %d", seen, n)
	}
	if more, again := read(next); more != 0 || again != next {
		t.Errorf("behind the end came %d records, next %d after %d", more, again, next)
	}
	late := lineOf("batch_a", n+1)
	lines[late.Job.ID] = late.Job.CustomID
	settle(t, q, late)
	if more, _ := read(next); more != 1 {
		t.Errorf("later came %d records, want 1", more)
	}
	stop := errors.New("enough")
	if _, err := q.GroupOutcomes(t.Context(), "default", "batch_a", 0, func(*queue.Record) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the reading ended with %v", err)
	}
	headers := 0
	for r, err := range q.GroupHeaders(t.Context(), "default", "batch_a") {
		if err != nil || r.Result != nil || r.Job.Group != "batch_a" {
			t.Fatalf("read %+v, %v", r, err)
		}
		headers++
	}
	if headers != n+1 {
		t.Errorf("read %d headers, want %d", headers, n+1)
	}

	for range 2 {
		if err := q.PurgeGroup(t.Context(), "default", "batch_a"); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := read(0); left != 0 {
		t.Errorf("%d records are left", left)
	}
	for _, m := range []*queue.Message{lineOf("batch_b", 1), other} {
		if _, err := q.Outcome(t.Context(), "default", m.Job.Group, m.Job.ID); err != nil {
			t.Error(err)
		}
	}
	if next, err := q.GroupOutcomes(t.Context(), "nobody", "batch_a", 0, func(*queue.Record) error { return nil }); err != nil || next != 1 {
		t.Errorf("a group of nothing: next %d, %v", next, err)
	}
}
