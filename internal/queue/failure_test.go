package queue_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
	"github.com/millrace/millrace/internal/testenv"
)

const (
	workStream = "WORK_meta-llama_2FLlama_203_2E1_3A8b"
	liveStream = "LIVE_meta-llama_2FLlama_203_2E1_3A8b"
)

func admin(t testing.TB, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// persist publishes until the job is known to be stored.
func persist(t testing.TB, q *queue.Queue, k queue.Kind, m *queue.Message) bool {
	for t.Context().Err() == nil {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		err := q.Enqueue(ctx, k, queue.AnyLane, m)
		cancel()
		switch {
		case err == nil, errors.Is(err, queue.ErrExists):
			return true
		case errors.Is(err, queue.ErrUnavailable): // cut off, or a stream that is being made
			time.Sleep(2 * time.Millisecond)
		default:
			t.Errorf("enqueueing: %v", err)
			return false
		}
	}
	return false
}

func TestRestartsUnderLoadLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	clients := open(t, connect(t, s), queue.Config{WorkAckWait: time.Second})
	workers := open(t, connect(t, s), queue.Config{WorkAckWait: time.Second})

	// Workers: pull, settle, acknowledge, whatever happens, until told to stop.
	stop := make(chan struct{})
	var running sync.WaitGroup
	var settled atomic.Int64
	for _, cfg := range []queue.PullerConfig{
		{Kind: queue.Work, Model: model, Class: job.Standard},
		{Kind: queue.Work, Model: model, Class: job.Standard},
		{Kind: queue.Live, Model: model, Class: job.Standard},
	} {
		p := newPuller(t, workers, cfg)
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				out, err := p.Pull(t.Context(), queue.PullRequest{Batch: 4, Expires: time.Second, Level: 3})
				if err != nil {
					if !errors.Is(err, queue.ErrUnavailable) {
						t.Errorf("pulling: %v", err)
						return
					}
					continue
				}
				for d := range out {
					ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
					_, err := workers.Settle(ctx, outcomeOf(&d.Message, job.Token(d.Delivered)))
					cancel()
					if err == nil || errors.Is(err, queue.ErrSettled) {
						settled.Add(1)
						_ = d.Ack() // while cut off it comes again
					}
				}
			}
		})
	}

	// Clients: each stores jobs as long as the restarts go on.
	var submitting sync.WaitGroup
	var stored [2]atomic.Int64
	over := make(chan struct{})
	for i := range 6 {
		kind := queue.Work
		if i == 0 {
			kind = queue.Live
		}
		submitting.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				m := newMessage(job.Standard)
				if kind == queue.Live {
					m.Job.API = "api"
				}
				if persist(t, clients, kind, m) {
					stored[min(i, 1)].Add(1)
				}
			}
		})
	}

	for range 10 {
		before := settled.Load()
		until(t, "jobs are settled again after a restart", func() bool { return settled.Load() > before+20 })
		s.shutdown()
		s.start(t)
	}
	close(over)
	submitting.Wait()
	// A message whose acknowledgement meets the server's end can stay for ever: the consumer has it as acknowledged, the stream still has it
	// (nats-server 2.15.3). Its job has ended, so whoever compares the two removes it.
	until(t, "the work streams hold nothing but messages of ended jobs", func() bool {
		present, err := clients.Present(t.Context(), model)
		if err != nil {
			return false
		}
		for id := range present {
			if _, err := clients.FindOutcome(t.Context(), id); err != nil {
				return false
			}
			if err := clients.Remove(t.Context(), queue.Work, model, id); err != nil {
				return false
			}
		}
		return true
	})
	close(stop)
	running.Wait()

	ended := map[job.ID]int{}
	var work int64
	for r, err := range clients.Outcomes(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		if ended[r.Job.ID]++; ended[r.Job.ID] > 1 {
			t.Errorf("job %s ended twice", r.Job.ID)
		}
		if !r.Job.Live() {
			work++
		}
	}
	// LIVE jobs may be lost in a restart: whoever holds their connection publishes them again, here nobody does.
	if work != stored[1].Load() {
		t.Errorf("%d durable jobs were stored, %d have ended", stored[1].Load(), work)
	}
	if n := int64(len(ended)) - work; n == 0 || n > stored[0].Load() {
		t.Errorf("%d live jobs were stored, %d have ended", stored[0].Load(), n)
	}
	t.Logf("%d durable and %d live jobs over ten restarts", work, stored[0].Load())
}

