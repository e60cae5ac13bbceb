package schedule_test

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

var begin = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// bench drives a Scheduler step by step.
type bench struct {
	*testing.T
	*schedule.Scheduler
	now time.Time
}

func start(t *testing.T, cfg schedule.Config, r schedule.Reading) *bench {
	t.Helper()
	s, err := schedule.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{T: t, Scheduler: s, now: begin}
	b.Observe(b.now, r)
	return b
}

func cache(capacity, used job.Tokens) schedule.Reading {
	return schedule.Reading{Ranks: []schedule.Rank{{Capacity: capacity, Used: used}}, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1}
}

func ask(c job.Class, prompt job.Tokens) schedule.Ask {
	return schedule.Ask{Tenant: "t", Model: "m", Group: job.NoGroup, Class: c, Cost: job.Cost{Prompt: prompt, Answers: 1}, Created: begin, Streams: true}
}

func (b *bench) wait(d time.Duration) { b.now = b.now.Add(d) }

// offer puts a job in hand and returns what starts.
func (b *bench) offer(a schedule.Ask) (*schedule.Ticket, int) {
	t := b.Offer(b.now, a)
	return t, b.start()
}

func (b *bench) start() int {
	started, _ := b.Start(b.now)
	return len(started)
}

// run starts a job and gives its first token.
func (b *bench) run(a schedule.Ask) *schedule.Ticket {
	b.Helper()
	t, n := b.offer(a)
	if n != 1 {
		b.Fatalf("%+v does not start", a)
	}
	b.wait(50 * time.Millisecond)
	b.First(b.now, t)
	return t
}

func TestNewNamesTheImpossibleField(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]schedule.Config{
		"Order":         {Order: "random"},
		"Reserve":       {Reserve: -0.1},
		"TokenBudget":   {TokenBudget: -1},
		"Trickle":       {Trickle: 1.5},
		"DefaultOutput": {DefaultOutput: -1},
	} {
		if _, err := schedule.New(cfg); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: %v", field, err)
		}
	}
	for _, v := range []float64{1, 2, math.NaN()} {
		if _, err := schedule.New(schedule.Config{Reserve: v}); err == nil {
			t.Errorf("a reserve of %v is taken", v)
		}
	}
}

func TestStartsUntilTheCacheIsFullAndNoFurther(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{DefaultOutput: 1}, cache(1600, 0))
	n := 0
	for ; n < 100; n++ {
		tk, started := b.offer(ask(job.Standard, 80))
		if started == 0 {
			break
		}
		b.wait(time.Millisecond)
		b.First(b.now, tk)
	}
	// 80 + 16 each within 97 % of 1600.
	if n != 16 {
		t.Errorf("%d jobs of 80 tokens started in a cache of 1600", n)
	}
	if w := b.Pull(b.now, 0); w.Batch != 0 {
		t.Errorf("a full engine pulls %+v", w)
	}
}

func TestAnIdleEngineGetsAnything(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{}, cache(100, 0))
	a := ask(job.Standard, 5000)
	a.Cost.Answers = 9
	if _, n := b.offer(a); n != 1 {
		t.Error("it does not start")
	}
}

func TestAJobMustFitInOneRank(t *testing.T) {
	t.Parallel()
	r := cache(1000, 600)
	r.Ranks = append(r.Ranks, schedule.Rank{Capacity: 1000, Used: 600})
	b := start(t, schedule.Config{DefaultOutput: 1}, r)
	b.run(ask(job.Standard, 16))
	b.Observe(b.now, r)
	if _, n := b.offer(ask(job.Standard, 600)); n != 0 {
		t.Error("800 free tokens in two halves took a job of 600")
	}
}

func TestPrefillIsBoundedByTheTokenBudget(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{}, cache(1_000_000, 0))
	first, n := b.offer(ask(job.Standard, 4000)) // larger than the budget: alone
	if n != 1 {
		t.Fatal("a long prompt does not start")
	}
	if _, n := b.offer(ask(job.Standard, 100)); n != 0 {
		t.Error("a second prompt starts while the budget is used up")
	}
	b.wait(100 * time.Millisecond)
	b.First(b.now, first)
	if n := b.start(); n != 1 {
		t.Error("it does not start when the first is computed")
	}
}

func TestFuturePeakIsForeseen(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{}, cache(4000, 0))
	long := ask(job.Standard, 500)
	long.Cost.Output = 2000
	for range 20 { // answers are as long as they may be
		tk := b.run(long)
		b.End(b.now, tk, schedule.Result{Completed: true, Prompt: 500, Output: 2000})
	}
	b.run(long)
	if _, n := b.offer(long); n != 0 { // 2 x 500 + 2 x 2000 is more than there is
		t.Error("two jobs start that will not fit together")
	}
	short := ask(job.Interactive, 500)
	short.Cost.Output = 100
	if _, n := b.offer(short); n != 1 {
		t.Error("a short one does not start beside the long one")
	}
}

