package autoscaler_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/provider"
	"github.com/millrace/millrace/internal/scale"
)

// slow is a pool that lets go of nothing while a test lasts.
func slow(p *scale.Pool) {
	p.Cooldown, p.Idle = scale.Duration(5*time.Minute), scale.Duration(5*time.Minute)
}

// most is a pool of so many workers, which much work needs all.
func most(n int) func(*scale.Pool) {
	return func(p *scale.Pool) { p.Max = n }
}

// unique fails the test if the provider was asked for more names than there are workers.
func (e *env) unique(n int) {
	e.Helper()
	names := e.cloud.calls()
	slices.Sort(names)
	if names = slices.Compact(names); len(names) != n {
		e.Errorf("%d workers were asked for, want %d: %q", len(names), n, names)
	}
}

// A leader that dies between the write and the order, after an order that was carried out, and after one of which it heard a failure: the next one starts no worker twice, and none is missing.
func TestNextLeaderStartsWhatWasAskedFor(t *testing.T) {
	t.Parallel()
	for name, applied := range map[string]bool{"not carried out": false, "carried out": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.pool(slow)
			hang := make(chan struct{})
			var calls atomic.Int32
			e.cloud.onStart = func(string) (bool, error) {
				calls.Add(1)
				if applied {
					return true, nil
				}
				<-hang
				return false, context.Canceled
			}
			e.cloud.held = true
			first := e.run(autoscaler.Config{})
			e.wait(3, 100, 0)
			e.eventually("three are asked for", func() bool { return calls.Load() == 3 })
			launched := e.launches()
			if len(launched) != 3 {
				t.Fatalf("launches %+v", launched)
			}
			go first.cancel()
			if !applied {
				close(hang)
			}
			<-first.done
			e.cloud.do(func() { e.cloud.onStart, e.cloud.held = nil, false })
			e.cloud.each(func(i *instance) { i.beat.State = cluster.Ready })
			e.run(autoscaler.Config{})
			e.eventually("three are ready", e.ready(3))
			e.unique(3)
			for i, l := range e.launches() {
				if l.Name != launched[i].Name || l.At != launched[i].At {
					t.Errorf("%+v, was %+v", l, launched[i])
				}
			}
		})
	}
}

// A start that was carried out and reported failed is asked for again under its name: one worker.
func TestStartReportedFailedIsAskedForAgain(t *testing.T) {
	t.Parallel()
	for name, applied := range map[string]bool{"not carried out": false, "carried out": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.pool(slow)
			var calls atomic.Int32
			e.cloud.onStart = func(string) (bool, error) {
				if calls.Add(1) == 1 {
					return applied, errAway
				}
				return true, nil
			}
			r := e.run(autoscaler.Config{})
			e.wait(1, 50, 0)
			e.eventually("one is ready", e.ready(1))
			e.unique(1)
			if n := r.metric(t, "millrace_autoscaler_failed_starts_total"); n != 1 {
				t.Errorf("failed starts: %v", n)
			}
		})
	}
}

// An instance of which a call made a part, and was cut off or failed then, is asked for again though it is listed.
func TestStartThatMadeAPartIsAskedForAgain(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]bool{"failed": false, "cut off": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.pool(slow)
			hang, parts := make(chan struct{}), make(chan string, 1)
			var calls atomic.Int32
			e.cloud.onStart = func(name string) (bool, error) {
				switch {
				case calls.Add(1) == 1:
					e.cloud.do(func() {
						e.cloud.instances[name] = &instance{pool: "p", name: name, state: provider.Pending, created: time.Now(), silence: func() {}}
					})
					parts <- name
					if cut {
						<-hang
					}
					return false, errAway
				case calls.Load() == 2:
					e.cloud.do(func() { delete(e.cloud.instances, name) }) // it is made in whole
				}
				return true, nil
			}
			r := e.run(autoscaler.Config{})
			e.wait(1, 50, 0)
			part := <-parts
			if cut {
				go r.cancel()
				close(hang)
				<-r.done
				r = e.run(autoscaler.Config{})
			}
			e.eventually("one is ready", e.ready(1))
			e.unique(1)
			if e.cloud.names()[0] != part {
				t.Errorf("%q, was %q", e.cloud.names(), part)
			}
			if n := r.metric(t, "millrace_autoscaler_failed_starts_total"); cut && n != 0 {
				t.Errorf("the pool has %v failed starts, of one that was cut off", n)
			}
		})
	}
}

