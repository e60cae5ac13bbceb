package schedule_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

// An engine that runs four jobs at once, each for a tenth of a second.
const (
	slots   = 4
	service = 100 * time.Millisecond
)

// serve gives a worker interactive jobs at a share of what it can do, for ten minutes, with batch jobs that never run out. It returns how long the interactive ones waited, and how many batch jobs started.
func serve(t *testing.T, cfg schedule.Config, load float64, seed uint64) (waits []time.Duration, batch int) {
	t.Helper()
	r := cache(1_000_000, 0)
	r.MaxRunning = slots
	b := start(t, cfg, r)
	rnd := rand.New(rand.NewPCG(seed, 3))
	rate := load * slots / service.Seconds()
	var arrivals []time.Time // of interactive jobs that wait in the queue
	next := b.now.Add(time.Duration(rnd.ExpFloat64() / rate * float64(time.Second)))
	type work struct {
		ticket *schedule.Ticket
		ends   time.Time
	}
	var running []work
	for end := b.now.Add(10 * time.Minute); b.now.Before(end); b.wait(time.Millisecond) {
		for !next.After(b.now) {
			arrivals = append(arrivals, next)
			next = next.Add(time.Duration(rnd.ExpFloat64() / rate * float64(time.Second)))
		}
		running = slices.DeleteFunc(running, func(j work) bool {
			if j.ends.After(b.now) {
				return false
			}
			b.Grow(b.now, j.ticket, 1)
			b.End(b.now, j.ticket, schedule.Result{Completed: true, Prompt: 16, Output: 2})
			return true
		})
		// Both classes ask at once. Who has more to pull comes first, but for what the batch class is due.
		urgent, patient := b.Pull(b.now, job.Interactive.Rank()).Batch, b.Pull(b.now, job.Batch.Rank()).Batch
		if len(arrivals) > 0 && !b.Due() {
			patient = 0
		}
		for ; urgent > 0 && len(arrivals) > 0; urgent-- {
			a := ask(job.Interactive, 16)
			a.Created, arrivals = arrivals[0], arrivals[1:]
			b.Offer(b.now, a)
		}
		for ; patient > 0; patient-- {
			b.Offer(b.now, ask(job.Batch, 16))
		}
		all, _ := b.Start(b.now)
		for _, tk := range all {
			b.First(b.now.Add(time.Millisecond), tk)
			running = append(running, work{tk, b.now.Add(service)})
			if tk.Ask.Class == job.Batch {
				batch++
			} else {
				waits = append(waits, b.now.Sub(tk.Ask.Created))
			}
		}
	}
	slices.Sort(waits)
	return waits, batch
}

// TestBatchTricklesUnderInteractiveLoad: at a constant load of interactive work near all that an engine can do, batch work gets what it is due and what is left, and the interactive P99 does not double.
func TestBatchTricklesUnderInteractiveLoad(t *testing.T) {
	t.Parallel()
	const load, trickle = 0.9, 0.05
	p99 := func(waits []time.Duration) time.Duration { return waits[len(waits)*99/100] }
	for seed := range uint64(5) {
		alone, none := serve(t, schedule.Config{Trickle: -1}, load, seed)
		beside, batch := serve(t, schedule.Config{Trickle: trickle}, load, seed)
		t.Logf("interactive P99 %v without a trickle (%d batch jobs), %v with (%d)", p99(alone), none, p99(beside), batch)
		if least := float64(len(beside)) * trickle; float64(batch) < least {
			t.Errorf("%d batch jobs started beside %d interactive ones, want at least %.0f", batch, len(beside), least)
		}
		if p99(beside) > 2*p99(alone) {
			t.Errorf("interactive P99 rises from %v to %v", p99(alone), p99(beside))
		}
	}
	// More interactive work than it can do: then the trickle is all that batch work gets, and it gets that.
	interactive, batch := serve(t, schedule.Config{Trickle: trickle}, 1.5, 1)
	t.Logf("under overload %d batch jobs started beside %d interactive ones", batch, len(interactive))
	if share := float64(batch) / float64(len(interactive)); share < 0.8*trickle || share > 1.5*trickle {
		t.Errorf("under overload %d batch jobs started beside %d interactive ones", batch, len(interactive))
	}
}

// wide is how many jobs an engine runs at once that is not a small one.
const wide = 16