func TestHigherClassesStartFirstAndBatchKeepsATrickle(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{Trickle: 0.1}, schedule.Reading{Ranks: []schedule.Rank{{Capacity: 100_000}}, MaxRunning: 1, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1})
	current := b.run(ask(job.Standard, 16))
	for range 200 {
		b.Offer(b.now, ask(job.Batch, 16))
		b.Offer(b.now, ask(job.Interactive, 16))
	}
	started := map[job.Class]int{}
	for range 110 {
		b.End(b.now, current, schedule.Result{Completed: true})
		all, _ := b.Start(b.now)
		if len(all) != 1 {
			t.Fatalf("%d start", len(all))
		}
		current = all[0]
		started[current.Ask.Class]++
		b.wait(10 * time.Millisecond)
		b.First(b.now, current)
	}
	if n := started[job.Batch]; n < 8 || n > 12 {
		t.Errorf("started %v, want one batch job in eleven", started)
	}
}

func TestShortestFirstAges(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{Order: schedule.Shortest}, schedule.Reading{Ranks: []schedule.Rank{{Capacity: 1_000_000}}, MaxRunning: 1, Preemptions: -1, GeneratedTokens: -1, PromptTokens: -1})
	current := b.run(ask(job.Standard, 16))
	for range 20 {
		b.wait(30 * time.Millisecond)
		b.Grow(b.now, current, 1)
	}
	at := b.now
	offer := func(output job.Tokens, waited time.Duration) *schedule.Ticket {
		a := ask(job.Standard, 16)
		a.Cost.Output, a.Created = output, at.Add(-waited)
		return b.Offer(b.now, a)
	}
	old, long, short := offer(100, time.Minute), offer(200, 0), offer(5, 0)
	var order []*schedule.Ticket
	for range 3 {
		b.End(b.now, current, schedule.Result{Completed: true})
		all, _ := b.Start(b.now)
		current = all[0]
		order = append(order, current)
		b.wait(time.Millisecond)
		b.First(b.now, current)
	}
	if order[0] != old || order[1] != short || order[2] != long {
		t.Errorf("started in the order %d, %d, %d", order[0].Ask.Cost.Output, order[1].Ask.Cost.Output, order[2].Ask.Cost.Output)
	}
}

func TestInteractiveWorkTakesRoomFromTheYoungestBatchJobs(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{DefaultOutput: 1}, cache(1000, 0))
	var batch []*schedule.Ticket
	for range 4 {
		tk := b.run(ask(job.Batch, 200))
		tk.Preemptible = true
		batch = append(batch, tk)
	}
	if w := b.Pull(b.now, job.Interactive.Rank()); w.Batch != 1 {
		t.Errorf("an engine full of batch work pulls %+v of the interactive class", w)
	}
	if w := b.Pull(b.now, job.Standard.Rank()); w.Batch != 0 {
		t.Errorf("and %+v of the standard one", w)
	}
	tk, n := b.offer(ask(job.Interactive, 300))
	if n != 0 {
		t.Fatal("it starts without room")
	}
	if named := b.Preempt(b.now); len(named) != 0 {
		t.Error("batch work is given back at once")
	}
	b.wait(60 * time.Millisecond)
	for _, r := range batch {
		b.Grow(b.now, r, 1)
	}
	named := b.Preempt(b.now)
	if len(named) != 2 || named[0] != batch[3] || named[1] != batch[2] {
		t.Fatalf("%d are given back", len(named))
	}
	if again := b.Preempt(b.now); len(again) != 0 {
		t.Error("more are given back while the first are on their way")
	}
	for _, r := range named {
		b.End(b.now, r, schedule.Result{})
	}
	if all, _ := b.Start(b.now); len(all) != 1 || all[0] != tk {
		t.Error("the interactive job does not start")
	}
}

