package emulator_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/internal/engine/emulator"
)

func profile(t testing.TB, name string) emulator.Profile {
	t.Helper()
	p, err := emulator.ProfileByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func add(t testing.TB, c *emulator.Core, r emulator.Request) emulator.ID {
	t.Helper()
	id, err := c.Add(r)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func step(t testing.TB, c *emulator.Core) emulator.Step {
	t.Helper()
	s, ok := c.Step()
	if !ok {
		t.Fatal("nothing to step")
	}
	return s
}

// drain steps until nothing is left to compute and returns the time that took.
func drain(t testing.TB, c *emulator.Core) time.Duration {
	t.Helper()
	var total time.Duration
	for range 1_000_000 {
		s, ok := c.Step()
		if !ok {
			return total
		}
		total += s.Duration
	}
	t.Fatal("the core never comes to rest")
	return 0
}

// The published model's numbers, measured on the core: one sequence decoding, and a long prefill.
func TestStepsTakeTheProfilesTimes(t *testing.T) {
	t.Parallel()
	rows := []struct {
		profile  string
		decode   time.Duration // floor + all-reduce
		prefill  float64       // tokens per second
		cached   time.Duration // per 1,000 cached tokens
		overhead time.Duration
		perSeq   time.Duration
		capacity float64
	}{
		{"a10-7b", 28100 * time.Microsecond, 4000, 1090 * time.Microsecond, 3 * time.Millisecond, 20 * time.Microsecond, 12_800},
		{"l40s-8b", 23200 * time.Microsecond, 11_300, 190 * time.Microsecond, 2 * time.Millisecond, 20 * time.Microsecond, 192_500},
		{"h100-8b", 5640 * time.Microsecond, 30_800, 46 * time.Microsecond, 800 * time.Microsecond, 15 * time.Microsecond, 444_000},
		{"h100x8-70b", 9400 * time.Microsecond, 22_400, 15300 * time.Nanosecond, 2 * time.Millisecond, 20 * time.Microsecond, 1_357_000},
	}
	for _, row := range rows {
		t.Run(row.profile, func(t *testing.T) {
			t.Parallel()
			p := profile(t, row.profile)
			c := emulator.NewCore(p)
			add(t, c, emulator.Request{Prompt: 4000, Output: 10})
			first, second := step(t, c), step(t, c)
			if first.Prefill != emulator.TokenBudget || second.Prefill != 4000-emulator.TokenBudget {
				t.Errorf("prefilled %d and %d tokens, want the budget and the rest", first.Prefill, second.Prefill)
			}
			if len(first.Events) != 0 || len(second.Events) != 1 || !second.Events[0].First {
				t.Errorf("the first token came with %v, %v; want it at the end of the prefill", first.Events, second.Events)
			}
			rate := emulator.TokenBudget / (first.Duration - row.overhead - p.AllReduce).Seconds()
			if math.Abs(rate/row.prefill-1) > 0.01 {
				t.Errorf("prefill at %.0f tokens/s, want %.0f", rate, row.prefill)
			}
			decode := step(t, c)
			want := row.overhead + row.decode + row.perSeq + 4*row.cached
			if d := (decode.Duration - want).Abs(); d > time.Microsecond {
				t.Errorf("a decode step took %v, want %v", decode.Duration, want)
			}
			if got := float64(p.Blocks() * emulator.BlockTokens); got > row.capacity || got < row.capacity-emulator.BlockTokens {
				t.Errorf("capacity %v, want %v", got, row.capacity)
			}
		})
	}
}

func TestDecodingGoesBeforePrefillInOneBudget(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "l40s-8b"))
	for range 100 {
		add(t, c, emulator.Request{Prompt: 10, Output: 50})
	}
	step(t, c)
	add(t, c, emulator.Request{Prompt: 5000, Output: 5})
	got := step(t, c)
	if got.Decoding != 100 || got.Prefill != emulator.TokenBudget-100 {
		t.Errorf("decoded %d, prefilled %d; want 100 and %d", got.Decoding, got.Prefill, emulator.TokenBudget-100)
	}
}

func TestAdmissionStopsAtTheSequenceLimitAndTheWatermark(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "l40s-8b"))
	for range 300 {
		add(t, c, emulator.Request{Prompt: 1, Output: 100})
	}
	step(t, c)
	if s := c.Stats(); s.Running != 256 || s.Waiting != 44 {
		t.Errorf("running %d, waiting %d; want 256 and 44", s.Running, s.Waiting)
	}

	c = emulator.NewCore(profile(t, "a10-7b")) // 800 blocks, of which 8 stay free
	for range 8 {
		add(t, c, emulator.Request{Prompt: 1600, Output: 100})
	}
	for range 10 {
		step(t, c)
	}
	if s := c.Stats(); s.Running != 7 || s.Waiting != 1 {
		t.Errorf("running %d, waiting %d; want 7 of 100 blocks each, and 1 that would touch the watermark", s.Running, s.Waiting)
	}
}