// TestAStartThatWaitsAndIsNotWantedAnyMoreIsGivenUp: an image that comes in an hour is no reason to start a worker then.
func TestAStartThatWaitsAndIsNotWantedAnyMoreIsGivenUp(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(nil)
	e.cloud.onStart = func(string) (bool, error) { return false, &provider.LaterError{For: "pulling the image x"} }
	r := e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("it waits", func() bool { return strings.Contains(e.info("p").Reason, "pulling the image x") })
	e.wait(0, 0, 0)
	e.eventually("nothing is started any more", func() bool { return e.info("p").Starting == 0 && len(e.launches()) == 0 })
	if n := r.metric(t, "millrace_autoscaler_failed_starts_total"); n != 0 {
		t.Errorf("%v failed starts", n)
	}
}

// What a start waits for, as an image that is pulled, is told, and is neither a failure nor a part of the cold start, however long it takes; a leader that dies meanwhile changes nothing.
func TestAStartThatWaitsHasNotFailed(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { slow(p); p.ColdStart = scale.Duration(time.Millisecond) })
	var calls atomic.Int32
	var here atomic.Bool
	e.cloud.onStart = func(string) (bool, error) {
		calls.Add(1)
		if !here.Load() {
			return false, &provider.LaterError{For: "pulling the image x, 3.0 GB of 10.0 GB"}
		}
		return true, nil
	}
	quick := func(t *autoscaler.Timing) { t.StartLimit(time.Millisecond) }
	first := e.run(autoscaler.Config{}, quick)
	e.wait(1, 50, 0)
	asked := func(r *running, n int32) {
		e.Helper()
		e.eventually("it is asked again and again", func() bool { return calls.Load() >= n })
		e.eventually("it starts, and says what it waits for", func() bool {
			p := e.info("p")
			return p.Starting == 1 && p.ReadyAt == 0 && p.Unavailable == "" && strings.Contains(p.Reason, "waits: pulling the image x, 3.0 GB of 10.0 GB")
		})
		if n := r.metric(t, "millrace_autoscaler_failed_starts_total"); n != 0 {
			t.Errorf("%v failed starts", n)
		}
	}
	asked(first, 5)
	first.stop()
	second := e.run(autoscaler.Config{}, func(t *autoscaler.Timing) { t.StartLimit(time.Minute) })
	asked(second, calls.Load()+5)
	waited := time.Since(e.launches()[0].At.Time())
	here.Store(true)
	e.eventually("one is ready", e.ready(1))
	e.unique(1)
	if n := second.metric(t, "millrace_autoscaler_failed_starts_total"); n != 0 {
		t.Errorf("%v failed starts", n)
	}
	e.eventually("the cold start is kept, without the wait", func() bool {
		states, err := e.ledger.PoolStates(t.Context())
		e.ok(err)
		var s struct {
			ColdStarts []float64 `json:"cold_starts"`
		}
		e.ok(json.Unmarshal(states["p"], &s))
		if len(s.ColdStarts) == 1 && s.ColdStarts[0] >= waited.Seconds() {
			t.Fatalf("it took %v s, and waited %s", s.ColdStarts, waited)
		}
		return len(s.ColdStarts) == 1
	})
}

// A provider that takes starts on and forgets them has failed each time: it is asked again under the same name, ever less often.
func TestStartThatTheProviderForgetsHasFailed(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	forgets := atomic.Bool{}
	forgets.Store(true)
	e.cloud.onStart = func(string) (bool, error) { return !forgets.Load(), nil }
	e.pool(slow)
	r := e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("the pool is unavailable", func() bool { return e.info("p").Unavailable == "the provider has it no more" })
	if calls, failed := len(e.cloud.calls()), r.metric(t, "millrace_autoscaler_failed_starts_total"); failed < 3 || float64(calls) > failed+1 {
		t.Errorf("%d calls, %v failed", calls, failed)
	}
	forgets.Store(false)
	e.eventually("one is ready", e.ready(1))
	e.unique(1)
}

