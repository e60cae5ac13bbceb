package worker_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/millrace/millrace/internal/job"
)

// TestBatchTricklesWhileInteractiveWorkWaits: with both backlogged, batch work gets its small share, and no more.
func TestBatchTricklesWhileInteractiveWorkWaits(t *testing.T) {
	t.Parallel()
	const each, watched = 300, 240
	e := newEnv(t, time.Minute)
	eng := play(t, func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(20 * time.Millisecond)
		reply(200, `{"choices":[]}`)(w, r)
	})
	for i := range each {
		for _, c := range []job.Class{job.Interactive, job.Batch} {
			e.submit(e.job(chat(fmt.Sprint(c, i), ""), func(j *job.Job) { j.Class = c }))
		}
	}
	e.work(eng.URL, generic, func(c *workerConfig) { c.engine.MaxConcurrency = 4 })
	e.until("many have started", func() bool { return len(eng.list()) >= watched })
	batch := 0
	for _, s := range eng.list()[:watched] {
		if strings.Contains(s.body, string(job.Batch)) {
			batch++
		}
	}
	t.Logf("%d of %d were batch jobs", batch, watched)
	// One of ten is due, and a few may start where a busy machine delays the pulls of the others.
	if batch < watched/20 || batch > watched/5 {
		t.Errorf("%d of %d starts were batch jobs", batch, watched)
	}
}