// full gives a worker so many interactive calls at a time, each followed by the next, with or without batch jobs that never run out, for ten minutes. It returns how long the calls waited for their first token, and the tokens of each
// class that were done. Calls may take batch jobs' room back, as they may at a worker.
func full(t *testing.T, cfg schedule.Config, clients int, seed uint64, withBatch bool) (waits []time.Duration, tokens map[job.Class]job.Tokens) {
	t.Helper()
	const first, token = 5 * time.Millisecond, time.Millisecond
	r := cache(1_000_000, 0)
	r.MaxRunning = wide
	b := start(t, cfg, r)
	rnd := rand.New(rand.NewPCG(seed, 5))
	tokens = map[job.Class]job.Tokens{}
	var queue []schedule.Ask // calls that wait
	call := func(at time.Time) {
		a := ask(job.Interactive, 16)
		a.Created, a.Cost.Output = at, job.Tokens(20+rnd.IntN(160))
		queue = append(queue, a)
	}
	for range clients {
		call(b.now)
	}
	type work struct {
		ticket *schedule.Ticket
		ends   time.Time
	}
	var running []work
	for end := b.now.Add(10 * time.Minute); b.now.Before(end); b.wait(2 * time.Millisecond) {
		given := b.Preempt(b.now)
		running = slices.DeleteFunc(running, func(j work) bool {
			switch {
			case slices.Contains(given, j.ticket):
				b.End(b.now, j.ticket, schedule.Result{})
			case j.ends.After(b.now):
				return false
			default:
				n := j.ticket.Ask.Cost.Output
				b.Grow(b.now, j.ticket, int(n))
				b.End(b.now, j.ticket, schedule.Result{Completed: true, Prompt: 16, Output: n})
				tokens[j.ticket.Ask.Class] += 16 + n
				if j.ticket.Ask.Class == job.Interactive {
					call(b.now)
				}
			}
			return true
		})
		urgent, patient := b.Pull(b.now, job.Interactive.Rank()).Batch, b.Pull(b.now, job.Batch.Rank()).Batch
		if !withBatch || len(queue) > 0 && !b.Due() { // who has more to pull comes first, but for what the batch class is due
			patient = 0
		}
		for ; urgent > 0 && len(queue) > 0; urgent-- {
			b.Offer(b.now, queue[0])
			queue = queue[1:]
		}
		for ; patient > 0; patient-- {
			a := ask(job.Batch, 16)
			a.Cost.Output = job.Tokens(100 + rnd.IntN(900))
			b.Offer(b.now, a).Preemptible = true
		}
		all, _ := b.Start(b.now)
		for _, tk := range all {
			b.First(b.now.Add(first), tk)
			running = append(running, work{tk, b.now.Add(first + time.Duration(tk.Ask.Cost.Output)*token)})
			if tk.Ask.Class == job.Interactive {
				waits = append(waits, b.now.Add(first).Sub(tk.Ask.Created))
			}
		}
	}
	slices.Sort(waits)
	return waits, tokens
}

// TestBatchKeepsItsFloorAtFullLoad: while interactive calls alone would fill the worker at every moment, the batch class gets its tenth of the tokens, for jobs of whichever size, and none of that is taken back; and the calls'
// P99 TTFT rises by less than a third.
func TestBatchKeepsItsFloorAtFullLoad(t *testing.T) {
	t.Parallel()
	for seed := range uint64(2) {
		alone, _ := full(t, schedule.Config{}, 4*wide, seed, false)
		beside, tokens := full(t, schedule.Config{}, 4*wide, seed, true)
		share := float64(tokens[job.Batch]) / float64(tokens[job.Batch]+tokens[job.Interactive])
		before, after := alone[len(alone)*99/100], beside[len(beside)*99/100]
		t.Logf("batch work gets %.3f of the tokens; interactive P99 TTFT is %v, %v without", share, after, before)
		if share < 0.09 || share > 0.13 {
			t.Errorf("batch work gets %.3f of the tokens", share)
		}
		if float64(after) > 1.3*float64(before) {
			t.Errorf("interactive P99 TTFT rises from %v to %v", before, after)
		}
	}
}

