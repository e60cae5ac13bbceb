package queue_test

import (
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

func TestDrainEndsAnIdlePullAtOnce(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	out, err := p.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	p.Drain()
	if d, open := <-out; open {
		t.Errorf("an empty queue delivered %+v", d)
	}
	p.Drain() // once more does nothing
	if _, err := p.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: time.Second}); err == nil {
		t.Error("a drained puller pulls")
	}
}

// TestDrainLosesNoDelivery drains pullers while messages come in: each message is in the hands of the drained one or with the next puller long before its ack wait.
func TestDrainLosesNoDelivery(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{WorkAckWait: time.Hour})
	cfg := queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard}
	const rounds, each = 20, 10
	seen := map[job.ID]bool{}
	for range rounds {
		p := newPuller(t, q, cfg)
		out, err := p.Pull(t.Context(), queue.PullRequest{Batch: each, Expires: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			for range each {
				if err := q.Enqueue(t.Context(), queue.Work, queue.AnyLane, newMessage(job.Standard)); err != nil {
					t.Error(err)
				}
			}
		}()
		first := <-out
		seen[first.Job.ID] = true
		p.Drain()
		for d := range out {
			seen[d.Job.ID] = true
		}
		p.Close()
		<-sent
	}
	p := newPuller(t, q, cfg)
	until(t, "all are delivered", func() bool {
		for _, d := range pull(t, p, 64, 50*time.Millisecond) {
			seen[d.Job.ID] = true
		}
		return len(seen) == rounds*each
	})
}