func TestPullOutlivesARestartWithoutTraffic(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	nc := connect(t, s)
	q := open(t, nc, queue.Config{})
	for _, cfg := range []queue.PullerConfig{
		{Kind: queue.Live, Model: model, Class: job.Interactive},
		{Kind: queue.Live, Model: model, Worker: "w1"},
	} {
		p := newPuller(t, q, cfg)
		out, err := p.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: 20 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		s.shutdown()
		s.start(t)
		began := time.Now()
		for d := range out {
			t.Errorf("a delivery: %+v", d)
		}
		if waited := time.Since(began); waited > 5*time.Second {
			t.Errorf("%+v: the pull that the restart took ended only after %v", cfg, waited)
		}
		// Its stream and consumer are there again, before anybody publishes.
		if _, err := admin(t, nc).Stream(t.Context(), liveStream); err != nil {
			t.Errorf("%+v: %v", cfg, err)
		}
		lane := queue.AnyLane
		if cfg.Worker != "" {
			lane = queue.WorkerLane(cfg.Worker)
		}
		enqueue(t, q, queue.Live, lane, newMessage(job.Interactive))
		pullOne(t, p)
	}
}

func TestPublisherMakesLiveStreamsAgainAfterARestart(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	nc := connect(t, s)
	q := open(t, nc, queue.Config{})
	if err := q.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	s.shutdown()
	s.start(t)
	until(t, "the memory stream and its consumers are there again", func() bool {
		_, err := admin(t, nc).Consumer(t.Context(), liveStream, string(job.Batch))
		return err == nil
	})
	enqueue(t, q, queue.Live, queue.AnyLane, newMessage(job.Interactive))
}

func TestLostStreamsAndConsumersAreMadeAgain(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	js := admin(t, nc)
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	own := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Worker: "w1"})
	lost := map[string]func() error{
		"the stream":   func() error { return js.DeleteStream(t.Context(), workStream) },
		"the consumer": func() error { return js.DeleteConsumer(t.Context(), workStream, "standard") },
		"the lane":     func() error { return js.DeleteConsumer(t.Context(), workStream, "w-w1") },
	}
	for what, lose := range lost {
		t.Run(what+" before the pull", func(t *testing.T) {
			if err := lose(); err != nil {
				t.Fatal(err)
			}
			enqueue(t, q, queue.Work, queue.AnyLane, newMessage(job.Standard))
			enqueue(t, q, queue.Work, queue.WorkerLane("w1"), newMessage(job.Standard))
			for _, p := range []*queue.Puller{p, own} {
				var got []*queue.Delivery
				for range 3 { // a pull that finds nothing ends, and the next one works
					if got = pull(t, p, 1, time.Second); len(got) == 1 {
						break
					}
				}
				if len(got) != 1 {
					t.Fatalf("%d deliveries", len(got))
				}
				if err := got[0].Ack(); err != nil {
					t.Fatal(err)
				}
			}
		})
		t.Run(what+" during the pull", func(t *testing.T) {
			p, name := p, "standard"
			if what == "the lane" {
				p, name = own, "w-w1"
			}
			out, err := p.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: 10 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			until(t, "the pull waits", func() bool { // one that is on its way gets no word, and ends by its expiry
				c, err := js.Consumer(t.Context(), workStream, name)
				return err == nil && c.CachedInfo().NumWaiting > 0
			})
			began := time.Now()
			if err := lose(); err != nil {
				t.Fatal(err)
			}
			for d := range out {
				t.Errorf("a delivery: %+v", d)
			}
			if waited := time.Since(began); waited > 3*time.Second {
				t.Errorf("ended after %v", waited)
			}
			if _, err := js.Consumer(t.Context(), workStream, name); err != nil {
				t.Error(err)
			}
		})
	}
	if err := js.DeleteStream(t.Context(), "DONE"); err != nil {
		t.Fatal(err)
	}
	m := newMessage(job.Standard)
	if _, err := q.FindOutcome(t.Context(), m.Job.ID); !errors.Is(err, queue.ErrUnavailable) {
		t.Errorf("without DONE: %v, want ErrUnavailable, for nobody can know", err)
	}
	if _, err := q.Settle(t.Context(), outcomeOf(m, 1)); err != nil {
		t.Errorf("settling without DONE: %v", err)
	}
}

