package autoscaler_test

import (
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/millrace/millrace/autoscaler"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/scale"
)

var start = time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)

func api(id, process string, started, heard time.Time, jobs, tokens int64) cluster.Member {
	return cluster.Member{
		Heartbeat: cluster.Heartbeat{ID: id, Role: cluster.RoleAPI, Epoch: process, Started: started.UnixMilli(), Traffic: []cluster.Traffic{{Model: model, Jobs: jobs, Tokens: tokens, Squares: float64(tokens)}}},
		Heard:     heard,
	}
}

func TestArrivalsAreWhatCountersGain(t *testing.T) {
	t.Parallel()
	old := start.Add(-time.Hour)
	tr := autoscaler.NewTraffic(start.Add(-time.Minute))
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	total := func(s int) (jobs int) {
		all, _ := tr.Last(at(s), model)
		for i, a := range all {
			jobs += a.Jobs
			if i > 0 && !a.Start.Equal(all[i-1].Start.Add(scale.Bucket)) {
				t.Errorf("a gap before %s", a.Start)
			}
		}
		return jobs
	}
	// What an API that has long run counted before is of another time.
	tr.Hear(at(1), api("a", "1", old, at(1), 1000, 9000))
	if n := total(60); n != 0 {
		t.Errorf("%d jobs", n)
	}
	tr.Hear(at(11), api("a", "1", old, at(11), 1010, 9100))
	tr.Hear(at(11), api("a", "1", old, at(11), 1010, 9100)) // the same heartbeat once more
	if n := total(60); n != 10 {
		t.Errorf("%d jobs", n)
	}
	// One that has just started counts from zero.
	tr.Hear(at(12), api("b", "2", at(8), at(12), 8, 80))
	if n := total(60); n != 18 {
		t.Errorf("%d jobs", n)
	}
	// A counter that falls was started anew, here under its id.
	tr.Hear(at(20), api("a", "3", at(17), at(20), 4, 40))
	if n := total(60); n != 22 {
		t.Errorf("%d jobs", n)
	}
	// What was not heard for a while came in over that while.
	tr.Hear(at(50), api("a", "3", at(17), at(50), 34, 340))
	all, _ := tr.Last(at(60), model)
	for _, a := range all {
		if a.Start.Equal(at(30)) && (a.Jobs != 5 || a.Tokens != 50) {
			t.Errorf("%+v", a)
		}
	}
	// The bucket that is not full is told apart.
	tr.Hear(at(61), api("a", "3", at(17), at(61), 44, 440))
	tr.Hear(at(62), api("a", "3", at(17), at(62), 54, 540))
	if _, lately := tr.Last(at(62), model); !lately {
		t.Error("nothing came lately")
	}
	if _, lately := tr.Last(at(90), model); lately {
		t.Error("something came lately")
	}
	if all, _ := tr.Last(at(3600), model); len(all) != 120 {
		t.Errorf("%d buckets", len(all))
	}
}

func TestOnlyWholeBucketsAreRecorded(t *testing.T) {
	t.Parallel()
	begun := start.Add(time.Minute)
	old := start.Add(-time.Hour)
	tr := autoscaler.NewTraffic(begun)
	at := func(m float64) time.Time { return start.Add(time.Duration(m * float64(time.Minute))) }
	tr.Hear(at(1), api("a", "1", old, at(1), 0, 0))
	tr.Hear(at(2), api("a", "1", old, at(2), 60, 600))
	tr.Hear(at(6), api("a", "1", old, at(6), 60, 600))
	tr.Hear(at(7), api("a", "1", old, at(7), 90, 900))
	if got := tr.Due(at(9.9), model); len(got) != 0 {
		t.Errorf("%v", got) // the first is cut, the second not over
	}
	// An idle one has its zero.
	if got, want := tr.Due(at(15.1), model), map[time.Time]float64{at(5).Local(): 30, at(10).Local(): 0}; !cmp.Equal(got, want) {
		t.Errorf("%v", got)
	}
	// Nobody knows when something came in that was not heard for long.
	tr.Hear(at(16), api("a", "1", old, at(16), 90, 900))
	tr.Hear(at(27), api("a", "1", old, at(27), 900, 9000))
	got := tr.Due(at(31), model)
	for _, m := range []float64{15, 20, 25} {
		if _, there := got[at(m).Local()]; there {
			t.Errorf("the bucket at %v minutes is told", m)
		}
	}
}