func TestBrakes(t *testing.T) {
	t.Parallel()
	counting := func(waiting int, preemptions, generated int64) schedule.Reading {
		return schedule.Reading{Ranks: []schedule.Rank{{Capacity: 100_000, Used: 32_000}}, Running: 8, Waiting: waiting, Preemptions: preemptions, GeneratedTokens: generated, PromptTokens: 0}
	}
	pulls := func(b *bench) bool { return b.Pull(b.now, 0).Batch > 0 }
	t.Run("requests that wait in the engine", func(t *testing.T) {
		t.Parallel()
		b := start(t, schedule.Config{}, counting(0, 0, 1))
		tk := b.run(ask(job.Standard, 100))
		for i := range int64(2) {
			b.wait(250 * time.Millisecond)
			b.Grow(b.now, tk, 1)
			if !pulls(b) {
				t.Fatal("a moment's waiting brakes")
			}
			b.Observe(b.now, counting(5+int(i), 0, 10+i))
		}
		if pulls(b) || b.Status(b.now).Brake != schedule.BrakeWaiting {
			t.Errorf("it pulls while requests wait: %+v", b.Status(b.now))
		}
		b.wait(250 * time.Millisecond)
		b.Observe(b.now, counting(0, 0, 20))
		if !pulls(b) {
			t.Error("it does not pull when none wait any more")
		}
	})
	t.Run("preemptions", func(t *testing.T) {
		t.Parallel()
		b := start(t, schedule.Config{}, counting(0, 3, 1))
		tk := b.run(ask(job.Standard, 100))
		free := b.Status(b.now).Free
		b.Observe(b.now, counting(0, 9, 2))
		if pulls(b) || b.Status(b.now).Brake != schedule.BrakePreempting {
			t.Error("it pulls while the engine preempts")
		}
		b.wait(100 * time.Millisecond)
		b.Grow(b.now, tk, 1)
		b.Observe(b.now, counting(0, 9, 3))
		if !pulls(b) {
			t.Error("it does not pull again")
		}
		if now := b.Status(b.now).Free; now > free-5000 {
			t.Errorf("it fills the cache as before: %d free, %d before", now, free)
		}
	})
	t.Run("silence", func(t *testing.T) {
		t.Parallel()
		b := start(t, schedule.Config{}, counting(0, 0, 1))
		tk := b.run(ask(job.Standard, 100))
		b.wait(2 * time.Second)
		held, n := b.offer(ask(job.Interactive, 10))
		if pulls(b) || n != 0 || b.Status(b.now).Brake != schedule.BrakeQuiet {
			t.Error("a halted engine is fed")
		}
		if back := b.Return(b.now); len(back) != 1 || back[0] != held {
			t.Error("what is in hand is not for others")
		}
		b.Grow(b.now, tk, 1)
		if !pulls(b) {
			t.Error("it is not fed when it goes on")
		}
	})
}

func TestOverloadHalvesTheLimitAndCleanTimeRaisesIt(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{DefaultOutput: 1}, cache(1_000_000, 0))
	var running []*schedule.Ticket
	for range 32 {
		running = append(running, b.run(ask(job.Standard, 16)))
	}
	b.End(b.now, running[0], schedule.Result{Overloaded: true})
	b.End(b.now, running[1], schedule.Result{Overloaded: true}) // began before the cut: it is the same trouble
	if got := b.Status(b.now).Limit; got != 16 {
		t.Fatalf("the limit is %d after an overload at 32", got)
	}
	for range 5 {
		b.wait(1100 * time.Millisecond)
		b.Grow(b.now, running[2], 1)
		b.start()
	}
	b.Status(b.now)
	if got := b.Status(b.now).Limit; got != 22 {
		t.Errorf("the limit is %d five clean seconds later", got)
	}
	for range 60 {
		b.wait(1100 * time.Millisecond)
		b.Status(b.now)
	}
	if got := b.Status(b.now).Limit; got != 0 {
		t.Errorf("the limit is still %d a minute later", got)
	}
}

func TestWithoutMetricsStartsAreFew(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{DefaultOutput: 1}, cache(1_000_000, 0))
	b.Unseen(b.now)
	n := 0
	for ; n < 100; n++ {
		tk, started := b.offer(ask(job.Standard, 16))
		if started == 0 {
			break
		}
		b.First(b.now, tk)
	}
	if n != 8 {
		t.Errorf("%d start while nothing is known of the engine", n)
	}
}

func TestLevelComparesEnginesByTheirExpectedTTFT(t *testing.T) {
	t.Parallel()
	// Two engines that are taught how fast they are; the fast one is 60 % full, the slow one 30 %.
	teach := func(used job.Tokens, base, each float64) int {
		b := start(t, schedule.Config{DefaultOutput: 8}, cache(100_000, used))
		for i := range 200 {
			prompt := job.Tokens(64 + 64*(i%8))
			tk, n := b.offer(ask(job.Standard, prompt))
			if n != 1 {
				t.Fatal("it does not start")
			}
			b.wait(time.Duration((base + each*float64(prompt)) * float64(time.Second)))
			b.First(b.now, tk)
			b.End(b.now, tk, schedule.Result{Completed: true, Prompt: prompt, Output: 8})
		}
		return b.Pull(b.now, 0).Level
	}
	fast, slow := teach(60_000, 0.006, 0.00003), teach(30_000, 0.035, 0.00025)
	if fast >= slow {
		t.Errorf("the level of the fast one is %d, of the slow one %d", fast, slow)
	}
}

