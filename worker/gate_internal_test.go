package worker

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

func openGate(t *testing.T, capacity job.Tokens, limit int, stop func(job.ID, error)) *gate {
	t.Helper()
	g, err := newGate(schedule.Config{}, stop)
	if err != nil {
		t.Fatal(err)
	}
	g.observe(engine.Load{Ranks: []engine.Rank{{Capacity: capacity}}, MaxRunning: limit, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1})
	g.setOpen(true)
	return g
}

func streamed(c job.Class, prompt job.Tokens) entry {
	return entry{ask: schedule.Ask{Class: c, Cost: job.Cost{Prompt: prompt, Answers: 1}, Streams: true}}
}

func TestGateStartsInClassOrderAndNothingPastAHigherClass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(t, 1000, 1, nil)
		defer g.close()
		first, err := g.enter(t.Context(), streamed(job.Batch, 960))
		if err != nil {
			t.Fatal(err)
		}
		started := make(chan job.Class, 3)
		var wg sync.WaitGroup
		for _, c := range []job.Class{job.Batch, job.Standard, job.Interactive} {
			wg.Go(func() {
				r, err := g.enter(t.Context(), streamed(c, 10))
				if err != nil {
					t.Error(err)
					return
				}
				started <- c
				r.release()
			})
			synctest.Wait()
		}
		if len(started) != 0 {
			t.Fatal("something started in a full engine")
		}
		first.release()
		wg.Wait()
		for _, want := range []job.Class{job.Interactive, job.Standard, job.Batch} {
			if got := <-started; got != want {
				t.Errorf("%s started, want %s", got, want)
			}
		}
	})
}

func TestGateSendsAllAwayWhenTheEngineIsNotReadyAndForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(t, 1000, 1, nil)
		if _, err := g.enter(t.Context(), streamed(job.Standard, 900)); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			want error
			send func()
		}{{errShut, func() { g.setOpen(false) }}, {errClosed, g.close}} {
			g.setOpen(true)
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					if _, err := g.enter(t.Context(), streamed(job.Standard, 900)); !errors.Is(err, c.want) {
						t.Errorf("got %v, want %v", err, c.want)
					}
				})
			}
			synctest.Wait()
			c.send()
			wg.Wait()
			if _, err := g.enter(t.Context(), streamed(job.Standard, 1)); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		}
	})
}

func TestGateHandsBackWhatIsInHandOfAnEngineThatHasHalted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(t, 10_000, 1, nil)
		defer g.close()
		g.others.Store(true)
		r, err := g.enter(t.Context(), streamed(job.Standard, 100))
		if err != nil {
			t.Fatal(err)
		}
		r.grow(1)
		if _, err := g.enter(t.Context(), streamed(job.Standard, 100)); !errors.Is(err, errHalted) {
			t.Errorf("got %v, want %v", err, errHalted)
		}
		if wish, _ := g.want(1, job.Standard.Rank()); wish.Batch != 0 {
			t.Error("a halted engine is fed")
		}
		if _, changed := g.want(1, job.Standard.Rank()); changed != nil {
			r.grow(1) // it goes on
			<-changed
		}
		r.release()
	})
}

func TestGatePreemptsBatchWorkForAnInteractiveJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stopped := make(chan job.ID, 1)
		g := openGate(t, 1000, 0, func(id job.ID, _ error) { stopped <- id })
		defer g.close()
		batch := streamed(job.Batch, 900)
		batch.id, batch.preemptible = "job_b", true
		r, err := g.enter(t.Context(), batch)
		if err != nil {
			t.Fatal(err)
		}
		r.grow(1)
		go func() { // the attempt ends as it is told
			if id := <-stopped; id != batch.id {
				t.Errorf("job %s was stopped", id)
			}
			r.release()
		}()
		urgent, err := g.enter(t.Context(), streamed(job.Interactive, 300))
		if err != nil {
			t.Fatal(err)
		}
		urgent.release()
	})
}

