package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// bare is the least that a durable queue on JetStream has to do for one job: store it, hand it out, store its outcome, remove it. Nothing else: no HTTP,
// no record, no claim, no engine. It shows what the server and the disk allow at the same moment.
type bare struct {
	js       jetstream.JetStream
	consumer jetstream.Consumer
}

const (
	bareWork = "BENCH_WORK"
	bareDone = "BENCH_DONE"
)

func openBare(ctx context.Context, nc *nats.Conn) (*bare, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("opening JetStream: %w", err)
	}
	for _, c := range []jetstream.StreamConfig{
		{Name: bareWork, Subjects: []string{"bench.work.>"}, Retention: jetstream.WorkQueuePolicy, Storage: jetstream.FileStorage, MaxBytes: 1 << 30},
		{Name: bareDone, Subjects: []string{"bench.done.>"}, Storage: jetstream.FileStorage, MaxBytes: 1 << 30},
	} {
		if _, err := js.CreateOrUpdateStream(ctx, c); err != nil {
			return nil, fmt.Errorf("creating the stream %s: %w", c.Name, err)
		}
	}
	consumer, err := js.CreateOrUpdateConsumer(ctx, bareWork, jetstream.ConsumerConfig{
		Durable: "bench", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 30 * time.Second, MaxAckPending: 4096,
	})
	if err != nil {
		return nil, fmt.Errorf("creating the consumer: %w", err)
	}
	return &bare{js: js, consumer: consumer}, nil
}

func (b *bare) close(ctx context.Context) error {
	if err := errors.Join(b.js.DeleteStream(ctx, bareWork), b.js.DeleteStream(ctx, bareDone)); err != nil {
		return fmt.Errorf("removing the bare pipeline: %w", err)
	}
	return nil
}

// store stores one message and returns how long its acknowledgement took.
func (b *bare) store(ctx context.Context, body []byte) (time.Duration, error) {
	sent := time.Now()
	if _, err := b.js.Publish(ctx, fmt.Sprintf("bench.done.alone.%d", sent.UnixNano()), body, jetstream.WithExpectLastSequencePerSubject(0)); err != nil {
		return 0, fmt.Errorf("storing a message: %w", err)
	}
	return time.Since(sent), nil
}

// run keeps `inFlight` jobs of about size bytes in flight for the duration, and returns how many ended, and in what time.
func (b *bare) run(ctx context.Context, inFlight, size int, length time.Duration) (int, time.Duration, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body := request(0, size)
	ended := make([]chan struct{}, inFlight) // by slot
	for i := range ended {
		ended[i] = make(chan struct{}, 1)
	}
	var outcomes sync.WaitGroup
	consuming, err := b.consumer.Consume(func(m jetstream.Msg) {
		outcomes.Go(func() {
			var slot, n int
			if _, err := fmt.Sscanf(m.Subject(), "bench.work.%d.%d", &slot, &n); err != nil || slot >= len(ended) {
				_ = m.Ack() // of a run that broke off
				return
			}
			if _, err := b.js.Publish(ctx, fmt.Sprintf("bench.done.%d.%d", slot, n), body, jetstream.WithExpectLastSequencePerSubject(0)); err != nil {
				cancel(fmt.Errorf("storing an outcome: %w", err))
				return
			}
			if err := m.Ack(); err != nil {
				cancel(fmt.Errorf("acknowledging: %w", err))
				return
			}
			ended[slot] <- struct{}{}
		})
	}, jetstream.PullMaxMessages(inFlight))
	if err != nil {
		return 0, 0, fmt.Errorf("pulling: %w", err)
	}
	begun := time.Now()
	base := begun.UnixNano()
	counts := make([]int, inFlight)
	var slots sync.WaitGroup
	for slot := range inFlight {
		slots.Go(func() {
			for n := 0; time.Since(begun) < length; n++ {
				subject := fmt.Sprintf("bench.work.%d.%d", slot, base+int64(n))
				if _, err := b.js.Publish(ctx, subject, body, jetstream.WithExpectLastSequencePerSubject(0)); err != nil {
					cancel(fmt.Errorf("publishing: %w", err))
					return
				}
				select {
				case <-ended[slot]:
					counts[slot]++
				case <-ctx.Done():
					return
				}
			}
		})
	}
	slots.Wait()
	took := time.Since(begun)
	consuming.Stop()
	<-consuming.Closed()
	outcomes.Wait()
	total := 0
	for _, n := range counts {
		total += n
	}
	if err := context.Cause(ctx); err != nil {
		return 0, 0, fmt.Errorf("running the bare pipeline: %w", err)
	}
	return total, took, nil
}
