package fairshare_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/fairshare"
	"github.com/millrace/millrace/internal/job"
)

const (
	throughput = 4000.0 // tokens per second that the workers of a simulation do
	mark       = 4 * throughput
)

// source is a tenant's line or batch in a simulation.
type source struct {
	name   string
	tenant job.Tenant
	weight int
	class  job.Class
	sizes  func(*rand.Rand) job.Tokens
	// from is when it begins to have work, jobs how many it has; 0 has no end. due is when a batch is to be done, total what it has in all.
	from  time.Duration
	jobs  int
	due   time.Duration
	total job.Tokens

	started bool
	fed     int
	next    job.Tokens
	ended   job.Tokens
	first   time.Duration // when its first job was fed, -1 before
	done    time.Duration // when its last job ended
}

func always(n job.Tokens) func(*rand.Rand) job.Tokens {
	return func(*rand.Rand) job.Tokens { return n }
}

// between gives sizes over a wide range, small ones most often.
func between(least, most job.Tokens) func(*rand.Rand) job.Tokens {
	return func(r *rand.Rand) job.Tokens {
		f := r.Float64()
		return least + job.Tokens(float64(most-least)*f*f)
	}
}

type piece struct {
	from   *source
	tokens job.Tokens
	class  job.Class
}

// simulation is a model's feeder and workers in virtual time. The workers do one job after the other at the throughput, which stands for many side by side.
type simulation struct {
	t       testing.TB
	share   *fairshare.Share
	sources []*source
	rnd     *rand.Rand
	now     time.Duration
	lanes   [3][]piece
	waiting [3]job.Tokens
	served  [3]job.Tokens // ended, by class as fed
	credit  float64       // tokens that batch work has coming at the workers
	trickle float64
	// took is what a job takes in truth.
	took func(piece) job.Tokens
	log  []string
	busy time.Duration
}

func simulate(t testing.TB, seed uint64, sources ...*source) *simulation {
	t.Helper()
	share, err := fairshare.New(fairshare.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sources {
		s.first, s.done = -1, -1
	}
	return &simulation{t: t, share: share, sources: sources, rnd: rand.New(rand.NewPCG(seed, 1)), trickle: 0.1, took: func(p piece) job.Tokens { return p.tokens }}
}

var epoch = time.Unix(1_800_000_000, 0)

// feed does what the dispatcher does when there may be room.
func (s *simulation) feed() {
	s.share.Look(fairshare.Look{Now: epoch.Add(s.now), Mark: mark, Waiting: s.waiting, Throughput: throughput})
	for _, src := range s.sources {
		if s.now < src.from || src.jobs > 0 && src.fed == src.jobs {
			continue
		}
		if !src.started {
			src.started, src.next = true, src.sizes(s.rnd)
		}
		o := fairshare.Offer{Tenant: src.tenant, Weight: src.weight, Class: src.class}
		if src.due > 0 {
			o.Urgency = min(1, float64(src.total-src.ended)/throughput/max(0.001, (src.due-s.now).Seconds()))
		}
		s.share.Offer(src.name, o)
	}
	for {
		g, ok := s.share.Next()
		if !ok {
			return
		}
		src := s.sources[slices.IndexFunc(s.sources, func(o *source) bool { return o.name == g.Key })]
		var fed job.Tokens
		more := true
		for n := 0; more && (n == 0 || fed+src.next <= g.Tokens); n++ {
			p := piece{src, src.next, g.Class}
			fed += p.tokens
			rank := g.Class.Rank()
			s.lanes[rank] = append(s.lanes[rank], p)
			s.waiting[rank] += p.tokens
			if src.first < 0 {
				src.first = s.now
			}
			src.fed++
			src.next = src.sizes(s.rnd)
			more = src.jobs == 0 || src.fed < src.jobs
		}
		s.log = append(s.log, fmt.Sprintf("%v %s %s %d", s.now, g.Key, g.Class, fed))
		s.share.Fed(g, fed, more)
	}
}

// run lets so much time pass. hook is called after each job.
func (s *simulation) run(d time.Duration, hook func()) {
	for end := s.now + d; s.now < end; {
		s.feed()
		rank := -1
		for r := range s.lanes {
			if len(s.lanes[r]) > 0 {
				rank = r
				break
			}
		}
		if b := job.Batch.Rank(); rank >= 0 && s.credit > 0 && len(s.lanes[b]) > 0 {
			rank = b
		}
		if rank < 0 {
			s.now += 10 * time.Millisecond
			if hook != nil {
				hook()
			}
			continue
		}
		p := s.lanes[rank][0]
		s.lanes[rank] = s.lanes[rank][1:]
		s.waiting[rank] -= p.tokens
		took := s.took(p)
		if rank == job.Batch.Rank() {
			s.credit = max(-mark, s.credit-float64(took))
			s.credit += s.trickle * float64(took)
		} else {
			s.credit = min(mark, s.credit+s.trickle*float64(took))
		}
		spent := time.Duration(float64(took) / throughput * float64(time.Second))
		s.now += spent
		s.busy += spent
		s.served[rank] += took
		p.from.ended += took
		if p.from.jobs > 0 && p.from.fed == p.from.jobs && !slices.ContainsFunc(s.lanes[rank], func(o piece) bool { return o.from == p.from }) {
			p.from.done = s.now
		}
		s.share.Settle(p.from.tenant, p.class, p.tokens, took)
		if hook != nil {
			hook()
		}
	}
}

// fair checks that each got its part of the tokens by the weights, but for what one job may be.
func (s *simulation) fair(sources []*source, within float64) {
	s.t.Helper()
	const job = 12_000
	var tokens float64
	weights := 0
	for _, src := range sources {
		tokens += float64(src.ended)
		weights += src.weight
	}
	for _, src := range sources {
		got, due := float64(src.ended), tokens*float64(src.weight)/float64(weights)
		if math.Abs(got-due) > within*due+job {
			s.t.Errorf("%s with weight %d of %d got %.0f of %.0f tokens, want %.0f", src.name, src.weight, weights, got, tokens, due)
		}
	}
}

func TestTokensFollowWeights(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		class := job.Classes()[rnd.IntN(3)]
		var sources []*source
		for i := range 2 + rnd.IntN(12) {
			src := &source{name: fmt.Sprint("s", i), tenant: job.Tenant(fmt.Sprint("t", i)), weight: 1 + rnd.IntN(300), class: class}
			switch rnd.IntN(4) {
			case 0:
				src.sizes = always(8000)
			case 1:
				src.sizes = always(100)
			case 2:
				src.sizes = always(job.Tokens(1 + rnd.IntN(3000)))
			default:
				src.sizes = between(20, 12_000)
			}
			sources = append(sources, src)
		}
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			s := simulate(t, seed, sources...)
			s.run(30*time.Minute, nil)
			s.fair(sources, 0.2)
		})
	}
}