// TestBatchLeavesPlacesToOthers: an engine that runs so many sequences at once, which shows only by requests that wait inside it, is not filled with batch work to the last place.
func TestBatchLeavesPlacesToOthers(t *testing.T) {
	t.Parallel()
	const places = 64
	generated := int64(0)
	engine := func(waiting int) schedule.Reading {
		generated += 100
		return schedule.Reading{Ranks: []schedule.Rank{{Capacity: 1_000_000, Used: 10_000}}, Running: places, Waiting: waiting, GeneratedTokens: generated, PromptTokens: -1}
	}
	b := start(t, schedule.Config{TokenBudget: 1 << 20, Trickle: -1}, engine(0))
	for range places {
		b.run(ask(job.Batch, 16))
	}
	if b.Pull(b.now, job.Batch.Rank()).Batch == 0 {
		t.Fatal("nothing is known of its places, and nothing is pulled")
	}
	for range 5 {
		b.wait(250 * time.Millisecond)
		b.Observe(b.now, engine(3))
	}
	b.wait(250 * time.Millisecond)
	b.Observe(b.now, engine(0))
	if w := b.Pull(b.now, job.Batch.Rank()); w.Batch != 0 {
		t.Errorf("%d jobs of batch work are pulled for an engine whose places are taken", w.Batch)
	}
	if st := b.Status(b.now); st.Load != 1 || st.CacheLoad > 0.1 || st.Limit != 0 || st.PlaceLimit != 0 || st.BatchLimit != places-places/32 || st.Level > 3 {
		t.Errorf("its status is %+v", st)
	}
	if b.Pull(b.now, job.Interactive.Rank()).Batch == 0 {
		t.Error("nothing interactive is pulled")
	}
	b.wait(11 * time.Second)
	b.Observe(b.now, engine(0))
	b.wait(11 * time.Second)
	b.Observe(b.now, engine(0))
	if b.Pull(b.now, job.Batch.Rank()).Batch == 0 {
		t.Error("what was learned is never doubted")
	}
	fewer := func(readings int) {
		for range readings {
			b.wait(250 * time.Millisecond)
			r := engine(1)
			r.Running -= 8
			b.Observe(b.now, r)
		}
	}
	if fewer(4); b.Status(b.now).BatchLimit < places-places/32 {
		t.Errorf("an engine that computes prompts for a second is left with %d places", b.Status(b.now).BatchLimit)
	}
	if fewer(30); b.Status(b.now).BatchLimit >= places-8 {
		t.Error("an engine that has lost places is taken to have them")
	}
}

// TestCounterTellsOfUnstreamedPrompts: what nobody sees computed is computed when the engine has counted it. Until its next word it is believed to go on, so that who comes next waits for no reading; and nothing is believed while
// requests wait inside it.
func TestCounterTellsOfUnstreamedPrompts(t *testing.T) {
	t.Parallel()
	engine := func(running, waiting int, prompts int64) schedule.Reading {
		return schedule.Reading{Ranks: []schedule.Rank{{Capacity: 1_000_000}}, Running: running, Waiting: waiting, GeneratedTokens: prompts, PromptTokens: prompts}
	}
	unstreamed := ask(job.Interactive, 600)
	unstreamed.Streams = false
	b := start(t, schedule.Config{TokenBudget: 768}, engine(0, 0, 0))
	b.offer(unstreamed)
	next := b.Offer(b.now, unstreamed)
	if got, _ := b.Start(b.now); len(got) != 0 {
		t.Fatal("two prompts over the budget start at once")
	}
	b.wait(200 * time.Millisecond) // more than 600 tokens take by the first guess
	if got, _ := b.Start(b.now); len(got) != 1 || got[0] != next {
		t.Error("the next prompt waits for a reading")
	}
	// The first is counted, the second is not: it waits inside the engine, and goes on doing so.
	b.wait(50 * time.Millisecond)
	b.Observe(b.now, engine(1, 1, 600))
	b.wait(400 * time.Millisecond)
	b.Observe(b.now, engine(1, 1, 600))
	b.Offer(b.now, unstreamed)
	if got, _ := b.Start(b.now); len(got) != 0 {
		t.Error("a prompt that waits inside the engine is taken as computed")
	}
	b.wait(50 * time.Millisecond)
	b.Observe(b.now, engine(2, 0, 1200))
	if got, _ := b.Start(b.now); len(got) != 1 {
		t.Error("nothing starts though all that started is computed")
	}
}

// TestLineInsideTheEngineIsShort: an engine that runs many and in which requests wait gets few more, whatever room its cache has.
func TestLineInsideTheEngineIsShort(t *testing.T) {
	t.Parallel()
	b := start(t, schedule.Config{TokenBudget: 1 << 20}, schedule.Reading{Ranks: []schedule.Rank{{Capacity: 1_000_000}}, GeneratedTokens: 0, PromptTokens: 0})
	b.run(ask(job.Standard, 16))
	b.Observe(b.now, schedule.Reading{Ranks: []schedule.Rank{{Capacity: 1_000_000}}, Running: 256, Waiting: 20, GeneratedTokens: 1, PromptTokens: 1})
	if st := b.Status(b.now); st.PlaceLimit != 1+256/8-20 || st.BatchLimit != st.PlaceLimit {
		t.Errorf("its status is %+v", st)
	}
	n := 0
	for range 100 {
		b.Offer(b.now, ask(job.Standard, 16))
		got, _ := b.Start(b.now)
		n += len(got)
	}
	if n != 256/8-20 {
		t.Errorf("%d more were sent to it, want %d", n, 256/8-20)
	}
	if st := b.Status(b.now); st.Sequences != st.PlaceLimit || st.Limit != 0 {
		t.Errorf("its status is %+v, and nothing starts", st)
	}
}