func TestASequenceAsLargeAsTheCacheRuns(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "a10-7b"))
	add(t, c, emulator.Request{Prompt: 12_790, Output: 10})
	add(t, c, emulator.Request{Prompt: 100, Output: 10})
	drain(t, c)
	if s := c.Stats(); s.Finished != 2 || s.UsedBlocks != 0 {
		t.Errorf("finished %d, %d blocks in use; want 2 and 0", s.Finished, s.UsedBlocks)
	}
	if _, err := c.Add(emulator.Request{Prompt: 12_790, Output: 11}); err == nil {
		t.Error("a sequence larger than the cache was accepted")
	}
}

func TestPreemptionTakesTheLastAdmittedAndLosesNoToken(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "a10-7b"))
	const n, output = 6, 600 // together far more than 12,800
	tokens := make(map[emulator.ID]int)
	var ids []emulator.ID
	for range n {
		ids = append(ids, add(t, c, emulator.Request{Prompt: 2000, Output: output}))
	}
	var ended []emulator.ID
	for {
		s, ok := c.Step()
		if !ok {
			break
		}
		for _, e := range s.Events {
			tokens[e.ID]++
			if e.Done {
				ended = append(ended, e.ID)
			}
		}
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if c.Stats().Preemptions == 0 {
		t.Error("nothing was preempted")
	}
	if ended[0] != ids[0] {
		t.Errorf("sequence %d ended first: the oldest must never be preempted", ended[0])
	}
	for _, id := range ids {
		if tokens[id] != output {
			t.Errorf("sequence %d got %d tokens, want %d", id, tokens[id], output)
		}
	}
}

func TestPrefixesAreReusedUntilTheirBlocksAreNeeded(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "a10-7b"))
	names := make([]uint64, 62) // of 1,000 tokens
	for i := range names {
		names[i] = uint64(1000 + i)
	}
	add(t, c, emulator.Request{Prompt: 1000, Output: 1, Names: names})
	if got := step(t, c).Prefill; got != 1000 {
		t.Errorf("the first prefill took %d tokens, want 1000", got)
	}
	add(t, c, emulator.Request{Prompt: 1000, Output: 1, Names: names})
	if got := step(t, c).Prefill; got != 1000-62*16 {
		t.Errorf("the second prefill took %d tokens, want the %d outside full blocks", got, 1000-62*16)
	}
	add(t, c, emulator.Request{Prompt: 992, Output: 1, Names: names})
	if got := step(t, c).Prefill; got != 16 {
		t.Errorf("a prompt cached whole took %d tokens, want its last block", got)
	}
	add(t, c, emulator.Request{Prompt: 12_799, Output: 1}) // takes the whole cache
	drain(t, c)
	add(t, c, emulator.Request{Prompt: 1000, Output: 1, Names: names})
	if got := step(t, c).Prefill; got != 1000 {
		t.Errorf("after the cache was overwritten the prefill took %d tokens", got)
	}
	if s := c.Stats(); s.UsedBlocks != 0 || s.PrefixHits == 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestSequencesShareAPrefixInTheSameStep(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "a10-7b"))
	names := make([]uint64, 10)
	for i := range names {
		names[i] = uint64(1 + i)
	}
	for i := range 4 {
		add(t, c, emulator.Request{Prompt: 165, Output: 20, Names: names, Seed: uint64(1 + i)})
	}
	if got := step(t, c); got.Prefill != 165+3*5 || len(got.Events) != 4 {
		t.Errorf("prefilled %d tokens for %d sequences, want 180 for 4", got.Prefill, len(got.Events))
	}
	if used := c.Stats().UsedBlocks; used != 14 {
		t.Errorf("%d blocks in use, want 10 shared and 4 own", used)
	}
}

