package worker_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/engine"
	"github.com/millrace/millrace/internal/engine/emulator"
	"github.com/millrace/millrace/internal/job"
	"github.com/millrace/millrace/internal/schedule"
)

// page is what an engine says of itself. It is told in vLLM's words.
type page struct {
	mu          sync.Mutex // guards what follows
	capacity    int        // tokens
	usage       float64    // 0 to 1
	running     int
	waiting     int
	preemptions int
	eachTime    func(*page) // changes it before it is told, nil: nothing does
	told        int         // how often
	engine      http.Handler
}

func (p *page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/metrics" {
		p.engine.ServeHTTP(w, r)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told++
	if p.eachTime != nil {
		p.eachTime(p)
	}
	_, _ = fmt.Fprintf(w, "vllm:num_requests_running %d\nvllm:num_requests_waiting %d\nvllm:kv_cache_usage_perc %v\nvllm:num_preemptions_total %d\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"%d\"} 1\n",
		p.running, p.waiting, p.usage, p.preemptions, p.capacity/16+1)
}

// then has f change the page each time before it is told, from here on.
func (p *page) then(f func(*page)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.eachTime = f
}

// more waits until the page was told n times more.
func (p *page) more(e *env, n int) {
	e.Helper()
	times := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.told
	}
	from := times()
	e.until("the page is read", func() bool { return times() >= from+n })
}

func asVLLM(c *workerConfig) { c.engine.Kind = engine.VLLM }

// TestEngineThatSaysForEverThatItIsEmptyIsNotOverfilled: a page that does not show what runs is worth nothing, and the worker's own ledger counts.
func TestEngineThatSaysForEverThatItIsEmptyIsNotOverfilled(t *testing.T) {
	t.Parallel()
	// Of 6,400 tokens 97 % may be used. A job takes 96, and a margin of 16.
	const jobs, capacity, cost = 100, 6400, 96
	const bound = capacity * 97 / 100 / (cost + 16)
	for name, p := range map[string]*page{
		"nothing runs, and nothing is used":       {},
		"nothing is used by many":                 {running: jobs},
		"it stands still since there was one job": {running: 1, usage: 0.02},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, time.Minute)
			p.capacity, p.engine = capacity, play(t, reply(200, `{"choices":[]}`))
			door := keep(t, p)
			w := e.work(door.URL, asVLLM)
			var all []*job.Job
			for i := range jobs {
				all = append(all, e.submit(e.job(chat(fmt.Sprint(i), ""), func(j *job.Job) { j.Cost = job.Cost{Prompt: cost, Output: 1, Answers: 1} })))
			}
			e.until("jobs run", func() bool { now, _, _ := door.there(); return now > bound/2 })
			p.more(e, 12)
			if _, most, _ := door.there(); most > bound {
				t.Errorf("%d jobs run at once in a cache for %d", most, bound)
			}
			p.then(func(p *page) { p.usage = 0 })
			door.open()
			for _, j := range all {
				e.completed(j)
			}
			if _, most, _ := door.there(); most > bound {
				t.Errorf("%d jobs ran at once in a cache for %d", most, bound)
			}
			e.nothingHeld(w)
		})
	}
}

// TestMetricsThatGoWrongLetFewRun: with each thing that may be wrong with the page all jobs complete, and no more run at once than is allowed where nothing is known.
func TestMetricsThatGoWrongLetFewRun(t *testing.T) {
	t.Parallel()
	const jobs, configured, blind = 100, 5, 8
	for fault, tt := range map[emulator.MetricsFault]struct {
		noticed string // the metric that says so
		most    int
	}{
		emulator.MetricsMissing: {"millrace_worker_capacity_estimated", configured},
		emulator.MetricsNaN:     {"millrace_worker_capacity_estimated", configured},
		emulator.MetricsGarbage: {"millrace_worker_engine_scrape_errors_total", blind},
		emulator.MetricsSlow:    {"millrace_worker_engine_scrape_errors_total", blind},
	} {
		t.Run(string(fault), func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, time.Minute)
			eng, _ := emulate(t, emulator.Config{})
			door := keep(t, eng.Handler())
			door.open()
			p := e.work(door.URL, func(c *workerConfig) { c.engine.MaxConcurrency = configured })
			e.ok(eng.SetFaults(emulator.Faults{Metrics: fault}))
			e.until("it is noticed", func() bool { return gauge(e, p, tt.noticed) > 0 })
			var all []*job.Job
			for i := range jobs {
				body := chat(fmt.Sprintf("%d [[emulator:tokens=10,token-delay=2ms]]", i), "")
				all = append(all, e.submit(e.job(body, costed(t, body), func(j *job.Job) { j.Events = i%2 == 0 })))
			}
			for _, j := range all {
				e.completed(j)
			}
			if _, most, _ := door.there(); most > tt.most || most < 2 {
				t.Errorf("%d ran at once, want at most %d", most, tt.most)
			}
			e.ok(eng.SetFaults(emulator.Faults{}))
			e.nothingHeld(p)
		})
	}
}