func TestSizesDoNotMatter(t *testing.T) {
	t.Parallel()
	large := &source{name: "large", tenant: "a", weight: 100, class: job.Standard, sizes: always(8000)}
	small := &source{name: "small", tenant: "b", weight: 100, class: job.Standard, sizes: always(100)}
	s := simulate(t, 1, large, small)
	wait, since := time.Duration(0), time.Duration(0)
	last := job.Tokens(0)
	s.run(10*time.Minute, func() { // and neither waits for long
		if small.ended > last {
			last, since = small.ended, s.now
		}
		wait = max(wait, s.now-since)
	})
	s.fair([]*source{large, small}, 0.1)
	if wait > 10*time.Second {
		t.Errorf("the one with small jobs got nothing for %v", wait)
	}
}

// TestUsageCorrectsWhatWasCounted: a tenant that asks for ten times what it takes gets as much as one that asks for what it needs.
func TestUsageCorrectsWhatWasCounted(t *testing.T) {
	t.Parallel()
	vain := &source{name: "vain", tenant: "a", weight: 100, class: job.Standard, sizes: always(2000)}
	plain := &source{name: "plain", tenant: "b", weight: 100, class: job.Standard, sizes: always(200)}
	s := simulate(t, 1, vain, plain)
	s.took = func(piece) job.Tokens { return 200 }
	s.run(time.Hour, nil)
	s.fair([]*source{vain, plain}, 0.2)
}

// TestOneLineStartsAtOnce: whoever comes with one job is fed next, however much others have and however many they are.
func TestOneLineStartsAtOnce(t *testing.T) {
	t.Parallel()
	for _, others := range []int{1, 200} {
		var sources []*source
		for i := range others {
			sources = append(sources, &source{name: fmt.Sprint("a", i), tenant: job.Tenant(fmt.Sprint("a", i)), weight: 100, class: job.Batch, sizes: between(100, 8000)})
		}
		one := &source{name: "one", tenant: "b", weight: 1, class: job.Batch, sizes: always(100), from: time.Minute, jobs: 1}
		s := simulate(t, 3, append(sources, one)...)
		s.run(2*time.Minute, nil)
		if late := one.first - one.from; one.first < 0 || late > 3*time.Second { // when the next job has ended
			t.Errorf("beside %d others it is fed after %v", others, late)
		}
		if wait := one.done - one.from; one.done < 0 || wait > 8*time.Second { // what is there before the workers: four seconds
			t.Errorf("beside %d others it ends after %v", others, wait)
		}
	}
}

