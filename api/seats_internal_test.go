package api

import (
	"testing"
	"time"

	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// seats is a worker with an almost empty cache whose engine runs 256 sequences at once, of which 248 are for batch work.
func seats(change ...func(*cluster.WorkerInfo)) cluster.Member {
	w := &cluster.WorkerInfo{
		State: cluster.Ready, Models: []job.Model{"m"}, Capacity: 190_000, Free: 160_000, Load: 248.0 / 256, CacheLoad: 0.15, Running: 248, Sequences: 248, BatchLimit: 248,
	}
	for _, f := range change {
		f(w)
	}
	return cluster.Member{Heartbeat: cluster.Heartbeat{ID: "w", Role: cluster.RoleWorker, Worker: w}}
}

func TestWorkerBoundByItsPlacesIsFull(t *testing.T) {
	t.Parallel()
	run := func(jobs, sequences int) func(*cluster.WorkerInfo) {
		return func(w *cluster.WorkerInfo) { w.Running, w.Sequences = jobs, sequences }
	}
	line := func(w *cluster.WorkerInfo) { w.PlaceLimit, w.BatchLimit = 288, 248 }
	const mean, rate = 100, 1000.0
	for name, tt := range map[string]struct {
		worker cluster.Member
		class  job.Class
		before int // jobs
		reason string
		eta    float64
	}{
		"batch work has its places":                            {worker: seats(), class: job.Batch, before: 86, reason: reasonLimit, eta: 8.7},
		"the first of it waits, too":                           {worker: seats(), class: job.Batch, reason: reasonLimit, eta: 0.1},
		"other work has the last places":                       {worker: seats(), class: job.Standard, reason: reasonDispatching},
		"some have ended, and more wait":                       {worker: seats(run(222, 222)), class: job.Batch, before: 86, reason: reasonLimit, eta: 8.7},
		"some have ended, and few wait":                        {worker: seats(run(222, 222)), class: job.Batch, before: 25, reason: reasonDispatching},
		"jobs of many sequences":                               {worker: seats(run(62, 248)), class: job.Batch, reason: reasonLimit, eta: 0.1},
		"an older worker tells no sequences":                   {worker: seats(run(248, 0)), class: job.Batch, reason: reasonLimit, eta: 0.1},
		"the line inside the engine is full":                   {worker: seats(line, run(288, 288)), class: job.Interactive, reason: reasonLimit, eta: 0.1},
		"the line inside the engine has a place":               {worker: seats(line, run(287, 287)), class: job.Standard, reason: reasonDispatching},
		"a limit of the engine's own counts sequences, too":    {worker: seats(func(w *cluster.WorkerInfo) { w.Limit, w.BatchLimit = 248, 0 }, run(62, 248)), class: job.Standard, reason: reasonLimit, eta: 0.1},
		"without a bound on sequences the cache alone decides": {worker: seats(func(w *cluster.WorkerInfo) { w.BatchLimit = 0 }), class: job.Batch, before: 1000, reason: reasonDispatching},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			workers := []cluster.Member{tt.worker}
			reason := blocking(workers, tt.class, tt.before)
			got := eta(ahead{jobs: tt.before, tokens: float64(tt.before * mean)}, mean, reason == reasonDispatching, workers, rate)
			if reason != tt.reason || got == nil || *got != tt.eta {
				t.Errorf("reason %s, in %v; want %s, in %v", reason, got, tt.reason, tt.eta)
			}
		})
	}
	full, free := seats(), seats(run(100, 100))
	for before, want := range map[int]string{147: reasonDispatching, 148: reasonLimit} {
		if got := blocking([]cluster.Member{full, free}, job.Batch, before); got != want {
			t.Errorf("behind %d jobs, with 148 places: %s", before, got)
		}
	}
}

// TestPaceOfAWorkerBoundByItsPlaces: its rate becomes known though its cache is almost empty.
func TestPaceOfAWorkerBoundByItsPlaces(t *testing.T) {
	t.Parallel()
	p, now := newPace(), time.Now()
	for i := range int64(5) {
		w := seats()
		w.Heard = now.Add(time.Duration(i) * time.Second)
		w.Worker.Completed, w.Worker.Generated = 20*i, 1000*i
		p.observe(w.Heard, []cluster.Member{w}, map[job.Model]bool{"m": true})
	}
	if got := p.tokens("m", []cluster.Member{seats()}, 100); got < 1900 || got > 2100 {
		t.Errorf("%v expected tokens a second, want 20 jobs of 100", got)
	}
	// A job that came in here says nothing of batches' lines: what the worker tells of those that ended does.
	p.came(now, "m", 10, false)
	for i := range int64(5) {
		w := seats()
		w.Heard = now.Add(time.Duration(5+i) * time.Second)
		w.Worker.Completed, w.Worker.Generated, w.Worker.Served = 20*(5+i), 1000*(5+i), 2000*i
		p.observe(w.Heard, []cluster.Member{w}, map[job.Model]bool{"m": true})
	}
	if got := p.tokens("m", []cluster.Member{seats()}, 100); got < 800 || got > 2100 { // it was not told for half of the time
		t.Errorf("%v expected tokens a second after a small job, want up to 20 jobs of 100", got)
	}
}

// TestWhatWaitsDecidesTheClass: the reason is that of what starts next, the last start that of what starts last.
func TestWhatWaitsDecidesTheClass(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		info cluster.QueueInfo
		want waits
	}{
		"nothing":                       {},
		"batch work":                    {info: cluster.QueueInfo{Waiting: map[job.Class]int{job.Batch: 87, job.Standard: 0}}, want: waits{jobs: 87, first: job.Batch, firsts: 87, last: job.Batch}},
		"lines that are not queued yet": {info: cluster.QueueInfo{BatchLines: map[job.Tenant]int{"a": 9000, "b": 5}, BatchTokens: 900_500}, want: waits{lines: 9005, tokens: 900_500, first: job.Batch, firsts: 9005, last: job.Batch}},
		"a call before batch work":      {info: cluster.QueueInfo{Waiting: map[job.Class]int{job.Batch: 87, job.Interactive: 1}}, want: waits{jobs: 88, first: job.Interactive, firsts: 1, last: job.Batch}},
		"a tenant's line of batch jobs": {info: cluster.QueueInfo{WaitingLines: map[job.Tenant]int{"a": 4}, Lines: map[job.Class]int{job.Batch: 4}}, want: waits{jobs: 4, first: job.Batch, firsts: 4, last: job.Batch}},
		"a line of whatever class":      {info: cluster.QueueInfo{WaitingLines: map[job.Tenant]int{"a": 4}}, want: waits{jobs: 4, first: job.Standard, firsts: 4, last: job.Standard}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q := modelQueueObject{Waiting: tt.info.Waiting, WaitingLines: tt.info.WaitingLines, BatchLines: tt.info.BatchLines}
			if got := waitingOf(&q, &tt.info); got != tt.want {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
		})
	}
}