func TestCutOffCallsSayUnavailable(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	q := open(t, connect(t, s), queue.Config{})
	m := newMessage(job.Standard)
	enqueue(t, q, queue.Work, queue.AnyLane, m)
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	d := pullOne(t, p)
	s.shutdown()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	other := newMessage(job.Standard)
	for what, call := range map[string]func() error{
		"Enqueue": func() error { return q.Enqueue(ctx, queue.Work, queue.AnyLane, other) },
		"live":    func() error { return q.Enqueue(ctx, queue.Live, queue.AnyLane, other) },
		"Settle":  func() error { _, err := q.Settle(ctx, outcomeOf(m, 1)); return err },
		"Outcome": func() error { _, err := q.Outcome(ctx, "default", "-", m.Job.ID); return err },
		"Find":    func() error { _, err := q.Find(ctx, "", m.Job.ID); return err },
		"FindIn":  func() error { _, err := q.Find(ctx, model, m.Job.ID); return err },
		"Present": func() error { _, err := q.Present(ctx, model); return err },
		"Depth":   func() error { _, err := q.Depth(ctx, queue.Work, model); return err },
		"Models":  func() error { _, err := q.Models(ctx); return err },
		"Healthy": func() error { return q.Healthy(ctx) },
		"Erase":   func() error { return q.Erase(ctx, "default", "-", m.Job.ID) },
		"Remove":  func() error { return q.Remove(ctx, queue.Work, model, m.Job.ID) },
		"Move":    func() error { return q.Move(ctx, &d.Stored, queue.TenantLane("default")) },
		"Ack":     d.Ack,
		"NakSubject": func() error {
			return q.NakSubject(ctx, d.AckSubject, 0)
		},
		"Waiting": func() error {
			for _, err := range q.Waiting(ctx, queue.Work, model, "", false) {
				return err
			}
			return nil
		},
		"Outcomes": func() error {
			for _, err := range q.Outcomes(ctx, 0) {
				return err
			}
			return nil
		},
		"Pull": func() error {
			_, err := p.Pull(ctx, queue.PullRequest{Batch: 1, Expires: 50 * time.Millisecond})
			return err
		},
	} {
		if err := call(); !errors.Is(err, queue.ErrUnavailable) {
			t.Errorf("%s: %v, want ErrUnavailable", what, err)
		}
	}
	s.start(t)
	until(t, "the server answers again", func() bool { return q.Healthy(t.Context()) == nil })
	if _, err := q.Find(t.Context(), model, other.Job.ID); !errors.Is(err, queue.ErrNotFound) {
		t.Errorf("a job that was reported failed was stored later: %v", err)
	}
	if _, err := q.FindOutcome(t.Context(), m.Job.ID); !errors.Is(err, queue.ErrNotFound) {
		t.Errorf("an outcome that was reported failed was stored later: %v", err)
	}
}

