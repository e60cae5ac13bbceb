package queue_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/queue"
)

func TestJobComesAsItWasQueued(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		m := newMessage(job.Standard)
		m.Body = every
		m.Job.Metadata = map[string]string{"né\n": "日本 🎉 <b>&</b> \x00\u2028"}
		m.Job.Session = "s"
		enqueue(t, q, kind, queue.AnyLane, m)
		p := newPuller(t, q, queue.PullerConfig{Kind: kind, Model: model, Class: job.Standard})
		d := pullOne(t, p)
		if diff := cmp.Diff(*m, d.Message); diff != "" {
			t.Errorf("%s: %s", kind, diff)
		}
		if d.Kind != kind || d.Lane != queue.AnyLane || d.Seq == 0 || d.Delivered != 1 || time.Since(d.Time).Abs() > time.Minute {
			t.Errorf("%s: delivery %+v", kind, d)
		}
		if err := d.Ack(); err != nil {
			t.Error(err)
		}
		until(t, "the acknowledged message goes", func() bool {
			depth, err := q.Depth(t.Context(), kind, model)
			return err == nil && depth.Bytes == 0
		})
	}
}

// TestOnlookersHideNoMissingStream: who watches all subjects answers for streams that are not there yet, as far as "no responders" goes.
func TestOnlookersHideNoMissingStream(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	sub, err := nc.SubscribeSync(">")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }() // the connection goes with the test
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		enqueue(t, q, kind, queue.AnyLane, newMessage(job.Standard))
	}
}

func TestBlobJobHasNoBody(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Batch)
	m.Job.Blob, m.Body = "b", []byte("not this")
	enqueue(t, q, queue.Work, queue.AnyLane, m)
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Batch})
	if d := pullOne(t, p); d.Body != nil {
		t.Errorf("body %q", d.Body)
	}
}

func TestSecondCopyOnOneSubjectIsRefused(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		m := newMessage(job.Standard)
		enqueue(t, q, kind, queue.AnyLane, m)
		if err := q.Enqueue(t.Context(), kind, queue.AnyLane, m); !errors.Is(err, queue.ErrExists) {
			t.Errorf("%s: %v, want ErrExists", kind, err)
		}
	}
}

func TestJobQueuedAgainAfterItsAckIsDelivered(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Standard)
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	for range 3 {
		until(t, "the subject is free", func() bool { return q.Enqueue(t.Context(), queue.Work, queue.AnyLane, m) == nil })
		d := pullOne(t, p)
		if d.Job.ID != m.Job.ID || d.Delivered != 1 {
			t.Fatalf("delivery %+v", d)
		}
		if err := d.Ack(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTwoCopiesInTwoLanesEndAsOneOutcome(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Standard)
	enqueue(t, q, queue.Work, queue.AnyLane, m)
	enqueue(t, q, queue.Work, queue.WorkerLane("w1"), m)
	a := pullOne(t, newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard}))
	b := pullOne(t, newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Worker: "w1"}))
	if b.Lane != queue.WorkerLane("w1") {
		t.Errorf("lane %q", b.Lane)
	}
	if _, err := q.Settle(t.Context(), outcomeOf(&a.Message, 1)); err != nil {
		t.Fatal(err)
	}
	first, err := q.Settle(t.Context(), outcomeOf(&b.Message, 2))
	if !errors.Is(err, queue.ErrSettled) || first.Outcome.Token != 1 {
		t.Errorf("%v, %v; want the first outcome and ErrSettled", first, err)
	}
}