func TestAHeldSequenceKeepsItsPlaceAndTheOthersGoOn(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "test"))
	held := add(t, c, emulator.Request{Prompt: 100, Output: 50, Hold: 6})
	atOnce := add(t, c, emulator.Request{Prompt: 100, Output: 50, Hold: 1})
	add(t, c, emulator.Request{Prompt: 100, Output: 50})
	tokens := make(map[emulator.ID]int)
	for {
		s, ok := c.Step()
		if !ok {
			break
		}
		for _, e := range s.Events {
			tokens[e.ID]++
		}
	}
	if diff := cmp.Diff(map[emulator.ID]int{held: 5, 3: 50}, tokens); diff != "" {
		t.Error(diff)
	}
	if s := c.Stats(); s.Running != 2 {
		t.Errorf("running %d, want the two held ones", s.Running)
	}
	if !c.Cancel(held) || !c.Cancel(atOnce) || c.Cancel(held) {
		t.Error("cancelling does not report what was there")
	}
	if s := c.Stats(); s.Running != 0 || s.UsedBlocks != 0 {
		t.Errorf("after cancelling: %+v", s)
	}
}

func TestBlocksReturnToZeroAfterAnyMix(t *testing.T) {
	t.Parallel()
	for seed := range uint64(24) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			rnd := rand.New(rand.NewPCG(seed, 7))
			p := profile(t, "test")
			p.KVTokens = 16 * (40 + rnd.IntN(200))
			c := emulator.NewCore(p)
			if rnd.IntN(2) == 0 {
				c.SetMaxRunning(1 + rnd.IntN(20))
			}
			if seed%2 == 1 {
				c.SetPriorities()
			}
			capacity := p.Blocks() * emulator.BlockTokens
			live := make(map[emulator.ID]int) // tokens to come
			added, ended, cancelled := 0, 0, 0
			for i := 0; i < 400 || len(live) > 0; i++ {
				if i > 100_000 {
					t.Fatalf("%d sequences never end", len(live))
				}
				if i < 400 && rnd.IntN(3) == 0 {
					r := emulator.Request{Prompt: 1 + rnd.IntN(capacity/2), Output: rnd.IntN(capacity / 2), Seed: uint64(rnd.IntN(4)), Priority: rnd.IntN(3) - 1}
					family := uint64(1+rnd.IntN(3)) << 32 // so that prefixes meet
					for b := range r.Prompt / emulator.BlockTokens {
						r.Names = append(r.Names, family+uint64(b))
					}
					live[add(t, c, r)] = max(r.Output, 1)
					added++
				}
				if rnd.IntN(10) == 0 {
					c.Preempt()
				}
				for id := range live {
					if rnd.IntN(100) == 0 {
						if !c.Cancel(id) {
							t.Fatalf("sequence %d is not there to cancel", id)
						}
						delete(live, id)
						cancelled++
					}
					break
				}
				s, _ := c.Step()
				for _, e := range s.Events {
					live[e.ID]--
					if e.Done != (live[e.ID] == 0) {
						t.Fatalf("sequence %d: done %v with %d tokens to come", e.ID, e.Done, live[e.ID])
					}
					if e.Done {
						delete(live, e.ID)
						ended++
					}
				}
				if s.Prefill+s.Decoding > emulator.TokenBudget {
					t.Fatalf("a step of %d tokens", s.Prefill+s.Decoding)
				}
				if i%5 == 0 || i > 400 && len(live) == 0 {
					if err := c.Check(); err != nil {
						t.Fatal(err)
					}
				}
			}
			got := c.Stats()
			if got.UsedBlocks != 0 || got.Running != 0 || got.Waiting != 0 {
				t.Errorf("not empty at the end: %+v", got)
			}
			if ended+cancelled != added || int64(ended) != got.Finished || int64(cancelled) != got.Cancelled {
				t.Errorf("added %d, ended %d, cancelled %d; the core counts %d and %d", added, ended, cancelled, got.Finished, got.Cancelled)
			}
		})
	}
}

// ends runs c to rest and returns the sequences in the order in which they ended.
func ends(t *testing.T, c *emulator.Core) []emulator.ID {
	t.Helper()
	var ended []emulator.ID
	for {
		s, ok := c.Step()
		if !ok {
			return ended
		}
		for _, e := range s.Events {
			if e.Done {
				ended = append(ended, e.ID)
			}
		}
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheLowestPriorityNumberStartsFirst(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "test"))
	c.SetPriorities()
	c.SetMaxRunning(1)
	for _, priority := range []int{5, 0, 5, -1, 0} {
		add(t, c, emulator.Request{Prompt: 10, Output: 2, Priority: priority})
	}
	if diff := cmp.Diff([]emulator.ID{4, 2, 5, 1, 3}, ends(t, c)); diff != "" {
		t.Error(diff)
	}

	c = emulator.NewCore(profile(t, "test"))
	c.SetMaxRunning(1)
	for _, priority := range []int{5, 0, -1} {
		add(t, c, emulator.Request{Prompt: 10, Output: 2, Priority: priority})
	}
	if diff := cmp.Diff([]emulator.ID{1, 2, 3}, ends(t, c)); diff != "" {
		t.Errorf("without priorities: %s", diff)
	}
}