// TestComingAndGoingPaysNothing: a tenant with one job at a time that brings the next as soon as that is fed gets no more than its part.
func TestComingAndGoingPaysNothing(t *testing.T) {
	t.Parallel()
	steady := &source{name: "steady", tenant: "a", weight: 100, class: job.Standard, sizes: always(500)}
	clever := &source{name: "clever", tenant: "b", weight: 100, class: job.Standard, sizes: always(4000), jobs: 1}
	s := simulate(t, 1, steady, clever)
	s.run(time.Hour, func() {
		if clever.fed == 1 {
			clever.fed = 0
		}
	})
	if share := float64(clever.ended) / float64(clever.ended+steady.ended); share > 0.55 {
		t.Errorf("it got %.2f of the tokens", share)
	}
}

func TestBatchKeepsItsFloor(t *testing.T) {
	t.Parallel()
	for seed := range uint64(5) {
		urgent := &source{name: "interactive", tenant: "a", weight: 100, class: job.Interactive, sizes: between(20, 2000)}
		standard := &source{name: "standard", tenant: "b", weight: 100, class: job.Standard, sizes: between(20, 2000)}
		batch := &source{name: "batch", tenant: "c", weight: 100, class: job.Batch, sizes: between(100, 4000)}
		s := simulate(t, seed, urgent, standard, batch)
		s.run(10*time.Minute, nil)
		total := s.served[0] + s.served[1] + s.served[2]
		if share := float64(s.served[2]) / float64(total); share < 0.09 || share > 0.13 {
			t.Errorf("batch work got %.3f of the tokens", share)
		}
		if float64(s.served[0])/float64(total) < 0.85 {
			t.Errorf("interactive work got %d of %d tokens", s.served[0], total)
		}
	}
}

// TestUrgentBatchIsInTime: one that needs a good part of what others leave, among many other batches.
func TestUrgentBatchIsInTime(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		need  float64 // share of the throughput
		load  float64 // of higher classes
		class job.Class
	}{
		{"a third, beside a third of interactive work", 0.33, 0.33, job.Interactive},
		{"half, beside some standard work", 0.5, 0.3, job.Standard},
		{"nine tenths, alone with other batches", 0.9, 0, job.Interactive},
		{"a twentieth of an hour", 0.05, 0.5, job.Interactive},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			const due = 20 * time.Minute
			total := job.Tokens(tt.need * throughput * due.Seconds())
			hurried := &source{name: "hurried", tenant: "a", weight: 100, class: job.Batch, sizes: always(1000), jobs: int(total / 1000), total: total, due: due}
			sources := []*source{hurried}
			for i := range 10 {
				sources = append(sources, &source{name: fmt.Sprint("idle", i), tenant: job.Tenant(fmt.Sprint("b", i)), weight: 100, class: job.Batch, sizes: between(100, 4000)})
			}
			arrives := &source{name: "load", tenant: "c", weight: 100, class: tt.class, sizes: always(400), jobs: 1}
			arrives.fed = 1
			sources = append(sources, arrives)
			s := simulate(t, 1, sources...)
			s.run(due, func() {
				if float64(arrives.ended) < tt.load*throughput*s.now.Seconds() {
					arrives.fed = 0
				}
			})
			if hurried.done < 0 || hurried.done > due {
				t.Errorf("%d of %d tokens are done when its time is over", hurried.ended, total)
			}
			if got := float64(arrives.ended) / throughput / s.now.Seconds(); got < tt.load*0.95 {
				t.Errorf("the higher class got %.2f of %.2f", got, tt.load)
			}
		})
	}
}

// TestPatientBatchYields: with time to spare it is no more than a batch.
func TestPatientBatchYields(t *testing.T) {
	t.Parallel()
	batch := &source{name: "batch", tenant: "a", weight: 100, class: job.Batch, sizes: always(1000), jobs: 100, total: 100_000, due: 24 * time.Hour}
	standard := &source{name: "standard", tenant: "b", weight: 100, class: job.Standard, sizes: always(1000)}
	s := simulate(t, 1, batch, standard)
	s.run(2*time.Minute, nil)
	for _, line := range s.log {
		if strings.Contains(line, "batch standard") {
			t.Fatal(line)
		}
	}
	if s.served[1] == 0 || float64(s.served[2]) > 0.13*float64(s.served[1]+s.served[2]) {
		t.Errorf("served %v", s.served)
	}
}