func TestOpenWaitsForTheServer(t *testing.T) {
	t.Parallel()
	s := &server{dir: t.TempDir()}
	nc, err := queue.Connect("", "test", s, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := queue.Open(ctx, nc, queue.Config{}, testenv.Log(t)); !errors.Is(err, queue.ErrUnavailable) {
		t.Errorf("no server: %v, want ErrUnavailable", err)
	}
	s.start(t)
	t.Cleanup(s.shutdown)
	q, err := queue.Open(t.Context(), nc, queue.Config{}, testenv.Log(t))
	if err != nil {
		t.Fatal(err)
	}
	q.Close()
	q.Close()
	if err := q.Enqueue(t.Context(), queue.Work, queue.AnyLane, newMessage(job.Batch)); !errors.Is(err, queue.ErrUnavailable) {
		t.Errorf("closed: %v, want ErrUnavailable", err)
	}
}

func TestChangedSettingsAreAppliedOrRefused(t *testing.T) {
	t.Parallel()
	nc := connect(t, newServer(t))
	js := admin(t, nc)
	first := open(t, nc, queue.Config{})
	if err := first.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	changed := queue.Config{WorkAckWait: time.Minute, WorkMaxBytes: 1 << 30, DoneMaxBytes: 2 << 30, Retention: 24 * time.Hour}
	second := open(t, nc, changed)
	if err := second.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	c, err := js.Consumer(t.Context(), workStream, "standard")
	if err != nil || c.CachedInfo().Config.AckWait != time.Minute {
		t.Errorf("ack wait %v, %v", c.CachedInfo().Config.AckWait, err)
	}
	w, err := js.Stream(t.Context(), workStream)
	if err != nil || w.CachedInfo().Config.MaxBytes != 1<<30 || w.CachedInfo().Config.MaxConsumers < 10_000 {
		t.Errorf("work %+v, %v", w.CachedInfo().Config, err)
	}
	d, err := js.Stream(t.Context(), "DONE")
	if err != nil || d.CachedInfo().Config.MaxBytes != 2<<30 || d.CachedInfo().Config.MaxAge != 9*24*time.Hour {
		t.Errorf("done %+v, %v", d.CachedInfo().Config, err)
	}

	// What somebody else has made of a stream is put right where that can be done.
	cfg := d.CachedInfo().Config
	cfg.Discard, cfg.MaxMsgsPerSubject, cfg.AllowDirect, cfg.AllowAtomicPublish = jetstream.DiscardOld, 5, false, false
	if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	open(t, nc, changed)
	if d, err = js.Stream(t.Context(), "DONE"); err != nil {
		t.Fatal(err)
	}
	if c := d.CachedInfo().Config; c.Discard != jetstream.DiscardNew || c.MaxMsgsPerSubject != 1 || !c.AllowDirect || !c.AllowAtomicPublish {
		t.Errorf("done %+v", c)
	}

	for _, row := range []struct {
		reason string
		config jetstream.StreamConfig
		words  []string
	}{
		{"a stream with another retention", jetstream.StreamConfig{Name: workStream, Subjects: []string{"other"}}, []string{workStream, "retention is Limits, must be WorkQueue"}},
		{"a stream in memory", jetstream.StreamConfig{Name: workStream, Subjects: []string{"other"}, Retention: jetstream.WorkQueuePolicy, Storage: jetstream.MemoryStorage}, []string{workStream, "storage is Memory, must be File"}},
		{"a stream of another model", jetstream.StreamConfig{Name: workStream, Subjects: []string{"other"}, Metadata: map[string]string{"millrace-model": "x"}}, []string{workStream, "model is x, must be " + string(model)}},
	} {
		if err := js.DeleteStream(t.Context(), workStream); err != nil {
			t.Fatal(err)
		}
		if _, err := js.CreateStream(t.Context(), row.config); err != nil {
			t.Fatal(err)
		}
		err := open(t, nc, changed).EnsureModel(t.Context(), model)
		if !errors.Is(err, queue.ErrSettings) {
			t.Errorf("%s: %v, want ErrSettings", row.reason, err)
			continue
		}
		for _, w := range row.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", row.reason, err, w)
			}
		}
	}
	if err := js.DeleteStream(t.Context(), workStream); err != nil {
		t.Fatal(err)
	}
	if err := open(t, nc, changed).EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteConsumer(t.Context(), workStream, "batch"); err != nil {
		t.Fatal(err)
	}
	subject := strings.Replace(workStream, "WORK_", "work.", 1) + ".batch.any.*"
	if _, err := js.CreateConsumer(t.Context(), workStream, jetstream.ConsumerConfig{Durable: "batch", FilterSubject: subject, MaxWaiting: 7}); err != nil {
		t.Fatal(err)
	}
	err = open(t, nc, changed).EnsureModel(t.Context(), model)
	if !errors.Is(err, queue.ErrSettings) || !strings.Contains(err.Error(), "max_waiting is 7, must be") {
		t.Errorf("a consumer with another max_waiting: %v", err)
	}
}

func TestRefusedBatchIsPublishedSingly(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	const n = 64
	settle := func(t *testing.T, conflict bool) {
		var wg sync.WaitGroup
		var settled, lost atomic.Int64
		for i := range n {
			m := newMessage(job.Standard)
			if conflict && i%8 == 7 {
				if _, err := q.Settle(t.Context(), outcomeOf(m, 1)); err != nil {
					t.Fatal(err)
				}
			}
			wg.Go(func() {
				switch r, err := q.Settle(t.Context(), outcomeOf(m, 2)); {
				case err == nil:
					settled.Add(1)
				case errors.Is(err, queue.ErrSettled) && r.Outcome.Token == 1:
					lost.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		wg.Wait()
		want := int64(0)
		if conflict {
			want = n / 8
		}
		if lost.Load() != want || settled.Load() != n-want {
			t.Errorf("%d settled, %d were not the first", settled.Load(), lost.Load())
		}
	}
	t.Run("a member is not the first", func(t *testing.T) { settle(t, true) })
	t.Run("batches are not allowed", func(t *testing.T) {
		js := admin(t, nc)
		d, err := js.Stream(t.Context(), "DONE")
		if err != nil {
			t.Fatal(err)
		}
		cfg := d.CachedInfo().Config
		cfg.AllowAtomicPublish = false
		if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		settle(t, false)
	})
}

func TestGoneCallersJobIsNotStoredLater(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	if err := q.EnsureModel(t.Context(), model); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			ctx := t.Context()
			if i%2 == 0 {
				ctx = gone
			}
			err := q.Enqueue(ctx, queue.Work, queue.AnyLane, newMessage(job.Standard))
			if i%2 == 0 && err == nil {
				t.Error("stored for a caller who had gone")
			}
			if i%2 == 1 && err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}