// Of a pool that is only observed somebody else starts what is wanted, and is not hurried.
func TestStartsOfAnObservedPoolAreWaitedFor(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.own = true
	e.cloud.onStart = func(string) (bool, error) { return false, nil }
	var lists atomic.Int32
	e.cloud.onList = func(context.Context) error { lists.Add(1); return nil }
	e.providers["kubernetes"] = e.cloud
	p := e.pool(func(p *scale.Pool) {
		slow(p)
		p.Provider, p.Engine.Command = "kubernetes", nil
		p.Kubernetes = &scale.Kubernetes{Kind: "Deployment", Name: "x", Observe: true}
	})
	r := e.run(autoscaler.Config{})
	e.wait(3, 100, 0)
	e.eventually("three are asked for", func() bool { return len(e.cloud.calls()) == 3 })
	seen := lists.Load()
	e.eventually("they have been missed for long", func() bool { return lists.Load() >= seen+10 })
	if n := r.metric(t, "millrace_autoscaler_failed_starts_total"); n != 0 || len(e.cloud.calls()) != 3 {
		t.Errorf("%v failed starts, %d calls", n, len(e.cloud.calls()))
	}
	for _, name := range []string{"p-late-1", "p-late-2", "p-late-3"} {
		e.cloud.create(p, name)
	}
	e.eventually("three are ready", e.ready(3))
}

// Instances that the provider names itself and lists late are the ones that were asked for, however often that counted as failed.
func TestInstancesThatComeLateAreTheOnesAskedFor(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.own = true
	e.cloud.onStart = func(string) (bool, error) { return false, nil }
	p := e.pool(most(3))
	e.run(autoscaler.Config{})
	e.wait(100, 100, 0)
	e.eventually("the pool is unavailable", func() bool { return e.info("p").Unavailable != "" })
	for _, name := range []string{"p-late-1", "p-late-2", "p-late-3"} {
		e.cloud.create(p, name)
	}
	e.eventually("three are ready", e.ready(3))
	if l := e.launches(); len(l) != 3 {
		t.Errorf("%+v", l)
	}
}

// A stop that fails is tried again, carried out or not.
func TestStopThatFailsIsTriedAgain(t *testing.T) {
	t.Parallel()
	for name, applied := range map[string]bool{"not carried out": false, "carried out": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			e.pool(nil)
			var calls atomic.Int32
			e.cloud.onStop = func(string) (bool, error) {
				if calls.Add(1) == 1 {
					return applied, errAway
				}
				return true, nil
			}
			r := e.run(autoscaler.Config{})
			e.wait(1, 50, 0)
			e.eventually("one is ready", e.ready(1))
			e.wait(0, 0, 0)
			e.eventually("it is gone", func() bool { return e.cloud.count() == 0 && len(e.launches()) == 0 })
			if calls.Load() != 2 || r.metric(t, "millrace_autoscaler_failed_stops_total") != 1 {
				t.Errorf("%d calls", calls.Load())
			}
			e.cloud.rules()
		})
	}
}

// A leader that dies while a worker drains: the next one goes on, whatever is asked for by then.
func TestNextLeaderStopsWhatWasToGo(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(nil)
	first := e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("one is ready", e.ready(1))
	name := e.cloud.names()[0]
	hang := make(chan struct{})
	e.cloud.do(func() {
		e.cloud.onStop = func(string) (bool, error) { <-hang; return false, context.Canceled }
	})
	e.wait(0, 0, 0)
	e.eventually("it is to go", func() bool { l := e.launches(); return len(l) == 1 && l[0].Stopping > 0 })
	go first.cancel()
	close(hang)
	<-first.done
	e.cloud.do(func() { e.cloud.onStop = nil })
	e.wait(1, 50, 0)
	e.run(autoscaler.Config{})
	e.eventually("another one is ready, and the first is gone", func() bool { return e.ready(1)() && e.cloud.names()[0] != name })
	e.cloud.rules()
}

// Two at once: one leads, and a stale one is refused whatever it tries.
func TestTwoAutoscalersActOnce(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(slow)
	a, b := e.run(autoscaler.Config{}), e.run(autoscaler.Config{})
	e.wait(4, 100, 0)
	e.eventually("four are ready", e.ready(4))
	e.unique(4)
	e.eventually("one leads", func() bool {
		return a.metric(t, "millrace_autoscaler_leading")+b.metric(t, "millrace_autoscaler_leading") == 1
	})
	// Another leader has written: this one starts nothing more.
	e.cloud.do(func() { e.cloud.asked = nil })
	e.ok(e.ledger.LeadScaling(t.Context(), 1<<62))
	e.wait(8, 100, 0)
	e.always("nothing is started", nil, 40, func() bool { return len(e.cloud.calls()) == 0 && len(e.launches()) == 4 })
}