func TestLowestLevelIsServedFirst(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	other := open(t, connectLike(t, nc), queue.Config{})
	cfg := queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Interactive}
	busy, idle := newPuller(t, q, cfg), newPuller(t, other, cfg)
	fromBusy, err := busy.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: 3 * time.Second, Level: 7})
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	fromIdle, err := idle.Pull(t.Context(), queue.PullRequest{Batch: 2, Expires: 3 * time.Second, Level: 2})
	if err != nil {
		t.Fatal(err)
	}
	// That both pulls wait at the server is for the consumer to say.
	until(t, "both pulls wait", func() bool {
		js, _ := jetstream.New(nc)
		c, err := js.Consumer(t.Context(), "WORK_meta-llama_2FLlama_203_2E1_3A8b", "interactive")
		return err == nil && c.CachedInfo().NumWaiting == 2
	})
	var sent []job.ID
	for range 3 {
		m := newMessage(job.Interactive)
		sent = append(sent, m.Job.ID)
		enqueue(t, q, queue.Work, queue.AnyLane, m)
	}
	var got []job.ID
	for _, from := range []<-chan *queue.Delivery{fromIdle, fromBusy} {
		for d := range from {
			got = append(got, d.Job.ID)
		}
	}
	if diff := cmp.Diff(sent, got); diff != "" {
		t.Error(diff)
	}
}

func TestClassesAndLanesAreApart(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	any1, own, waits := newMessage(job.Batch), newMessage(job.Batch), newMessage(job.Standard)
	enqueue(t, q, queue.Work, queue.AnyLane, any1)
	enqueue(t, q, queue.Work, queue.WorkerLane("w.1"), own)
	enqueue(t, q, queue.Work, queue.TenantLane("a b"), waits)
	for _, row := range []struct {
		cfg  queue.PullerConfig
		want []job.ID
	}{
		{queue.PullerConfig{Class: job.Standard}, nil},
		{queue.PullerConfig{Class: job.Batch}, []job.ID{any1.Job.ID}},
		{queue.PullerConfig{Worker: "w.1"}, []job.ID{own.Job.ID}},
		{queue.PullerConfig{Worker: "w.2"}, nil},
	} {
		row.cfg.Kind, row.cfg.Model = queue.Work, model
		var got []job.ID
		for _, d := range pull(t, newPuller(t, q, row.cfg), 5, 50*time.Millisecond) {
			got = append(got, d.Job.ID)
		}
		if diff := cmp.Diff(row.want, got); diff != "" {
			t.Errorf("%+v: %s", row.cfg, diff)
		}
	}
	depth, err := q.Depth(t.Context(), queue.Work, model)
	if err != nil {
		t.Fatal(err)
	}
	want := queue.Depth{
		Waiting:     map[job.Class]int{job.Interactive: 0, job.Standard: 0, job.Batch: 0},
		Delivered:   map[job.Class]int{job.Interactive: 0, job.Standard: 0, job.Batch: 1},
		WorkerLanes: map[queue.Lane]int{"w-w.1": 1}, TenantLanes: map[queue.Lane]int{"t-a b": 1}, Lines: map[queue.Line]int{{Class: job.Standard, Lane: "t-a b"}: 1}, MaxBytes: 8 << 30,
	}
	if diff := cmp.Diff(want, depth, cmpopts.IgnoreFields(queue.Depth{}, "Bytes")); diff != "" {
		t.Error(diff)
	}
	present, err := q.Present(t.Context(), model)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[job.ID]queue.Lane{any1.Job.ID: "any", own.Job.ID: "w-w.1", waits.Job.ID: "t-a b"}, present); diff != "" {
		t.Error(diff)
	}
	if err := q.DeleteLane(t.Context(), model, "w.1"); err != nil {
		t.Error(err)
	}
	if err := q.DeleteLane(t.Context(), model, "w.1"); err != nil {
		t.Errorf("again: %v", err)
	}
	if present, err := q.Present(t.Context(), model); err != nil || len(present) != 3 {
		t.Errorf("after deleting a lane: %v, %v", present, err)
	}
}