func TestWorkerIsMeasuredWhileItIsFull(t *testing.T) {
	t.Parallel()
	beat := func(s float64, served, ended int64, load float64) cluster.Member {
		return cluster.Member{
			Heartbeat: cluster.Heartbeat{ID: "w", Worker: &cluster.WorkerInfo{State: cluster.Ready, Running: 8, Load: load, Served: served, Completed: ended, Free: 100}},
			Heard:     start.Add(time.Duration(s * float64(time.Second))),
		}
	}
	var m autoscaler.Meter
	var rates []float64
	hear := func(s float64, served, ended int64, load float64) {
		if rate, ok := m.Hear(beat(s, served, ended, load), false); ok {
			rates = append(rates, rate)
		}
	}
	// Eight jobs of 100 tokens at once, each 4 s long: 200 tokens a second, whenever one looks.
	for s := range 60 {
		waves := int64(s / 4)
		hear(float64(s), waves*800, waves*8, 0.9)
	}
	if len(rates) == 0 {
		t.Fatal("nothing is measured")
	}
	for _, r := range rates {
		if math.Abs(r-200) > 1e-6 {
			t.Errorf("%v", rates)
		}
	}
	// One that is not full tells nothing.
	rates, m = nil, autoscaler.Meter{}
	for s := range 60 {
		hear(float64(s), int64(s)*10, int64(s), 0.3)
	}
	// Nor one that is full for a moment.
	for s := 60; s < 120; s++ {
		load := 0.9
		if s%8 == 0 {
			load = 0.3
		}
		hear(float64(s), int64(s)*10, int64(s), load)
	}
	if len(rates) != 0 {
		t.Errorf("%v", rates)
	}
	// A restart begins anew.
	hear(121, 0, 0, 0.9)
	if len(rates) != 0 {
		t.Errorf("%v", rates)
	}
	// It may be full though its cache is not: work waits, and it has no room.
	rates, m = nil, autoscaler.Meter{}
	for s := range 30 {
		b := beat(float64(s), int64(s)*10, int64(s), 0.3)
		b.Worker.Limit = 8
		if rate, ok := m.Hear(b, true); ok {
			rates = append(rates, rate)
		}
	}
	if len(rates) == 0 || math.Abs(rates[0]-10) > 1e-6 {
		t.Errorf("%v", rates)
	}
}

func TestWhatWasLearnedReplacesThePoolsFigures(t *testing.T) {
	t.Parallel()
	p := &scale.Pool{ColdStart: scale.Duration(time.Minute), TokensPerSecond: 500}
	var l autoscaler.Learned
	if c := l.ColdStart(p); c != (scale.ColdStart{P50: time.Minute, P90: time.Minute}) || l.Throughput(p) != 500 {
		t.Errorf("%+v", c)
	}
	for s := range 100 {
		l.Start(time.Duration(s+1) * time.Second)
	}
	if c := l.ColdStart(p); c != (scale.ColdStart{P50: 76 * time.Second, P90: 96 * time.Second, Samples: 50}) {
		t.Errorf("%+v", c)
	}
	for _, v := range []float64{100, 110, 5000, 90, 105} {
		l.Rate(v)
	}
	if v := l.Throughput(p); v != 105 {
		t.Errorf("%v", v)
	}
}

// A pool that says how long its starts take has four times that from the first one on, whatever quick ones have taught.
func TestAStartHasTheTimeThatItsPoolSays(t *testing.T) {
	t.Parallel()
	p := &scale.Pool{ColdStart: scale.Duration(10 * time.Minute)}
	var l autoscaler.Learned
	if got := l.StartLimit(p); got != 40*time.Minute {
		t.Errorf("the first: %s", got)
	}
	l.Start(10 * time.Second)
	if got := l.StartLimit(p); got != 40*time.Minute {
		t.Errorf("after a quick one: %s", got)
	}
	l.Start(15 * time.Minute)
	if got := l.StartLimit(p); got != time.Hour {
		t.Errorf("after a slow one: %s", got)
	}
	p.ColdStart = scale.Duration(time.Minute)
	var other autoscaler.Learned
	if got := other.StartLimit(p); got != 5*time.Minute {
		t.Errorf("by default: %s", got)
	}
}