// AS-8: starts that fail again and again end in a pool that is unavailable, and recover by themselves.
func TestFailedStartsBackOffAndRecover(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.crash = true
	e.pool(slow)
	r := e.run(autoscaler.Config{})
	e.wait(5, 100, 0)
	e.eventually("the pool is unavailable", func() bool { p := e.info("p"); return p.Unavailable != "" })
	e.eventually("it says why, and until when", func() bool { p := e.info("p"); return p.Unavailable == "exit status 1" && p.RetryAt > 0 })
	e.cloud.do(func() { e.cloud.peak = 0 })
	before := len(e.cloud.calls())
	e.always("one is tried at a time", r, 60, func() bool {
		peak := 0
		e.cloud.do(func() { peak = e.cloud.peak })
		return peak <= 1
	})
	if n := len(e.cloud.calls()) - before; n > 6 {
		t.Errorf("%d starts in that time", n)
	}
	e.eventually("the metrics tell", func() bool {
		return r.metric(t, "millrace_autoscaler_unavailable") == 1 && r.metric(t, "millrace_autoscaler_failed_starts_total") >= 3
	})
	e.cloud.do(func() { e.cloud.crash = false })
	e.eventually("five are ready", func() bool { p := e.info("p"); return e.cloud.count() >= 5 && p.Ready >= 5 && p.Unavailable == "" })
	for _, d := range e.decisions() {
		if d.Action == scale.Unavailable {
			return
		}
	}
	t.Error("no decision says that starts fail")
}

// A worker that was ready and died is replaced; one that dies again and again soon after is a start that failed.
func TestWorkersThatDieSoonMakeThePoolUnavailable(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(slow)
	r := e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	for i := range 4 {
		e.eventually("one is ready", func() bool {
			l := e.launches()
			return len(l) == 1 && l[0].Ready > 0 && l[0].Stopping == 0 && e.cloud.count() == 1
		})
		if n := r.metric(t, "millrace_autoscaler_failed_starts_total"); n != float64(max(0, i-1)) {
			t.Errorf("after %d deaths there are %v failed starts", i, n)
		}
		e.cloud.fail(e.cloud.names()[0], "out of memory")
		e.eventually("it is tidied away", func() bool { return len(e.cloud.stopped()) == i+1 })
	}
	e.eventually("the pool is unavailable", func() bool { return e.info("p").Unavailable == "out of memory" })
}

func TestStartThatNeverBecomesReadyHasFailed(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.held = true
	e.pool(func(p *scale.Pool) { slow(p); p.ColdStart = scale.Duration(50 * time.Millisecond) })
	r := e.run(autoscaler.Config{}, func(t *autoscaler.Timing) { t.StartLimit(300 * time.Millisecond) })
	e.wait(1, 1, 0)
	e.eventually("it is tidied away", func() bool { return len(e.cloud.stopped()) > 0 })
	if r.metric(t, "millrace_autoscaler_failed_starts_total") == 0 {
		t.Error("it has not failed")
	}
	e.eventually("it says what to do", func() bool {
		return strings.Contains(e.info("p").Unavailable, ": if it needs longer, raise cold_start of the pool")
	})
	e.cloud.do(func() { e.cloud.held = false })
	e.cloud.each(func(i *instance) { i.beat.State = cluster.Ready })
	e.eventually("another one is ready", func() bool { p := e.info("p"); return p.Ready >= 1 })
}

// What the provider has room for is learned, and asked for again later.
func TestCapacityIsLearned(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.room = 2
	e.pool(slow)
	r := e.run(autoscaler.Config{})
	e.wait(5, 100, 0)
	e.eventually("two are ready, and the provider is full", func() bool {
		p := e.info("p")
		return p.Ready == 2 && p.Starting == 0 && p.Action == string(scale.AtCapacity) && len(e.launches()) == 2
	})
	if r.metric(t, "millrace_autoscaler_refused_starts_total") == 0 {
		t.Error("no refusal")
	}
	e.cloud.do(func() { e.cloud.room = 0 })
	e.eventually("there is room", func() bool { return e.cloud.count() >= 5 })
}

