package api

import (
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/millrace/millrace/internal/admission"
	"github.com/millrace/millrace/internal/cluster"
	"github.com/millrace/millrace/internal/job"
)

// pace measures from the workers' heartbeats how fast each model's jobs are done, in jobs and in tokens.
//
// Backlogs are counted in the tokens that jobs are expected to need. A worker tells how many it generates, which is another thing: prompts cost time, too, and answers are shorter than what they may be. So a rate
// is what the workers generate per second, times how many expected tokens that has stood for of late: what was expected of the jobs that ended, by what was generated. Whatever is wrong with expectations then
// cancels out.
type pace struct {
	mu      sync.Mutex
	last    time.Time
	workers map[string]*workerPace // by member
	models  map[job.Model]*modelPace
}

// workerPace is what one worker did.
type workerPace struct {
	// ended jobs, what was expected of them in tokens, and generated tokens so far, as its heartbeat at heard told.
	ended, served, generated int64
	heard                    time.Time
	// busy: it had all it can run, and more work waited.
	busy bool
	// full is how many tokens it generates per second, and fullJobs how many jobs it ends, while it is busy; 0 is unknown. A worker with room says nothing about how fast it could be, nor does one for which nothing waits: a single
	// slow job may be all that it may run, and all that there is.
	full, fullJobs float64
}

// modelPace is what a model's workers did in all.
type modelPace struct {
	jobs float64 // ended per second, over about ten seconds
	// Ended jobs, their expected tokens and generated tokens per second over about a minute in which anything was done.
	longJobs, longServed, longTokens float64
	// expected is the mean expectation of a job in tokens, over the latest that came in here; live that of calls answered on their connection.
	expected, live float64
	// calls are the latest live calls.
	calls []arrival
}

// arrival is a live call that came in: when, and the expected tokens of all calls up to it.
type arrival struct {
	at  time.Time
	sum job.Tokens
}

const (
	// paceWeight is the weight of the newest second in the averages: their memory is about ten seconds; longWeight is that for a minute.
	paceWeight = 0.1
	longWeight = 1.0 / 60
	// riseWeight is the weight of a second in which a full worker did more than it was known to be able to.
	riseWeight = 0.5
	// jobWeight is the weight of the newest job in the mean expectation.
	jobWeight = 0.02
	// callsKept is for how long arrivals are kept, at least: longer than a heartbeat is current.
	callsKept = 5 * time.Second
)

func newPace() *pace {
	return &pace{workers: make(map[string]*workerPace), models: make(map[job.Model]*modelPace)}
}

// of is the model's rate in jobs per second, 0 if none has ended of late.
func (p *pace) of(m job.Model) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if mp := p.models[m]; mp != nil {
		return mp.jobs
	}
	return 0
}

func (p *pace) modelLocked(m job.Model) *modelPace {
	mp := p.models[m]
	if mp == nil {
		mp = &modelPace{}
		p.models[m] = mp
	}
	return mp
}

// came notes that a job which is expected to need so many tokens was let in.
func (p *pace) came(now time.Time, m job.Model, expected job.Tokens, live bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	mp := p.modelLocked(m)
	mean := func(old float64) float64 {
		if old == 0 {
			return float64(expected)
		}
		return old + jobWeight*(float64(expected)-old)
	}
	mp.expected = mean(mp.expected)
	if !live {
		return
	}
	mp.live = mean(mp.live)
	sum := expected
	if n := len(mp.calls); n > 0 {
		sum += mp.calls[n-1].sum
	}
	mp.calls = append(mp.calls, arrival{now, sum})
	if old := mp.before(now.Add(-callsKept)); old > len(mp.calls)/2 {
		mp.calls = append(mp.calls[:0], mp.calls[old:]...)
	}
}

// before is how many of the kept calls came before t.
func (m *modelPace) before(t time.Time) int {
	return sort.Search(len(m.calls), func(i int) bool { return !m.calls[i].at.Before(t) })
}

// since is the expected tokens of the live calls that came in since t, which is less than callsKept ago, and the mean of one.
func (p *pace) since(m job.Model, t time.Time) (sum job.Tokens, mean float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	mp := p.models[m]
	if mp == nil {
		return 0, 0
	}
	n := len(mp.calls)
	if i := mp.before(t); i < n {
		sum = mp.calls[n-1].sum
		if i > 0 {
			sum -= mp.calls[i-1].sum
		}
	}
	return sum, mp.live
}

// mean is the mean expectation of the model's jobs in tokens, 0 if none came in here.
func (p *pace) mean(m job.Model) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if mp := p.models[m]; mp != nil {
		return mp.expected
	}
	return 0
}

