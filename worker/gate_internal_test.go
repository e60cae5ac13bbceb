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
)

func openGate(capacity job.Tokens, limit int) *gate {
	g := newGate()
	g.observe(engine.Load{Ranks: []engine.Rank{{Capacity: capacity}}, MaxRunning: limit})
	g.setOpen(true)
	return g
}

func cost(prompt job.Tokens) job.Cost { return job.Cost{Prompt: prompt, Answers: 1} }

func TestGateStartsInClassOrderAndNothingPastAHigherClass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(1000, 0)
		first, err := g.enter(t.Context(), job.Batch, cost(960))
		if err != nil {
			t.Fatal(err)
		}
		type start struct {
			class job.Class
			r     *reservation
		}
		started := make(chan start, 3)
		var wg sync.WaitGroup
		for _, c := range []struct {
			class  job.Class
			prompt job.Tokens
		}{{job.Batch, 10}, {job.Standard, 930}, {job.Interactive, 930}} { // the batch job would fit, and must not pass the others
			wg.Go(func() {
				r, err := g.enter(t.Context(), c.class, cost(c.prompt))
				if err != nil {
					t.Error(err)
					return
				}
				started <- start{c.class, r}
			})
			synctest.Wait()
		}
		if len(started) != 0 {
			t.Fatal("something started in a full engine")
		}
		first.release()
		for _, want := range []job.Class{job.Interactive, job.Standard, job.Batch} {
			s := <-started
			if s.class != want {
				t.Errorf("%s started, want %s", s.class, want)
			}
			s.r.release()
		}
		wg.Wait()
	})
}

func TestGateHoldsSequencesToTheEnginesLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(100_000, 4)
		for range 2 {
			if _, err := g.enter(t.Context(), job.Standard, job.Cost{Prompt: 1, Answers: 2}); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := g.enter(ctx, job.Standard, cost(1)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a fifth sequence: %v", err)
		}
	})
}

func TestGateGivesAnIdleEngineAnything(t *testing.T) {
	t.Parallel()
	g := openGate(100, 1)
	r, err := g.enter(t.Context(), job.Standard, job.Cost{Prompt: 5000, Answers: 9})
	if err != nil {
		t.Fatal(err)
	}
	r.release()
}

func TestGateBelievesTheWorseOfEngineAndLedger(t *testing.T) {
	t.Parallel()
	g := openGate(1000, 0)
	r, err := g.enter(t.Context(), job.Standard, cost(100))
	if err != nil {
		t.Fatal(err)
	}
	g.observe(engine.Load{Ranks: []engine.Rank{{Capacity: 1000, Used: 800}}}) // others use the engine too
	if free := g.status().free; free > 970-800 {
		t.Errorf("free is %d while the engine says that 800 of 1000 are used", free)
	}
	g.observe(engine.Load{Ranks: []engine.Rank{{Capacity: 1000, Used: 0}}}) // a stale page
	if free := g.status().free; free > 970-100 {
		t.Errorf("free is %d while 100 are granted", free)
	}
	r.release()
}

func TestGateSendsAllAwayWhenTheEngineIsNotReadyAndForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(1000, 0)
		if _, err := g.enter(t.Context(), job.Standard, cost(900)); err != nil {
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
					if _, err := g.enter(t.Context(), job.Standard, cost(900)); !errors.Is(err, c.want) {
						t.Errorf("got %v, want %v", err, c.want)
					}
				})
			}
			synctest.Wait()
			c.send()
			wg.Wait()
			if _, err := g.enter(t.Context(), job.Standard, cost(1)); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		}
	})
}

// TestGateLedgerReturnsToZero: after any mix of starts, growth, cancels while waiting, double releases and readings.
func TestGateLedgerReturnsToZero(t *testing.T) {
	t.Parallel()
	g := openGate(5000, 32)
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(i)))
			for range 200 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rnd.IntN(2000))*time.Microsecond)
				r, err := g.enter(ctx, job.Classes()[rnd.IntN(3)], job.Cost{Prompt: job.Tokens(rnd.IntN(800)), Answers: 1 + rnd.IntN(2)})
				cancel()
				if err != nil {
					continue
				}
				r.grow(job.Tokens(rnd.IntN(50)))
				if rnd.IntN(8) == 0 {
					g.observe(engine.Load{Ranks: []engine.Rank{{Capacity: 5000, Used: job.Tokens(rnd.IntN(5000))}}, MaxRunning: 32})
				}
				r.release()
				r.release()
				r.grow(7) // after the end: counts no more
			}
		})
	}
	wg.Wait()
	g.observe(engine.Load{Ranks: []engine.Rank{{Capacity: 5000}}, MaxRunning: 32})
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held != 0 || g.seqs != 0 || len(g.running) != 0 || len(g.hand) != 0 || g.granted != 0 || g.reported != 0 {
		t.Errorf("left over: held %d, sequences %d, running %d, in hand %d, granted %d, reported %d", g.held, g.seqs, len(g.running), len(g.hand), g.granted, g.reported)
	}
}

func TestWantPullsNothingBehindAJobInHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := openGate(1000, 0)
		r, err := g.enter(t.Context(), job.Standard, cost(300))
		if err != nil {
			t.Fatal(err)
		}
		if w, _ := g.want(job.Batch.Rank()); w.batch == 0 || !w.busy || w.level == 0 {
			t.Errorf("with room, want is %+v", w)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = g.enter(ctx, job.Standard, cost(700)) })
		synctest.Wait()
		for _, c := range []job.Class{job.Standard, job.Batch} {
			if w, _ := g.want(c.Rank()); w.batch != 0 {
				t.Errorf("%s is pulled while standard work is in hand", c)
			}
		}
		_, changed := g.want(job.Standard.Rank())
		cancel()
		wg.Wait()
		<-changed
		if w, _ := g.want(job.Interactive.Rank()); w.batch == 0 {
			t.Error("interactive work is not pulled though there is room")
		}
		r.release()
	})
}

func TestWantAsksForNoMoreThanFits(t *testing.T) {
	t.Parallel()
	g := openGate(100_000, 40)
	if w, _ := g.want(0); w.batch != 4 { // a tenth of the sequences
		t.Errorf("an empty engine pulls %d", w.batch)
	}
	var all []*reservation
	for range 39 {
		r, err := g.enter(t.Context(), job.Standard, cost(1))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	if w, _ := g.want(0); w.batch != 1 {
		t.Errorf("with room for one sequence %d are pulled", w.batch)
	}
	r, err := g.enter(t.Context(), job.Standard, cost(1))
	if err != nil {
		t.Fatal(err)
	}
	w, changed := g.want(0)
	if w.batch != 0 {
		t.Errorf("a full engine pulls %d", w.batch)
	}
	r.release()
	<-changed
	for _, r := range all {
		r.release()
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