func TestPausesDouble(t *testing.T) {
	t.Parallel()
	var l autoscaler.Learned
	now := start
	var pauses []time.Duration
	for range 8 {
		next := l.Fail(now, "why")
		l.Fail(now.Add(time.Second), "of the same wave")
		pauses = append(pauses, next.Sub(now))
		now = next
	}
	s := time.Second
	if want := []time.Duration{5 * s, 10 * s, 20 * s, 40 * s, 80 * s, 160 * s, 300 * s, 300 * s}; !cmp.Equal(pauses, want) {
		t.Errorf("%v", pauses)
	}
	pauses = nil
	for range 6 {
		next := l.Refuse(now, 3)
		pauses = append(pauses, next.Sub(now))
		now = next
	}
	m := time.Minute
	if want := []time.Duration{m, 2 * m, 4 * m, 8 * m, 15 * m, 15 * m}; !cmp.Equal(pauses, want) {
		t.Errorf("%v", pauses)
	}
}

// Another process's clock may be ahead.
func TestPausesThatAreTakenOverAreNoLongerThanTheLongest(t *testing.T) {
	t.Parallel()
	var l autoscaler.Learned
	retry, room := l.Fail(start.Add(time.Hour), "why"), l.Refuse(start.Add(time.Hour), 3)
	if a, b := l.Bound(start); !a.Equal(start.Add(5*time.Minute)) || !b.Equal(start.Add(15*time.Minute)) {
		t.Errorf("until %s and %s", a, b)
	}
	var other autoscaler.Learned
	other.Fail(start.Add(time.Hour), "why")
	other.Refuse(start.Add(time.Hour), 3)
	if a, b := other.Bound(start.Add(time.Hour)); !a.Equal(retry) || !b.Equal(room) {
		t.Errorf("until %s and %s", a, b)
	}
}