// TestGateLedgerReturnsToZero: after any mix of starts, growth, cancels while waiting, double releases, readings, lost readings and outcomes.
func TestGateLedgerReturnsToZero(t *testing.T) {
	t.Parallel()
	g := openGate(t, 5000, 32, func(job.ID, error) {})
	defer g.close()
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(i)))
			for range 160 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.IntN(2000))*time.Microsecond)
				e := streamed(job.Classes()[rnd.IntN(3)], job.Tokens(rnd.IntN(800)))
				e.ask.Cost.Answers, e.ask.Streams, e.preemptible = 1+rnd.IntN(2), rnd.IntN(2) == 0, true
				r, err := g.enter(ctx, e)
				cancel()
				if err != nil {
					continue
				}
				r.grow(rnd.IntN(50))
				switch rnd.IntN(8) {
				case 0:
					g.observe(engine.Load{Ranks: []engine.Rank{{Capacity: 5000, Used: job.Tokens(rnd.IntN(5000))}}, MaxRunning: 32, Preemptions: int64(rnd.IntN(3))})
				case 1:
					g.unseen()
				case 2:
					r.ended(&reply{status: 429}, failed(job.CodeEngineError, "full"))
				case 3:
					r.ended(&reply{status: 200, usage: &job.Usage{PromptTokens: 10, CompletionTokens: 7}}, nil)
				}
				r.release()
				r.release()
				r.grow(7) // after the end: counts no more
			}
		})
	}
	wg.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if tokens, pending, sequences := g.sched.Reserved(); tokens != 0 || pending != 0 || sequences != 0 || len(g.running) != 0 || len(g.hand) != 0 {
		t.Errorf("left over: %d tokens, %d pending, %d sequences, running %d, in hand %d", tokens, pending, sequences, len(g.running), len(g.hand))
	}
}

func TestRate(t *testing.T) {
	t.Parallel()
	var r rate
	at := time.Unix(1_800_000_000, 0)
	for i := range 20 {
		r.add(at.Add(time.Duration(i)*time.Second), 70)
	}
	if got := r.perSecond(at.Add(20 * time.Second)); got != 70 {
		t.Errorf("70 tokens each second are %v per second", got)
	}
	if got := r.perSecond(at.Add(time.Hour)); got != 0 {
		t.Errorf("an hour later the rate is %v", got)
	}
}

func TestRetryDelayDoublesToAMinute(t *testing.T) {
	t.Parallel()
	for n, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60} {
		if got := retryDelay(time.Second, n); got != want*time.Second {
			t.Errorf("after %d tries: %s, want %s", n, got, want*time.Second)
		}
	}
}

// TestGateLetsLowerClassesPullBehindHigherOnes that have work: else a worker with room for one more would get one of each.
func TestGateLetsLowerClassesPullBehindHigherOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(t, 100_000, 0, nil)
		defer g.close()
		const interactive, standard, lane = 1, 2, 3
		pull := func(consumer int, c job.Class) <-chan struct{} {
			wish, changed := g.want(consumer, c.Rank())
			if (wish.Batch > 0) == (changed != nil) {
				t.Fatalf("a wish for %d and a channel to wait on: %v", wish.Batch, changed)
			}
			return changed
		}
		if pull(interactive, job.Interactive) != nil || pull(standard, job.Standard) != nil {
			t.Fatal("the first pulls wait for each other")
		}
		g.pulled(interactive, 1) // and a moment later it asks again
		g.pulled(standard, 0)
		changed := pull(standard, job.Standard)
		if changed == nil {
			t.Fatal("the lower class does not wait for one that has just got work")
		}
		if wish, _ := g.want(lane, -1); wish.Batch == 0 {
			t.Error("the own lane waits as well")
		}
		if pull(interactive, job.Interactive) != nil {
			t.Fatal("the higher class does not pull")
		}
		begun := time.Now()
		<-changed
		if pull(standard, job.Standard) != nil || time.Since(begun) != headStart {
			t.Errorf("the lower class waits for %v and more for one whose pull brings nothing", time.Since(begun))
		}
		g.pulled(standard, 0)
		g.pulled(interactive, 0)
		if pull(standard, job.Standard) != nil {
			t.Error("it waits for a class that has no work")
		}
		g.pulled(standard, 0)
		pull(interactive, job.Interactive)
		g.pulled(interactive, 1)
		g.leave(interactive)
		if pull(standard, job.Standard) != nil {
			t.Error("it waits for one who pulls no more")
		}
	})
}