func TestProviderWithoutAnyRoomIsNotAskedAllTheTime(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	full := atomic.Bool{}
	full.Store(true)
	e.cloud.onStart = func(string) (bool, error) {
		if full.Load() {
			return false, provider.ErrCapacity
		}
		return true, nil
	}
	e.pool(slow)
	e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("it was refused", func() bool { return len(e.cloud.calls()) > 0 && len(e.launches()) == 0 })
	e.always("it is not asked each tick", nil, 40, func() bool { return len(e.cloud.calls()) < 8 })
	full.Store(false)
	e.eventually("one is ready", e.ready(1))
}

// Starts that failed before a refusal do not make it look as if something were started.
func TestRefusalAfterAFailureIsToldAsOne(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	var calls atomic.Int32
	e.cloud.onStart = func(string) (bool, error) {
		if calls.Add(1) == 1 {
			return false, errAway
		}
		return false, fmt.Errorf("no GPU is free: %w", provider.ErrCapacity)
	}
	e.pool(slow)
	e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("it was refused twice", func() bool { return calls.Load() >= 3 })
	ups, told := 0, false
	for _, d := range e.decisions() {
		switch d.Action {
		case scale.ScaleUp:
			ups++
		case scale.Unavailable:
			told = told || strings.Contains(d.Reason, "no GPU is free")
		}
	}
	if n := int(calls.Load()); ups > n || !told {
		t.Errorf("%d decisions to start for %d calls; the refusal was told: %t", ups, n, told)
	}
}

// A pool that cannot work as it is described is not tried again and again, and at once when it was changed.
func TestInvalidPoolWaitsForItsChange(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	invalid := atomic.Bool{}
	invalid.Store(true)
	e.cloud.onStart = func(string) (bool, error) {
		if invalid.Load() {
			return false, provider.ErrInvalid
		}
		return true, nil
	}
	p := e.pool(slow)
	e.run(autoscaler.Config{}, func(t *autoscaler.Timing) { t.Retry(time.Hour, time.Hour) })
	e.wait(1, 50, 0)
	e.eventually("it is unavailable", func() bool { i := e.info("p"); return i.Unavailable != "" })
	if l := e.launches(); len(l) != 0 {
		t.Errorf("%+v", l)
	}
	invalid.Store(false)
	p.Engine.Command = []string{"another"}
	e.update(p)
	e.eventually("one is ready", e.ready(1))
}

// An operator who mends a script applies the same pool again: what failed is tried at once, also by the next leader, and waits again if it fails again.
func TestAPoolThatIsAppliedAgainIsTriedAtOnce(t *testing.T) {
	t.Parallel()
	for name, failure := range map[string]error{"it can never work": provider.ErrInvalid, "it fails": errors.New("exit code 1"), "there is no room": provider.ErrCapacity} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t)
			broken, tries := atomic.Bool{}, atomic.Int32{}
			broken.Store(true)
			e.cloud.onStart = func(string) (bool, error) {
				tries.Add(1)
				if broken.Load() {
					return false, failure
				}
				return true, nil
			}
			p := e.pool(func(p *scale.Pool) { slow(p); p.Max = 1 })
			long := func(t *autoscaler.Timing) { t.Retry(time.Hour, time.Hour); t.Room(time.Hour, time.Hour) }
			r := e.run(autoscaler.Config{}, long)
			e.wait(1, 50, 0)
			e.eventually("it was tried", func() bool { return tries.Load() == 1 })
			e.always("it waits", r, 10, func() bool { return tries.Load() == 1 })
			e.update(p)
			e.eventually("it is tried again", func() bool { return tries.Load() == 2 })
			e.always("it waits again", r, 10, func() bool { return tries.Load() == 2 })
			r.stop()
			e.update(p)
			r = e.run(autoscaler.Config{}, long)
			e.eventually("the next leader tries it", func() bool { return tries.Load() == 3 })
			broken.Store(false)
			e.always("it waits for the operator", r, 10, func() bool { return tries.Load() == 3 })
			e.update(p)
			e.eventually("one is ready", e.ready(1))
		})
	}
}