// tokens is how many expected tokens the model's workers get done per second when they are full; 0 is unknown. One that was not seen full counts as the mean of those that were. mean is the mean expectation of a job, where none has come in
// here.
func (p *pace) tokens(m job.Model, workers []cluster.Member, mean float64) float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	mp := p.models[m]
	if mp == nil {
		return 0
	}
	if mp.expected > 0 {
		mean = mp.expected
	}
	var tokens, jobs, known, ready float64
	for _, w := range workers {
		if w.Worker == nil || w.Worker.State != cluster.Ready {
			continue
		}
		ready++
		if wp := p.workers[w.ID]; wp != nil && (wp.full > 0 || wp.fullJobs > 0) {
			share := float64(len(w.Worker.Models))
			known++
			tokens += wp.full / share
			jobs += wp.fullJobs / share
		}
	}
	switch {
	case known == 0:
		return 0
	case tokens > 0 && mp.longTokens > 0 && mp.longServed > 0:
		return tokens * ready / known * mp.longServed / mp.longTokens
	case tokens > 0 && mp.longTokens > 0: // 0 as long as no job has ended
		return tokens * ready / known * mean * mp.longJobs / mp.longTokens
	}
	return jobs * ready / known * mean // nothing is generated, as with embeddings
}

// observe takes what the workers say now; waiting are the models for which work waits. A worker of several models counts for each in equal parts.
func (p *pace) observe(now time.Time, workers []cluster.Member, waiting map[job.Model]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	elapsed := now.Sub(p.last).Seconds()
	first := p.last.IsZero()
	p.last = now
	ended, served, generated := make(map[job.Model]float64), make(map[job.Model]float64), make(map[job.Model]float64)
	alive := make(map[string]*workerPace, len(workers))
	for _, w := range workers {
		if w.Worker == nil || len(w.Worker.Models) == 0 {
			continue
		}
		wp := p.workers[w.ID]
		jobs, expected, tokens := 0.0, 0.0, 0.0
		if wp == nil { // a worker's first word says nothing about its speed
			wp = &workerPace{ended: w.Worker.Completed + w.Worker.Failed, served: w.Worker.Served, generated: w.Worker.Generated, heard: w.Heard}
		} else {
			jobs, expected, tokens = wp.hear(w, slices.ContainsFunc(w.Worker.Models, func(m job.Model) bool { return waiting[m] }))
		}
		alive[w.ID] = wp
		share := 1 / float64(len(w.Worker.Models))
		for _, m := range w.Worker.Models {
			ended[m] += jobs * share
			served[m] += expected * share
			generated[m] += tokens * share
		}
	}
	p.workers = alive
	if first || elapsed <= 0 {
		return
	}
	for m, n := range ended {
		mp := p.modelLocked(m)
		if n > 0 || generated[m] > 0 { // an idle second changes nothing about what a job takes
			mp.longJobs += longWeight * (n/elapsed - mp.longJobs)
			mp.longServed += longWeight * (served[m]/elapsed - mp.longServed)
			mp.longTokens += longWeight * (generated[m]/elapsed - mp.longTokens)
		}
	}
	for m, mp := range p.models { // also of a model that has no worker any more: it fades
		mp.jobs = mp.jobs*(1-paceWeight) + ended[m]/elapsed*paceWeight
		if mp.jobs < 0.001 {
			mp.jobs = 0
		}
		if _, served := ended[m]; !served && mp.jobs == 0 && mp.before(now.Add(-callsKept)) == len(mp.calls) {
			delete(p.models, m)
		}
	}
}

// hear takes a worker's heartbeat, and tells what it did since the one before. waits: so does work.
func (wp *workerPace) hear(w cluster.Member, waits bool) (jobs, expected, tokens float64) {
	elapsed := w.Heard.Sub(wp.heard).Seconds()
	if elapsed <= 0 {
		return 0, 0, 0
	}
	ended := w.Worker.Completed + w.Worker.Failed
	jobs, tokens = float64(max(0, ended-wp.ended)), float64(max(0, w.Worker.Generated-wp.generated))
	expected = float64(max(0, w.Worker.Served-wp.served))
	wp.ended, wp.served, wp.generated, wp.heard = ended, w.Worker.Served, w.Worker.Generated, w.Heard
	before := wp.busy
	wp.busy = waits && w.Worker.State == cluster.Ready && (w.Worker.Load > admission.BusyAt || !room(w.Worker, job.Interactive))
	if before && wp.busy {
		weight := paceWeight
		if tokens/elapsed > wp.full { // it can do that: after a start, or beside few jobs, it did less than it can
			weight = riseWeight
		}
		wp.full = smooth(wp.full, tokens/elapsed, weight)
		wp.fullJobs = smooth(wp.fullJobs, jobs/elapsed, paceWeight)
	}
	return jobs, expected, tokens
}

// smooth is an average that begins with its first value.
func smooth(old, v, weight float64) float64 {
	if old == 0 {
		return v
	}
	return old + weight*(v-old)
}