func TestPullsShareTheRoom(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{DefaultOutput: 1}, cache(100_000, 0))
	for range 200 { // fast, so that the level bounds little
		tk, _ := b.offer(ask(job.Standard, 160))
		b.wait(2 * time.Millisecond)
		b.First(b.now, tk)
		b.End(b.now, tk, schedule.Result{Completed: true})
	}
	first := b.Pull(b.now, 0)
	b.Pulling(1, first.Batch)
	second := b.Pull(b.now, 1)
	if first.Batch < 2 || second.Batch > first.Batch || second.Batch < 1 {
		t.Errorf("first %+v, then %+v", first, second)
	}
	b.Pulled(1)
	if diff := cmp.Diff(first, b.Pull(b.now, 0)); diff != "" {
		t.Error(diff)
	}
}

// TestReservationsReturnToZero: 10,000 jobs, a third of them in trouble, against an engine that says anything.
func TestReservationsReturnToZero(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		b := start(t, schedule.Config{Order: []schedule.Order{schedule.Oldest, schedule.Shortest}[seed%2]}, cache(20_000, 0))
		var hand, run []*schedule.Ticket
		for n := 0; n < 10_000 || len(hand)+len(run) > 0; {
			b.wait(time.Duration(rnd.IntN(20)) * time.Millisecond)
			switch k := rnd.IntN(12); {
			case k < 4 && n < 10_000:
				a := ask(job.Classes()[rnd.IntN(3)], job.Tokens(rnd.IntN(1500)))
				a.Streams, a.Cost.Answers, a.Created = rnd.IntN(2) == 0, rnd.IntN(3), b.now
				tk := b.Offer(b.now, a)
				tk.Preemptible, tk.Lane = rnd.IntN(2) == 0, rnd.IntN(4) == 0
				hand = append(hand, tk)
				n++
			case k == 4 && len(hand) > 0:
				i := rnd.IntN(len(hand))
				b.Withdraw(hand[i])
				hand = append(hand[:i], hand[i+1:]...)
			case k < 8 && len(run) > 0:
				i := rnd.IntN(len(run))
				tk := run[i]
				if rnd.IntN(3) > 0 {
					b.First(b.now, tk)
					b.Grow(b.now, tk, rnd.IntN(30))
				}
				r := schedule.Result{Completed: rnd.IntN(3) > 0, Overloaded: rnd.IntN(10) == 0, Prompt: job.Tokens(rnd.IntN(9000)), Output: job.Tokens(rnd.IntN(900))}
				b.End(b.now, tk, r)
				b.End(b.now, tk, r)
				b.Grow(b.now, tk, 5)
				run = append(run[:i], run[i+1:]...)
			case k == 8:
				r := cache(20_000, job.Tokens(rnd.IntN(25_000)))
				r.Waiting, r.Running, r.Preemptions, r.GeneratedTokens = rnd.IntN(3), rnd.IntN(30), int64(rnd.IntN(5))-1, int64(rnd.IntN(1000))-1
				b.Observe(b.now, r)
			case k == 9:
				b.Unseen(b.now)
			case k == 10:
				b.Alive(b.now)
			}
			drop := func(list []*schedule.Ticket) {
				for _, tk := range list {
					for i := range hand {
						if hand[i] == tk {
							hand = append(hand[:i], hand[i+1:]...)
							break
						}
					}
				}
			}
			all, _ := b.Start(b.now)
			run = append(run, all...)
			drop(all)
			drop(b.Return(b.now))
			b.Preempt(b.now)
			st := b.Status(b.now)
			if w := b.Pull(b.now, rnd.IntN(4)-1); w.Level < 0 || w.Level > 9 || w.Batch < 0 || math.IsNaN(st.Load) || st.InHand != len(hand) || st.Running != len(run) {
				t.Fatalf("wish %+v, status %+v, in hand %d, running %d", w, st, len(hand), len(run))
			}
		}
		if tokens, pending, sequences := b.Reserved(); tokens != 0 || pending != 0 || sequences != 0 {
			t.Fatalf("seed %d: %d tokens, %d pending, %d sequences are left", seed, tokens, pending, sequences)
		}
	}
}