// AS: what cannot be read is neither nothing nor much.
func TestStaleDispatcherKeepsThePlan(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.mu.Lock()
	e.queues = nil
	e.mu.Unlock()
	e.pool(most(2))
	r := e.run(autoscaler.Config{})
	e.wait(100, 100, 0)
	e.eventually("two are ready", e.ready(2))
	// The dispatcher stops to lead, so that nobody tells the queues.
	e.deposed.Store(true)
	e.seen.Nudge()
	e.eventually("the demand is unknown", func() bool { return e.info("p").Action == string(scale.Unknown) })
	e.always("the plan stands", r, 50, func() bool { return e.cloud.count() == 2 && len(e.cloud.stopped()) == 0 })
	e.eventually("the metric tells", func() bool { return r.metric(t, "millrace_autoscaler_demand_unknown") == 1 })
	e.eventually("it says why", func() bool {
		p := e.info("p")
		return p.Wanted == 2 && strings.Contains(p.Reason, "no dispatcher leads")
	})
	e.mu.Lock()
	e.age = 60
	e.mu.Unlock()
	e.wait(0, 0, 0)
	e.deposed.Store(false)
	e.eventually("what it saw is old", func() bool { return strings.Contains(e.info("p").Reason, "saw the queues 60 s ago") })
	e.mu.Lock()
	e.age = 0
	e.mu.Unlock()
	e.eventually("they go", func() bool { return e.cloud.count() == 0 })
	e.cloud.rules()
}

// A provider that does not answer stops what is done, and no other pool.
func TestProviderThatDoesNotAnswerHoldsUpNoOtherPool(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(slow)
	e.pool(func(p *scale.Pool) {
		slow(p)
		p.Name, p.Models, p.Provider, p.Engine.Command = "other", []job.Model{"n"}, "command", nil
		p.Command = &scale.Command{Start: []string{"x"}, Stop: []string{"x"}, List: []string{"x"}, Timeout: scale.Duration(2 * time.Minute)}
	})
	e.cloud.onList = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	r := e.run(autoscaler.Config{}, func(t *autoscaler.Timing) { t.ListStale(200 * time.Millisecond) })
	e.both(2)
	e.eventually("the other pool is served", func() bool { return e.cloud.elsewhere.count() == 2 })
	e.eventually("the first says why it is not", func() bool { p := e.info("p"); return p.Action == string(scale.Unknown) })
	if e.cloud.count() != 0 {
		t.Error("something was started without knowing what there is")
	}
	e.cloud.do(func() { e.cloud.onList = func(context.Context) error { return errAway } })
	e.eventually("a list that fails is told", func() bool {
		return r.metric(t, "millrace_autoscaler_list_failures_total") > 0 && strings.Contains(e.info("p").Reason, errAway.Error())
	})
	e.cloud.do(func() { e.cloud.onList = nil })
	e.eventually("the first is served too", func() bool { return e.cloud.count() == 2 })
}

// Instances without a launch are taken in, and those that the provider named itself are the ones that were asked for.
func TestInstancesAreAdopted(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	p := e.pool(slow)
	e.cloud.create(p, "p-byhand")
	e.run(autoscaler.Config{})
	e.eventually("it is known", e.ready(1))
	e.wait(2, 100, 0)
	e.eventually("one more is started", e.ready(2))
	if l := e.launches(); len(l) != 2 || l[0].Name != "p-byhand" && l[1].Name != "p-byhand" {
		t.Errorf("%+v", l)
	}
}

func TestProviderNamesItsInstancesItself(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.own = true
	e.pool(most(3))
	e.run(autoscaler.Config{})
	e.wait(100, 100, 0)
	e.eventually("three are ready", e.ready(3))
	var names []string
	for _, l := range e.launches() {
		names = append(names, l.Name)
	}
	if want := []string{"p-pod-1", "p-pod-2", "p-pod-3"}; !slices.Equal(names, want) {
		t.Errorf("launches %q", names)
	}
	e.wait(0, 0, 0)
	e.eventually("they go", func() bool { return e.cloud.count() == 0 && len(e.launches()) == 0 })
	if n := e.cloud.highest(); n != 3 {
		t.Errorf("%d were made", n)
	}
	e.cloud.rules()
}

// A worker that somebody removed is replaced.
func TestWorkerThatVanishedIsReplaced(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(slow)
	e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("one is ready", e.ready(1))
	name := e.cloud.names()[0]
	e.cloud.vanish(name)
	e.eventually("another one is ready", func() bool { return e.ready(1)() && e.cloud.names()[0] != name })
}