func TestDeliveryNotRenewedComesAgain(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{WorkAckWait: 300 * time.Millisecond})
	lost, kept := newMessage(job.Standard), newMessage(job.Standard)
	enqueue(t, q, queue.Work, queue.AnyLane, lost)
	enqueue(t, q, queue.Work, queue.AnyLane, kept)
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	got := pull(t, p, 2, 2*time.Second)
	if len(got) != 2 || got[0].AckWait != 300*time.Millisecond {
		t.Fatalf("%d deliveries: %+v", len(got), got)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if err := got[1].InProgress(); err != nil {
					t.Error(err)
				}
			case <-done:
				return
			}
		}
	})
	again := pull(t, p, 2, 700*time.Millisecond)
	close(done)
	wg.Wait()
	for _, d := range again {
		if d.Job.ID != lost.Job.ID {
			t.Errorf("the renewed job came again")
		}
	}
	if len(again) == 0 || again[0].Delivered != 2 {
		t.Errorf("deliveries %+v, want the lost job's second", again)
	}
}

func TestHandedBackDeliveryWaitsItsDelay(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	other := open(t, connectLike(t, nc), queue.Config{})
	m := newMessage(job.Standard)
	enqueue(t, q, queue.Work, queue.AnyLane, m)
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	d := pullOne(t, p)
	const delay = 300 * time.Millisecond
	began := time.Now()
	if err := d.Nak(delay); err != nil {
		t.Fatal(err)
	}
	d = pullOne(t, p)
	if waited := time.Since(began); waited < delay || d.Delivered != 2 {
		t.Errorf("delivery %d after %v", d.Delivered, waited)
	}
	began = time.Now()
	if err := other.NakSubject(t.Context(), d.AckSubject, 0); err != nil {
		t.Fatal(err)
	}
	if d = pullOne(t, p); d.Delivered != 3 || time.Since(began) > 2*time.Second {
		t.Errorf("handed back by another process: delivery %d after %v", d.Delivered, time.Since(began))
	}
	if err := q.NakSubject(t.Context(), "work.x", 0); err == nil {
		t.Error("a subject that is none to answer to was taken")
	}
}

func TestFullStreamRefusesAndLosesNothing(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{WorkMaxBytes: 100 << 10, LiveMaxBytes: 100 << 10})
	for _, kind := range []queue.Kind{queue.Work, queue.Live} {
		var mu sync.Mutex
		accepted := map[job.ID]bool{}
		var wg sync.WaitGroup
		for range 150 {
			wg.Go(func() {
				m := newMessage(job.Standard)
				m.Body = bytes.Repeat([]byte{'x'}, 1<<10)
				switch err := q.Enqueue(t.Context(), kind, queue.AnyLane, m); {
				case err == nil:
					mu.Lock()
					accepted[m.Job.ID] = true
					mu.Unlock()
				case !errors.Is(err, queue.ErrFull):
					t.Errorf("%s: %v, want ErrFull", kind, err)
				}
			})
		}
		wg.Wait()
		if len(accepted) == 0 || len(accepted) == 150 {
			t.Fatalf("%s: %d accepted", kind, len(accepted))
		}
		p := newPuller(t, q, queue.PullerConfig{Kind: kind, Model: model, Class: job.Standard})
		for _, d := range pull(t, p, 150, 500*time.Millisecond) {
			delete(accepted, d.Job.ID)
			if err := d.Ack(); err != nil {
				t.Fatal(err)
			}
		}
		if len(accepted) != 0 {
			t.Errorf("%s: %d accepted jobs are lost", kind, len(accepted))
		}
		until(t, "there is room again", func() bool { return q.Enqueue(t.Context(), kind, queue.AnyLane, newMessage(job.Standard)) == nil })
	}
}