// TestMetricsThatWereNeverGoodLetNothingRun: of garbage nobody knows what it is. Without any page the configuration counts.
func TestMetricsThatWereNeverGoodLetNothingRun(t *testing.T) {
	t.Parallel()
	const jobs, configured = 30, 3
	e := newEnv(t, time.Minute)
	eng, _ := emulate(t, emulator.Config{Faults: emulator.Faults{Metrics: emulator.MetricsGarbage}})
	door := keep(t, eng.Handler())
	door.open()
	p := e.start(door.URL, func(c *workerConfig) { c.engine.Kind, c.engine.MaxConcurrency = engine.VLLM, configured })
	var all []*job.Job
	for i := range jobs {
		all = append(all, e.submit(e.job(chat(fmt.Sprintf("%d [[emulator:tokens=4,token-delay=1ms]]", i), ""))))
	}
	e.until("it says what is wrong", func() bool {
		err := p.Ready()
		return err != nil && strings.Contains(err.Error(), "metrics")
	})
	if _, _, sum := door.there(); sum != 0 {
		t.Errorf("%d jobs ran on an engine of which nothing is known", sum)
	}
	e.ok(eng.SetFaults(emulator.Faults{Metrics: emulator.MetricsMissing}))
	for _, j := range all {
		e.completed(j)
	}
	if _, most, _ := door.there(); most > configured {
		t.Errorf("%d ran at once, want at most %d", most, configured)
	}
}

// TestPullsStopWhileTheEngineHasTooMuch, whatever its cache says, and start again: while requests wait inside of it, and while it preempts.
func TestPullsStopWhileTheEngineHasTooMuch(t *testing.T) {
	t.Parallel()
	for brake, worse := range map[string]func(*page){
		schedule.BrakeWaiting:    func(p *page) { p.waiting += 3 },
		schedule.BrakePreempting: func(p *page) { p.preemptions += 2 },
	} {
		t.Run(brake, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, time.Minute)
			p := &page{capacity: 64_000, usage: 0.32, running: 8, engine: play(t, reply(200, `{"choices":[]}`))}
			door := keep(t, p)
			w := e.work(door.URL, asVLLM)
			all := []*job.Job{e.submit(e.job(chat("a", ""))), e.submit(e.job(chat("b", "")))}
			e.until("both run", func() bool { now, _, _ := door.there(); return now == 2 })
			free := gauge(e, w, "millrace_worker_kv_free_tokens")

			p.then(worse)
			e.until("it brakes", func() bool { return e.member(w).Brake == brake })
			e.until("no pull is left", func() bool { return e.pulls() == 0 })
			for i := range 10 {
				all = append(all, e.submit(e.job(chat(fmt.Sprint(i), ""))))
			}
			p.more(e, 6)
			if now, _, _ := door.there(); now != 2 || e.pulls() != 0 || w.Reserved().InHand != 0 {
				t.Errorf("%d run, %+v, %d pulls", now, w.Reserved(), e.pulls())
			}

			p.then(func(p *page) { p.waiting = 0 })
			e.until("it goes on", func() bool { now, _, _ := door.there(); return now > 2 })
			if now := gauge(e, w, "millrace_worker_kv_free_tokens"); brake == schedule.BrakePreempting && now > free*0.9 {
				t.Errorf("it fills the cache as before: %v tokens are free, %v were", now, free)
			}
			door.open()
			for _, j := range all {
				e.completed(j)
				if rec := e.get(j); len(rec.Attempts) != 1 || rec.Charged+rec.Uncharged != 0 {
					t.Errorf("record %+v", rec)
				}
			}
		})
	}
}