// A worker that an operator drains is stopped once it is empty, and replaced.
func TestWorkerDrainedByHandIsReplaced(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(slow)
	e.run(autoscaler.Config{})
	e.wait(1, 50, 0)
	e.eventually("one is ready", e.ready(1))
	name := e.cloud.names()[0]
	e.cloud.set(name, func(i *instance) { i.beat.Running = 1 })
	e.ok(e.seen.OrderDrain(t.Context(), "w-"+name))
	e.eventually("another one is ready", func() bool { p := e.info("p"); return e.cloud.count() == 2 && p.Ready == 1 && p.Draining == 1 })
	e.eventually("it is told for how long it may", func() bool {
		told := false
		e.cloud.do(func() { told = e.cloud.instances[name].limit > 0 })
		return told
	})
	e.cloud.set(name, func(i *instance) { i.beat.Running = 0 })
	e.eventually("it is gone", e.ready(1))
	e.cloud.rules()
}

// Some workloads shrink from one end only.
func TestWorkersGoInTheProvidersOrder(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.cloud.own, e.cloud.ordered = true, true
	e.pool(most(4))
	r := e.run(autoscaler.Config{})
	e.wait(100, 100, 0)
	e.eventually("four are ready", e.ready(4))
	e.cloud.set("p-pod-3", func(i *instance) { i.beat.Running = 1 })
	e.wait(0, 100, 1)
	e.eventually("the last one goes", e.ready(3))
	e.always("the others stay, for the next one is busy", r, 40, func() bool {
		drained := 0
		e.cloud.do(func() {
			for _, i := range e.cloud.instances {
				if !i.drained.IsZero() {
					drained++
				}
			}
		})
		return drained == 0
	})
	e.cloud.set("p-pod-3", func(i *instance) { i.beat.Running = 0 })
	e.wait(0, 0, 0)
	e.eventually("all are gone", func() bool { return e.cloud.count() == 0 && len(e.launches()) == 0 })
	if want := []string{"p-pod-4", "p-pod-3", "p-pod-2", "p-pod-1"}; !slices.Equal(e.cloud.stopped(), want) {
		t.Errorf("%q", e.cloud.stopped())
	}
	e.cloud.rules()
}

// Work spreads over all workers: those that are too many and busy are told to leave it to the others, and told otherwise when they are needed.
func TestWorkersThatAreTooManyYield(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(most(3))
	e.run(autoscaler.Config{})
	e.wait(100, 100, 0)
	e.eventually("three are ready", e.ready(3))
	e.cloud.each(func(i *instance) { i.beat.Running = 1 })
	yielding := func() (n int, name string) {
		e.cloud.do(func() {
			for _, i := range e.cloud.instances {
				if i.beat.Yields {
					n, name = n+1, i.name
				}
			}
		})
		return n, name
	}
	e.wait(0, 1, 3)
	e.eventually("two yield", func() bool { n, _ := yielding(); return n == 2 })
	_, name := yielding()
	e.cloud.set(name, func(i *instance) { i.beat.Running = 0 })
	e.eventually("one that has come to be idle goes", func() bool { return e.cloud.count() == 2 })
	if !slices.Equal(e.cloud.stopped(), []string{name}) {
		t.Errorf("%q", e.cloud.stopped())
	}
	e.wait(100, 100, 2)
	e.eventually("none yields", func() bool { n, _ := yielding(); return n == 0 })
	e.cloud.rules()
}

// A start that hangs holds up neither the others nor the decisions.
func TestStartThatHangsHoldsUpNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	hang, first := make(chan struct{}), make(chan string, 1)
	e.cloud.onStart = func(name string) (bool, error) {
		select {
		case first <- name:
			<-hang
		default:
		}
		return true, nil
	}
	e.pool(func(p *scale.Pool) { slow(p); p.Max = 3 })
	e.run(autoscaler.Config{})
	e.wait(100, 100, 0)
	e.eventually("the other two are ready", func() bool { p := e.info("p"); return p.Ready == 2 && p.Starting == 1 })
	e.eventually("decisions go on", func() bool { return e.info("p").Action == string(scale.AtMax) })
	close(hang)
	e.eventually("all are ready", e.ready(3))
	e.unique(3)
}