func TestWhatNoMessageHoldsIsRefused(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	for _, size := range []int{256 << 10, 1<<20 - 1, 1 << 20, 1<<20 + 1} {
		m := newMessage(job.Standard)
		m.Body = make([]byte, size)
		enqueue(t, q, queue.Work, queue.AnyLane, m)
	}
	big := newMessage(job.Standard)
	big.Body = make([]byte, 8<<20)
	err := q.Enqueue(t.Context(), queue.Work, queue.AnyLane, big)
	if !errors.Is(err, queue.ErrRefused) || !strings.Contains(err.Error(), "8388608") {
		t.Errorf("%v, want ErrRefused and the limit", err)
	}
	wide := newMessage(job.Standard)
	wide.Job.Metadata = map[string]string{"k": strings.Repeat("x", 64<<10)}
	if err := q.Enqueue(t.Context(), queue.Work, queue.AnyLane, wide); !errors.Is(err, queue.ErrRefused) {
		t.Errorf("%v, want ErrRefused", err)
	}
	// The largest metadata that the API takes, in its widest characters.
	wide.Job.Metadata = map[string]string{}
	for i := range 16 {
		wide.Job.Metadata[fmt.Sprintf("%02d", i)+strings.Repeat("🎉", 62)] = strings.Repeat("🎉", 512)
	}
	enqueue(t, q, queue.Work, queue.AnyLane, wide)
	s, err := q.Find(t.Context(), model, wide.Job.ID)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(*wide, s.Message); diff != "" {
		t.Error(diff)
	}
	r := outcomeOf(wide, 1)
	r.Outcome.State, r.Outcome.Error = job.Failed, job.NewError(job.TypeServer, job.CodeEngineError, strings.Repeat("é", 100<<10))
	r.Outcome.Attempts = make([]job.Attempt, 1000)
	if _, err := q.Settle(t.Context(), r); err != nil {
		t.Errorf("settling with a long error: %v", err)
	}
}