// What a pool gives its commands holds for all three.
func TestCommandsHaveTheTimeThatTheirPoolGives(t *testing.T) {
	t.Parallel()
	p := &scale.Pool{Drain: scale.Duration(10 * time.Minute)}
	type limits struct{ List, Stop, Stale time.Duration }
	of := func() limits {
		list, stop, stale := autoscaler.Limits(p)
		return limits{list, stop, stale}
	}
	if got, want := of(), (limits{30 * time.Second, 12 * time.Minute, 45 * time.Second}); got != want {
		t.Errorf("%v, want %v", got, want)
	}
	p.Command = &scale.Command{Timeout: scale.Duration(5 * time.Minute)}
	if got, want := of(), (limits{310 * time.Second, 15*time.Minute + 10*time.Second, 635 * time.Second}); got != want {
		t.Errorf("%v, want %v", got, want)
	}
	p.Command.Timeout = scale.Duration(time.Second)
	if got, want := of(), (limits{30 * time.Second, 12 * time.Minute, 75 * time.Second}); got != want {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestDemandIsAllThatIsThere(t *testing.T) {
	t.Parallel()
	dispatcher := cluster.Member{Heartbeat: cluster.Heartbeat{Queues: []cluster.QueueInfo{
		{Model: "m", ByClass: map[job.Class]cluster.Backlog{job.Standard: {Jobs: 10, Tokens: 1000}, job.Batch: {Jobs: 4, Tokens: 800}}, Delivered: map[job.Class]int{job.Standard: 4}},
		{Model: "n", Total: cluster.Backlog{Jobs: 2, Tokens: 20}, Delivered: map[job.Class]int{job.Interactive: 1}}, // of an older dispatcher
		{Model: "x", ByClass: map[job.Class]cluster.Backlog{job.Standard: {Jobs: 99, Tokens: 99}}},
	}}}
	calls := cluster.Member{Heartbeat: cluster.Heartbeat{Role: cluster.RoleAPI, Traffic: []cluster.Traffic{{Model: "m", WaitingCalls: 3, WaitingTokens: 30, RunningCalls: 2, RunningTokens: 40}}}}
	worker := cluster.Member{Heartbeat: cluster.Heartbeat{Role: cluster.RoleWorker, Worker: &cluster.WorkerInfo{Models: []job.Model{"n"}, Running: 2, InHand: 1}}}
	models := []job.Model{"m", "n"}
	waiting, inFlight, nowhere := autoscaler.Demand(models, dispatcher, 0, calls, calls, worker)
	want := map[job.Class]scale.Amount{job.Interactive: {Jobs: 6, Tokens: 60}, job.Standard: {Jobs: 7, Tokens: 610}, job.Batch: {Jobs: 4, Tokens: 800}}
	if !cmp.Equal(waiting, want) || inFlight != (scale.Amount{Jobs: 9, Tokens: 490}) || nowhere != 6 {
		t.Errorf("%v, %v, %d", waiting, inFlight, nowhere)
	}
	// Delivered jobs that no worker has wait for their retry.
	waiting, inFlight, _ = autoscaler.Demand(models, dispatcher, 5, calls, calls, worker)
	want[job.Standard] = scale.Amount{Jobs: 12, Tokens: 1020}
	if !cmp.Equal(waiting, want) || inFlight != (scale.Amount{Jobs: 4, Tokens: 80}) {
		t.Errorf("%v, %v", waiting, inFlight)
	}

	var a autoscaler.Absence
	var least []int
	for i, n := range []int{3, 5, 4, 4, 0, 6, 6, 6, 6, 6} {
		least = append(least, a.Add(start.Add(time.Duration(i)*time.Second), n, 3*time.Second))
	}
	if want := []int{0, 0, 0, 3, 0, 0, 0, 0, 6, 6}; !cmp.Equal(least, want) {
		t.Errorf("%v", least)
	}
}

func TestManyHeapsOfWorkBecomeFew(t *testing.T) {
	t.Parallel()
	var dues []scale.Due
	for i := range 100 {
		dues = append(dues, scale.Due{Amount: scale.Amount{Jobs: 1, Tokens: 10}, By: start.Add(time.Duration(99-i) * time.Minute)})
	}
	got := autoscaler.Condense(dues)
	var sum scale.Amount
	for i, d := range got {
		sum.Jobs += d.Jobs
		sum.Tokens += d.Tokens
		if i > 0 && d.By.Before(got[i-1].By) {
			t.Error("not in order")
		}
	}
	if len(got) != 20 || sum != (scale.Amount{Jobs: 100, Tokens: 1000}) || !got[0].By.Equal(start) {
		t.Errorf("%d heaps, %v", len(got), sum)
	}
}

// Arrivals are recorded once, whoever leads, zeros too; and what is usual is learned from them.
func TestArrivalsAreRecordedAndLearned(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.pool(func(p *scale.Pool) { p.Models = []job.Model{"m", "idle"}; slow(p) })
	now := time.Now()
	bucket := now.Truncate(scale.SeasonBucket)
	heard := func(a *autoscaler.Autoscaler) {
		tr := autoscaler.NewTraffic(now.Add(-20 * time.Minute))
		for m := 20; m >= 0; m-- {
			at := now.Add(-time.Duration(m) * time.Minute)
			tr.Hear(at, api("x", "x", now.Add(-time.Hour), at, int64(20-m)*10, int64(20-m)*100))
		}
		a.HeardBefore(tr)
	}
	want := func() bool {
		rows, err := e.ledger.Arrivals(t.Context(), []job.Model{"m", "idle"}, 0)
		e.ok(err)
		n := 0
		for _, r := range rows {
			if r.Start.Time().Before(bucket.Add(-15 * time.Minute)) {
				t.Fatalf("%+v was not heard in whole", r)
			}
			if !r.Start.Time().Before(bucket) {
				continue // it has ended meanwhile
			}
			n++
			if r.Model == "m" && (r.Jobs != 50 || r.Tokens != 500) || r.Model == "idle" && r.Jobs != 0 {
				t.Fatalf("%+v", r)
			}
		}
		return n == 6
	}
	first := e.runOn(e.cluster(), e.ledger, autoscaler.Config{}, heard)
	e.eventually("three buckets of each model are recorded", want)
	first.stop()
	seasons := make(chan *scale.Season, 1)
	e.runOn(e.cluster(), e.ledger, autoscaler.Config{}, func(a *autoscaler.Autoscaler) {
		heard(a)
		a.DecideBy(func(s scale.Sample, h scale.History, p *scale.Pool) scale.Decision {
			if h.Season != nil {
				select {
				case seasons <- h.Season:
				default:
				}
			}
			return scale.Decide(s, h, p)
		})
	})
	<-seasons
	e.always("the next leader does not record them once more", nil, 10, want)
}