// The cache holds two of the three to their end: the one of the highest number gives way, though it was admitted first.
func TestTheHighestPriorityNumberGivesWay(t *testing.T) {
	t.Parallel()
	p := profile(t, "test")
	p.KVTokens = 160 * 16
	c := emulator.NewCore(p)
	c.SetPriorities()
	low := add(t, c, emulator.Request{Prompt: 500, Output: 600, Priority: 9, Seed: 1})
	step(t, c)
	first := add(t, c, emulator.Request{Prompt: 500, Output: 600, Seed: 2})
	second := add(t, c, emulator.Request{Prompt: 500, Output: 600, Seed: 3})
	if diff := cmp.Diff([]emulator.ID{first, second, low}, ends(t, c)); diff != "" {
		t.Error(diff)
	}
	if got := c.Stats().Preemptions; got != 1 {
		t.Errorf("%d preemptions, want 1", got)
	}
}

func TestAQuietCoreTellsFirstTokensAndEnds(t *testing.T) {
	t.Parallel()
	c := emulator.NewCore(profile(t, "test"))
	c.SetQuiet()
	add(t, c, emulator.Request{Prompt: 10, Output: 20})
	add(t, c, emulator.Request{Prompt: 10, Output: 1})
	var got []emulator.Event
	for {
		s, ok := c.Step()
		if !ok {
			break
		}
		got = append(got, s.Events...)
	}
	if diff := cmp.Diff([]emulator.Event{{ID: 1, First: true}, {ID: 2, First: true, Done: true}, {ID: 1, Done: true}}, got); diff != "" {
		t.Error(diff)
	}
}

// One engine of the seed-like study near its capacity: the numbers of a run in virtual time stay the same from run to run.
func TestAStudyRunsInVirtualTime(t *testing.T) {
	t.Parallel()
	run := func() (time.Duration, int64) {
		c := emulator.NewCore(profile(t, "a10-7b"))
		rnd := rand.New(rand.NewPCG(1, 2))
		var now, next time.Duration
		for now < 2*time.Minute {
			for next <= now {
				add(t, c, emulator.Request{Prompt: 1 + int(60*math.Exp(0.8*rnd.NormFloat64())), Output: 1 + int(9*math.Exp(0.5*rnd.NormFloat64()))})
				next += time.Duration(rnd.ExpFloat64() * float64(time.Second) / 16)
			}
			s, ok := c.Step()
			if !ok {
				now = next
			}
			now += s.Duration
		}
		return now, c.Stats().GeneratedTokens
	}
	now, generated := run()
	again, same := run()
	if now != again || generated != same {
		t.Errorf("two runs differ: %v and %v, %d and %d tokens", now, again, generated, same)
	}
	if rate := float64(generated) / now.Seconds(); rate < 100 || rate > 250 {
		t.Errorf("generated %.0f tokens/s, want about 16 requests/s of 10", rate)
	}
}

func BenchmarkStep(b *testing.B) {
	c := emulator.NewCore(profile(b, "l40s-8b"))
	b.ReportAllocs()
	for b.Loop() {
		for c.Stats().Running+c.Stats().Waiting < emulator.MaxRunning {
			add(b, c, emulator.Request{Prompt: 200, Output: 500})
		}
		step(b, c)
	}
	b.ReportMetric(emulator.MaxRunning, "sequences")
}

// A second of the seed-like study on one engine, as a simulation runs it: few sequences at once, each short.
func BenchmarkStudy(b *testing.B) {
	c := emulator.NewCore(profile(b, "a10-7b"))
	c.SetQuiet()
	b.ReportAllocs()
	rnd := rand.New(rand.NewPCG(1, 2))
	var now, next time.Duration
	steps, sequences := 0, 0
	for b.Loop() {
		for end := now + time.Second; now < end; steps++ {
			for next <= now {
				add(b, c, emulator.Request{Prompt: 1 + int(60*math.Exp(0.8*rnd.NormFloat64())), Output: 1 + int(9*math.Exp(0.5*rnd.NormFloat64()))})
				next += time.Duration(rnd.ExpFloat64() * float64(time.Second) / 16)
			}
			s, ok := c.Step()
			if !ok {
				now = next
			}
			now += s.Duration
			sequences += s.Decoding
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(steps), "ns/step")
	b.ReportMetric(float64(sequences)/float64(steps), "sequences")
}
