package worker_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// narrow is an engine that refuses with 429 what is over its capacity.
type narrow struct {
	mu                sync.Mutex // guards what follows
	capacity, running int
	refused           int
	completed         int
	stepAt            []int // after so many completions the capacity is the next one of steps
	steps             []int
}

func (n *narrow) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	if n.running >= n.capacity {
		n.refused++
		n.mu.Unlock()
		reply(429, `{"error":{"message":"full"}}`)(w, r)
		return
	}
	n.running++
	n.mu.Unlock()
	select {
	case <-time.After(150 * time.Millisecond):
	case <-r.Context().Done():
	}
	n.mu.Lock()
	n.running--
	n.completed++
	if len(n.stepAt) > 0 && n.completed >= n.stepAt[0] {
		n.capacity, n.stepAt, n.steps = n.steps[0], n.stepAt[1:], n.steps[1:]
	}
	n.mu.Unlock()
	reply(200, `{"choices":[]}`)(w, r)
}

// TestEngineThatTakesLessThanItsLimitIsNotFlooded: it may run 64 by its configuration, and takes 4, then 32, then 4. All jobs complete, though each may be refused four times only.
func TestEngineThatTakesLessThanItsLimitIsNotFlooded(t *testing.T) {
	t.Parallel()
	const jobs = 200
	e := newEnv(t, time.Minute)
	n := &narrow{capacity: 4, stepAt: []int{40, 160}, steps: []int{32, 4}}
	eng := play(t, n.ServeHTTP)
	p := e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency, c.RetryDelay = 64, 200*time.Millisecond })
	var all []*job.Job
	for i := range jobs {
		all = append(all, e.submit(e.job(chat(fmt.Sprint(i), ""))))
	}
	for _, j := range all {
		e.until("it ends", func() bool { return e.get(j).State.Ended() })
		if rec := e.get(j); rec.State != job.Completed {
			t.Errorf("record %+v", rec)
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.completed != jobs || n.refused == 0 || n.refused > jobs/2 {
		t.Errorf("%d completed, %d were refused", n.completed, n.refused)
	}
	e.nothingHeld(p)
}