func TestFindPrefersTheCopyInAny(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	m := newMessage(job.Standard)
	if _, err := q.Find(t.Context(), "", m.Job.ID); !errors.Is(err, queue.ErrNotFound) {
		t.Errorf("%v, want ErrNotFound", err)
	}
	if _, err := q.Find(t.Context(), "no such model", m.Job.ID); !errors.Is(err, queue.ErrNotFound) {
		t.Errorf("%v, want ErrNotFound", err)
	}
	enqueue(t, q, queue.Work, queue.AnyLane, m)
	enqueue(t, q, queue.Work, queue.TenantLane("default"), m)
	for _, name := range []job.Model{model, ""} {
		s, err := q.Find(t.Context(), name, m.Job.ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(*m, s.Message); diff != "" || s.Lane != queue.AnyLane || s.Kind != queue.Work {
			t.Errorf("in %q: %+v %s", name, s, diff)
		}
	}
	models, err := q.Models(t.Context())
	if diff := cmp.Diff([]job.Model{model}, models); diff != "" || err != nil {
		t.Error(diff, err)
	}
	if err := q.Remove(t.Context(), queue.Work, model, m.Job.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := q.Find(t.Context(), model, m.Job.ID); !errors.Is(err, queue.ErrNotFound) {
		t.Errorf("after Remove: %v, want ErrNotFound", err)
	}
	if err := q.Remove(t.Context(), queue.Work, model, m.Job.ID); err != nil {
		t.Errorf("again: %v", err)
	}
}

func TestMoveNeverLeavesTheJobWithoutACopy(t *testing.T) {
	t.Parallel()
	line := queue.TenantLane("default")
	setup := func(t *testing.T) (*queue.Queue, *queue.Message, *queue.Stored) {
		q, _ := fresh(t, queue.Config{})
		m := newMessage(job.Standard)
		enqueue(t, q, queue.Work, line, m)
		for s, err := range q.Waiting(t.Context(), queue.Work, model, line, false) {
			if err != nil {
				t.Fatal(err)
			}
			return q, m, s
		}
		t.Fatal("nothing waits")
		return nil, nil, nil
	}
	check := func(t *testing.T, q *queue.Queue, m *queue.Message) {
		t.Helper()
		var got []*queue.Stored
		for s, err := range q.Waiting(t.Context(), queue.Work, model, "", true) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, s)
		}
		if len(got) != 1 || got[0].Lane != queue.AnyLane {
			t.Fatalf("waiting: %+v", got)
		}
		if diff := cmp.Diff(*m, got[0].Message); diff != "" {
			t.Error(diff)
		}
	}
	t.Run("whole", func(t *testing.T) {
		t.Parallel()
		q, m, s := setup(t)
		if err := q.Move(t.Context(), s, queue.AnyLane); err != nil {
			t.Fatal(err)
		}
		check(t, q, m)
		if err := q.Move(t.Context(), s, queue.AnyLane); !errors.Is(err, queue.ErrNotFound) {
			t.Errorf("again: %v, want ErrNotFound", err)
		}
		check(t, q, m)
	})
	t.Run("cut after the publish", func(t *testing.T) {
		t.Parallel()
		q, m, s := setup(t)
		enqueue(t, q, queue.Work, queue.AnyLane, m)
		if err := q.Move(t.Context(), s, queue.AnyLane); err != nil {
			t.Fatal(err)
		}
		check(t, q, m)
	})
	t.Run("acknowledged before", func(t *testing.T) {
		t.Parallel()
		q, m, s := setup(t)
		if err := q.Remove(t.Context(), queue.Work, model, m.Job.ID); err != nil {
			t.Fatal(err)
		}
		if err := q.Move(t.Context(), s, queue.AnyLane); !errors.Is(err, queue.ErrNotFound) {
			t.Errorf("%v, want ErrNotFound", err)
		}
		if _, err := q.Find(t.Context(), model, m.Job.ID); !errors.Is(err, queue.ErrNotFound) {
			t.Errorf("a job that was gone is back: %v", err)
		}
	})
	t.Run("stored in a batch", func(t *testing.T) {
		t.Parallel()
		q, nc := fresh(t, queue.Config{})
		many := make([]*queue.Message, 400) // so many at once that some surely wait for each other
		var wg sync.WaitGroup
		for i := range many {
			many[i] = newMessage(job.Batch)
			wg.Go(func() { enqueue(t, q, queue.Work, line, many[i]) })
		}
		wg.Wait()
		batched := 0
		for s, err := range q.Waiting(t.Context(), queue.Work, model, line, false) {
			if err != nil {
				t.Fatal(err)
			}
			js, _ := jetstream.New(nc)
			stream, err := js.Stream(t.Context(), "WORK_meta-llama_2FLlama_203_2E1_3A8b")
			if err != nil {
				t.Fatal(err)
			}
			if raw, err := stream.GetMsg(t.Context(), s.Seq); err == nil && raw.Header.Get("Nats-Batch-Id") != "" {
				batched++
			}
			if err := q.Move(t.Context(), s, queue.AnyLane); err != nil {
				t.Fatal(err)
			}
		}
		if batched == 0 {
			t.Error("no message was stored in a batch: the test shows nothing")
		}
	})
}

func TestWaitingListsPagesInOrder(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	line := queue.TenantLane("ten.ant")
	for _, err := range q.Waiting(t.Context(), queue.Live, model, "", false) {
		t.Fatalf("a model without streams: %v", err)
	}
	const n = 600
	want := map[job.ID]bool{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			for range n / 20 {
				m := newMessage(job.Batch)
				mu.Lock()
				want[m.Job.ID] = true
				mu.Unlock()
				enqueue(t, q, queue.Work, line, m)
			}
		})
	}
	wg.Wait()
	enqueue(t, q, queue.Work, queue.AnyLane, newMessage(job.Batch))
	last := uint64(0)
	for s, err := range q.Waiting(t.Context(), queue.Work, model, line, false) {
		if err != nil {
			t.Fatal(err)
		}
		if s.Seq <= last || s.Lane != line || s.Body != nil {
			t.Fatalf("after %d: %+v", last, s)
		}
		last = s.Seq
		delete(want, s.Job.ID)
	}
	if len(want) != 0 {
		t.Errorf("%d jobs were not listed", len(want))
	}
	for range q.Waiting(t.Context(), queue.Work, model, "", true) {
		break // a caller may stop
	}
	present, err := q.Present(t.Context(), model)
	if err != nil || len(present) != n+1 {
		t.Errorf("%d present, %v", len(present), err)
	}
}

