package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
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

// patience is how long after a round its last jobs are waited for. A delivery that the server believes delivered comes again only after its ack wait; it is left out.
const patience = 2 * time.Second

// run keeps `inFlight` jobs of about size bytes in flight for the duration, and returns how many ended, and in what time.
func (b *bare) run(ctx context.Context, inFlight, size int, length time.Duration) (int, time.Duration, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	round, over := context.WithTimeout(ctx, length+patience)
	defer over()
	fail := func(err error) {
		if round.Err() == nil {
			cancel(err)
		}
	}
	begun := time.Now()
	base := begun.UnixNano() // of this round's job numbers
	body := request(0, size)
	ended := make([]chan struct{}, inFlight) // by slot
	for i := range ended {
		ended[i] = make(chan struct{}, 1)
	}
	var outcomes sync.WaitGroup
	consuming, err := b.consumer.Consume(func(m jetstream.Msg) {
		outcomes.Go(func() {
			var slot int
			var n int64
			if _, err := fmt.Sscanf(m.Subject(), "bench.work.%d.%d", &slot, &n); err != nil || slot >= len(ended) || n < base {
				_ = m.Ack() // of an earlier round
				return
			}
			if _, err := b.js.Publish(round, fmt.Sprintf("bench.done.%d.%d", slot, n), body, jetstream.WithExpectLastSequencePerSubject(0)); err != nil {
				fail(fmt.Errorf("storing an outcome: %w", err))
				return
			}
			if err := m.Ack(); err != nil {
				fail(fmt.Errorf("acknowledging: %w", err))
				return
			}
			ended[slot] <- struct{}{} // one job a slot is in flight: there is room
		})
	}, jetstream.PullMaxMessages(inFlight))
	if err != nil {
		return 0, 0, fmt.Errorf("pulling: %w", err)
	}
	counts, last := make([]int, inFlight), make([]time.Duration, inFlight)
	var slots sync.WaitGroup
	for slot := range inFlight {
		slots.Go(func() {
			for n := int64(0); time.Since(begun) < length; n++ {
				subject := fmt.Sprintf("bench.work.%d.%d", slot, base+n)
				if _, err := b.js.Publish(round, subject, body, jetstream.WithExpectLastSequencePerSubject(0)); err != nil {
					fail(fmt.Errorf("publishing: %w", err))
					return
				}
				select {
				case <-ended[slot]:
					counts[slot]++
					last[slot] = time.Since(begun)
				case <-round.Done():
					return
				}
			}
		})
	}
	slots.Wait()
	consuming.Stop()
	<-consuming.Closed()
	over()
	outcomes.Wait()
	total := 0
	for _, n := range counts {
		total += n
	}
	if err := context.Cause(ctx); err != nil {
		return 0, 0, fmt.Errorf("running the bare pipeline: %w", err)
	}
	if total == 0 {
		return 0, 0, errors.New("running the bare pipeline: no job ended")
	}
	return total, slices.Max(last), nil
}