// TestBlockedTenantHoldsNothing: neither the others' places nor credit for the time.
func TestBlockedTenantHoldsNothing(t *testing.T) {
	t.Parallel()
	a := &source{name: "a", tenant: "a", weight: 100, class: job.Standard, sizes: always(500)}
	b := &source{name: "b", tenant: "b", weight: 100, class: job.Standard, sizes: always(500)}
	s := simulate(t, 1, a, b)
	s.run(time.Minute, nil)
	s.share.Block("a", true)
	s.run(10*time.Second, nil) // what is fed already
	before := a.ended
	s.run(10*time.Minute, nil)
	if a.ended != before {
		t.Errorf("a blocked tenant was fed %d tokens", a.ended-before)
	}
	if lost := 11*time.Minute + 10*time.Second - s.busy; lost > time.Second {
		t.Errorf("the workers had nothing to do for %v", lost)
	}
	s.share.Block("a", false)
	gotA, gotB := a.ended, b.ended
	s.run(5*time.Minute, nil)
	if share := float64(a.ended-gotA) / float64(a.ended-gotA+b.ended-gotB); share > 0.55 || share < 0.45 {
		t.Errorf("free again it gets %.2f of the tokens", share)
	}
}

// TestSuppliesOfATenantShareItsPart: two batches beside one of another tenant.
func TestSuppliesOfATenantShareItsPart(t *testing.T) {
	t.Parallel()
	one := &source{name: "one", tenant: "a", weight: 100, class: job.Batch, sizes: always(3000)}
	two := &source{name: "two", tenant: "a", weight: 100, class: job.Batch, sizes: always(100)}
	other := &source{name: "other", tenant: "b", weight: 100, class: job.Batch, sizes: always(700)}
	s := simulate(t, 1, one, two, other)
	s.run(time.Hour, nil)
	if f := float64(one.ended) / float64(two.ended); f < 0.9 || f > 1.1 {
		t.Errorf("the two batches got %d and %d tokens", one.ended, two.ended)
	}
	if f := float64(one.ended+two.ended) / float64(other.ended); f < 0.9 || f > 1.1 {
		t.Errorf("the tenants got %d and %d tokens", one.ended+two.ended, other.ended)
	}
}

func TestSameEventsSameDecisions(t *testing.T) {
	t.Parallel()
	var logs [][]string
	for range 2 {
		var sources []*source
		for i := range 20 {
			sources = append(sources, &source{
				name: fmt.Sprint("s", i), tenant: job.Tenant(fmt.Sprint("t", i%7)), weight: 1 + 37*i, class: job.Classes()[i%3], sizes: between(10, 5000),
				from: time.Duration(i) * time.Second, jobs: 100 * (i % 4), due: time.Duration(i%2) * time.Hour, total: 1_000_000,
			})
		}
		s := simulate(t, 9, sources...)
		s.run(10*time.Minute, nil)
		logs = append(logs, s.log)
	}
	if len(logs[0]) < 100 || !slices.Equal(logs[0], logs[1]) {
		t.Errorf("%d and %d decisions differ", len(logs[0]), len(logs[1]))
	}
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for _, c := range []fairshare.Config{{BatchFloor: 1}, {BatchFloor: 2}, {Quantum: -1}} {
		if _, err := fairshare.New(c); err == nil {
			t.Errorf("%+v was taken", c)
		}
	}
}

// BenchmarkNext is one decision among a thousand tenants.
func BenchmarkNext(b *testing.B) {
	s, err := fairshare.New(fairshare.Config{})
	if err != nil {
		b.Fatal(err)
	}
	for i := range 1000 {
		s.Offer(fmt.Sprint("s", i), fairshare.Offer{Tenant: job.Tenant(fmt.Sprint("t", i)), Weight: 1 + i, Class: job.Classes()[i%3]})
	}
	look := fairshare.Look{Now: epoch, Mark: mark, Throughput: throughput}
	s.Look(look)
	n := job.Tokens(0)
	for b.Loop() {
		g, ok := s.Next()
		if !ok {
			look.Now = look.Now.Add(time.Second)
			s.Look(look)
			continue
		}
		n++
		s.Fed(g, 100+n%500, true)
	}
}