func TestLongNamesStayApart(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{WorkMaxBytes: 1 << 30, DoneMaxBytes: 1 << 30}) // two models by the defaults need more disk than a machine may have
	long := strings.Repeat("日", 100)
	a, b := newMessage(job.Standard), newMessage(job.Standard)
	a.Job.Model, b.Job.Model = job.Model(long+"a"), job.Model(long+"b")
	a.Job.Tenant = job.Tenant(long + "t")
	for _, m := range []*queue.Message{a, b} {
		enqueue(t, q, queue.Work, queue.TenantLane(m.Job.Tenant), m)
	}
	models, err := q.Models(t.Context())
	if err != nil || !slices.Equal(models, []job.Model{a.Job.Model, b.Job.Model}) {
		t.Errorf("models %q, %v", models, err)
	}
	lane := queue.TenantLane(a.Job.Tenant)
	for s, err := range q.Waiting(t.Context(), queue.Work, a.Job.Model, lane, true) {
		if err != nil || s.Job.ID != a.Job.ID || s.Lane != lane {
			t.Errorf("%+v, %v", s, err)
		}
	}
	d, err := q.Depth(t.Context(), queue.Work, a.Job.Model)
	if err != nil || d.TenantLanes[lane] != 1 {
		t.Errorf("%+v, %v", d, err)
	}
	if _, err := q.Settle(t.Context(), outcomeOf(a, 1)); err != nil {
		t.Fatal(err)
	}
	if r, err := q.Outcome(t.Context(), a.Job.Tenant, job.NoGroup, a.Job.ID); err != nil || r.Job.Tenant != a.Job.Tenant {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestUnreadableDeliveryIsDropped(t *testing.T) {
	t.Parallel()
	q, nc := fresh(t, queue.Config{})
	m := newMessage(job.Standard)
	enqueue(t, q, queue.Work, queue.AnyLane, m)
	if _, err := nc.Request("work.meta-llama_2FLlama_203_2E1_3A8b.standard.any.x", []byte("{}"), time.Second); err != nil {
		t.Fatal(err)
	}
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	if got := pull(t, p, 2, time.Second); len(got) != 1 || got[0].Job.ID != m.Job.ID {
		t.Errorf("deliveries %+v", got)
	}
	until(t, "the unreadable message goes", func() bool {
		present, err := q.Present(t.Context(), model)
		return err == nil && len(present) == 1
	})
}

func TestPullIsCheckedAndAlone(t *testing.T) {
	t.Parallel()
	q, _ := fresh(t, queue.Config{})
	p := newPuller(t, q, queue.PullerConfig{Kind: queue.Work, Model: model, Class: job.Standard})
	for _, r := range []queue.PullRequest{{Expires: time.Second}, {Batch: 1}, {Batch: 1, Expires: time.Second, Level: 10}, {Batch: 1, Expires: time.Second, Level: -1}} {
		if _, err := p.Pull(t.Context(), r); err == nil {
			t.Errorf("taken: %+v", r)
		}
	}
	out, err := p.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: time.Second}); err == nil {
		t.Error("a second pull beside the first")
	}
	for d := range out {
		t.Errorf("a delivery: %+v", d)
	}
	p.Close()
	if _, err := p.Pull(t.Context(), queue.PullRequest{Batch: 1, Expires: time.Second}); err == nil {
		t.Error("a pull by a closed puller")
	}
}

func TestWrongConfigIsRefused(t *testing.T) {
	t.Parallel()
	_, nc := fresh(t, queue.Config{})
	for _, cfg := range []queue.Config{{Replicas: -1}, {Replicas: 9}, {WorkMaxBytes: -1}, {Retention: -1}, {LiveAckWait: -1}} {
		if _, err := queue.Open(t.Context(), nc, cfg, slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("taken: %+v", cfg)
		}
	}
}
