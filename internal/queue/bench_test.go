package queue_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

// latencies reports the median and the 99th percentile beside the mean.
func latencies(b *testing.B, op func()) {
	var all []time.Duration
	for b.Loop() {
		began := time.Now()
		op()
		all = append(all, time.Since(began))
	}
	slices.Sort(all)
	b.ReportMetric(float64(all[len(all)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(all[len(all)*99/100].Microseconds()), "p99-µs")
}

func benchEnqueue(b *testing.B, kind queue.Kind) {
	q, _ := fresh(b, queue.Config{})
	if err := q.EnsureModel(context.Background(), model); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	latencies(b, func() {
		if err := q.Enqueue(context.Background(), kind, queue.AnyLane, newMessage(job.Standard)); err != nil {
			b.Fatal(err)
		}
	})
}

func BenchmarkEnqueueLive(b *testing.B) { benchEnqueue(b, queue.Live) }

func BenchmarkEnqueueWork(b *testing.B) { benchEnqueue(b, queue.Work) }

func BenchmarkSettle(b *testing.B) {
	q, _ := fresh(b, queue.Config{})
	latencies(b, func() {
		if _, err := q.Settle(context.Background(), outcomeOf(newMessage(job.Standard), 1)); err != nil {
			b.Fatal(err)
		}
	})
}

func BenchmarkOutcome(b *testing.B) {
	q, _ := fresh(b, queue.Config{})
	m := newMessage(job.Standard)
	for range 1000 {
		m = newMessage(job.Standard)
		if _, err := q.Settle(context.Background(), outcomeOf(m, 1)); err != nil {
			b.Fatal(err)
		}
	}
	latencies(b, func() {
		if _, err := q.Outcome(context.Background(), m.Job.Tenant, m.Job.Group, m.Job.ID); err != nil {
			b.Fatal(err)
		}
	})
}

// BenchmarkPull is from the publish of a LIVE job to its delivery, with the pull waiting.
func BenchmarkPull(b *testing.B) {
	q, _ := fresh(b, queue.Config{})
	p := newPuller(b, q, queue.PullerConfig{Kind: queue.Live, Model: model, Class: job.Standard})
	latencies(b, func() {
		out, err := p.Pull(context.Background(), queue.PullRequest{Batch: 1, Expires: 5 * time.Second})
		if err != nil {
			b.Fatal(err)
		}
		if err := q.Enqueue(context.Background(), queue.Live, queue.AnyLane, newMessage(job.Standard)); err != nil {
			b.Fatal(err)
		}
		for d := range out {
			if err := d.Ack(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkInFlight compares the committer with the plain synced publish, at different numbers of publishes at a time.
func BenchmarkInFlight(b *testing.B) {
	for _, n := range []int{8, 16, 32, 64, 256} {
		b.Run(fmt.Sprintf("committer/%d", n), func(b *testing.B) {
			q, _ := fresh(b, queue.Config{})
			if err := q.EnsureModel(context.Background(), model); err != nil {
				b.Fatal(err)
			}
			inFlight(b, n, func() error {
				return q.Enqueue(context.Background(), queue.Work, queue.AnyLane, newMessage(job.Standard))
			})
		})
		b.Run(fmt.Sprintf("bare/%d", n), func(b *testing.B) {
			q, nc := fresh(b, queue.Config{})
			if err := q.EnsureModel(context.Background(), model); err != nil {
				b.Fatal(err)
			}
			prefix := strings.Replace(workStream, "WORK_", "work.", 1) + ".standard.any."
			header := nats.Header{"Millrace-Job": {strings.Repeat("x", 400)}}
			var i atomic.Int64
			inFlight(b, n, func() error {
				_, err := nc.RequestMsg(&nats.Msg{Subject: fmt.Sprint(prefix, i.Add(1)), Header: header, Data: []byte("{}")}, 5*time.Second)
				return err
			})
		})
	}
}

func inFlight(b *testing.B, n int, publish func() error) {
	var left atomic.Int64
	left.Store(int64(b.N))
	b.ResetTimer()
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if err := publish(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "jobs/s")
}
